//! Primary contexts.

use crate::device::Device;
use crate::error::{CudaResult, check};
use crate::sys::{self, CUcontext};

/// A hold on the primary context of a GPU, which everything in the process that uses the CUDA runtime shares.
#[derive(Debug)]
pub struct Context {
    raw: CUcontext,
    device: Device,
}

// SAFETY: the driver's handles may be used by any thread, and by several at a time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the context of `device` and makes it current on this thread.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(device: Device) -> CudaResult<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; the device exists.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device.as_raw()) })?;
        let context = Self { raw, device };
        // SAFETY: a context that is held.
        check(unsafe { sys::cuCtxSetCurrent(context.raw) })?;
        Ok(context)
    }

    /// The driver's handle.
    pub fn as_raw(&self) -> CUcontext {
        self.raw
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // A failure means that the driver has shut down, and the context with it.
        // SAFETY: ends this handle's hold.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device.as_raw()) };
    }
}
