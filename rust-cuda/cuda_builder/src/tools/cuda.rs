//! `ptxas`, `nvlink` and `nvcc`, and NVSHMEM's device library.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{cuda_folder, version_after};
use crate::BuildError;
use crate::command::run;

/// A CUDA toolkit, or the part of it that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaTools {
    folders: Vec<PathBuf>,
}

/// The first CUDA whose ptxas reads the PTX version that llc is asked for.
const OLDEST: (u32, u32) = (12, 3);

impl CudaTools {
    /// Looks, for each tool, into: what `cargo xtask setup` brought, `CUDA_HOME`, `PATH`, `/usr/local/cuda`.
    pub fn new() -> CudaTools {
        let mut folders = vec![cuda_folder().join("nvidia/cu13/bin")];
        folders.extend(std::env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin")));
        folders.extend(std::env::var_os("PATH").iter().flat_map(std::env::split_paths));
        folders.push("/usr/local/cuda/bin".into());
        CudaTools { folders }
    }

    /// Looks into `folders` only.
    pub fn within(folders: Vec<PathBuf>) -> CudaTools {
        CudaTools { folders }
    }

    /// The assembler.
    pub fn ptxas(&self) -> Result<PathBuf, BuildError> {
        self.find("ptxas")
    }

    /// The linker of device code.
    pub fn nvlink(&self) -> Result<PathBuf, BuildError> {
        self.find("nvlink")
    }

    /// The compiler, for the NVSHMEM shim alone.
    pub fn nvcc(&self) -> Result<PathBuf, BuildError> {
        self.find("nvcc")
    }

    fn find(&self, tool: &'static str) -> Result<PathBuf, BuildError> {
        let mut tried = Vec::new();
        for path in self.folders.iter().map(|folder| folder.join(tool)) {
            if !path.is_file() {
                continue;
            }
            match version(&path) {
                Some(version) if version >= OLDEST => return Ok(path),
                Some((major, minor)) => tried.push(format!("{}: it is of CUDA {major}.{minor}", path.display())),
                None => tried.push(format!("{}: it does not say its version", path.display())),
            }
        }
        if tried.is_empty() {
            tried.extend(self.folders.iter().map(|folder| format!("{}: none", folder.display())));
        }
        Err(BuildError::NoCudaTool { tool, tried })
    }
}

impl Default for CudaTools {
    fn default() -> Self {
        Self::new()
    }
}

fn version(tool: &Path) -> Option<(u32, u32)> {
    version_after(&run("CUDA", Command::new(tool).arg("--version")).ok()?, "release ")
}

/// The folder with NVSHMEM's `include` and `lib`: `NVSHMEM_HOME`, or what `cargo xtask setup` brought.
pub fn nvshmem_folder() -> Result<PathBuf, BuildError> {
    let folder = std::env::var_os("NVSHMEM_HOME").map_or_else(|| cuda_folder().join("nvidia/nvshmem"), PathBuf::from);
    if folder.join("lib/libnvshmem_device.a").is_file() { Ok(folder) } else { Err(BuildError::NoNvshmem { folder }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_toolkit_that_is_too_old_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let ptxas = folder.path().join("ptxas");
        std::fs::write(&ptxas, "#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n").unwrap();
        std::fs::set_permissions(&ptxas, std::fs::Permissions::from_mode(0o755)).unwrap();
        let tools = CudaTools::within(vec![folder.path().into()]);
        let error = tools.ptxas().unwrap_err().to_string();
        assert!(error.contains("of CUDA 11.8") && error.contains("cargo xtask setup"), "{error}");
        let error = tools.nvlink().unwrap_err().to_string();
        assert!(error.contains("no nvlink of CUDA 12.3 or newer") && error.contains(": none"), "{error}");
    }
}
