//! Tables and channels of PEs that share sequences.

use std::ops::Range;

use bytemuck::Zeroable;
use deltalink::reference::Problem;
use deltalink::tensor::Dtype;
use kernels_gpu::element::DtypeCode;
use kernels_gpu::params::{
    Array, BackItem, BackPass, Channel, Chunk, FixItem, FixPass, NONE, ScanItem, Segment, Sizes, StepStats, Tables,
    Target, Way,
};
use kernels_gpu::protocol::{ChannelLayout, TrapRecord, Watch};

use super::Setup;
use super::memory::code;

/// One PE's tables, of both directions, and its work.
pub struct PeTables {
    pub chunks: Vec<Chunk>,
    forward: Vec<Segment>,
    backward: Vec<Segment>,
    /// Later PEs, the farthest first.
    sources: Vec<u32>,
    /// Earlier PEs, the nearest first.
    targets: Vec<Target>,
    /// The tokens here, over the flattened tokens, of the sequence that started on an earlier PE.
    pub continued: Option<Range<usize>>,
    pub state_items: Vec<ScanItem>,
    /// Of the two launches of the reverse scan.
    pub back_items: [Vec<BackItem>; 2],
    pub merge_items: Vec<FixItem>,
}

impl PeTables {
    pub fn new(p: &Problem, setup: &Setup<'_>, pe: usize, sizes: &Sizes, warpgroups: usize) -> Self {
        let cuts = setup.cuts;
        let own = cuts[pe]..cuts[pe + 1];
        let mut tables = Self {
            chunks: Vec::new(),
            forward: Vec::new(),
            backward: Vec::new(),
            sources: Vec::new(),
            targets: Vec::new(),
            continued: None,
            state_items: Vec::new(),
            back_items: [Vec::new(), Vec::new()],
            merge_items: Vec::new(),
        };
        for (number, sequence) in p.sequences.iter().enumerate() {
            let piece = sequence.start.max(own.start)..sequence.end.min(own.end);
            // Sequences without tokens are on the first PE that reaches their place.
            let empty = sequence.start == sequence.end;
            let here = if empty {
                own.contains(&sequence.start) || sequence.start == own.end && pe + 2 == cuts.len()
            } else {
                !piece.is_empty()
            };
            if !here {
                continue;
            }
            let holds = |&other: &usize| cuts[other].max(sequence.start) < cuts[other + 1].min(sequence.end);
            let later: Vec<u32> = (pe + 1..cuts.len() - 1).filter(holds).map(|pe| pe as u32).rev().collect();
            let earlier: Vec<u32> = (0..pe).filter(holds).map(|pe| pe as u32).rev().collect();
            let lane = |others: &[u32]| if others.is_empty() { NONE } else { 0 };
            let row = |others: &[u32]| if others.is_empty() { number as u32 } else { NONE };
            let first_chunk = tables.chunks.len() as u32;
            for token in piece.clone().step_by(sizes.chunk as usize) {
                let len = (piece.end - token).min(sizes.chunk as usize) as u32;
                tables.chunks.push(Chunk { token: (token - own.start) as u32, len });
            }
            let forward = Segment {
                first_chunk,
                chunks: tables.chunks.len() as u32 - first_chunk,
                initial: row(&earlier),
                final_row: row(&later),
                receive_lane: lane(&earlier),
                send_lane: lane(&later),
                own_lane: NONE,
                await_lane: lane(&earlier),
                first_part: tables.forward.len() as u32,
                parts: 1,
                first_source: 0,
                sources: 0,
                first_target: 0,
                targets: 0,
            };
            let backward = Segment {
                initial: forward.final_row,
                final_row: forward.initial,
                receive_lane: forward.send_lane,
                send_lane: forward.receive_lane,
                await_lane: forward.send_lane,
                first_source: tables.sources.len() as u32,
                sources: later.len() as u32,
                first_target: tables.targets.len() as u32,
                targets: earlier.len() as u32,
                ..forward
            };
            tables.forward.push(forward);
            tables.backward.push(backward);
            tables.sources.extend(&later);
            tables.targets.extend(earlier.iter().map(|&pe| Target { pe, lane: 0 }));
            if !earlier.is_empty() {
                tables.continued = Some(piece);
            }
        }
        tables.add_work(sizes, setup.exact, warpgroups as u32);
        tables
    }

