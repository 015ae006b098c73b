//! Linking with NVSHMEM: the shim's object and the device library.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use crate::BuildError;
use crate::builder::Nvshmem;
use crate::command::{create_folder, run};
use crate::tools::{CudaTools, nvshmem_folder};

/// Links `relocatable` with the shim and NVSHMEM into `linked`. The shim is compiled if it is newer than its object.
pub fn link(
    tools: &CudaTools,
    nvshmem: &Nvshmem,
    arch: &str,
    cache: &Path,
    relocatable: &Path,
    linked: &Path,
) -> Result<(), BuildError> {
    let folder = nvshmem_folder()?;
    let library = folder.join("lib/libnvshmem_device.a");
    let object = compile(tools, nvshmem, arch, cache, &folder, &library)?;
    let mut nvlink = Command::new(tools.nvlink()?);
    nvlink.arg(format!("-arch={arch}")).arg(relocatable).arg(object).arg(library).arg("-o").arg(linked);
    run("nvlink", &mut nvlink)?;
    Ok(())
}

fn compile(
    tools: &CudaTools,
    nvshmem: &Nvshmem,
    arch: &str,
    cache: &Path,
    folder: &Path,
    library: &Path,
) -> Result<PathBuf, BuildError> {
    create_folder(cache)?;
    let object = cache.join(format!("shim-{arch}.cubin"));
    let sources = [nvshmem.shim.as_path(), library].map(modified);
    if matches!((modified(&object), &sources), (Some(object), [Some(a), Some(b)]) if object > *a && object > *b) {
        return Ok(object);
    }
    // To a file of its own first: builds may run at the same time.
    let fresh = cache.join(format!("shim-{arch}.{}-{:?}.cubin", std::process::id(), std::thread::current().id()));
    let nvcc = tools.nvcc()?;
    let mut command = Command::new(&nvcc);
    command.args(["-rdc=true", "-cubin", "-O3", "-std=c++17"]).arg(format!("-arch={arch}"));
    command.arg("-I").arg(folder.join("include"));
    if let Some(home) = nvcc.parent().and_then(Path::parent) {
        command.arg("-I").arg(home.join("include"));
    }
    command.arg(&nvshmem.shim).arg("-o").arg(&fresh);
    run("nvcc", &mut command)?;
    std::fs::rename(&fresh, &object).map_err(|source| BuildError::File {
        action: "placing",
        path: object.clone(),
        source,
    })?;
    Ok(object)
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).ok()?.modified().ok()
}
