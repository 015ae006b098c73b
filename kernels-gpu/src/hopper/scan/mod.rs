//! The scan on the tensor cores of Hopper.
//!
//! A block is `N` warpgroups that each walk 64 columns of [S | M], and one that feeds them: its first thread brings the
//! chunks' records by bulk copies, two or three chunks ahead, its second warp v, and its last two take the outputs away. The
//! state is held transposed in registers, as an accumulator, and its rounded copy is a register operand of the next
//! product; so the chain of products never touches shared memory:
//! ```text
//! R^T  = v^T A'^T - S^T w^T                 (4 + 8 products of 64 x 64 x 16)
//! o^T  = S^T qg^T + R^T Aqk^T               (8 + 4)
//! S^T <- S^T diag(decay) + R^T kg           (4 of 64 x 128 x 16)
//! ```
//! The output of a chunk is rounded into shared memory, from where the feeding warpgroup takes it away.
//!
//! Columns of M that may become too small to matter (see [`crate::cut`]) are walked in runs, after each of which their norm is
//! measured: between runs the state lies in shared memory, and nothing is under way.

mod feed;
mod pipeline;

pub(super) use feed::bring_panel;
pub(super) use pipeline::{COLUMNS, THREADS, Tokens};

use cuda_std::{ptx, thread, warp};

use super::{
    CHANNELS, PANEL, RECORD, RECORD_A, RECORD_AQK, RECORD_KG, RECORD_QG, RECORD_W, by_columns, by_rows, column_step,
    put_panel_transposed, repeat, row_step, step, wait,
};
use feed::feed;
use pipeline::*;

use crate::comm::{Port, STEP_SCAN};
use crate::cut::{self, Known};
use crate::element::DtypeCode;
use crate::params::{Cut, ScanItem, ScanParams, Segment, StampKind};
use crate::scan::{Columns, hand_over, initial_state, known};
use crate::tile::{RESERVED_BYTES, Shared, Warpgroup, tile_bytes};

/// Number of the barrier of two walking warpgroups: behind those of the tile operations.
const WALKERS: u32 = 6;

/// Chunks of M that are walked before its norm is measured again.
const RUN: u32 = 32;

/// Where the block keeps what it knows of an item, in the reserved area behind what the DSL has there.
const KEPT_AT: u32 = 512;

/// What is known of the item's transition and how far its walk has come, in shared memory.
#[derive(Clone, Copy)]
struct Kept {
    at: u32,
}

impl Kept {
    /// # Safety
    /// Nobody reads before the next barrier, nor has reading to do of what was there.
    #[inline(always)]
    unsafe fn begin(&self, known: &Known, writes: bool) {
        if writes {
            // SAFETY: the block's own words, by contract.
            unsafe {
                ptx::st_shared_u32(self.at, 0);
                ptx::st_shared_u32(self.at + 4, known.rows);
                ptx::st_shared_u32(self.at + 8, known.growth.to_bits());
                ptx::st_shared_u32(self.at + 12, known.bound.to_bits());
            }
        }
    }

    /// The walk goes on with chunk `first`.
    ///
    /// # Safety
    /// As of `begin`.
    #[inline(always)]
    unsafe fn go_on(&self, first: u32, writes: bool) {
        if writes {
            // SAFETY: the block's own word, by contract.
            unsafe { ptx::st_shared_u32(self.at, first) };
        }
    }

    #[inline(always)]
    fn word(&self, i: u32) -> u32 {
        // From lane 0, so that the assembler knows it to be uniform.
        // SAFETY: the block's own words; by all threads.
        unsafe { warp::shuffle_idx(ptx::ld_shared_u32(self.at + 4 * i), 0) }
    }

    #[inline(always)]
    fn known(&self) -> Known {
        Known { rows: self.word(1), growth: f32::from_bits(self.word(2)), bound: f32::from_bits(self.word(3)) }
    }

