//! A rank's part of a call as the kernels' tables, and the order of their work.

use kernels_gpu::convolution::{
    ConvolutionItem, ConvolutionMessage, ConvolutionSegment, ConvolutionSource, ItemKind, SumItem,
};
use kernels_gpu::params::NONE;
use kernels_gpu::tile::CONVOLUTION_CHANNELS;

use super::Direction;
use super::halo::Halos;
use super::inputs::Sizes;
use crate::plan::{Plan, RankPlan};

/// Tokens of a run. Longer ones read fewer tokens twice and leave fewer shares to add up, shorter ones spread better.
const RUN: usize = 128;

/// A block of channels of one convolution.
#[derive(Clone, Copy)]
struct Block {
    tensor: u32,
    first: u32,
    count: u32,
}

/// A run of tokens of one segment, and its item's role.
struct Run {
    kind: ItemKind,
    segment: usize,
    offset: usize,
    len: usize,
    state: bool,
}

/// Tables of one rank and direction.
#[derive(Debug, Default)]
pub(super) struct HostTables {
    pub segments: Vec<ConvolutionSegment>,
    pub sources: Vec<ConvolutionSource>,
    pub messages: Vec<ConvolutionMessage>,
    /// Those that send, those that need nothing, those that wait.
    pub items: Vec<ConvolutionItem>,
    /// How many of the items do not wait for other PEs' messages.
    pub independent: usize,
    /// Blocks of channels of all convolutions: parts of a message.
    pub parts: usize,
    /// Runs of tokens.
    pub runs: usize,
    /// Backward: what is added up after the items.
    pub sums: Vec<SumItem>,
}

fn blocks(sizes: &Sizes) -> Vec<Block> {
    let of_tensor = |(tensor, &d): (usize, &usize)| {
        (0..d).step_by(CONVOLUTION_CHANNELS).map(move |first| Block {
            tensor: tensor as u32,
            first: first as u32,
            count: CONVOLUTION_CHANNELS.min(d - first) as u32,
        })
    };
    sizes.channels.iter().enumerate().flat_map(of_tensor).collect()
}

impl HostTables {
    /// Tables of `rank`; `biases` says which convolutions have one.
    pub fn new(plan: &Plan, rank: usize, sizes: &Sizes, direction: Direction, biases: &[bool]) -> Self {
        let (own, reach, blocks) = (&plan.ranks[rank], sizes.reach(), blocks(sizes));
        let halos = Halos::new(plan, rank, reach, direction);
        let mut tables = Self { parts: blocks.len(), ..Self::default() };
        tables.describe(own, &halos);
        let runs = match direction {
            Direction::Forward => forward_runs(own, reach),
            Direction::Backward => backward_runs(own, reach),
        };
        tables.runs = runs.len();
        let item = |kind: ItemKind, block: &Block, index: usize| ConvolutionItem {
            kind: kind as u32,
            tensor: block.tensor,
            first: block.first,
            count: block.count,
            index: index as u32,
            offset: 0,
            len: 0,
            state: 0,
            run: 0,
        };
        for message in 0..tables.messages.len() {
            tables.items.extend(blocks.iter().map(|block| item(ItemKind::Send, block, message)));
        }
        for kind in [ItemKind::Local, ItemKind::Halo] {
            for (number, run) in runs.iter().enumerate().filter(|(_, run)| run.kind == kind) {
                tables.items.extend(blocks.iter().map(|block| ConvolutionItem {
                    offset: run.offset as u32,
                    len: run.len as u32,
                    state: run.state.into(),
                    run: number as u32,
                    ..item(kind, block, run.segment)
                }));
            }
            if kind == ItemKind::Local {
                tables.independent = tables.items.len();
            }
        }
        if direction == Direction::Backward {
            tables.sums = blocks
                .iter()
                .flat_map(|&Block { tensor, first, count }| {
                    let taps = sizes.width + usize::from(biases[tensor as usize]);
                    (0..taps as u32).map(move |tap| SumItem { tensor, first, count, tap })
                })
                .collect();
        }
        tables
    }

    fn describe(&mut self, own: &RankPlan, halos: &Halos) {
        let number = |x: Option<usize>| x.map_or(NONE, |x| x as u32);
        for (segment, (sources, &real)) in own.segments.iter().zip(halos.sources.iter().zip(&halos.real)) {
            self.segments.push(ConvolutionSegment {
                token: segment.start as u32,
                len: segment.len as u32,
                initial: number(segment.initial),
                final_row: number(segment.final_row),
                before_lane: number(segment.receive.as_ref().map(|receive| receive.lane)),
                after_lane: number(segment.send.as_ref().map(|send| send.lane)),
                real: real as u32,
                first_source: self.sources.len() as u32,
                sources: sources.len() as u32,
                pad: 0,
            });
            self.sources.extend(sources.iter().map(|source| ConvolutionSource {
                pe: source.pe as u32,
                first_row: source.first_row as u32,
                rows: source.rows as u32,
            }));
        }
        self.messages.extend(halos.sends.iter().map(|message| ConvolutionMessage {
            dest: message.dest as u32,
            lane: message.lane as u32,
            segment: message.segment as u32,
            position: message.position as i32,
            first_row: message.first_row as u32,
            rows: message.rows as u32,
        }));
    }
}

