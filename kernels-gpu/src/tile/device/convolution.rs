//! Operations of the short convolution: between matrices in global memory, each thread a channel.
//!
//! A thread walks the tokens of its channel and keeps the last W of them in registers, so every input is read once. Rows come
//! in groups of [`GROUP`], whose loads do not wait for each other. Arrays are indexed by constants only, and an address moves
//! on by a row: what a thread keeps must leave room for many of them on a multiprocessor.

use cuda_std::ptx::fma_rn_f32 as fma;

use super::Warpgroup;
use crate::math::sigmoid;
use crate::params::{Matrix, Tensor};
use crate::tile::convolution::silu_slope;
use crate::tile::{ConvolutionBack, ConvolutionRun, MAX_TAPS};

/// Rows that are loaded together.
const GROUP: usize = 4;

/// Runs `$body` for the constants of taps, `$i` from 0.
macro_rules! each_tap {
    (|$i:ident| $body:expr) => {
        each_tap!(@ |$i| $body; 0 1 2 3 4 5 6 7)
    };
    (@ |$i:ident| $body:expr; $($n:literal)*) => {
        $({
            const $i: usize = $n;
            $body
        })*
    };
}

/// As `each_tap`, for the taps that have a next one.
macro_rules! each_tap_but_the_last {
    (|$i:ident| $body:expr) => {
        each_tap!(@ |$i| $body; 0 1 2 3 4 5 6)
    };
}

/// Runs `$body` with the constant `$w` for the number of taps.
macro_rules! by_width {
    ($width:expr, $w:ident => $body:expr) => {
        by_width!(@ $width, $w => $body; 2 3 4 5 6 7)
    };
    (@ $width:expr, $w:ident => $body:expr; $($n:literal)*) => {
        match $width {
            $($n => {
                const $w: usize = $n;
                $body
            })*
            _ => {
                const $w: usize = MAX_TAPS;
                $body
            }
        }
    };
}

/// The last W values of a channel, the oldest first; values beyond W are unused.
type Window = [f32; MAX_TAPS];

#[inline(always)]
fn push<const W: usize>(window: &mut Window, x: f32) {
    each_tap_but_the_last!(|I| if I + 1 < W {
        window[I] = window[I + 1];
    });
    window[W - 1] = x;
}

/// A column of a matrix, from the next row on.
struct Walk {
    /// Of one element: the next row's.
    tensor: Tensor,
    /// Bytes between rows.
    step: u64,
    /// Whether the matrix has rows.
    present: bool,
}

impl Walk {
    #[inline(always)]
    fn new(matrix: &Matrix, c: usize) -> Self {
        let size = matrix.tensor.dtype().size();
        let addr = matrix.tensor.addr + ((matrix.offset + c * matrix.col_stride) * size) as u64;
        let tensor = Tensor { addr, ..matrix.tensor };
        Self { tensor, step: (matrix.row_stride * size) as u64, present: matrix.rows > 0 }
    }

    /// The next element.
    ///
    /// # Safety
    /// There must be one.
    #[inline(always)]
    unsafe fn next(&mut self) -> f32 {
        // SAFETY: by contract.
        let x = unsafe { self.tensor.matrix(0, 1, 1, 0, 0).load(0, 0) };
        self.tensor.addr += self.step;
        x
    }

    /// The next element, or 0 if the matrix has no rows.
    ///
    /// # Safety
    /// As of [`Walk::next`], if it has rows.
    #[inline(always)]
    unsafe fn next_or_zero(&mut self) -> f32 {
        // SAFETY: by contract.
        if self.present { unsafe { self.next() } } else { 0.0 }
    }

    /// The next elements, loaded before any is used.
    ///
    /// # Safety
    /// There must be as many.
    #[inline(always)]
    unsafe fn next_group(&mut self) -> [f32; GROUP] {
        // SAFETY: by contract.
        unsafe { [self.next(), self.next(), self.next(), self.next()] }
    }

    /// Rounds and stores the next element.
    ///
    /// # Safety
    /// There must be one, which no other thread stores.
    #[inline(always)]
    unsafe fn put(&mut self, x: f32) {
        // SAFETY: by contract.
        unsafe { self.tensor.matrix(0, 1, 1, 0, 0).store(0, 0, x) };
        self.tensor.addr += self.step;
    }
}

