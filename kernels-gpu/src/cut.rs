//! Where the transition M of a segment is cut off, because what it would still do is below a tolerance.
//!
//! The state before a segment enters its outputs by `q-tilde_t S_in` and the state after it by `M S_in`. M shrinks with every
//! decay and every erased key. Once its norm is known to stay below a tolerance, its columns need not be walked on, outputs
//! need no correction, and M need not be sent. All norms are spectral or larger.
//!
//! # What is known of the norm
//! A token maps the state by `T = (I - beta k k^T) Diag(exp g)`, so
//! ```text
//! |T| <= growth * max_d exp(g_d)              growth = max(1, |1 - beta |k|^2|)
//! ```
//! and a run of tokens by at most the product. (The largest of the products over each channel would be smaller and no
//! bound: erasing mixes channels.) For `|k| <= 1` and `0 <= beta <= 2` growth is 1. Rows of k that are normalised have a norm of 1
//! or less; of others it is measured. `prep` leaves the product over each chunk, its *factor*, and that of growth alone;
//! each is rounded up by more than its arithmetic can lose: `token_factor`, `growth`.
//!
//! With `F_c` the product of the factors of all chunks before chunk c and `N` that of growth over the whole segment,
//! `|M_t| <= N F_c` for all tokens t from chunk c on, whatever the tokens. So:
//!
//! * *S* needs no correction from the first chunk c on with `N F_c <= tolerance`. This is known before the walk.
//! * *M*, of which a block J holds some columns, stops there too, or after the first chunk with `N |M_J| sqrt(blocks) <= tolerance`,
//!   where the norm of its columns is measured, by the root of the sum of squares. Then all of what the blocks leave out is within the
//!   tolerance together.
//!
//! # What it costs
//! An output changes by at most `tolerance * |q_t scale| * |S_in|`, a state by `tolerance * |S_in|`. The tolerance is
//! relative to the state that arrives, and 2^-24 by default: an f32 sum over K channels loses as much by itself.
//!
//! Rounding: the first criterion bounds the exact M of the given inputs (with the decays that `prep` computes of them), so what it
//! leaves out is within the tolerance of the exact result, whatever the walk would have made of it. The second one measures the M that the walk has computed, which is
//! the exact one plus the rounding errors made so far, E. What is left out is then the continuation of the measured part, within the
//! tolerance, and that of E, which the walk would have carried on as well, unknowing, as an error of its result.
//! So the error with the cut exceeds that of the walk's arithmetic up to the cut by at most the tolerance, for f32
//! accumulators and 16-bit operands alike; and the errors of the chunks that are not walked are not made at all.

use core::sync::atomic::Ordering;

use crate::params::{Array, Cut};
use crate::tile::Warpgroup;

/// Relative error of computed norms and products of decays that [`growth`] and [`token_factor`] allow for.
const NORM_SLACK: f32 = 3.051_757_8e-5; // 2^-15: sums of up to 256 squares
const DECAY_SLACK: f32 = 3.814_697_3e-6; // 2^-18: exponentials of down to SMALLEST, and two products
/// A token's factor is taken to be at least this, so that the exponent's rounding stays within the slack.
const SMALLEST: f32 = 6.938_894e-18; // 2^-57
/// Relative error of a sum of up to 64 x 256 squares.
const SQUARES_SLACK: f32 = 1.001;

/// Products of factors are kept above this: a product that has become zero would not bound anything.
pub(crate) const LEAST: f32 = 7.888_609e-31; // 2^-100

/// What a token with `beta |k|^2 = y` may make a state grow by, at least 1.
#[inline(always)]
pub(crate) fn growth(y: f32) -> f32 {
    let grown = (1.0 - y).abs() + NORM_SLACK * y.abs();
    // Not `max`: NaN must not become 1.
    if grown <= 1.0 { 1.0 } else { grown }
}

/// What a token multiplies the norm of a state by at most, from its largest decay and its growth.
#[inline(always)]
pub(crate) fn token_factor(largest_decay: f32, growth: f32) -> f32 {
    let decay = if largest_decay < SMALLEST { SMALLEST } else { largest_decay };
    decay * growth * (1.0 + DECAY_SLACK)
}

/// 1 / x^2, and 0 for 0: the square of a norm from its inverse, where a row that is not there has inverse 0.
#[inline(always)]
pub(crate) fn square_from_inverse(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / (x * x) }
}

/// What is known of a segment's transition before it is walked.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    /// Chunks before the outputs need no correction any more; more than there are, if they always do and M matters at the end.
    pub rows: u32,
    /// What a state may grow by at most, anywhere in the segment.
    pub growth: f32,
    /// The bound at that chunk; 0 if there is none.
    pub bound: f32,
}

