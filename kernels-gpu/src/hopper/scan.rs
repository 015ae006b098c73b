//! The scan on the tensor cores of Hopper.
//!
//! A block is `N` warpgroups that each walk 64 columns of [S | M], and one that feeds them: its first thread brings the
//! chunks' records by bulk copies, two or three chunks ahead, its other warps bring v and take the outputs away. The
//! state is held transposed in registers, as an accumulator, and its rounded copy is a register operand of the next
//! product; so the chain of products never touches shared memory:
//! ```text
//! R^T  = v^T A'^T - S^T w^T                 (4 + 8 products of 64 x 64 x 16)
//! o^T  = S^T qg^T + R^T Aqk^T               (8 + 4)
//! S^T <- S^T diag(decay) + R^T kg           (4 of 64 x 128 x 16)
//! ```
//! The output of a chunk is rounded and stored while the first products of the next one run.

use cuda_std::{ptx, thread, warp};

use super::{
    CHANNELS, CHUNK, IMAGE, PANEL, RECORD, RECORD_A, RECORD_AQK, RECORD_KG, RECORD_QG, RECORD_W, by_columns, by_rows,
    column_step, repeat, row_step, scan_stage_bytes, scan_stages, wait,
};
use crate::comm::{Port, STEP_SCAN};
use crate::element::DtypeCode;
use crate::params::{Chunk, NONE, ScanItem, ScanParams, Segment, StampKind, StepMode};
use crate::scan::{Columns, hand_over, initial_state};
use crate::tile::{RESERVED_BYTES, Shared, Warpgroup, tile_bytes};

/// Columns of the state of one warpgroup.
const COLUMNS: u32 = 64;
/// Threads of a warpgroup.
const THREADS: u32 = 128;
/// Threads that carry v and outputs: all of the feeding warpgroup but its first warp.
const CARRIERS: u32 = 96;

/// Shared addresses of the pipeline.
#[derive(Clone, Copy)]
struct Pipeline<const N: usize> {
    /// Stages, each [`scan_stage_bytes`].
    base: u32,
    /// Decay rows of the stages.
    decay: u32,
    /// Barriers: eight of each stage.
    barriers: u32,
}

/// w, A' and v have arrived.
const FULL_FIRST: u32 = 0;
/// qg and Aqk have arrived.
const FULL_OUTPUT: u32 = 8;
/// kg and decay have arrived.
const FULL_UPDATE: u32 = 16;
/// w and A' are not needed any more.
const EMPTY_FIRST: u32 = 24;
/// qg and Aqk are not needed any more.
const EMPTY_OUTPUT: u32 = 32;
/// kg and decay are not needed any more.
const EMPTY_UPDATE: u32 = 40;
/// The outputs lie in the place of v.
const DONE: u32 = 48;

/// A chunk's place in the pipeline.
#[derive(Clone, Copy)]
struct Place {
    stage: u32,
    barriers: u32,
    decay: u32,
    parity: u32,
}

impl<const N: usize> Pipeline<N> {
    #[inline(always)]
    fn new(base: u32) -> Self {
        let stages = scan_stages(N);
        let decay = base + stages * scan_stage_bytes(N);
        Self { base, decay, barriers: decay + stages * CHANNELS as u32 * 4 }
    }

    /// Makes the barriers; by one thread.
    ///
    /// # Safety
    /// The pipeline's memory is the block's and nobody uses it yet.
    #[inline(always)]
    unsafe fn init(&self) {
        let walkers = 4 * N as u32;
        let mut stage = 0;
        while stage < scan_stages(N) {
            let at = self.barriers + 64 * stage;
            // SAFETY: by contract.
            unsafe {
                ptx::mbarrier_init(at + FULL_FIRST, 1 + CARRIERS / 32);
                ptx::mbarrier_init(at + FULL_OUTPUT, 1);
                ptx::mbarrier_init(at + FULL_UPDATE, 1);
                ptx::mbarrier_init(at + EMPTY_FIRST, walkers);
                ptx::mbarrier_init(at + EMPTY_OUTPUT, walkers);
                ptx::mbarrier_init(at + EMPTY_UPDATE, walkers);
                ptx::mbarrier_init(at + DONE, walkers);
            }
            stage += 1;
        }
        // SAFETY: orders this thread's writes.
        unsafe { ptx::fence_mbarrier_init() };
    }

