//! The `opt` and `llc` of an LLVM that can read what rustc writes.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{RustToolchain, version_after};
use crate::BuildError;
use crate::command::run;

/// LLVM's tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Llvm {
    /// The optimiser.
    pub opt: PathBuf,
    /// The code generator.
    pub llc: PathBuf,
    /// Version, major and minor.
    pub version: (u32, u32),
}

/// How many major versions after rustc's are looked for.
const NEWER: u32 = 3;

impl Llvm {
    /// Names a folder with `opt` and `llc` to use before all others.
    pub const VARIABLE: &str = "DELTALINK_LLVM_BIN";

    /// The first that serves of: the folder that [`Self::VARIABLE`] names, and nothing else if it is set; rustup's
    /// component llvm-tools of `rust`; `/usr/lib/llvm-N/bin`, N from the version of rustc's LLVM on.
    pub fn find(rust: &RustToolchain) -> Result<Llvm, BuildError> {
        let folders = match std::env::var_os(Self::VARIABLE) {
            Some(folder) => vec![PathBuf::from(folder)],
            None => {
                let component = rust.sysroot.join("lib/rustlib").join(&rust.host).join("bin");
                let packages = (rust.llvm.0..=rust.llvm.0 + NEWER).map(|n| format!("/usr/lib/llvm-{n}/bin").into());
                std::iter::once(component).chain(packages).collect()
            }
        };
        Self::find_among(&folders, rust.llvm)
    }

    /// The first of `folders` whose tools are of `wanted` or a later major version.
    pub fn find_among(folders: &[PathBuf], wanted: (u32, u32)) -> Result<Llvm, BuildError> {
        let mut tried = Vec::new();
        for folder in folders {
            match Self::inspect(folder, wanted) {
                Ok(llvm) => return Ok(llvm),
                Err(why) => tried.push(format!("{}: {why}", folder.display())),
            }
        }
        Err(BuildError::NoLlvm { wanted: format!("{}.{}", wanted.0, wanted.1), tried, variable: Self::VARIABLE })
    }

    fn inspect(folder: &Path, wanted: (u32, u32)) -> Result<Llvm, String> {
        let find = |tool: &str| {
            let path = folder.join(tool);
            if !path.is_file() {
                return Err(format!("no {tool}"));
            }
            let about =
                run("LLVM", Command::new(&path).arg("--version")).map_err(|_| format!("{tool} does not run"))?;
            let version = version_after(&about, "LLVM version ").ok_or(format!("{tool} does not say its version"))?;
            if version.0 < wanted.0 {
                return Err(format!("{tool} is version {}.{}, older than rustc's LLVM", version.0, version.1));
            }
            Ok((path, version))
        };
        let ((opt, _), (llc, version)) = (find("opt")?, find("llc")?);
        Ok(Llvm { opt, llc, version })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn tools(folder: PathBuf, version: &str) -> PathBuf {
        std::fs::create_dir_all(&folder).unwrap();
        for tool in ["opt", "llc"] {
            let path = folder.join(tool);
            std::fs::write(&path, format!("#!/bin/sh\necho 'Debian LLVM version {version}'\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        folder
    }

    #[test]
    fn an_older_llvm_is_refused_and_a_newer_one_taken() {
        let folder = tempfile::tempdir().unwrap();
        let old = tools(folder.path().join("old"), "14.0.6");
        let new = tools(folder.path().join("new"), "23.1.0");
        let found = Llvm::find_among(&[old.clone(), new], (22, 1)).unwrap();
        assert_eq!(found.version, (23, 1));
        let error = Llvm::find_among(&[old, folder.path().join("absent")], (22, 1)).unwrap_err().to_string();
        for part in ["its LLVM is 22.1", "opt is version 14.0, older than rustc's", "no opt", "cargo xtask setup"] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}
