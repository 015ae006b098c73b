//! How a PE cuts its segments once more, into parts that it walks side by side.
//!
//! A walk goes through the chunks of a segment one after the other, and takes a few blocks for each head. Where heads and sequences
//! are few, most multiprocessors have nothing to do, and parts give them work: each is walked from a zero state, with the
//! columns of its transition, and merged and corrected afterwards, as among PEs. That is no gift. All parts but the first walk
//! K more columns, their outputs are written and corrected once more, and a backward step walks them twice. So parts are
//! made only as far as there are idle multiprocessors, and where [`Cost`] says that a forward step gains by them.
//!
//! It is a matter of one PE: whatever its parts are, it sends the same summaries.

use super::{Config, Mode, Segments};
use crate::plan::{RankPlan, Segment};

/// Fewest parts that are worth it, where nobody asks for a number: two walk about as long backward as one, and more in all.
const FEWEST: usize = 3;

/// Microseconds of what parts change in a forward step.
struct Cost {
    /// A chunk of a walk from a state that is there.
    chunk: f64,
    /// A chunk of a part's walk, with the columns of M.
    with_m: f64,
    /// Whatever the parts: the start of a walk with M, two more launches.
    fixed: f64,
    /// To merge a part.
    merge: f64,
    /// To correct the outputs of a chunk of a head, for each block that the head's walk takes.
    correct: f64,
    /// Of what a whole walk takes, the least that must be gained.
    gain: f64,
}

/// After measurements on an H200 with the bodies for Hopper, K = V = 128, 8 heads, and slow gates: how far M reaches is not known when
/// parts are made, and where it ends early the parts cost less. A walk of 512 chunks took 533 us; of parts of 128, 64, 32 and 16 chunks
/// 302, 214, 94 and 67 us; 7 merges 95 us; corrections of 512 and 128 chunks in 4 parts 106 and 38 us. Other bodies are slower in all
/// of this alike.
const COST: Cost = Cost { chunk: 1.04, with_m: 2.3, fixed: 50.0, merge: 13.5, correct: 0.016, gain: 0.1 };

impl Cost {
    /// Of a segment of `chunks` chunks that is walked whole.
    fn whole(&self, chunks: usize) -> f64 {
        self.chunk * chunks as f64
    }

    /// Of the same in `count` parts, all of which are walked at the same time.
    fn cut(&self, chunks: usize, count: usize, blocks: usize) -> f64 {
        let corrected = (chunks - chunks.div_ceil(count)) * blocks;
        let walk = self.with_m * chunks.div_ceil(count) as f64;
        self.fixed + walk + self.merge * count as f64 + self.correct * corrected as f64
    }
}

/// What the number of parts follows from, beside the segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    /// Blocks that walk at the same time.
    pub multiprocessors: usize,
    /// Blocks that one part of a segment takes, with its transition.
    pub blocks: usize,
}

impl Room {
    /// Parts of a segment of `chunks` chunks, of `all` on this PE: the cheapest number, of those that the multiprocessors walk at the
    /// same time if all segments are cut into parts of equal length.
    fn parts(&self, chunks: usize, all: usize) -> usize {
        let parts = self.multiprocessors / self.blocks.max(1);
        // Its share, rounded down: more parts than fit would be walked one round later.
        let share = (chunks * parts / all.max(1)).min(chunks);
        let cost = |&count: &usize| COST.cut(chunks, count, self.blocks);
        let best = (FEWEST..=share).min_by(|a, b| cost(a).total_cmp(&cost(b)));
        best.filter(|count| cost(count) <= (1.0 - COST.gain) * COST.whole(chunks)).unwrap_or(1)
    }
}

/// The parts of a rank's segments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Parts {
    /// Parts of each segment; empty if all are walked whole.
    counts: Vec<u32>,
}

