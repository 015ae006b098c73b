//! Steps on emulated GPUs against the f64 reference.

use cuda_std::emulated::Schedule;
use deltalink::compare::{Error, Regime, mismatch, tolerance};
use deltalink::generate::Spec;
use deltalink::inputs::StateLayout;
use deltalink::op::whole::{Share, join};
use deltalink::op::{Config, ContextParallel, OpError};
use deltalink::plan::{Cuts, Plan};
use deltalink::reference::{Problem, recurrent};
use deltalink::world::{WorldOptions, run_threads};

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
    /// How demanding the problem is, which says how far off results may be.
    pub regime: Regime,
}

impl Run {
    /// On `pes` PEs with equal shares, one block at a time on each, with bodies for Hopper.
    pub fn on(pes: usize) -> Self {
        let (config, schedule) = (Config::default(), Schedule::default());
        Self { cuts: Cuts::equal(pes), config, schedule, workers: 1, hopper: true, regime: Regime::Ordinary }
    }
}

/// How far outputs and final states are from the reference, and what was launched on the last PE.
#[derive(Clone, Debug)]
pub struct Compared {
    /// Of the outputs.
    pub o: Error,
    /// Of the final states.
    pub states: Error,
    /// Entries of the device module, in order.
    pub launched: Vec<String>,
    /// The first element that is too far off.
    pub mismatch: Option<String>,
}

/// Runs the problem, and compares as `deltalink verify` does.
///
/// # Errors
/// What failed, with the kernel's fault if it was one.
///
/// # Panics
/// If the states are not K-first.
pub fn forward(spec: &Spec, run: &Run) -> Result<Compared, String> {
    assert_eq!(spec.state_layout, StateLayout::KFirst, "the reference's states are K-first");
    let case = spec.generate();
    let whole = case.inputs();
    let dims = whole.dims().map_err(|error| error.to_string())?;
    let plan = match case.cu_seqlens() {
        Some(cu_seqlens) => Plan::packed(cu_seqlens, &run.cuts),
        None => Plan::batch(dims.b, dims.t, &run.cuts),
    };
    let plan = plan.map_err(|error| error.to_string())?;
    let parts = run_threads(plan.pes(), &WorldOptions::default(), |pe| -> Result<_, OpError> {
        let share = Share::new(&plan, pe.rank(), &whole);
        let inputs = share.inputs(&whole);
        let exec = Emulated::new(run.workers, run.schedule, run.hopper)
            .map_err(|error| OpError::from(deltalink::exec::ExecError::from(error)))?;
        let launched = exec.launches();
        let mut op = ContextParallel::on(pe, run.config.clone(), exec)?;
        let part = op.forward(&plan, &inputs)?;
        Ok((part, launched.names()))
    });
    let mut parts = parts.map_err(|error| error.to_string())?;
    let launched = parts.last_mut().map(|part| std::mem::take(&mut part.1)).unwrap_or_default();
    let result = join(&plan, &whole, parts.into_iter().map(|part| part.0).collect());
    let problem = Problem::new(&whole, case.cu_seqlens()).map_err(|error| error.to_string())?;
    let expected = recurrent(&problem);
    let limit = tolerance(spec.dtype, run.regime);
    let o = result.o.data.to_f64();
    let (o_error, o_mismatch) = (Error::of(&o, &expected.o), mismatch("o", &result.o.shape, &o, &expected.o, limit));
    let (states, states_mismatch) = match result.final_state {
        Some(found) => {
            let values = found.data.to_f64();
            let mismatch = mismatch("ht", &found.shape, &values, &expected.ht, limit);
            (Error::of(&values, &expected.ht), mismatch)
        }
        None => (Error::of(&[], &[]), None),
    };
    Ok(Compared { o: o_error, states, launched, mismatch: o_mismatch.or(states_mismatch) })
}
