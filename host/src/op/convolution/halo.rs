//! Who needs which rows next to a cut, and who holds them: from the plan and the number of taps alone.
//!
//! A sequence is a line of W-1 places for its initial state, its tokens, and W-1 places for the gradients of its final state.
//! Whoever holds the first tokens holds the places before them, whoever holds the last ones those behind. A segment
//! needs the W-1 places next to it (forward: before it, backward: after it) from every PE that holds some of them.

use crate::plan::{Plan, Segment};

use super::Direction;

/// Rows that one PE sends to another for one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// Receiver.
    pub dest: usize,
    /// Its lane.
    pub lane: usize,
    /// Index of the sender's segment.
    pub segment: usize,
    /// The first row, counted from the segment's first token: negative inside the initial state.
    pub position: isize,
    /// The first row among the receiver's W-1.
    pub first_row: usize,
    /// Rows, at least 1.
    pub rows: usize,
}

/// Rows that a PE gets from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    /// Sender.
    pub pe: usize,
    /// The first of its rows among the W-1.
    pub first_row: usize,
    /// Rows, at least 1.
    pub rows: usize,
}

/// What one rank sends and receives in one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Halos {
    /// By sequence, the nearest receiver first.
    pub sends: Vec<Message>,
    /// By segment: the sources of its halo, none if it needs none.
    pub sources: Vec<Vec<Source>>,
    /// By segment, backward: how many of the W-1 rows after it are tokens.
    pub real: Vec<usize>,
}

/// The segment of sequence `seq` on `rank`.
fn segment_of(plan: &Plan, rank: usize, seq: usize) -> &Segment {
    let held = plan.ranks[rank].segments.iter().find(|segment| segment.seq == seq);
    held.expect("a plan's sends and receives name ranks that hold the sequence")
}

/// Lanes in which halos arrive, at most, on any rank.
pub(super) fn lanes(plan: &Plan, direction: Direction) -> usize {
    let of_rank = |rank: &crate::plan::RankPlan| match direction {
        Direction::Forward => rank.receiving().count(),
        Direction::Backward => rank.sending().count(),
    };
    plan.ranks.iter().map(of_rank).max().unwrap_or(0)
}

impl Halos {
    /// Of `rank`, with `reach` = W-1.
    pub fn new(plan: &Plan, rank: usize, reach: usize, direction: Direction) -> Self {
        let mut halos = Self::default();
        for (index, segment) in plan.ranks[rank].segments.iter().enumerate() {
            let earlier = segment.receive.iter().flat_map(|receive| receive.from.iter().rev().copied());
            let later = segment.send.iter().flat_map(|send| send.to.iter().map(|target| target.rank));
            let (from, to): (Vec<usize>, Vec<usize>) = match direction {
                Direction::Forward => (earlier.collect(), later.collect()),
                Direction::Backward => (later.collect(), earlier.collect()),
            };
            let tokens: usize = from.iter().map(|&pe| segment_of(plan, pe, segment.seq).len).sum();
            halos.real.push(tokens.min(reach));
            halos.sources.push(sources(plan, segment.seq, reach, direction, &from));
            halos.send(plan, (index, segment), reach, direction, &to);
        }
        halos
    }

    fn send(&mut self, plan: &Plan, (index, own): (usize, &Segment), reach: usize, direction: Direction, to: &[usize]) {
        // Tokens between the receiver's segment and this one.
        let mut distance = 0;
        for &dest in to {
            if distance >= reach {
                break;
            }
            let theirs = segment_of(plan, dest, own.seq);
            let rows = held(own, direction, reach - distance);
            let lane = match direction {
                Direction::Forward => theirs.receive.as_ref().map(|receive| receive.lane),
                Direction::Backward => theirs.send.as_ref().map(|send| send.lane),
            };
            let (position, first_row) = match direction {
                Direction::Forward => (own.len as isize - rows as isize, reach - distance - rows),
                Direction::Backward => (0, distance),
            };
            let lane = lane.expect("a plan's sends mirror its receives");
            self.sends.push(Message { dest, lane, segment: index, position, first_row, rows });
            distance += theirs.len;
        }
    }
}

/// How many of the `missing` places next to a receiver a segment holds.
fn held(segment: &Segment, direction: Direction, missing: usize) -> usize {
    let has_state = match direction {
        Direction::Forward => segment.initial.is_some(),
        Direction::Backward => segment.final_row.is_some(),
    };
    if has_state { missing } else { missing.min(segment.len) }
}

