//! The backward pass's view of a plan: the same segments with every role turned around.
//!
//! Gradients of states flow from the end of a sequence to its start. `dS_out`, the gradient of the state at a segment's right
//! edge, comes from the ranks after it, as `S_in` came from those before:
//!
//! 1. each rank walks its own tokens backward from a zero gradient and gets `dS_ext`; together with the transition `M` of the
//!    forward pass it maps the gradient at its right edge to the one at its left edge: `dS_in = M^T dS_out + dS_ext`;
//! 2. it sends both to every earlier rank that holds tokens of the sequence;
//! 3. each of those merges what it received, from the last rank of the sequence to the next one after it.
//!
//! The last rank of a sequence starts from the gradient of the final state itself, so its `dS` is absolute and it sends no
//! `M`: in everything it plays the part that the first one has in the forward pass.

use super::{Plan, RankPlan, Receive, Segment, Send, Target};

impl Plan {
    /// This plan as the backward pass sees it: who sends and receives gradients of states. Senders and receivers change
    /// places, and so do the first and the last rank of a sequence: [`Segment::initial`] is the row of the
    /// final states' gradients, in [`RankPlan::starts`], where the sequence ends; [`Segment::final_row`] that of the initial
    /// states' gradients, in [`RankPlan::ends`], where it starts. Tokens and segments stay as they are, and lists of
    /// ranks are in the order of the flow: [`Receive::origin`] is the last rank of the sequence, [`Receive::previous`] and
    /// [`Send::next`] are neighbours.
    ///
    /// ```
    /// use deltalink::plan::{Cuts, Plan};
    /// let plan = Plan::batch(1, 9, &Cuts::at(vec![3, 6])).unwrap();
    /// let backward = plan.mirrored();
    /// let receive = backward.ranks[0].segments[0].receive.as_ref().unwrap();
    /// assert_eq!((&receive.from[..], receive.origin(), receive.previous()), (&[2, 1][..], 2, 1));
    /// assert_eq!(backward.mirrored(), plan);
    /// ```
    pub fn mirrored(&self) -> Plan {
        let ranks: Vec<RankPlan> = (0..self.pes()).map(|rank| self.mirrored_rank(rank)).collect();
        let lanes = ranks.iter().map(|rank| rank.receiving().count()).max().unwrap_or(0);
        Plan { layout: self.layout.clone(), cuts: self.cuts.clone(), ranks, lanes }
    }

    fn mirrored_rank(&self, rank: usize) -> RankPlan {
        let RankPlan { batch, tokens, segments, starts, ends } = &self.ranks[rank];
        let segments = segments.iter().map(|segment| self.mirrored_segment(segment)).collect();
        RankPlan { batch: *batch, tokens: *tokens, segments, starts: ends.clone(), ends: starts.clone() }
    }

    fn mirrored_segment(&self, segment: &Segment) -> Segment {
        let Segment { seq, start, len, initial, final_row, receive, send } = segment;
        Segment {
            seq: *seq,
            start: *start,
            len: *len,
            initial: *final_row,
            final_row: *initial,
            receive: send.as_ref().map(|Send { lane, to }| Receive {
                lane: *lane,
                from: to.iter().rev().map(|target| target.rank).collect(),
            }),
            send: receive.as_ref().map(|Receive { lane, from }| Send {
                lane: *lane,
                to: from.iter().rev().map(|&rank| Target { rank, lane: self.sending_lane(rank, *seq) }).collect(),
            }),
        }
    }

    /// The lane of the segment of `seq` among those that `rank` sends.
    fn sending_lane(&self, rank: usize, seq: usize) -> usize {
        let segments = &self.ranks[rank].segments;
        let at = segments.partition_point(|segment| segment.seq < seq);
        let send = segments[at].send.as_ref().expect("a plan's sends mirror its receives");
        send.lane
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cuts;
    use super::*;

    #[test]
    fn the_last_rank_of_a_sequence_is_where_the_flow_begins() {
        // The second rank is empty.
        let plan = Plan::packed(&[0, 9, 12], &Cuts::at(vec![3, 3, 5])).unwrap();
        let backward = plan.mirrored();
        let segment = |rank: usize, i: usize| backward.ranks[rank].segments[i].clone();
        let to = |rank| Target { rank, lane: 0 };
        let first = segment(0, 0);
        assert_eq!((first.initial, first.final_row), (None, Some(0)));
        assert_eq!((first.receive, first.send), (Some(Receive { lane: 0, from: vec![3, 2] }), None));
        assert!(backward.ranks[1].segments.is_empty());
        let middle = segment(2, 0);
        assert_eq!(middle.receive, Some(Receive { lane: 0, from: vec![3] }));
        assert_eq!(middle.send, Some(Send { lane: 0, to: vec![to(0)] }));
        let last = segment(3, 0);
        assert_eq!((last.initial, last.receive), (Some(0), None));
        assert_eq!(last.send, Some(Send { lane: 0, to: vec![to(2), to(0)] }));
        assert_eq!((segment(3, 1).receive, segment(3, 1).send), (None, None));
        assert_eq!((&backward.ranks[3].starts[..], &backward.ranks[3].ends[..]), (&[0, 1][..], &[1][..]));
    }

    #[test]
    fn rows_of_a_batch_keep_their_lanes() {
        let backward = Plan::batch(3, 7, &Cuts::equal(2)).unwrap().mirrored();
        assert_eq!(backward.lanes, 3);
        for row in 0..3 {
            let (left, right) = (&backward.ranks[0].segments[row], &backward.ranks[1].segments[row]);
            assert_eq!(left.receive, Some(Receive { lane: row, from: vec![1] }));
            assert_eq!(right.send, Some(Send { lane: row, to: vec![Target { rank: 0, lane: row }] }));
        }
    }
}
