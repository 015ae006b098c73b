//! Steps on emulated GPUs against the f64 reference.

use cuda_std::emulated::Schedule;
use deltalink::compare::{Checked, Error, Regime, gradients, mismatch, tolerance};
use deltalink::exec::cpu::Cpu;
use deltalink::exec::{ExecError, Executor};
use deltalink::generate::Spec;
use deltalink::inputs::{Inputs, StateLayout};
use deltalink::op::whole::{Share, UpstreamShare, Whole, join, join_backward, one_backward};
use deltalink::op::{Config, ContextParallel, CutReport, Forward, OpError};
use deltalink::plan::{Cuts, Plan};
use deltalink::reference::{self, Outputs, Problem, recurrent};
use deltalink::tensor::Tensor;
use deltalink::world::{Pe, RunError, WorldOptions, run_threads};

use crate::Emulated;

/// How a problem is run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Which tokens each PE has.
    pub cuts: Cuts,
    /// Options of the operation.
    pub config: Config,
    /// Order of events.
    pub schedule: Schedule,
    /// Blocks of a PE that run at the same time.
    pub workers: usize,
    /// Whether bodies for Hopper run where they fit.
    pub hopper: bool,
    /// Multiprocessors that a PE says it has.
    pub multiprocessors: usize,
    /// How demanding the problem is, which says how far off results may be.
    pub regime: Regime,
}

impl Run {
    /// On `pes` PEs with equal shares, one block at a time on each, with bodies for Hopper.
    pub fn on(pes: usize) -> Self {
        let (config, schedule) = (Config::default(), Schedule::default());
        let (cuts, regime) = (Cuts::equal(pes), Regime::Ordinary);
        Self { cuts, config, schedule, workers: 1, hopper: true, multiprocessors: 1, regime }
    }
}

/// How far the results are from the reference.
#[derive(Clone, Debug)]
pub struct Compared {
    /// Entries of the device module that ran on the last PE, in order.
    pub launched: Vec<String>,
    /// Each result: the outputs, the final states, then the gradients if there are any.
    pub results: Vec<Checked>,
    /// What each PE left out of transitions.
    pub cuts: Vec<CutReport>,
    /// Parts of the segment that each PE cut into most.
    pub parts: Vec<usize>,
}

impl Compared {
    /// The accounts of results that are too far off.
    pub fn mismatches(&self) -> Vec<&String> {
        self.results.iter().filter_map(|result| result.mismatch.as_ref()).collect()
    }
}

/// Runs the problem forward, and compares outputs and final states as `deltalink verify` does.
///
/// # Errors
/// What failed, with the kernel's fault if it was one.
///
/// # Panics
/// If the states are not K-first.
pub fn forward(spec: &Spec, run: &Run) -> Result<Compared, String> {
    let case = spec.generate();
    let (whole, cu_seqlens) = (case.inputs(), case.cu_seqlens());
    let plan = plan(&whole, cu_seqlens, run)?;
    let (parts, launched) = on_all_pes(&plan, run, |pe, op| forward_part(&plan, &whole, pe, op))?;
    let (cuts, counts) = parts.iter().map(|part| (part.report.cut, part.report.parts)).unzip();
    let problem = Problem::new(&whole, cu_seqlens).map_err(|error| error.to_string())?;
    let results = against(&join(&plan, &whole, parts), &recurrent(&problem), spec, run);
    Ok(Compared { launched, results, cuts, parts: counts })
}

/// Runs the problem forward and backward, and compares all results and gradients.
///
/// # Errors
/// As [`forward`].
///
/// # Panics
/// As [`forward`].
pub fn backward(spec: &Spec, run: &Run) -> Result<Compared, String> {
    let (case, upstream) = (spec.generate(), spec.generate_upstream(run.config.final_state));
    let (whole, cu_seqlens) = (case.inputs(), case.cu_seqlens());
    let plan = plan(&whole, cu_seqlens, run)?;
    let (parts, launched) = on_all_pes(&plan, run, |pe, op| {
        let share = Share::new(&plan, pe.rank(), &whole);
        let upstream = UpstreamShare::new(&plan, pe.rank(), &upstream.view());
        one_backward(op, &plan, &share.inputs(&whole), &upstream.view())
    })?;
    let (cuts, counts) = parts.iter().map(|part| (part.forward.report.cut, part.forward.report.parts)).unzip();
    let problem = Problem::new(&whole, cu_seqlens).map_err(|error| error.to_string())?;
    let joined = join_backward(&plan, &whole, parts);
    let expected = reference::backward(&problem, &upstream.view()).map_err(|error| error.to_string())?;
    let mut results = against(&joined.forward, &recurrent(&problem), spec, run);
    results.extend(gradients(&whole, &problem, &joined.gradients.to_f64(), &expected));
    Ok(Compared { launched, results, cuts, parts: counts })
}

