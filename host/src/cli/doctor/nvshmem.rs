//! NVSHMEM's host library: where it is, which version, and settings that are known to surprise.

use std::ffi::c_int;
use std::path::{Path, PathBuf};

use libloading::Library;

use super::machine::Machine;
use super::{Finding, Status, loader_says};

/// The host library with the major version that deltalink can use.
const HOST_LIBRARY: &str = "libnvshmem_host.so.3";

/// `ask`: the version that a library itself tells, where its file name does not.
pub(super) fn findings(machine: &Machine, ask: &dyn Fn(&Path) -> Result<String, String>) -> Vec<Finding> {
    const ITEM: &str = "NVSHMEM host library";
    let searched = folders(machine);
    let mut found: Vec<PathBuf> = Vec::new();
    for file in searched.iter().map(|folder| folder.join(HOST_LIBRARY)).filter(|file| file.is_file()) {
        // The same file may be reached by several names; the first one counts.
        let same = |other: &PathBuf| other.canonicalize().ok() == file.canonicalize().ok();
        if !found.iter().any(same) {
            found.push(file);
        }
    }
    let library = match &found[..] {
        [] => Finding {
            searched,
            ..Finding::new(ITEM, Status::Missing, format!("no {HOST_LIBRARY} in the folders searched")).advice(
                "PEs cannot be GPUs here, threads and processes can; install it with `pip install nvidia-nvshmem-cu12` (or -cu13, as your driver's CUDA), or set NVSHMEM_HOME to the folder above its lib, or LD_LIBRARY_PATH to the lib",
            )
        },
        [first, others @ ..] => {
            let path = first.display();
            let (status, text) = match version_in_name(first).map_or_else(|| ask(first), Ok) {
                Ok(version) => (Status::Ok, format!("{version}, {path}")),
                Err(why) => (Status::Note, format!("version unknown ({why}), {path}")),
            };
            let others: Vec<String> = others.iter().map(|other| other.display().to_string()).collect();
            match others.is_empty() {
                true => Finding::new(ITEM, status, text),
                false => Finding::new(ITEM, Status::Note, text).advice(format!(
                    "there are others ({}): programs that load another one than their device code was built for fail; keep one",
                    others.join(", ")
                )),
            }
        }
    };
    let start = found.first().and_then(|library| library.parent()).map(bootstrap);
    std::iter::once(library).chain(start).chain(bootstrap_variables(machine)).chain(symmetric_size(machine)).collect()
}

/// The plugins with which NVSHMEM can start, in the folder of its host library; deltalink uses `uid`.
fn bootstrap(folder: &Path) -> Finding {
    const ITEM: &str = "NVSHMEM bootstrap plugins";
    let plugin = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.strip_prefix("nvshmem_bootstrap_")?.split(".so").next()?.to_owned();
        Some(name)
    };
    let mut names: Vec<String> = list(folder).into_iter().filter_map(plugin).collect();
    names.dedup();
    if names.iter().any(|name| name == "uid") {
        return Finding::new(ITEM, Status::Ok, names.join(", "));
    }
    let found = if names.is_empty() { "none".to_owned() } else { format!("{}, but no uid", names.join(", ")) };
    Finding { searched: vec![folder.into()], ..Finding::new(ITEM, Status::Missing, found) }.advice(
        "deltalink starts NVSHMEM with nvshmem_bootstrap_uid.so, which every package of NVSHMEM 3 has beside the host library; install it anew, or put the plugin's folder on LD_LIBRARY_PATH",
    )
}

/// Variables that choose another way to start.
fn bootstrap_variables(machine: &Machine) -> Option<Finding> {
    const NAME: &str = "NVSHMEM_BOOTSTRAP";
    machine.env(NAME).map(|value| {
        Finding::new(NAME, Status::Note, value.to_string_lossy()).advice(
            "deltalink starts NVSHMEM with an identifier that PE 0 gives to the others, under any launcher; unset it if PEs take themselves for PE 0 of 1",
        )
    })
}