/// A thread's channel of a run.
struct Taps<const W: usize> {
    weight: [f32; MAX_TAPS],
    bias: f32,
    window: Window,
    silu: bool,
}

impl<const W: usize> Taps<W> {
    /// # Safety
    /// `c` must be a channel of the run.
    #[inline(always)]
    unsafe fn new(run: &ConvolutionRun, c: usize) -> Self {
        let mut taps = Self { weight: [0.0; MAX_TAPS], bias: 0.0, window: [0.0; MAX_TAPS], silu: run.silu };
        let (mut weight, mut before) = (Walk::new(&run.weight, c), Walk::new(&run.before, c));
        // SAFETY: the channel is inside, and so are the rows.
        unsafe {
            each_tap!(|I| if I < W {
                taps.weight[I] = weight.next();
            });
            taps.bias = Walk::new(&run.bias, c).next_or_zero();
            // The first push moves these down by one.
            each_tap_but_the_last!(|I| if I + 1 < W {
                taps.window[I + 1] = before.next_or_zero();
            });
        }
        taps
    }

    #[inline(always)]
    fn before_activation(&self) -> f32 {
        let mut z = self.bias;
        each_tap!(|I| if I < W {
            z = fma(self.weight[I], self.window[I], z);
        });
        z
    }

    #[inline(always)]
    fn output(&mut self, x: f32) -> f32 {
        push::<W>(&mut self.window, x);
        let z = self.before_activation();
        if self.silu { z * sigmoid(z) } else { z }
    }

    #[inline(always)]
    fn gradient(&mut self, x: f32, dy: f32) -> f32 {
        push::<W>(&mut self.window, x);
        if !self.silu {
            return dy;
        }
        dy * silu_slope(self.before_activation())
    }
}

/// What a thread adds up over a run, and the last W gradients of its channel.
struct Back<const W: usize> {
    upstream: Window,
    sums: [f32; MAX_TAPS],
    bias: f32,
}

impl<const W: usize> Back<W> {
    #[inline(always)]
    fn count(&mut self, taps: &Taps<W>, dz: f32) {
        each_tap!(|I| if I < W {
            self.sums[I] = fma(dz, taps.window[I], self.sums[I]);
        });
        self.bias += dz;
    }

    /// Takes dz of the next row, and gives dx of the row W-1 before it.
    #[inline(always)]
    fn complete(&mut self, taps: &Taps<W>, dz: f32) -> f32 {
        push::<W>(&mut self.upstream, dz);
        let mut dx = 0.0;
        each_tap!(|I| if I < W {
            dx = fma(taps.weight[W - 1 - I], self.upstream[I], dx);
        });
        dx
    }
}

