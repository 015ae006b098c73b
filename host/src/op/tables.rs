//! A rank's part of the plan as the kernels' tables, and the order of their work.

use kernels_gpu::params::{Chunk, FixItem, NONE, ScanItem, Segment, Target};
use kernels_gpu::protocol::ChannelLayout;

use super::Mode;
use crate::plan::RankPlan;

/// Chunks that one item of the correction covers.
const FIX_CHUNKS: u32 = 16;

/// Tables of one rank.
#[derive(Debug, Default)]
pub(super) struct HostTables {
    pub chunks: Vec<Chunk>,
    pub segments: Vec<Segment>,
    pub sources: Vec<u32>,
    pub targets: Vec<Target>,
    pub scan: Vec<ScanItem>,
    pub fix: Vec<FixItem>,
}

impl HostTables {
    /// Tables of `rank`; `warpgroups` is that of the scan's blocks.
    pub fn new(rank: &RankPlan, mode: Mode, chunk: usize, hv: u32, layout: &ChannelLayout, warpgroups: u32) -> Self {
        let mut tables = Self::segments(rank, chunk);
        tables.order_work(mode, hv, layout, warpgroups);
        tables
    }

    /// Chunks and segments of `rank`, without work.
    pub fn segments(rank: &RankPlan, chunk: usize) -> Self {
        let mut tables = Self::default();
        for segment in &rank.segments {
            let first_chunk = tables.chunks.len() as u32;
            for offset in (0..segment.len).step_by(chunk) {
                let len = chunk.min(segment.len - offset) as u32;
                tables.chunks.push(Chunk { token: (segment.start + offset) as u32, len });
            }
            let (first_source, first_target) = (tables.sources.len() as u32, tables.targets.len() as u32);
            if let Some(receive) = &segment.receive {
                tables.sources.extend(receive.from.iter().map(|&pe| pe as u32));
            }
            if let Some(send) = &segment.send {
                tables.targets.extend(send.to.iter().map(|t| Target { pe: t.rank as u32, lane: t.lane as u32 }));
            }
            let number = |x: Option<usize>| x.map_or(NONE, |x| x as u32);
            tables.segments.push(Segment {
                first_chunk,
                chunks: tables.chunks.len() as u32 - first_chunk,
                initial: number(segment.initial),
                final_row: number(segment.final_row),
                receive_lane: number(segment.receive.as_ref().map(|r| r.lane)),
                send_lane: number(segment.send.as_ref().map(|s| s.lane)),
                first_source,
                sources: tables.sources.len() as u32 - first_source,
                first_target,
                targets: tables.targets.len() as u32 - first_target,
            });
        }
        tables
    }

    /// Scan: what others wait for first, and of that M before S, so that S completes the pair. Correction: head by
    /// head in the order in which the PEs before this one send, the item that merges first.
    fn order_work(&mut self, mode: Mode, hv: u32, layout: &ChannelLayout, warpgroups: u32) {
        let mut order: Vec<u32> = (0..self.segments.len() as u32).collect();
        order.sort_by_key(|&i| self.segments[i as usize].targets == 0);
        for &segment in &order {
            let needs_m = self.segments[segment as usize].receive_lane != NONE && mode != Mode::Exact;
            let (s, all) = (layout.s_blocks(), layout.blocks());
            let end = if needs_m { all } else { s };
            // Where one item does not hold all of them, the blocks of M are a run of their own.
            let split = if needs_m && all > warpgroups { s } else { 0 };
            let runs = [split..end, 0..split];
            for head in 0..hv {
                for run in &runs {
                    for first_block in run.clone().step_by(warpgroups as usize) {
                        let blocks = warpgroups.min(run.end - first_block);
                        self.scan.push(ScanItem { segment, head, first_block, blocks });
                    }
                }
            }
        }
        if mode == Mode::Exact {
            return;
        }
        for head in 0..hv {
            for &segment in &order {
                let Segment { receive_lane, chunks, .. } = self.segments[segment as usize];
                if receive_lane == NONE {
                    continue;
                }
                for first_chunk in (0..chunks).step_by(FIX_CHUNKS as usize) {
                    for block in 0..layout.s_blocks() {
                        let count = FIX_CHUNKS.min(chunks - first_chunk);
                        let merges = u32::from(first_chunk == 0);
                        self.fix.push(FixItem { segment, head, block, first_chunk, chunks: count, merges });
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Cuts, Plan};

    fn tables(mode: Mode) -> HostTables {
        let plan = Plan::packed(&[0, 10, 10, 300, 310], &Cuts::at(vec![100, 200])).unwrap();
        let layout = ChannelLayout::new(3, 2, 64, 128, 4).unwrap();
        HostTables::new(&plan.ranks[1], mode, 64, 2, &layout, 2)
    }

    #[test]
    fn chunks_restart_at_segments_and_cover_them() {
        let t = tables(Mode::Overlap);
        assert_eq!(t.chunks.iter().map(|c| (c.token, c.len)).collect::<Vec<_>>(), [(0, 64), (64, 36)]);
        assert_eq!((t.segments.len(), t.segments[0].chunks), (1, 2));
    }

    #[test]
    fn m_goes_before_s_and_exact_needs_no_m() {
        let blocks = |t: &HostTables| t.scan.iter().map(|i| (i.head, i.first_block, i.blocks)).collect::<Vec<_>>();
        // V = 128 has blocks 0 and 1, K = 64 has block 2.
        assert_eq!(blocks(&tables(Mode::Overlap)), [(0, 2, 1), (0, 0, 2), (1, 2, 1), (1, 0, 2)]);
        assert_eq!(blocks(&tables(Mode::Exact)), [(0, 0, 2), (1, 0, 2)]);
        assert!(tables(Mode::Exact).fix.is_empty());
    }

    #[test]
    fn the_item_that_merges_comes_before_those_that_use_it() {
        let plan = Plan::batch(2, 5000, &Cuts::equal(2)).unwrap();
        let layout = ChannelLayout::new(2, 6, 64, 128, 4).unwrap();
        let t = HostTables::new(&plan.ranks[1], Mode::Overlap, 64, 3, &layout, 2);
        let mut merged = std::collections::HashSet::new();
        for item in &t.fix {
            let state = (item.segment, item.head, item.block);
            assert_eq!(item.merges != 0, merged.insert(state), "{item:?}");
        }
        assert_eq!(merged.len(), 2 * 3 * 2);
    }
}
