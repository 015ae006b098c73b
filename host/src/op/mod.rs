//! The operation: context-parallel KDA and GDN on one PE's share of the tokens, forward and backward.
//!
//! [`ContextParallel`] belongs to one PE of a world and is called by all PEs in the same order, each with its
//! own tokens; [`whole::forward`] and [`whole::backward`] do all of it for tensors that lie in one process.
//!
//! # Training
//! [`ContextParallel::forward_saving`] also returns a [`Saved`], which [`ContextParallel::backward`] takes together with the
//! same inputs and the gradient of the loss with respect to the outputs. Several forward calls may come before their backward
//! calls, and these in any order, the same on all PEs.
//!
//! The gradients of `A_log` and `dt_bias` are sums over tokens: a PE returns its tokens' share. As for any parameter whose
//! tokens are spread over PEs, the program adds the shares up (an all-reduce of its own, or
//! [`add_shares`](crate::gradients::add_shares) where they come together); [`whole::backward`] does it in the order of the ranks.
//! Everything else a PE returns is complete.

mod agreement;
mod backward;
mod channel;
mod config;
pub mod convolution;
mod cuts;
mod error;
mod forward;
mod report;
mod saved;
mod step;
mod tables;
mod training;
pub mod whole;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kernels_gpu::params::StepStats;
use kernels_gpu::protocol::ChannelLayout;

pub use config::{CUT_TOLERANCE, Config, Device, LEAST_CUT_TOLERANCE, MWire, Mode, Recompute, Transport};
pub use convolution::ShortConvolution;
pub use error::{ExpiredWait, OpError};
pub use report::{CutReport, KernelTime, Report};
pub use saved::{Saved, SavedHandle};
pub(crate) use training::check_upstream;

use crate::exec::cpu::Cpu;
use crate::exec::{ExecError, Executor};
use crate::gradients::Gradients;
use crate::inputs::{Dims, Inputs};
use crate::plan::Plan;
use crate::tensor::Tensor;
use crate::trace::Trace;
use crate::world::Pe;
use agreement::{Agreement, Direction};
use channel::Channel;
use saved::SavedMemory;

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

/// What a backward call returns on one PE.
#[derive(Clone, Debug)]
pub struct Backward {
    /// Gradients with respect to this PE's inputs. `da_log` and `ddt_bias` are this PE's share of a sum over tokens.
    pub gradients: Gradients,
    /// Counts and times.
    pub report: Report,
    /// The timeline, if [`Config::trace`] asks for it.
    pub trace: Option<Trace>,
}

/// One PE's side of a context-parallel operation. Keeps scratch memory, and slots in the symmetric heap, from call
/// to call.
///
/// The first call of each direction, and every call whose plan or sizes differ from the last one's of its direction, is
/// collective: the PEs compare what they are about to do. Calls in between synchronise only where summaries flow.
pub struct ContextParallel<'pe, X: Executor = Cpu> {
    pe: &'pe Pe,
    config: Config,
    exec: X,
    /// Unique in this process.
    number: u64,
    channels: HashMap<(Direction, ChannelLayout), Channel>,
    agreed: HashMap<Direction, Agreement>,
    held: HashMap<SavedHandle, Saved<X>>,
    aligned: bool,
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
        static OPERATIONS: AtomicU64 = AtomicU64::new(0);
        if !matches!(config.chunk, 16 | 32 | 64) {
            return Err(crate::error::InputError::Chunk { found: config.chunk }.into());
        }
        let cut = config.cut_tolerance;
        if cut != 0.0 && !(LEAST_CUT_TOLERANCE..1.0).contains(&cut) {
            return Err(crate::error::InputError::CutTolerance { found: cut, least: LEAST_CUT_TOLERANCE }.into());
        }
        let number = OPERATIONS.fetch_add(1, Ordering::Relaxed) + 1;
        let (channels, agreed, held) = (HashMap::new(), HashMap::new(), HashMap::new());
        Ok(Self { pe, config, exec, number, channels, agreed, held, aligned: false, failed: None })
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

    /// Whether all PEs wait for each other in every call, after their inputs have been brought to the device and before the
    /// first kernel: for measurements, in which a PE's wait for another that came late is no cost of the exchange. The same
    /// on all PEs; by default they do not.
    pub fn align_starts(&mut self, align: bool) {
        self.aligned = align;
    }

    /// Bytes of scratch memory, apart from inputs, results, what [`Saved`] holds, and the symmetric heap.
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
        Ok(self.checked_forward(plan, inputs, false)?.0)
    }

    /// The forward call of either kind, and its number.
    fn checked_forward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        save: bool,
    ) -> Result<(Forward, Option<SavedMemory<X>>, u64), OpError> {
        self.usable()?;
        let dims = self.check(plan, inputs)?;
        let call = self.pe.note_call(Direction::Forward.note(0));
        let result = self.run_forward(plan, inputs, &dims, save);
        let (forward, memory) = self.settled(result, Direction::Forward, call)?;
        Ok((forward, memory, call))
    }

    /// Refuses calls after a failure.
    fn usable(&self) -> Result<(), OpError> {
        match &self.failed {
            Some(first) => Err(OpError::FailedBefore { rank: self.pe.rank(), first: first.clone() }),
            None => Ok(()),
        }
    }

    /// Notes a failure, and says so if it came of calls that differ.
    fn settled<T>(&mut self, result: Result<T, OpError>, direction: Direction, call: u64) -> Result<T, OpError> {
        result.map_err(|error| {
            let error = training::name_different_calls(self.pe, direction, call, error);
            self.failed = Some(error.to_string());
            error
        })
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

    fn run_forward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        dims: &Dims,
        save: bool,
    ) -> Result<(Forward, Option<SavedMemory<X>>), OpError> {
        let layout = self.prepare(Direction::Forward, plan, inputs, dims, 0)?;
        let step = step::Step { pe: self.pe, plan, inputs, dims, config: &self.config, layout, aligned: self.aligned };
        let channel = self.channels.get_mut(&(Direction::Forward, layout)).filter(|_| plan.lanes > 0);
        step.forward(&mut self.exec, channel, save)
    }

    /// Agrees with the other PEs where that has to be, and makes the channel: collective then. `age`: how many calls before
    /// was the forward call, if this is backward.
    fn prepare(
        &mut self,
        direction: Direction,
        plan: &Plan,
        inputs: &Inputs<'_>,
        dims: &Dims,
        age: u64,
    ) -> Result<ChannelLayout, OpError> {
        let agreement = Agreement::new(plan, inputs, dims, &self.config);
        if self.agreed.get(&direction) != Some(&agreement) {
            agreement.reach(self.pe, direction, age)?;
            self.agreed.insert(direction, agreement);
        }
        let layout = channel::layout(plan, inputs, dims, &self.config)?;
        let key = (direction, layout);
        if plan.lanes > 0 && !self.channels.contains_key(&key) {
            let channel = Channel::new(&mut self.exec, self.pe, direction, layout, self.config.transport)?;
            self.channels.insert(key, channel);
        }
        Ok(layout)
    }
}

impl Report {
    fn count(&mut self, stats: &StepStats, concurrency: usize) {
        self.bytes_sent += stats.bytes_sent;
        self.messages += stats.messages;
        self.cut.empty_messages += stats.empty_messages;
        self.exposed_wait += std::time::Duration::from_nanos(stats.signal_wait_ns / concurrency as u64);
        self.slot_wait += std::time::Duration::from_nanos(stats.slot_wait_ns / concurrency as u64);
    }
}
