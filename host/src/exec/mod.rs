//! Where kernels run and their memory lies: the CPU ([`cpu`]) or a GPU.
//!
//! A step is written once against [`Executor`]. It sees addresses only: the executor says where a tensor of
//! the caller is reached by kernels, gives scratch memory, and holds the step's tables and words in one block.

pub mod conformance;
mod convolution;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod image;
mod kernels;

use std::any::Any;
use std::time::{Duration, Instant};

use kernels_gpu::params::{Sizes, Tensor as Param};
use kernels_gpu::protocol::TrapRecord;
use kernels_gpu::tile::host::{Checker, Fault};

pub use convolution::ConvolutionSlot;
pub use image::{Image, Part};
pub use kernels::Kernel;
#[cfg(feature = "cuda")]
use kernels::{hopper_entries, local_entries, sending_entries};

use crate::heap::HeapError;
use crate::inputs::Op;
use crate::tensor::{Dtype, Tensor, TensorView};
use crate::world::{Pe, WorldError};

/// A kernel could not be run, or broke a rule.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExecError {
    /// The CPU back end's threads.
    #[error(transparent)]
    Pool(#[from] cpu::PoolError),
    /// The symmetric heap.
    #[error(transparent)]
    Heap(#[from] HeapError),
    /// Another PE.
    #[error(transparent)]
    World(#[from] WorldError),
    /// A GPU.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] cuda::CudaError),
    /// NVSHMEM.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Nvshmem(#[from] crate::world::nvshmem::NvshmemError),
    /// A PE whose memory this PE cannot reach, in bulk mode.
    #[error(
        "PE {rank}'s memory cannot be copied from, which bulk mode does; use mode overlap or exact, which send, or put the \
         PEs on GPUs of one NVLink domain"
    )]
    NotReached {
        /// The PE.
        rank: usize,
    },
    /// Puts that no library is there for.
    #[cfg(feature = "cuda")]
    #[error(
        "transport put was asked for, which is NVSHMEM's, and PEs that are threads have no NVSHMEM; make them processes \
         (--world processes, or a launcher), or use transport auto"
    )]
    PutsOfThreads,
    /// A kernel broke a rule that the CPU back end checks.
    #[error("{0}; this is a bug of deltalink, not of the input: please report it with the command that showed it")]
    Fault(Fault),
}

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

impl From<Fault> for ExecError {
    fn from(fault: Fault) -> Self {
        ExecError::Fault(fault)
    }
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
    /// From the begin of the first to the end of the last, with whatever was between them.
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

    /// Where kernels reach a tensor of the caller; absent if it has no elements.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for it, or it cannot be brought there.
    fn input(&mut self, slot: Slot, tensor: &TensorView<'_>) -> Result<Param, ExecError>;

    /// Where kernels write a result, whose memory is `tensor` or becomes it with [`Executor::fetch`].
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for it.
    fn output(&mut self, slot: Slot, tensor: &mut Tensor) -> Result<Param, ExecError>;

    /// Brings a result into the caller's tensor, after all launches so far.
    ///
    /// # Errors
    /// [`ExecError`] if a launch failed.
    fn fetch(&mut self, slot: Slot, tensor: &mut Tensor) -> Result<(), ExecError>;

    /// `len` elements of scratch memory; absent if 0. Its contents are whatever was there.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for it.
    fn scratch(&mut self, which: Scratch, len: usize, dtype: Dtype) -> Result<Param, ExecError>;

    /// Bytes of scratch memory, tables included.
    fn scratch_bytes(&self) -> usize;

    /// Puts a step's tables and words where kernels reach them, and returns their address.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for it.
    fn put_image(&mut self, image: &Image) -> Result<u64, ExecError>;

    /// Waits for all launches so far, and reads the words back that kernels wrote. While it waits it polls `peer_failed`,
    /// and tells waiting kernels to give up when another PE has failed.
    ///
    /// # Errors
    /// [`ExecError`] if a launch failed.
    fn get_image(&mut self, image: &mut Image, peer_failed: &dyn Fn() -> bool) -> Result<(), ExecError>;

    /// Clears the page that host and kernels share while kernels run ([`kernels_gpu::protocol::Watch`]), and returns its
    /// address for kernels. No launch may be running.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for it.
    fn watch(&mut self) -> Result<u64, ExecError>;

    /// The wait that a kernel gave up, as the page has it.
    fn trap(&self) -> TrapRecord;

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`ExecError`] if it cannot be launched, or on the CPU if it broke a rule.
    fn launch<K: Kernel>(&mut self, launch: &Launch<'_>, params: &K) -> Result<(), ExecError>;

    /// How long the launches since the last call took. Waits for them.
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
