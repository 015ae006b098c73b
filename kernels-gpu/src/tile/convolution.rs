//! Operands of the operations of a short convolution, which are the same on both targets.

use crate::math::exp;
use crate::params::Matrix;

/// Channels of one operation: a thread each on a GPU.
pub const CONVOLUTION_CHANNELS: usize = 128;

/// Most taps.
pub const MAX_TAPS: usize = 8;

/// A run of tokens (rows) of up to [`CONVOLUTION_CHANNELS`] channels (columns): with W taps,
/// `z(r, c) = bias(c) + sum over w of weight(w, c) x(r - (W-1) + w, c)` and `y = z`, or `y = z sigmoid(z)` with `silu`.
///
/// A matrix without rows stands for zeros.
#[derive(Clone, Copy)]
pub struct ConvolutionRun {
    /// The tokens.
    pub x: Matrix,
    /// The W-1 rows before them, oldest first, or no rows.
    pub before: Matrix,
    /// `[W, channels]`, W from 2 to [`MAX_TAPS`].
    pub weight: Matrix,
    /// `[1, channels]`, or no rows.
    pub bias: Matrix,
    /// Whether SiLU follows.
    pub silu: bool,
}

/// The gradients of a run, from those of its outputs. With dz the gradient of z, `dx(r) = sum over j of weight(W-1-j)
/// dz(r + j)`, so a run needs dz of W-1 rows after its last one.
#[derive(Clone, Copy)]
pub struct ConvolutionBack {
    /// Gradient of y of the run's rows and those after them of the same segment: as many rows as the run's x has, which
    /// then goes on beyond the run.
    pub dy: Matrix,
    /// What follows those rows, up to W-1 rows behind the run: first `real` rows of dz, then rows that are no token's, each
    /// added to dx of the row W-1 before it. Or no rows.
    pub after: Matrix,
    /// How many rows of `after` are dz.
    pub real: usize,
    /// Gradient of x, a row for each token of the run.
    pub dx: Matrix,
    /// Gradient of the W-1 rows before, if the run begins its sequence; or no rows.
    pub d_before: Matrix,
    /// f32 `[W + 1, channels]`: the run's shares of the gradients of the weights, tap by tap, and of the bias.
    pub sums: Matrix,
}

/// Derivative of `z sigmoid(z)`: `sigmoid(z) (1 + z sigmoid(-z))`, with one exponential for both.
#[inline(always)]
pub(super) fn silu_slope(z: f32) -> f32 {
    let e = exp(-z.abs());
    let larger = 1.0 / (1.0 + e);
    let smaller = e * larger;
    let (positive, negative) = if z >= 0.0 { (larger, smaller) } else { (smaller, larger) };
    positive * (1.0 + z * negative)
}

#[cfg(test)]
mod tests {
    use super::silu_slope;

    #[test]
    fn the_slope_is_exact_also_where_the_sigmoid_is_flat() {
        for z in [-80.0f32, -17.0, -3.0, -0.2, 0.0, 0.2, 3.0, 17.0, 80.0] {
            let x = f64::from(z);
            let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
            let want = sigmoid(x) * (1.0 + x * sigmoid(-x));
            assert!((f64::from(silu_slope(z)) - want).abs() <= 3e-7 * want.abs(), "{z}: {} for {want}", silu_slope(z));
        }
        assert!(silu_slope(f32::NAN).is_nan());
    }
}
