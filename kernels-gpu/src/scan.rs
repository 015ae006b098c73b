//! `scan_push`: walks a segment's chunks in order, and sends what later PEs need as soon as a head is done.
//!
//! Everything is transposed (V-first), so that a column block of the state is a contiguous block of rows:
//! ```text
//! R^T  = v^T A'^T - S^T w^T                R = v_new
//! o^T  = S^T qg^T + R^T Aqk^T
//! S^T <- S^T diag(decay) + R^T kg
//! ```
//! The transition M and q-tilde come from the same walk over K more columns: v = 0 and S = I at the start give
//! o = q-tilde and S = M at the end. So a work item is a few column blocks of [S | M] of one head, and each
//! warpgroup of a block walks one of them over operands that the block shares.
//!
//! M stops where it is known to be too small to matter, and outputs that it would correct are complete from there on: see
//! [`crate::cut`].
//!
//! Producers wait for nothing but a free slot, except in exact mode, where the state before the segment
//! arrives first and there is no M.

use crate::comm::{Port, STEP_SCAN, Targets};
use crate::cut::{self, Known};
use crate::element::DtypeCode;
use crate::params::{Chunk, Cut, Matrix, NONE, ScanItem, ScanParams, Segment, Sizes, StampKind, StepMode, Tensor};
use crate::protocol::ChannelLayout;
use crate::tile::{
    Acc, BLOCK_COLUMNS, OperandElement, RESERVED_BYTES, Shared, Warpgroup, Within, share_of, tile_bytes,
};

/// Most warpgroups in a block of the scan; fewer where shared memory does not suffice.
pub const WARPGROUPS: usize = 2;

/// Bytes of shared memory of a block with `warpgroups` warpgroups, operands of `element` bytes.
pub const fn shared_bytes(k: usize, chunk: usize, element: usize, warpgroups: usize) -> usize {
    let operands = tile_bytes(chunk, k, element) + tile_bytes(chunk, chunk, element) + tile_bytes(1, k, 4);
    let rounded_state = if element == 4 { 0 } else { tile_bytes(BLOCK_COLUMNS, k, element) };
    let v_and_r = tile_bytes(chunk, BLOCK_COLUMNS, element) + tile_bytes(BLOCK_COLUMNS, chunk, element);
    let own = tile_bytes(BLOCK_COLUMNS, k, 4) + rounded_state + v_and_r;
    RESERVED_BYTES + operands + warpgroups * own
}

/// Tiles of the block (operands) and of each warpgroup (its columns of the state).
struct Tiles<E> {
    /// w, then qg, then kg, `[C,K]`.
    operand: Shared<E>,
    /// A', then Aqk, `[C,C]`.
    square: Shared<E>,
    /// exp(G_last), `[1,K]`.
    decay: Shared<f32>,
    /// S^T, `[64,K]`.
    state: Shared<f32>,
    /// S^T as an operand.
    state_operand: Shared<E>,
    /// v, `[C,64]`.
    v: Shared<E>,
    /// R^T as an operand, `[64,C]`.
    r: Shared<E>,
}

/// One warpgroup's column block.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    /// Number of the block over S blocks, then M blocks.
    pub(crate) block: u32,
    /// Whether it is of S (else of M).
    pub(crate) is_state: bool,
    /// First column within S or M.
    pub(crate) first: usize,
    /// Columns.
    pub(crate) count: usize,
}

