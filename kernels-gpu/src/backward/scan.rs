//! `scan_back`: walks a segment's chunks from the last to the first with the gradient D of the state, and sends what earlier
//! PEs need as soon as a head is done.
//!
//! Transposed (V-first) like the forward scan, so that a column block of D is a contiguous block of rows. D is the
//! gradient of the state after the chunk, then that of the state before it:
//! ```text
//! dR^T = do^T Aqk + D^T kg^T                      dR = gradient of v_new
//! D^T <- D^T diag(decay) + do^T qg - dR^T w       qg and Aqk have the scale of q in them
//! ```
//! A transition needs no walk of its own: that of the gradients is M^T, so the M that the forward pass has kept is sent.
//!
//! Items wait for nothing but a free slot, except in exact mode, where the gradient of the state after the segment arrives
//! first. [`BackPass`] says what each does.

use super::states::{Columns, load_operands, transposed};
use crate::comm::{Port, STEP_SCAN_BACK, Targets};
use crate::cut;
use crate::element::DtypeCode;
use crate::params::{BackItem, BackPass, Chunk, NONE, ScanBackParams, Segment, StampKind, StepMode};
use crate::scan::{own_columns, state_columns};
use crate::tile::{Acc, BLOCK_COLUMNS, OperandElement, Shared, Warpgroup};

/// Most warpgroups in a block; fewer where shared memory does not suffice.
pub const WARPGROUPS: usize = 2;

/// Bytes of shared memory of a block with `warpgroups` warpgroups, operands of `element` bytes.
pub const fn shared_bytes(k: usize, chunk: usize, element: usize, warpgroups: usize) -> usize {
    // The same tiles, with do in the place of v and dR in that of R.
    super::states::shared_bytes(k, chunk, element, warpgroups)
}

/// Tiles of the block (operands) and of each warpgroup (its columns of D).
struct Tiles<E> {
    /// kg, then qg, then w, `[C,K]`.
    operand: Shared<E>,
    /// Aqk, `[C,C]`.
    square: Shared<E>,
    /// exp(G_last), `[1,K]`.
    decay: Shared<f32>,
    /// D^T, `[64,K]`.
    state: Shared<f32>,
    /// D^T as an operand.
    state_operand: Shared<E>,
    /// do, `[C,64]`.
    d_o: Shared<E>,
    /// dR^T as an operand, `[64,C]`.
    dr: Shared<E>,
}

/// What an item's warpgroups have in common.
pub(crate) struct Place {
    pub item: BackItem,
    pub segment: Segment,
    /// Whether it stores what `grad` needs.
    pub stores: bool,
}

/// Persistent grid: blocks take items by ticket until there are no more.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scan_back<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &ScanBackParams) {
    let (c, k) = (p.tables.sizes.chunk as usize, p.tables.sizes.k as usize);
    let state = wg.private(BLOCK_COLUMNS, k);
    let tiles = Tiles::<E> {
        operand: wg.shared(c, k),
        square: wg.shared(c, c),
        decay: wg.shared(1, k),
        state,
        state_operand: wg.private_operand(state),
        d_o: wg.private(c, BLOCK_COLUMNS),
        dr: wg.private(BLOCK_COLUMNS, c),
    };
    wg.expect_shared(shared_bytes(k, c, E::CODE.size(), wg.count()));
    let m_dtype = DtypeCode::from_code(p.m_dtype);
    let port = Port { channel: &p.channel, trace: &p.trace, step: STEP_SCAN_BACK, m_dtype };
    let mut healthy = true;
    loop {
        let ticket = wg.next_ticket(p.ticket);
        // A wait that expired anywhere on this PE ends the step: its outputs are void.
        let go_on = healthy && !port.trapped(wg);
        if ticket >= p.items.len || !wg.sync_and(go_on) {
            return;
        }
        let start = wg.clock();
        let item: BackItem = wg.read(p.items, ticket as usize);
        let segment: Segment = wg.read(p.tables.segments, item.segment as usize);
        let at = Place { item, segment, stores: item.pass == BackPass::Whole as u32 };
        let block = item.first_block + wg.index() as u32;
        let has_columns = (wg.index() as u32) < item.blocks;
        if item.pass == BackPass::Transition as u32 {
            if has_columns {
                healthy = send_transition(wg, p, &port, &at, block, tiles.state);
            }
            continue;
        }
        let columns = has_columns.then(|| Columns::of_block(&p.tables.sizes, block));
        let ready = match columns {
            Some(columns) => first_gradient(wg, p, &port, &at, block, columns, columns.rows(tiles.state)),
            None => true,
        };
        if !wg.sync_and(ready) {
            return;
        }
        if let Some(columns) = columns {
            wg.to_operand(columns.rows(tiles.state_operand), columns.rows(tiles.state));
        }
        for index in 0..segment.chunks {
            step(wg, p, (segment.first_chunk + segment.chunks - 1 - index) as usize, &at, columns, &tiles);
        }
        let end = wg.clock();
        wg.stamp_block(&p.trace, StampKind::ScanBack, [start, end], [item.head, item.first_block], 0);
        if let Some(columns) = columns {
            wg.sync();
            healthy = hand_over(wg, p, &port, &at, block, columns, columns.rows(tiles.state));
        }
    }
}