/// What is walked by itself: a segment, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Walk {
    /// Lane of its rows in this PE's tables, if a state comes before it.
    pub lane: Option<usize>,
    /// Chunks.
    pub chunks: usize,
    /// First token, counted over this PE's tokens.
    pub start: usize,
    /// Tokens.
    pub len: usize,
}

/// One part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Number among the parts of all segments of the rank.
    pub number: usize,
    /// First chunk, counted from the segment's first.
    pub first_chunk: usize,
    /// Chunks, at least 1.
    pub chunks: usize,
}

impl Parts {
    /// How `rank` cuts its segments.
    pub fn of(rank: &RankPlan, config: &Config, room: Room) -> Self {
        let chunks = |segment: &Segment| segment.len.div_ceil(config.chunk);
        let all: usize = rank.segments.iter().map(chunks).sum();
        let count = |segment: &Segment| match config.segments {
            Segments::Auto => room.parts(chunks(segment), all),
            Segments::At(count) => count.get().min(chunks(segment)).max(1),
        };
        if config.mode == Mode::Exact {
            return Self::default();
        }
        let counts: Vec<u32> = rank.segments.iter().map(|segment| count(segment) as u32).collect();
        if counts.iter().all(|&count| count == 1) { Self::default() } else { Self { counts } }
    }

    /// Parts of segment `segment`; 1 if it is walked whole.
    pub fn count(&self, segment: usize) -> usize {
        self.counts.get(segment).map_or(1, |&count| count as usize)
    }

    /// Parts of the segment that has most.
    pub fn most(&self) -> usize {
        self.counts.iter().copied().max().unwrap_or(1) as usize
    }

    /// Lanes that parts have, behind those of segments: one for each part.
    pub fn lanes(&self) -> usize {
        self.counts.iter().filter(|&&count| count > 1).map(|&count| count as usize).sum()
    }

    /// The parts of segment `segment`, which has `chunks` chunks, in the order of tokens; none if it is walked whole. Their lengths
    /// differ by at most one chunk.
    pub fn parts(&self, segment: usize, chunks: usize) -> impl Iterator<Item = Part> + use<> {
        let count = self.count(segment);
        let before: usize = match count {
            1 => 0,
            _ => self.counts[..segment].iter().filter(|&&count| count > 1).map(|&count| count as usize).sum(),
        };
        let first = move |i: usize| i * (chunks / count) + i.min(chunks % count);
        (0..if count > 1 { count } else { 0 }).map(move |i| Part {
            number: before + i,
            first_chunk: first(i),
            chunks: first(i + 1) - first(i),
        })
    }

    /// What is walked by itself of `rank`, in the order of tokens; lanes are those in which it receives.
    pub fn walks(&self, rank: &RankPlan, chunk: usize) -> Vec<Walk> {
        let lanes = rank.receiving().count();
        let mut walks = Vec::new();
        for (index, segment) in rank.segments.iter().enumerate() {
            let chunks = segment.len.div_ceil(chunk);
            let lane = segment.receive.as_ref().map(|receive| receive.lane);
            if self.count(index) == 1 {
                walks.push(Walk { lane, chunks, start: segment.start, len: segment.len });
                continue;
            }
            for (i, part) in self.parts(index, chunks).enumerate() {
                let lane = (i > 0 || lane.is_some()).then_some(lanes + part.number);
                let (from, to) = (part.first_chunk * chunk, (part.first_chunk + part.chunks) * chunk);
                let len = to.min(segment.len) - from;
                walks.push(Walk { lane, chunks: part.chunks, start: segment.start + from, len });
            }
        }
        walks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Cuts, Plan};

    fn config(segments: Segments) -> Config {
        Config { segments, chunk: 64, ..Config::default() }
    }

    fn at(count: usize) -> Segments {
        Segments::At(count.try_into().unwrap())
    }

    const ROOM: Room = Room { multiprocessors: 132, blocks: 16 };