    /// Chunk number `number`, counted over all items of the block.
    #[inline(always)]
    fn place(&self, number: u32) -> Place {
        let (stage, turn) = (number % scan_stages(N), number / scan_stages(N));
        Place {
            stage: self.base + stage * scan_stage_bytes(N),
            barriers: self.barriers + 64 * stage,
            decay: self.decay + stage * CHANNELS as u32 * 4,
            parity: turn & 1,
        }
    }
}

/// Persistent grid: blocks take items by ticket until there are no more. Blocks of `N + 1` warpgroups.
#[inline(always)]
pub fn scan_push<const N: usize>(wg: &mut Warpgroup<'_>, p: &ScanParams) {
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
        // From lane 0, so that the assembler knows it to be uniform.
        // SAFETY: by all threads.
        let chunks = unsafe { warp::shuffle_idx(segment.chunks, 0) };
        // With two walking warpgroups a thread has 168 registers: these take some of the feeding one's for as long as they
        // walk. 256 x 224 + 128 x 56 = 384 x 168.
        // SAFETY: by whole warpgroups; the entry states threads and registers.
        unsafe {
            if wg.index() == N {
                if N > 1 {
                    ptx::setmaxnreg_dec::<56>();
                }
                wg.sync_block();
                feed(wg, p, &pipeline, &item, &segment, number);
                wg.sync_block();
                if N > 1 {
                    ptx::setmaxnreg_inc::<168>();
                }
            } else {
                if N > 1 {
                    ptx::setmaxnreg_inc::<224>();
                }
                let mut s = [0f32; 64];
                wg.load_fragment(&mut s, state);
                // The state's tile lies where the stages are: read by ordinary loads, written next by bulk copies.
                ptx::fence_proxy_async_shared();
                wg.sync_block();
                let columns = Columns::of_block(p, item.first_block + wg.index() as u32);
                let corrected =
                    columns.is_state && segment.receive_lane != NONE && p.channel.mode != StepMode::Exact as u32;
                if warp::all(corrected) {
                    walk::<N, true>(wg, p, &pipeline, &item, &segment, columns, &mut s, number, chunks);
                } else {
                    walk::<N, false>(wg, p, &pipeline, &item, &segment, columns, &mut s, number, chunks);
                }
                wg.sync_block();
                wg.store_fragment(state, &s);
                if N > 1 {
                    ptx::setmaxnreg_dec::<168>();
                }
            }
        }
        number += segment.chunks;
        let end = wg.clock();
        wg.stamp_block(&p.trace, StampKind::Scan, [start, end], [item.head, item.first_block], 0);
        if let Some(columns) = columns {
            wg.sync();
            healthy = hand_over(wg, p, &port, &item, &segment, columns, state);
        }
        // SAFETY: as above.
        unsafe { ptx::fence_proxy_async_shared() };
    }
}