/// This PE's M, a block of columns, to those who compose it. False if a slot did not become free in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn send_transition(
    wg: &mut Warpgroup<'_>,
    p: &ScanBackParams,
    port: &Port<'_>,
    at: &Place,
    block: u32,
    tile: Shared<f32>,
) -> bool {
    let k = p.tables.sizes.k as usize;
    let (first, count) = p.channel.layout.columns(block);
    let row = (at.segment.send_lane * p.tables.sizes.hv + at.item.head) as usize;
    let empty =
        p.cuts.len > 0 && cut::read(wg, p.cuts, row * p.channel.layout.blocks() as usize + block as usize).empty != 0;
    if empty {
        return port.push_empty(wg, targets(p, at), block);
    }
    let tile = tile.row_range(0, count as usize);
    wg.load(tile, p.transitions.matrix((row * k + first as usize) * k, count as usize, k, k, 1));
    wg.sync();
    send(wg, p, port, at, block, tile)
}

/// D^T after the last chunk: 0, the final state's gradient, what other PEs' gradients were merged into, or, in exact mode,
/// what arrives. False if it did not arrive in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn first_gradient(
    wg: &mut Warpgroup<'_>,
    p: &ScanBackParams,
    port: &Port<'_>,
    at: &Place,
    block: u32,
    columns: Columns,
    state: Shared<f32>,
) -> bool {
    let (sizes, segment) = (&p.tables.sizes, &at.segment);
    let Columns { first, count } = columns;
    let receives = at.stores && segment.receive_lane != NONE;
    if receives && p.channel.mode == StepMode::Exact as u32 {
        // The chain: only the nearest PE after this one sends, and its gradient is complete.
        let row = segment.receive_lane * sizes.hv + at.item.head;
        let nearest = segment.first_source + segment.sources - 1;
        let source: u32 = wg.read(p.tables.sources, nearest as usize);
        if !port.receive(wg, source, row, block) {
            return false;
        }
        wg.load(state, port.received(wg, source, row, block));
        wg.sync();
        port.finish_reading(wg, row, p.tables.sources, nearest, 1);
    } else if receives {
        let row = segment.receive_lane * sizes.hv + at.item.head;
        wg.load(state, columns.state(sizes, &p.state_out, row as usize));
    } else if at.stores && segment.initial != NONE && p.initial.is_present() {
        let source = state_columns(sizes, p.v_first != 0, &p.initial, segment.initial, at.item.head, first, count);
        wg.load(state, source);
    } else {
        wg.fill(state, |_, _| 0.0);
    }
    true
}

