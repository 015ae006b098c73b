//! Operations of the short convolution: between matrices in global memory, row by row.

use super::check::raise;
use super::global::{Raw, with_raw};
use super::{FaultKind, Warpgroup};
use crate::math::sigmoid;
use crate::params::Matrix;
use crate::tile::convolution::silu_slope;
use crate::tile::{CONVOLUTION_CHANNELS, ConvolutionBack, ConvolutionRun, MAX_TAPS};

/// One value for each channel.
type Row = [f32; CONVOLUTION_CHANNELS];

const ZEROS: Row = [0.0; CONVOLUTION_CHANNELS];

/// The last W rows of something, the oldest first.
struct Window {
    rows: [Row; MAX_TAPS],
    width: usize,
}

impl Window {
    fn new(width: usize) -> Self {
        Self { rows: [ZEROS; MAX_TAPS], width }
    }

    fn push(&mut self, row: &Row) {
        self.rows.copy_within(1..self.width, 0);
        self.rows[self.width - 1] = *row;
    }
}

/// A run's parameters and the inputs that its taps see.
struct Taps {
    weight: [Row; MAX_TAPS],
    bias: Row,
    window: Window,
    silu: bool,
    cols: usize,
}

impl Taps {
    fn new(op: &'static str, run: &ConvolutionRun) -> Self {
        let (width, cols) = (run.weight.rows, run.x.cols);
        let fits = |m: &Matrix, rows: usize| m.rows == 0 || (m.rows, m.cols) == (rows, cols);
        let shapes = [&run.x, &run.before, &run.weight, &run.bias];
        if !(2..=MAX_TAPS).contains(&width)
            || cols > CONVOLUTION_CHANNELS
            || !fits(&run.before, width - 1)
            || !fits(&run.weight, width)
            || !fits(&run.bias, 1)
        {
            raise(FaultKind::Shapes { op, shapes: shapes.map(|m| [m.rows, m.cols]).to_vec() });
        }
        shapes.into_iter().for_each(|m| m.check_bounds(op));
        let mut taps =
            Self { weight: [ZEROS; MAX_TAPS], bias: ZEROS, window: Window::new(width), silu: run.silu, cols };
        for (w, row) in taps.weight[..width].iter_mut().enumerate() {
            *row = load(&run.weight, w);
        }
        taps.bias = load(&run.bias, 0);
        (0..width - 1).for_each(|r| taps.window.push(&load(&run.before, r)));
        taps
    }

    /// z, once the window ends with its token.
    fn before_activation(&self) -> Row {
        let mut z = self.bias;
        let rows = self.window.rows.iter().zip(&self.weight).take(self.window.width);
        for (x, weight) in rows {
            for c in 0..CONVOLUTION_CHANNELS {
                z[c] += weight[c] * x[c];
            }
        }
        z
    }

    /// y of the next row of x.
    fn output(&mut self, x: &Row) -> Row {
        self.window.push(x);
        let mut y = self.before_activation();
        if self.silu {
            for z in &mut y[..self.cols] {
                *z *= sigmoid(*z);
            }
        }
        y
    }

    /// dz of the next row of x.
    fn gradient(&mut self, x: &Row, dy: &Row) -> Row {
        self.window.push(x);
        let mut dz = *dy;
        if self.silu {
            let z = self.before_activation();
            for (dz, z) in dz[..self.cols].iter_mut().zip(z) {
                *dz *= silu_slope(z);
            }
        }
        dz
    }
}

/// Row `r`; zeros beyond the rows.
fn load(matrix: &Matrix, r: usize) -> Row {
    let mut row = ZEROS;
    if r < matrix.rows {
        with_raw!(matrix, T => {
            let base = matrix.pointer::<T>().wrapping_add(r * matrix.row_stride);
            for (c, x) in row[..matrix.cols].iter_mut().enumerate() {
                // SAFETY: inside the tensor, as the operations checked; the launcher vouches for tensor and type.
                *x = unsafe { base.wrapping_add(c * matrix.col_stride).read() }.widen();
            }
        });
    }
    row
}

fn store(matrix: &Matrix, r: usize, row: &Row) {
    with_raw!(matrix, T => {
        let base = matrix.pointer::<T>().wrapping_add(r * matrix.row_stride);
        for (c, x) in row[..matrix.cols].iter().enumerate() {
            // SAFETY: as in `load`, and that no other block stores these elements.
            unsafe { base.wrapping_add(c * matrix.col_stride).write(T::narrow(*x)) };
        }
    });
}

