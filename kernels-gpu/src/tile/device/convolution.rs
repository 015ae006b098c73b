//! Operations of the short convolution: between matrices in global memory, each thread a channel.
//!
//! A thread walks the tokens of its channel and keeps the last W of them in registers, so every input is read once. Rows come
//! in groups of [`GROUP`], whose loads do not wait for each other. Arrays are indexed by constants only.

use cuda_std::ptx::fma_rn_f32 as fma;

use super::Warpgroup;
use crate::math::sigmoid;
use crate::params::Matrix;
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

/// A thread's channel of a run.
struct Taps<const W: usize> {
    weight: [f32; MAX_TAPS],
    bias: f32,
    window: Window,
    silu: bool,
}

/// Element (r, c), or 0 if the matrix has no rows.
///
/// # Safety
/// If it has rows, the element must lie inside the tensor.
#[inline(always)]
unsafe fn load_or_zero(matrix: &Matrix, r: usize, c: usize) -> f32 {
    // SAFETY: by contract.
    if matrix.rows > 0 { unsafe { matrix.load(r, c) } } else { 0.0 }
}

impl<const W: usize> Taps<W> {
    /// # Safety
    /// `c` must be a channel of the run.
    #[inline(always)]
    unsafe fn new(run: &ConvolutionRun, c: usize) -> Self {
        let mut taps = Self { weight: [0.0; MAX_TAPS], bias: 0.0, window: [0.0; MAX_TAPS], silu: run.silu };
        // SAFETY: the channel is inside, and so are the rows.
        unsafe {
            each_tap!(|I| if I < W {
                taps.weight[I] = run.weight.load(I, c);
            });
            taps.bias = load_or_zero(&run.bias, 0, c);
            // The first push moves these down by one.
            each_tap_but_the_last!(|I| if I + 1 < W {
                taps.window[I + 1] = load_or_zero(&run.before, I, c);
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
        let z = self.before_activation();
        dy * (sigmoid(z) * fma(z, sigmoid(-z), 1.0))
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

    /// Takes dz of row `r`, and stores what is complete with it: dx of the row W-1 before.
    ///
    /// # Safety
    /// `c` must be a channel of the run, and `r` at most W-1 rows behind it.
    #[inline(always)]
    unsafe fn emit(&mut self, taps: &Taps<W>, back: &ConvolutionBack, r: usize, c: usize, dz: f32, direct: f32) {
        push::<W>(&mut self.upstream, dz);
        let mut dx = 0.0;
        each_tap!(|I| if I < W {
            dx = fma(taps.weight[W - 1 - I], self.upstream[I], dx);
        });
        dx += direct;
        // SAFETY: by contract; each element has one thread.
        unsafe {
            if r + 1 >= W {
                back.dx.store(r + 1 - W, c, dx);
            } else if back.d_before.rows > 0 {
                back.d_before.store(r, c, dx);
            }
        }
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
        // SAFETY: the channel and all rows are inside.
        by_width!(run.weight.rows, W => unsafe {
            let mut taps = Taps::<W>::new(run, c);
            let mut r = 0;
            while r + GROUP <= y.rows {
                let x = [run.x.load(r, c), run.x.load(r + 1, c), run.x.load(r + 2, c), run.x.load(r + 3, c)];
                y.store(r, c, taps.output(x[0]));
                y.store(r + 1, c, taps.output(x[1]));
                y.store(r + 2, c, taps.output(x[2]));
                y.store(r + 3, c, taps.output(x[3]));
                r += GROUP;
            }
            while r < y.rows {
                y.store(r, c, taps.output(run.x.load(r, c)));
                r += 1;
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
        // SAFETY: the channel and all rows are inside.
        by_width!(run.weight.rows, W => unsafe {
            let mut taps = Taps::<W>::new(run, c);
            let mut r = 0;
            while r < dz.rows {
                dz.store(r, c, taps.gradient(run.x.load(r, c), dy.load(r, c)));
                r += 1;
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
        let (tokens, given) = (back.dx.rows, run.x.rows);
        // SAFETY: the channel and all rows are inside.
        by_width!(run.weight.rows, W => unsafe {
            let mut taps = Taps::<W>::new(run, c);
            let mut sums = Back::<W> { upstream: [0.0; MAX_TAPS], sums: [0.0; MAX_TAPS], bias: 0.0 };
            let mut r = 0;
            while r + GROUP <= tokens {
                let x = [run.x.load(r, c), run.x.load(r + 1, c), run.x.load(r + 2, c), run.x.load(r + 3, c)];
                let dy = [back.dy.load(r, c), back.dy.load(r + 1, c), back.dy.load(r + 2, c), back.dy.load(r + 3, c)];
                macro_rules! rows {
                    ($($i:literal)*) => {
                        $({
                            let dz = taps.gradient(x[$i], dy[$i]);
                            sums.count(&taps, dz);
                            sums.emit(&taps, back, r + $i, c, dz, 0.0);
                        })*
                    };
                }
                rows!(0 1 2 3);
                r += GROUP;
            }
            while r < given {
                let dz = taps.gradient(run.x.load(r, c), back.dy.load(r, c));
                if r < tokens {
                    sums.count(&taps, dz);
                }
                sums.emit(&taps, back, r, c, dz, 0.0);
                r += 1;
            }
            while r < tokens + W - 1 {
                let after = load_or_zero(&back.after, r - given, c);
                let (dz, direct) = if r - given < back.real { (after, 0.0) } else { (0.0, after) };
                sums.emit(&taps, back, r, c, dz, direct);
                r += 1;
            }
            each_tap!(|I| if I < W {
                back.sums.store(I, c, sums.sums[I]);
            });
            back.sums.store(W, c, sums.bias);
        });
    }

    /// target(r, c) = source(r, c), and 0 where the source has no such row.
    #[inline(always)]
    pub fn copy_rows(&mut self, target: Matrix, source: Matrix) {
        let c = self.thread as usize;
        if c >= target.cols {
            return;
        }
        let mut r = 0;
        while r < target.rows {
            // SAFETY: the channel is inside, and so are the rows.
            unsafe { target.store(r, c, if r < source.rows { source.load(r, c) } else { 0.0 }) };
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
        let mut sums = [0.0f32; GROUP];
        let mut r = 0;
        // SAFETY: the channel is inside, and so are the rows.
        unsafe {
            while r + GROUP <= source.rows {
                sums[0] += source.load(r, c);
                sums[1] += source.load(r + 1, c);
                sums[2] += source.load(r + 2, c);
                sums[3] += source.load(r + 3, c);
                r += GROUP;
            }
            while r < source.rows {
                sums[0] += source.load(r, c);
                r += 1;
            }
            target.store(0, c, (sums[0] + sums[1]) + (sums[2] + sums[3]));
        }
    }
}
