//! Loading host libraries of every version: small ones, compiled here, that have NVSHMEM's names and do nothing.

use std::path::{Path, PathBuf};
use std::process::Command;

use nvshmem_sys::{HOST_LIBRARY, Library, LoadError, SearchPath};

/// The functions that are looked up, beside the one that tells the version.
const FUNCTIONS: [&str; 13] = [
    "nvshmemx_get_uniqueid",
    "nvshmemx_set_attr_uniqueid_args",
    "nvshmemx_hostlib_init_attr",
    "nvshmemx_hostlib_finalize",
    "nvshmem_my_pe",
    "nvshmem_n_pes",
    "nvshmem_malloc",
    "nvshmem_calloc",
    "nvshmem_free",
    "nvshmem_ptr",
    "nvshmem_barrier_all",
    "nvshmemx_cumodule_init",
    "nvshmemx_cumodule_finalize",
];

/// A library of this version in `folder`, without the function `lacking`.
fn library(folder: &Path, [major, minor, patch]: [i32; 3], lacking: &str) -> PathBuf {
    let mut source = format!(
        "void nvshmemx_vendor_get_version_info(int *a, int *b, int *c) {{ *a = {major}; *b = {minor}; *c = {patch}; }}\n"
    );
    for name in FUNCTIONS.iter().filter(|&&name| name != lacking) {
        source += &format!("long {name}(void) {{ return 0; }}\n");
    }
    let (file, path) = (folder.join("mock.c"), folder.join(HOST_LIBRARY));
    std::fs::write(&file, source).expect("written");
    // The program that Rust links with.
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&path).arg(&file).status();
    assert!(compiled.expect("cc starts").success());
    path
}

#[test]
fn a_library_of_the_right_version_is_loaded_from_where_it_is_first_found() {
    let [empty, first, second] = [(); 3].map(|()| tempfile::tempdir().expect("folder"));
    let path = library(first.path(), [3, 4, 5], "");
    library(second.path(), [3, 8, 0], "");
    let search = SearchPath::new([&empty, &first, &second].map(|folder| folder.path().into()).into());
    let loaded = Library::load_from(&search).expect("loads");
    assert_eq!((loaded.version().to_string().as_str(), loaded.path()), ("3.4.5", path.as_path()));
}

#[test]
fn another_major_version_is_refused_with_both_versions_and_the_path() {
    for version in [[2, 11, 0], [4, 0, 1]] {
        let folder = tempfile::tempdir().expect("folder");
        let path = library(folder.path(), version, "");
        let error = Library::open(&path).expect_err("refused");
        let [major, minor, patch] = version;
        assert_eq!(
            error.to_string(),
            format!(
                "{} is NVSHMEM {major}.{minor}.{patch}; version 3.x is needed, whose structures this program knows",
                path.display()
            )
        );
    }
}

#[test]
fn a_library_without_a_function_names_it() {
    let folder = tempfile::tempdir().expect("folder");
    let path = library(folder.path(), [3, 0, 6], "nvshmemx_cumodule_init");
    let error = Library::open(&path).expect_err("refused");
    assert!(matches!(error, LoadError::Symbol { symbol: "nvshmemx_cumodule_init", .. }), "{error}");
    assert!(error.to_string().contains("use version 3.4 or newer"), "{error}");
}