    fn add_work(&mut self, sizes: &Sizes, exact: bool, warpgroups: u32) {
        let (s_blocks, m_blocks) = (sizes.v.div_ceil(64), sizes.k.div_ceil(64));
        for (number, s) in self.backward.iter().enumerate() {
            let segment = number as u32;
            for head in 0..sizes.hv {
                // As many blocks to an item as there are warpgroups, fewer to the last.
                let runs = |first: u32, count: u32| {
                    let starts = (first..first + count).step_by(warpgroups as usize);
                    starts.map(move |block| (block, warpgroups.min(first + count - block)))
                };
                let waits = s.receive_lane != NONE && !exact;
                let mut back = |launch: usize, (first_block, blocks), pass| {
                    let pass = pass as u32;
                    self.back_items[launch].push(BackItem { segment, head, first_block, blocks, pass });
                };
                if waits && s.targets > 0 {
                    runs(s_blocks, m_blocks).for_each(|run| back(0, run, BackPass::Transition));
                    runs(0, s_blocks).for_each(|run| back(0, run, BackPass::External));
                }
                runs(0, s_blocks).for_each(|run| back(usize::from(waits), run, BackPass::Whole));
                for (first_block, blocks) in runs(0, s_blocks) {
                    self.state_items.push(ScanItem { segment, head, first_block, blocks });
                }
                for block in (0..s_blocks).filter(|_| waits) {
                    self.merge_items.push(FixItem {
                        segment,
                        head,
                        block,
                        first_chunk: 0,
                        chunks: 0,
                        pass: FixPass::Merges as u32,
                    });
                }
            }
        }
    }

    /// As the forward pass has them.
    pub fn forward(&self, sizes: Sizes) -> Tables {
        self.with(sizes, &self.forward)
    }

    /// Turned around.
    pub fn backward(&self, sizes: Sizes) -> Tables {
        self.with(sizes, &self.backward)
    }

    fn with(&self, sizes: Sizes, segments: &[Segment]) -> Tables {
        Tables {
            sizes,
            chunks: Array::of(&self.chunks),
            segments: Array::of(segments),
            sources: Array::of(&self.sources),
            targets: Array::of(&self.targets),
        }
    }
}

/// The PEs' sides of the channel of one step.
pub struct Channels {
    pub m_dtype: DtypeCode,
    layout: ChannelLayout,
    exact: bool,
    payloads: Vec<Vec<u64>>,
    words: Vec<Vec<u64>>,
    payload_addresses: Vec<u64>,
    word_addresses: Vec<u64>,
    ways: Vec<u32>,
    traps: Vec<TrapRecord>,
    watches: Vec<Watch>,
    stats: Vec<[u64; size_of::<StepStats>() / 8]>,
}

impl Channels {
    pub fn new(pes: usize, sizes: &Sizes, m_dtype: Dtype, exact: bool) -> Self {
        let layout = ChannelLayout::new(pes as u32, sizes.hv, sizes.k, sizes.v, m_dtype.size() as u32).unwrap();
        let payloads = vec![vec![0u64; layout.payload_bytes() / 8]; pes];
        let words = vec![vec![0u64; layout.words()]; pes];
        let addresses = |memory: &[Vec<u64>]| memory.iter().map(|x| x.as_ptr() as u64).collect();
        Self {
            m_dtype: code(m_dtype),
            layout,
            exact,
            payload_addresses: addresses(&payloads),
            word_addresses: addresses(&words),
            payloads,
            words,
            ways: vec![Way::Stores as u32; pes],
            traps: vec![TrapRecord::zeroed(); pes],
            watches: vec![Watch::zeroed(); pes],
            stats: vec![[0; size_of::<StepStats>() / 8]; pes],
        }
    }

    pub fn of(&self, pe: usize, epoch: &[u64; 1]) -> Channel {
        assert_eq!((self.payloads.len(), self.words.len()), (self.traps.len(), self.stats.len()));
        Channel {
            layout: self.layout,
            pad: 0,
            payload: Array::of(&self.payload_addresses),
            words: Array::of(&self.word_addresses),
            ways: Array::of(&self.ways),
            trap: Array::of(&self.traps[pe..=pe]),
            watch: Array { addr: (&raw const self.watches[pe]) as u64, len: (size_of::<Watch>() / 8) as u64 },
            stats: Array::of(&self.stats[pe]),
            epoch: Array::of(epoch),
            timeout_ns: 1_000_000_000,
            pe: pe as u32,
            mode: super::step_mode(self.exact) as u32,
        }
    }

    pub fn expect_no_trap(&self, pe: usize) {
        let trap = &self.traps[pe];
        assert_eq!(trap.state, TrapRecord::CLEAR, "PE {pe}: {}", trap.expired);
    }
}
