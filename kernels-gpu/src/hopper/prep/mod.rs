//! `prep` on the tensor cores of Hopper: one block of 256 threads per chunk and value head, two blocks on a multiprocessor. This is
//! the body for gates with a decay per channel; [`scalar`] is the one for gates that are one number per token and head.
//!
//! Thread (s, c) owns tokens 16 s .. 16 s + 16 and channels 2 c, 2 c + 1: a column of the chunk's decays, so that every
//! factor is a running product in its registers. Scores of pairs of tokens in different blocks of 16 split the decay at
//! the boundary between them (both factors at most 1); inside a block of 16 at its ninth token, with the decay of a token held
//! at 2^-15 at least, so that factors stay finite: a score that this changes is below 2^-15 of its product.
//!
//! Products, each 64 rows: q and k of tokens 32 .. 64 with k of 0 .. 32; q and k of the odd blocks with k of the even ones;
//! q with k and k with k on the diagonal; w = A' (k exp G).

mod decays;
mod factors;
mod finish;
mod given;
mod inverse;
mod operands;
pub mod scalar;
mod scores;

use cuda_std::{thread, warp};

use factors::factors;
use finish::finish;
use given::{bring, pairs};
use inverse::{invert, tf32};
use operands::operands;
use scores::scores;

use super::{
    CHANNELS, CHUNK, IMAGE, PANEL, RECORD, RECORD_AQK, RECORD_KG, RECORD_QG, by_columns, by_rows, column_step,
    put_panel, repeat, row_step, sums, unpack,
};
use crate::hopper::gate::LOG2_E;
use crate::hopper::records::announce;
use crate::math::sigmoid;
use crate::params::{Chunk, GateForm, PrepParams, StampKind};
use crate::prep::{NORM_EPSILON, floored_beta};
use crate::tile::{DIAGONAL_FLOOR, Warpgroup};

/// Tiles of operands. `[64,128]`: rows of q and k beyond the middle; of odd blocks; of q, of k, and columns of k, on the
/// diagonal. `[32,128]`: columns of k before the middle; of even blocks.
const ROWS_32: u32 = 0;
const ROWS_16: u32 = IMAGE;
const DIAGONAL_Q: u32 = 2 * IMAGE;
const DIAGONAL_K: u32 = 3 * IMAGE;
const DIAGONAL_COLUMNS: u32 = 4 * IMAGE;
const COLUMNS_32: u32 = 5 * IMAGE;
const COLUMNS_16: u32 = 5 * IMAGE + HALF_PANEL;
/// Panel of 32 rows. Those of a tile lie `PANEL` apart, as panels of 64 rows do, so that the two tiles' lie by turns.
const HALF_PANEL: u32 = PANEL / 2;

/// After the scores the same memory holds: Akk and its inverse in f32 (rows of `PITCH`), scratch of four warps, Aqk, k exp G,
/// and w with A' behind it, as in a record.
const AKK: u32 = 0;
const INVERSE: u32 = 64 * PITCH * 4;
const SCRATCH: u32 = 2 * INVERSE;
const AQK: u32 = 5 * PANEL;
const KB: u32 = DIAGONAL_K;
const W: u32 = DIAGONAL_COLUMNS;
const A: u32 = COLUMNS_32;
/// f32 per row of Akk: rows shifted by four banks.
const PITCH: u32 = 68;
/// f32 per row of a warp's scratch, 32 x 8.
const SCRATCH_PITCH: u32 = 12;

/// Before the operands the same memory holds q, k and g as they are given, if g is bf16.
const GIVEN_Q: u32 = 0;
const GIVEN_K: u32 = IMAGE;
const GIVEN_G: u32 = 2 * IMAGE;

/// Small rows behind the tiles: decays of the blocks of 16, sums of squares, 1 / norms (each warp's own: of q of its tokens, then of
/// k), largest decays of tokens, beta.
const TOTALS: u32 = 6 * IMAGE;
const SQUARES: u32 = TOTALS + 4 * CHANNELS as u32 * 4;
const NORMS: u32 = SQUARES + 2 * 64 * 2 * 4;
const LARGEST: u32 = NORMS + 8 * 32 * 4;
const BETA: u32 = LARGEST + 64 * 2 * 4;

const _: () = assert!((BETA + 64 * 4) as usize == super::PREP_SHARED);
const _: () = assert!(SCRATCH + 4 * 32 * SCRATCH_PITCH * 4 <= AQK && AQK + PANEL <= KB);

/// A thread's place.
#[derive(Clone, Copy)]
struct Place {
    chunk: usize,
    head: usize,
    token: usize,
    len: u32,
    /// Block of 16 tokens, and pair of channels.
    s: u32,
    c: u32,
    /// `c / 32`: which panel.
    half: u32,
    thread: u32,
    base: u32,
}

/// Passes `N` barriers of the second warpgroup: as many as the first has passed more since the last one of the block. Otherwise
/// compute-sanitizer's racecheck reports what the block's next barrier orders.
///
/// # Safety
/// By the second warpgroup.
#[cfg(feature = "racecheck")]
#[inline(always)]
unsafe fn level<const N: u32>() {
    let mut i = 0;
    while i < N {
        // SAFETY: by contract.
        unsafe { cuda_std::ptx::bar_sync_id::<2, 128>() };
        i += 1;
    }
}

/// The grid: one block per chunk and value head, chunk by chunk.
#[inline(always)]
pub fn prep(wg: &mut Warpgroup<'_>, p: &PrepParams) {
    let start = wg.clock();
    let (hv, block) = (p.tables.sizes.hv.max(1), wg.block() as u32);
    let (chunk, head) = (p.beside.chunk_of_launch(block / hv) as usize, (block % hv) as usize);
    let Chunk { token, len } = wg.read(p.tables.chunks, chunk);
    let thread = thread::thread_idx_x();
    let base = wg.base();
    // From lane 0, so that the assembler knows what depends on the warp alone to be uniform.
    // SAFETY: by all threads.
    let warp = unsafe { warp::shuffle_idx(thread / 32, 0) };
    let (s, half) = (warp / 2, warp % 2);
    let at = Place { chunk, head, token: token as usize, len, s, half, c: 32 * half + thread % 32, thread, base };
    // SAFETY: the block's shared memory; barriers separate the phases; control flow is uniform in the warps.
    unsafe {
        let kb = operands(p, &at);
        thread::sync_threads();
        scores(&at, &kb);
        thread::sync_threads();
        if thread < 128 {
            invert(base, thread);
        } else if thread < 160 && p.records.factors.is_present() {
            factors(p, &at);
        }
        warp::sync();
        #[cfg(feature = "racecheck")]
        if thread >= 128 {
            level::<2>();
        }
        thread::sync_threads();
        finish(p, &at);
        announce(p, block, thread);
    }
    let end = wg.clock();
    wg.stamp_block(&p.trace, StampKind::Prep, [start, end], [head as u32, chunk as u32], 0);
}
