//! Modules and their kernels.

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use super::driver::{self, CUfunction, CUmodule, check, code, failure, function_attribute};
use super::{CudaError, Gpu, Stream};

/// Bytes for what the driver says about a module that it cannot load.
const LOG_BYTES: usize = 8 << 10;

/// Code on a GPU. A clone is the same module; it is unloaded with the last of its clones and functions.
#[derive(Clone, Debug)]
pub struct Module {
    loaded: Arc<Loaded>,
}

#[derive(Debug)]
pub(super) struct Loaded {
    raw: CUmodule,
    name: String,
    gpu: Gpu,
}

// SAFETY: the driver's handles may be used by any thread, and by several at a time.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Gpu {
    /// Loads a cubin, or PTX that the driver translates; `name` is what errors call it.
    ///
    /// # Errors
    /// [`CudaError::Module`] with the driver's log.
    pub fn load(&self, name: &str, image: &[u8]) -> Result<Module, CudaError> {
        /// `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
        const OPTIONS: [c_int; 2] = [5, 6];
        self.make_current()?;
        // PTX is text that ends with 0; a cubin knows its length and does not mind.
        let image = [image, &[0]].concat();
        let mut log = vec![0_u8; LOG_BYTES];
        let mut options = OPTIONS;
        // The driver takes the size as if it were an address.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(LOG_BYTES)];
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image is complete, the options are as many as their values, the log has the size that is told.
        let status = unsafe {
            driver::cuModuleLoadDataEx(
                &mut raw,
                image.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if status != 0 {
            let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
            let log = String::from_utf8_lossy(&log[..end]).trim().to_owned();
            return Err(CudaError::Module { module: name.into(), failure: failure(status), log });
        }
        Ok(Module { loaded: Arc::new(Loaded { raw, name: name.into(), gpu: self.clone() }) })
    }
}

impl Module {
    /// Its name in errors.
    pub fn name(&self) -> &str {
        &self.loaded.name
    }

    /// The driver's handle, for libraries that look into the module.
    pub fn raw(&self) -> CUmodule {
        self.loaded.raw
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.loaded.gpu
    }

    /// The kernel `name`, its code brought onto the GPU.
    ///
    /// # Errors
    /// [`CudaError::Symbol`] if there is none.
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        let Loaded { raw: module, gpu, .. } = &*self.loaded;
        gpu.make_current()?;
        let text = self.symbol(name)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a loaded module and a text that ends with 0; writes one handle.
        match unsafe { driver::cuModuleGetFunction(&mut raw, *module, text.as_ptr()) } {
            code::NOT_FOUND => return Err(self.missing(name)),
            status => check("cuModuleGetFunction", status)?,
        }
        check("cuFuncLoad", driver::load_now(raw))?;
        let attribute = |attribute: c_int| -> Result<u32, CudaError> {
            let mut value = 0;
            // SAFETY: a function of a loaded module; writes one int.
            check("cuFuncGetAttribute", unsafe { driver::cuFuncGetAttribute(&mut value, attribute, raw) })?;
            Ok(value.max(0) as u32)
        };
        let attributes = Attributes {
            registers: attribute(function_attribute::REGISTERS)?,
            max_threads: attribute(function_attribute::MAX_THREADS)?,
            static_shared_bytes: attribute(function_attribute::STATIC_SHARED_BYTES)?,
            local_bytes: attribute(function_attribute::LOCAL_BYTES)?,
        };
        let params = driver::param_sizes(raw);
        Ok(Function { raw, name: name.into(), attributes, params, module: Arc::clone(&self.loaded) })
    }

    /// Address and bytes of the global variable `name`; nothing if there is none.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn global(&self, name: &str) -> Result<Option<(u64, usize)>, CudaError> {
        self.loaded.gpu.make_current()?;
        let text = self.symbol(name)?;
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: a loaded module and a text that ends with 0; writes an address and a size.
        match unsafe { driver::cuModuleGetGlobal_v2(&mut address, &mut bytes, self.raw(), text.as_ptr()) } {
            code::NOT_FOUND => Ok(None),
            status => check("cuModuleGetGlobal", status).map(|()| Some((address, bytes))),
        }
    }

    /// The first `N` bytes of the global variable `name`; nothing if there is none of that size.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn read_global<const N: usize>(&self, stream: &Stream, name: &str) -> Result<Option<[u8; N]>, CudaError> {
        let Some((address, _)) = self.global(name)?.filter(|&(_, bytes)| bytes >= N) else { return Ok(None) };
        let mut value = [0; N];
        // SAFETY: the variable has as many bytes and lives with the module; the copy is complete before `value` is read.
        check("cuMemcpyDtoHAsync", unsafe {
            driver::cuMemcpyDtoHAsync_v2(value.as_mut_ptr().cast(), address, N, stream.raw())
        })?;
        stream.synchronize()?;
        Ok(Some(value))
    }

    fn symbol(&self, name: &str) -> Result<CString, CudaError> {
        CString::new(name).map_err(|_| self.missing(name))
    }

    fn missing(&self, name: &str) -> CudaError {
        CudaError::Symbol { module: self.loaded.name.clone(), name: name.into() }
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // If this fails the context is gone, and the module with it.
        let _ = self.gpu.make_current();
        // SAFETY: this handle's only release; every function holds the module.
        let _ = unsafe { driver::cuModuleUnload(self.raw) };
    }
}

/// What a kernel needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Registers of a thread.
    pub registers: u32,
    /// Most threads of a block.
    pub max_threads: u32,
    /// Shared bytes of a block that the kernel declares itself.
    pub static_shared_bytes: u32,
    /// Bytes of local memory of a thread: spills and arrays that are not in registers.
    pub local_bytes: u32,
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Function {
    pub(super) raw: CUfunction,
    pub(super) name: Arc<str>,
    attributes: Attributes,
    /// Sizes of its parameters, if the driver tells.
    pub(super) params: Option<Vec<usize>>,
    pub(super) module: Arc<Loaded>,
}

// SAFETY: as for modules.
unsafe impl Send for Function {}
// SAFETY: as for modules.
unsafe impl Sync for Function {}

impl Function {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it needs.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.module.gpu
    }
}
