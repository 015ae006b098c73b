//! Collective operations on shared tiles. Elementwise ones give each warp whole rows and each lane every 32nd
//! column; running products give each thread whole columns.

use cuda_std::ptx;

use super::{DeviceElement, Shared, THREADS, Warpgroup};
use crate::math::{flush, rsqrt};
use crate::params::Matrix;
use crate::tile::{DIAGONAL_SPLIT, floored_decay, splits_diagonal};

impl Warpgroup<'_> {
    /// Calls `f(row, column)` for this thread's share of `rows` x `cols` elements.
    #[inline(always)]
    pub(super) fn each(&self, rows: u32, cols: u32, mut f: impl FnMut(u32, u32)) {
        let (warp, lane) = self.warp_lane();
        let mut r = warp;
        while r < rows {
            let mut c = lane;
            while c < cols {
                f(r, c);
                c += 32;
            }
            r += 4;
        }
    }

    /// Calls `f(column)` for this thread's share of `cols` columns.
    #[inline(always)]
    pub(super) fn each_column(&self, cols: u32, mut f: impl FnMut(u32)) {
        let mut c = self.thread;
        while c < cols {
            f(c);
            c += THREADS;
        }
    }

    /// tile(r, c) = f(r, c).
    #[inline(always)]
    pub fn fill<E: DeviceElement>(&mut self, tile: Shared<E>, f: impl Fn(usize, usize) -> f32) {
        let (rows, cols) = tile.extent();
        // SAFETY: inside the tile.
        self.each(rows, cols, |r, c| unsafe { E::store(tile.at(r, c), f(r as usize, c as usize)) });
    }

    /// Loads `source` into `tile`; where the tile is larger it becomes zero.
    #[inline(always)]
    pub fn load<E: DeviceElement>(&mut self, tile: Shared<E>, source: Matrix) {
        self.load_map(tile, source, 0.0, |x| x);
    }

    /// tile(r, c) = f(source(r, c)), and `fill` where the tile is larger than the source.
    #[inline(always)]
    pub fn load_map<E: DeviceElement>(&mut self, tile: Shared<E>, source: Matrix, fill: f32, f: impl Fn(f32) -> f32) {
        let (rows, cols) = tile.extent();
        self.each(rows, cols, |r, c| {
            let inside = (r as usize) < source.rows && (c as usize) < source.cols;
            // SAFETY: inside matrix and tile.
            unsafe {
                let x = if inside { f(source.load(r as usize, c as usize)) } else { fill };
                E::store(tile.at(r, c), x);
            }
        });
    }

    /// tile(r, c) = f(tile(r, c), row(0, c)): applies a row of parameters from global memory in place.
    #[inline(always)]
    pub fn map_with_row(&mut self, tile: Shared<f32>, rows: usize, row: Option<Matrix>, f: impl Fn(f32, f32) -> f32) {
        let (_, cols) = tile.extent();
        self.each(rows as u32, cols, |r, c| {
            // SAFETY: inside matrix and tile.
            unsafe {
                let parameter = match &row {
                    Some(row) => row.load(0, c as usize),
                    None => 0.0,
                };
                let at = tile.at(r, c);
                f32::store(at, f(f32::load(at), parameter));
            }
        });
    }

    /// tile(r, c) *= column(r, 0) * factor, in place.
    #[inline(always)]
    pub fn scale_rows(&mut self, tile: Shared<f32>, column: Shared<f32>, factor: f32) {
        let (rows, cols) = tile.extent();
        self.each(rows, cols, |r, c| {
            let at = tile.at(r, c);
            // SAFETY: inside the tiles.
            unsafe { f32::store(at, f32::load(at) * (f32::load(column.at(r, 0)) * factor)) };
        });
    }

    /// Rounds accumulated values into their operand copy; nothing to do if `wide` is the operand itself.
    #[inline(always)]
    pub fn to_operand<E: DeviceElement>(&mut self, operand: Shared<E>, wide: Shared<f32>) {
        if !E::WIDE {
            self.convert(operand, wide, |x| x);
        }
    }

    /// Copies a tile, rounded to the destination's type, each element through `f`.
    #[inline(always)]
    pub fn convert<E: DeviceElement, F: DeviceElement>(
        &mut self,
        to: Shared<E>,
        from: Shared<F>,
        f: impl Fn(f32) -> f32,
    ) {
        let (rows, cols) = to.extent();
        // SAFETY: inside the tiles.
        self.each(rows, cols, |r, c| unsafe { E::store(to.at(r, c), f(F::load(from.at(r, c)))) });
    }

    /// Stores the part of a tile that `target` covers.
    #[inline(always)]
    pub fn store<E: DeviceElement>(&mut self, target: Matrix, tile: Shared<E>) {
        self.each(target.rows as u32, target.cols as u32, |r, c| {
            // SAFETY: inside tile and matrix; the kernel gives each element to one block.
            unsafe { target.store(r as usize, c as usize, E::load(tile.at(r, c))) };
        });
    }

    /// column(r, 0) = 1 / sqrt(sum over c of source(r, c)^2 + epsilon); rows that the source lacks become 0.
    #[inline(always)]
    pub fn inverse_norms(&mut self, column: Shared<f32>, source: Matrix, epsilon: f32) {
        let (warp, lane) = self.warp_lane();
        let (rows, _) = column.extent();
        let mut r = warp;
        while r < rows {
            let mut sum = 0.0;
            if (r as usize) < source.rows {
                let mut c = lane as usize;
                while c < source.cols {
                    // SAFETY: inside the matrix.
                    let x = unsafe { source.load(r as usize, c) };
                    sum += x * x;
                    c += 32;
                }
            }
            // Not over an array of distances, which would lie in local memory.
            let mut distance = 16;
            while distance > 0 {
                // SAFETY: rows are uniform in a warp, so that all its lanes are here.
                sum += unsafe { cuda_std::warp::shuffle_xor(sum, distance) };
                distance /= 2;
            }
            let inverse = if (r as usize) < source.rows { rsqrt(sum + epsilon) } else { 0.0 };
            if lane == 0 {
                // SAFETY: inside the tile.
                unsafe { f32::store(column.at(r, 0), inverse) };
            }
            r += 4;
        }
    }

    /// to(r, c) = from(r, c) * product of decay(s, c) over s in (start of r's span ..= r), spans of `span` rows.
    #[inline(always)]
    pub fn scale_prefix<E: DeviceElement>(
        &mut self,
        to: Shared<E>,
        from: Shared<f32>,
        decay: Shared<f32>,
        span: usize,
    ) {
        let (rows, cols) = to.extent();
        let one = decay.cols() == 1;
        self.each_column(cols, |c| {
            let dc = if one { 0 } else { c };
            let mut product = 1.0;
            let mut r = 0;
            while r < rows {
                if r % span as u32 == 0 {
                    product = 1.0;
                }
                // SAFETY: inside the tiles.
                unsafe {
                    product = flush(product * f32::load(decay.at(r, dc)));
                    E::store(to.at(r, c), f32::load(from.at(r, c)) * product);
                }
                r += 1;
            }
        });
    }

    /// to(r, c) = from(r, c) * product of decay(s, c) over s in (r + 1 ..= end of r's span), spans of `span` rows.
    #[inline(always)]
    pub fn scale_suffix<E: DeviceElement>(
        &mut self,
        to: Shared<E>,
        from: Shared<f32>,
        decay: Shared<f32>,
        span: usize,
    ) {
        let (rows, cols) = to.extent();
        let one = decay.cols() == 1;
        let span = span as u32;
        self.each_column(cols, |c| {
            let dc = if one { 0 } else { c };
            let mut product = 1.0;
            let mut r = rows;
            while r > 0 {
                r -= 1;
                // SAFETY: inside the tiles; r + 1 is in the same span.
                unsafe {
                    product = if r % span == span - 1 { 1.0 } else { flush(product * f32::load(decay.at(r + 1, dc))) };
                    E::store(to.at(r, c), f32::load(from.at(r, c)) * product);
                }
            }
        });
    }

    /// row(0, c) = product of decay(r, c) over all r; a decay with one column serves all columns.
    #[inline(always)]
    pub fn total_decay(&mut self, row: Shared<f32>, decay: Shared<f32>) {
        let (_, cols) = row.extent();
        let (rows, one) = (decay.extent().0, decay.cols() == 1);
        self.each_column(cols, |c| {
            let mut product = 1.0;
            let mut r = 0;
            while r < rows {
                // SAFETY: inside the tile.
                product = flush(product * unsafe { f32::load(decay.at(r, if one { 0 } else { c })) });
                r += 1;
            }
            // SAFETY: inside the tile.
            unsafe { f32::store(row.at(0, c), product) };
        });
    }

    /// scores(i, j) *= product of decay(s, 0) over s in (j + 1 ..= i) for j <= i; above the diagonal they become 0.
    #[inline(always)]
    pub fn scale_pairwise(&mut self, scores: Shared<f32>, decay: Shared<f32>) {
        let (rows, cols) = scores.extent();
        self.each_column(cols, |j| {
            let mut product = 1.0;
            let mut i = 0;
            while i < rows {
                let at = scores.at(i, j);
                // SAFETY: inside the tiles.
                unsafe {
                    if i > j {
                        product = flush(product * f32::load(decay.at(i, 0)));
                    }
                    f32::store(at, if i < j { 0.0 } else { f32::load(at) * product });
                }
                i += 1;
            }
        });
    }

    /// scores(i, j) += sum over c of left(i, c) right(j, c) (product of decay(s, c) over s in (j + 1 ..= i)), for
    /// j <= i in the same 16 x 16 diagonal block. Two threads share a column j, each every second channel.
    /// See [`crate::tile::splits_diagonal`] for how that depends on `E`.
    #[inline(always)]
    pub fn diagonal_scores<E: DeviceElement>(
        &mut self,
        scores: Shared<f32>,
        left: Shared<f32>,
        right: Shared<f32>,
        decay: Shared<f32>,
    ) {
        let (rows, cols) = left.extent();
        let (j, half) = (self.thread / 2, self.thread % 2);
        let active = j < rows;
        let (block, first) = (j & !15, j % 16);
        let mut sums = [0.0f32; 16];
        if active {
            let mut c = half;
            while c < cols {
                if splits_diagonal::<E>() {
                    // SAFETY: inside the tiles.
                    unsafe { add_split::<E>(&mut sums, [left, right, decay], block, first, c) };
                    c += 2;
                    continue;
                }
                // SAFETY: inside the tiles.
                unsafe {
                    let mut product = f32::load(right.at(j, c));
                    macro_rules! rows {
                        ($($i:literal)*) => {
                            $(if $i >= first {
                                if $i > first {
                                    product = flush(product * f32::load(decay.at(block + $i, c)));
                                }
                                sums[$i] = ptx::fma_rn_f32(product, f32::load(left.at(block + $i, c)), sums[$i]);
                            })*
                        };
                    }
                    rows!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
                }
                c += 2;
            }
        }
        macro_rules! write {
            ($($i:literal)*) => {
                $({
                    // SAFETY: all lanes of the warp are here.
                    let sum = sums[$i] + unsafe { cuda_std::warp::shuffle_xor(sums[$i], 1) };
                    if active && half == 0 && $i >= first {
                        let at = scores.at(block + $i, j);
                        // SAFETY: inside the tile, and this thread's column.
                        unsafe { f32::store(at, f32::load(at) + sum) };
                    }
                })*
            };
        }
        write!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    }

    /// a := (I + strictly lower part of a)^-1, in place: row by row, each thread a column.
    #[inline(always)]
    pub fn invert_unit_lower(&mut self, a: Shared<f32>) {
        let (n, _) = a.extent();
        let c = self.thread;
        let mut i = 0;
        while i < n {
            let mut x = if i == c { 1.0 } else { 0.0 };
            if c < n {
                let mut j = 0;
                while j < i {
                    // Rows above are rows of the inverse by now; row i is still that of a.
                    // SAFETY: inside the tile.
                    x = unsafe { ptx::fma_rn_f32(-f32::load(a.at(i, j)), f32::load(a.at(j, c)), x) };
                    j += 1;
                }
            }
            self.sync();
            if c < n {
                // SAFETY: inside the tile.
                unsafe { f32::store(a.at(i, c), x) };
            }
            self.sync();
            i += 1;
        }
    }
}