fn plan(whole: &Inputs<'_>, cu_seqlens: Option<&[usize]>, run: &Run) -> Result<Plan, String> {
    let plan = match cu_seqlens {
        Some(cu_seqlens) => Plan::packed(cu_seqlens, &run.cuts),
        None => Plan::batch(whole.q.shape()[0], whole.q.shape()[1], &run.cuts),
    };
    plan.map_err(|error| error.to_string())
}

/// A PE's part of a forward step.
fn forward_part<X: Executor>(
    plan: &Plan,
    whole: &Inputs<'_>,
    pe: &Pe,
    op: &mut ContextParallel<'_, X>,
) -> Result<Forward, OpError> {
    let share = Share::new(plan, pe.rank(), whole);
    op.forward(plan, &share.inputs(whole))
}

/// What each PE's `body` returns, by rank, and what was launched on the last one.
fn on_all_pes<T: Send>(
    plan: &Plan,
    run: &Run,
    body: impl Fn(&Pe, &mut ContextParallel<'_, Emulated>) -> Result<T, OpError> + Sync,
) -> Result<(Vec<T>, Vec<String>), String> {
    let parts = run_threads(plan.pes(), &WorldOptions::default(), |pe| -> Result<_, OpError> {
        let exec = Emulated::new(run.workers, run.schedule, run.hopper).map_err(ExecError::from)?;
        let exec = exec.with_multiprocessors(run.multiprocessors);
        let launches = exec.launches();
        let mut op = ContextParallel::on(pe, run.config.clone(), exec)?;
        Ok((body(pe, &mut op)?, launches.names()))
    });
    let (parts, mut names): (Vec<_>, Vec<_>) = parts.map_err(|error| error.to_string())?.into_iter().unzip();
    Ok((parts, names.pop().unwrap_or_default()))
}

fn against(found: &Whole, expected: &Outputs, spec: &Spec, run: &Run) -> Vec<Checked> {
    assert_eq!(spec.state_layout, StateLayout::KFirst, "the reference's states are K-first");
    let limit = tolerance(spec.dtype, run.regime);
    let states = found.final_state.iter().map(|states| ("ht", states, &expected.ht));
    let check = |(name, found, expected): (&str, &Tensor, &Vec<f64>)| {
        let values = found.data.to_f64();
        let mismatch = mismatch(name, &found.shape, &values, expected, limit);
        Checked { name: name.into(), error: Error::of(&values, expected), mismatch }
    };
    [("o", &found.o, &expected.o)].into_iter().chain(states).map(check).collect()
}

/// Runs the problem forward on emulated GPUs and on the CPU back end, and tells how far results are from the latter's. None counts as
/// too far off.
///
/// # Errors
/// As [`forward`].
///
/// # Panics
/// As [`forward`].
pub fn beside_the_cpu(spec: &Spec, run: &Run) -> Result<Compared, String> {
    let case = spec.generate();
    let (whole, cu_seqlens) = (case.inputs(), case.cu_seqlens());
    let plan = plan(&whole, cu_seqlens, run)?;
    let (parts, launched) = on_all_pes(&plan, run, |pe, op| forward_part(&plan, &whole, pe, op))?;
    let on_cpu = run_threads(plan.pes(), &WorldOptions::default(), |pe| {
        let cpu = Cpu::new(1).map_err(ExecError::from)?;
        forward_part(&plan, &whole, pe, &mut ContextParallel::on(pe, run.config.clone(), cpu)?)
    });
    let on_cpu = on_cpu.map_err(|error: RunError<OpError>| error.to_string())?;
    let (cuts, counts) = parts.iter().map(|part| (part.report.cut, part.report.parts)).unzip();
    let (found, expected) = (join(&plan, &whole, parts), join(&plan, &whole, on_cpu));
    let states = found.final_state.iter().zip(&expected.final_state).map(|(found, expected)| ("ht", found, expected));
    let check = |(name, found, expected): (&str, &Tensor, &Tensor)| {
        let error = Error::of(&found.data.to_f64(), &expected.data.to_f64());
        Checked { name: name.into(), error, mismatch: None }
    };
    let results = [("o", &found.o, &expected.o)].into_iter().chain(states).map(check).collect();
    Ok(Compared { launched, results, cuts, parts: counts })
}
