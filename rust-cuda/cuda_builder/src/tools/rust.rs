//! A rustc that has the source of its own core library.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::version_after;
use crate::BuildError;
use crate::command::run;

/// A Rust toolchain that can build `core` for a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RustToolchain {
    /// The compiler.
    pub rustc: PathBuf,
    /// The cargo of the same version.
    pub cargo: PathBuf,
    /// Where its libraries are.
    pub sysroot: PathBuf,
    /// Version, major and minor.
    pub version: (u32, u32),
    /// Version of its LLVM, major and minor.
    pub llvm: (u32, u32),
    /// The host's target triple.
    pub host: String,
}

/// The oldest rustc whose LLVM knows sm_90a well enough.
const OLDEST: (u32, u32) = (1, 95);

impl RustToolchain {
    /// Names a rustc to use before all others.
    pub const VARIABLE: &str = "DELTALINK_DEVICE_RUSTC";

    /// The first that serves of: what [`Self::VARIABLE`] names, and nothing else if it is set; the toolchain that
    /// rustup picks in the current folder; `/usr/bin/rustc`.
    pub fn find() -> Result<RustToolchain, BuildError> {
        let candidates = match std::env::var_os(Self::VARIABLE) {
            Some(rustc) => vec![PathBuf::from(rustc)],
            None => vec![PathBuf::from("rustc"), PathBuf::from("/usr/bin/rustc")],
        };
        Self::find_among(&candidates)
    }

    /// The first of `candidates` that serves.
    pub fn find_among(candidates: &[PathBuf]) -> Result<RustToolchain, BuildError> {
        let mut tried = Vec::new();
        for rustc in candidates {
            match Self::inspect(rustc) {
                Ok(toolchain) => return Ok(toolchain),
                Err(why) => tried.push(format!("{}: {why}", rustc.display())),
            }
        }
        Err(BuildError::NoToolchain { tried, variable: Self::VARIABLE })
    }

    fn inspect(rustc: &Path) -> Result<RustToolchain, String> {
        // `rustc` may be rustup's, which picks a toolchain; the toolchain's own is used from then on.
        let ask = |rustc: &Path, arguments: &[&str]| {
            run("rustc", Command::new(rustc).args(arguments)).map_err(|_| "it does not run".to_owned())
        };
        // What rustup says while it looks for a toolchain comes on standard error, after the answer.
        let sysroot = ask(rustc, &["--print", "sysroot"])?;
        let sysroot = PathBuf::from(sysroot.lines().next().unwrap_or_default());
        let rustc = sysroot.join("bin/rustc");
        let about = ask(&rustc, &["-vV"])?;
        let version = version_after(&about, "release: ").ok_or("it does not say its version")?;
        let llvm = version_after(&about, "LLVM version: ").ok_or("it does not say the version of its LLVM")?;
        let host = about.lines().find_map(|line| line.strip_prefix("host: ")).ok_or("it does not say its host")?;
        if version < OLDEST {
            return Err(format!("it is version {}.{}", version.0, version.1));
        }
        let core = sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs");
        if !core.is_file() {
            return Err(format!("version {}.{} without rust-src ({})", version.0, version.1, core.display()));
        }
        let cargo = sysroot.join("bin/cargo");
        if !cargo.is_file() {
            return Err(format!("there is no {}", cargo.display()));
        }
        Ok(RustToolchain { rustc, cargo, host: host.to_owned(), sysroot, version, llvm })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A toolchain of scripts. `source`: whether it has rust-src.
    fn toolchain(folder: &Path, release: &str, source: bool) -> PathBuf {
        let rustc = folder.join("bin/rustc");
        std::fs::create_dir_all(folder.join("bin")).unwrap();
        let answers = format!("host: x\nrelease: {release}\nLLVM version: 22.1.2");
        let script = format!("#!/bin/sh\nif [ $1 = -vV ]; then echo '{answers}'; else echo {}; fi\n", folder.display());
        std::fs::write(&rustc, script).unwrap();
        std::fs::set_permissions(&rustc, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(folder.join("bin/cargo"), "").unwrap();
        if source {
            let core = folder.join("lib/rustlib/src/rust/library/core/src");
            std::fs::create_dir_all(&core).unwrap();
            std::fs::write(core.join("lib.rs"), "").unwrap();
        }
        rustc
    }

    #[test]
    fn the_first_toolchain_that_serves_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let old = toolchain(&folder.path().join("old"), "1.90.0", true);
        let bare = toolchain(&folder.path().join("bare"), "1.95.0", false);
        let good = toolchain(&folder.path().join("good"), "1.96.0", true);
        let found = RustToolchain::find_among(&[old.clone(), bare.clone(), good.clone()]).unwrap();
        assert_eq!((found.rustc, found.version, found.llvm), (good, (1, 96), (22, 1)));

        let error = RustToolchain::find_among(&[old, bare, folder.path().join("absent")]).unwrap_err().to_string();
        for part in ["it is version 1.90", "version 1.95 without rust-src", "it does not run", "cargo xtask setup"] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}