/// Sources of a halo: `from`, the nearest first, as far as they are needed.
fn sources(plan: &Plan, seq: usize, reach: usize, direction: Direction, from: &[usize]) -> Vec<Source> {
    let mut sources = Vec::new();
    let mut distance = 0;
    for &pe in from {
        if distance >= reach {
            break;
        }
        let theirs = segment_of(plan, pe, seq);
        let rows = held(theirs, direction, reach - distance);
        let first_row = match direction {
            Direction::Forward => reach - distance - rows,
            Direction::Backward => distance,
        };
        sources.push(Source { pe, first_row, rows });
        distance += theirs.len;
    }
    sources
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Cuts;

    const BOTH: [Direction; 2] = [Direction::Forward, Direction::Backward];

    #[test]
    fn one_token_each_needs_rows_of_several_ranks() {
        // 6 tokens on ranks of 2, 1, 0, 1 and 2; W = 4.
        let plan = Plan::packed(&[0, 6], &Cuts::at(vec![2, 3, 3, 4])).unwrap();
        let last = Halos::new(&plan, 4, 3, Direction::Forward);
        let source = |pe, first_row, rows| Source { pe, first_row, rows };
        assert_eq!(last.sources, [vec![source(3, 2, 1), source(1, 1, 1), source(0, 0, 1)]]);
        let first = Halos::new(&plan, 0, 3, Direction::Forward);
        let message =
            |dest, position, first_row, rows| Message { dest, lane: 0, segment: 0, position, first_row, rows };
        // Rank 1 needs a row of the initial state, too.
        assert_eq!(first.sends, [message(1, -1, 0, 3), message(3, 0, 0, 2), message(4, 1, 0, 1)]);
        let back = Halos::new(&plan, 4, 3, Direction::Backward);
        // Rank 3 needs both tokens and the first gradient of the final state.
        assert_eq!(back.sends, [message(3, 0, 0, 3), message(1, 0, 1, 2), message(0, 0, 2, 1)]);
        assert_eq!(Halos::new(&plan, 3, 3, Direction::Backward).real, [2]);
        assert_eq!(Halos::new(&plan, 2, 3, Direction::Forward), Halos::default());
    }

    #[test]
    fn every_halo_is_covered_once_by_messages_that_are_sent() {
        let plans = [
            Plan::packed(&[0, 1, 1, 9, 12, 30], &Cuts::at(vec![0, 4, 5, 5, 6, 10, 29])).unwrap(),
            Plan::packed(&[0, 40], &Cuts::equal(8)).unwrap(),
            Plan::packed(&[0, 3], &Cuts::at(vec![1, 2])).unwrap(),
            Plan::batch(3, 7, &Cuts::at(vec![1, 1, 2, 4])).unwrap(),
        ];
        for (plan, direction) in plans.iter().flat_map(|plan| BOTH.map(|direction| (plan, direction))) {
            for reach in 1..8 {
                let halos: Vec<_> = (0..plan.pes()).map(|rank| Halos::new(plan, rank, reach, direction)).collect();
                let mut sent = 0;
                for (rank, halo) in halos.iter().enumerate() {
                    sent += halo.sends.len();
                    for (index, sources) in halo.sources.iter().enumerate() {
                        let segment = &plan.ranks[rank].segments[index];
                        let lane = match direction {
                            Direction::Forward => segment.receive.as_ref().map(|receive| receive.lane),
                            Direction::Backward => segment.send.as_ref().map(|send| send.lane),
                        };
                        let mut covered = vec![0; reach];
                        for source in sources {
                            let message = halos[source.pe].sends.iter().find(|message| {
                                (message.dest, Some(message.lane)) == (rank, lane)
                                    && plan.ranks[source.pe].segments[message.segment].seq == segment.seq
                            });
                            let message = message.unwrap_or_else(|| panic!("{plan:?}: {source:?} to {rank}"));
                            assert_eq!((message.first_row, message.rows), (source.first_row, source.rows));
                            sent -= 1;
                            covered[source.first_row..][..source.rows].iter_mut().for_each(|row| *row += 1);
                        }
                        let want = if lane.is_some() { vec![1; reach] } else { vec![0; reach] };
                        assert_eq!(covered, want, "{plan:?}, rank {rank}, reach {reach}");
                    }
                }
                assert_eq!(sent, 0, "messages that nobody awaits");
            }
        }
    }
}
