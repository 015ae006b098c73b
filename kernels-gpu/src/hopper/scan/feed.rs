//! The feeding warpgroup: one thread brings records, one warp brings v, two take outputs away. None waits for another.

use cuda_std::{ptx, thread, warp};

use super::pipeline::*;
use super::release;
use crate::comm::STEP_SCAN;
use crate::hopper::records::Records;
use crate::hopper::{CHANNELS, CHUNK, IMAGE, PANEL, RECORD, RECORD_KG, RECORD_QG, RECORD_W, repeat, scan_stages, wait};
use crate::params::{ScanItem, ScanParams, Segment};
use crate::tile::Warpgroup;

/// Feeds the walk over a span of an item's chunks; returns when its outputs are on their way to global memory.
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
    // SAFETY: one thread, one warp, and two warps. Lanes of a warp meet again at the end: a barrier of the block counts warps, and
    // would count a diverged one twice.
    unsafe {
        if t == 0 {
            bring_records(wg, p, pipeline, item, segment, span);
        } else if t >= THREADS - TAKERS {
            take_outputs(p, pipeline, &Rows::of(wg, p, item, segment), span, t - (THREADS - TAKERS));
        } else if t >= 32 {
            bring_values(p, pipeline, &Rows::of(wg, p, item, segment), span, t - 32);
        }
        warp::sync();
    }
}

/// Where an item's rows lie in the caller's tensors of `[tokens, HV, 128]`.
struct Rows {
    tokens: Tokens,
    /// Bytes from a token to the next.
    bytes: usize,
    /// Bytes from a token's beginning to the item's first column.
    first: usize,
    is_state: bool,
}

impl Rows {
    #[inline(always)]
    fn of(wg: &Warpgroup<'_>, p: &ScanParams, item: &ScanItem, segment: &Segment) -> Self {
        let (first_column, _) = p.channel.layout.columns(item.first_block);
        Self {
            tokens: Tokens::of(wg, &p.tables, segment),
            bytes: p.tables.sizes.hv as usize * CHANNELS * 2,
            first: (item.head as usize * CHANNELS + first_column as usize) * 2,
            is_state: p.channel.layout.is_state(item.first_block),
        }
    }

    /// Bytes before a chunk's first row, and how many rows it has.
    #[inline(always)]
    fn chunk(&self, index: u32) -> (usize, u32) {
        let (token, len) = self.tokens.chunk(index);
        (token * self.bytes + self.first, len)
    }
}

/// # Safety
/// By one thread of the block.
#[inline(always)]
unsafe fn bring_records<const N: usize>(
    wg: &Warpgroup<'_>,
    p: &ScanParams,
    pipeline: &Pipeline<N>,
    item: &ScanItem,
    segment: &Segment,
    span: Span,
) {
    let hv = p.tables.sizes.hv as usize;
    let mut records = Records::new(wg, &p.channel, &p.trace, STEP_SCAN, &p.beside, [item.head, hv as u32]);
    let mut index = span.first;
    while index < span.end {
        let at = pipeline.place(span.number + index);
        if N == 1 {
            // SAFETY: by one thread.
            unsafe { records.wait(segment.first_chunk + index) };
        }
        let row = (segment.first_chunk + index) as usize * hv + item.head as usize;
        let record = (p.records.operands.addr as *const u8).wrapping_add(row * RECORD as usize);
        let decay = (p.records.decay.addr as *const u8).wrapping_add(row * CHANNELS * 4);
        // SAFETY: records of this launch; stages are written once their readers have let go of them.
        unsafe {
            let full = at.barriers + FULL_FIRST;
            wait(at.barriers + EMPTY_FIRST, at.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, IMAGE + PANEL);
            ptx::cp_async_bulk_shared_global(at.stage + RECORD_W, record, IMAGE + PANEL, full);
            // In the order in which they are let go of.
            let full = at.barriers + FULL_UPDATE;
            wait(at.barriers + EMPTY_UPDATE, at.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, IMAGE + CHANNELS as u32 * 4);
            let from = record.wrapping_add(RECORD_KG as usize);
            ptx::cp_async_bulk_shared_global(at.stage + RECORD_KG, from, IMAGE, full);
            ptx::cp_async_bulk_shared_global(at.decay, decay, CHANNELS as u32 * 4, full);
            let full = at.barriers + FULL_OUTPUT;
            wait(at.barriers + EMPTY_OUTPUT, at.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, IMAGE + PANEL);
            let from = record.wrapping_add(RECORD_QG as usize);
            ptx::cp_async_bulk_shared_global(at.stage + RECORD_QG, from, IMAGE + PANEL, full);
        }
        index += 1;
    }
}