impl Warpgroup<'_> {
    /// y of the first rows of a run, as many as `y` has.
    #[inline(always)]
    pub fn convolve(&mut self, y: Matrix, run: &ConvolutionRun) {
        let c = self.thread as usize;
        if c >= run.x.cols {
            return;
        }
        let (mut x, mut out, mut left) = (Walk::new(&run.x, c), Walk::new(&y, c), y.rows as u32);
        // SAFETY: the channel and all rows are inside.
        by_width!(run.weight.rows, W => unsafe {
            let mut taps = Taps::<W>::new(run, c);
            while left >= GROUP as u32 {
                let x = x.next_group();
                out.put(taps.output(x[0]));
                out.put(taps.output(x[1]));
                out.put(taps.output(x[2]));
                out.put(taps.output(x[3]));
                left -= GROUP as u32;
            }
            while left > 0 {
                out.put(taps.output(x.next()));
                left -= 1;
            }
        });
    }

    /// dz of the first rows of a run, as many as `dz` has, from `dy`, the gradient of y.
    #[inline(always)]
    pub fn convolve_gradient(&mut self, dz: Matrix, run: &ConvolutionRun, dy: Matrix) {
        let c = self.thread as usize;
        if c >= run.x.cols {
            return;
        }
        let (mut x, mut dy, mut out) = (Walk::new(&run.x, c), Walk::new(&dy, c), Walk::new(&dz, c));
        // SAFETY: the channel and all rows are inside.
        by_width!(run.weight.rows, W => unsafe {
            let mut taps = Taps::<W>::new(run, c);
            let mut left = dz.rows as u32;
            while left > 0 {
                out.put(taps.gradient(x.next(), dy.next()));
                left -= 1;
            }
        });
    }

    /// All gradients of a run.
    #[inline(always)]
    pub fn convolve_back(&mut self, back: &ConvolutionBack, run: &ConvolutionRun) {
        let c = self.thread as usize;
        if c >= run.x.cols {
            return;
        }
        let (tokens, given, real) = (back.dx.rows as u32, run.x.rows as u32, back.real as u32);
        let (mut x, mut dy, mut dx) = (Walk::new(&run.x, c), Walk::new(&back.dy, c), Walk::new(&back.dx, c));
        let (mut after, mut d_before) = (Walk::new(&back.after, c), Walk::new(&back.d_before, c));
        let mut out = Walk::new(&back.sums, c);
        // SAFETY: the channel and all rows are inside.
        by_width!(run.weight.rows, W => unsafe {
            let mut taps = Taps::<W>::new(run, c);
            let mut sums = Back::<W> { upstream: [0.0; MAX_TAPS], sums: [0.0; MAX_TAPS], bias: 0.0 };
            let mut r = 0;
            while r < tokens + W as u32 - 1 {
                if r + 1 >= W as u32 && r + GROUP as u32 <= tokens {
                    let (x, dy) = (x.next_group(), dy.next_group());
                    macro_rules! rows {
                        ($($i:literal)*) => {
                            $({
                                let dz = taps.gradient(x[$i], dy[$i]);
                                sums.count(&taps, dz);
                                dx.put(sums.complete(&taps, dz));
                            })*
                        };
                    }
                    rows!(0 1 2 3);
                    r += GROUP as u32;
                    continue;
                }
                let (mut dz, mut direct) = (0.0, 0.0);
                if r < given {
                    dz = taps.gradient(x.next(), dy.next());
                    if r < tokens {
                        sums.count(&taps, dz);
                    }
                } else if r - given < real {
                    dz = after.next_or_zero();
                } else {
                    direct = after.next_or_zero();
                }
                let complete = sums.complete(&taps, dz) + direct;
                if r + 1 >= W as u32 {
                    dx.put(complete);
                } else if d_before.present {
                    d_before.put(complete);
                }
                r += 1;
            }
            each_tap!(|I| if I < W {
                out.put(sums.sums[I]);
            });
            out.put(sums.bias);
        });
    }

    /// target(r, c) = source(r, c), and 0 where the source has no such row.
    #[inline(always)]
    pub fn copy_rows(&mut self, target: Matrix, source: Matrix) {
        let c = self.thread as usize;
        if c >= target.cols {
            return;
        }
        let (mut from, mut to) = (Walk::new(&source, c), Walk::new(&target, c));
        let mut r = 0;
        while r < target.rows {
            // SAFETY: the channel is inside, and so are the rows.
            unsafe { to.put(if r < source.rows { from.next() } else { 0.0 }) };
            r += 1;
        }
    }

    /// target(0, c) = sum over r of source(r, c), in a fixed order.
    #[inline(always)]
    pub fn sum_columns(&mut self, target: Matrix, source: Matrix) {
        let c = self.thread as usize;
        if c >= target.cols {
            return;
        }
        let (mut from, mut left) = (Walk::new(&source, c), source.rows);
        let mut sums = [0.0f32; GROUP];
        // SAFETY: the channel is inside, and so are the rows.
        unsafe {
            while left >= GROUP {
                let x = from.next_group();
                sums[0] += x[0];
                sums[1] += x[1];
                sums[2] += x[2];
                sums[3] += x[3];
                left -= GROUP;
            }
            while left > 0 {
                sums[0] += from.next();
                left -= 1;
            }
            Walk::new(&target, c).put((sums[0] + sums[1]) + (sums[2] + sums[3]));
        }
    }
}
