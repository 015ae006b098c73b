//! How results are judged, by `run` and `verify` alike.

use std::num::NonZeroUsize;

use serde::Serialize;

use crate::compare::{Allowance, Error, Regime, mismatch, tolerance};
use crate::inputs::StateLayout;
use crate::op::whole::Whole;
use crate::op::{Config, Mode, Segments};
use crate::plan::{Cuts, Layout, Plan};
use crate::reference::{Outputs, Problem};
use crate::tensor::{Dtype, Tensor};

/// Unit roundoff of bf16.
const BF16_ROUNDOFF: f64 = 1.0 / 512.0;

/// Largest relative RMS error that is allowed.
pub(super) fn allowed(dtype: Dtype, regime: Regime, config: &Config, plan: &Plan) -> f64 {
    tolerance(dtype, regime).hypot(m_rounding(dtype, config, plan))
}

/// What the transitions M that travel in bf16 add: each a rounding error of its own, which is independent of the others, so they
/// add up in squares.
fn m_rounding(dtype: Dtype, config: &Config, plan: &Plan) -> f64 {
    // The first rank of a sequence sends no M, the last one sends nothing. (Backward, it is the other way round.)
    let rounded = match config.m_wire.resolve(dtype) {
        Dtype::Bf16 if config.mode != Mode::Exact => plan.span().saturating_sub(2),
        _ => 0,
    };
    (rounded as f64).sqrt() * BF16_ROUNDOFF
}

/// What gradients may be off against the f64 reference beyond the usual.
pub(super) fn allowance(dtype: Dtype, config: &Config, plan: &Plan) -> Allowance {
    // States and gradients of states have both passed through M where they meet.
    Allowance { rounding: std::f64::consts::SQRT_2 * m_rounding(dtype, config, plan), factor: 1.0 }
}

/// The same for the difference of two results, each of which may be off by `allowed`: rounding errors of different orders of
/// summation are independent, so they add up in squares.
pub(super) fn allowed_between(allowed: f64) -> f64 {
    std::f64::consts::SQRT_2 * allowed
}

/// How far one tensor is off.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// `|found - expected| / |expected|` in the 2-norm.
    pub rel_rms: f64,
    /// Largest `|found - expected|`.
    pub max_abs: f64,
}

impl From<Error> for Compared {
    fn from(error: Error) -> Self {
        Self { rel_rms: error.rel_rms, max_abs: error.max_abs }
    }
}

/// How far both results are off.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// Outputs.
    pub o: Compared,
    /// Final states.
    pub ht: Compared,
}

/// Both results widened, the states K-first.
pub(super) struct Found {
    /// `[B,T,HV,V]`.
    pub o: Vec<f64>,
    /// `[N,HV,K,V]`.
    pub ht: Vec<f64>,
}

impl Found {
    /// A result whose states lie as `layout` says.
    pub fn new(whole: &Whole, layout: StateLayout) -> Self {
        let ht = whole.final_state.as_ref().map_or_else(Vec::new, |ht| k_first(ht, layout));
        Self { o: whole.o.data.to_f64(), ht }
    }

    /// How far off this is.
    pub fn against(&self, expected: &Found) -> Pair {
        Pair { o: Error::of(&self.o, &expected.o).into(), ht: Error::of(&self.ht, &expected.ht).into() }
    }

    /// What is off by more than `tolerance`, with the first place; `what` says what `expected` is.
    pub fn mismatches(&self, expected: &Found, what: &str, problem: &Problem, tolerance: f64) -> Vec<String> {
        let d = problem.dims;
        let o = mismatch("o", &[d.b, d.t, d.hv, d.v], &self.o, &expected.o, tolerance);
        let states = [problem.sequences.len(), d.hv, d.k, d.v];
        let ht = mismatch("ht", &states, &self.ht, &expected.ht, tolerance);
        [o, ht].into_iter().flatten().map(|text| format!("against {what}: {text}")).collect()
    }
}

impl From<Outputs> for Found {
    fn from(reference: Outputs) -> Self {
        Self { o: reference.o, ht: reference.ht }
    }
}

/// `plan`'s problem on one PE.
pub(super) fn on_one_pe(plan: &Plan) -> Plan {
    let cuts = Cuts::equal(1);
    match &plan.layout {
        Layout::Packed { cu_seqlens } => Plan::packed(cu_seqlens, &cuts),
        Layout::Batch { b, t } => Plan::batch(*b, *t, &cuts),
    }
    .expect("what was planned for several PEs can be planned for one")
}

/// The options `config` for one PE that others are compared with: it walks every segment whole.
pub(super) fn on_one(config: Config) -> Config {
    Config { segments: Segments::At(NonZeroUsize::MIN), ..config }
}

/// Elements `[N,HV,K,V]` of `state`, which lies as `layout` says.
fn k_first(state: &Tensor, layout: StateLayout) -> Vec<f64> {
    let data = state.data.to_f64();
    match layout {
        StateLayout::KFirst => data,
        StateLayout::VFirst => {
            let (v, k) = (state.shape[2], state.shape[3]);
            data.chunks_exact(v * k).flat_map(|s| (0..k * v).map(|i| s[i % v * k + i / v])).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Buffer;

    #[test]
    fn states_are_compared_k_first() {
        // K = 3, V = 2; row v holds channels k.
        let stored = Tensor { shape: vec![1, 1, 2, 3], data: Buffer::F32(vec![0., 1., 2., 10., 11., 12.]) };
        assert_eq!(k_first(&stored, StateLayout::VFirst), [0., 10., 1., 11., 2., 12.]);
    }
}
