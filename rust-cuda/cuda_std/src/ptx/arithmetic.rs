//! Conversions and approximate functions. All are functions of registers.
//!
//! Plain `+ - * /` of f32 are rounded to nearest even each; nothing is contracted unless written as [`fma_rn_f32`].

use super::{asm, table::instructions};

instructions! {
    /// Two numbers as bf16, rounded to nearest even: `low` in the low half.
    pure cvt_rn_bf16x2_f32(high: reg32 f32, low: reg32 f32) -> (pair: reg32 u32) =
        "cvt.rn.bf16x2.f32 {pair}, {high}, {low};";
    /// Two numbers as f16, rounded to nearest even: `low` in the low half. Above 65504 infinity.
    pure cvt_rn_f16x2_f32(high: reg32 f32, low: reg32 f32) -> (pair: reg32 u32) =
        "cvt.rn.f16x2.f32 {pair}, {high}, {low};";
    /// A number as bf16, rounded to nearest even.
    pure cvt_rn_bf16_f32(value: reg32 f32) -> (half: reg16 u16) = "cvt.rn.bf16.f32 {half}, {value};";
    /// A number as f16, rounded to nearest even.
    pure cvt_rn_f16_f32(value: reg32 f32) -> (half: reg16 u16) = "cvt.rn.f16.f32 {half}, {value};";
    /// The number that an f16 holds.
    pure cvt_f32_f16(half: reg16 u16) -> (value: reg32 f32) = "cvt.f32.f16 {value}, {half};";
    /// A number as TF32 (10 bits of fraction), rounded to nearest even. (Ties away from zero take three instructions.)
    pure cvt_rn_tf32_f32(value: reg32 f32) -> (bits: reg32 u32) = "cvt.rn.tf32.f32 {bits}, {value};";

    /// `a b + c`, all bits of the product: an address in one instruction.
    pure mad_wide_u32(a: reg32 u32, b: reg32 u32, c: reg64 u64) -> (d: reg64 u64) = "mad.wide.u32 {d}, {a}, {b}, {c};";

    /// 2^x to 2^-22 relative; denormal numbers count as 0.
    pure ex2_approx_ftz_f32(x: reg32 f32) -> (y: reg32 f32) = "ex2.approx.ftz.f32 {y}, {x};";
    /// Binary logarithm, to 2^-22.6 absolute for x in (0.5, 2), relative elsewhere.
    pure lg2_approx_f32(x: reg32 f32) -> (y: reg32 f32) = "lg2.approx.f32 {y}, {x};";
    /// As [`lg2_approx_f32`]; denormal numbers count as 0.
    pure lg2_approx_ftz_f32(x: reg32 f32) -> (y: reg32 f32) = "lg2.approx.ftz.f32 {y}, {x};";
    /// 1 / sqrt(x), to 2^-22.9 relative.
    pure rsqrt_approx_f32(x: reg32 f32) -> (y: reg32 f32) = "rsqrt.approx.f32 {y}, {x};";
    /// As [`rsqrt_approx_f32`]; denormal numbers count as 0.
    pure rsqrt_approx_ftz_f32(x: reg32 f32) -> (y: reg32 f32) = "rsqrt.approx.ftz.f32 {y}, {x};";
    /// 1 / x, to 1 unit in the last place.
    pure rcp_approx_f32(x: reg32 f32) -> (y: reg32 f32) = "rcp.approx.f32 {y}, {x};";
    /// As [`rcp_approx_f32`]; denormal numbers count as 0.
    pure rcp_approx_ftz_f32(x: reg32 f32) -> (y: reg32 f32) = "rcp.approx.ftz.f32 {y}, {x};";
    /// Square root, to 2^-23 relative.
    pure sqrt_approx_f32(x: reg32 f32) -> (y: reg32 f32) = "sqrt.approx.f32 {y}, {x};";

    /// Products of two pairs of bf16, each rounded to nearest even.
    pure mul_rn_bf16x2(a: reg32 u32, b: reg32 u32) -> (product: reg32 u32) = "mul.rn.bf16x2 {product}, {a}, {b};";
    /// `a b + c` of pairs of bf16, each rounded once, to nearest even.
    pure fma_rn_bf16x2(a: reg32 u32, b: reg32 u32, c: reg32 u32) -> (sum: reg32 u32) =
        "fma.rn.bf16x2 {sum}, {a}, {b}, {c};";
}

/// `a b + c`, rounded once. Not assembly: LLVM knows it, folds constants, and makes a select of a branch around it.
#[inline(always)]
pub fn fma_rn_f32(a: f32, b: f32, c: f32) -> f32 {
    core::f32::math::mul_add(a, b, c)
}

/// Square root, rounded to nearest even. Not assembly, like [`fma_rn_f32`].
#[inline(always)]
pub fn sqrt_rn_f32(x: f32) -> f32 {
    core::f32::math::sqrt(x)
}
