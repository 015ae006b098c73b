//! Memory of a GPU, and memory of the host that a GPU can reach.

use std::ops::Range;

use bytemuck::Pod;
use cust::error::CudaResult;
use cust::memory::{DeviceBuffer as OwnedDevice, LockedBuffer as OwnedHost};

use super::driver::{checked, code};
use super::{CudaError, Gpu, Stream};

/// Memory of a GPU, from `cuMemAlloc` and never managed; given back when dropped.
///
/// The driver lets a release wait until the GPU's running kernels have ended: drop no buffer while a kernel waits for
/// something that this thread has yet to do, or [put it off](Gpu::defer_releases).
#[derive(Debug)]
pub struct DeviceBuffer {
    /// Absent if there are no bytes, which the driver does not give.
    memory: Option<OwnedDevice<u8>>,
    bytes: usize,
    gpu: Gpu,
}

impl Gpu {
    /// Allocates `bytes` bytes, whose contents are whatever was there.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer, CudaError> {
        if bytes == 0 {
            return Ok(DeviceBuffer { memory: None, bytes, gpu: self.clone() });
        }
        self.make_current()?;
        // SAFETY: bytes, which are never read as anything that not every pattern is.
        let ask = || unsafe { OwnedDevice::<u8>::uninitialized(bytes) };
        let out_of_memory = |memory: &CudaResult<_>| matches!(memory, Err(cust::error::CudaError(code::OUT_OF_MEMORY)));
        let mut memory = ask();
        if out_of_memory(&memory) && self.release_retired() {
            memory = ask();
        }
        if out_of_memory(&memory) {
            let (free, total) = self.free_memory()?;
            let (ordinal, in_use) = (self.properties().ordinal, self.memory_use().current);
            return Err(CudaError::OutOfMemory { ordinal, requested: bytes, free, total, in_use });
        }
        let memory = checked("cuMemAlloc", memory)?;
        self.take(bytes);
        Ok(DeviceBuffer { memory: Some(memory), bytes, gpu: self.clone() })
    }

    /// Allocates and fills a copy of `values`; complete when it returns.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc), and failures of the copy.
    pub fn upload<T: Pod>(&self, stream: &Stream, values: &[T]) -> Result<DeviceBuffer, CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let buffer = self.alloc(bytes.len())?;
        buffer.upload(stream, 0, bytes)?;
        Ok(buffer)
    }
}

impl DeviceBuffer {
    /// Address for kernels; 0 if there are no bytes.
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.as_device_ptr().as_raw())
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Copies `bytes` to offset `at`; complete when it returns.
    ///
    /// # Errors
    /// [`CudaError::Range`], or what the stream's work before it ended with.
    pub fn upload(&self, stream: &Stream, at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        // SAFETY: `bytes` is borrowed until the copy is complete.
        unsafe { self.upload_async(stream, at, bytes)? };
        stream.synchronize()
    }

    /// As [`upload`](Self::upload), in the order of the stream's work, without waiting for it.
    ///
    /// # Errors
    /// [`CudaError::Range`] or [`CudaError::Call`].
    ///
    /// # Safety
    /// `bytes` stays as it is until the stream has done the copy.
    pub unsafe fn upload_async(&self, stream: &Stream, at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let Some(to) = self.part(at..at.saturating_add(bytes.len()))? else { return Ok(()) };
        // SAFETY: both ranges hold that many bytes; the source stays by the caller's promise, this buffer because its
        // release waits for the stream's work.
        unsafe { stream.upload(to, bytes) }
    }

    /// Copies from offset `at` to `bytes`, after the stream's work so far; complete when it returns.
    ///
    /// # Errors
    /// [`CudaError::Range`], or what the stream's work before it ended with.
    pub fn download(&self, stream: &Stream, at: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: `bytes` is borrowed until the copy is complete.
        unsafe { self.download_async(stream, at, bytes)? };
        stream.synchronize()
    }

    /// As [`download`](Self::download), without waiting.
    ///
    /// # Errors
    /// [`CudaError::Range`] or [`CudaError::Call`].
    ///
    /// # Safety
    /// Nobody reads or writes `bytes`, and it stays allocated, until the stream has done the copy.
    pub unsafe fn download_async(&self, stream: &Stream, at: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        let Some(from) = self.part(at..at.saturating_add(bytes.len()))? else { return Ok(()) };
        // SAFETY: as in `upload_async`, with the roles exchanged.
        unsafe { stream.download(bytes, from) }
    }

    /// Sets `bytes` bytes at offset `at` to `value`, in the order of the stream's work.
    ///
    /// # Errors
    /// [`CudaError::Range`] or [`CudaError::Call`].
    pub fn fill_async(&self, stream: &Stream, at: usize, bytes: usize, value: u8) -> Result<(), CudaError> {
        match self.part(at..at.saturating_add(bytes))? {
            // SAFETY: the range lies inside this buffer, whose release waits for the stream's work.
            Some(to) => unsafe { stream.fill(to, bytes, value) },
            None => Ok(()),
        }
    }

    /// Address of a range; nothing if it is empty.
    fn part(&self, range: Range<usize>) -> Result<Option<u64>, CudaError> {
        if range.end > self.bytes || range.start > range.end {
            return Err(CudaError::Range { start: range.start, end: range.end, len: self.bytes });
        }
        Ok((!range.is_empty()).then(|| self.address() + range.start as u64))
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.gpu.retire(memory, self.bytes);
        }
    }
}

