//! `join_parts`: of segments that one PE walks in parts, what waits for no other PE. The states before the parts where the sequence
//! starts here, and of other segments what PEs after this one need.
//!
//! ```text
//! S_in <- S_part + M_part S_in                     from part to part; S of a sequence's first part is absolute
//! [S | M] <- [S_part | 0] + M_part [S | M]         the pair of the whole segment, if the sequence starts before it
//! ```
//! Both are made of what the walk has left in local memory, so nothing here waits but for free slots. Of a part whose M is missing
//! only S is left, and a segment with one has no M. Where a sequence starts before the segment, [`fix_out`](super::fix_out) makes the
//! states before the parts of what it merges.

use super::{Place, Tiles, compose, each_slab, final_state, keep, to_operand};
use crate::comm::{Port, STEP_JOIN, Targets};
use crate::cut;
use crate::element::DtypeCode;
use crate::params::{Cut, FixItem, FixParams, FixPass, JoinParams, Matrix, NONE, Segment, StampKind, StepMode};
use crate::scan::own_columns;
use crate::tile::{Acc, OperandElement, Shared, Warpgroup, share_of};

/// Persistent grid, of blocks as those of [`fix_out`](super::fix_out): they take items by ticket until there are no more.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn join_parts<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &JoinParams) {
    let p = &p.fix;
    let tiles = Tiles::<E>::new(wg, p);
    let m_dtype = DtypeCode::from_code(p.m_dtype);
    let port = Port { channel: &p.channel, trace: &p.trace, step: STEP_JOIN, m_dtype };
    loop {
        let ticket = wg.next_ticket(p.ticket);
        if ticket >= p.items.len || !wg.sync_and(!port.trapped(wg)) {
            return;
        }
        let item: FixItem = wg.read(p.items, ticket as usize);
        let at = Place::of(wg, p, item);
        let t = tiles.of(&at);
        if !along(wg, p, &port, &at, &t) {
            return;
        }
        if item.pass == FixPass::Merges as u32 && at.segment.final_row != NONE && p.finals.is_present() {
            final_state(wg, p, &at, &t);
        }
    }
}

/// A part of an item's segment.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// Row of the state before it.
    pub(super) row: u32,
    /// Row of its summary.
    own: u32,
    /// Row of its M: in `own` and the notes of the forward step, or, backward, in what that has kept.
    m: u32,
}

/// Part `number` of the item's segment; the segment itself, if it has one only.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn part(wg: &Warpgroup<'_>, p: &FixParams, at: &Place, number: u32) -> Part {
    let segment: Segment = wg.read(p.tables.segments, (at.segment.first_part + number) as usize);
    let row = at.row_of(p, segment.receive_lane);
    let m = if p.m_transposed != 0 { at.row_of(p, segment.send_lane) } else { row };
    Part { row, own: at.row_of(p, segment.own_lane), m }
}

/// The last one.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn last(wg: &Warpgroup<'_>, p: &FixParams, at: &Place) -> Part {
    part(wg, p, at, at.segment.parts - 1)
}

impl Part {
    /// Block `block` of its summary, as rows `[columns, K]`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn summary(&self, p: &FixParams, block: u32) -> Matrix {
        own_columns(&p.channel.layout, &p.own, self.own, block)
    }

    /// Block `block` of its M, as rows `[columns, K]`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn transition(&self, p: &FixParams, block: u32) -> Matrix {
        if p.m_transposed != 0 { kept_transition(p, self.m, block) } else { self.summary(p, block) }
    }

    /// What became of its column block `block`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn cut(&self, wg: &Warpgroup<'_>, p: &FixParams, block: u32) -> Cut {
        let index = self.m as usize * p.channel.layout.blocks() as usize + block as usize;
        if p.cuts.len == 0 { Cut::default() } else { cut::read(wg, p.cuts, index) }
    }

    /// Blocks of its M that are missing: bit i for the i-th.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn missing(&self, wg: &Warpgroup<'_>, p: &FixParams) -> u32 {
        let layout = &p.channel.layout;
        (0..layout.m_blocks()).fold(0, |all, i| all | (self.cut(wg, p, layout.s_blocks() + i).empty & 1) << i)
    }

    /// Columns `channel ..` of block `block` of the state after it, from the one before it, or of the pair [S | M] up to it.
    #[allow(clippy::too_many_arguments)]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn after<E: OperandElement>(
        &self,
        wg: &mut Warpgroup<'_>,
        p: &FixParams,
        t: &Tiles<E>,
        block: u32,
        channel: usize,
        width: usize,
    ) -> Acc {
        let s = p.channel.layout.is_state(block).then(|| self.summary(p, block));
        let missing = self.missing(wg, p);
        compose(wg, p, t, s, missing, channel, width, |_, block| self.transition(p, block))
    }
}

