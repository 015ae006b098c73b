//! Element types: of the caller's tensors (a runtime [`DtypeCode`]) and of kernel operands (a type parameter).

use half::{bf16, f16};

/// Element type of a tensor in global memory, as it travels in launch parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DtypeCode {
    /// IEEE binary32.
    F32 = 0,
    /// bfloat16.
    Bf16 = 1,
    /// IEEE binary16.
    F16 = 2,
}

impl DtypeCode {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DtypeCode::F32 => 4,
            DtypeCode::Bf16 | DtypeCode::F16 => 2,
        }
    }

    /// The type with number `code`; numbers that name no type read as f32 (the host checks before a launch).
    pub const fn from_code(code: u32) -> Self {
        match code {
            1 => DtypeCode::Bf16,
            2 => DtypeCode::F16,
            _ => DtypeCode::F32,
        }
    }
}

/// Element type of a kernel's matrix operands. Accumulators are always f32.
pub trait Element: Copy + Send + Sync + 'static {
    /// The type's number in launch parameters.
    const CODE: DtypeCode;
    /// Whether this is f32, so that a tile of accumulated values serves as an operand without a rounded copy.
    const WIDE: bool = matches!(Self::CODE, DtypeCode::F32);
    /// `x` rounded to this type (nearest, ties to even) and widened again.
    fn round(x: f32) -> f32;
}

impl Element for f32 {
    const CODE: DtypeCode = DtypeCode::F32;
    #[inline(always)]
    fn round(x: f32) -> f32 {
        x
    }
}

impl Element for bf16 {
    const CODE: DtypeCode = DtypeCode::Bf16;
    #[inline(always)]
    fn round(x: f32) -> f32 {
        // Branch-free so that tile loops vectorise; a NaN's payload must not round up into infinity.
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
        f32::from_bits(if x.is_nan() { 0x7fc0_0000 } else { rounded })
    }
}

impl Element for f16 {
    const CODE: DtypeCode = DtypeCode::F16;
    #[inline(always)]
    fn round(x: f32) -> f32 {
        f16::from_f32(x).to_f32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_is_that_of_half() {
        let mut bits = 1u32;
        for _ in 0..200_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(bits);
            let want = bf16::from_f32(x).to_f32();
            let found = <bf16 as Element>::round(x);
            assert!(found == want || (found.is_nan() && want.is_nan()), "{x:e}: {found:e} for {want:e}");
        }
    }
}
