//! The kernels of this build, on a GPU.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::{CudaError, Function, Gpu, Module};
use crate::exec::{hopper_entries, local_entries, sending_entries};

/// The device module of this build: all kernels, for Hopper.
pub static DEVICE_MODULE: &[u8] = include_bytes!(env!("DELTALINK_DEVICE_MODULE"));
/// The portable kernels that write into other PEs' memory, with NVSHMEM's device library: they reach PEs by puts as well.
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
        let module = gpu.load("deltalink", DEVICE_MODULE)?;
        let names = [local_entries(), sending_entries(), hopper_entries()].concat();
        let functions = Arc::new(functions(&module, names)?.collect());
        let kernels = Self { module, functions, hopper: true };
        loaded.insert(ordinal, kernels.clone());
        Ok(kernels)
    }

    /// The portable kernels, of which those that write into other PEs' memory also put. They work once NVSHMEM knows their
    /// [module](Self::module): [`Nvshmem::kernels`](crate::world::nvshmem::Nvshmem::kernels) sees to that.
    ///
    /// # Errors
    /// As [`direct`](Self::direct).
    pub(crate) fn with_nvshmem(gpu: &Gpu) -> Result<Self, CudaError> {
        let module = gpu.load("deltalink with NVSHMEM", NVSHMEM_MODULE)?;
        let mut all = HashMap::clone(&Self::direct(gpu)?.functions);
        all.extend(functions(&module, sending_entries())?);
        Ok(Self { module, functions: Arc::new(all), hopper: false })
    }

    /// The module that has the kernels which write into other PEs' memory.
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

/// Kernels of `module`, by name, all at once and before any launch: loading one may wait for the kernels that run, and those
/// may wait for a PE that has yet to launch.
fn functions(module: &Module, names: Vec<String>) -> Result<impl Iterator<Item = (String, Function)>, CudaError> {
    let function = |name: String| {
        let function = module.function(&name)?;
        function.allow_shared(kernels_gpu::tile::SHARED_BYTES as u32)?;
        Ok((name, function))
    };
    Ok(names.into_iter().map(function).collect::<Result<Vec<_>, CudaError>>()?.into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All kernels are looked up when a module is loaded, so one that is missing would stop every step.
    #[test]
    fn the_modules_have_every_kernel_that_is_looked_up() {
        let has = |module: &[u8], name: &str| {
            let section = format!(".text.{name}\0").into_bytes();
            module.windows(section.len()).any(|window| window == section)
        };
        for name in [local_entries(), sending_entries(), hopper_entries()].concat() {
            assert!(has(DEVICE_MODULE, &name), "no {name} in the module of all kernels");
        }
        for name in sending_entries() {
            assert!(has(NVSHMEM_MODULE, &name), "no {name} in the module with NVSHMEM");
        }
        assert!(!has(DEVICE_MODULE, "prep_kda") && !has(NVSHMEM_MODULE, "prep_kda_bf16"));
    }
}
