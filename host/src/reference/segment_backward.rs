//! What a run of tokens does to the gradient of the state, from its end to its start.

use std::ops::Range;

use super::{HeadGradients, Problem, Seeds, adjoint};

/// `dS_ext` `[K,V]` of a run of tokens of one sequence: the gradient of the state before it, as far as it comes from the
/// outputs of these tokens. With the M of [`super::segment_summary`], `dS_in = M^T dS_out + dS_ext`.
pub fn gradient_summary(p: &Problem, seeds: &Seeds, head: usize, tokens: Range<usize>) -> Vec<f64> {
    // dS_ext depends on no state, so the run may start from any.
    let zero = vec![0.0; p.dims.k * p.dims.v];
    adjoint::walk(p, seeds, head, tokens, &zero, &zero).d_state
}

/// The gradient `[K,V]` that arrives at the state after `token` (counted over the flattened tokens): from the later tokens
/// of its sequence and from its final state. What `token` itself reads from that state for its output is not part of it.
///
/// # Panics
/// If there is no such token.
pub fn state_gradient_after(p: &Problem, seeds: &Seeds, head: usize, token: usize) -> Vec<f64> {
    let n = p.sequence_of(token).expect("a token of the problem");
    let zero = vec![0.0; p.dims.k * p.dims.v];
    let later = token + 1..p.sequences[n].end;
    adjoint::walk(p, seeds, head, later, &zero, &seeds.d_final_state(p, n, head)).d_state
}

/// Gradients of a run of tokens of one sequence and one value head, from the state `s_in` `[K,V]` before it and the gradient
/// `ds_out` `[K,V]` that arrives at the state after it: what one rank computes of the whole backward pass.
///
/// # Panics
/// If `s_in` or `ds_out` is not `[K,V]`.
pub fn segment_gradients(
    p: &Problem,
    seeds: &Seeds,
    head: usize,
    tokens: Range<usize>,
    s_in: &[f64],
    ds_out: &[f64],
) -> HeadGradients {
    let size = p.dims.k * p.dims.v;
    assert!(s_in.len() == size && ds_out.len() == size, "states and their gradients are [K,V]");
    adjoint::walk(p, seeds, head, tokens, s_in, ds_out)
}
