//! The rows of q and k, as they are given.

use cuda_std::ptx;

use super::*;
use crate::hopper::repeat;
use crate::params::Tensor;

/// Starts the copies of both images; rows beyond the chunk become zero.
///
/// # Safety
/// By all threads, which wait for their copies before a barrier.
#[inline(always)]
pub(super) unsafe fn bring(p: &PrepParams, at: &Place) {
    let sizes = &p.tables.sizes;
    // HV is a multiple of H. (The same divisor as that of the block's number.)
    let qk_head = at.head as u32 * sizes.h / sizes.hv.max(1);
    let bytes = sizes.h as usize * CHANNELS * 2;
    // A row has 16 pieces of 16 bytes; this thread brings one piece of every 16th row.
    let (row, piece) = (at.thread / 16, at.thread % 16);
    let from = at.token * bytes + (qk_head as usize * CHANNELS + piece as usize * 8) * 2;
    let to = at.base + (piece / 8) * PANEL + row * 128 + (((piece % 8) ^ (row % 8)) << 4);
    let bring = |x: &Tensor, to: u32| {
        let x = (x.addr as *const u8).wrapping_add(from);
        // SAFETY: rows of this chunk, or nothing; one writer for each piece.
        unsafe {
            if at.len == CHUNK as u32 {
                let x = x.wrapping_add(row as usize * bytes);
                repeat!(I in 4 => { ptx::cp_async_cg_16(to + I as u32 * 2048, x.wrapping_add(16 * I * bytes)); });
            } else {
                repeat!(I in 4 => {
                    let row = row + 16 * I as u32;
                    let valid = row < at.len;
                    let x = x.wrapping_add(if valid { row as usize * bytes } else { 0 });
                    ptx::cp_async_cg_16_zfill(to + I as u32 * 2048, x, if valid { 16 } else { 0 });
                });
            }
        }
    };
    bring(&p.k, to + K);
    bring(&p.q, to + Q);
}
