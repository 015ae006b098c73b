//! Blocks of M that are empty: how a PE says so, and what a receiver need not wait for then.
//!
//! A receiver composes what its sources send in their order. Behind a source whose M is empty altogether what came before does not
//! matter, so it goes on from there, as soon as it sees that, and does not wait for sources before.

use core::sync::atomic::Ordering;

use super::{EMPTY_MESSAGES, Link, MESSAGES, Port, SIGNAL_WAIT_NS, Targets};
use crate::params::{Array, StampKind, StepMode};
use crate::protocol::{self, Arrival, Message};
use crate::tile::Warpgroup;

/// Where a segment's summaries come from: a run of the table of sources.
#[derive(Clone, Copy)]
pub struct Sources {
    /// Of u32.
    pub table: Array,
    /// First entry.
    pub first: u32,
    /// Entries.
    pub count: u32,
}

impl Sources {
    /// The PE of entry `i`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn get(&self, wg: &Warpgroup<'_>, i: u32) -> u32 {
        wg.read(self.table, (self.first + i) as usize)
    }

    /// Whether M of row `row` of entry `i` is known to be empty, so that its S is all there is to know.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_complete(&self, wg: &Warpgroup<'_>, port: &Port<'_>, i: u32, row: u32) -> bool {
        port.empty_blocks(wg, self.get(wg, i), row) == port.all_blocks()
    }

    /// The last entry after `i` of which that is so; `i` if there is none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn last_complete(&self, wg: &Warpgroup<'_>, port: &Port<'_>, i: u32, row: u32) -> u32 {
        let mut last = self.count - 1;
        while last > i && !self.is_complete(wg, port, last, row) {
            last -= 1;
        }
        last
    }
}

impl Port<'_> {
    /// Tells every target that `block` is empty, once it has read what came before. False if one did not in time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn push_empty(&self, wg: &mut Warpgroup<'_>, targets: Targets, block: u32) -> bool {
        let layout = &self.channel.layout;
        for i in 0..targets.count {
            let message = targets.message(wg, self, i, block);
            let Some(writable) = self.free_slot(wg, message) else { return false };
            wg.elect(|wg| {
                protocol::publish_empty(&Link { wg, port: *self }, layout, writable);
                wg.word(self.channel.stats, MESSAGES).fetch_add(1, Ordering::Relaxed);
                wg.word(self.channel.stats, EMPTY_MESSAGES).fetch_add(1, Ordering::Relaxed);
            });
        }
        true
    }

    /// Which blocks of M of row `row` from `source` have arrived and are empty: bit i for the i-th.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn empty_blocks(&self, wg: &Warpgroup<'_>, source: u32, row: u32) -> u32 {
        let layout = &self.channel.layout;
        let link = Link { wg, port: *self };
        let mut empty = 0;
        for i in 0..layout.m_blocks() {
            let message =
                Message { source, dest: self.channel.pe, row, block: layout.s_blocks() + i, epoch: self.epoch(wg) };
            empty |= u32::from(protocol::is_empty(&link, layout, message)) << i;
        }
        empty
    }

    /// Waits for block `block` of S of row `row`, and for all of M unless the source is a sequence's first, from entry `i` of
    /// `sources`; then `i`. A later entry whose M is known to be empty instead: what comes before it is not needed. [`None`] if
    /// nothing came in time. In bulk mode all of it is there, and nothing signals what has a payload.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn await_source(&self, wg: &mut Warpgroup<'_>, sources: Sources, i: u32, row: u32, block: u32) -> Option<u32> {
        let layout = &self.channel.layout;
        if self.channel.mode == StepMode::Bulk as u32 {
            return Some(sources.last_complete(wg, self, i, row));
        }
        let nearest = sources.count - 1;
        // Before the first wait only the nearest one is asked, which costs one look where nothing is empty.
        if nearest > i && sources.is_complete(wg, self, nearest, row) {
            return Some(nearest);
        }
        let source = sources.get(wg, i);
        let first = if i == 0 { layout.blocks() } else { layout.s_blocks() };
        for block in (first..layout.blocks()).chain(core::iter::once(block)) {
            let message = Message { source, dest: self.channel.pe, row, block, epoch: self.epoch(wg) };
            let arrival = wg.elect(|wg| {
                self.wait(wg, SIGNAL_WAIT_NS, StampKind::Wait, (row, block), |link| {
                    protocol::receive_unless(link, layout, message, || sources.last_complete(link.wg, self, i, row) > i)
                })
            })?;
            if arrival == Arrival::NotNeeded {
                return Some(sources.last_complete(wg, self, i, row));
            }
        }
        Some(i)
    }

    /// [`Port::empty_blocks`] if all are.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn all_blocks(&self) -> u32 {
        (1 << self.channel.layout.m_blocks()) - 1
    }
}
