//! Scalar functions of the gates. `core` has no transcendental functions for a device, so they have one home.

#[cfg(not(any(target_arch = "nvptx64", emulated)))]
mod target {
    /// e^x.
    #[inline(always)]
    pub fn exp(x: f32) -> f32 {
        x.exp()
    }
    /// ln(1 + x).
    #[inline(always)]
    pub fn ln_1p(x: f32) -> f32 {
        x.ln_1p()
    }
    /// 1 / sqrt(x).
    #[inline(always)]
    pub fn rsqrt(x: f32) -> f32 {
        1.0 / x.sqrt()
    }
    /// sqrt(x).
    #[inline(always)]
    pub fn sqrt(x: f32) -> f32 {
        x.sqrt()
    }
}

#[cfg(any(target_arch = "nvptx64", emulated))]
mod target {
    pub use cuda_std::math::{exp, ln_1p};

    /// 1 / sqrt(x), to about 2 units in the last place.
    #[inline(always)]
    pub fn rsqrt(x: f32) -> f32 {
        cuda_std::ptx::rsqrt_approx_f32(x)
    }

    /// sqrt(x), to about 3 units in the last place; 0 for 0.
    #[inline(always)]
    pub fn sqrt(x: f32) -> f32 {
        if x == 0.0 { 0.0 } else { x * rsqrt(x) }
    }
}

pub use target::{exp, ln_1p, rsqrt, sqrt};

/// Products of decays below this are set to zero: together with operands of ordinary size they are far
/// below f32 rounding, and denormal numbers are slow on CPUs (GPUs flush them anyway).
pub const TINY: f32 = 7.888_609e-31; // 2^-100

/// `x`, or zero where it is tiny.
#[inline(always)]
pub fn flush(x: f32) -> f32 {
    if x.abs() < TINY { 0.0 } else { x }
}

/// `x` rounded to the 11 bits of TF32 (nearest, ties to even).
#[inline(always)]
pub fn tf32(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0xfff + ((bits >> 13) & 1)) & 0xffff_e000;
    if x.is_nan() { x } else { f32::from_bits(rounded) }
}

/// 1 / (1 + e^-x), without overflow.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let e = exp(-x.abs());
    if x >= 0.0 { 1.0 / (1.0 + e) } else { e / (1.0 + e) }
}

/// ln(1 + e^x), without overflow.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    x.max(0.0) + ln_1p(exp(-x.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_stay_finite() {
        for x in [-1e4f32, -160.0, -1.0, 0.0, 1.0, 160.0, 1e4] {
            assert!((0.0..=1.0).contains(&sigmoid(x)));
            assert!(softplus(x).is_finite() && softplus(x) >= 0.0);
        }
        assert_eq!(softplus(200.0), 200.0);
        assert!((f64::from(softplus(0.3)) - 0.3f64.exp().ln_1p()).abs() < 1e-7);
        assert!((f64::from(sigmoid(-0.3)) - 1.0 / (1.0 + 0.3f64.exp())).abs() < 1e-7);
    }

    #[test]
    fn tf32_rounds_to_nearest_even() {
        let units = |x: f32| 1.0 + x * 8192.0 * f32::EPSILON;
        for (x, rounded) in [(1.0, 1.0), (1.5, 2.0), (2.5, 2.0), (2.49, 2.0), (1.51, 2.0)] {
            assert_eq!([tf32(units(x)), tf32(-units(x))], [units(rounded), -units(rounded)]);
        }
        assert_eq!([tf32(0.0), tf32(-3.0), tf32(f32::INFINITY)], [0.0, -3.0, f32::INFINITY]);
    }

    #[test]
    fn nan_is_kept() {
        assert!(
            tf32(f32::NAN).is_nan()
                && flush(f32::NAN).is_nan()
                && sigmoid(f32::NAN).is_nan()
                && softplus(f32::NAN).is_nan()
        );
    }
}