impl Known {
    /// Nothing: nothing is cut off.
    pub const NOTHING: Self = Self { rows: u32::MAX, growth: f32::INFINITY, bound: 0.0 };

    /// Whether anything is to be cut off at all.
    #[inline(always)]
    pub fn is_asked(&self) -> bool {
        self.rows != u32::MAX
    }
}

/// A bound on the norm of `blocks` blocks of columns of M from now on that are as large as one with this sum of squares.
#[inline(always)]
pub(crate) fn columns_bound(squares: f32, blocks: u32, growth: f32) -> f32 {
    crate::math::sqrt(squares * SQUARES_SLACK * blocks as f32) * growth
}

/// What became of block `index` of the table.
#[inline(always)]
pub(crate) fn read(wg: &Warpgroup<'_>, cuts: Array, index: usize) -> Cut {
    wg.read(cuts, index)
}

/// Notes what became of block `index` of the table.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn note(wg: &mut Warpgroup<'_>, cuts: Array, index: usize, cut: Cut) {
    let words = Array { addr: cuts.addr, len: 2 * cuts.len };
    wg.elect(|wg| {
        let first = u64::from(cut.dropped) | u64::from(cut.empty) << 32;
        wg.word(words, 2 * index).store(first, Ordering::Relaxed);
        wg.word(words, 2 * index + 1).store(u64::from(cut.bound.to_bits()), Ordering::Relaxed);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spectral norm of `(I - beta k k^T) Diag(alpha)` by power iteration on its square.
    fn norm(k: &[f64], beta: f64, alpha: &[f64]) -> f64 {
        let n = k.len();
        let apply = |x: &[f64]| {
            let y: Vec<f64> = (0..n).map(|i| alpha[i] * x[i]).collect();
            let dot: f64 = (0..n).map(|i| k[i] * y[i]).sum();
            (0..n).map(|i| y[i] - beta * k[i] * dot).collect::<Vec<f64>>()
        };
        let apply_transposed = |x: &[f64]| {
            let dot: f64 = (0..n).map(|i| k[i] * x[i]).sum();
            (0..n).map(|i| alpha[i] * (x[i] - beta * k[i] * dot)).collect::<Vec<f64>>()
        };
        let mut x: Vec<f64> = (0..n).map(|i| 1.0 + (i as f64 * 0.37).sin()).collect();
        let mut squared = 0.0;
        for _ in 0..500 {
            let size = x.iter().map(|x| x * x).sum::<f64>().sqrt();
            x.iter_mut().for_each(|x| *x /= size);
            x = apply_transposed(&apply(&x));
            squared = x.iter().map(|x| x * x).sum::<f64>().sqrt();
        }
        squared.sqrt()
    }

    #[test]
    fn a_token_never_does_more_than_its_factor_and_can_do_nearly_as_much() {
        let mut tightest: f64 = 0.0;
        for case in 0..200u32 {
            let of = |i: u32| f64::from((case * 31 + i).wrapping_mul(2_654_435_761) >> 8) / f64::from(1u32 << 24);
            let n = 4;
            let size = [0.5, 1.0, 1.0, 1.7][case as usize % 4];
            let k: Vec<f64> = (0..n).map(|i| of(i) - 0.5).collect();
            let length = k.iter().map(|x| x * x).sum::<f64>().sqrt();
            let k: Vec<f64> = k.iter().map(|x| x / length * size).collect();
            let beta = [0.5, 1.0, 2.0, -0.7, 1.9][case as usize % 5];
            let alpha: Vec<f64> = (0..n).map(|i| 0.5 + 0.5 * of(10 + i)).collect();
            let largest = alpha.iter().fold(0.0f64, |a, &b| a.max(b));
            let bound = f64::from(token_factor(largest as f32, growth((beta * size * size) as f32)));
            let found = norm(&k, beta, &alpha);
            assert!(found <= bound, "case {case}: the norm is {found}, the bound {bound}");
            tightest = tightest.max(found / bound);
        }
        assert!(tightest > 0.95, "{tightest}");
    }

    #[test]
    fn ordinary_steps_do_not_grow_and_bad_numbers_bound_nothing() {
        assert_eq!([0.0, 0.3, 1.0, 1.9999].map(growth), [1.0; 4]);
        assert!(growth(2.0) > 1.0 && growth(2.0) < 1.0001 && growth(2.5) > 1.5 && growth(-0.5) > 1.5);
        assert!(growth(f32::NAN).is_nan() && growth(f32::INFINITY) == f32::INFINITY);
        assert!(token_factor(0.0, 1.0) > 0.0);
        assert_eq!((square_from_inverse(0.0), square_from_inverse(0.5)), (0.0, 4.0));
    }
}
