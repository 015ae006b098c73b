//! The driver's functions, under their names in `cuda.h` with the version that a C compiler would choose.
//!
//! The first call looks for `libcuda.so.1` where the system's loader does. Without a driver every function returns
//! [`NOT_INITIALIZED`], and a function that the driver is too old for returns [`NOT_FOUND`].

#![allow(non_snake_case, non_camel_case_types)] // names are the driver's

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `CUDA_ERROR_NOT_INITIALIZED`.
pub const NOT_INITIALIZED: c_int = 3;
/// `CUDA_ERROR_NOT_FOUND`.
pub const NOT_FOUND: c_int = 500;

/// The file that is loaded, from the driver's installation.
pub const LIBRARY: &str = "libcuda.so.1";

macro_rules! handles {
    ($($name:ident $target:ident $what:literal;)*) => {
        $(
            #[doc(hidden)]
            #[derive(Debug)]
            pub enum $target {}
            #[doc = concat!("Handle of ", $what, ".")]
            pub type $name = *mut $target;
        )*
    };
}

handles! {
    CUcontext CUctx_st "a context";
    CUmodule CUmod_st "a module";
    CUfunction CUfunc_st "a kernel";
    CUstream CUstream_st "a stream";
    CUevent CUevent_st "an event";
    CUgraph CUgraph_st "a graph of launches, copies and fills";
    CUgraphExec CUgraphExec_st "a graph that can be launched";
    CUgraphNode CUgraphNode_st "a node of a graph";
}

/// Handle of a GPU.
pub type CUdevice = c_int;
/// Address in a GPU's memory.
pub type CUdeviceptr = u64;

/// Identity of a GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUuuid {
    /// As nvidia-smi prints them in hexadecimal.
    pub bytes: [c_char; 16],
}

/// One attribute of a launch: its identifier, and a value of up to 64 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUlaunchAttribute {
    /// A `CUlaunchAttributeID`.
    pub id: c_int,
    /// Zero.
    pub pad: [u8; 4],
    /// The value, from its first byte on.
    pub value: [u64; 8],
}

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the launch starts when all blocks of the one before have said
/// `griddepcontrol.launch_dependents`, or have ended.
pub const PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;

/// A launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // named as in cuda.h
pub struct CUlaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: CUstream,
    pub attributes: *mut CUlaunchAttribute,
    pub attribute_count: c_uint,
}

/// The driver cannot be used because it is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum LoadError {
    #[error("{reason}")]
    Library { reason: String },
    #[error("{LIBRARY} has no {name}: {reason}")]
    Symbol { name: &'static str, reason: String },
}

/// The loader's own words, which name the file; the error around them only says which call failed.
fn why(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

macro_rules! functions {
    (
        required { $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?);)* }
        newer { $(fn $newer:ident($($newer_arg:ident: $newer_ty:ty),* $(,)?);)* }
    ) => {
        struct Driver {
            $($name: unsafe extern "C" fn($($ty),*) -> c_int,)*
            $($newer: Option<unsafe extern "C" fn($($newer_ty),*) -> c_int>,)*
        }

        impl Driver {
            fn open(file: &str) -> Result<Self, LoadError> {
                // SAFETY: the driver library is made to be loaded this way; its initialisers have no conditions.
                let library = unsafe { libloading::Library::new(file) }
                    .map_err(|error| LoadError::Library { reason: why(&error) })?;
                let missing =
                    |name| move |error: libloading::Error| LoadError::Symbol { name, reason: why(&error) };
                // SAFETY: names and signatures are those of cuda.h; CUresult is a C int.
                let driver = unsafe {
                    Self {
                        $($name: *library.get(stringify!($name)).map_err(missing(stringify!($name)))?,)*
                        $($newer: library.get(stringify!($newer)).ok().map(|symbol| *symbol),)*
                    }
                };
                // It starts threads that outlive every call: it is never unloaded.
                std::mem::forget(library);
                Ok(driver)
            }
        }

        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            /// As the driver API says.
            #[allow(clippy::too_many_arguments)] // the driver's
            pub unsafe fn $name($($arg: $ty),*) -> c_int {
                match driver() {
                    // SAFETY: the caller's promise.
                    Ok(driver) => unsafe { (driver.$name)($($arg),*) },
                    Err(_) => NOT_INITIALIZED,
                }
            }
        )*
        $(
            #[doc = concat!("`", stringify!($newer), "`, which older drivers lack.")]
            ///
            /// # Safety
            /// As the driver API says.
            pub unsafe fn $newer($($newer_arg: $newer_ty),*) -> c_int {
                match driver() {
                    // SAFETY: the caller's promise.
                    Ok(driver) => driver.$newer.map_or(NOT_FOUND, |call| unsafe { call($($newer_arg),*) }),
                    Err(_) => NOT_INITIALIZED,
                }
            }
        )*
    };
}

