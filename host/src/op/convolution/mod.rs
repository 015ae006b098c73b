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
//! # Tensors where they lie
//! As for [KDA and GDN](crate::op): calls of the `_into` kind write into memory of the caller and use tensors in place that lie where
//! the operation computes; those that enqueue return when their launches are made, need no copy and no wait, and can be captured
//! and replayed (`ShortConvolution::capture`, feature `cuda`).
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

mod calls;
mod device;
mod error;
#[cfg(feature = "cuda")]
mod graph;
mod halo;
mod inputs;
mod memory;
mod pending;
mod results;
mod saved;
mod step;
mod tables;
pub mod whole;

use std::collections::HashMap;
use std::sync::Arc;

use kernels_gpu::protocol::ChannelLayout;

pub use crate::reference::Activation;
pub use device::{DeviceCall, DeviceConvolution};
pub use error::{ExpiredHalo, ShortConvolutionError};
pub use inputs::{ConvolutionInput, ConvolutionUpstream, MAX_CONVOLUTIONS, WIDTHS};
pub use results::{
    ConvolutionBackward, ConvolutionForward, ConvolutionGradients, ConvolutionGradientsOut, ConvolutionOut,
    ConvolutionOutput,
};
pub use saved::SavedConvolution;

use super::agreement::Direction;
use super::channel::Channel;
use super::vitals::Vitals;
use super::{Device, Transport};
use crate::exec::cpu::Cpu;
use crate::exec::{ExecError, Executor};
use crate::plan::Plan;
use crate::tensor::Dtype;
use crate::world::Pe;
use inputs::Sizes;
use saved::Call;
use step::TablesOf;

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

/// Channels are told apart by who reads a message, too: every block of channels of every convolution.
type ChannelKey = (Direction, ChannelLayout, Vec<usize>);

/// One PE's side of a context-parallel short convolution. Keeps scratch memory, tables on its device, and slots in the symmetric
/// heap, from call to call.
///
/// The first call of each direction, and every call whose plan or sizes differ from the last one's of its direction, is
/// collective: the PEs compare what they are about to do. Calls in between synchronise only where halos flow.
pub struct ShortConvolution<'pe, X: Executor = Cpu> {
    pe: &'pe Pe,
    config: ConvolutionConfig,
    exec: X,
    /// Unique in this process.
    number: u64,
    channels: HashMap<ChannelKey, Channel>,
    agreed: HashMap<Direction, Arc<Call>>,
    forward_tables: TablesOf<X>,
    backward_tables: TablesOf<X>,
    vitals: Vitals<X>,
    /// Steps whose launches were made, replays included.
    steps: u64,
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
        Self::on(pe, config, cpu)
    }
}

impl<'pe, X: Executor> ShortConvolution<'pe, X> {
    /// The operation of `pe` on the device of `exec`, with the options `config`. Not collective.
    ///
    /// # Errors
    /// [`ShortConvolutionError`] if the device has no memory for what steps count.
    pub fn on(pe: &'pe Pe, config: ConvolutionConfig, mut exec: X) -> Result<Self, ShortConvolutionError> {
        let vitals = Vitals::new(&mut exec, false)?;
        Ok(Self {
            pe,
            config,
            exec,
            number: super::next_operation(),
            channels: HashMap::new(),
            agreed: HashMap::new(),
            forward_tables: TablesOf::default(),
            backward_tables: TablesOf::default(),
            vitals,
            steps: 0,
            failed: None,
        })
    }

    /// Options.
    pub fn config(&self) -> &ConvolutionConfig {
        &self.config
    }

    /// What computes.
    pub fn executor(&self) -> &X {
        &self.exec
    }

    /// What computes, to be set between calls.
    pub fn executor_mut(&mut self) -> &mut X {
        &mut self.exec
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
        let mut outputs = self.outputs(plan, inputs)?;
        let mut out: Vec<_> = outputs.iter_mut().map(ConvolutionOutput::view_mut).collect();
        let report = self.forward_into(plan, inputs, activation, &mut out)?;
        Ok(ConvolutionForward { outputs, report })
    }

    /// [`forward`](Self::forward), and what [`backward`](Self::backward) needs of it.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_saving(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        activation: Activation,
    ) -> Result<(ConvolutionForward, SavedConvolution<X>), ShortConvolutionError> {
        let mut outputs = self.outputs(plan, inputs)?;
        let mut out: Vec<_> = outputs.iter_mut().map(ConvolutionOutput::view_mut).collect();
        let (report, saved) = self.forward_saving_into(plan, inputs, activation, &mut out)?;
        Ok((ConvolutionForward { outputs, report }, saved))
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
        saved: &SavedConvolution<X>,
        upstream: &[ConvolutionUpstream<'_>],
    ) -> Result<ConvolutionBackward, ShortConvolutionError> {
        let sizes = self.check(plan, inputs)?;
        let mut gradients: Vec<_> = inputs.iter().map(|input| ConvolutionGradients::zeros(input, &sizes)).collect();
        let mut out: Vec<_> = gradients.iter_mut().map(ConvolutionGradients::view_mut).collect();
        let report = self.backward_into(plan, inputs, activation, saved, upstream, &mut out)?;
        Ok(ConvolutionBackward { gradients, report })
    }

    /// Gives what a forward call saved to the next one, if no backward call will use it any more.
    pub fn release(&mut self, saved: SavedConvolution<X>) {
        if let Some(memory) = saved.into_memory() {
            self.exec.reuse(memory);
        }
    }

    /// Bytes of scratch memory, apart from inputs, results, what [`SavedConvolution`] holds, and the symmetric heap.
    pub fn scratch_bytes(&self) -> usize {
        self.exec.scratch_bytes() + self.table_bytes()
    }

    /// Bytes of tables and words.
    fn table_bytes(&self) -> usize {
        self.forward_tables.bytes() + self.backward_tables.bytes() + self.vitals.bytes()
    }
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

/// The error of a wait that expired in a kernel; another PE's failure, if that was the reason.
fn check_trap<X: Executor>(exec: &X, pe: &Pe) -> Result<(), ShortConvolutionError> {
    match super::launched::expired(exec, pe)? {
        Some(expired) => Err(ShortConvolutionError::Expired(ExpiredHalo { expired })),
        None => Ok(()),
    }
}
