//! The backward pass token by token: the adjoint of the definition, from the last token to the first.

use std::ops::Range;

use super::recurrent::State;
use super::seeds::Seeds;
use super::{HeadGradients, Problem};

/// States are kept before every so many tokens, and computed again in between: all of them would be T K V numbers.
const KEPT_EVERY: usize = 64;

/// Gradients of one run of tokens of one value head, from the state `s_in` `[K,V]` before it and the gradient `ds_out` of
/// the state after it.
pub(super) fn walk(
    p: &Problem,
    seeds: &Seeds,
    head: usize,
    tokens: Range<usize>,
    s_in: &[f64],
    ds_out: &[f64],
) -> HeadGradients {
    let blocks: Vec<_> =
        tokens.clone().step_by(KEPT_EVERY).map(|start| start..(start + KEPT_EVERY).min(tokens.end)).collect();
    let mut state = State { columns: p.dims.v, rows: s_in.to_vec() };
    let mut kept = Vec::with_capacity(blocks.len());
    for block in &blocks {
        kept.push(state.rows.clone());
        state.advance(p, head, block.clone());
    }
    let mut found = HeadGradients::zeros(p, tokens.len(), ds_out);
    for (block, first) in blocks.into_iter().zip(kept).rev() {
        let mut states = vec![first];
        for token in block.clone() {
            let mut state = State { columns: p.dims.v, rows: states[states.len() - 1].clone() };
            state.advance(p, head, token..token + 1);
            states.push(state.rows);
        }
        for (token, around) in block.zip(states.windows(2)).rev() {
            found.step(p, seeds, head, token, token - tokens.start, around);
        }
    }
    found
}

impl HeadGradients {
    /// Back over one token, the `i`-th of the run, from the gradient of the state after it to that of the state before
    /// it, the states being `around`. With D the decayed state, r = v - D^T k what the token writes and X the gradient of the state after it:
    ///
    /// ```text
    /// X  = dS + scale q do^T                    dq = scale S do
    /// z  = beta X^T k                           dv = z        dbeta = r . X^T k
    /// dk = beta X r - D z                       dD = X - k z^T
    /// dg = rowsum(dD * D)                       dS = Diag(exp g) dD
    /// ```
    fn step(&mut self, p: &Problem, seeds: &Seeds, head: usize, token: usize, i: usize, around: &[Vec<f64>]) {
        let (before, after) = (&around[0], &around[1]);
        let (kd, vd) = (p.dims.k, p.dims.v);
        let (q, k, v, g, beta) =
            (p.q(token, head), p.k(token, head), p.v(token, head), p.g(token, head), p.beta(token, head));
        let d_o = seeds.d_o(p, token, head);
        let decay: Vec<f64> = g.iter().map(|g| g.exp()).collect();
        let decayed: Vec<f64> = before.iter().enumerate().map(|(at, s)| s * decay[at / vd]).collect();

        let (mut r, mut y) = (v.to_vec(), vec![0.0; vd]);
        for (c, (x, d)) in self.d_state.chunks_exact_mut(vd).zip(decayed.chunks_exact(vd)).enumerate() {
            self.dq[i * kd + c] = p.scale * dot(&after[c * vd..][..vd], d_o);
            for j in 0..vd {
                x[j] += p.scale * q[c] * d_o[j];
                y[j] += k[c] * x[j];
                r[j] -= k[c] * d[j];
            }
        }
        self.dbeta[i] = dot(&r, &y);
        let z: Vec<f64> = y.iter().map(|y| beta * y).collect();
        for (c, (x, d)) in self.d_state.chunks_exact_mut(vd).zip(decayed.chunks_exact(vd)).enumerate() {
            self.dk[i * kd + c] = beta * dot(x, &r) - dot(d, &z);
            x.iter_mut().zip(&z).for_each(|(x, z)| *x -= k[c] * z);
            self.dg[i * kd + c] = dot(x, d);
            x.iter_mut().for_each(|x| *x *= decay[c]);
        }
        self.dv[i * vd..][..vd].copy_from_slice(&z);
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
