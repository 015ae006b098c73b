//! A rank's part of the plan as the kernels' tables, and the order of their work.

use kernels_gpu::params::{Chunk, FixItem, FixPass, NONE, ScanItem, Segment, Target};
use kernels_gpu::protocol::ChannelLayout;

use super::parts::{Part, Parts};
use super::{Config, Mode};
use crate::plan::RankPlan;

/// Chunks that one item of the correction covers.
const FIX_CHUNKS: u32 = 16;

/// Tables of one rank.
#[derive(Debug, Default)]
pub(super) struct HostTables {
    pub chunks: Vec<Chunk>,
    /// A segment that is walked in parts is followed by them, in the order of the flow.
    pub segments: Vec<Segment>,
    /// The entries that are no parts.
    pub wholes: Vec<u32>,
    pub sources: Vec<u32>,
    pub targets: Vec<Target>,
    pub scan: Vec<ScanItem>,
    /// Of segments that are walked in parts: what waits for no other PE.
    pub join: Vec<FixItem>,
    pub fix: Vec<FixItem>,
}

/// What tables follow from besides the rank.
#[derive(Clone, Copy)]
pub(super) struct Form<'a> {
    pub chunk: usize,
    pub parts: &'a Parts,
    /// Whether the rank is one of a mirrored plan: then the flow goes from the last part to the first.
    pub mirrored: bool,
    /// Whether segments that receive and end here keep their summary, for the final state.
    pub keeps_own: bool,
}

impl HostTables {
    /// Tables of `rank`; `warpgroups` is that of the scan's blocks.
    pub fn new(
        rank: &RankPlan,
        config: &Config,
        parts: &Parts,
        hv: u32,
        layout: &ChannelLayout,
        warpgroups: u32,
    ) -> Self {
        let keeps_own = config.mode != Mode::Exact && config.final_state;
        let mut tables = Self::segments(rank, Form { chunk: config.chunk, parts, mirrored: false, keeps_own });
        tables.order_scan(config.mode, hv, layout, warpgroups);
        if config.mode != Mode::Exact {
            tables.order_corrections(hv, layout);
        }
        tables
    }

