//! The feeding warpgroup.

use cuda_std::{ptx, thread, warp};

use super::pipeline::*;
use super::release;
use crate::hopper::{CHANNELS, CHUNK, IMAGE, PANEL, RECORD, RECORD_KG, RECORD_QG, RECORD_W, scan_stages, wait};
use crate::params::{ScanItem, ScanParams, Segment};
use crate::tile::Warpgroup;

/// The feeding warpgroup: one thread brings records, three warps bring v and take outputs away.
#[inline(always)]
pub(super) fn feed<const N: usize>(
    wg: &Warpgroup<'_>,
    p: &ScanParams,
    pipeline: &Pipeline<N>,
    item: &ScanItem,
    segment: &Segment,
    span: Span,
) {
    let t = thread::thread_idx_x() % THREADS;
    if t == 0 {
        // SAFETY: one thread.
        unsafe { bring_records(p, pipeline, item, segment, span) };
    } else if t >= 32 {
        // SAFETY: three whole warps.
        unsafe { carry(wg, p, pipeline, item, segment, span, t - 32) };
    }
    // The first warp's lanes meet again: a barrier of the block counts warps, and would count this one twice.
    // SAFETY: by all lanes.
    unsafe { warp::sync() };
}

/// # Safety
/// By one thread of the block.
#[inline(always)]
unsafe fn bring_records<const N: usize>(
    p: &ScanParams,
    pipeline: &Pipeline<N>,
    item: &ScanItem,
    segment: &Segment,
    span: Span,
) {
    let hv = p.tables.sizes.hv as usize;
    let mut index = span.first;
    while index < span.end {
        let number = span.number + index;
        let at = pipeline.place(number);
        let row = (segment.first_chunk + index) as usize * hv + item.head as usize;
        let record = (p.records.operands.addr as *const u8).wrapping_add(row * RECORD as usize);
        let decay = (p.records.decay.addr as *const u8).wrapping_add(row * CHANNELS * 4);
        let reused = number >= scan_stages(N);
        // SAFETY: records of this launch; stages are written once their readers have let go of them.
        unsafe {
            if reused {
                wait(at.barriers + EMPTY_FIRST, at.parity ^ 1);
            }
            ptx::mbarrier_arrive_expect_tx(at.barriers + FULL_FIRST, IMAGE + PANEL);
            let full = at.barriers + FULL_FIRST;
            ptx::cp_async_bulk_shared_global(at.stage + RECORD_W, record, IMAGE + PANEL, full);
            if reused {
                wait(at.barriers + EMPTY_OUTPUT, at.parity ^ 1);
            }
            let full = at.barriers + FULL_OUTPUT;
            ptx::mbarrier_arrive_expect_tx(full, IMAGE + PANEL);
            let from = record.wrapping_add(RECORD_QG as usize);
            ptx::cp_async_bulk_shared_global(at.stage + RECORD_QG, from, IMAGE + PANEL, full);
            if reused {
                wait(at.barriers + EMPTY_UPDATE, at.parity ^ 1);
            }
            let full = at.barriers + FULL_UPDATE;
            ptx::mbarrier_arrive_expect_tx(full, IMAGE + CHANNELS as u32 * 4);
            let from = record.wrapping_add(RECORD_KG as usize);
            ptx::cp_async_bulk_shared_global(at.stage + RECORD_KG, from, IMAGE, full);
            ptx::cp_async_bulk_shared_global(at.decay, decay, CHANNELS as u32 * 4, full);
        }
        index += 1;
    }
}