/// Block `block` of M of row `row` as it is kept for the backward step, `[columns, K]`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn kept_transition(p: &FixParams, row: u32, block: u32) -> Matrix {
    let (first, count) = p.channel.layout.columns(block);
    let k = p.tables.sizes.k as usize;
    p.transitions.matrix((row as usize * k + first as usize) * k, count as usize, k, k, 1)
}

/// From part to part, and past the last one where the result is sent: stores the state before each part, and leaves the one before
/// the last as an operand; or composes a column block of the segment's [S | M], and keeps M for the backward step. False, on
/// all warpgroups, if a slot did not become free in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn along<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &FixParams, port: &Port<'_>, at: &Place, t: &Tiles<E>) -> bool {
    let start = wg.clock();
    let composes = at.item.pass == FixPass::Composes as u32;
    let (block, parts, sends) = (at.item.block, at.segment.parts, at.segment.targets > 0);
    let is_state = p.channel.layout.is_state(block);
    let first = part(wg, p, at, 0);
    let mut cut = if is_state { Cut::default() } else { first.cut(wg, p, block) };
    if cut.empty == 0 {
        load(wg, t, first.summary(p, block));
    }
    let mut number = 1;
    while number < parts && cut.empty == 0 {
        let part = part(wg, p, at, number);
        if composes {
            to_operand(wg, t);
        } else {
            keep(wg, p, at, t, part.row);
        }
        number += 1;
        if !is_state && part.missing(wg, p) == port.all_blocks() {
            cut = part.cut(wg, p, block);
        } else if number < parts || sends {
            each_slab(wg, p, |wg, channel, width| {
                let acc = part.after(wg, p, t, block, channel, width);
                acc.store(wg, t.state.columns(channel, width));
            });
        }
    }
    wg.sync_block();
    let end = wg.clock();
    wg.stamp_block(&p.trace, StampKind::Merge, [start, end], [at.item.head, block], 0);
    let mut sent = true;
    if sends && wg.index() == 0 {
        let empty = cut.empty != 0;
        if !is_state {
            let index = at.row as usize * p.channel.layout.blocks() as usize + block as usize;
            cut::note(wg, p.cuts, index, Cut { dropped: 0, ..cut });
            if !empty && p.transitions.is_present() {
                wg.store_rows(kept_transition(p, at.row, block), t.state);
            }
        }
        sent = send(wg, p, port, at, t.state, empty);
    }
    wg.sync_and(sent)
}

/// The state's tile from memory, each warpgroup its share of the rows; a barrier of the block must follow.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn load<E: OperandElement>(wg: &mut Warpgroup<'_>, t: &Tiles<E>, source: Matrix) {
    let (first, rows) = share_of(t.state.rows(), wg.count(), wg.index());
    if rows > 0 {
        wg.load_rows(t.state.row_range(first, rows), source.row_range(first, rows));
    }
}

/// The item's column block to whoever needs it, by one warpgroup. False if a slot did not become free in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn send(wg: &mut Warpgroup<'_>, p: &FixParams, port: &Port<'_>, at: &Place, tile: Shared<f32>, empty: bool) -> bool {
    let Segment { first_target: first, targets: count, send_lane, .. } = at.segment;
    let all = Targets { table: p.tables.targets, first, count, hv: p.tables.sizes.hv, head: at.item.head };
    let (send_row, block) = (at.row_of(p, send_lane), at.item.block);
    if empty {
        port.push_empty(wg, all, block)
    } else if p.channel.mode == StepMode::Bulk as u32 {
        port.stage(wg, all, send_row, block, tile)
    } else {
        port.push(wg, all, send_row, block, tile)
    }
}
