//! The rows of q, k and g as they are given: each warp brings those of its 16 tokens and 64 channels, so that no barrier of the block
//! is needed before it reads them, and all of them are under way at once without a register.

use cuda_std::ptx;

use super::*;
use crate::params::Tensor;

/// Starts the copies of this warp's rows of `x`, which has `heads` heads, into the image at `image`; rows beyond the chunk become zero.
///
/// # Safety
/// By whole warps. These rows exist, and nobody reads the image.
#[inline(always)]
pub(super) unsafe fn bring(at: &Place, x: &Tensor, heads: u32, head: u32, image: u32) {
    let lane = ptx::laneid();
    // Eight lanes bring a row of a panel.
    let (row, piece) = (lane / 8, lane % 8);
    let bytes = heads * CHANNELS as u32 * 2;
    let channel = head * CHANNELS as u32 + 64 * at.half + 8 * piece;
    let from = x.addr + at.token as u64 * bytes as u64 + 2 * channel as u64;
    let to = at.base + image + at.half * PANEL + (16 * at.s + row) * 128;
    repeat!(I in 4 => {
        const ROW: u32 = 4 * I as u32;
        let at_row = 16 * at.s + row + ROW;
        let valid = at_row < at.len;
        let from = ptx::mad_wide_u32(if valid { at_row } else { 0 }, bytes, from) as *const u8;
        let place = (piece ^ (row + ROW % 8)) << 4;
        // SAFETY: a row of this chunk, or nothing; one writer for each piece.
        unsafe { ptx::cp_async_cg_16_zfill(to + ROW * 128 + place, from, if valid { 16 } else { 0 }) };
    });
}

/// This thread's pairs of bf16 of an image; `place` is that of [`in_row`](super::operands::in_row).
///
/// # Safety
/// After this warp's copies; its lanes have met since.
#[inline(always)]
pub(super) unsafe fn pairs(place: &[u32; 8], image: u32) -> [u32; 16] {
    let mut pairs = [0u32; 16];
    // SAFETY: by contract.
    repeat!(I in 16 => { pairs[I] = unsafe { ptx::ld_shared_u32(place[I % 8] + (image + I as u32 * 128)) }; });
    pairs
}
