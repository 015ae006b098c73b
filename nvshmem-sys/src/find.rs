//! Where the host library may be.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::HOST_LIBRARY;

/// Folders, in the order in which they are searched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchPath {
    folders: Vec<PathBuf>,
}

impl SearchPath {
    /// These folders.
    pub fn new(folders: Vec<PathBuf>) -> Self {
        Self { folders }
    }

    /// The folders.
    pub fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    /// The first library in them.
    pub fn library(&self) -> Option<PathBuf> {
        self.folders.iter().map(|folder| folder.join(HOST_LIBRARY)).find(|file| file.is_file())
    }
}

/// The folders of this process's environment: those that the user names (`LD_LIBRARY_PATH`, `NVSHMEM_HOME`), the
/// `nvidia/nvshmem/lib` of the Pythons that are active or on `PATH`, and the usual places of an installed NVSHMEM.
pub fn search_path() -> SearchPath {
    search_path_in(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
}

fn search_path_in(get: impl Fn(&str) -> Option<OsString>) -> SearchPath {
    let list =
        |name: &str| get(name).map(|value| std::env::split_paths(&value).collect::<Vec<_>>()).unwrap_or_default();
    let mut folders = list("LD_LIBRARY_PATH");
    if let Some(home) = get("NVSHMEM_HOME") {
        folders.extend(["lib", "lib64"].map(|lib| Path::new(&home).join(lib)));
    }
    let mut sites = list("PYTHONPATH");
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| get(name)).map(PathBuf::from).collect();
    prefixes.extend(list("PATH").iter().flat_map(|bin| python_prefixes(bin)));
    if let Some(home) = get("HOME") {
        prefixes.push(Path::new(&home).join(".local"));
    }
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
    sites.extend(prefixes.iter().flat_map(|prefix| sites_below(prefix)));
    folders.extend(sites.into_iter().map(|site| site.join("nvidia/nvshmem/lib")));
    folders.extend(
        ["/usr/local/nvshmem/lib", "/opt/nvidia/nvshmem/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
            .map(PathBuf::from),
    );
    let mut seen = BTreeSet::new();
    folders.retain(|folder| !folder.as_os_str().is_empty() && seen.insert(folder.clone()));
    SearchPath::new(folders)
}

/// The prefixes of the Pythons to which the program in `bin` may lead, if there is one.
fn python_prefixes(bin: &Path) -> Vec<PathBuf> {
    let (Some(beside), Ok(real)) = (bin.parent(), bin.join("python3").canonicalize()) else { return Vec::new() };
    // Packages of a virtual environment are beside the link, others where it leads.
    let mut prefixes = vec![beside.to_path_buf()];
    prefixes.extend(real.parent().and_then(Path::parent).map(Path::to_path_buf));
    // A version manager's program is a script that chooses one of its Pythons.
    prefixes.extend(std::fs::read_dir(beside.join("versions")).into_iter().flatten().flatten().map(|v| v.path()));
    prefixes
}

/// `lib/python3*/site-packages` and the like below `prefix`, sorted.
fn sites_below(prefix: &Path) -> Vec<PathBuf> {
    let mut sites = Vec::new();
    for lib in ["lib", "lib64"] {
        for python in std::fs::read_dir(prefix.join(lib)).into_iter().flatten().flatten() {
            if python.file_name().to_string_lossy().starts_with("python3") {
                sites.extend(["site-packages", "dist-packages"].map(|name| python.path().join(name)));
            }
        }
    }
    sites.retain(|site| site.is_dir());
    sites.sort();
    sites
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(root: &Path, path: &str) -> PathBuf {
        let folder = root.join(path);
        std::fs::create_dir_all(&folder).expect("created");
        folder
    }

    #[test]
    fn what_the_user_names_comes_first_then_pythons() {
        let root = tempfile::tempdir().expect("folder");
        let named = folder(root.path(), "named");
        let home = folder(root.path(), "nvshmem/lib");
        let wheel = folder(root.path(), "venv/lib/python3.12/site-packages/nvidia/nvshmem/lib");
        let bin = folder(root.path(), "venv/bin");
        std::fs::write(bin.join("python3"), "").expect("written");
        let managed = folder(root.path(), "venv/versions/3.13.1/lib/python3.13/site-packages/nvidia/nvshmem/lib");
        let get = |name: &str| match name {
            "LD_LIBRARY_PATH" => Some(format!("{}::{}", named.display(), named.display()).into()),
            "NVSHMEM_HOME" => Some(root.path().join("nvshmem").into()),
            "PATH" => Some(bin.clone().into()),
            _ => None,
        };
        let search = search_path_in(get);
        assert_eq!(search.folders()[..2], [named.clone(), home.clone()]);
        assert!(search.folders().contains(&wheel), "{search:?}");
        assert!(search.folders().contains(&managed), "{search:?}");
        let unique: BTreeSet<_> = search.folders().iter().collect();
        assert_eq!(unique.len(), search.folders().len());

        for place in [&wheel, &home, &named] {
            let library = place.join(HOST_LIBRARY);
            std::fs::write(&library, "").expect("written");
            assert_eq!(search_path_in(get).library(), Some(library), "each is before those found so far");
        }
    }
}