functions! {
    required {
        fn cuInit(flags: c_uint);
        fn cuDriverGetVersion(version: *mut c_int);
        fn cuGetErrorName(code: c_int, text: *mut *const c_char);
        fn cuGetErrorString(code: c_int, text: *mut *const c_char);
        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        fn cuDeviceGetName(name: *mut c_char, room: c_int, device: CUdevice);
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
        fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice);
        fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
        fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: c_uint);
        fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        fn cuCtxSetCurrent(context: CUcontext);
        fn cuCtxEnablePeerAccess(context: CUcontext, flags: c_uint);
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
        fn cuMemFree_v2(address: CUdeviceptr);
        fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        fn cuMemFreeHost(address: *mut c_void);
        fn cuMemHostGetDevicePointer_v2(device: *mut CUdeviceptr, host: *mut c_void, flags: c_uint);
        fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
        fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
        fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
        fn cuMemsetD8Async(to: CUdeviceptr, byte: u8, bytes: usize, stream: CUstream);
        fn cuModuleLoadDataEx(
            module: *mut CUmodule,
            image: *const c_void,
            options: c_uint,
            names: *mut c_int,
            values: *mut *mut c_void,
        );
        fn cuModuleUnload(module: CUmodule);
        fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        fn cuModuleGetGlobal_v2(
            address: *mut CUdeviceptr,
            bytes: *mut usize,
            module: CUmodule,
            name: *const c_char,
        );
        fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: CUfunction);
        fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int);
        fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
            blocks: *mut c_int,
            function: CUfunction,
            threads: c_int,
            shared_bytes: usize,
        );
        fn cuLaunchKernel(
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
        );
        fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
        fn cuStreamDestroy_v2(stream: CUstream);
        fn cuStreamSynchronize(stream: CUstream);
        fn cuStreamQuery(stream: CUstream);
        fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
        fn cuEventCreate(event: *mut CUevent, flags: c_uint);
        fn cuEventDestroy_v2(event: CUevent);
        fn cuEventRecord(event: CUevent, stream: CUstream);
        fn cuEventQuery(event: CUevent);
        fn cuEventSynchronize(event: CUevent);
        fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
        fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_int);
        fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
        fn cuStreamIsCapturing(stream: CUstream, status: *mut c_int);
        fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize);
        fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut c_int);
        fn cuGraphDestroy(graph: CUgraph);
        fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64);
        fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
        fn cuGraphExecDestroy(exec: CUgraphExec);
    }
    newer {
        fn cuLaunchKernelEx(
            config: *const CUlaunchConfig,
            function: CUfunction,
            params: *mut *mut c_void,
            extra: *mut *mut c_void,
        );
        fn cuFuncGetParamInfo(function: CUfunction, index: usize, offset: *mut usize, size: *mut usize);
        fn cuFuncLoad(function: CUfunction);
    }
}

fn driver() -> &'static Result<Driver, LoadError> {
    static DRIVER: OnceLock<Result<Driver, LoadError>> = OnceLock::new();
    DRIVER.get_or_init(|| Driver::open(LIBRARY))
}

/// Loads the driver, unless it is loaded.
///
/// # Errors
/// [`LoadError`] with the loader's words, the same at every call.
pub fn load() -> Result<(), LoadError> {
    driver().as_ref().map(|_| ()).map_err(Clone::clone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_and_what_is_no_driver_is_told() {
        let reason = |file: &str| Driver::open(file).map(drop).expect_err("no driver").to_string();
        assert!(reason("libabsent.so.1").contains("libabsent.so.1"), "{}", reason("libabsent.so.1"));
        // A library that every Linux system has.
        assert!(reason("libc.so.6").starts_with("libcuda.so.1 has no cuInit"), "{}", reason("libc.so.6"));
    }

    #[test]
    fn calls_fail_where_there_is_no_driver() {
        let mut version = 0;
        // SAFETY: writes one int, and may be called at any time.
        let status = unsafe { cuDriverGetVersion(&mut version) };
        match load() {
            Ok(()) => assert!(status == 0 && version > 0, "{status}"),
            Err(_) => assert_eq!(status, NOT_INITIALIZED),
        }
    }
}