    /// The chunks to walk next. M ends where it is known to be small, and is walked in runs; S goes on in a second run, whose
    /// outputs are complete.
    #[inline(always)]
    fn span(&self, p: &ScanParams, item: &ScanItem, segment: &Segment, number: u32) -> Span {
        let (first, rows) = (self.word(0), self.word(1));
        // SAFETY: by all threads: from lane 0 as above, and a vote does the same.
        unsafe {
            let chunks = warp::shuffle_idx(segment.chunks, 0);
            let within = chunks.min(rows);
            let is_m = warp::any(!p.channel.layout.is_state(item.first_block));
            let corrects = warp::any(p.corrects(segment));
            let last = if is_m { within } else { chunks };
            let corrected = if corrects && !is_m { within } else { 0 };
            let end = if first < corrected {
                corrected
            } else if is_m && rows != u32::MAX {
                last.min(first + RUN)
            } else {
                last
            };
            Span { number, first, end, last, corrected, is_m }
        }
    }
}

/// Persistent grid: blocks take items by ticket until there are no more. Blocks of `N + 1` warpgroups, of two if the PE receives
/// nothing: what is for columns of M and for outputs that are corrected later is left out there, since it costs registers.
#[inline(always)]
pub fn scan_push<const N: usize>(wg: &mut Warpgroup<'_>, p: &ScanParams) {
    // SAFETY: what is launched behind this one as dependent may start when all blocks run.
    unsafe { ptx::griddepcontrol_launch_dependents() };
    let pipeline = Pipeline::<N>::new(wg.base() + RESERVED_BYTES as u32);
    let thread_in_block = thread::thread_idx_x();
    if thread_in_block == 0 {
        // SAFETY: the first thing that happens to this memory; `next_ticket` has a barrier before anybody waits.
        unsafe { pipeline.init() };
    }
    let state_bytes = tile_bytes(COLUMNS as usize, CHANNELS, 4) as u32;
    let state: Shared<f32> = wg.tile_at(pipeline.base + wg.index() as u32 * state_bytes, COLUMNS as usize, CHANNELS);
    let m_dtype = DtypeCode::from_code(p.m_dtype);
    let port = Port { channel: &p.channel, trace: &p.trace, step: STEP_SCAN, m_dtype };
    let mut healthy = true;
    let mut number = 0;
    loop {
        let ticket = wg.next_ticket(p.ticket);
        // A wait that expired anywhere on this PE ends the step: its outputs are void.
        let go_on = healthy && !port.trapped(wg);
        let go_on = wg.sync_and(go_on);
        // SAFETY: by all threads, as the votes below: a vote tells the assembler that the branch is uniform.
        if unsafe { warp::any(ticket >= p.items.len || !go_on) } {
            return;
        }
        let start = wg.clock();
        let item: ScanItem = wg.read(p.items, ticket as usize);
        let segment: Segment = wg.read(p.tables.segments, item.segment as usize);
        let columns = Columns::of(wg, p, &item);
        let ready = match columns {
            Some(columns) => initial_state(wg, p, &port, &item, &segment, columns, state),
            None => true,
        };
        let ready = wg.sync_and(ready);
        // SAFETY: as above.
        if !unsafe { warp::all(ready) } {
            return;
        }
        let known = if N == 1 { Known::NOTHING } else { known(wg, p, &item, &segment) };
        let kept = Kept { at: wg.base() + KEPT_AT };
        // SAFETY: by one thread; the barrier follows.
        unsafe { kept.begin(&known, thread_in_block == 0) };
        let cut = loop {
            wg.sync_block();
            let span = kept.span(p, &item, &segment, number);
            // With two walking warpgroups a thread has 168 registers: these take some of the feeding one's for as long as they
            // walk. 256 x 216 + 128 x 72 = 384 x 168.
            // SAFETY: by whole warpgroups; the entry states threads and registers.
            unsafe {
                if wg.index() == N {
                    if N > 1 {
                        ptx::setmaxnreg_dec::<72>();
                    }
                    wg.sync_given(N + 1);
                    feed(wg, p, &pipeline, &item, &segment, span);
                    if N > 1 {
                        ptx::setmaxnreg_inc::<168>();
                    }
                } else {
                    if N > 1 {
                        ptx::setmaxnreg_inc::<216>();
                    }
                    let mut s = [0f32; 64];
                    wg.load_fragment(&mut s, state);
                    // The state's tile lies where the stages are: read by ordinary loads, written next by bulk copies.
                    ptx::fence_proxy_async_shared();
                    wg.give(N + 1);
                    let columns = Columns::of_block(p, item.first_block + wg.index() as u32);
                    if N > 1 && warp::all(span.first < span.corrected) {
                        walk::<N, true>(wg, p, &pipeline, &item, &segment, columns, &mut s, span);
                    } else {
                        walk::<N, false>(wg, p, &pipeline, &item, &segment, columns, &mut s, span);
                    }
                    if N > 1 {
                        // Its tile lies where the other one may still read its last chunk.
                        warp::sync();
                        ptx::bar_sync_id::<WALKERS, { 2 * THREADS }>();
                    }
                    wg.store_fragment(state, &s);
                    if N > 1 {
                        ptx::setmaxnreg_dec::<168>();
                    }
                }
            }
            // What follows is read again: in registers it would be alive across the walk.
            let (span, known) = (kept.span(p, &item, &segment, number), kept.known());
            let (mut done, mut cut) = (span.end >= span.last, Cut::default());
            if N > 1 && span.is_m && known.is_asked() {
                let mut small = true;
                if let Some(columns) = columns {
                    let squares = wg.sum_of_squares(state);
                    let bound = cut::columns_bound(squares, p.channel.layout.m_blocks(), known.growth);
                    small = bound <= p.tolerance;
                    if small {
                        cut = columns.cut(segment.chunks - span.end, bound);
                    }
                }
                done |= wg.sync_and(small);
            }
            if N > 1
                && let Some(columns) = columns
                && known.rows <= segment.chunks
                && (!span.is_m || span.end == known.rows)
            {
                cut = columns.cut(segment.chunks - known.rows, known.bound);
            }
            // SAFETY: as above.
            if unsafe { warp::all(done) } {
                number += span.end;
                break cut;
            }
            // All have read what is overwritten.
            wg.sync_block();
            // SAFETY: by one thread; the next barrier follows.
            unsafe { kept.go_on(span.end, thread_in_block == 0) };
        };
        let end = wg.clock();
        wg.stamp_block(&p.trace, StampKind::Scan, [start, end], [item.head, item.first_block], 0);
        // Nobody gets a state of records that were not there.
        // SAFETY: as above.
        if N == 1 && p.beside.ready.len > 0 && !unsafe { warp::all(wg.sync_and(!port.trapped(wg))) } {
            return;
        }
        if let Some(columns) = columns {
            wg.sync();
            healthy = hand_over(wg, p, &port, &item, &segment, columns, state, cut);
        }
        // SAFETY: as above.
        unsafe { ptx::fence_proxy_async_shared() };
    }
}

