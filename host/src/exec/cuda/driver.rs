//! The driver's functions and codes, and its words for what went wrong.

use std::ffi::{CStr, c_char, c_int};

use cust::error::CudaResult;
pub use cust::sys::*;

use super::error::{CudaError, Failure};

/// `CUdevice_attribute`.
pub mod device_attribute {
    use std::ffi::c_int;

    pub const CLOCK_RATE_KHZ: c_int = 13;
    pub const MULTIPROCESSORS: c_int = 16;
    pub const COMPUTE_MAJOR: c_int = 75;
    pub const COMPUTE_MINOR: c_int = 76;
    pub const COOPERATIVE_LAUNCH: c_int = 95;
    pub const MAX_SHARED_BYTES_OPTIN: c_int = 97;
}

/// `CUfunction_attribute`.
pub mod function_attribute {
    use std::ffi::c_int;

    pub const MAX_THREADS: c_int = 0;
    pub const STATIC_SHARED_BYTES: c_int = 1;
    pub const LOCAL_BYTES: c_int = 3;
    pub const REGISTERS: c_int = 4;
    pub const MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
}

/// `CUresult`: those that are looked for.
pub mod code {
    use std::ffi::c_int;

    pub const OUT_OF_MEMORY: c_int = 2;
    pub const STUB_LIBRARY: c_int = 34;
    pub const DEVICE_UNAVAILABLE: c_int = 46;
    pub const NO_DEVICE: c_int = 100;
    pub const NOT_FOUND: c_int = 500;
    pub const NOT_READY: c_int = 600;
    pub const PEER_ACCESS_ALREADY_ENABLED: c_int = 704;
}

/// The driver's name and words for a status.
pub fn failure(code: c_int) -> Failure {
    let ask = |function: unsafe fn(c_int, *mut *const c_char) -> c_int| {
        let mut text = std::ptr::null();
        // SAFETY: writes the address of a static string, or null for a code that it does not know.
        let status = unsafe { function(code, &mut text) };
        // SAFETY: as above.
        (status == 0 && !text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    Failure {
        code,
        name: ask(cuGetErrorName).unwrap_or_else(|| "an unknown error".into()),
        text: ask(cuGetErrorString).unwrap_or_default(),
    }
}

/// Nothing if `status` is 0, else the failure of `call`.
pub fn check(call: &'static str, status: c_int) -> Result<(), CudaError> {
    if status == 0 { Ok(()) } else { Err(CudaError::Call { call, failure: failure(status) }) }
}

/// What `cust` returned from `call`.
pub fn checked<T>(call: &'static str, result: CudaResult<T>) -> Result<T, CudaError> {
    result.map_err(|cust::error::CudaError(code)| CudaError::Call { call, failure: failure(code) })
}

/// The sizes in bytes of a kernel's parameters, if the driver can tell.
pub fn param_sizes(function: CUfunction) -> Option<Vec<usize>> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: a function of a loaded module; past the last parameter the call fails and changes nothing.
        match unsafe { cuFuncGetParamInfo(function, sizes.len(), &mut offset, &mut size) } {
            0 => sizes.push(size),
            code::NOT_FOUND => return None,
            _ => return Some(sizes),
        }
    }
}

/// Brings a kernel's code onto the GPU now. Left to its first launch, the driver would wait for running kernels to end,
/// and one of those may wait for this kernel.
pub fn load_now(function: CUfunction) -> c_int {
    // SAFETY: a function of a loaded module. Drivers without the call load when a function's attributes are read.
    match unsafe { cuFuncLoad(function) } {
        code::NOT_FOUND => 0,
        status => status,
    }
}
