//! qg and kg: rows of q and k, each times a number.
//!
//! A number is a pair of bf16, of which the second is what rounding took from the first. Its product with a pair of bf16 are two packed
//! instructions, `x high + round(x low)`: an error of 2^-18 before the one rounding of the result.

use cuda_std::ptx;

use super::*;
use crate::hopper::repeat;

/// A number as rows are scaled with it.
#[inline(always)]
pub(super) fn split(x: f32) -> u32 {
    let high = f32::from_bits(ptx::cvt_rn_bf16x2_f32(x, x) & 0xffff_0000);
    ptx::cvt_rn_bf16x2_f32(x, x - high)
}

/// Stores the image `from`, each row times its number in the table `factors`, to `to`. The order of bytes is the same.
///
/// # Safety
/// By a whole warpgroup; the image and the factors were written before a barrier.
#[inline(always)]
pub(super) unsafe fn scale_rows(at: &Place, from: u32, to: *mut u8, factors: u32) {
    let piece = at.thread % 128;
    let (from, to) = (from + 16 * piece, to.wrapping_add(16 * piece as usize));
    // SAFETY: by contract; one writer for each piece.
    unsafe {
        let factor = |i: u32| {
            let x = ptx::ld_shared_u32(factors + (piece / 8 + 16 * i) * 4);
            [x & 0xffff_0000 | x >> 16, x << 16 | x & 0xffff]
        };
        let factors = [factor(0), factor(1), factor(2), factor(3)];
        repeat!(I in 8 => {
            let [high, low] = factors[I % 4];
            let scaled = |pair: u32| ptx::fma_rn_bf16x2(pair, high, ptx::mul_rn_bf16x2(pair, low));
            let x = ptx::ld_shared_v4_u32(from + I as u32 * 2048);
            let to = to.wrapping_add(I * 2048).cast();
            ptx::st_global_v4_u32(to, scaled(x[0]), scaled(x[1]), scaled(x[2]), scaled(x[3]));
        });
    }
}

/// The decay of the chunk, of every channel.
///
/// # Safety
/// By one warp; G was written before a barrier.
#[inline(always)]
pub(super) unsafe fn note_decay(p: &PrepParams, at: &Place) {
    let row = at.chunk * p.tables.sizes.hv as usize + at.head;
    let to = (p.records.decay.addr as *mut f32).wrapping_add(row * CHANNELS + 4 * at.lane as usize);
    // SAFETY: this chunk's row; one writer for each number.
    unsafe {
        let all = ptx::ex2_approx_ftz_f32(ptx::ld_shared_f32(at.base + COLUMNS + 63 * 8));
        ptx::st_global_v4_f32(to, all, all, all, all);
    }
}