/// The chunks `span` of an item, on a walking warpgroup. `CORRECTED`: outputs are corrected later and go to f32 scratch.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn walk<const N: usize, const CORRECTED: bool>(
    wg: &Warpgroup<'_>,
    p: &ScanParams,
    pipeline: &Pipeline<N>,
    item: &ScanItem,
    segment: &Segment,
    columns: Columns,
    s: &mut [f32; 64],
    span: Span,
) {
    let walker = wg.index() as u32;
    let outputs = Outputs::<CORRECTED> { walker, p, item, tokens: Tokens::of(wg, &p.tables, segment), columns };
    let lane = ptx::laneid();
    let own_v = RECORD + walker * PANEL;
    let (mut r, mut o) = ([0f32; 32], [0f32; 32]);
    let (mut s_half, mut r_half) = ([0u32; 32], [0u32; 16]);
    let mut index = span.first;
    while index < span.end {
        let at = pipeline.place(span.number + index);
        // SAFETY: barriers and stages are the block's; control flow is uniform in the warpgroup; every product's
        // registers are carried by the waits that follow.
        unsafe {
            let (v, a, w) =
                (by_columns(at.stage + own_v, PANEL), by_rows(at.stage + RECORD_A), by_rows(at.stage + RECORD_W));
            wait(at.barriers + FULL_FIRST, at.parity);
            ptx::wgmma_fence();
            repeat!(J in 4 => {
                let (v, a) = (step(v, column_step(J)), step(a, row_step(J, PANEL)));
                ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 1, 0>(&mut r, v, a, (J != 0) as u32);
            });
            ptx::wgmma_commit_group();
            // A wait for nothing: without it the assembler inserts one of its own before it lets accumulators be read.
            ptx::wgmma_wait_group::<1>((&mut r, &mut *s));
            repeat!(I in 32 => { s_half[I] = ptx::cvt_rn_bf16x2_f32(s[2 * I + 1], s[2 * I]); });
            ptx::wgmma_fence();
            repeat!(J in 8 => {
                let s_step = [s_half[4 * J], s_half[4 * J + 1], s_half[4 * J + 2], s_half[4 * J + 3]];
                ptx::wgmma_m64n64k16_bf16_rs::<1, -1, 0>(&mut r, s_step, step(w, row_step(J, PANEL)), 1);
            });
            ptx::wgmma_commit_group();
            // The outputs of the chunk before leave while these products are under way.
            ptx::wgmma_wait_group::<1>((&mut r, &mut s_half, &mut o));
            outputs.put_before(&o, pipeline, span, index);
            wait(at.barriers + FULL_OUTPUT, at.parity);
            let (qg, aqk) = (by_rows(at.stage + RECORD_QG), by_rows(at.stage + RECORD_AQK));
            ptx::wgmma_fence();
            repeat!(J in 8 => {
                let s_step = [s_half[4 * J], s_half[4 * J + 1], s_half[4 * J + 2], s_half[4 * J + 3]];
                let qg = step(qg, row_step(J, PANEL));
                ptx::wgmma_m64n64k16_bf16_rs::<1, 1, 0>(&mut o, s_step, qg, (J != 0) as u32);
            });
            ptx::wgmma_commit_group();
            wait(at.barriers + FULL_UPDATE, at.parity);
            let column = 2 * (lane % 4);
            let mut decay = [0f32; 32];
            repeat!(J in 16 => {
                let [d0, d1] = ptx::ld_shared_v2_f32(at.decay + (8 * J as u32 + column) * 4);
                decay[2 * J] = d0;
                decay[2 * J + 1] = d1;
            });
            ptx::wgmma_wait_group::<1>((&mut r, &mut s_half, &mut o));
            release(lane, at.barriers + EMPTY_FIRST);
            repeat!(I in 16 => { r_half[I] = ptx::cvt_rn_bf16x2_f32(r[2 * I + 1], r[2 * I]); });
            // Not earlier: writing an accumulator before the first product is waited for would serialise them. The decays are there
            // by now, and S^T qg^T is under way.
            repeat!(J in 16 => {
                s[4 * J] *= decay[2 * J];
                s[4 * J + 1] *= decay[2 * J + 1];
                s[4 * J + 2] *= decay[2 * J];
                s[4 * J + 3] *= decay[2 * J + 1];
            });
            let kg = by_columns(at.stage + RECORD_KG, PANEL);
            ptx::wgmma_fence();
            repeat!(J in 4 => {
                let r_step = [r_half[4 * J], r_half[4 * J + 1], r_half[4 * J + 2], r_half[4 * J + 3]];
                ptx::wgmma_m64n128k16_bf16_rs::<1, 1, 1>(s, r_step, step(kg, column_step(J)), 1);
            });
            ptx::wgmma_commit_group();
            repeat!(J in 4 => {
                let r_step = [r_half[4 * J], r_half[4 * J + 1], r_half[4 * J + 2], r_half[4 * J + 3]];
                ptx::wgmma_m64n64k16_bf16_rs::<1, 1, 0>(&mut o, r_step, step(aqk, row_step(J, PANEL)), 1);
            });
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group::<1>((&mut *s, &mut o, &mut s_half, &mut r_half));
            release(lane, at.barriers + EMPTY_UPDATE);
            ptx::wgmma_wait_group::<0>((&mut o, &mut r_half));
            release(lane, at.barriers + EMPTY_OUTPUT);
        }
        index += 1;
    }
    // SAFETY: as above.
    unsafe {
        outputs.put_before(&o, pipeline, span, index);
    }
}

