//! Where kernels run and their memory lies: the CPU ([`cpu`]) or a GPU.
//!
//! A step is written once against [`Executor`]. It sees addresses only: the executor says where a tensor of the caller is reached
//! by kernels (in place, if it lies at [`Executor::location`]), and gives scratch memory and memory to keep.

pub mod conformance;
mod convolution;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod image;
mod kernels;
mod tensors;

use std::any::Any;
use std::time::{Duration, Instant};

use kernels_gpu::params::{Sizes, Tensor as Param};
use kernels_gpu::protocol::TrapRecord;
use kernels_gpu::tile::host::Checker;

pub use convolution::ConvolutionSlot;
pub use error::ExecError;
pub use image::{Image, Part};
pub use kernels::Kernel;
#[cfg(feature = "cuda")]
use kernels::{hopper_entries, local_entries, sending_entries};
pub use tensors::{DeviceInputs, DeviceTensor};

use crate::inputs::Op;
use crate::tensor::{Dtype, Location, TensorView, TensorViewMut};
use crate::world::Pe;

/// Where a step waits for other PEs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Waits {
    /// In kernels.
    #[default]
    Kernels,
    /// On the host, between kernels: PEs share a device, and nothing guarantees that a kernel starts while those of another
    /// PE run. So a step launches no kernel that waits for one that is not known to have ended.
    Host,
}

/// One object of the symmetric heap, as bytes.
pub struct SymmetricBytes {
    /// Its address on every PE, as this PE's kernels reach it; `None` where they do not.
    pub addresses: Vec<Option<u64>>,
    /// Keeps the memory; dropping it gives it back.
    pub owner: Box<dyn Any>,
}

/// The tensors of a step that belong to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // named as in `Inputs` and `Forward`
pub enum Slot {
    Q,
    K,
    V,
    Gate,
    ALog,
    DtBias,
    Beta,
    InitialState,
    Output,
    FinalState,
    /// Gradient of the outputs.
    DOutput,
    /// Gradient of the final states.
    DFinalState,
    DQ,
    DK,
    DV,
    DGate,
    DALog,
    DDtBias,
    DBeta,
    DInitialState,
    /// Of a short convolution: which one of the call, and which of its tensors.
    Convolution(u8, ConvolutionSlot),
}

/// Scratch memory of a step, kept from call to call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scratch {
    /// Operands of every chunk and head.
    Operands,
    /// Decay of every chunk and head.
    Decay,
    /// What every chunk and head does to the norm of a state.
    Factors,
    /// Outputs before correction.
    OLocal,
    /// q-tilde.
    QTilde,
    /// This PE's own summaries.
    Own,
    /// Which records are there, of those that are made beside a walk.
    Ready,
    /// Merged states before receiving segments.
    StateIn,
    /// Backward: the state before every chunk.
    States,
    /// Backward: what every chunk writes.
    VNew,
    /// Backward: gradient of the state after every chunk.
    DStates,
    /// Backward: gradient of what every chunk writes.
    DVNew,
    /// Backward: merged gradients of the states after segments that go on elsewhere.
    StateOut,
    /// Backward: gradient of q of every value head.
    DQHeads,
    /// Backward: gradient of k of every value head.
    DKHeads,
    /// Backward: each chunk's share of the gradient of A_log.
    ALogShares,
    /// Backward: each chunk's share of the gradient of dt_bias.
    DtBiasShares,
    /// Short convolution, forward: inputs that came from the PEs before this one, where no backward step needs them.
    ConvolutionBefore,
    /// Short convolution, backward: gradients that came from the PEs after this one.
    ConvolutionAfter,
    /// Short convolution, backward: shares of the gradients of weights and bias, of one convolution of the call.
    ConvolutionShares(u8),
}

/// Memory of a device, see [`Executor::keep`].
pub trait KeptMemory {
    /// Address for kernels; 0 if there are no bytes. Moving the handle does not move the memory.
    fn address(&mut self) -> u64;

    /// Bytes that it takes.
    fn bytes(&self) -> usize;
}

/// How many blocks a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// This many, in any order: for kernels whose blocks do not wait for each other.
    Blocks(usize),
    /// As many as run at the same time: for kernels that take their work by ticket.
    Resident,
}

/// Whether a kernel runs while a walk does that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlap {
    /// No: kernels run one after the other, or other PEs may need the multiprocessors that both would hold.
    Never,
    /// Where it is worth it.
    Auto,
    /// For so many hundredths of the chunks: for comparisons.
    Percent(u32),
}

