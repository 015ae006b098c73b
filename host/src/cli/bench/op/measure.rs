//! What one PE does and notes.
//!
//! Tensors lie where the operation computes, as those of a program do whose layers run there: nothing is brought there or back
//! between the steps. First come steps that are awaited one by one and timed kernel by kernel, then as many that are enqueued
//! back to back, of which the whole is timed: what a step costs where the host does not wait for it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Setup;
use super::inputs::{Gates, Tensors};
use crate::cli::progress::Progress;
use crate::cli::run::machine_epoch;
use crate::exec::{Body, DeviceInputs, DeviceTensor, ExecError, Executor, Waits};
use crate::gradients::{Gradients, Upstream};
use crate::op::{Config, ContextParallel, CutReport, ForwardOut, Mode, OpError, Report};
use crate::plan::Plan;
use crate::trace::Trace;
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
    /// Timelines of one more step, forward and perhaps backward, as Chrome trace JSON on this PE's clock.
    #[serde(default)]
    pub timelines: Vec<String>,
}

/// Samples of a direction, one of each repeat.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Pass {
    pub device_us: Vec<f64>,
    pub exposed_wait_us: Vec<f64>,
    /// Launches of one kernel are added up.
    pub kernels: Vec<(String, Vec<f64>)>,
    /// A step of those that were enqueued back to back, in microseconds; of the last direction, with the first one before it.
    pub back_to_back_us: Option<f64>,
    pub bytes_sent: u64,
    /// Parts of the segment that was cut into most.
    pub parts: usize,
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
        self.parts = self.parts.max(report.parts);
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
        let mut exec = executor()?;
        let hopper = exec.body(&setup.kernel_sizes(), setup.dtype) == Body::Hopper;
        let mut placed = Placed::of(&mut exec, &tensors, setup.backward).map_err(OpError::from)?;
        let mut op = ContextParallel::on(pe, setup.config(mode), exec)?;
        op.align_starts(true);
        let (mut forward, mut backward) = repeat(&mut op, &plan, &tensors, &mut placed, setup)?;
        let enqueues = mode != Mode::Bulk && forward.waits == Waits::Kernels;
        if enqueues {
            op.align_starts(false);
            let step = back_to_back(&mut op, pe, &plan, &tensors, &mut placed, setup)?;
            backward.as_mut().unwrap_or(&mut forward).back_to_back_us = Some(step.as_secs_f64() * 1e6);
        }
        drop((op, placed));
        let timelines = match setup.trace {
            true => timelines(ContextParallel::on(pe, traced(setup, mode), executor()?)?, &plan, &tensors, setup)?,
            false => Vec::new(),
        };
        all.push(Samples { mode, hopper, forward, backward, timelines });
        if let Some(progress) = progress {
            progress.done();
        }
    }
    Ok(all)
}

fn traced(setup: &Setup, mode: Mode) -> Config {
    Config { trace: true, ..setup.config(mode) }
}

/// The last of some steps, so that memory is there and nothing is loaded for the first time.
fn timelines<X: Executor>(
    mut op: ContextParallel<'_, X>,
    plan: &Plan,
    tensors: &Tensors,
    setup: &Setup,
) -> Result<Vec<String>, OpError> {
    op.align_starts(true);
    op.set_clock_origin(machine_epoch());
    let inputs = tensors.inputs();
    let mut last = Vec::new();
    for _ in 0..=setup.warmup {
        last.clear();
        if setup.backward {
            let (result, saved) = op.forward_saving(plan, &inputs)?;
            let gradients = op.backward(plan, &inputs, saved, &tensors.upstream())?;
            last.extend([result.trace, gradients.trace].into_iter().flatten());
        } else {
            last.extend(op.forward(plan, &inputs)?.trace);
        }
    }
    Ok(last.iter().map(chrome).collect())
}

fn chrome(trace: &Trace) -> String {
    let mut bytes = Vec::new();
    trace.to_chrome(&mut bytes).expect("a Vec takes all bytes");
    String::from_utf8(bytes).expect("JSON is UTF-8")
}

