//! Token by token: the definition itself.

use std::ops::Range;

use rayon::prelude::*;

use super::{HeadOutputs, Outputs, Problem, heads};

/// The definition, one token after the other.
pub fn recurrent(p: &Problem) -> Outputs {
    let parts = heads(p)
        .into_par_iter()
        .map(|(n, head)| {
            let mut state = State { columns: p.dims.v, rows: p.initial_state(n, head) };
            let tokens = p.sequences[n].tokens();
            let mut o = vec![0.0; tokens.len() * p.dims.v];
            for (token, o) in tokens.zip(o.chunks_exact_mut(p.dims.v)) {
                state.update(p, token, head);
                state.read(p, token, head, o);
            }
            HeadOutputs { o, state: state.rows }
        })
        .collect();
    Outputs::gather(p, parts)
}

/// A state of K rows. The first V columns are the state proper; columns beyond V belong to a token whose value is zero
/// there, so they show what the transition alone makes of what they held: that is how `M` is computed.
pub(super) struct State {
    pub columns: usize,
    pub rows: Vec<f64>,
}

impl State {
    /// Columns of several `[K, _]` matrices side by side.
    pub fn beside(k: usize, parts: &[&[f64]]) -> Self {
        let columns = parts.iter().map(|m| m.len() / k).sum();
        let row = |i: usize| parts.iter().flat_map(move |m| &m[i * (m.len() / k)..][..m.len() / k]);
        State { columns, rows: (0..k).flat_map(row).copied().collect() }
    }

    /// Columns `range` as a `[K, range.len()]` matrix.
    pub fn slice(&self, range: Range<usize>) -> Vec<f64> {
        self.rows.chunks_exact(self.columns).flat_map(|row| &row[range.clone()]).copied().collect()
    }

    /// Walks `tokens` without reading the state.
    pub fn advance(&mut self, p: &Problem, head: usize, tokens: Range<usize>) {
        for token in tokens {
            self.update(p, token, head);
        }
    }

    /// `S <- Diag(exp g) S`, then `S <- S + k beta (v - S^T k)^T`.
    fn update(&mut self, p: &Problem, token: usize, head: usize) {
        let k = p.k(token, head);
        let mut held = vec![0.0; self.columns]; // S^T k: what the decayed state holds for this key
        for ((row, &k), &g) in self.rows.chunks_exact_mut(self.columns).zip(k).zip(p.g(token, head)) {
            let decay = g.exp();
            for (s, held) in row.iter_mut().zip(&mut held) {
                *s *= decay;
                *held += *s * k;
            }
        }
        let beta = p.beta(token, head);
        let v = p.v(token, head).iter().copied().chain(std::iter::repeat(0.0));
        let step: Vec<f64> = held.iter().zip(v).map(|(held, v)| beta * (v - held)).collect();
        for (row, &k) in self.rows.chunks_exact_mut(self.columns).zip(k) {
            for (s, step) in row.iter_mut().zip(&step) {
                *s += k * step;
            }
        }
    }

    /// `o = scale * S^T q`.
    fn read(&self, p: &Problem, token: usize, head: usize, o: &mut [f64]) {
        for (row, &q) in self.rows.chunks_exact(self.columns).zip(p.q(token, head)) {
            let q = p.scale * q;
            for (o, s) in o.iter_mut().zip(row) {
                *o += q * s;
            }
        }
    }
}
