//! Register tiles: f32 accumulators of up to 64 x 64 elements, spread over a warpgroup's registers on a GPU.

use super::check::raise;
use super::global::{Raw, with_raw};
use super::ops::each_of_row;
use super::{FaultKind, Shared, Warpgroup};
use crate::element::Element;
use crate::math::flush;
use crate::params::Matrix;
use crate::tile::ACC_MAX;

/// An accumulator tile of `rows` x `cols`, both multiples of 16 and at most 64.
pub struct Acc {
    rows: usize,
    cols: usize,
    data: [f32; ACC_MAX * ACC_MAX],
}

impl Acc {
    /// Zeros.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        if rows > ACC_MAX || cols > ACC_MAX || !rows.is_multiple_of(16) || !cols.is_multiple_of(16) {
            raise(FaultKind::Shapes { op: "Acc::zeros", shapes: vec![[rows, cols]] });
        }
        Self { rows, cols, data: [0.0; ACC_MAX * ACC_MAX] }
    }

    /// The values of a shared tile.
    pub fn load<E: Element>(wg: &mut Warpgroup<'_>, tile: Shared<E>) -> Self {
        let mut acc = Self::zeros(tile.rows, tile.cols);
        wg.log_read(&tile);
        for r in 0..tile.rows {
            let (row, from) = (&mut acc.data[r * tile.cols..][..tile.cols], wg.at(&tile, r, 0));
            each_of_row(tile.cols, (1, tile.col_stride), |c, at_tile| {
                // SAFETY: the handle lies inside the arena; see `Warpgroup::at`.
                row[c] = unsafe { from.wrapping_add(at_tile).read() };
            });
        }
        acc
    }

    #[inline(always)]
    fn expect(&self, op: &'static str, rows: usize, cols: usize) {
        if (self.rows, self.cols) != (rows, cols) {
            raise(FaultKind::Shapes { op, shapes: vec![[self.rows, self.cols], [rows, cols]] });
        }
    }

    /// self += a b.
    pub fn mma<E: Element>(&mut self, wg: &mut Warpgroup<'_>, a: Shared<E>, b: Shared<E>) {
        self.product(wg, 1.0, a, b);
    }

    /// self -= a b.
    pub fn mma_sub<E: Element>(&mut self, wg: &mut Warpgroup<'_>, a: Shared<E>, b: Shared<E>) {
        self.product(wg, -1.0, a, b);
    }

    fn product<E: Element>(&mut self, wg: &mut Warpgroup<'_>, alpha: f32, a: Shared<E>, b: Shared<E>) {
        if (a.rows, b.cols) != (self.rows, self.cols) || a.cols != b.rows {
            let shapes = vec![[self.rows, self.cols], [a.rows, a.cols], [b.rows, b.cols]];
            raise(FaultKind::Shapes { op: "mma", shapes });
        }
        wg.log_read(&a);
        wg.log_read(&b);
        // SAFETY: both handles lie inside the arena (`Warpgroup::allocate`, `Shared::part`), the accumulator
        // holds rows * cols elements, and nothing else runs on this block's arena meanwhile.
        unsafe {
            matrixmultiply::sgemm(
                self.rows,
                a.cols,
                self.cols,
                alpha,
                wg.at(&a, 0, 0),
                a.row_stride as isize,
                a.col_stride as isize,
                wg.at(&b, 0, 0),
                b.row_stride as isize,
                b.col_stride as isize,
                1.0,
                self.data.as_mut_ptr(),
                self.cols as isize,
                1,
            );
        }
    }

    /// self += the values of a shared tile.
    pub fn add<E: Element>(&mut self, wg: &mut Warpgroup<'_>, tile: Shared<E>) {
        self.expect("add", tile.rows, tile.cols);
        wg.log_read(&tile);
        for r in 0..tile.rows {
            for c in 0..tile.cols {
                // SAFETY: the handle lies inside the arena; see `Warpgroup::at`.
                self.data[r * self.cols + c] += unsafe { wg.at(&tile, r, c).read() };
            }
        }
    }

    /// Multiplies column c by element c of the row `factors`, and sets tiny results to zero.
    pub fn scale_columns(&mut self, wg: &mut Warpgroup<'_>, factors: Shared<f32>) {
        self.expect("scale_columns", self.rows, factors.cols);
        wg.log_read(&factors);
        let mut row_factors = [0.0; ACC_MAX];
        for (c, f) in row_factors[..self.cols].iter_mut().enumerate() {
            // SAFETY: the handle lies inside the arena; see `Warpgroup::at`.
            *f = unsafe { wg.at(&factors, 0, c).read() };
        }
        for row in self.data[..self.rows * self.cols].chunks_exact_mut(self.cols) {
            for (x, f) in row.iter_mut().zip(&row_factors) {
                *x = flush(*x * f);
            }
        }
    }

    /// Stores into a shared tile, rounded to its element type.
    pub fn store<E: Element>(&self, wg: &mut Warpgroup<'_>, tile: Shared<E>) {
        self.expect("store", tile.rows, tile.cols);
        wg.log_write(&tile);
        for r in 0..self.rows {
            let (row, to) = (&self.data[r * self.cols..][..self.cols], wg.at(&tile, r, 0));
            each_of_row(self.cols, (1, tile.col_stride), |c, at_tile| {
                // SAFETY: the handle lies inside the arena; see `Warpgroup::at`.
                unsafe { to.wrapping_add(at_tile).write(E::round(row[c])) };
            });
        }
    }

    /// self += the elements of `matrix`, which may be smaller than the tile: the rest stays.
    pub fn add_global(&mut self, _: &mut Warpgroup<'_>, matrix: Matrix) {
        self.fits("add_global", &matrix);
        with_raw!(matrix, T => self.for_each(&matrix, |x, p: *mut T| {
            // SAFETY: inside the tensor, as `fits` checked; the launcher vouches for tensor and type.
            *x += unsafe { p.read() }.widen();
        }));
    }

    /// Stores into `matrix`, which may be smaller than the tile: the rest is left out.
    pub fn store_global(&mut self, wg: &mut Warpgroup<'_>, matrix: Matrix) {
        self.fits("store_global", &matrix);
        with_raw!(matrix, T => self.for_each(&matrix, |x, p: *mut T| {
            // SAFETY: inside the tensor, as `fits` checked; the launcher vouches for tensor and type, and that
            // no other block stores these elements.
            unsafe { p.write(T::narrow(*x)) };
        }));
        wg.note_stores(&matrix);
    }

    #[inline(always)]
    fn fits(&self, op: &'static str, matrix: &Matrix) {
        if matrix.rows > self.rows || matrix.cols > self.cols {
            raise(FaultKind::Shapes { op, shapes: vec![[self.rows, self.cols], [matrix.rows, matrix.cols]] });
        }
        matrix.check_bounds(op);
    }

    /// Visits the elements that `matrix` covers, along its smaller stride.
    #[inline(always)]
    fn for_each<T: Raw>(&mut self, matrix: &Matrix, mut visit: impl FnMut(&mut f32, *mut T)) {
        let base = matrix.pointer::<T>();
        if matrix.row_stride <= matrix.col_stride {
            for c in 0..matrix.cols {
                for r in 0..matrix.rows {
                    let p = base.wrapping_add(r * matrix.row_stride + c * matrix.col_stride);
                    visit(&mut self.data[r * self.cols + c], p);
                }
            }
        } else {
            for r in 0..matrix.rows {
                for c in 0..matrix.cols {
                    let p = base.wrapping_add(r * matrix.row_stride + c * matrix.col_stride);
                    visit(&mut self.data[r * self.cols + c], p);
                }
            }
        }
    }
}
