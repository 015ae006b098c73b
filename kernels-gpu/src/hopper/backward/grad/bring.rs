//! What a block reads, brought to shared memory: most of a chunk while the one before is computed, as places get free.
//!
//! q, k, what the gate was given and do come by `cp.async`, images by bulk copies. What lies where the chunk before keeps something to
//! its end (states' gradients, v_new), or where q, k and gates are brought to, follows when the chunk begins.

use cuda_std::{ptx, warp};

use super::WARPGROUPS;
use super::body::*;
use crate::gate::Gate;
use crate::hopper::gate::{bias, is_wide, slope};
use crate::hopper::{CHANNELS, CHUNK, IMAGE, PANEL, RECORD, RECORD_A, repeat};
use crate::params::{Chunk, GradParams, PrepParams, Tensor};

/// A chunk and a head.
#[derive(Clone, Copy)]
pub(super) struct Item {
    pub head: usize,
    /// First token, and tokens of the chunk.
    pub token: usize,
    pub len: u32,
    /// Row of the chunk and head in what has one for each.
    pub row: usize,
}

impl Item {
    /// Number `number`, whose chunk is `chunk`. Items go chunk by chunk.
    #[inline(always)]
    pub fn of(p: &GradParams, number: u32, Chunk { token, len }: Chunk) -> Self {
        let head = (number % p.prep.tables.sizes.hv.max(1)) as usize;
        Self { head, token: token as usize, len, row: number as usize }
    }

    /// A thread's 16 bytes in row `row` of a tensor `[tokens, heads, 128]` of elements of `bytes` bytes, and how many of them are in the
    /// chunk.
    #[inline(always)]
    fn piece(&self, x: &Tensor, heads: u32, head: u32, bytes: u32, row: u32, piece: u32) -> (*const u8, u32) {
        let valid = row < self.len;
        let row = if valid { row as usize } else { 0 };
        let element = ((self.token + row) * heads as usize + head as usize) * CHANNELS;
        let from = (x.addr as *const u8).wrapping_add(element * bytes as usize + 16 * piece as usize);
        (from, if valid { 16 } else { 0 })
    }
}

/// Rows of bf16 as they are, to `to`; zeros beyond the chunk.
///
/// # Safety
/// By all threads; nobody uses what lies there.
#[inline(always)]
unsafe fn rows(item: &Item, at: &Place, x: &Tensor, heads: u32, head: u32, to: u32) {
    repeat!(I in 2 => {
        // A row has 16 pieces.
        let number = at.thread + 512 * I as u32;
        let (from, bytes) = item.piece(x, heads, head, 2, number / 16, number % 16);
        // SAFETY: a row of the chunk, or nothing.
        unsafe { ptx::cp_async_cg_16_zfill(at.base + to + number * 16, from, bytes) };
    });
    const _: () = assert!(CHUNK * 16 == 2 * 128 * WARPGROUPS);
}

/// [`rows`] of `[tokens, HV, V]`, as an image.
///
/// # Safety
/// As of [`rows`].
#[inline(always)]
unsafe fn image(p: &GradParams, item: &Item, at: &Place, x: &Tensor, to: u32) {
    repeat!(I in 2 => {
        let number = at.thread + 512 * I as u32;
        let (row, piece) = (number / 16, number % 16);
        let (from, bytes) = item.piece(x, p.prep.tables.sizes.hv, item.head as u32, 2, row, piece);
        let to = at.base + to + (piece / 8) * PANEL + row * 128 + (((piece % 8) ^ (row % 8)) << 4);
        // SAFETY: a row of the chunk, or nothing.
        unsafe { ptx::cp_async_cg_16_zfill(to, from, bytes) };
    });
}

/// Whether what the gate was given takes the place of v as well, which then follows when the chunk begins.
#[inline(always)]
fn over_v<G: Gate>(p: &GradParams) -> bool {
    G::PER_CHANNEL && is_wide(&p.prep)
}

