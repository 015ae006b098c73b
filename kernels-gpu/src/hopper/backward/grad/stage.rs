//! Where accumulators go: as images of operands, or as f32 for the threads that own columns.
//!
//! An f32 tile has rows of 128 channels, whose groups of 8 are permuted by `group ^ (row % 4)`: four rows of an accumulator then lie in
//! different banks.

use cuda_std::ptx;

use super::body::*;
use crate::hopper::{PANEL, repeat};

/// Row and column of a thread's first accumulator in 64 x 64 of them.
#[inline(always)]
pub(super) fn corner(at: &Place) -> (u32, u32) {
    (16 * (at.warp % 4) + at.lane / 4, 2 * (at.lane % 4))
}

/// Where two channels of a row of a tile lie.
#[inline(always)]
pub(super) fn pair_at(tile: u32, row: u32, channel: u32) -> u32 {
    tile + row * 512 + ((channel ^ ((row % 4) << 3)) << 2)
}

/// Stores an accumulator of 64 rows and the 64 channels of panel `half` into a tile of f32.
///
/// # Safety
/// By a whole warp; the tile's rows are free.
#[inline(always)]
pub(super) unsafe fn stage(at: &Place, x: &[f32; 32], tile: u32, half: u32) {
    let (row, column) = corner(at);
    let first = pair_at(tile, row, 64 * half + column);
    repeat!(J in 8 => {
        // Tiles begin at multiples of 512, so this is the place of channel 64 half + 8 J + column: groups of 8 are permuted in fours.
        let to = (first ^ ((J as u32 % 4) << 5)) + (J as u32 / 4) * 128;
        // SAFETY: by contract; one writer for each pair.
        unsafe {
            ptx::st_shared_v2_f32(to, x[4 * J], x[4 * J + 1]);
            ptx::st_shared_v2_f32(to + 8 * 512, x[4 * J + 2], x[4 * J + 3]);
        }
    });
}

/// Where the scores of the level of `bit` lie: a panel, and its first column of 8 there. Rows are those of q, then those of k.
pub(super) const fn scores_at(bit: u32) -> (u32, u32) {
    match bit {
        4 => (LEVELS, 0),
        2 => (LEVELS, 4),
        _ => (LEVELS + PANEL, 0),
    }
}

/// Stores gradients of scores of q, or with `K` of k: of tokens in different blocks of 8 as the operand of the level at which the blocks
/// part, in its rows from 32 on for k; of tokens of one block into its square. They are put behind the factors of both rows, so that all
/// that is made of them is a gradient of q and k as given.
///
/// # Safety
/// By a whole warp; one warpgroup for each `K`; the factors were written before a barrier.
#[inline(always)]
pub(super) unsafe fn scatter<const K: bool>(at: &Place, x: &[f32; 32]) {
    let (row, column) = (at.lane / 4, 2 * (at.lane % 4));
    let (first, squares) = if K { (32, SQUARES + SQUARE_BYTES) } else { (0, SQUARES) };
    // In row `row` of 8, piece `row ^ piece` begins at what this is with `piece` exchanged.
    let in_rows = row * 128 + (row << 4) + column * 2;
    let norms = at.base + NORMS;
    let of_rows = norms + (16 * (at.warp % 4) + row) * 8 + if K { 4 } else { 0 };
    // SAFETY: by contract.
    let of_rows = unsafe { [ptx::ld_shared_f32(of_rows), ptx::ld_shared_f32(of_rows + 64)] };
    repeat!(J in 8 => {
        repeat!(H in 2 => {
            let (r, c) = (2 * (at.warp % 4) + H as u32, J as u32);
            let scores = [x[4 * J + 2 * H] * of_rows[H], x[4 * J + 2 * H + 1] * of_rows[H]];
            // SAFETY: one writer for each pair.
            unsafe {
                let [_, m, _, n] = ptx::ld_shared_v4_f32(norms + (8 * c + column) * 8);
                let (a, b) = (scores[0] * m, scores[1] * n);
                if r == c {
                    ptx::st_shared_v2_f32(at.base + squares + (r * 64 + row * 8 + column) * 4, a, b);
                } else if r > c {
                    let apart = r ^ c;
                    let bit = if apart >= 4 { 4 } else { apart & 2 | (apart < 2) as u32 };
                    let (panel, from) = scores_at(bit);
                    let rows = at.base + panel + (first + 8 * super::columns::compact(r, bit)) * 128;
                    let piece = from + super::columns::compact(c, bit);
                    let to = rows + (in_rows ^ (piece << 4));
                    ptx::st_shared_u32(to, ptx::cvt_rn_bf16x2_f32(b, a));
                }
            }
        });
    });
}
