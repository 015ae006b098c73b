//! The short convolution in front of q, k and v of every layer: depthwise, causal, 2 to 8 taps over time, with optional bias
//! and SiLU, context-parallel, forward and backward.
//!
//! `y_t = act( sum_w weight[d,w] x[t - (W-1) + w] + bias[d] )` per channel d and token t of a sequence. What lies before a
//! sequence is its initial state; where a cut falls inside a sequence, the W-1 inputs before the cut come from the PEs that
//! hold them, from inside the kernel, those of q, k and v in one message, while all other tokens are computed. How, is in
//! [`kernels_gpu::convolution`].
//!
//! [`ShortConvolution`] belongs to one PE of a world and is called by all PEs in the same order, each with its own tokens;
//! [`whole::forward`] and [`whole::backward`] do all of it for tensors that lie in one process. Outputs and gradients of inputs
//! do not depend on where the sequences are cut, to the last bit.
//!
//! ```
//! use deltalink::op::convolution::{Activation, ConvolutionConfig, ConvolutionInput, whole};
//! use deltalink::{plan::Cuts, plan::Plan, tensor::TensorView, world::WorldOptions};
//! use ndarray::{Array2, Array3};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let x = Array3::from_shape_fn((1, 50, 8), |(_, t, d)| ((3 * t + d) as f32).sin());
//! let weight = Array2::from_elem((8, 4), 0.25_f32);
//! let (x, weight) = (TensorView::try_from(&x)?, TensorView::try_from(&weight)?);
//! let q = ConvolutionInput { x, weight, bias: None, initial_state: None };
//!
//! // Two packed sequences on three PEs; one cut lies inside the first, one inside the second.
//! let plan = Plan::packed(&[0, 30, 50], &Cuts::at(vec![20, 40]))?;
//! let (config, options) = (ConvolutionConfig::default(), WorldOptions::default());
//! let result = whole::forward(&plan, &[q], Activation::Silu, &config, &options)?;
//! assert_eq!(result.outputs[0].y.shape, [1, 50, 8]);
//! // W - 1 = 3 rows of 8 channels.
//! assert_eq!(result.reports[0].bytes_sent, 3 * 8 * 4);
//! # Ok(())
//! # }
//! ```

mod error;
mod halo;
mod inputs;
mod memory;
mod step;
mod tables;
pub mod whole;

use std::collections::HashMap;

use kernels_gpu::protocol::ChannelLayout;

pub use crate::reference::Activation;
pub use error::{ExpiredHalo, ShortConvolutionError};
pub use inputs::{ConvolutionInput, ConvolutionUpstream, MAX_CONVOLUTIONS, WIDTHS};

use super::agreement::{Agreement, Direction};
use super::channel::Channel;
use super::{Device, OpError, Report, Transport};
use crate::exec::cpu::Cpu;
use crate::exec::{ExecError, Executor};
use crate::plan::Plan;
use crate::tensor::{Dtype, Tensor};
use crate::world::Pe;
use inputs::Sizes;

/// Options of a short convolution; the same on all PEs.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvolutionConfig {
    /// What computes, where the library chooses: in [`whole`].
    pub device: Device,
    /// How halos are written into other PEs' memory; need not be the same on all PEs.
    pub transport: Transport,
    /// Whether to return the state after each sequence.
    pub final_state: bool,
    /// Check what hardware cannot: bounds, unwritten outputs. Slow; on GPUs it checks nothing.
    pub checked: bool,
    /// Compute with NaN and infinity instead of refusing them.
    pub allow_nonfinite: bool,
    /// Threads of each PE's executor; absent means the machine's cores over the PEs.
    pub workers: Option<usize>,
}

impl Default for ConvolutionConfig {
    /// The CPU, final states, nothing else.
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            transport: Transport::Auto,
            final_state: true,
            checked: false,
            allow_nonfinite: false,
            workers: None,
        }
    }
}

/// Results of one convolution.
#[derive(Clone, Debug)]
pub struct ConvolutionOutput {
    /// `[B,T,D]` in the type of x.
    pub y: Tensor,
    /// `[N,D,W-1]` in the type of x, the last inputs of each sequence, oldest first; those of a sequence shorter than W-1
    /// begin with what its initial state ends with. Absent if [`ConvolutionConfig::final_state`] is false.
    /// Of one PE: a row for each sequence that ends there, in the order of [`crate::plan::RankPlan::ends`].
    pub final_state: Option<Tensor>,
}

/// What a forward call returns on one PE.
#[derive(Clone, Debug)]
pub struct ConvolutionForward {
    /// One for each input.
    pub outputs: Vec<ConvolutionOutput>,
    /// For the backward call.
    pub saved: SavedConvolution,
    /// Counts and times.
    pub report: Report,
}

/// What a backward call needs of the forward call beside its inputs: the W-1 inputs before each segment that began on another
/// PE. Small, and serves any number of backward calls.
#[derive(Clone, Debug)]
pub struct SavedConvolution {
    before: Tensor,
    rank: usize,
    call: Vec<(String, String)>,
}