/// The chunks of an item, on a walking warpgroup. `CORRECTED`: outputs are corrected later and go to f32 scratch.
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
    first_number: u32,
    chunks: u32,
) {
    let outputs = Outputs::<CORRECTED> { wg, p, item, tokens: Tokens::of(wg, p, segment), columns };
    let lane = ptx::laneid();
    let own_v = RECORD + wg.index() as u32 * PANEL;
    let (mut r, mut o) = ([0f32; 32], [0f32; 32]);
    let (mut s_half, mut r_half) = ([0u32; 32], [0u32; 16]);
    repeat!(I in 32 => { s_half[I] = ptx::cvt_rn_bf16x2_f32(s[2 * I + 1], s[2 * I]); });
    let mut index = 0;
    while index < chunks {
        let at = pipeline.place(first_number + index);
        // SAFETY: barriers and stages are the block's; control flow is uniform in the warpgroup; every product's
        // registers are carried by the waits that follow.
        unsafe {
            let (v, a, w) =
                (by_columns(at.stage + own_v, PANEL), by_rows(at.stage + RECORD_A), by_rows(at.stage + RECORD_W));
            wait(at.barriers + FULL_FIRST, at.parity);
            ptx::wgmma_fence();
            repeat!(J in 4 => {
                ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 1, 0>(&mut r, v + column_step(J), a + row_step(J, PANEL), (J != 0) as u32);
            });
            repeat!(J in 8 => {
                let s_step = [s_half[4 * J], s_half[4 * J + 1], s_half[4 * J + 2], s_half[4 * J + 3]];
                ptx::wgmma_m64n64k16_bf16_rs::<1, -1, 0>(&mut r, s_step, w + row_step(J, PANEL), 1);
            });
            ptx::wgmma_commit_group();
            wait(at.barriers + FULL_OUTPUT, at.parity);
            let (qg, aqk) = (by_rows(at.stage + RECORD_QG), by_rows(at.stage + RECORD_AQK));
            ptx::wgmma_fence();
            repeat!(J in 8 => {
                let s_step = [s_half[4 * J], s_half[4 * J + 1], s_half[4 * J + 2], s_half[4 * J + 3]];
                ptx::wgmma_m64n64k16_bf16_rs::<1, 1, 0>(&mut o, s_step, qg + row_step(J, PANEL), (J != 0) as u32);
            });
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group::<1>((&mut r, &mut s_half, &mut o));
            release(lane, at.barriers + EMPTY_FIRST);
            repeat!(I in 16 => { r_half[I] = ptx::cvt_rn_bf16x2_f32(r[2 * I + 1], r[2 * I]); });
            wait(at.barriers + FULL_UPDATE, at.parity);
            // Not earlier: writing an accumulator while products are under way would serialise them.
            let column = 2 * (lane % 4);
            repeat!(J in 16 => {
                let [d0, d1] = ptx::ld_shared_v2_f32(at.decay + (8 * J as u32 + column) * 4);
                s[4 * J] *= d0;
                s[4 * J + 1] *= d1;
                s[4 * J + 2] *= d0;
                s[4 * J + 3] *= d1;
            });
            let kg = by_columns(at.stage + RECORD_KG, PANEL);
            ptx::wgmma_fence();
            repeat!(J in 4 => {
                let r_step = [r_half[4 * J], r_half[4 * J + 1], r_half[4 * J + 2], r_half[4 * J + 3]];
                ptx::wgmma_m64n128k16_bf16_rs::<1, 1, 1>(s, r_step, kg + column_step(J), 1);
            });
            ptx::wgmma_commit_group();
            repeat!(J in 4 => {
                let r_step = [r_half[4 * J], r_half[4 * J + 1], r_half[4 * J + 2], r_half[4 * J + 3]];
                ptx::wgmma_m64n64k16_bf16_rs::<1, 1, 0>(&mut o, r_step, aqk + row_step(J, PANEL), 1);
            });
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group::<1>((&mut *s, &mut o, &mut s_half, &mut r_half));
            release(lane, at.barriers + EMPTY_UPDATE);
            repeat!(I in 32 => { s_half[I] = ptx::cvt_rn_bf16x2_f32(s[2 * I + 1], s[2 * I]); });
            ptx::wgmma_wait_group::<0>((&mut o, &mut r_half));
            release(lane, at.barriers + EMPTY_OUTPUT);
            outputs.put(&o, at, index);
        }
        index += 1;
    }
}

/// Lets go of what `barrier` guards, for this warp.
///
/// # Safety
/// By all lanes, after their last access.
#[inline(always)]
unsafe fn release(lane: u32, barrier: u32) {
    // SAFETY: by contract.
    unsafe { ptx::mbarrier_arrive_if(barrier, (lane == 0) as u32) };
}

