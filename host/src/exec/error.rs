//! Errors of the devices.

use kernels_gpu::tile::host::Fault;

use crate::heap::HeapError;
use crate::tensor::Location;
use crate::world::WorldError;

/// A kernel could not be run, or broke a rule.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExecError {
    /// The CPU back end's threads.
    #[error(transparent)]
    Pool(#[from] super::cpu::PoolError),
    /// The symmetric heap.
    #[error(transparent)]
    Heap(#[from] HeapError),
    /// Another PE.
    #[error(transparent)]
    World(#[from] WorldError),
    /// A GPU.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] super::cuda::CudaError),
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
    /// A tensor of another device.
    #[error("a tensor lies on {found}, kernels of this PE reach {want}; copy it there first")]
    Elsewhere {
        /// Where it lies.
        found: Location,
        /// Where kernels reach it.
        want: Location,
    },
    /// Something that a captured step needs was not there before the capture.
    #[error(
        "{what} is made in a first call and cannot be made while the stream captures; before the capture call once with the same \
         plan, sizes and options"
    )]
    NotWarm {
        /// What is missing.
        what: &'static str,
    },
    /// A kernel broke a rule that the CPU back end checks.
    #[error("{0}; this is a bug of deltalink, not of the input: please report it with the command that showed it")]
    Fault(Fault),
}

impl From<Fault> for ExecError {
    fn from(fault: Fault) -> Self {
        ExecError::Fault(fault)
    }
}
