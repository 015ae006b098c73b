//! The feeding warpgroup: one thread brings records, one takes results away, two warps bring the caller's values.

use cuda_std::{ptx, thread, warp};

use super::pipeline::*;
use super::walk::{FIRST_BYTES, STAGES, Walk};
use crate::hopper::records::Records as Awaited;
use crate::hopper::scan::{COLUMNS, THREADS, Tokens, bring_panel, release};
use crate::hopper::{CHANNELS, IMAGE, PANEL, RECORD, wait};
use crate::params::{Records, Segment, Tables, Tensor};
use crate::tile::Warpgroup;

/// Tiles of values under way while another is awaited.
const AHEAD: u32 = STAGES - 1;

/// What an item reads and writes of each chunk.
#[derive(Clone, Copy)]
pub(super) struct Item {
    /// Row of the first chunk and the item's head in tensors of `[chunks, HV]`.
    row: usize,
    /// Rows between chunks: HV.
    rows: usize,
    records: u64,
    decays: u64,
    /// The item's first column of the first token.
    values: u64,
    /// The item's image and panel of row 0.
    images: u64,
    panels: u64,
    tokens: Tokens,
    first_chunk: u32,
    chunks: u32,
    /// Whether results are kept.
    stores: bool,
}

impl Item {
    /// Block `block` of head `head` of a segment: `values` are `[tokens, HV, V]`, the results `images` and `panels`
    /// as the [module](super) says.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        wg: &Warpgroup<'_>,
        tables: &Tables,
        records: &Records,
        values: &Tensor,
        [images, panels]: [&Tensor; 2],
        segment: &Segment,
        [head, block]: [u32; 2],
        stores: bool,
    ) -> Self {
        let hv = tables.sizes.hv as usize;
        let column = head as usize * CHANNELS + block as usize * COLUMNS as usize;
        Self {
            row: segment.first_chunk as usize * hv + head as usize,
            rows: hv,
            records: records.operands.addr,
            decays: records.decay.addr,
            values: values.addr + column as u64 * 2,
            images: images.addr + u64::from(block * IMAGE),
            panels: panels.addr + u64::from(block * PANEL),
            tokens: Tokens::of(wg, tables, segment),
            first_chunk: segment.first_chunk,
            chunks: segment.chunks,
            stores,
        }
    }

    /// The chunk of the segment that is walked as number `index`.
    #[inline(always)]
    fn chunk<W: Walk>(&self, index: u32) -> u32 {
        if W::FROM_THE_END { self.chunks - 1 - index } else { index }
    }

    /// Its row in tensors of `[chunks, HV]`.
    #[inline(always)]
    fn row<W: Walk>(&self, index: u32) -> usize {
        self.row + self.chunk::<W>(index) as usize * self.rows
    }
}

/// Feeds the walk over an item, whose chunks are numbers `first_number ..` and its results `first_result ..`; returns when all
/// results are in global memory. `awaited`: records that may still have to come.
#[inline(always)]
pub(super) fn feed<W: Walk>(
    pipeline: &Pipeline<W>,
    item: &Item,
    awaited: Option<Awaited<'_, '_>>,
    first_number: u32,
    first_result: u32,
) {
    let t = thread::thread_idx_x() % THREADS;
    // SAFETY: one thread, one thread, and two whole warps. Lanes of a warp meet again at the end: a barrier of the block counts
    // warps, and would count a diverged one twice.
    unsafe {
        if t == 0 {
            bring_records(pipeline, item, awaited, first_number);
        } else if t == 32 {
            if item.stores {
                take_results(pipeline, item, first_result);
            }
        } else if t >= THREADS - 32 * CARRIERS {
            bring_values(pipeline, item, first_number, t - (THREADS - 32 * CARRIERS));
        }
        warp::sync();
    }
}