/// Where a walking warpgroup's outputs go.
struct Outputs<'w, 'a, const CORRECTED: bool> {
    wg: &'w Warpgroup<'a>,
    p: &'w ScanParams,
    item: &'w ScanItem,
    tokens: Tokens,
    columns: Columns,
}

impl<const CORRECTED: bool> Outputs<'_, '_, CORRECTED> {
    /// Stores o^T of chunk `index`: rounded into the place of v, or into scratch.
    ///
    /// # Safety
    /// By all threads of the warpgroup; the products that made `o` are done, those that read v too.
    #[inline(always)]
    unsafe fn put(&self, o: &[f32; 32], at: Place, index: u32) {
        let lane = ptx::laneid();
        let warp = (thread::thread_idx_x() % THREADS) / 32;
        if CORRECTED {
            let p = self.p;
            let (token, len) = self.tokens.chunk(index);
            let row = p.tables.sizes.hv as usize * CHANNELS;
            let channel = self.columns.first + (16 * warp + lane / 4) as usize;
            let base = p.o_local.addr as *mut f32;
            let base = base.wrapping_add(token * row + self.item.head as usize * CHANNELS + channel);
            let first = 2 * (lane % 4);
            repeat!(J in 8 => {
                let t = first + 8 * J as u32;
                // SAFETY: rows of this chunk, columns of this warpgroup.
                unsafe {
                    let (even, odd) = ((t < len) as u32, (t + 1 < len) as u32);
                    let (to, next) = (base.wrapping_add(t as usize * row), base.wrapping_add((t as usize + 1) * row));
                    ptx::st_global_f32_if(to, o[4 * J], even);
                    ptx::st_global_f32_if(next, o[4 * J + 1], odd);
                    ptx::st_global_f32_if(to.wrapping_add(8), o[4 * J + 2], even);
                    ptx::st_global_f32_if(next.wrapping_add(8), o[4 * J + 3], odd);
                }
            });
        } else {
            // 8 x 8 matrices, transposed by the store: rows are tokens, 16 bytes are 8 channels.
            let tile = at.stage + RECORD + self.wg.index() as u32 * PANEL;
            let (matrix, row) = (lane / 8, lane % 8);
            repeat!(J in 4 => {
                // Matrices 0 and 1: channels 16 warp .. + 8 and + 8 .. + 16 of tokens 16 J ..; 2 and 3: of tokens 16 J + 8 ..
                let t = 16 * J as u32 + 8 * (matrix / 2) + row;
                let piece = 2 * warp + matrix % 2;
                let address = tile + t * 128 + ((piece ^ (t % 8)) << 4);
                // SAFETY: inside the tile.
                unsafe {
                    ptx::stmatrix_x4_trans(
                        address,
                        ptx::cvt_rn_bf16x2_f32(o[8 * J + 1], o[8 * J]),
                        ptx::cvt_rn_bf16x2_f32(o[8 * J + 3], o[8 * J + 2]),
                        ptx::cvt_rn_bf16x2_f32(o[8 * J + 5], o[8 * J + 4]),
                        ptx::cvt_rn_bf16x2_f32(o[8 * J + 7], o[8 * J + 6]),
                    );
                }
            });
        }
        // SAFETY: the stores of this warp's lanes are done and ordered by the warp's barrier.
        unsafe {
            warp::sync();
            release(lane, at.barriers + DONE);
        }
    }
}

