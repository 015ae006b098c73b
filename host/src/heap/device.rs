//! Pools in the memory of GPUs.

use std::any::Any;
use std::sync::Arc;

use bytemuck::Pod;

use super::{PoolMemory, Symmetric};
use crate::exec::cuda::{CudaError, Gpu, Stream};
use crate::tensor::Location;

/// How kernels of this PE get data to another PE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// By loads and stores at an address.
    Direct,
    /// By NVSHMEM's put-with-signal only.
    Put,
}

/// GPU memory that holds this PE's pool, and the addresses at which it reaches the others'.
#[derive(Debug)]
pub struct DevicePool {
    rank: usize,
    bytes: usize,
    /// By rank.
    addresses: Vec<Option<u64>>,
    /// For clearing memory; its own, so that it waits for no kernel.
    stream: Stream,
    /// What the memory belongs to.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl DevicePool {
    /// Pools of `bytes` bytes at `addresses`, by rank, as PE `rank` on `gpu` reaches them; `owner` keeps this PE's.
    ///
    /// # Errors
    /// [`CudaError::Call`] if the GPU gives no stream.
    ///
    /// # Safety
    /// This PE's address is the start of `bytes` bytes of `gpu`'s memory, allocated as long as `owner` lives and used for
    /// nothing else; the others' are what kernels of `gpu` reach those PEs' pools at.
    pub unsafe fn new(
        rank: usize,
        gpu: &Gpu,
        bytes: usize,
        addresses: Vec<Option<u64>>,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, CudaError> {
        Ok(Self { rank, bytes, addresses, stream: gpu.stream()?, _owner: owner })
    }

    /// The GPU of this PE.
    pub fn gpu(&self) -> &Gpu {
        self.stream.gpu()
    }

    /// How kernels get data to PE `rank`.
    ///
    /// # Panics
    /// If there is no such PE.
    pub fn reach(&self, rank: usize) -> Reach {
        if self.addresses[rank].is_some() { Reach::Direct } else { Reach::Put }
    }
}

impl PoolMemory for DevicePool {
    const KIND: &'static str = "GPU memory";

    fn location(&self) -> Location {
        Location::Gpu(self.gpu().properties().ordinal)
    }

    fn capacity(&self) -> usize {
        self.bytes
    }

    fn address(&self, rank: usize) -> Option<u64> {
        self.addresses[rank]
    }

    fn zero(&self, offset: usize, bytes: usize) -> Result<(), String> {
        assert!(offset + bytes <= self.bytes, "bytes {offset} and {bytes} more of {}", self.bytes);
        let Some(start) = self.addresses[self.rank] else {
            return Err("this PE does not reach its own pool".into());
        };
        // SAFETY: inside this PE's pool, which `_owner` keeps; the heap calls this only for blocks that nobody uses.
        let filled = unsafe { self.stream.fill(start + offset as u64, bytes, 0) };
        filled.and_then(|()| self.stream.synchronize()).map_err(|error| error.to_string())
    }
}

impl<T: Pod> Symmetric<T, DevicePool> {
    /// Address of this PE's copy.
    pub fn own_address(&self) -> u64 {
        // A pool's maker vouches for its own address; 0 makes a kernel fail rather than write elsewhere.
        self.address(self.rank()).unwrap_or(0)
    }

    /// How kernels get data to PE `rank`.
    ///
    /// # Panics
    /// If there is no such PE.
    pub fn reach(&self, rank: usize) -> Reach {
        self.memory().reach(rank)
    }

    /// Copies `values` into this PE's copy from element `at` on; complete when it returns.
    ///
    /// # Errors
    /// [`CudaError`], also for what the stream's work before it ended with.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn upload(&self, stream: &Stream, at: usize, values: &[T]) -> Result<(), CudaError> {
        let to = self.elements(at, values.len());
        // SAFETY: inside the object, which this reference keeps; `values` is borrowed until the copy is complete.
        unsafe { stream.upload(to, bytemuck::cast_slice(values))? };
        stream.synchronize()
    }

    /// Copies from this PE's copy, from element `at` on, to `values`; complete when it returns.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    ///
    /// # Panics
    /// If there are not as many elements.
    pub fn download(&self, stream: &Stream, at: usize, values: &mut [T]) -> Result<(), CudaError> {
        let from = self.elements(at, values.len());
        // SAFETY: as in `upload`.
        unsafe { stream.download(bytemuck::cast_slice_mut(values), from)? };
        stream.synchronize()
    }

    /// Copies `count` elements of PE `source`'s copy, from `from` on, into this PE's, from `to` on, in the order of the
    /// stream's work. False if this PE does not reach that one directly.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Panics
    /// If there are not as many elements, or no such PE.
    ///
    /// # Safety
    /// The source is complete and stays until the stream has done the copy (a barrier after its writer's work, and before
    /// its next), nobody uses the destination meanwhile, and both PEs hold the object.
    pub unsafe fn copy_from_peer(
        &self,
        stream: &Stream,
        source: usize,
        from: usize,
        to: usize,
        count: usize,
    ) -> Result<bool, CudaError> {
        assert!(
            from.checked_add(count).is_some_and(|end| end <= self.len()),
            "{from} and {count} more of {}",
            self.len()
        );
        let to = self.elements(to, count);
        let Some(address) = self.address(source) else { return Ok(false) };
        // SAFETY: both ranges lie inside the object; the rest is the caller's promise.
        unsafe { stream.copy(to, address + (from * size_of::<T>()) as u64, count * size_of::<T>())? };
        Ok(true)
    }

    /// Address of a range of elements of this PE's copy.
    fn elements(&self, at: usize, count: usize) -> u64 {
        assert!(at.checked_add(count).is_some_and(|end| end <= self.len()), "{at} and {count} more of {}", self.len());
        self.own_address() + (at * size_of::<T>()) as u64
    }
}
