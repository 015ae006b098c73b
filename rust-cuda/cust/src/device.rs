//! GPUs.

use std::ffi::CStr;

use crate::error::{CudaResult, check};
use crate::sys::{self, CUdevice};

/// A GPU that the driver sees. The driver must have been started ([`sys::cuInit`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    raw: CUdevice,
}

impl Device {
    /// GPU `ordinal`, from 0.
    ///
    /// # Errors
    /// The driver's, if there is no such GPU.
    pub fn get_device(ordinal: u32) -> CudaResult<Self> {
        let mut raw = 0;
        // SAFETY: writes one handle.
        check(unsafe { sys::cuDeviceGet(&mut raw, ordinal as i32) })?;
        Ok(Self { raw })
    }

    /// Its name.
    ///
    /// # Errors
    /// The driver's.
    pub fn name(&self) -> CudaResult<String> {
        let mut name = [0_u8; 256];
        // SAFETY: the room is given with its size; the driver ends the name with 0.
        check(unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, self.raw) })?;
        Ok(CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// Bytes of memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn total_memory(&self) -> CudaResult<usize> {
        let mut bytes = 0;
        // SAFETY: writes one size; the device exists.
        check(unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, self.raw) })?;
        Ok(bytes)
    }

    /// The driver's handle.
    pub fn as_raw(&self) -> CUdevice {
        self.raw
    }
}