/// Folders that may hold the host library, those that a user names first, each once.
fn folders(machine: &Machine) -> Vec<PathBuf> {
    let mut all = machine.env_paths("LD_LIBRARY_PATH");
    if let Some(home) = machine.env("NVSHMEM_HOME") {
        all.extend(["lib", "lib64"].map(|lib| Path::new(home).join(lib)));
    }
    all.extend(site_packages(machine).into_iter().map(|site| site.join("nvidia/nvshmem/lib")));
    all.extend(["/usr/local/nvshmem/lib", "/opt/nvidia/nvshmem/lib"].map(|folder| machine.path(folder)));
    for arch in ["x86_64-linux-gnu", "aarch64-linux-gnu"] {
        // Debian packages have one folder for each CUDA version, beside the one of other libraries.
        let libraries = machine.path(&format!("/usr/lib/{arch}"));
        all.extend(list(&libraries.join("nvshmem")));
        all.extend(Some(libraries).filter(|folder| folder.is_dir()));
    }
    all.extend(["/usr/lib64", "/usr/lib"].map(|folder| machine.path(folder)).into_iter().filter(|f| f.is_dir()));
    let mut seen = std::collections::BTreeSet::new();
    all.retain(|folder| seen.insert(folder.clone()));
    all
}

/// Where Python packages are installed: the active environment, the Pythons on `PATH`, the user's, the system's.
pub(super) fn site_packages(machine: &Machine) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| machine.env(name).map(PathBuf::from)).collect();
    let on_path = machine.env_paths("PATH").into_iter().filter(|bin| bin.join("python3").exists());
    prefixes.extend(on_path.filter_map(|bin| Some(bin.parent()?.to_path_buf())));
    prefixes.extend(machine.env("HOME").map(|home| Path::new(home).join(".local")));
    prefixes.extend(["/usr/local", "/usr"].map(|prefix| machine.path(prefix)));
    let mut sites = machine.env_paths("PYTHONPATH");
    for prefix in prefixes {
        sites.extend(sites_below(&prefix));
    }
    sites
}

/// `lib/python3*/site-packages` and the like below `prefix`.
pub(super) fn sites_below(prefix: &Path) -> Vec<PathBuf> {
    let is_python = |folder: &PathBuf| folder.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3"));
    let pythons = ["lib", "lib64"].into_iter().flat_map(|lib| list(&prefix.join(lib))).filter(is_python);
    pythons.flat_map(|p| ["site-packages", "dist-packages"].map(|s| p.join(s))).filter(|s| s.is_dir()).collect()
}

/// What is in a folder, sorted; nothing if it cannot be read.
fn list(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    all.sort();
    all
}

/// The version in the name of the file that `library` is a link to, such as `libnvshmem_host.so.3.4.5`.
fn version_in_name(library: &Path) -> Option<String> {
    let file = library.canonicalize().ok()?;
    let version = file.file_name()?.to_str()?.split_once(".so.")?.1.to_owned();
    version.contains('.').then_some(version)
}

/// Loads the library and asks `nvshmemx_vendor_get_version_info`, which needs no initialisation.
pub(super) fn ask_library(path: &Path) -> Result<String, String> {
    // SAFETY: NVSHMEM's host library is made to be loaded this way; its initialisers have no conditions.
    let library = unsafe { Library::new(path) }.map_err(|e| loader_says(&e))?;
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    type Version = unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int);
    // SAFETY: the signature is that of nvshmemx.h: three pointers to int, all of them written.
    unsafe {
        let version = library.get::<Version>("nvshmemx_vendor_get_version_info").map_err(|e| loader_says(&e))?;
        version(&mut major, &mut minor, &mut patch);
    }
    // It may have registered handlers that outlive this call: never unload it.
    std::mem::forget(library);
    Ok(format!("{major}.{minor}.{patch}"))
}

/// A size that is set and has no effect.
fn symmetric_size(machine: &Machine) -> Option<Finding> {
    let size = machine.env("NVSHMEM_SYMMETRIC_SIZE")?;
    let is_static = machine.env("NVSHMEM_DISABLE_CUDA_VMM").is_some_and(|v| v != "0");
    (!is_static).then(|| {
        Finding::new("NVSHMEM_SYMMETRIC_SIZE", Status::Note, size.to_string_lossy()).advice(
            "it sizes the static heap only (NVSHMEM_DISABLE_CUDA_VMM=1); the default heap grows as needed, up to NVSHMEM_MAX_MEMORY_PER_GPU",
        )
    })
}
