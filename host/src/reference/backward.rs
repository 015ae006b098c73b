//! Both forms of the backward pass over whole problems.

use rayon::prelude::*;

use super::activation::through_activations;
use super::{Problem, Seeds, adjoint, adjoint_chunked, heads};
use crate::error::InputError;
use crate::gradients::{Gradients, Upstream};
use crate::inputs::StateLayout;

/// Gradients with respect to everything given, by the adjoint of [`super::recurrent`], token by token: shapes and layouts are
/// those of the inputs, also that of `d_initial_state`.
///
/// # Errors
/// [`InputError`], if `upstream` does not fit the problem.
pub fn backward(p: &Problem, upstream: &Upstream<'_>) -> Result<Gradients<Vec<f64>>, InputError> {
    let seeds = Seeds::new(p, upstream)?;
    Ok(over_heads(p, |n, head| {
        let (s_in, ds_out) = (p.initial_state(n, head), seeds.d_final_state(p, n, head));
        adjoint::walk(p, &seeds, head, p.sequences[n].tokens(), &s_in, &ds_out)
    }))
}

/// The same in the WY form with chunks of `chunk` tokens: the backward pass of [`super::chunked`].
///
/// # Errors
/// [`InputError`], if `upstream` does not fit the problem.
///
/// # Panics
/// If `chunk` is 0.
pub fn backward_chunked(p: &Problem, upstream: &Upstream<'_>, chunk: usize) -> Result<Gradients<Vec<f64>>, InputError> {
    assert!(chunk > 0, "a chunk needs at least one token");
    let seeds = Seeds::new(p, upstream)?;
    Ok(over_heads(p, |n, head| {
        let (s_in, ds_out) = (p.initial_state(n, head), seeds.d_final_state(p, n, head));
        adjoint_chunked::walk(p, &seeds, head, p.sequences[n].tokens(), chunk, &s_in, &ds_out)
    }))
}

/// Gradients of one run of tokens of one value head, with respect to what the recurrence reads: normalised rows of q and k,
/// the log decay of every key channel, the step size. Nothing is summed over heads.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadGradients {
    /// `[tokens,K]`.
    pub dq: Vec<f64>,
    /// `[tokens,K]`.
    pub dk: Vec<f64>,
    /// `[tokens,V]`.
    pub dv: Vec<f64>,
    /// `[tokens,K]`; the gradient of GDN's one decay is the sum of a row.
    pub dg: Vec<f64>,
    /// `[tokens]`.
    pub dbeta: Vec<f64>,
    /// `[K,V]`, of the state before the run.
    pub d_state: Vec<f64>,
}

impl HeadGradients {
    /// No gradients yet, and that of the state after a run of so many tokens.
    pub(super) fn zeros(p: &Problem, tokens: usize, d_state: &[f64]) -> Self {
        let (k, v) = (vec![0.0; tokens * p.dims.k], vec![0.0; tokens * p.dims.v]);
        let dbeta = vec![0.0; tokens];
        Self { dq: k.clone(), dk: k.clone(), dv: v, dg: k, dbeta, d_state: d_state.to_vec() }
    }
}

/// Puts together what `of` finds for every (sequence, value head), and goes on through the activations.
fn over_heads(p: &Problem, of: impl Fn(usize, usize) -> HeadGradients + Sync) -> Gradients<Vec<f64>> {
    let d = p.dims;
    let parts: Vec<_> = heads(p).into_par_iter().map(|(n, head)| of(n, head)).collect();
    let tokens = d.b * d.t;
    let mut all = Gradients {
        dq: vec![0.0; tokens * d.h * d.k],
        dk: vec![0.0; tokens * d.h * d.k],
        dv: vec![0.0; tokens * d.hv * d.v],
        dg: vec![0.0; tokens * d.hv * d.k],
        dbeta: vec![0.0; tokens * d.hv],
        da_log: None,
        ddt_bias: None,
        d_initial_state: p.has_initial_state().then(Vec::new),
    };
    for (part, (sequence, head)) in parts.iter().zip(heads(p)) {
        for (i, token) in p.sequences[sequence].tokens().enumerate() {
            let (own, shared) = (token * d.hv + head, p.shared_head(token, head));
            add(&mut all.dq, shared, &part.dq, i, d.k);
            add(&mut all.dk, shared, &part.dk, i, d.k);
            add(&mut all.dv, own, &part.dv, i, d.v);
            add(&mut all.dg, own, &part.dg, i, d.k);
            add(&mut all.dbeta, own, &part.dbeta, i, 1);
        }
        if let Some(states) = &mut all.d_initial_state {
            match p.layout {
                StateLayout::KFirst => states.extend(&part.d_state),
                StateLayout::VFirst => states.extend((0..d.k * d.v).map(|i| part.d_state[i % d.k * d.v + i / d.k])),
            }
        }
    }
    through_activations(p, all)
}

/// Adds row `from_row` of `from` to row `to_row` of `to`.
fn add(to: &mut [f64], to_row: usize, from: &[f64], from_row: usize, width: usize) {
    to[to_row * width..][..width].iter_mut().zip(&from[from_row * width..][..width]).for_each(|(to, from)| *to += from);
}
