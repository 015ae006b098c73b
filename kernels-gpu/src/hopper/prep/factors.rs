//! What a chunk does to the norm of a state at most, see [`crate::cut`].

use cuda_std::{ptx, warp};

use super::*;
use crate::cut;
use crate::hopper::fold_lanes;

/// The largest decay of each of this warp's tokens over its 64 channels, before a barrier of the block.
///
/// # Safety
/// By whole warps.
#[inline(always)]
pub(super) unsafe fn note_largest(at: &Place, e: &[[f32; 2]; 16]) {
    let lane = ptx::laneid();
    let mut largest = [0f32; 16];
    repeat!(I in 16 => { largest[I] = e[I][0].max(e[I][1]); });
    // SAFETY: whole warps, by contract; every word has one writer.
    unsafe {
        let most = fold_lanes(largest, lane, f32::max);
        if lane.is_multiple_of(2) {
            let row = 16 * at.s + lane / 2;
            ptx::st_shared_f32(at.base + LARGEST + row * 8 + at.half * 4, most);
        }
    }
}

/// The products over the chunk's tokens, by one warp.
///
/// # Safety
/// By a whole warp, after a barrier of the block that follows [`note_largest`]; nothing writes these rows meanwhile.
#[inline(always)]
pub(super) unsafe fn factors(p: &PrepParams, at: &Place) {
    let lane = ptx::laneid();
    // SAFETY: rows of shared memory that were written before the barrier; this chunk's place in global memory.
    unsafe {
        let of = |row: u32| {
            let [a, b] = ptx::ld_shared_v2_f32(at.base + LARGEST + row * 8);
            let [c, d] = ptx::ld_shared_v2_f32(at.base + SQUARES + 512 + row * 8);
            let square = if p.l2norm != 0 { 1.0 } else { c + d };
            let growth = cut::growth(ptx::ld_shared_f32(at.base + BETA + 4 * row) * square);
            (cut::token_factor(a.max(b), growth), growth)
        };
        let ((factor, growth), (other_factor, other_growth)) = (of(lane), of(lane + 32));
        multiply(p, [at.chunk, at.head], lane, [factor, growth], [other_factor, other_growth]);
    }
}

/// The products over a chunk's tokens of factor and growth, each lane's two, into the chunk's place.
///
/// # Safety
/// By a whole warp.
#[inline(always)]
pub(super) unsafe fn multiply(p: &PrepParams, [chunk, head]: [usize; 2], lane: u32, one: [f32; 2], other: [f32; 2]) {
    let (mut factor, mut growth) = (one[0] * other[0], one[1] * other[1]);
    // SAFETY: by all lanes; this chunk's place in global memory.
    unsafe {
        let mut distance = 16;
        while distance > 0 {
            factor *= warp::shuffle_xor(factor, distance);
            growth *= warp::shuffle_xor(growth, distance);
            distance /= 2;
        }
        let factor = if factor < cut::LEAST { cut::LEAST } else { factor };
        if lane == 0 {
            let to = p.records.factors(chunk, 1, head);
            ptx::st_global_v2_f32((to.tensor.addr as *mut f32).wrapping_add(to.offset), factor, growth);
        }
    }
}
