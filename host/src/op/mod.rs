//! The operation: context-parallel KDA and GDN on one PE's share of the tokens.
//!
//! [`ContextParallel`] belongs to one PE of a world and is called by all PEs in the same order, each with its
//! own tokens; [`whole::forward`] does all of it for tensors that lie in one process.

mod agreement;
mod channel;
mod config;
pub mod convolution;
mod error;
mod report;
mod step;
mod tables;
pub mod whole;

use std::collections::HashMap;
use std::time::Instant;

use kernels_gpu::params::StepStats;
use kernels_gpu::protocol::ChannelLayout;

pub use config::{Config, Device, MWire, Mode};
pub use convolution::ShortConvolution;
pub use error::OpError;
pub use report::{KernelTime, Report};

use crate::exec::cpu::Cpu;
use crate::exec::{ExecError, Executor};
use crate::inputs::{Dims, Inputs};
use crate::plan::Plan;
use crate::tensor::Tensor;
use crate::trace::Trace;
use crate::world::Pe;
use agreement::Agreement;
use channel::Channel;

/// What a forward call returns on one PE.
#[derive(Clone, Debug)]
pub struct Forward {
    /// `[B,T,HV,V]` of this PE's tokens, in the element type of q.
    pub o: Tensor,
    /// f32 `[n,HV,K,V]` (or `[n,HV,V,K]`): the states after the `n` sequences that end on this PE, in the order of
    /// [`crate::plan::RankPlan::ends`]; absent if [`Config::final_state`] is false.
    pub final_state: Option<Tensor>,
    /// Counts and times.
    pub report: Report,
    /// The timeline, if [`Config::trace`] asks for it.
    pub trace: Option<Trace>,
}

/// One PE's side of a context-parallel operation. Keeps scratch memory, and slots in the symmetric heap, from call
/// to call.
///
/// The first call, and every call whose plan or sizes differ from the last one's, is collective: the PEs
/// compare what they are about to do. Calls in between synchronise only where summaries flow.
pub struct ContextParallel<'pe, X: Executor = Cpu> {
    pe: &'pe Pe,
    config: Config,
    exec: X,
    channels: HashMap<ChannelLayout, Channel>,
    agreed: Option<Agreement>,
    failed: Option<String>,
}

impl<'pe> ContextParallel<'pe> {
    /// The operation of `pe` on the CPU, with the options `config`. Not collective.
    ///
    /// # Errors
    /// [`OpError`] if an option is out of range, or the system refuses worker threads.
    pub fn new(pe: &'pe Pe, config: Config) -> Result<Self, OpError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = config.workers.unwrap_or_else(|| (cores / pe.size()).max(1));
        let cpu = Cpu::new(workers).map_err(ExecError::from)?;
        Self::on(pe, config, cpu)
    }
}

impl<'pe, X: Executor> ContextParallel<'pe, X> {
    /// The operation of `pe` on the device of `exec`, with the options `config`. Not collective.
    ///
    /// # Errors
    /// [`OpError`] if an option is out of range.
    pub fn on(pe: &'pe Pe, config: Config, exec: X) -> Result<Self, OpError> {
        if !matches!(config.chunk, 16 | 32 | 64) {
            return Err(crate::error::InputError::Chunk { found: config.chunk }.into());
        }
        Ok(Self { pe, config, exec, channels: HashMap::new(), agreed: None, failed: None })
    }

    /// Options.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Sets the zero of the timeline's clock; by default the moment of [`ContextParallel::new`]. PEs of one process
    /// that set the same moment share a time axis.
    pub fn set_clock_origin(&mut self, origin: Instant) {
        self.exec.set_clock_origin(origin);
    }

    /// Bytes of scratch memory, apart from inputs, results and the symmetric heap.
    pub fn scratch_bytes(&self) -> usize {
        self.exec.scratch_bytes()
    }

    /// Computes outputs and final states of this PE's tokens. All PEs call it with the same plan; `inputs` is this
    /// PE's share as the plan cuts it.
    ///
    /// # Errors
    /// [`OpError`]. If the inputs are at fault, nothing was launched and the call may be repeated, by all PEs. After
    /// any other error the operation is of no further use: other PEs may have gone on.
    pub fn forward(&mut self, plan: &Plan, inputs: &Inputs<'_>) -> Result<Forward, OpError> {
        if let Some(first) = &self.failed {
            return Err(OpError::FailedBefore { rank: self.pe.rank(), first: first.clone() });
        }
        let dims = self.check(plan, inputs)?;
        self.run(plan, inputs, &dims).inspect_err(|error| self.failed = Some(error.to_string()))
    }

    /// Everything that can be said against the inputs without another PE.
    fn check(&self, plan: &Plan, inputs: &Inputs<'_>) -> Result<Dims, OpError> {
        use crate::error::InputError;
        if plan.pes() != self.pe.size() {
            return Err(OpError::PlanSize { plan: plan.pes(), world: self.pe.size() });
        }
        let dims = inputs.dims()?;
        let rank = &plan.ranks[self.pe.rank()];
        if (dims.b, dims.t) != (rank.batch, rank.tokens) {
            let (want_b, want_t) = (rank.batch, rank.tokens);
            return Err(InputError::Tokens { b: dims.b, t: dims.t, want_b, want_t }.into());
        }
        if let Some(h0) = &inputs.initial_state
            && h0.shape()[0] != rank.starts.len()
        {
            let (found, want) = (h0.shape()[0], rank.starts.len());
            return Err(InputError::StateRows { name: "h0", found, want, what: "that start on this PE" }.into());
        }
        let largest = u32::MAX as usize;
        if dims.b * dims.t > largest {
            return Err(OpError::TooManyTokens { tokens: dims.b * dims.t, largest });
        }
        inputs.check_values(self.config.allow_nonfinite)?;
        Ok(dims)
    }

    fn run(&mut self, plan: &Plan, inputs: &Inputs<'_>, dims: &Dims) -> Result<Forward, OpError> {
        let agreement = Agreement::new(plan, inputs, dims, &self.config);
        if self.agreed.as_ref() != Some(&agreement) {
            agreement.reach(self.pe)?;
            self.agreed = Some(agreement);
        }
        let layout = channel::layout(plan, inputs, dims, &self.config)?;
        if plan.lanes > 0 && !self.channels.contains_key(&layout) {
            self.channels.insert(layout, Channel::new(&mut self.exec, self.pe, layout)?);
        }
        let channel = if plan.lanes > 0 { self.channels.get_mut(&layout) } else { None };
        let step = step::Step { pe: self.pe, plan, inputs, dims, config: &self.config, layout };
        step.run(&mut self.exec, channel)
    }
}

impl Report {
    fn count(&mut self, stats: &StepStats, concurrency: usize) {
        self.bytes_sent += stats.bytes_sent;
        self.messages += stats.messages;
        self.exposed_wait += std::time::Duration::from_nanos(stats.signal_wait_ns / concurrency as u64);
        self.slot_wait += std::time::Duration::from_nanos(stats.slot_wait_ns / concurrency as u64);
    }
}
