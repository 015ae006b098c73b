//! What one PE does and notes.

use serde::{Deserialize, Serialize};

use super::Setup;
use super::inputs::{Gates, Tensors};
use crate::cli::progress::Progress;
use crate::exec::{Body, Executor, Waits};
use crate::inputs::Inputs;
use crate::op::{ContextParallel, CutReport, Mode, OpError, Report};
use crate::plan::Plan;
use crate::world::Pe;

/// What is measured with the same inputs, in each of the modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// Tokens of each PE.
    pub tokens: usize,
    pub gates: Gates,
}

/// One PE's samples of one mode.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Samples {
    pub mode: Mode,
    /// Whether the forward kernels that have a body for Hopper ran with it.
    pub hopper: bool,
    pub forward: Pass,
    pub backward: Option<Pass>,
}

/// Samples of a direction, one of each repeat.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Pass {
    pub device_us: Vec<f64>,
    pub exposed_wait_us: Vec<f64>,
    /// Launches of one kernel are added up.
    pub kernels: Vec<(String, Vec<f64>)>,
    pub bytes_sent: u64,
    /// Of one step: the same steps leave out the same.
    pub cut: CutReport,
    pub scratch_bytes: usize,
    pub peak_device_bytes: usize,
    pub waits: Waits,
}

impl Pass {
    fn note(&mut self, report: &Report) {
        let us = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let before = self.device_us.len();
        self.device_us.push(us(report.device_time));
        self.exposed_wait_us.push(us(report.exposed_wait));
        for launch in &report.kernels {
            let place = self.kernels.iter().position(|(name, _)| name == launch.kernel).unwrap_or_else(|| {
                self.kernels.push((launch.kernel.to_owned(), Vec::new()));
                self.kernels.len() - 1
            });
            let samples = &mut self.kernels[place].1;
            samples.resize(before + 1, 0.0);
            samples[before] += us(launch.time);
        }
        self.bytes_sent = self.bytes_sent.max(report.bytes_sent);
        self.cut = report.cut;
        self.scratch_bytes = self.scratch_bytes.max(report.scratch_bytes);
        self.peak_device_bytes = self.peak_device_bytes.max(report.peak_device_bytes);
        self.waits = report.waits;
    }
}

/// Measures `group` as `pe`, in all modes one after the other, each with an operation of its own on an executor that
/// `executor` makes. Collective.
///
/// # Errors
/// [`OpError`].
pub(super) fn group<X: Executor>(
    pe: &Pe,
    mut executor: impl FnMut() -> Result<X, OpError>,
    setup: &Setup,
    group: Group,
    progress: Option<&Progress>,
) -> Result<Vec<Samples>, OpError> {
    let plan = setup.plan(group.tokens, pe.size())?;
    if let Some(progress) = progress {
        progress.start(format!("{} tokens, {} gates: inputs", group.tokens, group.gates));
    }
    let tensors = Tensors::draw(setup, group.gates, group.tokens, pe.rank());
    let mut all = Vec::new();
    for &mode in &setup.modes {
        if let Some(progress) = progress {
            progress.start(format!("{} tokens, {} gates, {mode}", group.tokens, group.gates));
        }
        let exec = executor()?;
        let hopper = exec.body(&setup.kernel_sizes(), setup.dtype) == Body::Hopper;
        let mut op = ContextParallel::on(pe, setup.config(mode), exec)?;
        op.align_starts(true);
        let (forward, backward) = repeat(&mut op, &plan, &tensors, setup)?;
        all.push(Samples { mode, hopper, forward, backward });
        if let Some(progress) = progress {
            progress.done();
        }
    }
    Ok(all)
}

fn repeat<X: Executor>(
    op: &mut ContextParallel<'_, X>,
    plan: &Plan,
    tensors: &Tensors,
    setup: &Setup,
) -> Result<(Pass, Option<Pass>), OpError> {
    let inputs: Inputs<'_> = tensors.inputs();
    let (mut forward, mut backward) = (Pass::default(), setup.backward.then(Pass::default));
    for turn in 0..setup.warmup + setup.repeats {
        let counts = turn >= setup.warmup;
        let Some(backward) = &mut backward else {
            let report = op.forward(plan, &inputs)?.report;
            if counts {
                forward.note(&report);
            }
            continue;
        };
        let (result, saved) = op.forward_saving(plan, &inputs)?;
        let gradients = op.backward(plan, &inputs, saved, &tensors.upstream())?;
        if counts {
            forward.note(&result.report);
            backward.note(&gradients.report);
        }
    }
    Ok((forward, backward))
}
