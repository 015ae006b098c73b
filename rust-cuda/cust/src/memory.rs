//! Memory of GPUs, and memory of the host that GPUs reach. Both are given back to the current context when dropped.

use std::ffi::{c_uint, c_void};
use std::marker::PhantomData;

use crate::error::{CudaResult, check};
use crate::sys::{self, CUdeviceptr};

/// An address in a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePointer<T> {
    raw: CUdeviceptr,
    element: PhantomData<*mut T>,
}

impl<T> DevicePointer<T> {
    /// As the driver and kernels have it.
    pub fn as_raw(&self) -> CUdeviceptr {
        self.raw
    }
}

/// Memory of a GPU, from `cuMemAlloc` and never managed.
#[derive(Debug)]
pub struct DeviceBuffer<T> {
    raw: CUdeviceptr,
    len: usize,
    element: PhantomData<T>,
}

impl<T> DeviceBuffer<T> {
    /// `len` elements, whose contents are whatever was there, in the current context. The driver gives no empty memory.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The elements are written before they are read as a `T`.
    pub unsafe fn uninitialized(len: usize) -> CudaResult<Self> {
        let mut raw = 0;
        // SAFETY: writes one address; a size that overflows is too large for the driver.
        check(unsafe { sys::cuMemAlloc_v2(&mut raw, len.saturating_mul(size_of::<T>())) })?;
        Ok(Self { raw, len, element: PhantomData })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its address.
    pub fn as_device_ptr(&self) -> DevicePointer<T> {
        DevicePointer { raw: self.raw, element: PhantomData }
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        // A failure means that the context is gone, and the memory with it.
        // SAFETY: this handle's only release.
        let _ = unsafe { sys::cuMemFree_v2(self.raw) };
    }
}

/// Pinned memory of the host, at the same address for every context and mapped for kernels.
#[derive(Debug)]
pub struct LockedBuffer<T> {
    address: *mut T,
    len: usize,
}

// SAFETY: the memory belongs to the handle, which gives out its address alone.
unsafe impl<T: Send> Send for LockedBuffer<T> {}

impl<T> LockedBuffer<T> {
    /// `len` elements, whose contents are whatever was there.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The elements are written before they are read as a `T`.
    pub unsafe fn uninitialized(len: usize) -> CudaResult<Self> {
        /// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
        const FLAGS: c_uint = 1 | 2;
        let mut address: *mut c_void = std::ptr::null_mut();
        // SAFETY: as in `DeviceBuffer::uninitialized`.
        check(unsafe { sys::cuMemHostAlloc(&mut address, len.saturating_mul(size_of::<T>()), FLAGS) })?;
        Ok(Self { address: address.cast(), len })
    }

    /// Address for the host.
    pub fn as_ptr(&self) -> *mut T {
        self.address
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address for kernels of the current context.
    ///
    /// # Errors
    /// The driver's.
    pub fn device_ptr(&self) -> CudaResult<DevicePointer<T>> {
        let mut raw = 0;
        // SAFETY: the address of memory that was allocated as mapped; writes one address.
        check(unsafe { sys::cuMemHostGetDevicePointer_v2(&mut raw, self.address.cast(), 0) })?;
        Ok(DevicePointer { raw, element: PhantomData })
    }
}

impl<T> Drop for LockedBuffer<T> {
    fn drop(&mut self) {
        // As for device memory.
        // SAFETY: this handle's only release.
        let _ = unsafe { sys::cuMemFreeHost(self.address.cast()) };
    }
}
