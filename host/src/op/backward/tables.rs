//! The order of a backward step's work.

use kernels_gpu::params::{BackItem, BackPass, FixItem, NONE, ScanItem, Segment};
use kernels_gpu::protocol::ChannelLayout;

use super::super::parts::Parts;
use super::super::tables::{Form, HostTables, merge};
use super::super::{Config, Mode};
use crate::plan::RankPlan;

/// Tables of one rank of a mirrored plan, and the work on them.
#[derive(Debug, Default)]
pub(in super::super) struct BackTables {
    /// Chunks and segments, roles turned around.
    pub tables: HostTables,
    /// Reverse scans that wait for no other PE (in exact mode: all of them).
    pub first: Vec<BackItem>,
    /// Of segments that are walked in parts, what waits for no other PE, and what others wait for.
    pub joins: Vec<FixItem>,
    /// Merges of what arrives.
    pub merges: Vec<FixItem>,
    /// Reverse scans from what was merged.
    pub second: Vec<BackItem>,
}

/// Column blocks that one item takes at most, and how they are laid out.
#[derive(Clone, Copy)]
struct Blocks {
    s: u32,
    all: u32,
    warpgroups: u32,
}

impl BackTables {
    /// Tables of `rank`, one of a mirrored plan; `warpgroups` is that of the reverse scan's blocks.
    pub fn new(
        rank: &RankPlan,
        config: &Config,
        parts: &Parts,
        hv: u32,
        layout: &ChannelLayout,
        warpgroups: u32,
    ) -> Self {
        let blocks = Blocks { s: layout.s_blocks(), all: layout.blocks(), warpgroups };
        let form = Form { chunk: config.chunk, parts, mirrored: true, keeps_own: false };
        let exact = config.mode == Mode::Exact;
        let mut back = Self { tables: HostTables::segments(rank, form), ..Self::default() };
        // What others wait for first, and of that what waits for nobody.
        let order = back.tables.order(|segment| (segment.targets == 0, segment.sources > 0));
        for &segment in &order {
            for head in 0..hv {
                back.walk(segment, head, blocks, exact);
            }
        }
        if !exact {
            back.joins = back.tables.joins(&order, hv, layout, 0..blocks.s);
            for head in 0..hv {
                let segments = &back.tables.segments;
                for &segment in order.iter().filter(|&&i| segments[i as usize].sources > 0) {
                    back.merges.extend((0..blocks.s).map(|block| merge(segment, head, block)));
                }
            }
        }
        back
    }

    /// The reverse scans of one head of a segment.
    fn walk(&mut self, segment: u32, head: u32, blocks: Blocks, exact: bool) {
        let Segment { sources, targets, .. } = self.tables.segments[segment as usize];
        if sources > 0 && targets > 0 && !exact {
            // M before dS, so that dS completes the pair.
            items(&mut self.first, segment, head, blocks.s..blocks.all, blocks, BackPass::Transition);
        }
        let walks = self.tables.walks(segment);
        for walk in walks.clone() {
            let waits = self.tables.segments[walk as usize].receive_lane != NONE && !exact;
            if !waits {
                items(&mut self.first, walk, head, 0..blocks.s, blocks, BackPass::Whole);
                continue;
            }
            // Whom nothing comes after, nobody asks for what it would add.
            if targets > 0 || walk + 1 < walks.end {
                items(&mut self.first, walk, head, 0..blocks.s, blocks, BackPass::External);
            }
            items(&mut self.second, walk, head, 0..blocks.s, blocks, BackPass::Whole);
        }
    }
}

fn items(to: &mut Vec<BackItem>, segment: u32, head: u32, range: std::ops::Range<u32>, blocks: Blocks, pass: BackPass) {
    for first_block in range.clone().step_by(blocks.warpgroups as usize) {
        let count = blocks.warpgroups.min(range.end - first_block);
        to.push(BackItem { segment, head, first_block, blocks: count, pass: pass as u32 });
    }
}

