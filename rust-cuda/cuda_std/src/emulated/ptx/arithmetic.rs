//! Conversions and approximate functions. The approximate ones are as exact as f32 is.

use half::{bf16, f16};

use crate::emulated::settled;

/// Two numbers as bf16, rounded to nearest even: `low` in the low half.
#[track_caller]
pub fn cvt_rn_bf16x2_f32(high: f32, low: f32) -> u32 {
    u32::from(cvt_rn_bf16_f32(high)) << 16 | u32::from(cvt_rn_bf16_f32(low))
}

/// Two numbers as f16, rounded to nearest even: `low` in the low half.
#[track_caller]
pub fn cvt_rn_f16x2_f32(high: f32, low: f32) -> u32 {
    u32::from(cvt_rn_f16_f32(high)) << 16 | u32::from(cvt_rn_f16_f32(low))
}

/// A number as bf16, rounded to nearest even.
#[track_caller]
pub fn cvt_rn_bf16_f32(value: f32) -> u16 {
    bf16::from_f32(settled("cvt.rn.bf16.f32", value)).to_bits()
}

/// A number as f16, rounded to nearest even.
#[track_caller]
pub fn cvt_rn_f16_f32(value: f32) -> u16 {
    f16::from_f32(settled("cvt.rn.f16.f32", value)).to_bits()
}

/// The number that an f16 holds.
pub fn cvt_f32_f16(half: u16) -> f32 {
    f16::from_bits(half).to_f32()
}

/// A number as TF32 (10 bits of fraction), rounded to nearest even.
#[track_caller]
pub fn cvt_rn_tf32_f32(value: f32) -> u32 {
    let bits = settled("cvt.rn.tf32.f32", value).to_bits();
    if value.is_finite() { bits.wrapping_add(0xfff + (bits >> 13 & 1)) & !0x1fff } else { bits & !0x1fff }
}

/// `a b + c`, all bits of the product.
pub fn mad_wide_u32(a: u32, b: u32, c: u64) -> u64 {
    (u64::from(a) * u64::from(b)).wrapping_add(c)
}

/// Products of two pairs of bf16, each rounded to nearest even.
pub fn mul_rn_bf16x2(a: u32, b: u32) -> u32 {
    // -0 leaves every product as it is, with its sign.
    fma_rn_bf16x2(a, b, 0x8000_8000)
}

/// `a b + c` of pairs of bf16, each rounded once, to nearest even.
pub fn fma_rn_bf16x2(a: u32, b: u32, c: u32) -> u32 {
    let of = |half: u32| {
        let [a, b, c] = [a, b, c].map(|pair| bf16::from_bits((pair >> half) as u16).to_f64());
        // The product is exact. Where the sum is not, it is further from a tie of bf16 than its own error.
        u32::from(bf16::from_f64(a * b + c).to_bits()) << half
    };
    of(16) | of(0)
}

/// Denormal numbers as 0, with their sign.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// 2^x; denormal numbers count as 0.
pub fn ex2_approx_ftz_f32(x: f32) -> f32 {
    flush(flush(x).exp2())
}

/// Binary logarithm.
pub fn lg2_approx_f32(x: f32) -> f32 {
    x.log2()
}

/// Binary logarithm; denormal numbers count as 0.
pub fn lg2_approx_ftz_f32(x: f32) -> f32 {
    flush(x).log2()
}

/// 1 / sqrt(x).
pub fn rsqrt_approx_f32(x: f32) -> f32 {
    1.0 / x.sqrt()
}

/// 1 / sqrt(x); denormal numbers count as 0.
pub fn rsqrt_approx_ftz_f32(x: f32) -> f32 {
    flush(1.0 / flush(x).sqrt())
}

/// 1 / x.
pub fn rcp_approx_f32(x: f32) -> f32 {
    1.0 / x
}

/// 1 / x; denormal numbers count as 0.
pub fn rcp_approx_ftz_f32(x: f32) -> f32 {
    flush(1.0 / flush(x))
}

/// Square root.
pub fn sqrt_approx_f32(x: f32) -> f32 {
    x.sqrt()
}

/// `a b + c`, rounded once.
pub fn fma_rn_f32(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

/// Square root, rounded to nearest even.
pub fn sqrt_rn_f32(x: f32) -> f32 {
    x.sqrt()
}
