//! How far a result is from what it should be, and how far it may be.

mod gradients;

use std::fmt;

use crate::file::InputFile;
use crate::inputs::unravel;
use crate::tensor::Dtype;

pub use gradients::{
    Allowance, GRADIENT_MEDIAN_F32, gradient_tolerance, gradients, gradients_against_file, gradients_within,
};

/// Distance of a result from what was expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Error {
    /// `|found - expected| / |expected|` in the 2-norm: 0 if both are zero, infinite if only `expected` is zero or if a
    /// found value is not finite where it should be.
    pub rel_rms: f64,
    /// Largest `|found - expected|` over the largest `|expected|`, with the same conventions.
    pub rel_max: f64,
    /// Largest `|found - expected|`; infinite if a found value is not finite where it should be.
    pub max_abs: f64,
    /// Flat index of that element; 0 if there are none.
    pub worst_index: usize,
}

impl Error {
    /// Compares element by element. Where a non-finite value is expected the found one must be the same (any NaN for NaN).
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn of(found: &[f64], expected: &[f64]) -> Self {
        assert_eq!(found.len(), expected.len(), "found and expected differ in length");
        let (mut difference2, mut expected2, mut expected_max) = (0.0f64, 0.0f64, 0.0f64);
        let (mut max_abs, mut worst_index) = (0.0f64, 0);
        for (i, (&x, &y)) in found.iter().zip(expected).enumerate() {
            let d = distance(x, y);
            difference2 += d * d;
            if y.is_finite() {
                expected2 += y * y;
                expected_max = expected_max.max(y.abs());
            }
            if d > max_abs {
                (max_abs, worst_index) = (d, i);
            }
        }
        let rel_rms = relative(difference2.sqrt(), expected2.sqrt());
        Self { rel_rms, rel_max: relative(max_abs, expected_max), max_abs, worst_index }
    }

    /// Whether the relative RMS error is at most `tolerance`.
    pub fn within(&self, tolerance: f64) -> bool {
        self.rel_rms <= tolerance
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "relative RMS error {:.2e}, largest error {:.2e}", self.rel_rms, self.max_abs)
    }
}

/// A readable account of where `found` goes wrong, or `None` if [`Error::rel_rms`] is within `tolerance`.
///
/// An element counts as wrong if it is off by more than `tolerance` times the RMS of what was expected. `shape` turns flat
/// indices into those of tensor `name`.
///
/// # Panics
/// If the lengths differ.
pub fn mismatch(name: &str, shape: &[usize], found: &[f64], expected: &[f64], tolerance: f64) -> Option<String> {
    let error = Error::of(found, expected);
    if error.within(tolerance) {
        return None;
    }
    let finite = expected.iter().filter(|y| y.is_finite());
    let rms = (finite.map(|y| y * y).sum::<f64>() / expected.len() as f64).sqrt();
    let wrong = |i: &usize| distance(found[*i], expected[*i]) > tolerance * rms;
    // The RMS of all errors is beyond the limit, so at least one is; rounding at the limit itself leaves the worst one.
    let first = (0..found.len()).find(wrong).unwrap_or(error.worst_index);
    let place = |i: usize| format!("{name}{:?} is {:.6e}, expected {:.6e}", unravel(i, shape), found[i], expected[i]);
    Some(format!(
        "{name}: {error}, allowed {tolerance:.1e}; {} of {} elements are off; first {}; worst {}",
        (0..found.len()).filter(wrong).count(),
        found.len(),
        place(first),
        place(error.worst_index)
    ))
}

/// One result against the one that a file expects.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// The tensor.
    pub name: String,
    /// How far off it is.
    pub error: Error,
    /// The account of [`mismatch`], if it is off by more than allowed.
    pub mismatch: Option<String>,
}

/// Compares every result (name, row-major elements) that `file` has an expected tensor for.
///
/// # Panics
/// If a result and its expected tensor differ in length.
pub fn against_file(file: &InputFile, found: &[(&str, &[f64])], tolerance: f64) -> Vec<Checked> {
    let check = |&(name, found): &(&str, &[f64])| {
        let tensor = file.expected(name)?;
        let expected = tensor.data.to_f64();
        let error = Error::of(found, &expected);
        let mismatch = mismatch(name, &tensor.shape, found, &expected, tolerance);
        Some(Checked { name: name.to_owned(), error, mismatch })
    };
    found.iter().filter_map(check).collect()
}