/// Brings v of a chunk as soon as the outputs that lay in its place are taken away, and announces one that was started one or two
/// chunks before, which has had time to arrive.
///
/// # Safety
/// By the `CARRIERS` threads `t`, whole warps.
#[inline(always)]
unsafe fn carry<const N: usize>(
    wg: &Warpgroup<'_>,
    p: &ScanParams,
    pipeline: &Pipeline<N>,
    item: &ScanItem,
    segment: &Segment,
    span: Span,
    t: u32,
) {
    let stages = scan_stages(N);
    // Chunks between starting a copy and announcing it: with three stages two are under way.
    let ahead = stages - 1;
    let lane = ptx::laneid();
    let row = p.tables.sizes.hv as usize * CHANNELS;
    let is_state = p.channel.layout.is_state(item.first_block);
    let (first_column, _) = p.channel.layout.columns(item.first_block);
    let head = item.head as usize * CHANNELS + first_column as usize;
    let target = if is_state { &p.o } else { &p.q_tilde };
    let tokens = Tokens::of(wg, &p.tables, segment);
    let mut index = span.first;
    while index < span.end + stages {
        if index >= span.first + ahead && index < span.end + ahead {
            let at = pipeline.place(span.number + index - ahead);
            // SAFETY: this thread's copies, then the warp's, are ordered before the arrival.
            unsafe {
                if ahead == 2 && index <= span.end {
                    ptx::cp_async_wait_group::<1>();
                } else {
                    ptx::cp_async_wait_group::<0>();
                }
                ptx::fence_proxy_async_shared();
                warp::sync();
                release(lane, at.barriers + FULL_FIRST);
            }
        }
        if index >= span.first + stages {
            let chunk = index - stages;
            let at = pipeline.place(span.number + chunk);
            // SAFETY: a barrier of the block.
            unsafe { wait(at.barriers + DONE, at.parity) };
            let (token, len) = tokens.chunk(chunk);
            let to = (target.addr as *mut u8).wrapping_add((token * row + head) * 2);
            let pieces = if chunk < span.corrected { 0 } else { 8 * len };
            let mut w = 0;
            while w < N as u32 {
                let (tile, to) = (at.stage + RECORD + w * PANEL, to.wrapping_add(w as usize * COLUMNS as usize * 2));
                let mut number = t;
                while number < pieces {
                    let (r, piece) = (number / 8, number % 8);
                    // SAFETY: inside the tile, and rows of this chunk in the caller's tensor.
                    unsafe {
                        let [a, b, c, d] = ptx::ld_shared_v4_u32(tile + r * 128 + ((piece ^ (r % 8)) << 4));
                        let place = to.wrapping_add(r as usize * row * 2 + piece as usize * 16);
                        ptx::st_global_v4_u32(place.cast(), a, b, c, d);
                    }
                    number += CARRIERS;
                }
                w += 1;
            }
        }
        if index < span.end {
            let at = pipeline.place(span.number + index);
            let (token, len) = tokens.chunk(index);
            let from = (p.v.addr as *const u8).wrapping_add((token * row + head) * 2);
            let mut w = 0;
            while w < N as u32 {
                let (tile, from) =
                    (at.stage + RECORD + w * PANEL, from.wrapping_add(w as usize * COLUMNS as usize * 2));
                // The same pieces as above: this thread itself has taken away what it overwrites. Zeros for columns of M.
                // SAFETY: rows of this chunk.
                unsafe { bring_panel(tile, from, row * 2, if is_state { len } else { 0 }, t, CARRIERS) };
                w += 1;
            }
            // SAFETY: of this thread's copies.
            unsafe { ptx::cp_async_commit_group() };
        }
        index += 1;
    }
}

/// Starts this thread's share of the copy of a panel: `len` rows of 128 bytes, `row_bytes` apart, and zeros behind them up to the
/// end of a chunk. Thread `t` of `threads` copies every `threads`-th piece of 16 bytes from piece `t` on.
///
/// # Safety
/// `from` is the first of `len` such rows (none is read if `len` is 0); the panel is the caller's to write.
#[inline(always)]
pub(in crate::hopper) unsafe fn bring_panel(
    panel: u32,
    from: *const u8,
    row_bytes: usize,
    len: u32,
    t: u32,
    threads: u32,
) {
    let mut number = t;
    while number < 8 * CHUNK as u32 {
        let (r, piece) = (number / 8, number % 8);
        let valid = r < len;
        let source = from.wrapping_add(if valid { r as usize * row_bytes } else { 0 } + piece as usize * 16);
        // SAFETY: a row of this chunk, or nothing.
        unsafe {
            let to = panel + r * 128 + ((piece ^ (r % 8)) << 4);
            ptx::cp_async_cg_16_zfill(to, source, if valid { 16 } else { 0 });
        }
        number += threads;
    }
}