/// The forward walk again: all that is walked by itself, blocks of S only.
pub(in super::super) fn state_items(
    tables: &HostTables,
    hv: u32,
    layout: &ChannelLayout,
    warpgroups: u32,
) -> Vec<ScanItem> {
    let mut all = Vec::new();
    for segment in tables.wholes.iter().flat_map(|&segment| tables.walks(segment)) {
        for head in 0..hv {
            for first_block in (0..layout.s_blocks()).step_by(warpgroups as usize) {
                let blocks = warpgroups.min(layout.s_blocks() - first_block);
                all.push(ScanItem { segment, head, first_block, blocks });
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels_gpu::params::FixPass;

    use crate::plan::{Cuts, Plan};

    fn layout() -> ChannelLayout {
        // V = 128 has blocks 0 and 1, K = 64 has block 2.
        ChannelLayout::new(3, 2, 64, 128, 4).unwrap()
    }

    fn tables(rank: usize, mode: Mode) -> BackTables {
        // Sequence 1 covers all ranks; sequences 0 and 2 lie on the first and the last.
        let plan = Plan::packed(&[0, 10, 300, 310], &Cuts::at(vec![100, 200])).unwrap().mirrored();
        let config = Config { mode, ..Config::default() };
        BackTables::new(&plan.ranks[rank], &config, &Parts::default(), 1, &layout(), 2)
    }

    /// Sequence 0 covers all ranks, with at least three chunks on each; sequence 1 lies on the last.
    fn in_parts(rank: usize) -> BackTables {
        let plan = Plan::packed(&[0, 700, 900], &Cuts::at(vec![200, 500])).unwrap();
        let config = Config { segments: crate::op::Segments::At(3.try_into().unwrap()), ..Config::default() };
        let room = crate::op::parts::Room { multiprocessors: 1, blocks: 1 };
        let parts = Parts::of(&plan.ranks[rank], &config, room);
        BackTables::new(&plan.mirrored().ranks[rank], &config, &parts, 1, &layout(), 2)
    }

    fn said(items: &[BackItem]) -> Vec<(u32, u32, u32, u32)> {
        items.iter().map(|i| (i.segment, i.first_block, i.blocks, i.pass)).collect()
    }

    const TRANSITION: u32 = BackPass::Transition as u32;
    const EXTERNAL: u32 = BackPass::External as u32;
    const WHOLE: u32 = BackPass::Whole as u32;

    #[test]
    fn the_last_rank_sends_at_once_and_waits_for_nobody() {
        for mode in [Mode::Overlap, Mode::Bulk, Mode::Exact] {
            let last = tables(2, mode);
            assert_eq!(said(&last.first), [(0, 0, 2, WHOLE), (1, 0, 2, WHOLE)]);
            assert!(last.second.is_empty() && last.merges.is_empty());
        }
    }

    #[test]
    fn a_rank_in_the_middle_sends_its_pair_before_it_merges() {
        let middle = tables(1, Mode::Overlap);
        assert_eq!(said(&middle.first), [(0, 2, 1, TRANSITION), (0, 0, 2, EXTERNAL)]);
        assert_eq!(said(&middle.second), [(0, 0, 2, WHOLE)]);
        assert_eq!(
            middle.merges.iter().map(|i| (i.block, i.chunks, i.pass)).collect::<Vec<_>>(),
            [(0, 0, FixPass::Merges as u32), (1, 0, FixPass::Merges as u32)]
        );
    }

    #[test]
    fn the_first_rank_does_what_waits_for_nobody_before_it_waits() {
        let first = tables(0, Mode::Bulk);
        assert_eq!(said(&first.first), [(0, 0, 2, WHOLE)]);
        assert_eq!(said(&first.second), [(1, 0, 2, WHOLE)]);
        assert_eq!(said(&tables(0, Mode::Exact).first), [(0, 0, 2, WHOLE), (1, 0, 2, WHOLE)]);
    }

    fn joined(items: &[FixItem]) -> Vec<(u32, u32, u32)> {
        items.iter().map(|i| (i.segment, i.block, i.pass)).collect()
    }

    #[test]
    fn the_first_in_the_flow_of_parts_is_absolute_and_the_last_adds_to_nobody() {
        // On the last rank both sequences end; the second one starts there as well.
        let last = in_parts(2);
        let first = [(1, 0, 2, WHOLE), (2, 0, 2, EXTERNAL), (3, 0, 2, EXTERNAL)];
        assert_eq!(said(&last.first)[..3], first);
        assert_eq!(said(&last.first)[3..], [(5, 0, 2, WHOLE), (6, 0, 2, EXTERNAL)]);
        assert_eq!(said(&last.second), [2, 3, 6, 7].map(|part| (part, 0, 2, WHOLE)));
        let merges = FixPass::Merges as u32;
        assert_eq!(joined(&last.joins), [(0, 0, merges), (0, 1, merges), (4, 0, merges), (4, 1, merges)]);
        assert!(last.merges.is_empty());
    }

    #[test]
    fn a_rank_in_the_middle_composes_what_its_parts_add() {
        let middle = in_parts(1);
        let external = [1, 2, 3].map(|part| (part, 0, 2, EXTERNAL));
        assert_eq!(said(&middle.first), [&[(0, 2, 1, TRANSITION)][..], &external].concat());
        let composes = FixPass::Composes as u32;
        assert_eq!(joined(&middle.joins), [(0, 0, composes), (0, 1, composes)]);
        assert_eq!(joined(&middle.merges), [(0, 0, FixPass::Merges as u32), (0, 1, FixPass::Merges as u32)]);
        assert_eq!(said(&middle.second), [1, 2, 3].map(|part| (part, 0, 2, WHOLE)));
    }

    #[test]
    fn every_state_is_walked_forward_once() {
        let mut tables = HostTables::default();
        let part = |first_part, parts| Segment { first_part, parts, ..bytemuck::Zeroable::zeroed() };
        // The first is walked in two parts, which stand in its place.
        tables.segments = vec![part(1, 2), part(1, 1), part(2, 1)];
        tables.wholes = vec![0];
        let items = state_items(&tables, 3, &layout(), 1);
        let all: std::collections::BTreeSet<_> = items.iter().map(|i| (i.segment, i.head, i.first_block)).collect();
        assert_eq!((items.len(), all.len()), (2 * 3 * 2, 2 * 3 * 2));
        assert!(items.iter().all(|i| i.blocks == 1 && i.segment > 0));
    }
}
