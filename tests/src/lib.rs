//! What the integration tests share: the golden files, and the kernels of a backward step one by one.

pub mod backward_pes;
pub mod world;

use std::path::{Path, PathBuf};

use deltalink::file::InputFile;

/// The folder of the golden files.
pub fn golden_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// Every golden file, sorted by name: `a_*` corner cases, `b_*` activations of a trained model, `c_*` context parallelism.
///
/// # Panics
/// If the folder cannot be read or holds none.
pub fn golden_files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(golden_dir()).expect("the folder of golden files");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry of the folder").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    paths.sort();
    assert!(!paths.is_empty(), "no golden files in {}", golden_dir().display());
    paths
}

/// The golden files that were made for the ranks of a context-parallel group.
pub fn golden_cp_files() -> Vec<PathBuf> {
    let files: Vec<_> = golden_files().into_iter().filter(|path| name(path).starts_with("c_")).collect();
    assert!(!files.is_empty(), "no golden files of context parallelism in {}", golden_dir().display());
    files
}

/// Loads a golden file.
///
/// # Panics
/// If it cannot be loaded.
pub fn load(path: impl AsRef<Path>) -> InputFile {
    InputFile::load(path).unwrap_or_else(|error| panic!("{error}"))
}

/// Name of a file without its folder and extension.
pub fn name(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}
