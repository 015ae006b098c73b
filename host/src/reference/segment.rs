//! What a run of tokens does to the state, and how much of it an earlier rank's state still makes up.

use std::ops::Range;

use rayon::prelude::*;

use super::recurrent::State;
use super::{Problem, heads};

/// The affine map of a run of tokens of one sequence, `S_out = M S_in + S_ext`: `(M [K,K], S_ext [K,V])`.
///
/// The run is walked once from `[0 | I]` with values `[v | 0]`, which ends at `[S_ext | M]`. No tokens give `(I, 0)`.
pub fn segment_summary(p: &Problem, head: usize, tokens: Range<usize>) -> (Vec<f64>, Vec<f64>) {
    let (k, v) = (p.dims.k, p.dims.v);
    let identity: Vec<f64> = (0..k * k).map(|i| if i / k == i % k { 1.0 } else { 0.0 }).collect();
    let mut state = State::beside(k, &[&vec![0.0; k * v], &identity]);
    state.advance(p, head, tokens);
    (state.slice(v..v + k), state.slice(0..v))
}

/// The state `[K,V]` before `token` (counted over the flattened tokens) of the sequence that owns it.
///
/// # Panics
/// If there is no such token.
pub fn state_at(p: &Problem, head: usize, token: usize) -> Vec<f64> {
    let n = p.sequence_of(token).expect("a token of the problem");
    let mut state = State { columns: p.dims.v, rows: p.initial_state(n, head) };
    state.advance(p, head, p.sequences[n].start..token);
    state.rows
}

/// How much the transition matters: `|M S_in| / |S_out|` (Frobenius) of the pieces of sequences that arrive from an
/// earlier rank. A test of context parallelism in which these are near 0 would pass with a wrong `M`.
#[derive(Clone, Debug, PartialEq)]
pub struct TransitionWeight {
    /// `[P][HV]`: of each rank's last piece, if its sequence arrived from an earlier rank; otherwise 0. Over batch rows, the
    /// largest.
    pub ranks: Vec<Vec<f64>>,
    /// Largest of `ranks`.
    pub max: f64,
    /// Largest over pieces whose sequence goes on to a later rank: there the `M` that a rank sends is used.
    pub max_forwarded: f64,
    /// Largest over pieces at whose end the sequence ends: there `M` shows in the final state only.
    pub max_ending: f64,
}

/// Measures [`TransitionWeight`] for ranks that own the tokens `cuts[r]..cuts[r+1]` of every batch row (of the one row, if
/// sequences are packed).
///
/// # Panics
/// If `cuts` is not ascending from 0 to T.
pub fn transition_weight(p: &Problem, cuts: &[usize]) -> TransitionWeight {
    assert!(
        cuts.first() == Some(&0) && cuts.last() == Some(&p.dims.t) && cuts.is_sorted(),
        "cuts {cuts:?} must ascend from 0 to T = {}",
        p.dims.t
    );
    let mut weight = TransitionWeight {
        ranks: vec![vec![0.0; p.dims.hv]; cuts.len() - 1],
        max: 0.0,
        max_forwarded: 0.0,
        max_ending: 0.0,
    };
    let measured: Vec<_> = heads(p).into_par_iter().flat_map_iter(|(n, head)| arrivals(p, n, head, cuts)).collect();
    for Arrival { rank, head, ratio, forwarded, last } in measured {
        let largest = if forwarded { &mut weight.max_forwarded } else { &mut weight.max_ending };
        *largest = largest.max(ratio);
        if last {
            let entry = &mut weight.ranks[rank][head];
            *entry = entry.max(ratio);
            weight.max = weight.max.max(ratio);
        }
    }
    weight
}

/// A piece of a sequence whose state comes from an earlier rank.
struct Arrival {
    rank: usize,
    head: usize,
    ratio: f64,
    /// The sequence goes on after the piece.
    forwarded: bool,
    /// The piece is the rank's last.
    last: bool,
}

/// Walks one head of one sequence from rank to rank.
fn arrivals(p: &Problem, n: usize, head: usize, cuts: &[usize]) -> Vec<Arrival> {
    let (k, v) = (p.dims.k, p.dims.v);
    let sequence = p.sequences[n];
    let row = if p.dims.b == 1 { 0 } else { n * p.dims.t }; // first token of the sequence's batch row
    let mut s = p.initial_state(n, head);
    let mut found = Vec::new();
    for (rank, cut) in cuts.windows(2).enumerate() {
        let (start, end) = ((cut[0] + row).max(sequence.start), (cut[1] + row).min(sequence.end));
        if start >= end {
            continue;
        }
        // [S | S] with values [v | 0] becomes [S_out | M S].
        let mut state = State::beside(k, &[&s, &s]);
        state.advance(p, head, start..end);
        s = state.slice(0..v);
        if start > sequence.start {
            let (carried, whole) = (norm(&state.slice(v..2 * v)), norm(&s));
            let ratio = if carried == 0.0 { 0.0 } else { carried / whole };
            found.push(Arrival { rank, head, ratio, forwarded: end < sequence.end, last: end == cut[1] + row });
        }
    }
    found
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}