/// Brings v as soon as the first product is done with what lies there, and announces that of one or two chunks before, which has
/// had time to arrive.
///
/// # Safety
/// By the lanes `t` of a warp.
#[inline(always)]
unsafe fn bring_values<const N: usize>(p: &ScanParams, pipeline: &Pipeline<N>, rows: &Rows, span: Span, t: u32) {
    // Copies under way while another is awaited.
    let ahead = scan_stages(N) - 1;
    let mut index = span.first;
    while index < span.end + ahead {
        if index >= span.first + ahead {
            let at = pipeline.place(span.number + index - ahead);
            // SAFETY: this thread's copies, then the warp's, are ordered before the arrival.
            unsafe {
                if ahead == 1 {
                    ptx::cp_async_wait_group::<0>();
                } else {
                    ptx::cp_async_wait_group::<1>();
                }
                ptx::fence_proxy_async_shared();
                warp::sync();
                release(t, at.barriers + FULL_FIRST);
            }
        }
        if index < span.end {
            let at = pipeline.place(span.number + index);
            let (start, len) = rows.chunk(index);
            let from = (p.v.addr as *const u8).wrapping_add(start);
            // SAFETY: rows of this chunk; the panels' readers have let go of them.
            unsafe {
                wait(at.barriers + EMPTY_FIRST, at.parity ^ 1);
                let mut w = 0;
                while w < N as u32 {
                    let from = from.wrapping_add((w * COLUMNS) as usize * 2);
                    // Zeros for columns of M.
                    let len = if rows.is_state { len } else { 0 };
                    bring_panel::<32>(at.stage + RECORD + w * PANEL, from, rows.bytes, len, t);
                    w += 1;
                }
            }
        }
        // One group for each turn, empty at the end, so that the wait above always counts the same.
        // SAFETY: of this thread's copies.
        unsafe { ptx::cp_async_commit_group() };
        index += 1;
    }
}

/// Takes outputs away. A walking warpgroup gets its place back as soon as they are in registers.
///
/// # Safety
/// By the `TAKERS` threads `t`, whole warps.
#[inline(always)]
unsafe fn take_outputs<const N: usize>(p: &ScanParams, pipeline: &Pipeline<N>, rows: &Rows, span: Span, t: u32) {
    const _: () = assert!(CHUNK * 8 == 8 * TAKERS as usize);
    let lane = ptx::laneid();
    let target = if rows.is_state { &p.o } else { &p.q_tilde };
    let (r, piece) = (t / 8, t % 8);
    // Rows of the eight pieces are 8 apart, so they lie at the same place in their rows.
    let place = r * 128 + ((piece ^ r) << 4);
    let mut index = span.first;
    while index < span.end {
        let (start, len) = rows.chunk(index);
        let to = (target.addr as *mut u8).wrapping_add(start + r as usize * rows.bytes + piece as usize * 16);
        let mut w = 0;
        while w < N as u32 {
            let output = pipeline.output(w, span.number + index);
            let mut pieces = [[0u32; 4]; 8];
            // SAFETY: inside the panel, and rows of this chunk in the caller's tensor.
            unsafe {
                wait(output.barriers + DONE, output.parity);
                if index >= span.corrected {
                    repeat!(I in 8 => { pieces[I] = ptx::ld_shared_v4_u32(output.panel + place + I as u32 * 1024); });
                }
                warp::sync();
                release(lane, output.barriers + TAKEN);
                if index >= span.corrected {
                    let to = to.wrapping_add((w * COLUMNS) as usize * 2);
                    repeat!(I in 8 => {
                        let [a, b, c, d] = pieces[I];
                        if r + 8 * (I as u32) < len {
                            ptx::st_global_v4_u32(to.wrapping_add(8 * I * rows.bytes).cast(), a, b, c, d);
                        }
                    });
                }
            }
            w += 1;
        }
        index += 1;
    }
}

/// Starts this thread's share of the copy of a panel: `len` rows of 128 bytes, `row_bytes` apart, and zeros behind them up to the
/// end of a chunk. Thread `t` of `THREADS` copies every `THREADS`-th piece of 16 bytes from piece `t` on.
///
/// # Safety
/// `from` is the first of `len` such rows (none is read if `len` is 0); the panel is the caller's to write.
#[inline(always)]
pub(in crate::hopper) unsafe fn bring_panel<const THREADS: u32>(
    panel: u32,
    from: *const u8,
    row_bytes: usize,
    len: u32,
    t: u32,
) {
    const { assert!(THREADS == 32 || THREADS == 64) };
    let rows = THREADS / 8;
    let (first, piece) = (t / 8, t % 8);
    let mut source = from.wrapping_add(first as usize * row_bytes + piece as usize * 16);
    // Pieces of rows 8 apart lie at the same place in their rows, and those of rows 4 apart 4 pieces away.
    let even = panel + first * 128 + ((piece ^ first) << 4);
    let odd = if THREADS == 32 { even ^ 64 } else { even };
    // What a chunk takes here is the least that a step of the walk can take, so the usual one has no predicates: four
    // instructions a piece.
    // SAFETY: rows of this chunk, or nothing; the panel is the caller's.
    unsafe {
        if warp::all(len == CHUNK as u32) {
            repeat!(I in 16 => {
                if (I as u32) < 512 / THREADS {
                    if I != 0 {
                        source = source.wrapping_add(rows as usize * row_bytes);
                    }
                    let to = if I & 1 == 0 { even } else { odd } + I as u32 * THREADS * 16;
                    ptx::cp_async_cg_16(to, source);
                }
            });
        } else {
            let mut i = 0;
            while i < 512 / THREADS {
                let valid = first + i * rows < len;
                let to = if i & 1 == 0 { even } else { odd } + i * THREADS * 16;
                ptx::cp_async_cg_16_zfill(to, if valid { source } else { from }, if valid { 16 } else { 0 });
                source = source.wrapping_add(rows as usize * row_bytes);
                i += 1;
            }
        }
    }
}