/// The feeding warpgroup: one thread brings records, three warps bring v and take outputs away.
#[inline(always)]
fn feed<const N: usize>(
    wg: &Warpgroup<'_>,
    p: &ScanParams,
    pipeline: &Pipeline<N>,
    item: &ScanItem,
    segment: &Segment,
    first_number: u32,
) {
    let t = thread::thread_idx_x() % THREADS;
    if t == 0 {
        // SAFETY: one thread.
        unsafe { bring_records(p, pipeline, item, segment, first_number) };
    } else if t >= 32 {
        // SAFETY: three whole warps.
        unsafe { carry(wg, p, pipeline, item, segment, first_number, t - 32) };
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
    first_number: u32,
) {
    let hv = p.tables.sizes.hv as usize;
    let mut index = 0;
    while index < segment.chunks {
        let number = first_number + index;
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

/// The tokens of a segment's chunks: they follow each other, and only the last chunk may be short.
#[derive(Clone, Copy)]
struct Tokens {
    first: usize,
    chunks: u32,
    last_len: u32,
}

impl Tokens {
    #[inline(always)]
    fn of(wg: &Warpgroup<'_>, p: &ScanParams, segment: &Segment) -> Self {
        if segment.chunks == 0 {
            return Self { first: 0, chunks: 0, last_len: 0 };
        }
        let first: Chunk = wg.read(p.tables.chunks, segment.first_chunk as usize);
        let last: Chunk = wg.read(p.tables.chunks, (segment.first_chunk + segment.chunks - 1) as usize);
        Self { first: first.token as usize, chunks: segment.chunks, last_len: last.len }
    }

    /// First token and number of tokens of chunk `index`.
    #[inline(always)]
    fn chunk(&self, index: u32) -> (usize, u32) {
        let len = if index + 1 == self.chunks { self.last_len } else { CHUNK as u32 };
        (self.first + index as usize * CHUNK, len)
    }
}

/// Brings v of a chunk as soon as the outputs that lay in its place are taken away, and announces that of an earlier chunk,
/// which has had time to arrive.
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
    first_number: u32,
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
    let corrected = is_state && segment.receive_lane != NONE && p.channel.mode != StepMode::Exact as u32;
    let target = if is_state { &p.o } else { &p.q_tilde };
    let tokens = Tokens::of(wg, p, segment);
    let mut index = 0;
    while index < segment.chunks + stages {
        if index >= ahead && index - ahead < segment.chunks {
            let at = pipeline.place(first_number + index - ahead);
            // SAFETY: this thread's copies, then the warp's, are ordered before the arrival.
            unsafe {
                if ahead == 2 && index <= segment.chunks {
                    ptx::cp_async_wait_group::<1>();
                } else {
                    ptx::cp_async_wait_group::<0>();
                }
                ptx::fence_proxy_async_shared();
                warp::sync();
                release(lane, at.barriers + FULL_FIRST);
            }
        }
        if index >= stages {
            let chunk = index - stages;
            let at = pipeline.place(first_number + chunk);
            // SAFETY: a barrier of the block.
            unsafe { wait(at.barriers + DONE, at.parity) };
            let (token, len) = tokens.chunk(chunk);
            let to = (target.addr as *mut u8).wrapping_add((token * row + head) * 2);
            let pieces = if corrected { 0 } else { 8 * len };
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
        if index < segment.chunks {
            let at = pipeline.place(first_number + index);
            let (token, len) = tokens.chunk(index);
            let from = (p.v.addr as *const u8).wrapping_add((token * row + head) * 2);
            let mut w = 0;
            while w < N as u32 {
                let (tile, from) =
                    (at.stage + RECORD + w * PANEL, from.wrapping_add(w as usize * COLUMNS as usize * 2));
                // The same pieces as above: this thread itself has taken away what it overwrites.
                let mut number = t;
                while number < 8 * CHUNK as u32 {
                    let (r, piece) = (number / 8, number % 8);
                    // Zeros beyond the chunk, and for columns of M.
                    let valid = is_state && r < len;
                    let source = from.wrapping_add(if valid { r as usize * row * 2 } else { 0 } + piece as usize * 16);
                    // SAFETY: a row of this chunk, or nothing.
                    unsafe {
                        let to = tile + r * 128 + ((piece ^ (r % 8)) << 4);
                        ptx::cp_async_cg_16_zfill(to, source, if valid { 16 } else { 0 });
                    }
                    number += CARRIERS;
                }
                w += 1;
            }
            // SAFETY: of this thread's copies.
            unsafe { ptx::cp_async_commit_group() };
        }
        index += 1;
    }
}
