//! Operations that only gradients need.

use super::check::raise;
use super::global::{Raw, with_raw};
use super::{FaultKind, Shared, Warpgroup};
use crate::element::Element;
use crate::math::flush;
use crate::params::Matrix;
use crate::tile::Pairs;

/// Rows of a diagonal block.
const BLOCK: usize = 16;

impl Warpgroup<'_> {
    /// tile(r, c) = sum over t < terms of the element `t * stride` after source(r, c), in this order.
    pub fn load_sum(&mut self, tile: Shared<f32>, source: Matrix, terms: usize, stride: usize) {
        Self::same_shape("load_sum", [tile.rows, tile.cols], [source.rows, source.cols]);
        if let Some(last) = terms.checked_sub(1) {
            Matrix { offset: source.offset + last * stride, ..source }.check_bounds("load_sum");
        }
        self.log_write(&tile);
        with_raw!(source, T => {
            for r in 0..tile.rows {
                for c in 0..tile.cols {
                    let first = source.pointer::<T>().wrapping_add(r * source.row_stride + c * source.col_stride);
                    // SAFETY: inside the tensor, as just checked; the launcher vouches for tensor and type.
                    let sum = (0..terms).fold(0.0, |sum, t| sum + unsafe { first.wrapping_add(t * stride).read() }.widen());
                    // SAFETY: see `at`.
                    unsafe { self.at(&tile, r, c).write(sum) };
                }
            }
        });
    }

    /// tile(r, c) = f(r, c, tile(r, c)), in place.
    pub fn map(&mut self, tile: Shared<f32>, f: impl Fn(usize, usize, f32) -> f32) {
        self.log_update(&tile);
        for r in 0..tile.rows {
            for c in 0..tile.cols {
                let p = self.at(&tile, r, c);
                // SAFETY: see `at`.
                unsafe { p.write(f(r, c, p.read())) };
            }
        }
    }

    /// to(r, c) = f(to(r, c), with(r, c)), in place.
    pub fn combine(&mut self, to: Shared<f32>, with: Shared<f32>, f: impl Fn(f32, f32) -> f32) {
        Self::same_shape("combine", [to.rows, to.cols], [with.rows, with.cols]);
        self.log_read(&with);
        self.log_update(&to);
        for r in 0..to.rows {
            for c in 0..to.cols {
                let p = self.at(&to, r, c);
                // SAFETY: see `at`.
                unsafe { p.write(f(p.read(), self.at(&with, r, c).read())) };
            }
        }
    }

    /// to(r, c) = from(r, c) where keep(r, c), rounded to the destination's type, else 0.
    pub fn select<E: Element>(&mut self, to: Shared<E>, from: Shared<f32>, keep: impl Fn(usize, usize) -> bool) {
        Self::same_shape("select", [to.rows, to.cols], [from.rows, from.cols]);
        self.log_read(&from);
        self.log_write(&to);
        for r in 0..to.rows {
            for c in 0..to.cols {
                // SAFETY: see `at`.
                unsafe {
                    let x = self.at(&from, r, c).read();
                    self.at(&to, r, c).write(if keep(r, c) { E::round(x) } else { 0.0 });
                }
            }
        }
    }

    /// tile(r, c) = row(0, c).
    pub fn fill_rows(&mut self, tile: Shared<f32>, row: Shared<f32>) {
        Self::same_shape("fill_rows", [1, tile.cols], [row.rows, row.cols]);
        self.log_read(&row);
        self.log_write(&tile);
        for r in 0..tile.rows {
            for c in 0..tile.cols {
                // SAFETY: see `at`.
                unsafe { self.at(&tile, r, c).write(self.at(&row, 0, c).read()) };
            }
        }
    }

    /// column(r, 0) += sum over c of tile(r, c).
    pub fn add_row_sums(&mut self, column: Shared<f32>, tile: Shared<f32>) {
        Self::same_shape("add_row_sums", [tile.rows, 1], [column.rows, column.cols]);
        self.log_read(&tile);
        self.log_update(&column);
        for r in 0..tile.rows {
            // SAFETY: see `at`.
            let sum: f32 = (0..tile.cols).map(|c| unsafe { self.at(&tile, r, c).read() }).sum();
            let p = self.at(&column, r, 0);
            // SAFETY: see `at`.
            unsafe { p.write(p.read() + sum) };
        }
    }

    /// column(r, 0) += sum over c of a(r, c) b(r, c).
    pub fn add_row_dots<E: Element>(&mut self, column: Shared<f32>, a: Shared<f32>, b: Shared<E>) {
        Self::same_shape("add_row_dots", [a.rows, a.cols], [b.rows, b.cols]);
        Self::same_shape("add_row_dots", [a.rows, 1], [column.rows, column.cols]);
        self.log_read(&a);
        self.log_read(&b);
        self.log_update(&column);
        for r in 0..a.rows {
            // SAFETY: see `at`.
            let product = |c| unsafe { self.at(&a, r, c).read() * self.at(&b, r, c).read() };
            let sum: f32 = (0..a.cols).map(product).sum();
            let p = self.at(&column, r, 0);
            // SAFETY: see `at`.
            unsafe { p.write(p.read() + sum) };
        }
    }

    /// row(0, c) = sum over r of tile(r, c).
    pub fn column_sums(&mut self, row: Shared<f32>, tile: Shared<f32>) {
        Self::same_shape("column_sums", [1, tile.cols], [row.rows, row.cols]);
        self.log_read(&tile);
        self.log_write(&row);
        for c in 0..tile.cols {
            // SAFETY: see `at`.
            let sum: f32 = (0..tile.rows).map(|r| unsafe { self.at(&tile, r, c).read() }).sum();
            // SAFETY: see `at`.
            unsafe { self.at(&row, 0, c).write(sum) };
        }
    }

    /// row(0, c) += sum over r of a(r, c) b(r, c).
    pub fn add_column_dots<E: Element>(&mut self, row: Shared<f32>, a: Shared<E>, b: Shared<E>) {
        Self::same_shape("add_column_dots", [a.rows, a.cols], [b.rows, b.cols]);
        Self::same_shape("add_column_dots", [1, a.cols], [row.rows, row.cols]);
        self.log_read(&a);
        self.log_read(&b);
        self.log_update(&row);
        for c in 0..a.cols {
            // SAFETY: see `at`.
            let product = |r| unsafe { self.at(&a, r, c).read() * self.at(&b, r, c).read() };
            let sum: f32 = (0..a.rows).map(product).sum();
            let p = self.at(&row, 0, c);
            // SAFETY: see `at`.
            unsafe { p.write(p.read() + sum) };
        }
    }

    /// Puts the decays into the gradients of products across the edges of spans, and adds them to dq, dk and dg. In each span of
    /// `span` rows, products have either their left row there, with the decay since the span's start, or their right
    /// row, with the decay to the span's end (of the whole chunk: products with the states around it).
    pub fn gated_gradients(&mut self, t: &Pairs, span: usize) {
        self.log_pairs("gated_gradients", t, span);
        for tile in [t.dq, t.dk, t.dg, t.row_q, t.row_k, t.col_k] {
            self.log_update(&tile);
        }
        for first in (0..t.q.rows).step_by(span) {
            for c in 0..t.q.cols {
                let dc = if t.decay.cols == 1 { 0 } else { c };
                let x = |tile: &Shared<f32>, r: usize| self.at(tile, r, c);
                let mut product = 1.0;
                for r in first..first + span {
                    // SAFETY: see `at`.
                    unsafe {
                        product = flush(product * self.at(&t.decay, r, dc).read());
                        let (row_q, row_k) = (x(&t.row_q, r).read() * product, x(&t.row_k, r).read() * product);
                        *x(&t.dq, r) += row_q;
                        *x(&t.dk, r) += row_k;
                        let of_k = x(&t.k, r).read() * row_k;
                        x(&t.row_k, r).write(of_k);
                        x(&t.row_q, r).write(x(&t.q, r).read() * row_q + of_k);
                    }
                }
                let (mut product, mut left) = (1.0, 0.0);
                for r in (first..first + span).rev() {
                    // SAFETY: see `at`.
                    unsafe {
                        let col_k = x(&t.col_k, r).read() * product;
                        *x(&t.dk, r) += col_k;
                        x(&t.col_k, r).write(x(&t.k, r).read() * col_k);
                        product = flush(product * self.at(&t.decay, r, dc).read());
                        left += x(&t.row_q, r).read();
                        *x(&t.dg, r) += left;
                    }
                }
                let mut right = 0.0;
                for r in first..first + span {
                    // SAFETY: see `at`.
                    unsafe {
                        *x(&t.dg, r) += right;
                        right += x(&t.col_k, r).read();
                    }
                }
            }
        }
    }

    /// Adds the gradients of products inside the 16 x 16 diagonal blocks: d_scores_q(i, j) that of q_i with k_j for j <= i,
    /// d_scores_k(i, j) that of k_i with k_j for j < i. `row_k` becomes k times the gradient of left rows of k.
    /// Running products: no quotient of decays and so no overflow, however strong the decay.
    pub fn diagonal_gradients(&mut self, t: &Pairs, d_scores_q: Shared<f32>, d_scores_k: Shared<f32>) {
        self.log_pairs("diagonal_gradients", t, BLOCK);
        let n = t.q.rows;
        for scores in [&d_scores_q, &d_scores_k] {
            Self::same_shape("diagonal_gradients", [n, n], [scores.rows, scores.cols]);
            for first in (0..n).step_by(BLOCK) {
                self.log_read(&scores.part(first, first, BLOCK, BLOCK));
            }
        }
        for tile in [t.dq, t.dk, t.dg] {
            self.log_update(&tile);
        }
        self.log_write(&t.row_k);
        for first in (0..n).step_by(BLOCK) {
            for c in 0..t.q.cols {
                let dc = if t.decay.cols == 1 { 0 } else { c };
                let x = |tile: &Shared<f32>, i: usize| self.at(tile, first + i, c);
                let (mut dq, mut row_k, mut dg) = ([0.0f32; BLOCK], [0.0f32; BLOCK], [0.0f32; BLOCK]);
                for j in 0..BLOCK {
                    // SAFETY: see `at`.
                    unsafe {
                        let (k_j, mut product, mut shares) = (x(&t.k, j).read(), 1.0, [0.0f32; BLOCK]);
                        let of_q = self.at(&d_scores_q, first + j, first + j).read();
                        dq[j] += of_q * k_j;
                        let mut col_k = of_q * x(&t.q, j).read();
                        for i in j + 1..BLOCK {
                            product = flush(product * self.at(&t.decay, first + i, dc).read());
                            let of_q = self.at(&d_scores_q, first + i, first + j).read();
                            let of_k = self.at(&d_scores_k, first + i, first + j).read();
                            dq[i] += of_q * k_j * product;
                            row_k[i] += of_k * k_j * product;
                            let share = (of_q * x(&t.q, i).read() + of_k * x(&t.k, i).read()) * product;
                            col_k += share;
                            shares[i] = share * k_j;
                        }
                        *x(&t.dk, j) += col_k;
                        let mut around = 0.0;
                        for i in (j + 1..BLOCK).rev() {
                            around += shares[i];
                            dg[i] += around;
                        }
                    }
                }
                for i in 0..BLOCK {
                    // SAFETY: see `at`.
                    unsafe {
                        *x(&t.dq, i) += dq[i];
                        *x(&t.dk, i) += row_k[i];
                        *x(&t.dg, i) += dg[i];
                        x(&t.row_k, i).write(x(&t.k, i).read() * row_k[i]);
                    }
                }
            }
        }
    }

    /// What both have in common: shapes, and the tiles that are only read.
    fn log_pairs(&mut self, op: &'static str, t: &Pairs, span: usize) {
        let shape = [t.q.rows, t.q.cols];
        for tile in [&t.k, &t.dq, &t.dk, &t.dg, &t.row_q, &t.row_k, &t.col_k] {
            Self::same_shape(op, shape, [tile.rows, tile.cols]);
        }
        let decay = [t.decay.rows, t.decay.cols];
        if decay[0] != shape[0] || !(decay[1] == 1 || decay[1] == shape[1]) || !shape[0].is_multiple_of(span) {
            raise(FaultKind::Shapes { op, shapes: vec![shape, decay] });
        }
        for tile in [&t.q, &t.k, &t.decay] {
            self.log_read(tile);
        }
    }
}
