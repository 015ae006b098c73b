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
//!
//! # Tensors where they lie
//! [`ContextParallel::forward_into`] and [`ContextParallel::backward_into`] write results into memory of the caller, and use tensors
//! in place that lie where the operation computes. [`ContextParallel::enqueue_forward`] and its like return when their work is
//! enqueued: per call as many launches as there are kernels and one more ([`kernels_gpu::begin`]), one event, no copy, and no
//! wait. Such calls can be captured and replayed (`ContextParallel::capture`, feature `cuda`).

mod agreement;
mod backward;
mod beside;
mod channel;
mod config;
pub mod convolution;
mod cuts;
mod error;
mod forward;
#[cfg(feature = "cuda")]
mod graph;
mod images;
mod launched;
mod out;
mod parts;
mod pending;
mod report;
mod saved;
mod step;
mod tables;
mod training;
mod vitals;
pub mod whole;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kernels_gpu::params::StepStats;
use kernels_gpu::protocol::ChannelLayout;

pub use config::{
    CUT_TOLERANCE, Config, Device, LEAST_CUT_TOLERANCE, MWire, Mode, Recompute, Segments, Transport, Values,
};
pub use convolution::ShortConvolution;
pub use error::{ExpiredWait, OpError};
#[cfg(feature = "cuda")]
pub use graph::CapturedSteps;
pub use out::{BackwardOut, Done, ForwardOut};
pub use pending::Pending;
pub use report::{CutReport, KernelTime, Report};
pub use saved::{Saved, SavedHandle};
pub(crate) use training::check_upstream;