/// # Safety
/// By one thread of the block.
#[inline(always)]
unsafe fn bring_records<W: Walk>(
    pipeline: &Pipeline<W>,
    item: &Item,
    mut awaited: Option<Awaited<'_, '_>>,
    first_number: u32,
) {
    const DECAY: u32 = CHANNELS as u32 * 4;
    let mut index = 0;
    while index < item.chunks {
        let at = pipeline.place(first_number + index);
        if let Some(awaited) = &mut awaited {
            // SAFETY: by one thread.
            unsafe { awaited.wait(item.first_chunk + item.chunk::<W>(index)) };
        }
        let row = item.row::<W>(index);
        let record = (item.records as *const u8).wrapping_add(row * RECORD as usize);
        let decay = (item.decays as *const u8).wrapping_add(row * DECAY as usize);
        // SAFETY: records of this launch; stages are written once their readers have let go of them.
        unsafe {
            let full = at.barriers + FULL_FIRST;
            wait(at.barriers + EMPTY_FIRST, at.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, FIRST_BYTES + DECAY);
            ptx::cp_async_bulk_shared_global(at.stage, record.wrapping_add(W::FIRST as usize), FIRST_BYTES, full);
            ptx::cp_async_bulk_shared_global(at.decay, decay, DECAY, full);
            let full = at.barriers + FULL_UPDATE;
            wait(at.barriers + EMPTY_UPDATE, at.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, W::UPDATES * IMAGE);
            let to = at.stage + FIRST_BYTES;
            ptx::cp_async_bulk_shared_global(to, record.wrapping_add(W::UPDATE[0] as usize), IMAGE, full);
            if W::UPDATES > 1 {
                ptx::cp_async_bulk_shared_global(to + IMAGE, record.wrapping_add(W::UPDATE[1] as usize), IMAGE, full);
            }
        }
        index += 1;
    }
}

/// Brings values as soon as a stage is free of them, and announces those that were started two chunks before, which have had
/// time to arrive.
///
/// # Safety
/// By the threads `t` of `CARRIERS` whole warps.
#[inline(always)]
unsafe fn bring_values<W: Walk>(pipeline: &Pipeline<W>, item: &Item, first_number: u32, t: u32) {
    let row_bytes = item.rows * CHANNELS * 2;
    let lane = ptx::laneid();
    let empty = if W::UPDATE_READS_VALUES { EMPTY_UPDATE } else { EMPTY_FIRST };
    let mut index = 0;
    while index < item.chunks + AHEAD {
        if index >= AHEAD {
            let at = pipeline.place(first_number + index - AHEAD);
            // SAFETY: this thread's copies, then the warp's, are ordered before the arrival.
            unsafe {
                ptx::cp_async_wait_group::<{ AHEAD - 1 }>();
                ptx::fence_proxy_async_shared();
                warp::sync();
                release(lane, at.barriers + FULL_FIRST);
            }
        }
        if index < item.chunks {
            let at = pipeline.place(first_number + index);
            let (token, len) = item.tokens.chunk(item.chunk::<W>(index));
            let from = (item.values as *const u8).wrapping_add(token * row_bytes);
            // SAFETY: rows of this chunk; the panel's readers have let go of it.
            unsafe {
                wait(at.barriers + empty, at.parity ^ 1);
                bring_panel::<{ 32 * CARRIERS }>(at.stage + W::VALUES, from, row_bytes, len, t);
            }
        }
        // One group for each turn, empty at the end, so that the wait above always counts the same.
        // SAFETY: of this thread's copies.
        unsafe { ptx::cp_async_commit_group() };
        index += 1;
    }
}

/// Writes results to global memory. The walking warpgroup gets a place back while the next store is under way.
///
/// # Safety
/// By one thread of the block.
#[inline(always)]
unsafe fn take_results<W: Walk>(pipeline: &Pipeline<W>, item: &Item, first_result: u32) {
    let mut index = 0;
    while index < item.chunks {
        let at = pipeline.result(first_result + index);
        // The images of a head's two blocks of columns are neighbours, as are its panels.
        let row = 2 * item.row::<W>(index);
        let image = (item.images as *mut u8).wrapping_add(row * IMAGE as usize);
        let panel = (item.panels as *mut u8).wrapping_add(row * PANEL as usize);
        // SAFETY: results of this chunk, which this block alone writes; shared memory lies there until it was read.
        unsafe {
            // Ordinary stores, which the walking warpgroup has not fenced: they come before this thread's fence, and that before
            // its bulk copy.
            wait(at.barriers + IMAGE_DONE, at.parity);
            ptx::fence_proxy_async_shared();
            ptx::cp_async_bulk_global_shared(image, at.image, IMAGE);
            ptx::cp_async_bulk_commit_group();
            wait(at.barriers + PANEL_DONE, at.parity);
            ptx::fence_proxy_async_shared();
            ptx::cp_async_bulk_global_shared(panel, at.image + IMAGE, PANEL);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read::<1>();
            ptx::mbarrier_arrive(at.barriers + IMAGE_TAKEN);
            // At once: after the next image it would be late, since the panel is the next thing that the walk stores.
            ptx::cp_async_bulk_wait_group_read::<0>();
            ptx::mbarrier_arrive(at.barriers + PANEL_TAKEN);
        }
        index += 1;
    }
    // SAFETY: as above; the block may end once its results are written.
    unsafe { ptx::cp_async_bulk_wait_group::<0>() };
}
