//! From sequences and cuts to segments: one walk over the sequences, in order.

use super::{Layout, Plan, PlanError, RankPlan, Receive, Segment, Send, Target};

/// Checks offsets of packed sequences and returns where they end.
///
/// `tokens` is T where the tensors are known.
///
/// # Errors
/// [`PlanError`] if there are no offsets, the first is not 0, they descend, or the last is not `tokens`.
pub fn check_cu_seqlens(cu_seqlens: &[usize], tokens: Option<usize>) -> Result<usize, PlanError> {
    let (Some(&first), Some(&last)) = (cu_seqlens.first(), cu_seqlens.last()) else {
        return Err(PlanError::CuSeqlensEmpty);
    };
    if first != 0 {
        return Err(PlanError::CuSeqlensStart { found: first });
    }
    for (i, pair) in cu_seqlens.windows(2).enumerate() {
        if pair[1] < pair[0] {
            return Err(PlanError::CuSeqlensOrder { index: i + 1, previous: pair[0], found: pair[1] });
        }
    }
    match tokens {
        Some(tokens) if tokens != last => Err(PlanError::CuSeqlensEnd { found: last, tokens }),
        _ => Ok(last),
    }
}

/// `cuts` are P + 1 offsets from 0 to the layout's T that do not descend, and `layout` passed [`check_cu_seqlens`].
pub(super) fn build(layout: Layout, cuts: Vec<usize>) -> Plan {
    let batch = match layout {
        Layout::Packed { .. } => 1,
        Layout::Batch { b, .. } => b,
    };
    let ranks: Vec<RankPlan> =
        cuts.windows(2).map(|c| RankPlan { batch, tokens: c[1] - c[0], ..RankPlan::default() }).collect();
    let mut builder = Builder { sent: vec![0; ranks.len()], received: vec![0; ranks.len()], cuts: &cuts, ranks };
    for seq in 0..layout.sequences() {
        let (begin, end) = layout.range(seq);
        let row = match layout {
            Layout::Packed { .. } => 0,
            Layout::Batch { .. } => seq,
        };
        builder.sequence(seq, row, begin, end);
    }
    let lanes = builder.received.iter().copied().max().unwrap_or(0);
    let ranks = builder.ranks;
    Plan { layout, cuts, ranks, lanes }
}

struct Builder<'a> {
    cuts: &'a [usize],
    ranks: Vec<RankPlan>,
    /// Sending segments so far, by rank.
    sent: Vec<usize>,
    /// Receiving segments so far, by rank.
    received: Vec<usize>,
}

impl Builder<'_> {
    fn sequence(&mut self, seq: usize, row: usize, begin: usize, end: usize) {
        let holders = self.holders(begin, end);
        // Every holder but the first receives; its lane is known before any sender names it.
        let targets: Vec<Target> =
            holders[1..].iter().map(|&rank| Target { rank, lane: self.received[rank] }).collect();
        for (i, &rank) in holders.iter().enumerate() {
            let (left, right) = (self.cuts[rank], self.cuts[rank + 1]);
            let from = begin.max(left);
            let len = end.min(right).saturating_sub(from);
            let receive = (i > 0).then(|| {
                self.received[rank] += 1;
                Receive { lane: targets[i - 1].lane, from: holders[..i].to_vec() }
            });
            let send = (i + 1 < holders.len()).then(|| {
                self.sent[rank] += 1;
                Send { lane: self.sent[rank] - 1, to: targets[i..].to_vec() }
            });
            let plan = &mut self.ranks[rank];
            let initial = (i == 0).then(|| push_row(&mut plan.starts, seq));
            let final_row = (i + 1 == holders.len()).then(|| push_row(&mut plan.ends, seq));
            let start = row * plan.tokens + (from - left);
            plan.segments.push(Segment { seq, start, len, initial, final_row, receive, send });
        }
    }

    /// The ranks that hold tokens of `begin..end`, ascending; for an empty range the one that holds its position.
    fn holders(&self, begin: usize, end: usize) -> Vec<usize> {
        let pes = self.ranks.len();
        // The first rank that reaches beyond `begin`; it is never an empty one. None does if begin = T.
        let first = self.cuts[1..].partition_point(|&cut| cut <= begin).min(pes - 1);
        let rest = (first + 1..pes).take_while(|&r| self.cuts[r] < end).filter(|&r| self.ranks[r].tokens > 0);
        std::iter::once(first).chain(rest).collect()
    }
}

fn push_row(rows: &mut Vec<usize>, seq: usize) -> usize {
    rows.push(seq);
    rows.len() - 1
}

#[cfg(test)]
mod tests {
    use super::super::Cuts;
    use super::*;

    fn segment(seq: usize, start: usize, len: usize, initial: Option<usize>, final_row: Option<usize>) -> Segment {
        Segment { seq, start, len, initial, final_row, receive: None, send: None }
    }

    fn to(rank: usize) -> Target {
        Target { rank, lane: 0 }
    }