use crate::exec::cpu::Cpu;
use crate::exec::{ExecError, Executor, Slot};
use crate::gradients::Gradients;
use crate::inputs::{Dims, Inputs};
use crate::plan::Plan;
use crate::tensor::Tensor;
use crate::trace::Trace;
use crate::world::Pe;
use agreement::{Agreement, Call, Direction};
use backward::BackwardTables;
use channel::Channel;
use forward::ForwardTables;
use images::Images;
use launched::Launched;
use out::Places;
use parts::Parts;
use saved::SavedMemory;
use vitals::Vitals;

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
    agreed: HashMap<Direction, (Call, Arc<Agreement>)>,
    held: HashMap<SavedHandle, Saved<X>>,
    forward_tables: Images<X, ForwardTables>,
    backward_tables: Images<X, BackwardTables>,
    vitals: Vitals<X>,
    /// Steps whose launches were made, replays included.
    steps: u64,
    /// Value heads of the latest one that was enqueued: what its kernels leave is understood with them.
    enqueued_heads: Option<usize>,
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
    pub fn on(pe: &'pe Pe, config: Config, mut exec: X) -> Result<Self, OpError> {
        if !matches!(config.chunk, 16 | 32 | 64) {
            return Err(crate::error::InputError::Chunk { found: config.chunk }.into());
        }
        let cut = config.cut_tolerance;
        if cut != 0.0 && !(LEAST_CUT_TOLERANCE..1.0).contains(&cut) {
            return Err(crate::error::InputError::CutTolerance { found: cut, least: LEAST_CUT_TOLERANCE }.into());
        }
        let number = next_operation();
        let vitals = Vitals::new(&mut exec, config.trace)?;
        Ok(Self {
            pe,
            config,
            exec,
            number,
            channels: HashMap::new(),
            agreed: HashMap::new(),
            held: HashMap::new(),
            forward_tables: Images::default(),
            backward_tables: Images::default(),
            vitals,
            steps: 0,
            enqueued_heads: None,
            aligned: false,
            failed: None,
        })
    }

    /// What computes.
    pub fn executor(&self) -> &X {
        &self.exec
    }

    /// What computes, to be set between calls.
    pub fn executor_mut(&mut self) -> &mut X {
        &mut self.exec
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
        self.exec.scratch_bytes() + self.table_bytes()
    }

    /// Bytes of tables and words.
    fn table_bytes(&self) -> usize {
        self.forward_tables.bytes() + self.backward_tables.bytes() + self.vitals.bytes()
    }

    /// Computes outputs and final states of this PE's tokens. All PEs call it with the same plan; `inputs` is this
    /// PE's share as the plan cuts it.
    ///
    /// # Errors
    /// [`OpError`]. If the inputs are at fault, nothing was launched and the call may be repeated, by all PEs. After
    /// any other error the operation is of no further use: other PEs may have gone on.
    pub fn forward(&mut self, plan: &Plan, inputs: &Inputs<'_>) -> Result<Forward, OpError> {
        let mut results = self.results(plan, inputs)?;
        let Done { report, trace } = self.forward_into(plan, inputs, &mut results.out())?;
        Ok(Forward { report, trace, ..results })
    }

    /// [`forward`](Self::forward) into memory of the caller. Tensors may lie on the host or where the operation computes, mixed;
    /// those on the device are used in place. The results are complete when it returns.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and [`InputError`](crate::error::InputError) if `out` does not fit the results, a tensor
    /// lies elsewhere or is not aligned, or a result shares memory with another tensor of the call.
    pub fn forward_into(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        out: &mut ForwardOut<'_>,
    ) -> Result<Done, OpError> {
        Ok(self.checked_forward(plan, inputs, out, false)?.0)
    }

    /// The forward call of either kind, and its number.
    fn checked_forward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        out: &mut ForwardOut<'_>,
        save: bool,
    ) -> Result<(Done, Option<SavedMemory<X>>, u64), OpError> {
        let dims = self.check_forward(plan, inputs, out, false)?;
        let call = self.pe.note_call(Direction::Forward.note(0));
        let result = self.launch_forward(plan, inputs, &dims, out, save).and_then(|(launched, memory)| {
            launched.complete(&mut self.exec, self.pe)?;
            self.exec.fetch(Slot::Output, &mut out.o)?;
            if let Some(states) = &mut out.final_state {
                self.exec.fetch(Slot::FinalState, states)?;
            }
            Ok((self.done(&launched)?, memory))
        });
        let (done, memory) = self.settled(result, Direction::Forward, call)?;
        Ok((done, memory, call))
    }

    /// Everything that can be said against a forward call without another PE. If it is `in_place`, it returns before its work is
    /// done.
    fn check_forward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        out: &ForwardOut<'_>,
        in_place: bool,
    ) -> Result<Dims, OpError> {
        self.ready(in_place)?;
        let dims = self.check(plan, inputs)?;
        out.check(inputs, &dims, &plan.ranks[self.pe.rank()], self.config.final_state)?;
        Places { device: self.exec.location(), in_place }.check(&inputs.tensors(), &out.named())?;
        self.check_values(inputs)?;
        Ok(dims)
    }

    /// Makes ready for a call, which is timed if it waits for its work.
    fn ready(&mut self, in_place: bool) -> Result<(), OpError> {
        self.check_enqueued()?;
        self.exec.prepare(!in_place)?;
        if self.exec.captures() && !in_place {
            return Err(OpError::Captures { rank: self.pe.rank() });
        }
        Ok(())
    }

    fn check_values(&self, inputs: &Inputs<'_>) -> Result<(), OpError> {
        match self.config.values {
            Values::Check => Ok(inputs.check_values(self.config.allow_nonfinite)?),
            Values::Trust => Ok(()),
        }
    }

    /// Zeros for the results of a forward call that can be made.
    fn results(&mut self, plan: &Plan, inputs: &Inputs<'_>) -> Result<Forward, OpError> {
        self.check_enqueued()?;
        let dims = self.check(plan, inputs)?;
        // Before memory is taken for them.
        self.check_values(inputs)?;
        Ok(Forward::zeros(inputs, &dims, &plan.ranks[self.pe.rank()], self.config.final_state))
    }

    /// What the latest step counted and timed, after its end.
    fn done(&mut self, launched: &Launched) -> Result<Done, OpError> {
        let tables = self.table_bytes();
        let report = launched.report(&mut self.exec, self.pe, &mut self.vitals, tables)?;
        let trace = match self.config.trace {
            true => Some(launched.timeline(&mut self.exec, self.pe, &mut self.vitals)?),
            false => None,
        };
        Ok(Done { report, trace })
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
            // What was not there before a capture was asked for before anything was launched.
            if !matches!(error, OpError::Exec(ExecError::NotWarm { .. })) {
                self.failed = Some(error.to_string());
            }
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
        Ok(dims)
    }

    /// Launches a forward step, which saves or does not.
    fn launch_forward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        dims: &Dims,
        out: &mut ForwardOut<'_>,
        save: bool,
    ) -> Result<(Launched, Option<SavedMemory<X>>), OpError> {
        let layout = self.prepare(Direction::Forward, plan, inputs, dims, 0)?;
        let (config, vitals, aligned) = (&self.config, self.vitals.signs(), self.aligned);
        let step =
            step::Step { pe: self.pe, plan, inputs, dims, config, layout, parts: &Parts::default(), vitals, aligned };
        let step = step::Step { parts: &step.cut(&self.exec, &plan.ranks[self.pe.rank()]), ..step };
        let channel = self.channels.get_mut(&(Direction::Forward, layout)).filter(|_| plan.lanes > 0);
        let cuts = &mut self.vitals.cuts;
        let launched = step.forward(&mut self.exec, &mut self.forward_tables, channel, cuts, (out, save))?;
        self.steps += 1;
        Ok(launched)
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
        if self.agreed.get(&direction).is_none_or(|(call, _)| !call.is(plan, inputs, dims)) {
            if self.exec.captures() {
                return Err(ExecError::NotWarm { what: "the agreement of all PEs on a call" }.into());
            }
            let agreement = Agreement::new(plan, inputs, dims, &self.config);
            agreement.reach(self.pe, direction, age)?;
            self.agreed.insert(direction, (Call::new(plan, inputs, dims), Arc::new(agreement)));
        }
        let layout = channel::layout(plan, inputs, dims, &self.config)?;
        let key = (direction, layout);
        if plan.lanes > 0 && !self.channels.contains_key(&key) {
            if self.exec.captures() {
                return Err(ExecError::NotWarm { what: "the memory of messages between PEs" }.into());
            }
            let channel = Channel::new(&mut self.exec, self.pe, direction, layout, self.config.transport)?;
            self.channels.insert(key, channel);
        }
        Ok(layout)
    }
}

/// The number of a new operation, of any kind: unique in this process.
fn next_operation() -> u64 {
    static OPERATIONS: AtomicU64 = AtomicU64::new(0);
    OPERATIONS.fetch_add(1, Ordering::Relaxed) + 1
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