/// Adds the products of one channel, of column `first` of the diagonal block at `block` with its rows, both rounded to `E`.
///
/// # Safety
/// The channel lies inside the tiles, which are left, right and decay.
#[inline(always)]
unsafe fn add_split<E: DeviceElement>(
    sums: &mut [f32; 16],
    [left, right, decay]: [Shared<f32>; 3],
    block: u32,
    first: u32,
    c: u32,
) {
    const SPLIT: usize = DIAGONAL_SPLIT;
    // SAFETY: by contract.
    let factor = |i: u32| floored_decay(unsafe { f32::load(decay.at(block + i, c)) });
    // Decays since the split row, of rows before it their inverses. Indices are constants, so that the arrays lie in registers.
    let (mut since, mut until, mut product) = ([1.0f32; 16], 1.0, 1.0);
    macro_rules! before {
        ($($i:literal)*) => {
            $(const { assert!($i < SPLIT) };
            product *= factor($i + 1);
            since[$i] = ptx::rcp_approx_ftz_f32(product);
            if $i == first { until = product; })*
        };
    }
    before!(7 6 5 4 3 2 1 0);
    product = 1.0;
    macro_rules! after {
        ($($i:literal)*) => {
            $(const { assert!($i > SPLIT) };
            product *= factor($i);
            since[$i] = product;
            if $i == first { until = ptx::rcp_approx_ftz_f32(product); })*
        };
    }
    after!(9 10 11 12 13 14 15);
    // SAFETY: by contract.
    let column = E::round(unsafe { f32::load(right.at(block + first, c)) } * until);
    macro_rules! rows {
        ($($i:literal)*) => {
            $(if $i >= first {
                // SAFETY: by contract.
                let row = E::round(unsafe { f32::load(left.at(block + $i, c)) } * since[$i]);
                sums[$i] = ptx::fma_rn_f32(row, column, sums[$i]);
            })*
        };
    }
    rows!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
}
