//! The order of a backward step's work.

use kernels_gpu::params::{BackItem, BackPass, FixItem, ScanItem, Segment};
use kernels_gpu::protocol::ChannelLayout;

use super::super::Mode;
use super::super::tables::HostTables;
use crate::plan::RankPlan;

/// Tables of one rank of a mirrored plan, and the work on them.
#[derive(Debug, Default)]
pub(in super::super) struct BackTables {
    /// Chunks and segments, roles turned around.
    pub tables: HostTables,
    /// Reverse scans that wait for no other PE (in exact mode: all of them).
    pub first: Vec<BackItem>,
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
    pub fn new(rank: &RankPlan, mode: Mode, chunk: usize, hv: u32, layout: &ChannelLayout, warpgroups: u32) -> Self {
        let blocks = Blocks { s: layout.s_blocks(), all: layout.blocks(), warpgroups };
        let mut back = Self { tables: HostTables::segments(rank, chunk), ..Self::default() };
        let segments = &back.tables.segments;
        // What others wait for first, and of that what waits for nobody.
        let mut order: Vec<u32> = (0..segments.len() as u32).collect();
        order.sort_by_key(|&i| {
            let Segment { targets, sources, .. } = segments[i as usize];
            (targets == 0, sources > 0)
        });
        for &segment in &order {
            let Segment { sources, targets, .. } = segments[segment as usize];
            let waits = sources > 0 && mode != Mode::Exact;
            for head in 0..hv {
                if !waits {
                    items(&mut back.first, segment, head, 0..blocks.s, blocks, BackPass::Whole);
                    continue;
                }
                if targets > 0 {
                    // M before dS, so that dS completes the pair.
                    items(&mut back.first, segment, head, blocks.s..blocks.all, blocks, BackPass::Transition);
                    items(&mut back.first, segment, head, 0..blocks.s, blocks, BackPass::External);
                }
                items(&mut back.second, segment, head, 0..blocks.s, blocks, BackPass::Whole);
            }
        }
        if mode != Mode::Exact {
            for head in 0..hv {
                for &segment in order.iter().filter(|&&i| segments[i as usize].sources > 0) {
                    let item = |block| FixItem { segment, head, block, first_chunk: 0, chunks: 0, merges: 1 };
                    back.merges.extend((0..blocks.s).map(item));
                }
            }
        }
        back
    }
}

fn items(to: &mut Vec<BackItem>, segment: u32, head: u32, range: std::ops::Range<u32>, blocks: Blocks, pass: BackPass) {
    for first_block in range.clone().step_by(blocks.warpgroups as usize) {
        let count = blocks.warpgroups.min(range.end - first_block);
        to.push(BackItem { segment, head, first_block, blocks: count, pass: pass as u32 });
    }
}

/// The forward walk again: every segment, blocks of S only.
pub(in super::super) fn state_items(segments: u32, hv: u32, layout: &ChannelLayout, warpgroups: u32) -> Vec<ScanItem> {
    let mut all = Vec::new();
    for segment in 0..segments {
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
    use crate::plan::{Cuts, Plan};

    fn layout() -> ChannelLayout {
        // V = 128 has blocks 0 and 1, K = 64 has block 2.
        ChannelLayout::new(3, 2, 64, 128, 4).unwrap()
    }

    fn tables(rank: usize, mode: Mode) -> BackTables {
        // Sequence 1 covers all ranks; sequences 0 and 2 lie on the first and the last.
        let plan = Plan::packed(&[0, 10, 300, 310], &Cuts::at(vec![100, 200])).unwrap().mirrored();
        BackTables::new(&plan.ranks[rank], mode, 64, 1, &layout(), 2)
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
            middle.merges.iter().map(|i| (i.block, i.chunks, i.merges)).collect::<Vec<_>>(),
            [(0, 0, 1), (1, 0, 1)]
        );
    }

    #[test]
    fn the_first_rank_does_what_waits_for_nobody_before_it_waits() {
        let first = tables(0, Mode::Bulk);
        assert_eq!(said(&first.first), [(0, 0, 2, WHOLE)]);
        assert_eq!(said(&first.second), [(1, 0, 2, WHOLE)]);
        assert_eq!(said(&tables(0, Mode::Exact).first), [(0, 0, 2, WHOLE), (1, 0, 2, WHOLE)]);
    }

    #[test]
    fn every_state_is_walked_forward_once() {
        let items = state_items(2, 3, &layout(), 1);
        let all: std::collections::BTreeSet<_> = items.iter().map(|i| (i.segment, i.head, i.first_block)).collect();
        assert_eq!((items.len(), all.len()), (2 * 3 * 2, 2 * 3 * 2));
        assert!(items.iter().all(|i| i.blocks == 1));
    }
}