    /// Parts of one sequence of `tokens` tokens that has a PE for itself.
    fn chosen(tokens: usize, room: Room) -> usize {
        let plan = Plan::batch(1, tokens, &Cuts::equal(1)).unwrap();
        Parts::of(&plan.ranks[0], &config(Segments::Auto), room).count(0)
    }

    #[test]
    fn one_long_sequence_with_few_heads_fills_the_multiprocessors_at_most_once() {
        // 8 heads with two blocks each.
        assert_eq!(chosen(32768, ROOM), 8);
        assert_eq!([8, 32, 45, 64].map(|blocks| chosen(32768, Room { blocks, ..ROOM })), [9, 1, 1, 1]);
        assert_eq!(chosen(32768, Room { multiprocessors: 1, blocks: 1 }), 1);
        // One head could be cut into 66, but each part has to be merged.
        let most = chosen(32768, Room { blocks: 2, ..ROOM });
        assert!((6..20).contains(&most), "{most}");
    }

    #[test]
    fn what_was_measured_to_be_slower_in_parts_is_walked_whole() {
        // 8 heads and 8192 tokens, slow gates: 218 us whole, 249 and more in parts.
        assert_eq!(chosen(8192, ROOM), 1);
        // 32 heads.
        assert_eq!(chosen(8192, Room { blocks: 64, ..ROOM }), 1);
        assert_eq!(chosen(1024, Room { blocks: 1, ..ROOM }), 1);
    }

    #[test]
    fn many_and_short_sequences_are_walked_whole_beside_a_long_one() {
        let plan = Plan::packed(&[0, 640, 640, 40_000, 40_100], &Cuts::equal(1)).unwrap();
        let parts = Parts::of(&plan.ranks[0], &config(Segments::Auto), ROOM);
        assert_eq!([0, 1, 2, 3].map(|segment| parts.count(segment)), [1, 1, 7, 1]);
        assert_eq!((parts.lanes(), parts.most()), (7, 7));
        let batch = Plan::batch(8, 4096, &Cuts::equal(1)).unwrap();
        assert_eq!(Parts::of(&batch.ranks[0], &config(Segments::Auto), ROOM), Parts::default());
    }

    #[test]
    fn parts_lie_between_chunks_and_cover_the_segment() {
        let plan = Plan::packed(&[0, 100, 1000], &Cuts::at(vec![350])).unwrap();
        let parts = Parts::of(&plan.ranks[1], &config(at(4)), ROOM);
        // 650 tokens are 11 chunks.
        let walks = parts.walks(&plan.ranks[1], 64);
        let said = |walks: &[Walk]| walks.iter().map(|w| (w.lane, w.chunks, w.start, w.len)).collect::<Vec<_>>();
        let middle = [(Some(1), 3, 0, 192), (Some(2), 3, 192, 192), (Some(3), 3, 384, 192), (Some(4), 2, 576, 74)];
        assert_eq!(said(&walks), middle);
        let parts = Parts::of(&plan.ranks[0], &config(at(3)), ROOM);
        let walks = said(&parts.walks(&plan.ranks[0], 64));
        // Two chunks make two parts; the sequence starts here, so nothing comes before its first part.
        assert_eq!(walks[..2], [(None, 1, 0, 64), (Some(1), 1, 64, 36)]);
        assert_eq!(walks[2..], [(None, 2, 100, 128), (Some(3), 1, 228, 64), (Some(4), 1, 292, 58)]);
    }

    #[test]
    fn exact_mode_and_a_single_part_are_whole() {
        let plan = Plan::batch(1, 1000, &Cuts::equal(2)).unwrap();
        let exact = Config { mode: Mode::Exact, ..config(at(3)) };
        assert_eq!(Parts::of(&plan.ranks[0], &exact, ROOM), Parts::default());
        assert_eq!(Parts::of(&plan.ranks[0], &config(at(1)), ROOM), Parts::default());
        assert_eq!(Parts::of(&plan.ranks[1], &config(at(1)), ROOM).walks(&plan.ranks[1], 64)[0].lane, Some(0));
    }
}