    #[test]
    fn a_sequence_over_three_ranks_skips_the_empty_one() {
        let plan = Plan::packed(&[0, 9], &Cuts::at(vec![3, 3, 5])).unwrap();
        assert_eq!(plan.cuts, [0, 3, 3, 5, 9]);
        assert_eq!(plan.lanes, 1);
        assert_eq!(
            plan.ranks[0].segments,
            [Segment { send: Some(Send { lane: 0, to: vec![to(2), to(3)] }), ..segment(0, 0, 3, Some(0), None) }]
        );
        assert_eq!(plan.ranks[1], RankPlan { batch: 1, ..RankPlan::default() });
        assert_eq!(
            plan.ranks[2].segments,
            [Segment {
                receive: Some(Receive { lane: 0, from: vec![0] }),
                send: Some(Send { lane: 0, to: vec![to(3)] }),
                ..segment(0, 0, 2, None, None)
            }]
        );
        assert_eq!(
            plan.ranks[3].segments,
            [Segment { receive: Some(Receive { lane: 0, from: vec![0, 2] }), ..segment(0, 0, 4, None, Some(0)) }]
        );
        let last = plan.ranks[3].segments[0].receive.as_ref().unwrap();
        assert_eq!((last.origin(), last.previous()), (0, 2));
        assert_eq!(plan.span(), 3);
    }

    #[test]
    fn a_cut_between_sequences_sends_nothing() {
        let plan = Plan::packed(&[0, 4, 8], &Cuts::equal(2)).unwrap();
        assert_eq!((plan.lanes, plan.span()), (0, 1));
        assert_eq!(plan.ranks[0].segments, [segment(0, 0, 4, Some(0), Some(0))]);
        assert_eq!(plan.ranks[1].segments, [segment(1, 0, 4, Some(0), Some(0))]);
    }

    #[test]
    fn sequences_without_tokens_start_and_end_where_their_position_is() {
        // Sequences 0 (before everything), 2 (at the cut), 4 and 5 (at the very end) are empty.
        let plan = Plan::packed(&[0, 0, 3, 3, 6, 6, 6], &Cuts::at(vec![3])).unwrap();
        assert_eq!(plan.ranks[0].starts, [0, 1]);
        assert_eq!(plan.ranks[0].ends, [0, 1]);
        assert_eq!(plan.ranks[1].starts, [2, 3, 4, 5]);
        assert_eq!(
            plan.ranks[1].segments,
            [
                segment(2, 0, 0, Some(0), Some(0)),
                segment(3, 0, 3, Some(1), Some(1)),
                segment(4, 3, 0, Some(2), Some(2)),
                segment(5, 3, 0, Some(3), Some(3)),
            ]
        );
        assert_eq!(plan.lanes, 0);
    }

    #[test]
    fn an_empty_sequence_next_to_empty_ranks() {
        // Ranks 0, 2 and 4 are empty. Position 2 is held by rank 3; position T = 4 by nobody: the last rank takes it.
        let plan = Plan::packed(&[0, 2, 2, 4, 4], &Cuts::at(vec![0, 2, 2, 4])).unwrap();
        let starts: Vec<_> = plan.ranks.iter().map(|r| r.starts.clone()).collect();
        assert_eq!(starts, [vec![], vec![0], vec![], vec![1, 2], vec![3]]);
        assert_eq!(plan.ranks[4].segments, [segment(3, 0, 0, Some(0), Some(0))]);
    }

    #[test]
    fn every_row_of_a_batch_has_its_own_lane() {
        let plan = Plan::batch(2, 5, &Cuts::equal(2)).unwrap();
        assert_eq!((plan.lanes, plan.ranks[0].batch, plan.ranks[0].tokens, plan.ranks[1].tokens), (2, 2, 3, 2));
        let second = &plan.ranks[0].segments[1];
        assert_eq!((second.seq, second.start, second.len, second.initial), (1, 3, 3, Some(1)));
        assert_eq!(second.send, Some(Send { lane: 1, to: vec![Target { rank: 1, lane: 1 }] }));
        let received = &plan.ranks[1].segments[1];
        assert_eq!((received.seq, received.start, received.len, received.final_row), (1, 2, 2, Some(1)));
        assert_eq!(received.receive, Some(Receive { lane: 1, from: vec![0] }));
    }

    #[test]
    fn nothing_at_all_is_a_plan_too() {
        let plan = Plan::packed(&[0], &Cuts::equal(1)).unwrap();
        assert_eq!(plan.ranks, [RankPlan { batch: 1, ..RankPlan::default() }]);
        let plan = Plan::batch(1, 0, &Cuts::at(vec![0])).unwrap();
        assert_eq!(plan.ranks[1].segments, [segment(0, 0, 0, Some(0), Some(0))]);
    }

    #[test]
    fn offsets_are_checked() {
        assert_eq!(check_cu_seqlens(&[], None), Err(PlanError::CuSeqlensEmpty));
        assert_eq!(check_cu_seqlens(&[1, 2], None), Err(PlanError::CuSeqlensStart { found: 1 }));
        assert_eq!(
            check_cu_seqlens(&[0, 5, 4], None).unwrap_err().to_string(),
            "cu_seqlens[2] = 4 is below cu_seqlens[1] = 5; offsets must not descend (are these lengths? then sum them up)"
        );
        assert_eq!(check_cu_seqlens(&[0, 5], Some(6)), Err(PlanError::CuSeqlensEnd { found: 5, tokens: 6 }));
        assert_eq!(check_cu_seqlens(&[0, 5], Some(5)), Ok(5));
    }
}