/// Starts the copies of an item that can begin before the one before is done.
///
/// # Safety
/// By all threads, which meet afterwards; nobody uses more of the images than what the end of a chunk needs.
#[inline(always)]
pub(super) unsafe fn bring<G: Gate>(p: &GradParams, at: &Place, item: &Item) {
    let sizes = &p.prep.tables.sizes;
    let heads = sizes.h.max(1);
    let head = item.head as u32 / (sizes.hv / heads).max(1);
    let from = |x: &Tensor, bytes: u32| (x.addr as *const u8).wrapping_add(item.row * bytes as usize);
    // SAFETY: whole images of the item, rows of its chunk; lanes meet again.
    unsafe {
        if at.thread == 0 {
            let first = at.base + BARRIERS;
            ptx::mbarrier_arrive_expect_tx(first, 3 * IMAGE + PANEL);
            ptx::cp_async_bulk_shared_global(at.base + D_R, from(&p.d_v_new, IMAGE), IMAGE, first);
            ptx::cp_async_bulk_shared_global(at.base + S, from(&p.states, 2 * IMAGE), 2 * IMAGE, first);
            let record = from(&p.prep.records.operands, RECORD);
            ptx::cp_async_bulk_shared_global(at.base + A, record.wrapping_add(RECORD_A as usize), PANEL, first);
        }
        warp::sync();
        rows(item, at, &p.prep.q, heads, head, Q_GIVEN);
        rows(item, at, &p.prep.k, heads, head, K_GIVEN);
        if G::PER_CHANNEL {
            if is_wide(&p.prep) {
                repeat!(I in 4 => {
                    let number = at.thread + 512 * I as u32;
                    let (x, to) = (&p.prep.g, G_GIVEN[I / 2] + (number % 1024) * 16);
                    let (from, bytes) = item.piece(x, sizes.hv, item.head as u32, 4, number / 32, number % 32);
                    ptx::cp_async_cg_16_zfill(at.base + to, from, bytes);
                });
            } else {
                rows(item, at, &p.prep.g, sizes.hv, item.head as u32, G_GIVEN[0]);
            }
        }
        image(p, item, at, &p.d_o, D_O);
        if !over_v::<G>(p) {
            image(p, item, at, &p.v, V);
        }
    }
}

/// Leaves the parameters of a head's gate at `to`: their loads wait for each other.
///
/// # Safety
/// By a warpgroup, its thread number `thread`; nobody uses what lies there.
#[inline(always)]
pub(super) unsafe fn bring_gate<G: Gate>(p: &PrepParams, thread: u32, head: usize, to: u32) {
    // SAFETY: one writer for each word; lanes meet again.
    unsafe {
        if thread < 64 {
            let [a, b] = bias::<G>(p, head, 2 * thread as usize);
            ptx::st_shared_v2_f32(to + 8 * thread, a, b);
        } else if thread == 64 {
            ptx::st_shared_f32(to + 512, slope(p, head));
        }
        warp::sync();
    }
}

/// Starts the copies of the gradients of states: nobody has sums for dq any more.
///
/// # Safety
/// By one thread, after a barrier of the block behind the end of the chunk before.
#[inline(always)]
pub(super) unsafe fn bring_d_states(p: &GradParams, at: &Place, item: &Item) {
    let rest = at.base + BARRIERS + 8;
    // SAFETY: whole images of the item.
    unsafe {
        ptx::mbarrier_arrive_expect_tx(rest, 3 * IMAGE);
        let from = (p.d_states.addr as *const u8).wrapping_add(item.row * 2 * IMAGE as usize);
        ptx::cp_async_bulk_shared_global(at.base + D, from, 2 * IMAGE, rest);
    }
}

/// Starts the copies that take the places of q, k and what the gate was given, and clears the operands of levels.
///
/// # Safety
/// By all threads, after a barrier of the block behind which nobody needs those any more.
#[inline(always)]
pub(super) unsafe fn bring_rest<G: Gate>(p: &GradParams, at: &Place, item: &Item) {
    // SAFETY: a whole image of the item, rows of its chunk; lanes meet again.
    unsafe {
        if at.thread == 0 {
            let from = (p.v_new.addr as *const u8).wrapping_add(item.row * IMAGE as usize);
            ptx::cp_async_bulk_shared_global(at.base + R, from, IMAGE, at.base + BARRIERS + 8);
        }
        warp::sync();
        if over_v::<G>(p) {
            image(p, item, at, &p.v, V);
        }
        // Blocks of a level that no pair of tokens has stay zero.
        repeat!(I in 2 => {
            let to = at.base + LEVELS + 16 * (at.thread + 512 * I as u32);
            ptx::st_shared_v4_u32(to, 0, 0, 0, 0);
        });
    }
}
