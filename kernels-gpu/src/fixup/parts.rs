//! Segments that one PE walks in parts: the states before the parts, and what of the whole segment other PEs need.
//!
//! ```text
//! S_in <- S_part + M_part S_in                     from part to part; S of a sequence's first part is absolute
//! [S | M] <- [S_part | 0] + M_part [S | M]         the pair of the whole segment, for PEs that come after others
//! ```
//! Both are made of what the walk has left in local memory, so nothing here waits but for free slots. Of a part whose M is missing
//! only S is left, and a segment with one has no M.

use super::{Place, Tiles, compose, each_slab, state_in, to_operand};
use crate::comm::{Port, Targets};
use crate::cut;
use crate::params::{Cut, FixParams, Matrix, Segment, StampKind, StepMode};
use crate::scan::own_columns;
use crate::tile::{Acc, OperandElement, Shared, Warpgroup, share_of};

/// A part of an item's segment.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// Row of the state before it.
    row: u32,
    /// Row of its summary.
    own: u32,
    /// Row of its M: in `own` and the notes of the forward step, or, backward, in what that has kept.
    m: u32,
}

/// Part `number` of the item's segment; the segment itself, if it has one only.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn part(wg: &Warpgroup<'_>, p: &FixParams, at: &Place, number: u32) -> Part {
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
    fn summary(&self, p: &FixParams, block: u32) -> Matrix {
        own_columns(&p.channel.layout, &p.own, self.own, block)
    }

    /// Block `block` of its M, as rows `[columns, K]`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn transition(&self, p: &FixParams, block: u32) -> Matrix {
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
    fn missing(&self, wg: &Warpgroup<'_>, p: &FixParams) -> u32 {
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

/// Goes on from the state before the segment and stores the state before each part. Leaves the one before the last part, also as an
/// operand. Where the sequence starts here the first part has none, but S; and the state after the segment goes to those who come
/// after, complete. False, on all warpgroups, if a slot did not become free in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn merge_states<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &FixParams,
    port: &Port<'_>,
    at: &Place,
    t: &Tiles<E>,
) -> bool {
    along(wg, p, port, at, t, Along { starts_here: at.segment.sources == 0, composes: false })
}

/// A column block of the segment's [S | M], composed of those of its parts, to those who come after; M also to where it is kept
/// for the backward step. False, on all warpgroups, if a slot did not become free in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn compose_segment<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &FixParams,
    port: &Port<'_>,
    at: &Place,
    t: &Tiles<E>,
) -> bool {
    along(wg, p, port, at, t, Along { starts_here: true, composes: true })
}

/// What is done along the parts.
#[derive(Clone, Copy)]
struct Along {
    /// Whether the first part's summary is what it begins with, in place of a state before it.
    starts_here: bool,
    /// Whether the pair of the segment is composed, in place of states.
    composes: bool,
}

/// From part to part, and past the last one if the result is sent. One place for both, as the products are much code.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn along<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &FixParams,
    port: &Port<'_>,
    at: &Place,
    t: &Tiles<E>,
    along: Along,
) -> bool {
    let start = wg.clock();
    let Along { starts_here, composes } = along;
    let (block, parts) = (at.item.block, at.segment.parts);
    let is_state = p.channel.layout.is_state(block);
    let sends = starts_here && at.segment.targets > 0;
    let (mut number, mut cut) = (0, Cut::default());
    if starts_here {
        let first = part(wg, p, at, 0);
        if !is_state {
            cut = first.cut(wg, p, block);
        }
        if cut.empty == 0 {
            load(wg, t, first.summary(p, block));
        }
        number = 1;
    }
    while number < parts && cut.empty == 0 {
        to_operand(wg, t);
        let part = part(wg, p, at, number);
        let (first, rows) = share_of(at.count, wg.count(), wg.index());
        if !composes && rows > 0 {
            wg.store(state_in(p, at, part.row).row_range(first, rows), t.state.row_range(first, rows));
        }
        number += 1;
        if !is_state && part.missing(wg, p) == port.all_blocks() {
            cut = part.cut(wg, p, block);
        } else if number < parts || sends {
            // All have read the state that the next one replaces.
            wg.sync_block();
            each_slab(wg, p, |wg, channel, width| {
                let acc = part.after(wg, p, t, block, channel, width);
                acc.store(wg, t.state.columns(channel, width));
            });
        }
    }
    wg.sync_block();
    if parts > 1 {
        let end = wg.clock();
        wg.stamp_block(&p.trace, StampKind::Merge, [start, end], [at.item.head, block], 0);
    }
    if !sends {
        return true;
    }
    let mut sent = true;
    if wg.index() == 0 {
        let empty = cut.empty != 0;
        if !is_state {
            let index = at.row as usize * p.channel.layout.blocks() as usize + block as usize;
            cut::note(wg, p.cuts, index, Cut { dropped: 0, ..cut });
            if !empty && p.transitions.is_present() {
                wg.store(kept_transition(p, at.row, block), t.state);
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
        wg.load(t.state.row_range(first, rows), source.row_range(first, rows));
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
