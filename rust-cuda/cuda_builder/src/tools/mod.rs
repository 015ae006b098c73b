//! Where the tools are. Each is looked for in a fixed order of places; a place that does not serve leaves a reason,
//! and the reasons are in the error if none does.

mod cuda;
mod llvm;
mod rust;

use std::path::PathBuf;

pub use cuda::{CudaTools, nvshmem_folder};
pub use llvm::Llvm;
pub use rust::RustToolchain;

/// Cargo's target folder: `CARGO_TARGET_DIR`, or `target` of the workspace that this crate is in.
pub fn target_folder() -> PathBuf {
    let workspace = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target"));
    let folder = std::env::var_os("CARGO_TARGET_DIR").map_or_else(workspace, PathBuf::from);
    // An absent folder cannot be made canonical, and need not be.
    folder.canonicalize().unwrap_or(folder)
}

/// Where `cargo xtask setup` puts CUDA and NVSHMEM.
pub fn cuda_folder() -> PathBuf {
    target_folder().join("cuda")
}

/// The first two numbers of a version that follows `before` in `text`.
fn version_after(text: &str, before: &str) -> Option<(u32, u32)> {
    let rest = text.split_once(before)?.1;
    let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::version_after;

    #[test]
    fn versions_are_found() {
        assert_eq!(version_after("Debian LLVM version 22.1.8\n", "LLVM version "), Some((22, 1)));
        assert_eq!(version_after("tools, release 13.0, V13.0.88", "release "), Some((13, 0)));
        assert_eq!(version_after("release: 1.96.0-nightly", "release: "), Some((1, 96)));
        assert_eq!(version_after("nothing", "release "), None);
    }
}
