//! Where kernels run and their memory lies: the CPU ([`cpu`]) or a GPU.
//!
//! A step is written once against [`Executor`]. It sees addresses only: the executor says where a tensor of
//! the caller is reached by kernels, gives scratch memory, and holds the step's tables and words in one block.

mod convolution;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod image;

use std::any::Any;
use std::time::{Duration, Instant};

use kernels_gpu::element::Element;
use kernels_gpu::fixup::fix_out;
use kernels_gpu::gate::{Gdn, Kda};
#[cfg(feature = "cuda")]
use kernels_gpu::hopper;
use kernels_gpu::params::{FixParams, PrepParams, ScanParams, Sizes, Tensor as Param};
use kernels_gpu::prep::prep;
use kernels_gpu::scan::scan_push;
use kernels_gpu::tile::Warpgroup;
use kernels_gpu::tile::host::{Checker, Fault};

pub use convolution::ConvolutionSlot;
pub use image::{Image, Part};

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
    /// A PE whose memory this PE's kernels cannot reach.
    #[error("kernels cannot reach the memory of PE {rank} directly; put the PEs on GPUs of one NVLink domain")]
    NotReached {
        /// The PE.
        rank: usize,
    },
    /// A kernel broke a rule that the CPU back end checks.
    #[error("{0}; this is a bug of deltalink, not of the input: please report it with the command that showed it")]
    Fault(Fault),
}

/// One object of the symmetric heap, as bytes.
pub struct SymmetricBytes {
    /// Its address on every PE, as this PE's kernels reach it.
    pub addresses: Vec<u64>,
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
    /// Outputs before correction.
    OLocal,
    /// q-tilde.
    QTilde,
    /// This PE's own summaries.
    Own,
    /// Merged states before receiving segments.
    StateIn,
    /// Short convolution, backward: gradients that came from the PEs after this one.
    ConvolutionAfter,
    /// Short convolution, backward: shares of the gradients of weights and bias, of one convolution of the call.
    ConvolutionShares(u8),
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

/// A launch, apart from its parameters.
pub struct Launch<'a> {
    /// Which delta rule.
    pub op: Op,
    /// Element type of the operands.
    pub dtype: Dtype,
    /// Blocks.
    pub grid: Grid,
    /// Warpgroups in a block.
    pub warpgroups: usize,
    /// The body that runs.
    pub body: Body,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// Checked mode, on the CPU: what must be written.
    pub checker: Option<&'a Checker>,
    /// Polled in long waits, on the CPU: whether another PE has failed.
    pub peer_failed: &'a (dyn Fn() -> bool + Sync),
}

/// Launch parameters, which name their kernel.
pub trait Kernel: bytemuck::Pod + Sync {
    /// Name of the kernel, without gate and element type.
    const NAME: &'static str;
    /// The kernel for the CPU.
    fn host_entry(op: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self);
    /// The kernel's name in a device module.
    fn device_entry(op: Op, dtype: Dtype) -> String;
    /// The name of the body for Hopper in a device module, for blocks of `warpgroups`.
    fn hopper_entry(op: Op, warpgroups: usize) -> String {
        let _ = warpgroups;
        Self::device_entry(op, Dtype::Bf16)
    }
}

/// Instantiates a kernel for the operand type of a launch.
macro_rules! by_dtype {
    ($dtype:expr, $e:ident => $body:expr) => {
        match $dtype {
            Dtype::F32 => {
                type $e = f32;
                $body
            }
            Dtype::Bf16 => {
                type $e = half::bf16;
                $body
            }
            Dtype::F16 => {
                type $e = half::f16;
                $body
            }
        }
    };
}

impl Kernel for PrepParams {
    const NAME: &'static str = "prep";
    fn host_entry(op: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        fn of<E: Element>(op: Op) -> fn(&mut Warpgroup<'_>, &PrepParams) {
            match op {
                Op::Kda => prep::<Kda, E>,
                Op::Gdn => prep::<Gdn, E>,
            }
        }
        by_dtype!(dtype, E => of::<E>(op))
    }
    fn device_entry(op: Op, dtype: Dtype) -> String {
        format!("prep_{op}_{dtype}")
    }
    fn hopper_entry(op: Op, _: usize) -> String {
        format!("prep_{op}_bf16_hopper")
    }
}

impl Kernel for ScanParams {
    const NAME: &'static str = "scan_push";
    fn host_entry(_: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        by_dtype!(dtype, E => scan_push::<E>)
    }
    fn device_entry(_: Op, dtype: Dtype) -> String {
        format!("scan_push_{dtype}")
    }
    fn hopper_entry(_: Op, warpgroups: usize) -> String {
        format!("scan_push_bf16_hopper_{}", warpgroups - 1)
    }
}

impl Kernel for FixParams {
    const NAME: &'static str = "fix_out";
    fn host_entry(_: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        by_dtype!(dtype, E => fix_out::<E>)
    }
    fn device_entry(_: Op, dtype: Dtype) -> String {
        format!("fix_out_{dtype}")
    }
}

/// Names of all kernels of a device module.
#[cfg(feature = "cuda")]
fn device_entries() -> Vec<String> {
    let mut names = Vec::new();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        names.extend([Op::Kda, Op::Gdn].map(|op| PrepParams::device_entry(op, dtype)));
        names.push(ScanParams::device_entry(Op::Kda, dtype));
        names.push(FixParams::device_entry(Op::Kda, dtype));
    }
    names.extend([Op::Kda, Op::Gdn].map(|op| PrepParams::hopper_entry(op, hopper::PREP_WARPGROUPS)));
    names.extend([1, 2].map(|walkers| ScanParams::hopper_entry(Op::Kda, walkers + 1)));
    names.extend(convolution::device_entries());
    names
}

/// A PE's device. Everything it is asked happens in order, as on one stream.
pub trait Executor {
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

    /// Waits for all launches so far, and reads the words back that kernels wrote.
    ///
    /// # Errors
    /// [`ExecError`] if a launch failed.
    fn get_image(&mut self, image: &mut Image) -> Result<(), ExecError>;

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`ExecError`] if it cannot be launched, or on the CPU if it broke a rule.
    fn launch<K: Kernel>(&mut self, launch: &Launch<'_>, params: &K) -> Result<(), ExecError>;

    /// How long each launch since the last call took, in order. Waits for them.
    ///
    /// # Errors
    /// [`ExecError`] if a launch failed.
    fn take_times(&mut self) -> Result<Vec<Duration>, ExecError>;

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
    /// [`ExecError::Heap`], or [`ExecError::NotReached`] for a PE that kernels cannot reach.
    fn symmetric(&mut self, pe: &Pe, name: &str, bytes: usize) -> Result<SymmetricBytes, ExecError>;

    /// Bytes of the symmetric heap in use.
    fn heap_bytes(&self, pe: &Pe) -> usize;

    /// Blocks that wait at the same time at most: what a sum of waits over blocks is divided by.
    fn concurrency(&self) -> usize;

    /// The body of kernels for problems of these sizes and operand type.
    fn body(&self, sizes: &Sizes, operands: Dtype) -> Body;

    /// Whether checked mode checks anything here.
    fn checks(&self) -> bool;

    /// Whether other PEs run kernels on the same device. Nothing then guarantees that a kernel starts while those of
    /// another PE run, so a step must launch no kernel that waits for one that is not known to have ended.
    fn shares_device(&self) -> bool;

    /// Sets the zero of the clock of time stamps, where the host sets it.
    fn set_clock_origin(&mut self, origin: Instant);
}
