//! Collective operations on shared tiles.

use super::check::{SharedLog, raise};
use super::global::{Raw, with_raw};
use super::{FaultKind, Shared, Warpgroup};
use crate::element::Element;
use crate::math::{flush, rsqrt};
use crate::params::Matrix;
use crate::tile::{DIAGONAL_SPLIT, floored_decay, splits_diagonal};

/// Sums that a product of rows is made of, so that it vectorises.
const LANES: usize = 16;

/// Calls `f` with the offsets of the elements of a row in two places that have these strides. Rows without gaps have a
/// loop of their own, which vectorises.
#[inline(always)]
pub(super) fn each_of_row(cols: usize, strides: (usize, usize), mut f: impl FnMut(usize, usize)) {
    if strides == (1, 1) {
        for c in 0..cols {
            f(c, c);
        }
    } else {
        for c in 0..cols {
            f(c * strides.0, c * strides.1);
        }
    }
}

impl Warpgroup<'_> {
    /// Pointer to element (r, c) of a tile. Handles are made by `allocate` and narrowed by `Shared::part`, so
    /// it lies inside the arena for r < rows and c < cols; only this thread uses the arena.
    #[inline(always)]
    pub(super) fn at<E>(&self, tile: &Shared<E>, r: usize, c: usize) -> *mut f32 {
        self.block_shared.arena.wrapping_add(tile.base + r * tile.row_stride + c * tile.col_stride)
    }

    #[inline]
    pub(super) fn log_read<E>(&mut self, tile: &Shared<E>) {
        self.log(tile, SharedLog::read);
    }

    #[inline]
    pub(super) fn log_write<E>(&mut self, tile: &Shared<E>) {
        self.log(tile, SharedLog::write);
    }

    /// A read and a write of each element by the same thread.
    #[inline]
    pub(super) fn log_update<E>(&mut self, tile: &Shared<E>) {
        self.log(tile, SharedLog::update);
    }

    #[inline]
    fn log<E>(&mut self, tile: &Shared<E>, note: impl Fn(&mut SharedLog, usize, usize, u32, u32)) {
        if let Some(log) = &self.block_shared.log {
            let mut log = log.borrow_mut();
            for r in 0..tile.rows {
                for c in 0..tile.cols {
                    let element = tile.base + r * tile.row_stride + c * tile.col_stride;
                    note(&mut log, element, self.index, self.block_shared.epoch.get(), self.own_epoch);
                }
            }
        }
    }

    pub(super) fn same_shape(op: &'static str, a: [usize; 2], b: [usize; 2]) {
        if a != b {
            raise(FaultKind::Shapes { op, shapes: vec![a, b] });
        }
    }

    /// tile(r, c) = f(r, c).
    pub fn fill<E: Element>(&mut self, tile: Shared<E>, f: impl Fn(usize, usize) -> f32) {
        self.log_write(&tile);
        for r in 0..tile.rows {
            for c in 0..tile.cols {
                // SAFETY: see `at`.
                unsafe { self.at(&tile, r, c).write(E::round(f(r, c))) };
            }
        }
    }

    /// Loads `source` into `tile`; where the tile is larger it becomes zero.
    pub fn load<E: Element>(&mut self, tile: Shared<E>, source: Matrix) {
        self.load_map(tile, source, 0.0, |x| x);
    }

    /// tile(r, c) = f(source(r, c)), and `fill` where the tile is larger than the source.
    pub fn load_map<E: Element>(&mut self, tile: Shared<E>, source: Matrix, fill: f32, f: impl Fn(f32) -> f32) {
        if source.rows > tile.rows || source.cols > tile.cols {
            raise(FaultKind::Shapes { op: "load", shapes: vec![[tile.rows, tile.cols], [source.rows, source.cols]] });
        }
        source.check_bounds("load");
        self.log_write(&tile);
        with_raw!(source, T => {
            let base = source.pointer::<T>();
            for r in 0..source.rows {
                let (from, to) = (base.wrapping_add(r * source.row_stride), self.at(&tile, r, 0));
                each_of_row(source.cols, (source.col_stride, tile.col_stride), |at_source, at_tile| {
                    // SAFETY: inside the tensor, as just checked; the launcher vouches for tensor and type. See `at`.
                    unsafe { to.wrapping_add(at_tile).write(E::round(f(from.wrapping_add(at_source).read().widen()))) };
                });
            }
        });
        for r in 0..tile.rows {
            let from = if r < source.rows { source.cols } else { 0 };
            for c in from..tile.cols {
                // SAFETY: see `at`.
                unsafe { self.at(&tile, r, c).write(E::round(fill)) };
            }
        }
    }

    /// tile(r, c) = f(tile(r, c), row(0, c)): applies a row of parameters from global memory in place.
    pub fn map_with_row(&mut self, tile: Shared<f32>, rows: usize, row: Option<Matrix>, f: impl Fn(f32, f32) -> f32) {
        if let Some(row) = &row {
            Self::same_shape("map_with_row", [1, tile.cols], [row.rows, row.cols]);
            row.check_bounds("map_with_row");
        }
        let part = tile.row_range(0, rows);
        self.log_update(&part);
        for c in 0..tile.cols {
            let parameter = row.map_or(0.0, |row| {
                // SAFETY: inside the tensor, as just checked; the launcher vouches for tensor and type.
                with_raw!(row, T => unsafe { row.pointer::<T>().wrapping_add(c * row.col_stride).read() }.widen())
            });
            for r in 0..rows {
                let p = self.at(&tile, r, c);
                // SAFETY: see `at`.
                unsafe { p.write(f(p.read(), parameter)) };
            }
        }
    }

    /// tile(r, c) *= column(r, 0) * factor, in place.
    pub fn scale_rows(&mut self, tile: Shared<f32>, column: Shared<f32>, factor: f32) {
        Self::same_shape("scale_rows", [tile.rows, 1], [column.rows, column.cols]);
        self.log_read(&column);
        self.log_update(&tile);
        for r in 0..tile.rows {
            // SAFETY: see `at`.
            let scale = unsafe { self.at(&column, r, 0).read() } * factor;
            for c in 0..tile.cols {
                let p = self.at(&tile, r, c);
                // SAFETY: see `at`.
                unsafe { p.write(p.read() * scale) };
            }
        }
    }

    /// Rounds accumulated values into their operand copy; nothing to do if `wide` is the operand itself
    /// ([`Warpgroup::private_operand`]).
    pub fn to_operand<E: Element>(&mut self, operand: Shared<E>, wide: Shared<f32>) {
        if !E::WIDE {
            self.convert(operand, wide, |x| x);
        }
    }

    /// Copies a tile, rounded to the destination's type, each element through `f`.
    pub fn convert<E: Element, F: Element>(&mut self, to: Shared<E>, from: Shared<F>, f: impl Fn(f32) -> f32) {
        Self::same_shape("convert", [to.rows, to.cols], [from.rows, from.cols]);
        self.log_read(&from);
        self.log_write(&to);
        for r in 0..to.rows {
            for c in 0..to.cols {
                // SAFETY: see `at`.
                unsafe { self.at(&to, r, c).write(E::round(f(self.at(&from, r, c).read()))) };
            }
        }
    }

    /// Stores the part of a tile that `target` covers.
    pub fn store<E: Element>(&mut self, target: Matrix, tile: Shared<E>) {
        if target.rows > tile.rows || target.cols > tile.cols {
            raise(FaultKind::Shapes { op: "store", shapes: vec![[target.rows, target.cols], [tile.rows, tile.cols]] });
        }
        target.check_bounds("store");
        self.log_read(&tile.part(0, 0, target.rows, target.cols));
        with_raw!(target, T => {
            let base = target.pointer::<T>();
            for r in 0..target.rows {
                let (to, from) = (base.wrapping_add(r * target.row_stride), self.at(&tile, r, 0));
                each_of_row(target.cols, (target.col_stride, tile.col_stride), |at_target, at_tile| {
                    // SAFETY: inside the tensor, as just checked; the launcher vouches for tensor and type, and
                    // that no other block stores these elements. See `at`.
                    unsafe { to.wrapping_add(at_target).write(T::narrow(from.wrapping_add(at_tile).read())) };
                });
            }
        });
        self.note_stores(&target);
    }

    /// column(r, 0) = 1 / sqrt(sum over c of source(r, c)^2 + epsilon); rows that the source lacks become 0.
    pub fn inverse_norms(&mut self, column: Shared<f32>, source: Matrix, epsilon: f32) {
        source.check_bounds("inverse_norms");
        self.log_write(&column);
        for r in 0..column.rows {
            let mut inverse = 0.0;
            if r < source.rows {
                let mut lanes = [0.0f32; 16];
                with_raw!(source, T => {
                    let row = source.pointer::<T>().wrapping_add(r * source.row_stride);
                    for c in 0..source.cols {
                        // SAFETY: inside the tensor, as just checked; the launcher vouches for tensor and type.
                        let x = unsafe { row.wrapping_add(c * source.col_stride).read() }.widen();
                        lanes[c % 16] += x * x;
                    }
                });
                inverse = rsqrt(lanes.iter().sum::<f32>() + epsilon);
            }
            // SAFETY: see `at`.
            unsafe { self.at(&column, r, 0).write(inverse) };
        }
    }

    /// to(r, c) = from(r, c) * product of decay(s, c) over s in (start of r's span ..= r), spans of `span` rows.
    /// A decay with one column serves all columns.
    pub fn scale_prefix<E: Element>(&mut self, to: Shared<E>, from: Shared<f32>, decay: Shared<f32>, span: usize) {
        self.scale_running(to, from, decay, span, Running::Prefix);
    }

    /// to(r, c) = from(r, c) * product of decay(s, c) over s in (r + 1 ..= end of r's span), spans of `span` rows.
    /// A decay with one column serves all columns.
    pub fn scale_suffix<E: Element>(&mut self, to: Shared<E>, from: Shared<f32>, decay: Shared<f32>, span: usize) {
        self.scale_running(to, from, decay, span, Running::Suffix);
    }

    fn scale_running<E: Element>(
        &mut self,
        to: Shared<E>,
        from: Shared<f32>,
        decay: Shared<f32>,
        span: usize,
        running: Running,
    ) {
        Self::same_shape("scale_running", [to.rows, to.cols], [from.rows, from.cols]);
        let one = decay.cols == 1;
        if decay.rows != to.rows || !(one || decay.cols == to.cols) || !to.rows.is_multiple_of(span) {
            raise(FaultKind::Shapes {
                op: "scale_running",
                shapes: vec![[to.rows, to.cols], [decay.rows, decay.cols]],
            });
        }
        self.log_read(&from);
        self.log_read(&decay);
        self.log_write(&to);
        let mut product = [1.0f32; 256];
        let product = &mut product[..to.cols];
        for step in 0..to.rows {
            let (r, source) = match running {
                Running::Prefix => (step, Some(step)),
                // The suffix of a row starts after it: its factor is the row below.
                Running::Suffix => {
                    let r = to.rows - 1 - step;
                    (r, (r % span != span - 1).then_some(r + 1))
                }
            };
            let starts = match running {
                Running::Prefix => r % span == 0,
                Running::Suffix => r % span == span - 1,
            };
            if starts {
                product.fill(1.0);
            }
            if let Some(source) = source {
                for (c, p) in product.iter_mut().enumerate() {
                    // SAFETY: see `at`.
                    *p = flush(*p * unsafe { self.at(&decay, source, if one { 0 } else { c }).read() });
                }
            }
            for (c, p) in product.iter().enumerate() {
                // SAFETY: see `at`.
                unsafe { self.at(&to, r, c).write(E::round(self.at(&from, r, c).read() * p)) };
            }
        }
    }

    /// row(0, c) = product of decay(r, c) over all r; a decay with one column serves all columns.
    pub fn total_decay(&mut self, row: Shared<f32>, decay: Shared<f32>) {
        self.log_read(&decay);
        self.log_write(&row);
        for c in 0..row.cols {
            let mut product = 1.0;
            for r in 0..decay.rows {
                // SAFETY: see `at`.
                product = flush(product * unsafe { self.at(&decay, r, if decay.cols == 1 { 0 } else { c }).read() });
            }
            // SAFETY: see `at`.
            unsafe { self.at(&row, 0, c).write(product) };
        }
    }

    /// scores(i, j) *= product of decay(s, 0) over s in (j + 1 ..= i) for j <= i; above the diagonal they become 0.
    pub fn scale_pairwise(&mut self, scores: Shared<f32>, decay: Shared<f32>) {
        Self::same_shape("scale_pairwise", [scores.rows, 1], [decay.rows, decay.cols]);
        self.log_read(&decay);
        self.log_update(&scores);
        for j in 0..scores.cols {
            let mut product = 1.0;
            for i in 0..scores.rows {
                if i > j {
                    // SAFETY: see `at`.
                    product = flush(product * unsafe { self.at(&decay, i, 0).read() });
                }
                let p = self.at(&scores, i, j);
                // SAFETY: see `at`.
                unsafe { p.write(if i < j { 0.0 } else { p.read() * product }) };
            }
        }
    }

    /// scores(i, j) += sum over c of left(i, c) right(j, c) (product of decay(s, c) over s in (j + 1 ..= i)), for
    /// j <= i in the same 16 x 16 diagonal block. See [`crate::tile::splits_diagonal`] for how that depends on `E`.
    pub fn diagonal_scores<E: Element>(
        &mut self,
        scores: Shared<f32>,
        left: Shared<f32>,
        right: Shared<f32>,
        decay: Shared<f32>,
    ) {
        Self::same_shape("diagonal_scores", [left.rows, left.cols], [right.rows, right.cols]);
        Self::same_shape("diagonal_scores", [left.rows, left.cols], [decay.rows, decay.cols]);
        for tile in [left, right, decay] {
            self.log_read(&tile);
            if tile.col_stride != 1 || tile.cols % LANES != 0 {
                raise(FaultKind::Shapes { op: "diagonal_scores", shapes: vec![[tile.rows, tile.cols]] });
            }
        }
        let row = |wg: &Self, tile: &Shared<f32>, r: usize| {
            // SAFETY: a row of a tile with column stride 1 is contiguous inside the arena; the three tiles are only
            // read here, and the scores, which are written, are another tile.
            unsafe { core::slice::from_raw_parts(wg.at(tile, r, 0).cast_const(), tile.cols) }
        };
        if splits_diagonal::<E>() {
            return self.split_diagonal_scores::<E>(scores, left, right, decay);
        }
        for block in (0..left.rows).step_by(16) {
            for j in block..block + 16 {
                self.log_update(&scores.part(j, j, block + 16 - j, 1));
                let mut product = [0.0f32; 256];
                let product = &mut product[..right.cols];
                product.copy_from_slice(row(self, &right, j));
                for i in j..block + 16 {
                    let left_row = row(self, &left, i);
                    let mut lanes = [0.0f32; LANES];
                    if i > j {
                        let decay_row = row(self, &decay, i);
                        let rows = product.chunks_exact_mut(LANES).zip(decay_row.chunks_exact(LANES));
                        for ((p, d), l) in rows.zip(left_row.chunks_exact(LANES)) {
                            for c in 0..LANES {
                                p[c] = flush(p[c] * d[c]);
                                lanes[c] += p[c] * l[c];
                            }
                        }
                    } else {
                        for (p, l) in product.chunks_exact(LANES).zip(left_row.chunks_exact(LANES)) {
                            for c in 0..LANES {
                                lanes[c] += p[c] * l[c];
                            }
                        }
                    }
                    let p = self.at(&scores, i, j);
                    // SAFETY: see `at`.
                    unsafe { p.write(p.read() + lanes.iter().sum::<f32>()) };
                }
            }
        }
    }

    /// [`Warpgroup::diagonal_scores`] of operands rounded to `E`.
    fn split_diagonal_scores<E: Element>(
        &mut self,
        scores: Shared<f32>,
        left: Shared<f32>,
        right: Shared<f32>,
        decay: Shared<f32>,
    ) {
        let cols = left.cols;
        let (mut rows, mut columns) = ([[0.0f32; 256]; 16], [[0.0f32; 256]; 16]);
        for block in (0..left.rows).step_by(16) {
            let mut operands = |r: usize, product: &[f32], before: bool| {
                for (c, &product) in product.iter().enumerate() {
                    let (since, until) = if before { (1.0 / product, product) } else { (product, 1.0 / product) };
                    // SAFETY: see `at`.
                    unsafe {
                        rows[r][c] = E::round(self.at(&left, block + r, c).read() * since);
                        columns[r][c] = E::round(self.at(&right, block + r, c).read() * until);
                    }
                }
            };
            // SAFETY: see `at`.
            let factor = |r: usize, c: usize| floored_decay(unsafe { self.at(&decay, block + r, c).read() });
            let mut product = [1.0f32; 256];
            for r in (0..DIAGONAL_SPLIT).rev() {
                product[..cols].iter_mut().enumerate().for_each(|(c, p)| *p *= factor(r + 1, c));
                operands(r, &product[..cols], true);
            }
            product[..cols].fill(1.0);
            for r in DIAGONAL_SPLIT..16 {
                if r > DIAGONAL_SPLIT {
                    product[..cols].iter_mut().enumerate().for_each(|(c, p)| *p *= factor(r, c));
                }
                operands(r, &product[..cols], false);
            }
            for (j, column) in columns.iter().enumerate() {
                self.log_update(&scores.part(block + j, block + j, 16 - j, 1));
                for (i, row) in rows.iter().enumerate().skip(j) {
                    let mut lanes = [0.0f32; LANES];
                    let pairs = row[..cols].chunks_exact(LANES).zip(column[..cols].chunks_exact(LANES));
                    for (x, y) in pairs {
                        for c in 0..LANES {
                            lanes[c] += x[c] * y[c];
                        }
                    }
                    let p = self.at(&scores, block + i, block + j);
                    // SAFETY: see `at`.
                    unsafe { p.write(p.read() + lanes.iter().sum::<f32>()) };
                }
            }
        }
    }

    /// a := (I + strictly lower part of a)^-1, in place.
    pub fn invert_unit_lower(&mut self, a: Shared<f32>) {
        Self::same_shape("invert_unit_lower", [a.rows, a.rows], [a.rows, a.cols]);
        self.log_read(&a);
        self.sync();
        self.log_write(&a);
        let n = a.rows;
        let mut row = [0.0f32; crate::tile::ACC_MAX];
        for i in 0..n {
            // Row i of the inverse is e_i minus the rows above it, weighted with row i of a.
            row[..n].fill(0.0);
            row[i] = 1.0;
            for j in 0..i {
                // SAFETY: see `at`.
                let weight = unsafe { self.at(&a, i, j).read() };
                for (c, x) in row[..=j].iter_mut().enumerate() {
                    // SAFETY: see `at`.
                    *x -= weight * unsafe { self.at(&a, j, c).read() };
                }
            }
            for (c, x) in row[..n].iter().enumerate() {
                // SAFETY: see `at`.
                unsafe { self.at(&a, i, c).write(*x) };
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Running {
    Prefix,
    Suffix,
}
