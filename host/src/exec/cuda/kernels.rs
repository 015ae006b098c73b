//! The kernels of this build, on a GPU.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::{CudaError, Function, Gpu, Module};

/// The device module of this build: all kernels, for Hopper.
pub static DEVICE_MODULE: &[u8] = include_bytes!(env!("DELTALINK_DEVICE_MODULE"));
/// The portable kernels with NVSHMEM's device library: they reach PEs by puts as well.
static NVSHMEM_MODULE: &[u8] = include_bytes!(env!("DELTALINK_NVSHMEM_MODULE"));

/// A loaded module's kernels, by name. A clone is the same.
#[derive(Clone, Debug)]
pub struct Kernels {
    module: Module,
    functions: Arc<HashMap<String, Function>>,
    hopper: bool,
}

impl Kernels {
    /// The kernels that reach other PEs by stores alone, loaded once per process and GPU.
    ///
    /// # Errors
    /// [`CudaError`] if the module does not load.
    pub fn direct(gpu: &Gpu) -> Result<Self, CudaError> {
        static LOADED: OnceLock<Mutex<HashMap<usize, Kernels>>> = OnceLock::new();
        let mut loaded = LOADED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        let ordinal = gpu.properties().ordinal;
        if let Some(kernels) = loaded.get(&ordinal) {
            return Ok(kernels.clone());
        }
        let kernels = Self::load(gpu, "deltalink", DEVICE_MODULE, true)?;
        loaded.insert(ordinal, kernels.clone());
        Ok(kernels)
    }

    /// The kernels that also put, for [`Nvshmem::attach`](crate::world::nvshmem::Nvshmem::attach) before the first launch.
    ///
    /// # Errors
    /// As [`direct`](Self::direct).
    pub fn with_nvshmem(gpu: &Gpu) -> Result<Self, CudaError> {
        Self::load(gpu, "deltalink with NVSHMEM", NVSHMEM_MODULE, false)
    }

    /// All kernels at once and before any launch: loading one may wait for the kernels that run, and those may wait for a PE
    /// that has yet to launch.
    fn load(gpu: &Gpu, name: &str, image: &[u8], hopper: bool) -> Result<Self, CudaError> {
        let module = gpu.load(name, image)?;
        let mut functions = HashMap::new();
        let hopper_entries = if hopper { crate::exec::hopper_entries() } else { Vec::new() };
        for name in crate::exec::portable_entries().into_iter().chain(hopper_entries) {
            let function = module.function(&name)?;
            function.allow_shared(kernels_gpu::tile::SHARED_BYTES as u32)?;
            functions.insert(name, function);
        }
        Ok(Self { module, functions: Arc::new(functions), hopper })
    }

    /// The module.
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// Whether kernels with bodies for Hopper are among them.
    pub(super) fn has_hopper(&self) -> bool {
        self.hopper
    }

    /// The kernel of that name.
    ///
    /// # Panics
    /// If it is none of this build's.
    pub(super) fn function(&self, name: &str) -> &Function {
        &self.functions[name]
    }
}
