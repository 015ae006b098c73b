//! Errors of NVSHMEM.

use std::ffi::c_int;

use nvshmem_sys::{LoadError, Version};

use crate::exec::cuda::CudaError;
use crate::heap::HeapError;
use crate::world::WorldError;

/// NVSHMEM could not be started or used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum NvshmemError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    World(#[from] WorldError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(
        "PE 0 has loaded NVSHMEM {first} ({first_path}), PE {second_rank} {second} ({second_path}); give all PEs the same \
         library (NVSHMEM_HOME or LD_LIBRARY_PATH)"
    )]
    Versions { first: String, first_path: String, second_rank: usize, second: String, second_path: String },
    #[error(
        "what PE {rank} says about its GPU and its NVSHMEM cannot be read ({reason}); start all PEs with one program"
    )]
    Unreadable { rank: usize, reason: String },
    #[error(
        "{call} ends with {code} on PE {rank}; NVSHMEM's own message is on standard error, NVSHMEM_DEBUG=INFO makes it say \
         more, NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME names the network interface for its start"
    )]
    Call { call: &'static str, rank: usize, code: c_int },
    #[error(
        "NVSHMEM takes this process for PE {found_rank} of {found_size}, the launcher started it as PE {rank} of {size}; \
         set no NVSHMEM_BOOTSTRAP variables"
    )]
    Place { rank: usize, size: usize, found_rank: c_int, found_size: c_int },
    #[error(
        "NVSHMEM has no {bytes} bytes of symmetric memory on PE {rank}: {free} of {total} bytes of its GPU are free, and it \
         takes memory in pieces of NVSHMEM_CUMEM_GRANULARITY (512 MiB); ask for a smaller heap"
    )]
    NoMemory { rank: usize, bytes: usize, free: usize, total: usize },
    #[error(
        "module {module} has no NVSHMEM device library (no {}); link it into the module, or do not attach it",
        Version::DEVICE_SYMBOL
    )]
    NoDeviceLibrary { module: String },
    #[error(
        "module {module} was linked with NVSHMEM {device}, the host library is {host} ({path}); major and minor version \
         must be the same: link the module with the library of that version, or load the other host library \
         (NVSHMEM_HOME or LD_LIBRARY_PATH)"
    )]
    DeviceVersion { module: String, device: Version, host: Version, path: String },
    #[error(
        "NVSHMEM cannot end while objects of its heap are held ({live} live); drop them and all handles of the heap first"
    )]
    InUse { live: usize },
    #[error("NVSHMEM cannot end: {0}")]
    Lent(HeapError),
}