/// Gradients of one convolution.
#[derive(Clone, Debug)]
pub struct ConvolutionGradients {
    /// `[B,T,D]` in the type of x.
    pub dx: Tensor,
    /// f32 `[D,W]`. Of one PE: its tokens' share, to be added up over all PEs.
    pub dweight: Tensor,
    /// f32 `[D]`, if there is a bias. Of one PE: its tokens' share, to be added up over all PEs.
    pub dbias: Option<Tensor>,
    /// f32 `[N,D,W-1]`, if there is an initial state. Of one PE: a row for each sequence that starts there.
    pub d_initial_state: Option<Tensor>,
}

/// What a backward call returns on one PE.
#[derive(Clone, Debug)]
pub struct ConvolutionBackward {
    /// One for each input.
    pub gradients: Vec<ConvolutionGradients>,
    /// Counts and times.
    pub report: Report,
}

/// Channels are told apart by who reads a message, too: every block of channels of every convolution.
type ChannelKey = (Direction, ChannelLayout, Vec<usize>);

/// One PE's side of a context-parallel short convolution. Keeps scratch memory, and slots in the symmetric heap, from call to
/// call.
///
/// The first call of each direction, and every call whose plan or sizes differ from the last one's of its direction, is
/// collective: the PEs compare what they are about to do. Calls in between synchronise only where halos flow.
pub struct ShortConvolution<'pe, X: Executor = Cpu> {
    pe: &'pe Pe,
    config: ConvolutionConfig,
    exec: X,
    channels: HashMap<ChannelKey, Channel>,
    agreed: HashMap<Direction, Agreement>,
    failed: Option<String>,
}

impl<'pe> ShortConvolution<'pe> {
    /// The operation of `pe` on the CPU, with the options `config`. Not collective.
    ///
    /// # Errors
    /// [`ShortConvolutionError`] if the system refuses worker threads.
    pub fn new(pe: &'pe Pe, config: ConvolutionConfig) -> Result<Self, ShortConvolutionError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = config.workers.unwrap_or_else(|| (cores / pe.size()).max(1));
        let cpu = Cpu::new(workers).map_err(ExecError::from)?;
        Ok(Self::on(pe, config, cpu))
    }
}

impl<'pe, X: Executor> ShortConvolution<'pe, X> {
    /// The operation of `pe` on the device of `exec`, with the options `config`. Not collective.
    pub fn on(pe: &'pe Pe, config: ConvolutionConfig, exec: X) -> Self {
        Self { pe, config, exec, channels: HashMap::new(), agreed: HashMap::new(), failed: None }
    }

    /// Options.
    pub fn config(&self) -> &ConvolutionConfig {
        &self.config
    }

    /// Computes outputs and final states of this PE's tokens, of up to [`MAX_CONVOLUTIONS`] convolutions at once. All PEs call
    /// it with the same plan; `inputs` are this PE's share as the plan cuts it.
    ///
    /// # Errors
    /// [`ShortConvolutionError`]. If the inputs are at fault, nothing was launched and the call may be repeated, by all PEs.
    /// After any other error the operation is of no further use: other PEs may have gone on.
    pub fn forward(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        activation: Activation,
    ) -> Result<ConvolutionForward, ShortConvolutionError> {
        let sizes = self.check(plan, inputs)?;
        if !self.config.allow_nonfinite {
            inputs::check_values(inputs, &[])?;
        }
        let call = call_fields(plan, &sizes, activation);
        let result = self.prepare(Direction::Forward, plan, &sizes, &call).and_then(|(step, channel, exec)| {
            let step = step::Step { inputs, activation, ..step };
            step.forward(exec, channel)
        });
        let (outputs, before, report) = result.inspect_err(|error| self.failed = Some(error.to_string()))?;
        let saved = SavedConvolution { before, rank: self.pe.rank(), call };
        Ok(ConvolutionForward { outputs, saved, report })
    }

    /// Gradients of a loss L with respect to this PE's inputs, from those with respect to its results. All PEs call it;
    /// `plan`, `inputs` and `activation` are those of the forward call that returned `saved`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        activation: Activation,
        saved: &SavedConvolution,
        upstream: &[ConvolutionUpstream<'_>],
    ) -> Result<ConvolutionBackward, ShortConvolutionError> {
        let sizes = self.check(plan, inputs)?;
        let call = call_fields(plan, &sizes, activation);
        saved.check(self.pe.rank(), &call)?;
        let ends = plan.ranks[self.pe.rank()].ends.len();
        inputs::check_upstream(upstream, &sizes, ends, "that end on this PE")?;
        if !self.config.allow_nonfinite {
            inputs::check_values(inputs, upstream)?;
        }
        let result = self.prepare(Direction::Backward, plan, &sizes, &call).and_then(|(step, channel, exec)| {
            let step = step::Step { inputs, activation, ..step };
            step.backward(exec, channel, &saved.before, upstream)
        });
        let (gradients, report) = result.inspect_err(|error| self.failed = Some(error.to_string()))?;
        Ok(ConvolutionBackward { gradients, report })
    }

