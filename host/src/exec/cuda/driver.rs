//! The functions of the driver API that this back end calls itself.
//!
//! They are those that `cust` links; declared again because it declares their result as an enumeration of the errors of
//! CUDA 11, which cannot hold those that came later. What is newer than `cust` is looked up at run time.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cust::sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream, CUuuid};

use super::error::{CudaError, Failure};

unsafe extern "C" {
    pub fn cuInit(flags: c_uint) -> c_int;
    pub fn cuDriverGetVersion(version: *mut c_int) -> c_int;
    pub fn cuDeviceGetCount(count: *mut c_int) -> c_int;
    pub fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) -> c_int;
    pub fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice) -> c_int;
    pub fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice) -> c_int;
    pub fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: c_uint) -> c_int;
    pub fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> c_int;
    pub fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> c_int;
    pub fn cuCtxSetCurrent(context: CUcontext) -> c_int;
    pub fn cuCtxEnablePeerAccess(context: CUcontext, flags: c_uint) -> c_int;
    pub fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int;
    pub fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) -> c_int;
    pub fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint) -> c_int;
    pub fn cuMemHostGetDevicePointer_v2(device: *mut CUdeviceptr, host: *mut c_void, flags: c_uint) -> c_int;
    pub fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) -> c_int;
    pub fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) -> c_int;
    pub fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) -> c_int;
    pub fn cuMemsetD8Async(to: CUdeviceptr, byte: u8, bytes: usize, stream: CUstream) -> c_int;
    pub fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        options: c_uint,
        names: *mut c_int,
        values: *mut *mut c_void,
    ) -> c_int;
    pub fn cuModuleUnload(module: CUmodule) -> c_int;
    pub fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) -> c_int;
    pub fn cuModuleGetGlobal_v2(
        address: *mut CUdeviceptr,
        bytes: *mut usize,
        module: CUmodule,
        name: *const c_char,
    ) -> c_int;
    pub fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: CUfunction) -> c_int;
    pub fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int) -> c_int;
    pub fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: CUfunction,
        threads: c_int,
        shared_bytes: usize,
    ) -> c_int;
    pub fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;
    pub fn cuLaunchCooperativeKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        params: *mut *mut c_void,
    ) -> c_int;
    pub fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> c_int;
    pub fn cuStreamDestroy_v2(stream: CUstream) -> c_int;
    pub fn cuStreamSynchronize(stream: CUstream) -> c_int;
    pub fn cuStreamQuery(stream: CUstream) -> c_int;
    pub fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> c_int;
    pub fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> c_int;
    pub fn cuEventDestroy_v2(event: CUevent) -> c_int;
    pub fn cuEventRecord(event: CUevent, stream: CUstream) -> c_int;
    pub fn cuEventSynchronize(event: CUevent) -> c_int;
    pub fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) -> c_int;
    fn cuGetErrorName(code: c_int, text: *mut *const c_char) -> c_int;
    fn cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int;
}

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
    let ask = |function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
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

type GetParamInfo = unsafe extern "C" fn(CUfunction, usize, *mut usize, *mut usize) -> c_int;
type FuncLoad = unsafe extern "C" fn(CUfunction) -> c_int;

/// Functions that came after `cust`, where the driver has them.
struct Newer {
    /// From CUDA 12.4.
    get_param_info: Option<GetParamInfo>,
    /// From CUDA 12.4.
    func_load: Option<FuncLoad>,
}

fn newer() -> &'static Newer {
    static NEWER: OnceLock<Newer> = OnceLock::new();
    NEWER.get_or_init(|| {
        // libcuda is linked, hence already loaded.
        let program = libloading::os::unix::Library::this();
        // SAFETY: the names and signatures are those of cuda.h.
        unsafe {
            Newer {
                get_param_info: program.get::<GetParamInfo>("cuFuncGetParamInfo").ok().map(|symbol| *symbol),
                func_load: program.get::<FuncLoad>("cuFuncLoad").ok().map(|symbol| *symbol),
            }
        }
    })
}

/// The sizes in bytes of a kernel's parameters, if the driver can tell.
pub fn param_sizes(function: CUfunction) -> Option<Vec<usize>> {
    let get = newer().get_param_info?;
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: a function of a loaded module; past the last parameter the call fails and changes nothing.
        if unsafe { get(function, sizes.len(), &mut offset, &mut size) } != 0 {
            return Some(sizes);
        }
        sizes.push(size);
    }
}

/// Brings a kernel's code onto the GPU now. Left to its first launch, the driver would wait for running kernels to end,
/// and one of those may wait for this kernel.
pub fn load_now(function: CUfunction) -> c_int {
    // SAFETY: a function of a loaded module. Drivers without the call load when a function's attributes are read.
    newer().func_load.map_or(0, |load| unsafe { load(function) })
}