/// Persistent grid: blocks take items by ticket until there are no more.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scan_push<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &ScanParams) {
    let (c, k) = (p.tables.sizes.chunk as usize, p.tables.sizes.k as usize);
    let state = wg.private(BLOCK_COLUMNS, k);
    let tiles = Tiles::<E> {
        operand: wg.shared(c, k),
        square: wg.shared(c, c),
        decay: wg.shared(1, k),
        state,
        state_operand: wg.private_operand(state),
        v: wg.private(c, BLOCK_COLUMNS),
        r: wg.private(BLOCK_COLUMNS, c),
    };
    wg.expect_shared(shared_bytes(k, c, E::CODE.size(), wg.count()));
    let m_dtype = DtypeCode::from_code(p.m_dtype);
    let port = Port { channel: &p.channel, trace: &p.trace, step: STEP_SCAN, m_dtype };
    let mut healthy = true;
    loop {
        let ticket = wg.next_ticket(p.ticket);
        // A wait that expired anywhere on this PE ends the step: its outputs are void.
        let go_on = healthy && !port.trapped(wg);
        if ticket >= p.items.len || !wg.sync_and(go_on) {
            return;
        }
        let start = wg.clock();
        let item: ScanItem = wg.read(p.items, ticket as usize);
        let segment: Segment = wg.read(p.tables.segments, item.segment as usize);
        let columns = Columns::of(wg, p, &item);
        let ready = match columns {
            Some(columns) => initial_state(wg, p, &port, &item, &segment, columns, tiles.state),
            None => true,
        };
        if !wg.sync_and(ready) {
            return;
        }
        if let Some(columns) = columns {
            wg.to_operand(columns.rows(tiles.state_operand), columns.rows(tiles.state));
        }
        let known = known(wg, p, &item, &segment);
        let only_m = !p.channel.layout.is_state(item.first_block);
        // This warpgroup's columns, and what becomes of them.
        let (mut walking, mut cut) = (columns, Cut::default());
        let mut index = 0;
        while index < segment.chunks {
            if let Some(columns) = walking
                && index == known.rows
            {
                cut = columns.cut(segment.chunks - index, known.bound);
                walking = walking.filter(|columns| columns.is_state);
            }
            // A block whose warpgroups all have columns of M ends when none of them is needed any more.
            if only_m && known.is_asked() && wg.sync_and(walking.is_none()) {
                break;
            }
            step(wg, p, &item, &segment, walking, &tiles, index, index < known.rows);
            index += 1;
            if let Some(columns) = walking
                && !columns.is_state
                && known.is_asked()
            {
                let squares = wg.sum_of_squares(columns.rows(tiles.state));
                let bound = cut::columns_bound(squares, p.channel.layout.m_blocks(), known.growth);
                if bound <= p.tolerance {
                    cut = columns.cut(segment.chunks - index, bound);
                    walking = None;
                }
            }
        }
        if let Some(columns) = walking
            && known.rows == segment.chunks
        {
            cut = columns.cut(0, known.bound);
        }
        let end = wg.clock();
        wg.stamp_block(&p.trace, StampKind::Scan, [start, end], [item.head, item.first_block], 0);
        if let Some(columns) = columns {
            wg.sync();
            healthy = hand_over(wg, p, &port, &item, &segment, columns, tiles.state, cut);
        }
    }
}

/// What is known of the transition of the item's segment; nothing, where nobody asks.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn known(wg: &mut Warpgroup<'_>, p: &ScanParams, item: &ScanItem, segment: &Segment) -> Known {
    if p.tolerance > 0.0 && segment.chunks > 0 && p.records.factors.is_present() && p.corrects(segment) {
        let factors = p.records.factors(segment.first_chunk as usize, segment.chunks as usize, item.head as usize);
        let Within { rows, bound, growth } = wg.first_within(factors, p.tolerance, cut::LEAST);
        Known { rows, growth, bound }
    } else {
        Known::NOTHING
    }
}

impl Columns {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) fn of(wg: &Warpgroup<'_>, p: &ScanParams, item: &ScanItem) -> Option<Self> {
        ((wg.index() as u32) < item.blocks).then(|| Self::of_block(p, item.first_block + wg.index() as u32))
    }

    /// The columns of block `block`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) fn of_block(p: &ScanParams, block: u32) -> Self {
        let layout = &p.channel.layout;
        let (first, count) = layout.columns(block);
        Self { block, is_state: layout.is_state(block), first: first as usize, count: count as usize }
    }

    /// What becomes of them if the last `dropped` chunks are cut off.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) fn cut(&self, dropped: u32, bound: f32) -> Cut {
        Cut { dropped, empty: u32::from(!self.is_state), bound, pad: 0 }
    }

    /// These rows of `tile`, which is `[64, ..]`.
    fn rows<T: OperandElement>(&self, tile: Shared<T>) -> Shared<T> {
        tile.row_range(0, self.count)
    }
}

