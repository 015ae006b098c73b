//! Properties of plans: whatever the sequences and the cuts, tokens are shared out once and senders and receivers agree.

use std::collections::{BTreeMap, BTreeSet};

use deltalink::plan::{Cuts, Exchange, Layout, Plan, Sizes};
use proptest::prelude::*;

const SIZES: Sizes = Sizes { hv: 2, k: 32, v: 48, m_bytes: 2 };

/// Packed sequences (also empty ones) and batches, cut evenly or anywhere (also in one place more than once).
fn plans() -> impl Strategy<Value = Plan> {
    let layouts = prop_oneof![
        prop::collection::vec(prop_oneof![1 => Just(0_usize), 3 => 0..40_usize], 0..8).prop_map(|lens| {
            let mut cu_seqlens = vec![0];
            for len in lens {
                cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + len);
            }
            Layout::Packed { cu_seqlens }
        }),
        (0..4_usize, 0..60_usize).prop_map(|(b, t)| Layout::Batch { b, t }),
    ];
    layouts.prop_flat_map(|layout| {
        let t = layout.tokens();
        let even = (1..=t.clamp(1, 9)).prop_map(Cuts::equal);
        let anywhere = prop::collection::vec(0..=t, 0..9).prop_map(|mut at| {
            at.sort_unstable();
            Cuts::at(at)
        });
        prop_oneof![even, anywhere].prop_map(move |cuts| make(&layout, &cuts))
    })
}

fn make(layout: &Layout, cuts: &Cuts) -> Plan {
    match layout {
        Layout::Packed { cu_seqlens } => Plan::packed(cu_seqlens, cuts).unwrap(),
        Layout::Batch { b, t } => Plan::batch(*b, *t, cuts).unwrap(),
    }
}

