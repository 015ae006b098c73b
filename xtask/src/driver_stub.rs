//! A libcuda to link with where no driver is installed: every function of the driver, each doing nothing but fail. A
//! program that was linked with it runs on a machine with a driver, whose libcuda.so.1 it then loads.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shell::{SetupError, at, run};

/// What the functions return: CUDA_ERROR_STUB_LIBRARY.
const STUB_LIBRARY: u32 = 34;

/// Builds the stub under `folder`, unless it is there, and returns the folder to give as `CUDA_LIBRARY_PATH`.
pub fn build(folder: &Path) -> Result<PathBuf, SetupError> {
    let home = folder.join("driver-stub");
    // Where a toolkit has its own stub, and where build scripts look for it.
    let libraries = home.join("lib64/stubs");
    let library = libraries.join("libcuda.so");
    if library.is_file() {
        return Ok(home);
    }
    let header = folder.join("nvidia/cu13/include/cuda.h");
    let names = functions(&fs::read_to_string(&header).map_err(at("reading", &header))?);
    if names.is_empty() {
        return Err(SetupError::NoDriverFunctions { header, folder: folder.into() });
    }
    fs::create_dir_all(&libraries).map_err(at("creating", &libraries))?;
    let source = home.join("libcuda.c");
    let text: String = names.iter().map(|name| format!("int {name}(void) {{ return {STUB_LIBRARY}; }}\n")).collect();
    fs::write(&source, text).map_err(at("writing", &source))?;
    println!("Building a stub of the driver with {} functions:", names.len());
    let mut command = Command::new("g++");
    command.args(["-x", "c", "-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libcuda.so.1"]);
    run(command.arg(&source).arg("-o").arg(&library))?;
    Ok(home)
}

/// Every name of the driver's API that a header mentions, in each version that some CUDA had: programs that were
/// written for an older one name older versions.
fn functions(header: &str) -> BTreeSet<String> {
    let words = header.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let functions = words.filter(|word| {
        word.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
    });
    let bases = functions.map(|name| match name.rsplit_once("_v") {
        Some((base, version)) if version.parse::<u32>().is_ok() => base,
        _ => name,
    });
    bases.flat_map(|base| ["", "_v2", "_v3", "_v4"].map(|version| format!("{base}{version}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::functions;

    #[test]
    fn functions_come_in_all_versions() {
        let header =
            "#define cuCtxCreate cuCtxCreate_v4\nCUresult CUDAAPI cuInit(unsigned int Flags); // cuda, cudaMalloc";
        let names: Vec<String> = functions(header).into_iter().collect();
        let want = ["cuCtxCreate", "cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4"];
        assert_eq!(names[..4], want);
        assert_eq!(names[4..], ["cuInit", "cuInit_v2", "cuInit_v3", "cuInit_v4"]);
    }
}
