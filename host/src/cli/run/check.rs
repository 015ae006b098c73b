//! Whether results are right: against one PE, the f64 reference, and what the file expects.

use serde::Serialize;

use super::super::progress::Progress;
use super::RunCommandError;
use super::input::Job;
use crate::compare::{Error, against_file, mismatch, tolerance};
use crate::inputs::StateLayout;
use crate::op::whole::{self, Whole};
use crate::op::{Config, OpError};
use crate::plan::{Cuts, Layout, Plan};
use crate::reference::{Problem, recurrent, transition_weight};
use crate::tensor::Tensor;
use crate::world::WorldOptions;

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

/// What came of all comparisons of one input.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Largest relative RMS error that is allowed.
    pub tolerance: f64,
    /// Against the f64 reference.
    pub reference: Pair,
    /// Against one PE.
    pub one_pe: Pair,
    /// Against the results in the file, those that it has; none if the inputs were rounded after they were made.
    pub file: Vec<(String, Compared)>,
    /// Largest `|M S_in| / |S_out|` over PEs and heads.
    pub transition_weight: f64,
    /// What is off by more than allowed, with the first place. Absent if the inputs are not finite: then nothing is
    /// judged.
    pub mismatches: Option<Vec<String>>,
}

/// Both results widened, the states K-first.
struct Found {
    o: Vec<f64>,
    ht: Vec<f64>,
}

impl Found {
    fn new(whole: &Whole, layout: StateLayout) -> Self {
        let ht = whole.final_state.as_ref().map_or_else(Vec::new, |ht| k_first(ht, layout));
        Self { o: whole.o.data.to_f64(), ht }
    }

    fn against(&self, expected: &Found) -> Pair {
        Pair { o: Error::of(&self.o, &expected.o).into(), ht: Error::of(&self.ht, &expected.ht).into() }
    }
}

/// `plan`'s problem on one PE.
pub(crate) fn on_one_pe(plan: &Plan) -> Plan {
    let cuts = Cuts::equal(1);
    match &plan.layout {
        Layout::Packed { cu_seqlens } => Plan::packed(cu_seqlens, &cuts),
        Layout::Batch { b, t } => Plan::batch(*b, *t, &cuts),
    }
    .expect("what was planned for several PEs can be planned for one")
}

/// Elements `[N,HV,K,V]` of `state`, which lies as `layout` says.
pub(crate) fn k_first(state: &Tensor, layout: StateLayout) -> Vec<f64> {
    let data = state.data.to_f64();
    match layout {
        StateLayout::KFirst => data,
        StateLayout::VFirst => {
            let (v, k) = (state.shape[2], state.shape[3]);
            data.chunks_exact(v * k).flat_map(|s| (0..k * v).map(|i| s[i % v * k + i / v])).collect()
        }
    }
}

/// Computes `job` on one PE and in f64, and compares.
pub(super) fn check(
    job: &Job,
    whole: &Whole,
    config: &Config,
    progress: &Progress,
) -> Result<Verdict, RunCommandError> {
    let inputs = job.file.inputs();
    let layout = inputs.state_layout;
    let tolerance = tolerance(inputs.dtype(), job.regime());
    let found = Found::new(whole, layout);

    progress.start(format!("{}: computing on one PE", job.name));
    let config = Config { trace: false, ..config.clone() };
    let one = whole::forward(&on_one_pe(&job.plan), &inputs, &config, &WorldOptions::default())
        .map_err(|source: OpError| RunCommandError::Compute { input: format!("{} on one PE", job.name), source })?;
    let one = Found::new(&one, layout);
    progress.done();

    progress.start(format!("{}: computing the f64 reference", job.name));
    let problem = Problem::new(&inputs, job.file.cu_seqlens().as_deref())
        .map_err(|source| RunCommandError::Problem { input: job.name.clone(), source })?;
    let reference = recurrent(&problem);
    let reference = Found { o: reference.o, ht: reference.ht };
    progress.done();

    progress.start(format!("{}: comparing", job.name));
    let transition_weight = transition_weight(&problem, &job.plan.cuts).max;
    let dims = problem.dims;
    let states = [job.plan.layout.sequences(), dims.hv, dims.k, dims.v];
    let mut mismatches: Vec<String> = Vec::new();
    for (what, expected) in [("one PE", &one), ("the f64 reference", &reference)] {
        let all = [("o", whole.o.shape.as_slice(), &found.o, &expected.o), ("ht", &states, &found.ht, &expected.ht)];
        mismatches.extend(all.into_iter().filter_map(|(name, shape, found, expected)| {
            Some(format!("against {what}: {}", mismatch(name, shape, found, expected, tolerance)?))
        }));
    }
    let mut file = Vec::new();
    if job.unrounded {
        let as_stored = whole.final_state.as_ref().map_or_else(Vec::new, |ht| ht.data.to_f64());
        for checked in against_file(&job.file, &[("o", &found.o), ("ht", &as_stored)], tolerance) {
            mismatches.extend(checked.mismatch.map(|text| format!("against the file: {text}")));
            file.push((checked.name, checked.error.into()));
        }
    }
    progress.done();
    Ok(Verdict {
        tolerance,
        reference: found.against(&reference),
        one_pe: found.against(&one),
        file,
        transition_weight,
        mismatches: job.finite.then_some(mismatches),
    })
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