    /// Chunks and segments of `rank`, without work.
    pub fn segments(rank: &RankPlan, form: Form<'_>) -> Self {
        let mut tables = Self::default();
        let (received, sent) = (rank.receiving().count(), rank.sending().count());
        for (index, segment) in rank.segments.iter().enumerate() {
            let first_chunk = tables.chunks.len() as u32;
            for offset in (0..segment.len).step_by(form.chunk) {
                let len = form.chunk.min(segment.len - offset) as u32;
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
            let receive_lane = number(segment.receive.as_ref().map(|r| r.lane));
            let (parts, own_index) = (form.parts.count(index), tables.segments.len() as u32);
            let keeps = form.keeps_own && segment.final_row.is_some() && parts == 1;
            let chunks = tables.chunks.len() - first_chunk as usize;
            let whole = Segment {
                first_chunk,
                chunks: chunks as u32,
                initial: number(segment.initial),
                final_row: number(segment.final_row),
                receive_lane,
                send_lane: number(segment.send.as_ref().map(|s| s.lane)),
                own_lane: if keeps { receive_lane } else { NONE },
                await_lane: receive_lane,
                first_part: own_index + u32::from(parts > 1),
                parts: parts as u32,
                first_source,
                sources: tables.sources.len() as u32 - first_source,
                first_target,
                targets: tables.targets.len() as u32 - first_target,
            };
            tables.wholes.push(own_index);
            tables.segments.push(whole);
            let mut of_segment: Vec<Part> = form.parts.parts(index, chunks).collect();
            if form.mirrored {
                of_segment.reverse();
            }
            for (i, part) in of_segment.iter().enumerate() {
                let lane = (received + part.number) as u32;
                let (begins, ends) = (i == 0, i + 1 == parts);
                tables.segments.push(Segment {
                    first_chunk: first_chunk + part.first_chunk as u32,
                    chunks: part.chunks as u32,
                    initial: if begins { whole.initial } else { NONE },
                    final_row: if ends { whole.final_row } else { NONE },
                    receive_lane: if begins && whole.sources == 0 { NONE } else { lane },
                    send_lane: (sent + part.number) as u32,
                    own_lane: lane,
                    first_part: own_index + 1 + i as u32,
                    parts: 1,
                    sources: 0,
                    targets: 0,
                    ..whole
                });
            }
        }
        tables
    }

    /// Segments in the order in which they are worked on: what others wait for first.
    pub fn order(&self, key: impl Fn(&Segment) -> (bool, bool)) -> Vec<u32> {
        let mut order = self.wholes.clone();
        order.sort_by_key(|&i| key(&self.segments[i as usize]));
        order
    }

    /// What of segment `segment` is walked by itself: its parts, or it.
    pub fn walks(&self, segment: u32) -> std::ops::Range<u32> {
        let Segment { first_part, parts, .. } = self.segments[segment as usize];
        first_part..first_part + parts
    }

    /// Whether a segment is walked in parts.
    pub fn is_cut(&self, segment: u32) -> bool {
        self.segments[segment as usize].parts > 1
    }

    /// What others wait for first, and of that M before S, so that S completes the pair.
    fn order_scan(&mut self, mode: Mode, hv: u32, layout: &ChannelLayout, warpgroups: u32) {
        for segment in self.order(|segment| (segment.targets == 0, false)) {
            for head in 0..hv {
                for walk in self.walks(segment) {
                    let needs_m = self.segments[walk as usize].receive_lane != NONE && mode != Mode::Exact;
                    let (s, all) = (layout.s_blocks(), layout.blocks());
                    let end = if needs_m { all } else { s };
                    // Where one item does not hold all of them, the blocks of M are a run of their own.
                    let split = if needs_m && all > warpgroups { s } else { 0 };
                    for run in [split..end, 0..split] {
                        for first_block in run.clone().step_by(warpgroups as usize) {
                            let blocks = warpgroups.min(run.end - first_block);
                            self.scan.push(ScanItem { segment: walk, head, first_block, blocks });
                        }
                    }
                }
            }
        }
    }

    /// Head by head in the order in which the PEs before this one send, the item that merges first.
    fn order_corrections(&mut self, hv: u32, layout: &ChannelLayout) {
        let order = self.order(|segment| (segment.targets == 0, false));
        self.join = self.joins(&order, hv, layout, 0..layout.blocks());
        for head in 0..hv {
            for &segment in &order {
                let cut = self.is_cut(segment);
                if cut && self.segments[segment as usize].sources > 0 {
                    let merge = |block| merge(segment, head, block);
                    self.fix.extend((0..layout.s_blocks()).map(merge));
                }
                for walk in self.walks(segment) {
                    let Segment { receive_lane, chunks, .. } = self.segments[walk as usize];
                    if receive_lane == NONE {
                        continue;
                    }
                    for first_chunk in (0..chunks).step_by(FIX_CHUNKS as usize) {
                        for block in 0..layout.s_blocks() {
                            let chunks = FIX_CHUNKS.min(chunks - first_chunk);
                            let merges = first_chunk == 0 && !cut;
                            let pass = if merges { FixPass::Merges } else { FixPass::Corrects } as u32;
                            self.fix.push(FixItem { segment: walk, head, block, first_chunk, chunks, pass });
                        }
                    }
                }
            }
        }
    }

    /// Of segments that are walked in parts, what waits for no other PE, segments in `order`: the states before the parts where the
    /// sequence starts here, and `composed` column blocks of the pair [S | M] where it starts earlier and goes on later, M before S.
    pub fn joins(
        &self,
        order: &[u32],
        hv: u32,
        layout: &ChannelLayout,
        composed: std::ops::Range<u32>,
    ) -> Vec<FixItem> {
        let mut items = Vec::new();
        for head in 0..hv {
            for &segment in order.iter().filter(|&&segment| self.is_cut(segment)) {
                let Segment { sources, targets, .. } = self.segments[segment as usize];
                if sources == 0 {
                    items.extend((0..layout.s_blocks()).map(|block| merge(segment, head, block)));
                } else if targets > 0 {
                    let pass = FixPass::Composes as u32;
                    let item = |block| FixItem { segment, head, block, first_chunk: 0, chunks: 0, pass };
                    items.extend((layout.s_blocks()..composed.end).chain(0..layout.s_blocks()).map(item));
                }
            }
        }
        items
    }
}

/// The item that merges the states before a segment and its parts, and corrects nothing.
pub(super) fn merge(segment: u32, head: u32, block: u32) -> FixItem {
    FixItem { segment, head, block, first_chunk: 0, chunks: 0, pass: FixPass::Merges as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Cuts, Plan};

    fn tables(mode: Mode) -> HostTables {
        let plan = Plan::packed(&[0, 10, 10, 300, 310], &Cuts::at(vec![100, 200])).unwrap();
        let layout = ChannelLayout::new(3, 2, 64, 128, 4).unwrap();
        let config = Config { mode, ..Config::default() };
        HostTables::new(&plan.ranks[1], &config, &Parts::default(), 2, &layout, 2)
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
        for count in [1, 3] {
            let parts = cut(&plan.ranks[1], count);
            let t = HostTables::new(&plan.ranks[1], &Config::default(), &parts, 3, &layout, 2);
            let mut merged = std::collections::HashSet::new();
            for item in &t.fix {
                // Parts await the flag of their segment.
                let lane = t.segments[item.segment as usize].await_lane;
                let first = merged.insert((lane, item.head, item.block));
                assert_eq!(item.pass == FixPass::Merges as u32, first, "{count} parts: {item:?}");
            }
            assert_eq!(merged.len(), 2 * 3 * 2);
            assert!(t.join.is_empty());
        }
    }

    fn cut(rank: &RankPlan, count: usize) -> Parts {
        let config = Config { segments: crate::op::Segments::At(count.try_into().unwrap()), ..Config::default() };
        Parts::of(rank, &config, crate::op::parts::Room { multiprocessors: 1, blocks: 1 })
    }

    #[test]
    fn parts_have_rows_of_their_own_and_nothing_to_do_with_other_pes() {
        // A sequence over three ranks, of which the second has five chunks.
        let plan = Plan::packed(&[0, 520], &Cuts::at(vec![100, 420])).unwrap();
        let layout = ChannelLayout::new(3, 1, 64, 64, 4).unwrap();
        let said = |t: &HostTables| -> Vec<(u32, u32, u32, u32, u32)> {
            t.segments.iter().map(|s| (s.first_chunk, s.chunks, s.receive_lane, s.send_lane, s.own_lane)).collect()
        };
        let rank = &plan.ranks[1];
        let parts = cut(rank, 2);
        let t = HostTables::new(rank, &Config::default(), &parts, 1, &layout, 2);
        assert_eq!(said(&t), [(0, 5, 0, 0, NONE), (0, 3, 1, 1, 1), (3, 2, 2, 2, 2)]);
        assert!(t.segments[1..].iter().all(|s| (s.sources, s.targets, s.await_lane) == (0, 0, 0)));
        let scanned: Vec<_> = t.scan.iter().map(|i| (i.segment, i.first_block, i.blocks)).collect();
        assert_eq!(scanned, [(1, 0, 2), (2, 0, 2)]);
        // M of the pair before S.
        let join: Vec<_> = t.join.iter().map(|i| (i.segment, i.block, i.pass)).collect();
        assert_eq!(join, [(0, 1, FixPass::Composes as u32), (0, 0, FixPass::Composes as u32)]);

        let mirrored = plan.mirrored();
        let form = Form { chunk: 64, parts: &parts, mirrored: true, keeps_own: false };
        let back = HostTables::segments(&mirrored.ranks[1], form);
        // The flow begins with the last part; the lanes of their M are those in which they received.
        assert_eq!(said(&back), [(0, 5, 0, 0, NONE), (3, 2, 2, 2, 2), (0, 3, 1, 1, 1)]);
        let first = &mirrored.ranks[0];
        let back = HostTables::segments(first, Form { parts: &cut(first, 2), ..form });
        assert_eq!(said(&back), [(0, 2, 0, NONE, NONE), (1, 1, 2, 1, 2), (0, 1, 1, 0, 1)]);
        assert_eq!(back.segments.iter().map(|s| s.final_row).collect::<Vec<_>>(), [0, NONE, 0]);
    }

    #[test]
    fn a_sequence_that_starts_here_is_merged_before_anything_is_corrected() {
        let plan = Plan::packed(&[0, 320], &Cuts::equal(1)).unwrap();
        let layout = ChannelLayout::new(1, 1, 64, 64, 4).unwrap();
        let t = HostTables::new(&plan.ranks[0], &Config::default(), &cut(&plan.ranks[0], 3), 1, &layout, 2);
        let lanes: Vec<_> = t.segments.iter().map(|s| (s.receive_lane, s.own_lane, s.initial, s.final_row)).collect();
        assert_eq!(lanes, [(NONE, NONE, 0, 0), (NONE, 0, 0, NONE), (1, 1, NONE, NONE), (2, 2, NONE, 0)]);
        let said = |items: &[FixItem]| items.iter().map(|i| (i.segment, i.chunks, i.pass)).collect::<Vec<_>>();
        assert_eq!(said(&t.join), [(0, 0, FixPass::Merges as u32)]);
        assert_eq!(said(&t.fix), [(2, 2, FixPass::Corrects as u32), (3, 1, FixPass::Corrects as u32)]);
        assert!(t.segments.iter().all(|s| s.await_lane == NONE));
        // M of all parts but the first.
        assert_eq!(t.scan.iter().map(|i| (i.segment, i.blocks)).collect::<Vec<_>>(), [(1, 1), (2, 2), (3, 2)]);
    }
}
