//! What a walking warpgroup leaves of each chunk for `grad`: rounded registers, as images in shared memory.

use cuda_std::{ptx, thread};

use super::pipeline::{IMAGE_DONE, IMAGE_TAKEN, PANEL_DONE, PANEL_TAKEN, Result};
use crate::hopper::scan::{THREADS, release};
use crate::hopper::{IMAGE, PANEL, repeat, wait};

/// Warp in the warpgroup, 8 x 8 matrix of `stmatrix` and row in it.
#[inline(always)]
fn place_in_warpgroup() -> (u32, u32, u32) {
    let lane = ptx::laneid();
    ((thread::thread_idx_x() % THREADS) / 32, lane / 8, lane % 8)
}

/// Stores the rounded state, 64 x 128, as an image, once the one that lay there has been taken away.
///
/// # Safety
/// By all threads of the warpgroup; `result` is the block's.
#[inline(always)]
pub(super) unsafe fn put_image(half: &[u32; 32], result: Result) {
    let (warp, matrix, row) = place_in_warpgroup();
    let r = 16 * warp + 8 * (matrix % 2) + row;
    // SAFETY: inside the image; its last content has been read.
    unsafe {
        wait(result.barriers + IMAGE_TAKEN, result.parity ^ 1);
        repeat!(J in 8 => {
            let piece = 2 * (J as u32 % 4) + matrix / 2;
            let address = result.image + (J as u32 / 4) * PANEL + r * 128 + ((piece ^ (r % 8)) << 4);
            ptx::stmatrix_x4(address, half[4 * J], half[4 * J + 1], half[4 * J + 2], half[4 * J + 3]);
        });
        announce(result.barriers + IMAGE_DONE);
    }
}

/// Stores rounded values, 64 columns x 64 tokens, as a panel whose rows are tokens, once the one that lay there has been
/// taken away.
///
/// # Safety
/// As of [`put_image`].
#[inline(always)]
pub(super) unsafe fn put_panel(half: &[u32; 16], result: Result) {
    let (warp, matrix, row) = place_in_warpgroup();
    let piece = 2 * warp + matrix % 2;
    // SAFETY: inside the panel; its last content has been read.
    unsafe {
        wait(result.barriers + PANEL_TAKEN, result.parity ^ 1);
        // 8 x 8 matrices, transposed by the store: rows are tokens, 16 bytes are 8 columns.
        repeat!(J in 4 => {
            let t = 16 * J as u32 + 8 * (matrix / 2) + row;
            let address = result.image + IMAGE + t * 128 + ((piece ^ (t % 8)) << 4);
            ptx::stmatrix_x4_trans(address, half[4 * J], half[4 * J + 1], half[4 * J + 2], half[4 * J + 3]);
        });
        announce(result.barriers + PANEL_DONE);
    }
}

/// Tells that this warp's part lies there.
///
/// Without a proxy fence: that is left to the thread that takes the results away, since its latency would be on the chain.
///
/// # Safety
/// By all lanes, after their stores.
#[inline(always)]
unsafe fn announce(barrier: u32) {
    // SAFETY: the stores of this warp's lanes are ordered by the warp's barrier, then by the arrival.
    unsafe {
        cuda_std::warp::sync();
        release(ptx::laneid(), barrier);
    }
}