/// Pinned memory of the host, zero at first, which the GPU reaches too; given back when dropped.
///
/// The host reads and writes it by value: kernels may change it at any time.
#[derive(Debug)]
pub struct HostBuffer {
    /// Taken by the drop.
    memory: Option<OwnedHost<u8>>,
    address: *mut u8,
    bytes: usize,
    device_address: u64,
    gpu: Gpu,
}

impl Gpu {
    /// Allocates `bytes` bytes of pinned host memory, all zero: copies from and to it do not hold up the host, and kernels
    /// may read and write it while they run, at [`HostBuffer::device_address`].
    ///
    /// # Errors
    /// [`CudaError::Call`] if there is no such memory.
    pub fn host_buffer(&self, bytes: usize) -> Result<HostBuffer, CudaError> {
        self.make_current()?;
        let bytes = bytes.max(1);
        // SAFETY: `bytes` bytes that nobody else knows, written here.
        let memory = unsafe {
            let memory = checked("cuMemHostAlloc", OwnedHost::<u8>::uninitialized(bytes))?;
            memory.as_ptr().write_bytes(0, bytes);
            memory
        };
        let device_address = checked("cuMemHostGetDevicePointer", memory.device_ptr())?.as_raw();
        Ok(HostBuffer { address: memory.as_ptr(), memory: Some(memory), bytes, device_address, gpu: self.clone() })
    }
}

// SAFETY: the address is that of memory which the buffer owns, and all access is by value.
unsafe impl Send for HostBuffer {}

impl HostBuffer {
    /// Address for kernels of the GPU.
    pub fn device_address(&self) -> u64 {
        self.device_address
    }

    /// Address for the host.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The value at byte `at` now. A kernel that writes it meanwhile may leave a mixture, unless it is one aligned word.
    ///
    /// # Panics
    /// If it does not lie inside.
    pub fn read<T: Pod>(&self, at: usize) -> T {
        let address = self.place::<T>(at);
        // SAFETY: inside the buffer, any bytes are a value; volatile, because the GPU may write them.
        unsafe { address.read_volatile() }
    }

    /// Sets the value at byte `at`.
    ///
    /// # Panics
    /// If it does not lie inside.
    pub fn write<T: Pod>(&self, at: usize, value: T) {
        let address = self.place::<T>(at);
        // SAFETY: inside the buffer; volatile, because the GPU may read them.
        unsafe { address.write_volatile(value) }
    }

    fn place<T>(&self, at: usize) -> *mut T {
        let fits = at.checked_add(size_of::<T>()).is_some_and(|end| end <= self.len());
        assert!(fits && at.is_multiple_of(align_of::<T>()), "byte {at} of {} as {}", self.len(), size_of::<T>());
        self.as_ptr().wrapping_add(at).cast()
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            // The GPU's memory alone is counted.
            self.gpu.retire(memory, 0);
        }
    }
}
