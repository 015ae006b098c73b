//! `prep` for gates that are one number per token and head: one block of 256 threads per chunk and value head, three blocks on a
//! multiprocessor.
//!
//! The decay between two tokens does not depend on the channel, so products are those of the given rows of q and k, as they lie in
//! memory, and everything else is applied to what comes out, in f32:
//!
//! ```text
//! Aqk[r,c] = (q_r . k_c) |q_r|^-1 scale |k_c|^-1 exp(G_r - G_c)          c <= r
//! Akk[r,c] = (k_r . k_c) |k_r|^-1 beta_r |k_c|^-1 exp(G_r - G_c)         c < r
//! w        = A' (k |k|^-1 exp G) = (A' diag(|k|^-1 exp G)) k
//! ```
//!
//! Only differences `G_r - G_c` of tokens r >= c become decays, never quotients of decays, so gates of any strength are exact.
//! Blocks of 16 tokens off the diagonal split the difference at the first of their rows: a factor for each row, one for each column.
//!
//! The first warpgroup has k on the left and inverts; meanwhile the second, which has q on the left, scales the rows of qg and kg.

mod finish;
mod load;
mod rows;
mod scores;
mod tokens;

use cuda_std::{ptx, thread, warp};

use super::inverse::{invert, tf32};
use super::{CHANNELS, CHUNK, IMAGE, PANEL, PITCH, RECORD};
use crate::hopper::records::announce;
use crate::params::{Chunk, PrepParams, StampKind};
use crate::tile::Warpgroup;
use finish::finish;
use load::bring;
use scores::{start, store_q, to_solve, weigh};
use tokens::{decays, of_rows, steps};

/// The given rows of k; those of q. When q is not needed any more, Aqk lies there, then w.
const K: u32 = 0;
const Q: u32 = IMAGE;
const AQK: u32 = Q;
const W: u32 = Q;
/// Akk, its inverse and scratch, as [`super::inverse`] has them. When the inverse is there, A' diag(|k|^-1 exp G) and A' take the
/// place of Akk.
const SOLVER: u32 = 2 * IMAGE;
const AKK: u32 = SOLVER + super::AKK;
const INVERSE: u32 = SOLVER + super::INVERSE;
const A_DECAYED: u32 = AKK;
const A: u32 = AKK + PANEL;
const _: () = assert!(AKK.is_multiple_of(1024) && A + PANEL <= INVERSE);

/// Small rows of numbers of tokens behind the tiles. G and 1 / |k|, `[64,2]`.
const COLUMNS: u32 = SOLVER + super::SCRATCH + 4 * 32 * super::SCRATCH_PITCH * 4;
/// beta and the token's own decay; then the factors of columns of the inverse in A' and in A' diag(|k|^-1 exp G), `[64,2]`.
const STEPS: u32 = COLUMNS + 64 * 8;
/// scale / |q|.
const ROWS_Q: u32 = STEPS + 64 * 8;
/// beta / |k|.
const ROWS_K: u32 = ROWS_Q + 64 * 4;
/// Factors of the rows of qg, and of kg.
const SCALE_Q: u32 = ROWS_K + 64 * 4;
/// See [`SCALE_Q`].
const SCALE_K: u32 = SCALE_Q + 64 * 4;
/// Factors of columns left of the block of 16 rows on the diagonal, see [`far_columns`].
const FAR: u32 = SCALE_K + 64 * 4;
/// Factor and growth of each token, see [`crate::cut`], `[64,2]`.
const BOUNDS: u32 = FAR + 96 * 4;
const _: () = assert!((BOUNDS + 64 * 8) as usize == crate::hopper::PREP_SCALAR_SHARED);

/// Where the factors of the `16 block` columns before a block of rows lie.
const fn far_columns(block: u32) -> u32 {
    FAR + 32 * block * block.saturating_sub(1)
}

/// A thread's place.
#[derive(Clone, Copy)]
struct Place {
    chunk: usize,
    head: usize,
    token: usize,
    len: u32,
    /// Warpgroup: 0 has k on the left, 1 has q.
    group: u32,
    /// Warp of the warpgroup, and block of 16 rows.
    block: u32,
    lane: u32,
    thread: u32,
    base: u32,
}

impl Place {
    /// This chunk and head's record.
    fn record(&self, p: &PrepParams) -> *mut u8 {
        let row = self.chunk * p.tables.sizes.hv as usize + self.head;
        (p.records.operands.addr as *mut u8).wrapping_add(row * RECORD as usize)
    }
}

/// The grid: one block per chunk and value head, chunk by chunk.
#[inline(always)]
pub fn prep(wg: &mut Warpgroup<'_>, p: &PrepParams) {
    let start_ns = wg.clock();
    let (hv, block) = (p.tables.sizes.hv.max(1), wg.block() as u32);
    let (chunk, head) = (p.beside.chunk_of_launch(block / hv) as usize, (block % hv) as usize);
    let Chunk { token, len } = wg.read(p.tables.chunks, chunk);
    let thread = thread::thread_idx_x();
    // From lane 0, so that the assembler knows what depends on the warp alone to be uniform.
    // SAFETY: by all threads.
    let warp = unsafe { warp::shuffle_idx(thread / 32, 0) };
    let (token, lane, base) = (token as usize, ptx::laneid(), wg.base());
    let at = Place { chunk, head, token, len, group: warp / 4, block: warp % 4, lane, thread, base };
    // SAFETY: the block's shared memory; barriers separate the phases; control flow is uniform in the warps.
    unsafe {
        bring(p, &at);
        if warp == 0 {
            decays(p, &at);
        } else if warp == 1 {
            steps(p, &at);
        }
        warp::sync();
        ptx::cp_async_wait_all();
        ptx::fence_proxy_async_shared();
        thread::sync_threads();
        let mut x = [0f32; 32];
        start(&at, &mut x);
        of_rows(p, &at);
        thread::sync_threads();
        ptx::wgmma_wait_group::<0>(&mut x);
        weigh(&at, &mut x);
        if at.group == 0 {
            to_solve(&at, &x);
            ptx::bar_sync_id::<1, 128>();
            invert(base + SOLVER, thread);
        } else {
            store_q(p, &at, &x);
            #[cfg(feature = "racecheck")]
            super::level::<1>();
        }
        warp::sync();
        thread::sync_threads();
        finish(p, &at);
        announce(p, block, thread);
    }
    let end_ns = wg.clock();
    wg.stamp_block(&p.trace, StampKind::Prep, [start_ns, end_ns], [head as u32, chunk as u32], 0);
}