/// Which of a kernel's bodies runs: they compute the same from the same parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// The one for all devices and sizes.
    Portable,
    /// The one of [`kernels_gpu::hopper`].
    Hopper,
}

/// The blocks of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// How many.
    pub grid: Grid,
    /// What they run.
    pub body: Body,
    /// Warpgroups in each.
    pub warpgroups: usize,
    /// Dynamic shared memory of each, in bytes.
    pub shared_bytes: usize,
}

impl From<(Grid, usize, usize)> for Blocks {
    /// Blocks of the portable body.
    fn from((grid, warpgroups, shared_bytes): (Grid, usize, usize)) -> Self {
        Blocks { grid, body: Body::Portable, warpgroups, shared_bytes }
    }
}

/// A launch, apart from its parameters.
pub struct Launch<'a> {
    /// Which delta rule.
    pub op: Op,
    /// Element type of the operands.
    pub dtype: Dtype,
    /// Its blocks.
    pub blocks: Blocks,
    /// Checked mode, on the CPU: what must be written.
    pub checker: Option<&'a Checker>,
    /// Polled in waits, on the CPU: whether another PE has failed. On a GPU the host polls it while it waits.
    pub peer_failed: &'a (dyn Fn() -> bool + Sync),
}

/// How long launches took.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Each launch, in order.
    pub launches: Vec<Duration>,
    /// From the begin of the first to the end of the last, with whatever was between them; [`Executor::begin`] is the first.
    pub span: Duration,
}

/// A PE's device. Everything it is asked happens in order, as on one stream.
pub trait Executor {
    /// Memory that outlives the step that filled it: what a forward step leaves to its backward step. Its holder owns it.
    type Memory: KeptMemory;

    /// `bytes` bytes to keep, whose contents are whatever was there.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for it.
    fn keep(&mut self, bytes: usize) -> Result<Self::Memory, ExecError>;

    /// Takes memory that is no longer needed, for the next [`Executor::keep`]. (It may as well be dropped.)
    fn reuse(&mut self, memory: Self::Memory);

    /// Sets bytes of kept memory from byte `at` on, in the order of launches; complete when it returns.
    ///
    /// # Errors
    /// [`ExecError`] if they cannot be brought there.
    ///
    /// # Panics
    /// If they do not lie inside.
    fn write(&mut self, memory: &mut Self::Memory, at: usize, bytes: &[u8]) -> Result<(), ExecError>;

    /// Reads bytes of kept memory from byte `at` on, after all launches so far.
    ///
    /// # Errors
    /// [`ExecError`] if a launch failed.
    ///
    /// # Panics
    /// If they do not lie inside.
    fn read(&mut self, memory: &mut Self::Memory, at: usize, bytes: &mut [u8]) -> Result<(), ExecError>;

    /// Where kernels find tensors without a copy.
    fn location(&self) -> Location;