/// One chunk. The block's barriers are around the loads of the shared operands; all warpgroups take part in
/// them, also those without columns in this item.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn step<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &ScanBackParams,
    chunk_index: usize,
    at: &Place,
    columns: Option<Columns>,
    t: &Tiles<E>,
) {
    let head = at.item.head as usize;
    let chunk: Chunk = wg.read(p.tables.chunks, chunk_index);
    let (c, k, sizes) = (t.operand.rows(), t.operand.cols(), &p.tables.sizes);
    let records = &p.records;

    // dR^T = do^T Aqk + D^T kg^T
    if let Some(columns) = columns {
        wg.load(t.d_o.columns(0, columns.count), columns.values(sizes, &p.d_o, &chunk, head));
    }
    load_operands(wg, t.operand, t.square, records.kg(chunk_index, head), Some(records.aqk(chunk_index, head)));
    if let Some(columns) = columns {
        let mut dr = Acc::zeros(columns.count, c);
        dr.mma(wg, t.d_o.columns(0, columns.count).t(), t.square);
        dr.mma(wg, columns.rows(t.state_operand), t.operand.t());
        dr.store(wg, columns.rows(t.dr));
        if at.stores {
            let state = columns.state(sizes, &p.d_states, chunk_index * sizes.hv as usize + head);
            wg.store(state, columns.rows(t.state_operand));
            dr.store_global(wg, transposed(columns.values(sizes, &p.d_v_new, &chunk, head)));
        }
    }

    // D^T <- D^T diag(decay) + do^T qg - dR^T w, in slabs of K and one operand after the other
    load_operands(wg, t.operand, t.square, records.qg(chunk_index, head), None);
    if wg.index() == 0 {
        wg.load(t.decay, records.decay(chunk_index, head));
    }
    wg.sync_block();
    if let Some(columns) = columns {
        let d_o = t.d_o.columns(0, columns.count).t();
        each_slab(k, |channel, width| {
            let state = columns.rows(t.state).columns(channel, width);
            let mut d = Acc::load(wg, state);
            d.scale_columns(wg, t.decay.columns(channel, width));
            d.mma(wg, d_o, t.operand.columns(channel, width));
            wg.sync();
            d.store(wg, state);
        });
    }
    load_operands(wg, t.operand, t.square, records.w(chunk_index, head), None);
    if let Some(columns) = columns {
        each_slab(k, |channel, width| {
            let state = columns.rows(t.state).columns(channel, width);
            let mut d = Acc::load(wg, state);
            d.mma_sub(wg, columns.rows(t.dr), t.operand.columns(channel, width));
            wg.sync();
            d.store(wg, state);
            if !E::WIDE {
                d.store(wg, columns.rows(t.state_operand).columns(channel, width));
            }
        });
    }
}

/// Calls `f(channel, width)` for the slabs of K.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn each_slab(k: usize, mut f: impl FnMut(usize, usize)) {
    let mut channel = 0;
    while channel < k {
        let width = (k - channel).min(BLOCK_COLUMNS);
        f(channel, width);
        channel += width;
    }
}

/// After the first chunk: the initial state's gradient to the caller, or the state's gradient to earlier PEs. False if a slot
/// did not become free in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn hand_over(
    wg: &mut Warpgroup<'_>,
    p: &ScanBackParams,
    port: &Port<'_>,
    at: &Place,
    block: u32,
    columns: Columns,
    state: Shared<f32>,
) -> bool {
    let (sizes, segment) = (&p.tables.sizes, &at.segment);
    let Columns { first, count } = columns;
    if at.stores && segment.final_row != NONE && p.finals.is_present() {
        wg.store(state_columns(sizes, p.v_first != 0, &p.finals, segment.final_row, at.item.head, first, count), state);
    }
    // What has other PEs' part in it has already been sent without it, by the external pass.
    let was_sent = at.stores && segment.receive_lane != NONE && p.channel.mode != StepMode::Exact as u32;
    if was_sent {
        true
    } else if segment.own_lane != NONE {
        // A part: the gradients before it are merged on this PE.
        let row = segment.own_lane * sizes.hv + at.item.head;
        wg.store(own_columns(&p.channel.layout, &p.own, row, block), state);
        true
    } else {
        send(wg, p, port, at, block, state)
    }
}

/// Who needs what the item sends.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn targets(p: &ScanBackParams, at: &Place) -> Targets {
    let Segment { first_target: first, targets: count, .. } = at.segment;
    Targets { table: p.tables.targets, first, count, hv: p.tables.sizes.hv, head: at.item.head }
}

/// A block to whoever needs it. False if a slot did not become free in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn send(
    wg: &mut Warpgroup<'_>,
    p: &ScanBackParams,
    port: &Port<'_>,
    at: &Place,
    block: u32,
    tile: Shared<f32>,
) -> bool {
    let (segment, head, hv) = (&at.segment, at.item.head, p.tables.sizes.hv);
    let all = targets(p, at);
    let send_row = segment.send_lane.wrapping_mul(hv).wrapping_add(head);
    if segment.targets == 0 {
        true
    } else if p.channel.mode == StepMode::Bulk as u32 {
        port.stage(wg, all, send_row, block, tile)
    } else if p.channel.mode == StepMode::Exact as u32 {
        // The chain: only the nearest PE before this one needs it.
        port.push(wg, Targets { count: 1, ..all }, send_row, block, tile)
    } else {
        port.push(wg, all, send_row, block, tile)
    }
}
