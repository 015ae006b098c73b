//! A PE's GPU: its pool of the symmetric heap, the kernels that reach the other PEs', and executors.

use std::sync::Arc;

use deltalink::exec::ExecError;
use deltalink::exec::cuda::{self, CudaExecutor, Kernels, Sharing};
use deltalink::heap::{DevicePool, Heap};
use deltalink::op::OpError;
use deltalink::world::Pe;
use deltalink::world::nvshmem::Nvshmem;

use crate::errors::Failure;

/// A GPU in use by one PE.
pub struct Gpu<'pe> {
    pe: &'pe Pe,
    gpu: cuda::Gpu,
    kernels: Kernels,
    pool: Pool<'pe>,
}

/// Who made the pool.
enum Pool<'pe> {
    /// This PE, which is alone.
    Own(Heap<DevicePool>),
    /// NVSHMEM, for all PEs.
    Nvshmem(Box<Nvshmem<'pe>>),
}

impl<'pe> Gpu<'pe> {
    /// Opens GPU `ordinal` with `heap_bytes` of symmetric heap. Collective if there are other PEs.
    ///
    /// # Errors
    /// [`Failure`] if there is no such GPU, NVSHMEM does not start or there is no memory.
    pub fn start(pe: &'pe Pe, ordinal: usize, heap_bytes: usize) -> Result<Self, Failure> {
        let failed = |error: ExecError| Failure::from(OpError::from(error));
        let gpu = cuda::Gpu::open(ordinal).map_err(|error| failed(error.into()))?;
        let (pool, kernels) = if pe.size() == 1 {
            (Self::own_pool(pe, &gpu, heap_bytes), Kernels::direct(&gpu).map_err(ExecError::from))
        } else {
            let mut nvshmem = Nvshmem::start(pe, &gpu, heap_bytes).map_err(|error| failed(error.into()))?;
            let kernels = if nvshmem.needs_puts() {
                nvshmem.kernels().map_err(ExecError::from)
            } else {
                Kernels::direct(&gpu).map_err(ExecError::from)
            };
            (Ok(Pool::Nvshmem(Box::new(nvshmem))), kernels)
        };
        match (pool, kernels) {
            (Ok(pool), Ok(kernels)) => Ok(Self { pe, gpu, kernels, pool }),
            (Ok(Pool::Nvshmem(nvshmem)), Err(error)) => {
                // The others learn of it by this PE's failure; they are not waited for.
                pe.report_failure(&error.to_string());
                nvshmem.abandon();
                Err(failed(error))
            }
            (Err(error), _) | (_, Err(error)) => Err(failed(error)),
        }
    }

    fn own_pool(pe: &Pe, gpu: &cuda::Gpu, heap_bytes: usize) -> Result<Pool<'pe>, ExecError> {
        let bytes = heap_bytes.max(1).next_multiple_of(deltalink::heap::ALIGN);
        let buffer = gpu.alloc(bytes)?;
        let addresses = vec![Some(buffer.address())];
        // SAFETY: the buffer has as many bytes, belongs to this GPU and lives as its owner does; nobody else uses it.
        let memory = unsafe { DevicePool::new(pe.rank(), gpu, bytes, addresses, Arc::new(buffer)) }?;
        Ok(Pool::Own(Heap::over(pe, memory)))
    }

    /// Whose it is.
    pub fn pe(&self) -> &'pe Pe {
        self.pe
    }

    /// The symmetric heap.
    pub fn heap(&self) -> &Heap<DevicePool> {
        match &self.pool {
            Pool::Own(heap) => heap,
            Pool::Nvshmem(nvshmem) => nvshmem.heap(),
        }
    }

    /// An executor.
    ///
    /// # Errors
    /// [`ExecError`] if the GPU gives no stream.
    pub fn executor(&self) -> Result<CudaExecutor, ExecError> {
        let sharing = match &self.pool {
            Pool::Own(_) => Sharing::NONE,
            Pool::Nvshmem(nvshmem) => nvshmem.sharing(),
        };
        Ok(CudaExecutor::new(&self.gpu, self.kernels.clone(), self.heap().clone(), sharing)?)
    }

    /// Ends NVSHMEM together with the other PEs; after a failure, or if not `together`, it waits for nobody. If buffers of the heap are
    /// still held NVSHMEM stays up until the process ends, and they stay good.
    pub fn close(self, together: bool) {
        drop(self.kernels);
        match self.pool {
            Pool::Nvshmem(nvshmem) if together && self.pe.failed_peer().is_none() => {
                // What it could say has no consequence: the world ends either way.
                drop(nvshmem.close());
            }
            Pool::Nvshmem(nvshmem) => nvshmem.abandon(),
            Pool::Own(_) => {}
        }
    }
}