/// `(rank, index of the segment)` of every segment of a sequence, in rank order.
fn pieces(plan: &Plan, seq: usize) -> Vec<(usize, usize)> {
    let all = plan.ranks.iter().enumerate().flat_map(|(r, rank)| (0..rank.segments.len()).map(move |i| (r, i)));
    all.filter(|&(r, i)| plan.ranks[r].segments[i].seq == seq).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn local_tokens_are_partitioned_by_segments(plan in plans()) {
        let mut total = 0;
        for (r, rank) in plan.ranks.iter().enumerate() {
            prop_assert_eq!(rank.tokens, plan.cuts[r + 1] - plan.cuts[r]);
            let mut at = 0;
            for segment in &rank.segments {
                prop_assert_eq!(segment.start, at);
                at += segment.len;
            }
            prop_assert_eq!(at, rank.batch * rank.tokens);
            total += at;
        }
        let want: usize = (0..plan.layout.sequences()).map(|s| plan.layout.range(s)).map(|(a, b)| b - a).sum();
        prop_assert_eq!(total, want);
    }

    #[test]
    fn segments_in_rank_order_are_the_sequence(plan in plans()) {
        for seq in 0..plan.layout.sequences() {
            let (begin, end) = plan.layout.range(seq);
            let mut at = begin;
            for (r, i) in pieces(&plan, seq) {
                let (rank, segment) = (&plan.ranks[r], &plan.ranks[r].segments[i]);
                let row = if matches!(plan.layout, Layout::Batch { .. }) { seq } else { 0 };
                prop_assert_eq!(plan.cuts[r] + segment.start - row * rank.tokens, at);
                prop_assert!(segment.len > 0 || begin == end);
                at += segment.len;
            }
            prop_assert_eq!(at, end);
        }
    }

    #[test]
    fn every_sequence_starts_once_and_ends_once(plan in plans()) {
        let n = plan.layout.sequences();
        let all = |f: fn(&deltalink::plan::RankPlan) -> &Vec<usize>| -> Vec<usize> {
            plan.ranks.iter().flat_map(|rank| f(rank).iter().copied()).collect()
        };
        // Rank order is sequence order, so these are 0, 1, 2 ... but for the rows of a batch, which share ranks anyway.
        prop_assert_eq!(all(|r| &r.starts), (0..n).collect::<Vec<_>>());
        prop_assert_eq!(all(|r| &r.ends), (0..n).collect::<Vec<_>>());
        for seq in 0..n {
            let pieces = pieces(&plan, seq);
            for (at, &(r, i)) in pieces.iter().enumerate() {
                let (rank, segment) = (&plan.ranks[r], &plan.ranks[r].segments[i]);
                prop_assert_eq!(segment.initial.is_some(), at == 0);
                prop_assert_eq!(segment.final_row.is_some(), at + 1 == pieces.len());
                prop_assert!(segment.initial.is_none_or(|row| rank.starts[row] == seq));
                prop_assert!(segment.final_row.is_none_or(|row| rank.ends[row] == seq));
                // A segment starts from a state of the caller's or from one that it receives, never both.
                prop_assert_eq!(segment.initial.is_none(), segment.receive.is_some());
                prop_assert_eq!(segment.final_row.is_none(), segment.send.is_some());
            }
        }
    }

    #[test]
    fn a_start_lies_on_the_rank_that_holds_its_position(plan in plans()) {
        for seq in 0..plan.layout.sequences() {
            let (begin, _) = plan.layout.range(seq);
            let r = plan.ranks.iter().position(|rank| rank.starts.contains(&seq)).unwrap();
            let holds = |r: usize| plan.cuts[r] <= begin && begin < plan.cuts[r + 1];
            prop_assert!(holds(r) || (begin == plan.layout.tokens() && r + 1 == plan.pes()));
        }
    }

    #[test]
    fn receivers_mirror_senders(plan in plans()) {
        let mut sent = BTreeMap::new();
        let mut received = BTreeMap::new();
        for (r, rank) in plan.ranks.iter().enumerate() {
            for (lane, (segment, send)) in rank.sending().enumerate() {
                prop_assert_eq!(send.lane, lane);
                prop_assert!(send.to.is_sorted_by(|a, b| a.rank < b.rank));
                prop_assert_eq!(send.next(), send.to[0]);
                for target in &send.to {
                    prop_assert!(target.rank > r);
                    prop_assert!(sent.insert((r, target.rank, segment.seq), target.lane).is_none());
                }
            }
            for (lane, (segment, receive)) in rank.receiving().enumerate() {
                prop_assert_eq!(receive.lane, lane);
                prop_assert!(receive.lane < plan.lanes);
                prop_assert!(receive.from.is_sorted_by(|a, b| a < b));
                prop_assert_eq!(Some(&receive.previous()), receive.from.last());
                prop_assert_eq!(Some(&receive.origin()), receive.from.first());
                for &from in &receive.from {
                    received.insert((from, r, segment.seq), receive.lane);
                }
            }
        }
        prop_assert_eq!(sent, received);
        let lanes = plan.ranks.iter().map(|rank| rank.receiving().count()).max();
        prop_assert_eq!(Some(plan.lanes), lanes);
    }

    #[test]
    fn sources_and_targets_are_all_other_ranks_with_tokens_of_the_sequence(plan in plans()) {
        for seq in 0..plan.layout.sequences() {
            let pieces = pieces(&plan, seq);
            for (at, &(r, i)) in pieces.iter().enumerate() {
                let segment = &plan.ranks[r].segments[i];
                let from: Vec<_> = segment.receive.iter().flat_map(|x| x.from.iter().copied()).collect();
                let to: Vec<_> = segment.send.iter().flat_map(|x| x.to.iter().map(|t| t.rank)).collect();
                let ranks = |p: &[(usize, usize)]| p.iter().map(|&(r, _)| r).collect::<Vec<_>>();
                prop_assert_eq!(from, ranks(&pieces[..at]));
                prop_assert_eq!(to, ranks(&pieces[at + 1..]));
            }
        }
    }

    #[test]
    fn ranks_without_tokens_are_silent(plan in plans()) {
        let senders_and_receivers: BTreeSet<_> =
            plan.traffic(&SIZES, Exchange::Push).iter().flat_map(|m| [m.from, m.to]).collect();
        for (r, rank) in plan.ranks.iter().enumerate().filter(|(_, rank)| rank.tokens == 0) {
            prop_assert!(!senders_and_receivers.contains(&r));
            prop_assert_eq!(rank.sending().count() + rank.receiving().count(), 0);
        }
    }

    #[test]
    fn cuts_between_sequences_send_nothing(lens in prop::collection::vec(0..20_usize, 0..10), keep in any::<u16>()) {
        let mut cu_seqlens = vec![0];
        for len in lens {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + len);
        }
        let at: Vec<usize> = cu_seqlens.iter().copied().enumerate().filter(|(i, _)| keep >> i & 1 == 1).map(|x| x.1).collect();
        let plan = Plan::packed(&cu_seqlens, &Cuts::at(at)).unwrap();
        prop_assert_eq!(plan.traffic(&SIZES, Exchange::Push), vec![]);
        prop_assert_eq!(plan.traffic(&SIZES, Exchange::Chain), vec![]);
        prop_assert_eq!((plan.lanes, plan.span(), plan.heap_bytes(&SIZES).unwrap().total()), (0, 1, 0));
    }

    #[test]
    fn traffic_is_what_the_segments_say(plan in plans()) {
        let push = plan.traffic(&SIZES, Exchange::Push);
        let chain = plan.traffic(&SIZES, Exchange::Chain);
        for (r, rank) in plan.ranks.iter().enumerate() {
            let out: usize = rank.sending().map(|(_, send)| send.to.len()).sum();
            let into: usize = rank.receiving().map(|(_, receive)| receive.from.len()).sum();
            prop_assert_eq!(push.iter().filter(|m| m.from == r).count(), out);
            prop_assert_eq!(push.iter().filter(|m| m.to == r).count(), into);
            // In the chain each state is handed on once.
            prop_assert_eq!(chain.iter().filter(|m| m.from == r).count(), rank.sending().count());
            prop_assert_eq!(chain.iter().filter(|m| m.to == r).count(), rank.receiving().count());
            for (segment, receive) in rank.receiving() {
                let previous = chain.iter().find(|m| m.to == r && m.seq == segment.seq).unwrap().from;
                prop_assert_eq!(previous, receive.previous());
            }
        }
        for m in &push {
            prop_assert_eq!(m.bytes_s, 2 * 32 * 48 * 4);
            // The summary of the rank on which the sequence starts is absolute.
            let absolute = plan.ranks[m.from].starts.contains(&m.seq);
            prop_assert_eq!(m.bytes_m, if absolute { 0 } else { 2 * 32 * 32 * 2 });
        }
        prop_assert!(chain.iter().all(|m| m.bytes_m == 0 && push.iter().any(|p| (p.from, p.to, p.seq) == (m.from, m.to, m.seq))));
    }

    /// The backward pass: whoever received now sends, to the rows that await it, and everything flows from right to left.
    #[test]
    fn in_the_mirror_receivers_send_and_senders_receive(plan in plans()) {
        let mirrored = plan.mirrored();
        let (mut sent, mut received) = (BTreeMap::new(), BTreeMap::new());
        for (r, (rank, forward)) in mirrored.ranks.iter().zip(&plan.ranks).enumerate() {
            prop_assert_eq!((rank.batch, rank.tokens), (forward.batch, forward.tokens));
            prop_assert_eq!((&rank.starts, &rank.ends), (&forward.ends, &forward.starts));
            if rank.tokens == 0 {
                prop_assert_eq!(rank.sending().count() + rank.receiving().count(), 0);
            }
            for (lane, (segment, send)) in rank.sending().enumerate() {
                prop_assert_eq!(send.lane, lane);
                prop_assert!(send.to.is_sorted_by(|a, b| a.rank > b.rank));
                for target in &send.to {
                    prop_assert!(target.rank < r, "rank {} sends to {}", r, target.rank);
                    prop_assert!(sent.insert((r, target.rank, segment.seq), target.lane).is_none());
                }
            }
            for (lane, (segment, receive)) in rank.receiving().enumerate() {
                prop_assert_eq!(receive.lane, lane);
                prop_assert!(lane < mirrored.lanes);
                prop_assert!(receive.from.is_sorted_by(|a, b| a > b));
                prop_assert_eq!(receive.from.last(), Some(&receive.previous()));
                // Where the flow begins the gradient is absolute: there the sequence ends.
                prop_assert!(plan.ranks[receive.origin()].ends.contains(&segment.seq));
                for &from in &receive.from {
                    received.insert((from, r, segment.seq), receive.lane);
                }
            }
        }
        prop_assert_eq!(&sent, &received);
        let forward: BTreeSet<_> = plan.ranks.iter().enumerate().flat_map(|(r, rank)| {
            rank.sending().flat_map(move |(s, send)| send.to.iter().map(move |t| (t.rank, r, s.seq)))
        }).collect();
        prop_assert_eq!(sent.keys().copied().collect::<BTreeSet<_>>(), forward);
        // So the slots of both directions are laid out alike.
        prop_assert_eq!(mirrored.lanes, plan.lanes);
    }

    #[test]
    fn each_sequence_takes_its_gradient_once_where_it_ends_and_gives_one_where_it_starts(plan in plans()) {
        let mirrored = plan.mirrored();
        for seq in 0..plan.layout.sequences() {
            let pieces = pieces(&mirrored, seq);
            for (at, &(r, i)) in pieces.iter().enumerate() {
                let (rank, segment) = (&mirrored.ranks[r], &mirrored.ranks[r].segments[i]);
                prop_assert_eq!(segment.initial.is_some(), at + 1 == pieces.len());
                prop_assert_eq!(segment.final_row.is_some(), at == 0);
                prop_assert!(segment.initial.is_none_or(|row| rank.starts[row] == seq));
                prop_assert!(segment.final_row.is_none_or(|row| rank.ends[row] == seq));
                prop_assert_eq!(segment.initial.is_none(), segment.receive.is_some());
                prop_assert_eq!(segment.final_row.is_none(), segment.send.is_some());
                let forward = &plan.ranks[r].segments[i];
                prop_assert_eq!((segment.start, segment.len), (forward.start, forward.len));
            }
        }
    }

    #[test]
    fn the_mirror_of_the_mirror_is_the_plan(plan in plans()) {
        prop_assert_eq!(plan.mirrored().mirrored(), plan);
    }

    /// As many bytes flow back as forth, but for M: the rank that need not send it is the last one, not the first.
    #[test]
    fn traffic_of_the_mirror_comes_from_the_other_side(plan in plans()) {
        let mirrored = plan.mirrored();
        let (forth, back) = (plan.traffic(&SIZES, Exchange::Push), mirrored.traffic(&SIZES, Exchange::Push));
        let pairs = |messages: &[deltalink::plan::Message], turn: bool| -> BTreeSet<_> {
            messages.iter().map(|m| if turn { (m.to, m.from, m.seq) } else { (m.from, m.to, m.seq) }).collect()
        };
        prop_assert_eq!(pairs(&forth, true), pairs(&back, false));
        prop_assert_eq!(forth.iter().map(|m| m.bytes_s).sum::<usize>(), back.iter().map(|m| m.bytes_s).sum::<usize>());
        for m in &back {
            prop_assert_eq!(m.bytes_m == 0, plan.ranks[m.from].ends.contains(&m.seq));
        }
        prop_assert_eq!(plan.heap_bytes(&SIZES), mirrored.heap_bytes(&SIZES));
    }

    #[test]
    fn every_pe_computes_the_same_plan(plan in plans()) {
        let again = make(&plan.layout, &Cuts::offsets(plan.cuts.clone()));
        prop_assert_eq!(again, plan);
    }
}
