//! Functions of f32 that `core` has not: exact to about an f32 rounding, built from multiplications and additions, so
//! that a device and the CPU give the same bits. Where 2^-22 suffices, `ptx::ex2_approx_ftz_f32` is cheaper.

use core::hint::select_unpredictable;

/// `a b + c`, rounded once.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return crate::ptx::fma_rn_f32(a, b, c);
    #[cfg(not(target_arch = "nvptx64"))]
    return a.mul_add(b, c);
}

/// Adding it to a small number leaves the nearest integer in the low bits of the sum: 1.5 * 2^23.
const ROUND: f32 = 12_582_912.0;

// ln 2 in two parts; products of the first with integers below 2^8 are exact.
const LN_2_HIGH: f32 = 0.693_145_75;
const LN_2_LOW: f32 = 1.428_606_8e-6;

/// e^x with a relative error of at most 1e-7; denormal results to their last place. NaN gives NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite: ln 2 in two parts, so that r keeps its precision for large x),
/// then a polynomial in r (minimax, 3e-9), then two exact multiplications by powers of two, since 2^n itself may
/// overflow or be denormal where e^x does not.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Beyond these bounds the result is 0 or infinite, and n would not fit. Comparisons with NaN are false, so NaN
    // stays. Written as selects: a branch would diverge.
    let x = select_unpredictable(x > 89.5, 89.5, x);
    let x = select_unpredictable(x < -105.0, -105.0, x);
    let rounded = fma(x, core::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = fma(n, -LN_2_LOW, fma(n, -LN_2_HIGH, x));
    let mut p = 1.381_459_9e-3;
    p = fma(p, r, 8.368_717e-3);
    p = fma(p, r, 4.166_839e-2);
    p = fma(p, r, 1.666_652_1e-1);
    p = fma(p, r, 0.5);
    p = fma(p, r, 1.0);
    p = fma(p, r, 1.0);
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// 2^n for n from -126 to 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// ln(1 + x) with a relative error of at most 1.2e-7. NaN, and x below -1, give NaN.
///
/// With e such that (1 + x) 2^-e is in [3/4, 3/2): ln(1 + x) = e ln 2 + ln(1 + m), where m = x 2^-e + (2^-e - 1) is
/// rounded once, and m = x where 1 + x would lose digits of x. Then a polynomial in m (minimax, 5e-9).
#[inline(always)]
pub fn ln_1p(x: f32) -> f32 {
    const THREE_QUARTERS: u32 = 0x3f40_0000;
    // For x from 2^24 on the sum is x, which is near enough to choose e.
    let e = ((1.0 + x).to_bits().wrapping_sub(THREE_QUARTERS) as i32) >> 23;
    // 2^-e in two factors: e can be 128, whose 2^-e is denormal.
    let half = e >> 1;
    let (down, down2) = (power_of_two(half.wrapping_neg()), power_of_two(half.wrapping_sub(e)));
    let m = fma(x * down, down2, down * down2 - 1.0);
    let mut q = -4.490_961_5e-2;
    q = fma(q, m, 1.044_833_2e-1);
    q = fma(q, m, -1.316_223_1e-1);
    q = fma(q, m, 1.448_206_2e-1);
    q = fma(q, m, -1.664_776_7e-1);
    q = fma(q, m, 1.999_060_7e-1);
    q = fma(q, m, -2.500_005_4e-1);
    q = fma(q, m, 3.333_345_4e-1);
    q = fma(q, m, -0.5);
    let y = fma(e as f32, core::f32::consts::LN_2, fma(q, m * m, m));
    let edge = select_unpredictable(x == -1.0, f32::NEG_INFINITY, f32::NAN);
    let y = select_unpredictable(x > -1.0, y, edge);
    select_unpredictable(x == f32::INFINITY, x, y)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest relative error of `f` against `exact` over the bit patterns from `low` to `high`, in steps.
    fn worst(f: fn(f32) -> f32, exact: fn(f64) -> f64, low: f32, high: f32, steps: u32) -> (f64, f32) {
        let mut worst = (0.0, 0.0);
        for i in 0..=steps {
            let x = low + (high - low) * (i as f32 / steps as f32);
            let want = exact(x.into());
            let error = if want == 0.0 { f64::from(f(x)).abs() } else { ((f64::from(f(x)) - want) / want).abs() };
            if error > worst.0 {
                worst = (error, x);
            }
        }
        worst
    }

    #[test]
    fn exp_is_exact_to_a_rounding() {
        for (low, high) in [(-1.0, 1.0), (-20.0, 20.0), (-87.3, 88.72), (-1e-3, 1e-3)] {
            let (error, at) = worst(exp, f64::exp, low, high, 2_000_003);
            assert!(error < 1e-7, "{error:e} at {at}");
        }
    }

    #[test]
    fn exp_has_the_right_ends() {
        assert_eq!((exp(0.0), exp(-0.0)), (1.0, 1.0));
        assert_eq!((exp(f32::INFINITY), exp(f32::NEG_INFINITY)), (f32::INFINITY, 0.0));
        assert_eq!((exp(88.8), exp(1e30), exp(-104.1), exp(-1e30)), (f32::INFINITY, f32::INFINITY, 0.0, 0.0));
        assert!(exp(88.7).is_finite() && exp(f32::NAN).is_nan());
        // Denormal results: to their last place.
        for x in [-88.0f32, -95.5, -103.0] {
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) - want).abs() <= f64::from(f32::from_bits(1)), "{x}");
        }
    }

    #[test]
    fn ln_1p_is_exact_to_a_rounding() {
        let ranges =
            [(-0.999, -0.2), (-0.3, 0.6), (-1e-3, 1e-3), (-1e-12, 1e-12), (0.4, 10.0), (1.0, 1e6), (1e7, 3e38)];
        for (low, high) in ranges {
            let (error, at) = worst(ln_1p, f64::ln_1p, low, high, 2_000_003);
            assert!(error < 1.2e-7, "{error:e} at {at}");
        }
    }

    #[test]
    fn ln_1p_has_the_right_ends() {
        assert_eq!((ln_1p(0.0), ln_1p(-0.0)), (0.0, 0.0));
        assert_eq!((ln_1p(-1.0), ln_1p(f32::INFINITY)), (f32::NEG_INFINITY, f32::INFINITY));
        assert!(ln_1p(-1.1).is_nan() && ln_1p(f32::NAN).is_nan());
        assert_eq!(ln_1p(1e-40), 1e-40);
        assert!((f64::from(ln_1p(f32::MAX)) - f64::from(f32::MAX).ln_1p()).abs() < 1e-5);
    }
}