/// S^T before the first chunk: 0, the initial state, the identity (for M), or, in exact mode, what arrives.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn initial_state(
    wg: &mut Warpgroup<'_>,
    p: &ScanParams,
    port: &Port<'_>,
    item: &ScanItem,
    segment: &Segment,
    columns: Columns,
    state: Shared<f32>,
) -> bool {
    let state = columns.rows(state);
    if !columns.is_state {
        wg.fill(state, |r, c| if columns.first + r == c { 1.0 } else { 0.0 });
    } else if segment.receive_lane != NONE && p.channel.mode == StepMode::Exact as u32 {
        // The chain: only the nearest PE before this one sends, and its state is complete.
        let row = segment.receive_lane * p.tables.sizes.hv + item.head;
        let source: u32 = wg.read(p.tables.sources, (segment.first_source + segment.sources - 1) as usize);
        if !port.receive(wg, source, row, columns.block) {
            return false;
        }
        wg.load(state, port.received(wg, source, row, columns.block));
        wg.sync();
        if p.state_in.is_present() {
            let (k, v) = (p.tables.sizes.k as usize, p.tables.sizes.v as usize);
            wg.store(p.state_in.matrix((row as usize * v + columns.first) * k, columns.count, k, k, 1), state);
        }
        port.finish_reading(wg, row, p.tables.sources, segment.first_source + segment.sources - 1, 1);
    } else if segment.initial != NONE && p.initial.is_present() {
        wg.load(state, caller_state(p, &p.initial, segment.initial, item.head, columns));
    } else {
        wg.fill(state, |_, _| 0.0);
    }
    true
}

/// Columns of a state in the caller's memory, as rows `[columns, K]`.
fn caller_state(p: &ScanParams, states: &Tensor, row: u32, head: u32, columns: Columns) -> Matrix {
    state_columns(&p.tables.sizes, p.v_first != 0, states, row, head, columns.first, columns.count)
}

/// Columns `first ..` of state `row` of head `head` in the caller's memory, as rows `[count, K]`.
pub(crate) fn state_columns(
    sizes: &Sizes,
    v_first: bool,
    states: &Tensor,
    row: u32,
    head: u32,
    first: usize,
    count: usize,
) -> Matrix {
    let (k, v) = (sizes.k as usize, sizes.v as usize);
    let base = (row as usize * sizes.hv as usize + head as usize) * k * v;
    if v_first { states.matrix(base + first * k, count, k, k, 1) } else { states.matrix(base + first, count, k, 1, v) }
}

/// One chunk. The block's barriers are around the loads of the shared operands; all warpgroups take part in
/// them, also those without columns in this item. `matters`: whether M may matter here, so that outputs are corrected.
#[allow(clippy::too_many_arguments)]
fn step<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &ScanParams,
    item: &ScanItem,
    segment: &Segment,
    columns: Option<Columns>,
    t: &Tiles<E>,
    index: u32,
    matters: bool,
) {
    let (chunk_index, head) = ((segment.first_chunk + index) as usize, item.head as usize);
    let chunk: Chunk = wg.read(p.tables.chunks, chunk_index);
    let (c, k, v) = (t.operand.rows(), t.operand.cols(), p.tables.sizes.v as usize);
    let row = p.tables.sizes.hv as usize;
    let token_head = chunk.token as usize * row + head;

    // R^T = v^T A'^T - S^T w^T
    if let Some(columns) = columns.filter(|columns| columns.is_state) {
        let source = p.v.matrix(token_head * v + columns.first, chunk.len as usize, columns.count, row * v, 1);
        wg.load(t.v.columns(0, columns.count), source);
    }
    load_operands(wg, t, p.records.w(chunk_index, head), Some(p.records.a(chunk_index, head)));
    if let Some(columns) = columns {
        let mut r = Acc::zeros(columns.count, c);
        if columns.is_state {
            r.mma(wg, t.v.columns(0, columns.count).t(), t.square.t());
        }
        r.mma_sub(wg, columns.rows(t.state_operand), t.operand.t());
        r.store(wg, columns.rows(t.r));
    }

    // o^T = S^T qg^T + R^T Aqk^T
    load_operands(wg, t, p.records.qg(chunk_index, head), Some(p.records.aqk(chunk_index, head)));
    if let Some(columns) = columns {
        let mut o = Acc::zeros(columns.count, c);
        o.mma(wg, columns.rows(t.state_operand), t.operand.t());
        o.mma(wg, columns.rows(t.r), t.square.t());
        let (target, width) = if !columns.is_state {
            (&p.q_tilde, k)
        } else if matters && p.corrects(segment) {
            (&p.o_local, v)
        } else {
            (&p.o, v)
        };
        let start = token_head * width + columns.first;
        o.store_global(wg, target.matrix(start, columns.count, chunk.len as usize, 1, row * width));
    }

    // S^T <- S^T diag(decay) + R^T kg, in slabs of K
    load_operands(wg, t, p.records.kg(chunk_index, head), None);
    if wg.index() == 0 {
        wg.load(t.decay, p.records.decay(chunk_index, head));
    }
    wg.sync_block();
    if let Some(columns) = columns {
        let mut channel = 0;
        while channel < k {
            let width = (k - channel).min(BLOCK_COLUMNS);
            let state = columns.rows(t.state).columns(channel, width);
            let mut s = Acc::load(wg, state);
            s.scale_columns(wg, t.decay.columns(channel, width));
            s.mma(wg, columns.rows(t.r), t.operand.columns(channel, width));
            wg.sync();
            s.store(wg, state);
            if !E::WIDE {
                s.store(wg, columns.rows(t.state_operand).columns(channel, width));
            }
            channel += width;
        }
    }
}

