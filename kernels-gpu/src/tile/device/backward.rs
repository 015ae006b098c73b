//! Operations that only gradients need.

use cuda_std::ptx;

use super::{DeviceElement, Shared, THREADS, Warpgroup};
use crate::math::flush;
use crate::params::Matrix;
use crate::tile::Pairs;

impl Warpgroup<'_> {
    /// tile(r, c) = sum over t < terms of the element `t * stride` after source(r, c), in this order.
    #[inline(always)]
    pub fn load_sum(&mut self, tile: Shared<f32>, source: Matrix, terms: usize, stride: usize) {
        let (rows, cols) = tile.extent();
        self.each(rows, cols, |r, c| {
            let mut sum = 0.0;
            let mut term = source;
            let mut t = 0;
            // Four loads at a time are under way; sums are in the same order as one by one.
            while t + 4 <= terms {
                let after = |i: usize| Matrix { offset: term.offset + i * stride, ..term };
                let (r, c) = (r as usize, c as usize);
                // SAFETY: inside the tensor; the launcher vouches for tensor and type.
                let four =
                    unsafe { (after(0).load(r, c), after(1).load(r, c), after(2).load(r, c), after(3).load(r, c)) };
                sum = sum + four.0 + four.1 + four.2 + four.3;
                term.offset += 4 * stride;
                t += 4;
            }
            while t < terms {
                // SAFETY: as above.
                sum += unsafe { term.load(r as usize, c as usize) };
                term.offset += stride;
                t += 1;
            }
            // SAFETY: inside the tile.
            unsafe { f32::store(tile.at(r, c), sum) };
        });
    }

    /// tile(r, c) = f(r, c, tile(r, c)), in place.
    #[inline(always)]
    pub fn map(&mut self, tile: Shared<f32>, f: impl Fn(usize, usize, f32) -> f32) {
        let (rows, cols) = tile.extent();
        self.each(rows, cols, |r, c| {
            let at = tile.at(r, c);
            // SAFETY: inside the tile.
            unsafe { f32::store(at, f(r as usize, c as usize, f32::load(at))) };
        });
    }

    /// to(r, c) = f(to(r, c), with(r, c)), in place.
    #[inline(always)]
    pub fn combine(&mut self, to: Shared<f32>, with: Shared<f32>, f: impl Fn(f32, f32) -> f32) {
        let (rows, cols) = to.extent();
        self.each(rows, cols, |r, c| {
            let at = to.at(r, c);
            // SAFETY: inside the tiles.
            unsafe { f32::store(at, f(f32::load(at), f32::load(with.at(r, c)))) };
        });
    }

    /// to(r, c) = from(r, c) where keep(r, c), rounded to the destination's type, else 0.
    #[inline(always)]
    pub fn select<E: DeviceElement>(&mut self, to: Shared<E>, from: Shared<f32>, keep: impl Fn(usize, usize) -> bool) {
        let (rows, cols) = to.extent();
        self.each(rows, cols, |r, c| {
            // SAFETY: inside the tiles.
            unsafe {
                let x = f32::load(from.at(r, c));
                E::store(to.at(r, c), if keep(r as usize, c as usize) { x } else { 0.0 });
            }
        });
    }

    /// tile(r, c) = row(0, c).
    #[inline(always)]
    pub fn fill_rows(&mut self, tile: Shared<f32>, row: Shared<f32>) {
        let (rows, cols) = tile.extent();
        // SAFETY: inside the tiles.
        self.each(rows, cols, |r, c| unsafe { f32::store(tile.at(r, c), f32::load(row.at(0, c))) });
    }

    /// column(r, 0) += sum over c < cols of f(r, c): a warp for each row.
    #[inline(always)]
    fn add_to_column(&mut self, column: Shared<f32>, cols: u32, f: impl Fn(u32, u32) -> f32) {
        let (warp, lane) = self.warp_lane();
        let (rows, _) = column.extent();
        let mut r = warp;
        while r < rows {
            let mut sum = 0.0;
            let mut c = lane;
            while c < cols {
                sum += f(r, c);
                c += 32;
            }
            // No loop over an array, which would lie in local memory.
            let mut distance = 16;
            while distance > 0 {
                // SAFETY: rows are uniform in a warp, so that all its lanes are here.
                sum += unsafe { cuda_std::warp::shuffle_xor(sum, distance) };
                distance /= 2;
            }
            if lane == 0 {
                let at = column.at(r, 0);
                // SAFETY: inside the tile.
                unsafe { f32::store(at, f32::load(at) + sum) };
            }
            r += 4;
        }
    }

    /// column(r, 0) += sum over c of tile(r, c).
    #[inline(always)]
    pub fn add_row_sums(&mut self, column: Shared<f32>, tile: Shared<f32>) {
        let (_, cols) = tile.extent();
        // SAFETY: inside the tile.
        self.add_to_column(column, cols, |r, c| unsafe { f32::load(tile.at(r, c)) });
    }

    /// column(r, 0) += sum over c of a(r, c) b(r, c).
    #[inline(always)]
    pub fn add_row_dots<E: DeviceElement>(&mut self, column: Shared<f32>, a: Shared<f32>, b: Shared<E>) {
        let (_, cols) = a.extent();
        // SAFETY: inside the tiles.
        self.add_to_column(column, cols, |r, c| unsafe { f32::load(a.at(r, c)) * E::load(b.at(r, c)) });
    }

    /// row(0, c) = sum over r of tile(r, c).
    #[inline(always)]
    pub fn column_sums(&mut self, row: Shared<f32>, tile: Shared<f32>) {
        let (rows, cols) = tile.extent();
        self.each_column(cols, |c| {
            let mut sum = 0.0;
            let mut r = 0;
            while r < rows {
                // SAFETY: inside the tile.
                sum += unsafe { f32::load(tile.at(r, c)) };
                r += 1;
            }
            // SAFETY: inside the tile.
            unsafe { f32::store(row.at(0, c), sum) };
        });
    }

    /// row(0, c) += sum over r of a(r, c) b(r, c).
    #[inline(always)]
    pub fn add_column_dots<E: DeviceElement>(&mut self, row: Shared<f32>, a: Shared<E>, b: Shared<E>) {
        let (rows, cols) = a.extent();
        self.each_column(cols, |c| {
            let mut sum = 0.0;
            let mut r = 0;
            while r < rows {
                // SAFETY: inside the tiles.
                sum += unsafe { E::load(a.at(r, c)) * E::load(b.at(r, c)) };
                r += 1;
            }
            let at = row.at(0, c);
            // SAFETY: inside the tile.
            unsafe { f32::store(at, f32::load(at) + sum) };
        });
    }

    /// Columns of spans that this thread has: (first row of the span, column) of the first one, and from it to the next. Spans
    /// lie side by side, `cols` columns each.
    #[inline(always)]
    fn next_span_column(&self, at: Option<(u32, u32)>, cols: u32, span: u32) -> (u32, u32) {
        let (mut first, mut c) = match at {
            None => (0, self.thread),
            Some((first, c)) => (first, c + THREADS),
        };
        while c >= cols {
            c -= cols;
            first += span;
        }
        (first, c)
    }

    /// Puts the decays into the gradients of products across the edges of spans, and adds them to dq, dk and dg. In each span of
    /// `span` rows, products have either their left row there, with the decay since the span's start, or their right
    /// row, with the decay to the span's end (of the whole chunk: products with the states around it).
    #[inline(always)]
    pub fn gated_gradients(&mut self, t: &Pairs, span: usize) {
        let (rows, cols) = t.q.extent();
        let one = t.decay.cols() == 1;
        let span = span as u32;
        let (mut first, mut c) = self.next_span_column(None, cols, span);
        while first < rows {
            let dc = if one { 0 } else { c };
            // SAFETY: inside the tiles, and this thread's column of this span.
            let get = |tile: &Shared<f32>, r: u32| unsafe { f32::load(tile.at(r, c)) };
            // SAFETY: as above.
            let put = |tile: &Shared<f32>, r: u32, x: f32| unsafe { f32::store(tile.at(r, c), x) };
            // SAFETY: as above.
            let decay = |r: u32| unsafe { f32::load(t.decay.at(r, dc)) };
            let end = first + span;
            let mut product = 1.0;
            let mut r = first;
            while r < end {
                product = flush(product * decay(r));
                let (row_q, row_k) = (get(&t.row_q, r) * product, get(&t.row_k, r) * product);
                put(&t.dq, r, get(&t.dq, r) + row_q);
                put(&t.dk, r, get(&t.dk, r) + row_k);
                let of_k = get(&t.k, r) * row_k;
                put(&t.row_k, r, of_k);
                put(&t.row_q, r, get(&t.q, r) * row_q + of_k);
                r += 1;
            }
            let (mut product, mut left) = (1.0, 0.0);
            while r > first {
                r -= 1;
                let col_k = get(&t.col_k, r) * product;
                put(&t.dk, r, get(&t.dk, r) + col_k);
                put(&t.col_k, r, get(&t.k, r) * col_k);
                product = flush(product * decay(r));
                left += get(&t.row_q, r);
                put(&t.dg, r, get(&t.dg, r) + left);
            }
            let mut right = 0.0;
            while r < end {
                put(&t.dg, r, get(&t.dg, r) + right);
                right += get(&t.col_k, r);
                r += 1;
            }
            (first, c) = self.next_span_column(Some((first, c)), cols, span);
        }
    }

    /// Adds the gradients of products inside the 16 x 16 diagonal blocks: d_scores_q(i, j) that of q_i with k_j for j <= i,
    /// d_scores_k(i, j) that of k_i with k_j for j < i. `row_k` becomes k times the gradient of left rows of k. Each thread
    /// has one column of one block, and keeps sums of its 16 rows in registers.
    #[inline(always)]
    pub fn diagonal_gradients(&mut self, t: &Pairs, d_scores_q: Shared<f32>, d_scores_k: Shared<f32>) {
        let (rows, cols) = t.q.extent();
        let one = t.decay.cols() == 1;
        let (mut first, mut c) = self.next_span_column(None, cols, 16);
        while first < rows {
            let dc = if one { 0 } else { c };
            // SAFETY: inside the tiles, and this thread's column of this block.
            let get = |tile: &Shared<f32>, i: u32| unsafe { f32::load(tile.at(first + i, c)) };
            // SAFETY: as above.
            let put = |tile: &Shared<f32>, i: u32, x: f32| unsafe { f32::store(tile.at(first + i, c), x) };
            // SAFETY: as above.
            let score = |tile: &Shared<f32>, i: u32, j: u32| unsafe { f32::load(tile.at(first + i, first + j)) };
            // SAFETY: as above.
            let decay = |i: u32| unsafe { f32::load(t.decay.at(first + i, dc)) };
            let (mut dq, mut row_k, mut dg) = ([0.0f32; 16], [0.0f32; 16], [0.0f32; 16]);
            let mut j = 0;
            while j < 16 {
                let k_j = get(&t.k, j);
                let (mut product, mut col_k) = (1.0, 0.0);
                let mut shares = [0.0f32; 16];
                // Macros, so that the arrays are indexed by constants and stay in registers.
                macro_rules! rows {
                    ($($i:literal)*) => {
                        $(if $i == j {
                            let of_q = score(&d_scores_q, j, j);
                            dq[$i] = ptx::fma_rn_f32(of_q, k_j, dq[$i]);
                            col_k = of_q * get(&t.q, j);
                        } else if $i > j {
                            product = flush(product * decay($i));
                            let (of_q, of_k) = (score(&d_scores_q, $i, j), score(&d_scores_k, $i, j));
                            let gated = k_j * product;
                            dq[$i] = ptx::fma_rn_f32(of_q, gated, dq[$i]);
                            row_k[$i] = ptx::fma_rn_f32(of_k, gated, row_k[$i]);
                            let share = (of_q * get(&t.q, $i) + of_k * get(&t.k, $i)) * product;
                            col_k += share;
                            shares[$i] = share * k_j;
                        })*
                    };
                }
                rows!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
                put(&t.dk, j, get(&t.dk, j) + col_k);
                let mut around = 0.0;
                macro_rules! around {
                    ($($i:literal)*) => {
                        // Shares of rows up to j are zero.
                        $(around += shares[$i]; if $i > j { dg[$i] += around; })*
                    };
                }
                around!(15 14 13 12 11 10 9 8 7 6 5 4 3 2 1);
                j += 1;
            }
            macro_rules! add {
                ($($i:literal)*) => {
                    $(
                        put(&t.dq, $i, get(&t.dq, $i) + dq[$i]);
                        put(&t.dk, $i, get(&t.dk, $i) + row_k[$i]);
                        put(&t.dg, $i, get(&t.dg, $i) + dg[$i]);
                        put(&t.row_k, $i, get(&t.k, $i) * row_k[$i]);
                    )*
                };
            }
            add!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
            (first, c) = self.next_span_column(Some((first, c)), cols, 16);
        }
    }
}
