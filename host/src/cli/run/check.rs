//! Whether results are right: against one PE, the f64 reference, and what the file expects.

use super::super::judge::{Compared, Found, Pair, allowed, allowed_between, on_one, on_one_pe};
use super::super::progress::Progress;
use super::RunCommandError;
use super::input::Job;
use crate::compare::against_file;
use crate::op::whole::{self, Whole};
use crate::op::{Config, OpError};
use crate::reference::{Problem, recurrent, transition_weight};
use crate::world::WorldOptions;

/// What came of all comparisons of one input.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Verdict {
    /// Largest relative RMS error that is allowed against the f64 reference and the file.
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

/// Computes `job` on one PE and in f64, and compares.
pub(super) fn check(
    job: &Job,
    whole: &Whole,
    config: &Config,
    progress: &Progress,
) -> Result<Verdict, RunCommandError> {
    let inputs = job.file.inputs();
    let layout = inputs.state_layout;
    let tolerance = allowed(inputs.dtype(), job.regime(), config, &job.plan);
    let found = Found::new(whole, layout);

    progress.start(format!("{}: computing on one PE", job.name));
    let config = on_one(Config { trace: false, ..config.clone() });
    let one = whole::forward(&on_one_pe(&job.plan), &inputs, &config, &WorldOptions::default())
        .map_err(|source: OpError| RunCommandError::compute(&format!("{} on one PE", job.name), source))?;
    let one = Found::new(&one, layout);
    progress.done();

    progress.start(format!("{}: computing the f64 reference", job.name));
    let problem = Problem::new(&inputs, job.file.cu_seqlens().as_deref())
        .map_err(|source| RunCommandError::Problem { input: job.name.clone(), source })?;
    let reference = Found::from(recurrent(&problem));
    progress.done();

    progress.start(format!("{}: comparing", job.name));
    let transition_weight = transition_weight(&problem, &job.plan.cuts).max;
    let mut mismatches = found.mismatches(&one, "one PE", &problem, allowed_between(tolerance));
    mismatches.extend(found.mismatches(&reference, "the f64 reference", &problem, tolerance));
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