/// Loads the block's operands, each warpgroup its share of the rows, between two barriers.
fn load_operands<E: OperandElement>(wg: &mut Warpgroup<'_>, t: &Tiles<E>, operand: Matrix, square: Option<Matrix>) {
    wg.sync_block();
    let (first, rows) = share_of(t.operand.rows(), wg.count(), wg.index());
    if rows > 0 {
        wg.load(t.operand.row_range(first, rows), operand.row_range(first, rows));
        if let Some(square) = square {
            wg.load(t.square.row_range(first, rows), square.row_range(first, rows));
        }
    }
    wg.sync_block();
}

/// After the last chunk: the final state, or this PE's summary to those who need it; of M that it is empty, where `cut` says
/// so. False if a slot did not become free in time.
#[allow(clippy::too_many_arguments)]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn hand_over(
    wg: &mut Warpgroup<'_>,
    p: &ScanParams,
    port: &Port<'_>,
    item: &ScanItem,
    segment: &Segment,
    columns: Columns,
    state: Shared<f32>,
    cut: Cut,
) -> bool {
    let state = columns.rows(state);
    let mode = p.channel.mode;
    let row = segment.receive_lane.wrapping_mul(p.tables.sizes.hv).wrapping_add(item.head);
    let empty = !columns.is_state && cut.empty != 0;
    if p.corrects(segment) {
        // Also that nothing is left out: the table still has the notes of an earlier step.
        let index = row as usize * p.channel.layout.blocks() as usize + columns.block as usize;
        cut::note(wg, p.cuts, index, cut);
    }
    let (hv, head) = (p.tables.sizes.hv, item.head);
    if segment.own_lane != NONE {
        // The state after it is S + M S_in: the correction needs this PE's own summary.
        if !empty {
            wg.store(own_columns(&p.channel.layout, &p.own, segment.own_lane * hv + head, columns.block), state);
        }
    } else if !empty && segment.final_row != NONE && p.finals.is_present() && !p.corrects(segment) {
        wg.store(caller_state(p, &p.finals, segment.final_row, item.head, columns), state);
    }
    if !columns.is_state && !empty && p.transitions.is_present() {
        let (k, row) = (state.cols(), row as usize);
        wg.store(p.transitions.matrix((row * k + columns.first) * k, columns.count, k, k, 1), state);
    }
    let all = Targets { table: p.tables.targets, first: segment.first_target, count: segment.targets, hv, head };
    let send_row = segment.send_lane.wrapping_mul(hv).wrapping_add(head);
    if segment.targets == 0 {
        true
    } else if empty {
        port.push_empty(wg, all, columns.block)
    } else if mode == StepMode::Bulk as u32 {
        port.stage(wg, all, send_row, columns.block, state)
    } else if mode == StepMode::Exact as u32 {
        // The chain: only the nearest PE after this one needs the state.
        port.push(wg, Targets { count: 1, ..all }, send_row, columns.block, state)
    } else {
        port.push(wg, all, send_row, columns.block, state)
    }
}

/// This PE's own summary of one row in `own`: columns `[columns, K]` of S (then of M), f32.
pub(crate) fn own_columns(layout: &ChannelLayout, own: &Tensor, row: u32, block: u32) -> Matrix {
    let (first, count) = layout.columns(block);
    let column = if layout.is_state(block) { first } else { layout.v + first };
    let k = layout.k as usize;
    own.matrix(row as usize * own_len(layout) + column as usize * k, count as usize, k, k, 1)
}

/// Elements of a PE's own summary of one row: S^T `[V,K]`, then M^T `[K,K]`, f32.
pub const fn own_len(layout: &ChannelLayout) -> usize {
    (layout.v as usize + layout.k as usize) * layout.k as usize
}
