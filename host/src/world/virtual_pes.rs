//! PEs as threads of this process, on one GPU or on several that reach each other: no NVSHMEM is needed.
//!
//! PEs that share a GPU share its SMs. Their kernels wait for each other, so all blocks of all of them must run at once:
//! see [`VirtualPe::sharers`].

use std::any::Any;
use std::sync::Arc;

use super::{Pe, RunError, WorldError, WorldOptions, run_threads};
use crate::exec::cuda::{CudaError, DeviceBuffer, Gpu};
use crate::heap::{ALIGN, DevicePool, Heap};

/// Most PEs on one GPU.
pub const MAX_PER_GPU: usize = 8;

/// The virtual PEs could not be set up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum VirtualError {
    #[error("{size} PEs on {gpus} GPUs were asked for; a GPU takes up to {MAX_PER_GPU}")]
    Size { size: usize, gpus: usize },
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// What a PE's body gets.
#[derive(Debug)]
pub struct VirtualPe<'a> {
    /// Membership of the world.
    pub pe: &'a Pe,
    /// Its GPU.
    pub gpu: &'a Gpu,
    /// The symmetric heap in GPU memory.
    pub heap: Heap<DevicePool>,
    /// PEs on this GPU, itself included.
    pub sharers: usize,
}

/// The pools of all PEs. They go after the last PE has ended; the release waits for kernels that still run.
#[derive(Debug)]
struct Pools {
    /// By GPU; PE `rank` has place `rank / gpus` in that of GPU `rank % gpus`.
    buffers: Vec<DeviceBuffer>,
    stride: usize,
}

impl Pools {
    fn new(size: usize, gpus: &[Gpu], pool_bytes: usize) -> Result<Self, VirtualError> {
        if gpus.is_empty() || size == 0 || size > gpus.len() * MAX_PER_GPU {
            return Err(VirtualError::Size { size, gpus: gpus.len() });
        }
        let stride = pool_bytes.next_multiple_of(ALIGN);
        for (from, to) in gpus.iter().flat_map(|from| gpus.iter().map(move |to| (from, to))) {
            from.enable_access(to)?;
        }
        let buffer = |(i, gpu): (usize, &Gpu)| gpu.alloc(stride * sharers(i, size, gpus.len()));
        let buffers = gpus.iter().enumerate().map(buffer).collect::<Result<_, _>>()?;
        Ok(Self { buffers, stride })
    }

    fn address(&self, rank: usize) -> u64 {
        let (gpu, place) = (rank % self.buffers.len(), rank / self.buffers.len());
        self.buffers[gpu].address() + (place * self.stride) as u64
    }
}

/// PEs on GPU `gpu` of `gpus` in a world of `size`.
fn sharers(gpu: usize, size: usize, gpus: usize) -> usize {
    size.saturating_sub(gpu).div_ceil(gpus)
}

/// Runs `body` on `size` PEs, each a thread, PE `rank` on GPU `rank` modulo their number, with `pool_bytes` of symmetric
/// heap each in GPU memory (`options.heap_bytes` is the heap in host memory beside it). Returns their values by rank.
///
/// # Errors
/// As [`run_threads`]; [`VirtualError`], as an error of PE 0, if the GPUs do not reach each other or have no room.
pub fn run_virtual_pes<T, E>(
    size: usize,
    gpus: &[Gpu],
    options: &WorldOptions,
    pool_bytes: usize,
    body: impl Fn(&VirtualPe<'_>) -> Result<T, E> + Sync,
) -> Result<Vec<T>, RunError<E>>
where
    T: Send,
    E: Send + std::fmt::Display + From<WorldError> + From<VirtualError>,
{
    let failed = |error: VirtualError| RunError::Pe { rank: 0, error: E::from(error) };
    let pools = Arc::new(Pools::new(size, gpus, pool_bytes).map_err(failed)?);
    // A PE that drops a buffer must not wait for the kernel of another that waits for it.
    let _deferrals: Vec<_> = gpus.iter().map(Gpu::defer_releases).collect();
    run_threads(size, options, |pe| {
        let rank = pe.rank();
        let gpu = &gpus[rank % gpus.len()];
        let addresses = (0..size).map(|peer| Some(pools.address(peer))).collect();
        let owner: Arc<dyn Any + Send + Sync> = Arc::clone(&pools) as _;
        // SAFETY: the addresses are places of their own in buffers that `owner` keeps; every GPU reaches all of them.
        let pool = unsafe { DevicePool::new(rank, gpu, pool_bytes, addresses, owner) };
        let pool = pool.map_err(VirtualError::Cuda)?;
        let sharers = sharers(rank % gpus.len(), size, gpus.len());
        body(&VirtualPe { pe, gpu, heap: Heap::over(pe, pool), sharers })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pes_are_dealt_out_to_gpus() {
        assert_eq!((0..3).map(|gpu| sharers(gpu, 7, 3)).collect::<Vec<_>>(), [3, 2, 2]);
        assert_eq!((0..3).map(|gpu| sharers(gpu, 2, 3)).collect::<Vec<_>>(), [1, 1, 0]);
        assert_eq!(sharers(0, 8, 1), 8);
    }

    #[test]
    fn too_many_pes_are_refused_before_any_gpu_is_touched() {
        assert_eq!(Pools::new(1, &[], 4096).expect_err("no GPU"), VirtualError::Size { size: 1, gpus: 0 });
    }
}