    /// Where kernels reach a tensor of the caller, in place if it lies at [`Executor::location`]; absent if it has no elements.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for it, or it cannot be brought there.
    fn input(&mut self, slot: Slot, tensor: &TensorView<'_>) -> Result<Param, ExecError>;

    /// Where kernels write a result: `tensor` itself if it lies at [`Executor::location`], otherwise memory that becomes it
    /// with [`Executor::fetch`].
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for it.
    fn output(&mut self, slot: Slot, tensor: &mut TensorViewMut<'_>) -> Result<Param, ExecError>;

    /// Brings a result into the caller's tensor, after all launches so far.
    ///
    /// # Errors
    /// [`ExecError`] if a launch failed.
    fn fetch(&mut self, slot: Slot, tensor: &mut TensorViewMut<'_>) -> Result<(), ExecError>;

    /// `len` elements of scratch memory; absent if 0. Its contents are whatever was there.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for it.
    fn scratch(&mut self, which: Scratch, len: usize, dtype: Dtype) -> Result<Param, ExecError>;

    /// Bytes of scratch memory.
    fn scratch_bytes(&self) -> usize;

    /// Waits for all launches so far. While it waits it polls `peer_failed`, and tells waiting kernels to give up when another
    /// PE has failed.
    ///
    /// # Errors
    /// [`ExecError`] if a launch failed.
    fn wait(&mut self, peer_failed: &dyn Fn() -> bool) -> Result<(), ExecError>;

    /// Address, for kernels, of the page that host and kernels share while kernels run ([`kernels_gpu::protocol::Watch`]). It is
    /// clear until something fails, and nothing clears it then.
    fn watch(&self) -> u64;

    /// The wait that a kernel gave up, as the page has it.
    fn trap(&self) -> TrapRecord;

    /// Makes ready for a step's launches: whether they are timed one by one from here on. Finds out whether they are captured,
    /// which ends timing as well.
    ///
    /// # Errors
    /// [`ExecError`] if the device does not answer.
    fn prepare(&mut self, timed: bool) -> Result<(), ExecError>;

    /// Whether launches since [`Executor::prepare`] are captured, to be made again and again later, in place of being made.
    /// Nothing can be allocated or brought to the device then.
    fn captures(&self) -> bool;

    /// The first launch of a step: [`kernels_gpu::begin`], or a kernel on the same grid that begins with it. It counts for
    /// [`Times::span`], not as one of [`Times::launches`].
    ///
    /// # Errors
    /// As [`Executor::launch`].
    fn begin<K: Kernel>(&mut self, params: &K) -> Result<(), ExecError>;

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`ExecError`] if it cannot be launched, or on the CPU if it broke a rule.
    fn launch<K: Kernel>(&mut self, launch: &Launch<'_>, params: &K) -> Result<(), ExecError>;

    /// Whether [`Executor::launch_beside`] runs kernels at the same time.
    fn overlap(&self) -> Overlap {
        Overlap::Never
    }

    /// Launches the first of two parts of a kernel, then `walk`, and beside it, as soon as all its blocks run, the other part, for
    /// which it may wait. What is launched next comes after all of them. They count as one of [`Times::launches`].
    ///
    /// # Errors
    /// As [`Executor::launch`].
    fn launch_beside<K: Kernel, W: Kernel>(
        &mut self,
        [before, beside]: [(&Launch<'_>, &K); 2],
        walk: (&Launch<'_>, &W),
    ) -> Result<(), ExecError> {
        self.launch(before.0, before.1)?;
        self.launch(beside.0, beside.1)?;
        self.launch(walk.0, walk.1)
    }

    /// A point after all launches so far.
    type Mark;

    /// Puts a mark behind all launches so far.
    ///
    /// # Errors
    /// [`ExecError`] if the device gives none.
    fn mark(&mut self) -> Result<Self::Mark, ExecError>;

    /// Whether all launches before the mark have ended.
    ///
    /// # Errors
    /// [`ExecError`] if one of them failed.
    fn reached(&mut self, mark: &Self::Mark) -> Result<bool, ExecError>;

    /// Time from one mark that was reached to another.
    ///
    /// # Errors
    /// [`ExecError`] if the device does not tell.
    fn between(&self, from: &Self::Mark, to: &Self::Mark) -> Result<Duration, ExecError>;

    /// Lets waiting kernels give up, because another PE has failed.
    fn give_up(&mut self);

    /// How long the timed launches since the last call took. Waits for them.
    ///
    /// # Errors
    /// [`ExecError`] if a launch failed.
    fn take_times(&mut self) -> Result<Times, ExecError>;

    /// Copies bytes between addresses that this PE's kernels reach, such as a peer's slots, after all launches so far.
    ///
    /// # Safety
    /// Both ranges must be valid, and nobody else may write the source or touch the destination meanwhile.
    ///
    /// # Errors
    /// [`ExecError`] if the copy failed.
    unsafe fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), ExecError>;

    /// Collective: an object of `bytes` zeros in the symmetric heap, aligned for words.
    ///
    /// # Errors
    /// [`ExecError::Heap`].
    fn symmetric(&mut self, pe: &Pe, name: &str, bytes: usize) -> Result<SymmetricBytes, ExecError>;

    /// Bytes of the symmetric heap in use.
    fn heap_bytes(&self, pe: &Pe) -> usize;

    /// Blocks that wait at the same time at most: what a sum of waits over blocks is divided by.
    fn concurrency(&self) -> usize;

    /// Multiprocessors over which a step is worth being spread, at the price of more work in all. 1 on the CPU, where work counts.
    fn multiprocessors(&self) -> usize;

    /// The body of kernels for problems of these sizes and operand type.
    fn body(&self, sizes: &Sizes, operands: Dtype) -> Body;

    /// Whether checked mode checks anything here.
    fn checks(&self) -> bool;

    /// Where a step must wait for other PEs on this device.
    fn waits(&self) -> Waits;

    /// Most bytes of the device's memory that this PE held at once: tensors that were brought there, scratch, tables, what steps
    /// kept, and its objects of the symmetric heap. The caller's own tensors do not count where kernels use them in place.
    fn peak_device_bytes(&self, pe: &Pe) -> usize;

    /// Sets the zero of the clock of time stamps, where the host sets it.
    fn set_clock_origin(&mut self, origin: Instant);
}