    /// Everything that can be said against the inputs without another PE, but for their values.
    fn check(&self, plan: &Plan, inputs: &[ConvolutionInput<'_>]) -> Result<Sizes, ShortConvolutionError> {
        let rank = self.pe.rank();
        if let Some(first) = &self.failed {
            return Err(ShortConvolutionError::FailedBefore { rank, first: first.clone() });
        }
        if plan.pes() != self.pe.size() {
            return Err(OpError::PlanSize { plan: plan.pes(), world: self.pe.size() }.into());
        }
        let sizes = inputs::check_share(inputs, &plan.ranks[rank])?;
        // Positions in a segment are signed.
        let largest = i32::MAX as usize;
        if sizes.b * sizes.t > largest {
            return Err(OpError::TooManyTokens { tokens: sizes.b * sizes.t, largest }.into());
        }
        Ok(sizes)
    }

    /// Reaches agreement with the other PEs where the call is not like the last one, and makes the channel.
    #[allow(clippy::type_complexity)]
    fn prepare<'a>(
        &'a mut self,
        direction: Direction,
        plan: &'a Plan,
        sizes: &'a Sizes,
        call: &[(String, String)],
    ) -> Result<(step::Step<'a>, Option<&'a mut Channel>, &'a mut X), ShortConvolutionError> {
        let kind = ("the operation".to_owned(), "short convolution".to_owned());
        let agreement = Agreement::of(std::iter::once(kind).chain(call.iter().cloned()).collect());
        if self.agreed.get(&direction) != Some(&agreement) {
            // What was saved is checked on each PE; any forward call's will do.
            agreement.reach(self.pe, direction, 0)?;
            self.agreed.insert(direction, agreement);
        }
        let lanes = halo::lanes(plan, direction);
        let layout = layout(plan.pes(), lanes, sizes, direction)?;
        let key = (direction, layout, sizes.channels.clone());
        if lanes > 0 && !self.channels.contains_key(&key) {
            let channel = Channel::new(&mut self.exec, self.pe, direction, layout, self.config.transport)?;
            self.channels.insert(key.clone(), channel);
        }
        let channel = self.channels.get_mut(&key).filter(|_| lanes > 0);
        let (pe, config, activation) = (self.pe, &self.config, Activation::None);
        let step = step::Step { pe, plan, sizes, config, layout, inputs: &[], activation };
        Ok((step, channel, &mut self.exec))
    }
}

/// What must be equal on all PEs, and in a backward call and its forward call.
fn call_fields(plan: &Plan, sizes: &Sizes, activation: Activation) -> Vec<(String, String)> {
    let field = |name: &str, value: String| (name.to_owned(), value);
    vec![
        field("the version of deltalink", env!("CARGO_PKG_VERSION").to_owned()),
        field("the channels", format!("{:?}", sizes.channels)),
        field("the number of taps", sizes.width.to_string()),
        field("the element type", sizes.dtype.to_string()),
        field("the activation", format!("{activation:?}")),
        field("the cuts", format!("{:?}", plan.cuts)),
        field("the sequences", format!("{:?}", plan.layout)),
    ]
}

/// A halo's message is one block of a summary's layout: W-1 rows of all channels, forward in the tensors' type, backward f32.
fn layout(
    pes: usize,
    lanes: usize,
    sizes: &Sizes,
    direction: Direction,
) -> Result<ChannelLayout, ShortConvolutionError> {
    let element = match direction {
        Direction::Forward => sizes.dtype.size(),
        Direction::Backward => Dtype::F32.size(),
    };
    let columns = sizes.columns();
    // What exceeds 32 bits exceeds the address space, too.
    let words = u32::try_from((columns * element).div_ceil(size_of::<f32>())).unwrap_or(u32::MAX);
    ChannelLayout::new(pes as u32, lanes.max(1) as u32, words, sizes.reach() as u32, 0)
        .map_err(|reason| ShortConvolutionError::Slots { columns, width: sizes.width, pes, reason: reason.to_string() })
}

impl SavedConvolution {
    fn check(&self, rank: usize, call: &[(String, String)]) -> Result<(), ShortConvolutionError> {
        let foreign = |what: &str, saved: String, call: String| {
            Err(ShortConvolutionError::ForeignSaved { rank, what: what.to_owned(), saved, call })
        };
        if self.rank != rank {
            return foreign("PE", self.rank.to_string(), rank.to_string());
        }
        match self.call.iter().zip(call).find(|(saved, now)| saved != now) {
            Some(((what, saved), (_, now))) => foreign(what, saved.clone(), now.clone()),
            None => Ok(()),
        }
    }
}