/// Lets go of what `barrier` guards, for this warp.
///
/// # Safety
/// By all lanes, after their last access.
#[inline(always)]
pub(super) unsafe fn release(lane: u32, barrier: u32) {
    // SAFETY: by contract.
    unsafe { ptx::mbarrier_arrive_if(barrier, (lane == 0) as u32) };
}

/// Where a walking warpgroup's outputs go.
struct Outputs<'w, const CORRECTED: bool> {
    walker: u32,
    p: &'w ScanParams,
    item: &'w ScanItem,
    tokens: Tokens,
    columns: Columns,
}

impl<const CORRECTED: bool> Outputs<'_, CORRECTED> {
    /// Stores o^T of the chunk before `index`, if that is one of the span's: rounded into shared memory, or into scratch.
    ///
    /// # Safety
    /// By all threads of the warpgroup; the products that made `o` are done.
    #[inline(always)]
    unsafe fn put_before<const N: usize>(&self, o: &[f32; 32], pipeline: &Pipeline<N>, span: Span, index: u32) {
        let lane = ptx::laneid();
        // Predicates in place of a branch, under which accumulators must not be read. Where there is nothing the panel is free.
        let there = (index > span.first) as u32;
        let (number, index) = (span.number + index - there, index - there);
        let output = pipeline.output(self.walker, number);
        let warp = (thread::thread_idx_x() % THREADS) / 32;
        // Also before stores to scratch: the feeding warpgroup must not be two chunks behind, since it waits for a parity.
        // SAFETY: a barrier of the block.
        unsafe { wait(output.barriers + TAKEN, output.parity ^ 1) };
        if CORRECTED {
            let p = self.p;
            let (token, len) = self.tokens.chunk(index);
            let row = p.tables.sizes.hv as usize * CHANNELS;
            let channel = self.columns.first + (16 * warp + lane / 4) as usize;
            let first = 2 * (lane % 4);
            let from_first = (token + first as usize) * row + self.item.head as usize * CHANNELS + channel;
            // Each address from the one before: what all are made of would be in registers for the whole walk.
            let mut to = (p.o_local.addr as *mut f32).wrapping_add(from_first);
            repeat!(J in 8 => {
                if J != 0 {
                    to = to.wrapping_add(8 * row);
                }
                let t = first + 8 * J as u32;
                // SAFETY: rows of this chunk, columns of this warpgroup.
                unsafe {
                    let (even, odd) = ((t < len) as u32 & there, (t + 1 < len) as u32 & there);
                    let next = to.wrapping_add(row);
                    ptx::st_global_f32_if(to, o[4 * J], even);
                    ptx::st_global_f32_if(next, o[4 * J + 1], odd);
                    ptx::st_global_f32_if(to.wrapping_add(8), o[4 * J + 2], even);
                    ptx::st_global_f32_if(next.wrapping_add(8), o[4 * J + 3], odd);
                }
            });
        } else {
            // Rows are tokens. SAFETY: the panel is this warpgroup's, and free.
            unsafe { put_panel_transposed(o, output.panel, warp, lane) };
        }
        // SAFETY: the stores of this warp's lanes are done and ordered by the warp's barrier.
        unsafe {
            warp::sync();
            ptx::mbarrier_arrive_if(output.barriers + DONE, (lane == 0) as u32 & there);
        }
    }
}