/// The tensors of a call where it uses them in place, and memory for its results.
struct Placed<X: Executor> {
    inputs: DeviceInputs<X>,
    d_o: DeviceTensor<X>,
    o: DeviceTensor<X>,
    gradients: Option<Gradients<DeviceTensor<X>>>,
}

impl<X: Executor> Placed<X> {
    fn of(exec: &mut X, tensors: &Tensors, backward: bool) -> Result<Self, ExecError> {
        let inputs = tensors.inputs();
        let gradients = match backward {
            true => Some(Gradients::zeros(&inputs).try_map(|x| DeviceTensor::of(exec, &x.view()))?),
            false => None,
        };
        Ok(Self {
            d_o: DeviceTensor::of(exec, &tensors.upstream().d_o)?,
            o: DeviceTensor::new(exec, inputs.v.shape(), inputs.dtype())?,
            inputs: DeviceInputs::of(exec, &inputs)?,
            gradients,
        })
    }
}

fn repeat<X: Executor>(
    op: &mut ContextParallel<'_, X>,
    plan: &Plan,
    tensors: &Tensors,
    placed: &mut Placed<X>,
    setup: &Setup,
) -> Result<(Pass, Option<Pass>), OpError> {
    let Placed { inputs, d_o, o, gradients } = placed;
    let inputs = inputs.inputs(&tensors.inputs())?;
    let upstream = Upstream { d_o: d_o.view()?, d_final_state: None };
    let (mut forward, mut backward) = (Pass::default(), setup.backward.then(Pass::default));
    for turn in 0..setup.warmup + setup.repeats {
        let counts = turn >= setup.warmup;
        let mut out = ForwardOut { o: o.view_mut()?, final_state: None };
        let Some((backward, gradients)) = backward.as_mut().zip(gradients.as_mut()) else {
            let report = op.forward_into(plan, &inputs, &mut out)?.report;
            if counts {
                forward.note(&report);
            }
            continue;
        };
        let (result, saved) = op.forward_saving_into(plan, &inputs, &mut out)?;
        let mut out = gradients.try_map_mut(DeviceTensor::view_mut)?;
        let done = op.backward_into(plan, &inputs, saved, &upstream, &mut out)?;
        if counts {
            forward.note(&result.report);
            backward.note(&done.report);
        }
    }
    Ok((forward, backward))
}

/// How long a step takes where the host does not wait for it: of one direction, or of both together.
fn back_to_back<X: Executor>(
    op: &mut ContextParallel<'_, X>,
    pe: &Pe,
    plan: &Plan,
    tensors: &Tensors,
    placed: &mut Placed<X>,
    setup: &Setup,
) -> Result<Duration, OpError> {
    let Placed { inputs, d_o, o, gradients } = placed;
    let inputs = inputs.inputs(&tensors.inputs())?;
    let upstream = Upstream { d_o: d_o.view()?, d_final_state: None };
    pe.barrier("steps back to back")?;
    let begin = op.executor_mut().mark().map_err(OpError::from)?;
    let mut last = None;
    for _ in 0..setup.repeats {
        let mut out = ForwardOut { o: o.view_mut()?, final_state: None };
        last = Some(match gradients {
            None => op.enqueue_forward(plan, &inputs, &mut out)?,
            Some(gradients) => {
                let saved = op.enqueue_forward_saving(plan, &inputs, &mut out)?.1;
                let mut out = gradients.try_map_mut(DeviceTensor::view_mut)?;
                op.enqueue_backward(plan, &inputs, saved, &upstream, &mut out)?
            }
        });
    }
    let end = op.executor_mut().mark().map_err(OpError::from)?;
    if let Some(last) = last {
        op.wait(last)?;
    }
    op.executor_mut().wait(&|| pe.failed_peer().is_some()).map_err(OpError::from)?;
    Ok(op.executor().between(&begin, &end).map_err(OpError::from)? / setup.repeats)
}