/// How demanding the inputs are in low precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regime {
    /// Keys in all directions and steps below 1, as in a trained model.
    Ordinary,
    /// Correlated keys, steps up to 2 or single tokens that decay strongly: rounding errors reinforce each other.
    Hard,
}

/// Largest relative RMS error of a result against the f64 reference fed with the same (rounded) inputs.
pub fn tolerance(dtype: Dtype, regime: Regime) -> f64 {
    match (dtype, regime) {
        (Dtype::F32, _) => 1e-4,
        (Dtype::Bf16 | Dtype::F16, Regime::Ordinary) => 5e-3,
        (Dtype::Bf16 | Dtype::F16, Regime::Hard) => 8e-3,
    }
}

/// Largest relative error, in the 2-norm and in the max-norm, of the f64 reference against golden vectors stored in f32.
pub const REFERENCE_TOLERANCE: f64 = 1e-5;

fn distance(found: f64, expected: f64) -> f64 {
    if expected.is_nan() && found.is_nan() || found == expected {
        0.0
    } else if found.is_finite() && expected.is_finite() {
        (found - expected).abs()
    } else {
        f64::INFINITY
    }
}

fn relative(difference: f64, size: f64) -> f64 {
    if difference == 0.0 { 0.0 } else { difference / size }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAN: f64 = f64::NAN;
    const INF: f64 = f64::INFINITY;

    #[test]
    fn distances_are_relative_to_what_was_expected() {
        let error = Error::of(&[3.0, 4.5], &[3.0, 4.0]);
        assert_eq!(error, Error { rel_rms: 0.1, rel_max: 0.125, max_abs: 0.5, worst_index: 1 });
        assert!(error.within(0.1) && !error.within(0.0999));
    }

    #[test]
    fn zero_against_zero_is_right_and_against_anything_else_infinitely_wrong() {
        assert_eq!(Error::of(&[0.0; 2], &[0.0; 2]).rel_rms, 0.0);
        assert_eq!(Error::of(&[0.0, 1e-30], &[0.0; 2]).rel_rms, INF);
        assert_eq!(Error::of(&[], &[]).rel_rms, 0.0);
    }

    #[test]
    fn values_that_are_not_finite_never_pass() {
        for bad in [NAN, INF, -INF] {
            let error = Error::of(&[1.0, bad], &[1.0, 2.0]);
            assert_eq!((error.rel_rms, error.rel_max, error.max_abs, error.worst_index), (INF, INF, INF, 1), "{bad}");
            assert!(!error.within(1e300));
            assert_eq!(Error::of(&[1.0, 2.0], &[1.0, bad]).rel_rms, INF, "{bad} expected");
            assert_eq!(Error::of(&[1.0, bad], &[1.0, bad]).rel_rms, 0.0, "{bad} expected and found");
        }
        assert_eq!(Error::of(&[INF], &[-INF]).rel_rms, INF);
        assert_eq!(Error::of(&[NAN], &[0.0]).rel_rms, INF);
    }

    #[test]
    fn a_mismatch_names_the_first_and_the_worst_place() {
        let expected = [1.0; 12];
        let mut found = expected;
        assert_eq!(mismatch("o", &[2, 3, 2], &found, &expected, 1e-3), None);
        (found[5], found[10]) = (1.5, NAN);
        let report = mismatch("o", &[2, 3, 2], &found, &expected, 1e-3).unwrap();
        assert_eq!(
            report,
            "o: relative RMS error inf, largest error inf, allowed 1.0e-3; 2 of 12 elements are off; \
             first o[0, 2, 1] is 1.500000e0, expected 1.000000e0; worst o[1, 2, 0] is NaN, expected 1.000000e0"
        );
    }

    #[test]
    fn narrower_types_and_harder_inputs_may_err_more() {
        assert_eq!(tolerance(Dtype::F32, Regime::Hard), 1e-4);
        assert_eq!(tolerance(Dtype::Bf16, Regime::Ordinary), 5e-3);
        assert_eq!(tolerance(Dtype::F16, Regime::Hard), 8e-3);
    }
}