impl Warpgroup<'_> {
    fn expect_store(&self, op: &'static str, target: &Matrix, cols: usize, shapes: &[&Matrix]) {
        if target.rows > 0 && target.cols != cols || cols > CONVOLUTION_CHANNELS {
            let shapes = shapes.iter().map(|m| [m.rows, m.cols]).chain([[target.rows, target.cols]]).collect();
            raise(FaultKind::Shapes { op, shapes });
        }
        target.check_bounds(op);
        self.note_stores(target);
    }

    /// y of the first rows of a run, as many as `y` has.
    pub fn convolve(&mut self, y: Matrix, run: &ConvolutionRun) {
        let mut taps = Taps::new("convolve", run);
        self.expect_store("convolve", &y, run.x.cols, &[&run.x]);
        self.expect_rows("convolve", &run.x, y.rows);
        for r in 0..y.rows {
            store(&y, r, &taps.output(&load(&run.x, r)));
        }
    }

    /// dz of the first rows of a run, as many as `dz` has, from `dy`, the gradient of y.
    pub fn convolve_gradient(&mut self, dz: Matrix, run: &ConvolutionRun, dy: Matrix) {
        let mut taps = Taps::new("convolve_gradient", run);
        dy.check_bounds("convolve_gradient");
        self.expect_store("convolve_gradient", &dz, run.x.cols, &[&run.x, &dy]);
        self.expect_rows("convolve_gradient", &run.x, dz.rows);
        self.expect_rows("convolve_gradient", &dy, dz.rows);
        for r in 0..dz.rows {
            store(&dz, r, &taps.gradient(&load(&run.x, r), &load(&dy, r)));
        }
    }

    /// All gradients of a run.
    pub fn convolve_back(&mut self, back: &ConvolutionBack, run: &ConvolutionRun) {
        const OP: &str = "convolve_back";
        let mut taps = Taps::new(OP, run);
        let (width, cols, tokens) = (run.weight.rows, run.x.cols, back.dx.rows);
        for matrix in [&back.dy, &back.after] {
            matrix.check_bounds(OP);
        }
        for target in [&back.dx, &back.d_before, &back.sums] {
            self.expect_store(OP, target, cols, &[&run.x, &back.dy, &back.after]);
        }
        let (given, all) = (run.x.rows, tokens + width - 1);
        self.expect_rows(OP, &back.dy, given);
        self.expect_rows(OP, &back.sums, width + 1);
        if given > all || given < tokens {
            raise(FaultKind::Shapes { op: OP, shapes: vec![[given, cols], [tokens, cols]] });
        }
        let (mut upstream, mut sums) = (Window::new(width), [ZEROS; MAX_TAPS + 1]);
        for r in 0..all {
            let mut direct = ZEROS;
            let dz = if r < given {
                let dz = taps.gradient(&load(&run.x, r), &load(&back.dy, r));
                if r < tokens {
                    for (sum, x) in sums.iter_mut().zip(&taps.window.rows).take(width) {
                        for c in 0..CONVOLUTION_CHANNELS {
                            sum[c] += dz[c] * x[c];
                        }
                    }
                    for c in 0..CONVOLUTION_CHANNELS {
                        sums[width][c] += dz[c];
                    }
                }
                dz
            } else if r - given < back.real {
                load(&back.after, r - given)
            } else {
                direct = load(&back.after, r - given);
                ZEROS
            };
            upstream.push(&dz);
            let mut dx = ZEROS;
            for (dz, weight) in upstream.rows[..width].iter().zip(taps.weight[..width].iter().rev()) {
                for c in 0..CONVOLUTION_CHANNELS {
                    dx[c] += weight[c] * dz[c];
                }
            }
            for c in 0..CONVOLUTION_CHANNELS {
                dx[c] += direct[c];
            }
            if r + 1 >= width {
                store(&back.dx, r + 1 - width, &dx);
            } else if back.d_before.rows > 0 {
                store(&back.d_before, r, &dx);
            }
        }
        for (w, sum) in sums[..=width].iter().enumerate() {
            store(&back.sums, w, sum);
        }
    }

    /// target(r, c) = source(r, c), and 0 where the source has no such row.
    pub fn copy_rows(&mut self, target: Matrix, source: Matrix) {
        source.check_bounds("copy_rows");
        let cols = if source.rows > 0 { source.cols } else { target.cols };
        self.expect_store("copy_rows", &target, cols, &[&source]);
        for r in 0..target.rows {
            store(&target, r, &load(&source, r));
        }
    }

    /// target(0, c) = sum over r of source(r, c), in a fixed order.
    pub fn sum_columns(&mut self, target: Matrix, source: Matrix) {
        source.check_bounds("sum_columns");
        let cols = if source.rows > 0 { source.cols } else { target.cols };
        self.expect_store("sum_columns", &target, cols, &[&source]);
        let mut sum = ZEROS;
        for r in 0..source.rows {
            let row = load(&source, r);
            for c in 0..CONVOLUTION_CHANNELS {
                sum[c] += row[c];
            }
        }
        store(&target, 0, &sum);
    }

    fn expect_rows(&self, op: &'static str, matrix: &Matrix, rows: usize) {
        if matrix.rows < rows {
            raise(FaultKind::Shapes { op, shapes: vec![[matrix.rows, matrix.cols], [rows, matrix.cols]] });
        }
    }
}