/// Runs `from .. to` of a segment, each of up to [`RUN`] tokens; one without tokens if there are none.
fn local_runs(segment: usize, from: usize, to: usize) -> impl Iterator<Item = Run> {
    let first = (from == to).then_some(from);
    let starts = first.into_iter().chain((from..to).step_by(RUN));
    starts.map(move |offset| Run { kind: ItemKind::Local, segment, offset, len: RUN.min(to - offset), state: false })
}

/// Forward, the first W-1 tokens after a cut wait. The final state is written with them, or with the segment's last run.
fn forward_runs(own: &RankPlan, reach: usize) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (index, segment) in own.segments.iter().enumerate() {
        let waits = segment.receive.is_some();
        let edge = if waits { reach.min(segment.len) } else { 0 };
        if waits {
            runs.push(Run { kind: ItemKind::Halo, segment: index, offset: 0, len: edge, state: true });
        }
        if edge < segment.len || !waits {
            runs.extend(local_runs(index, edge, segment.len));
            let last = runs.last_mut().expect("a run was just added");
            last.state = !waits;
        }
    }
    runs
}

/// Backward, the last W-1 tokens before a cut wait; all of them, if those before them were not enough for a run of their own.
/// The gradient of the initial state is written with the segment's first run.
fn backward_runs(own: &RankPlan, reach: usize) -> Vec<Run> {
    let mut runs = Vec::new();
    for (index, segment) in own.segments.iter().enumerate() {
        let waits = segment.send.is_some();
        let edge = match segment.len.saturating_sub(reach) {
            // A run starts at the segment's first token or sees its own W-1 tokens before.
            edge if waits => {
                if edge < reach {
                    0
                } else {
                    edge
                }
            }
            _ => segment.len,
        };
        if edge > 0 || !waits {
            runs.extend(local_runs(index, 0, edge));
        }
        if waits {
            let len = segment.len - edge;
            runs.push(Run { kind: ItemKind::Halo, segment: index, offset: edge, len, state: false });
        }
        let first = runs.iter_mut().rev().filter(|run| run.segment == index).find(|run| run.offset == 0);
        first.expect("a segment has a run at its start").state = segment.initial.is_some();
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Cuts;
    use crate::tensor::Dtype;

    fn sizes() -> Sizes {
        Sizes { b: 1, t: 0, channels: vec![200, 100], width: 4, dtype: Dtype::F32 }
    }

    #[test]
    fn runs_cover_every_token_of_every_channel_once() {
        let cuts = Cuts::at(vec![1, 3, 3, 10, 200, 203]);
        let plan = Plan::packed(&[0, 0, 2, 5, 11, 500], &cuts).unwrap();
        for (rank, direction) in
            (0..plan.pes()).flat_map(|rank| [(rank, Direction::Forward), (rank, Direction::Backward)])
        {
            let tables = HostTables::new(&plan, rank, &sizes(), direction, &[true, false]);
            let tokens = plan.ranks[rank].tokens;
            let mut covered = [vec![0; tokens * 200], vec![0; tokens * 100]];
            let mut kinds: Vec<_> = tables.items.iter().map(|item| item.kind).collect();
            for item in tables.items.iter().filter(|item| item.kind != ItemKind::Send as u32) {
                let (segment, tensor) = (&tables.segments[item.index as usize], item.tensor as usize);
                assert!(item.offset == 0 || item.offset >= 3, "{item:?}");
                for token in segment.token + item.offset..segment.token + item.offset + item.len {
                    for c in item.first..item.first + item.count {
                        covered[tensor][token as usize * sizes().channels[tensor] + c as usize] += 1;
                    }
                }
            }
            assert!(covered.iter().flatten().all(|&count| count == 1), "rank {rank}, {direction}");
            assert!(kinds.is_sorted());
            kinds.truncate(tables.independent);
            assert!(!kinds.contains(&(ItemKind::Halo as u32)));
        }
    }

    #[test]
    fn a_message_has_a_part_for_every_block_of_channels() {
        let plan = Plan::packed(&[0, 400], &Cuts::equal(2)).unwrap();
        let tables = HostTables::new(&plan, 0, &sizes(), Direction::Forward, &[true, false]);
        assert_eq!((tables.parts, tables.messages.len()), (3, 1));
        let sends: Vec<_> = tables.items[..3].iter().map(|i| (i.kind, i.tensor, i.first, i.count)).collect();
        assert_eq!(sends, [(0, 0, 0, 128), (0, 0, 128, 72), (0, 1, 0, 100)]);
        assert!(tables.sums.is_empty());
        let back = HostTables::new(&plan, 0, &sizes(), Direction::Backward, &[true, false]);
        // Tokens 0 .. 197 in two runs, and the last three.
        assert_eq!((back.runs, back.sums.len()), (3, 5 + 5 + 4));
    }
}
