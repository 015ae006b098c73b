//! Raw bindings to NVSHMEM's host library, `libnvshmem_host.so.3`, loaded at run time.
//!
//! Functions and layouts are those of NVSHMEM 3.4 (`host/nvshmemx_api.h`, `device_host/nvshmem_types.h`); within a major
//! version the library keeps them. Only what a host needs to start NVSHMEM, to make symmetric memory and to tell its
//! kernels of it is here; transfers are made by kernels.

mod find;
mod types;

use std::ffi::{c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

pub use find::{SearchPath, search_path};
pub use types::{InitArgs, InitAttr, UniqueId, UniqueIdArgs, Version};

/// The file that is loaded: the host library of the one major version whose layouts are those of this crate.
pub const HOST_LIBRARY: &str = "libnvshmem_host.so.3";

/// The major version whose layouts are those of this crate.
pub const MAJOR: c_int = 3;

/// `NVSHMEMX_INIT_WITH_UNIQUEID`: start-up with an identifier that PE 0 makes and gives to the others.
pub const INIT_WITH_UNIQUEID: c_uint = 1 << 3;

/// Environment variables that NVSHMEM must find at its start when all PEs are on one machine, unless the user has set
/// them: no NVLink multicast, which maps the whole address range and fails where the fabric's state is not in order;
/// no remote transport, which a single machine does not need and whose absence would stop the start.
pub const ONE_MACHINE: [(&str, &str); 2] = [("NVSHMEM_DISABLE_NVLS", "1"), ("NVSHMEM_REMOTE_TRANSPORT", "none")];

/// The host library cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum LoadError {
    #[error(
        "no {HOST_LIBRARY} in the folders searched ({}); install it with `pip install nvidia-nvshmem-cu13` (or -cu12, as \
         the driver's CUDA), or set NVSHMEM_HOME to the folder above its lib, or add the lib to LD_LIBRARY_PATH",
        join(searched)
    )]
    NotFound { searched: Vec<PathBuf> },
    #[error("{} cannot be loaded: {reason}; the wheel nvidia-nvshmem-cu13 (or -cu12) has one that fits glibc 2.17 and newer", path.display())]
    Load { path: PathBuf, reason: String },
    #[error("{} lacks {symbol} ({reason}); it is not NVSHMEM {MAJOR}, use version 3.4 or newer of it", path.display())]
    Symbol { path: PathBuf, symbol: &'static str, reason: String },
    #[error("{} is NVSHMEM {found}; version {MAJOR}.x is needed, whose structures this program knows", path.display())]
    Version { path: PathBuf, found: Version },
}

fn join(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

macro_rules! library {
    ($( $(#[$doc:meta])* $field:ident = $symbol:literal: unsafe extern "C" fn($($arg:ty),*) $(-> $ret:ty)?; )*) => {
        /// The loaded library. Its functions are those of `nvshmem.h` and `nvshmemx.h`, with their conditions.
        #[derive(Debug)]
        pub struct Library {
            path: PathBuf,
            version: Version,
            $( $(#[$doc])* pub $field: unsafe extern "C" fn($($arg),*) $(-> $ret)?, )*
        }

        impl Library {
            /// Loads the library at `path` and checks its major version.
            ///
            /// # Errors
            /// [`LoadError`].
            pub fn open(path: &Path) -> Result<Self, LoadError> {
                use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
                let failed = |error: libloading::Error| LoadError::Load { path: path.into(), reason: why(&error) };
                // Global: NVSHMEM loads its start-up and transport plugins, which look for its symbols.
                // SAFETY: the library is made to be loaded this way; its initialisers have no conditions.
                let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(failed)?;
                let missing = |symbol| move |error: libloading::Error| {
                    LoadError::Symbol { path: path.into(), symbol, reason: why(&error) }
                };
                let mut loaded = Self {
                    path: path.into(),
                    version: Version::default(),
                    $(
                        // SAFETY: the signature is that of NVSHMEM's header.
                        $field: unsafe {
                            *library
                                .get::<unsafe extern "C" fn($($arg),*) $(-> $ret)?>($symbol)
                                .map_err(missing($symbol))?
                        },
                    )*
                };
                let Version { major, minor, patch } = &mut loaded.version;
                // SAFETY: three pointers to int, all of them written; the call needs no initialisation.
                unsafe { (loaded.vendor_get_version_info)(major, minor, patch) };
                // It registers handlers, and starts threads, that outlive every call: it is never unloaded.
                std::mem::forget(library);
                match loaded.version {
                    Version { major: MAJOR, .. } => Ok(loaded),
                    found => Err(LoadError::Version { path: path.into(), found }),
                }
            }
        }
    };
}

library! {
    /// `nvshmemx_vendor_get_version_info(major, minor, patch)`.
    vendor_get_version_info = "nvshmemx_vendor_get_version_info": unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int);
    /// `nvshmemx_get_uniqueid(id)`: 0 if it made one.
    get_uniqueid = "nvshmemx_get_uniqueid": unsafe extern "C" fn(*mut UniqueId) -> c_int;
    /// `nvshmemx_set_attr_uniqueid_args(rank, size, id, attr)`: 0 if it filled `attr`, which refers to `id`.
    set_attr_uniqueid_args = "nvshmemx_set_attr_uniqueid_args": unsafe extern "C" fn(c_int, c_int, *const UniqueId, *mut InitAttr) -> c_int;
    /// `nvshmemx_hostlib_init_attr(flags, attr)`: collective; 0 if NVSHMEM has started.
    hostlib_init_attr = "nvshmemx_hostlib_init_attr": unsafe extern "C" fn(c_uint, *mut InitAttr) -> c_int;
    /// `nvshmemx_hostlib_finalize()`: collective.
    hostlib_finalize = "nvshmemx_hostlib_finalize": unsafe extern "C" fn();
    /// `nvshmem_my_pe()`.
    my_pe = "nvshmem_my_pe": unsafe extern "C" fn() -> c_int;
    /// `nvshmem_n_pes()`.
    n_pes = "nvshmem_n_pes": unsafe extern "C" fn() -> c_int;
    /// `nvshmem_malloc(bytes)`: collective; null if there is no room.
    malloc = "nvshmem_malloc": unsafe extern "C" fn(usize) -> *mut c_void;
    /// `nvshmem_calloc(count, bytes)`: collective; null if there is no room.
    calloc = "nvshmem_calloc": unsafe extern "C" fn(usize, usize) -> *mut c_void;
    /// `nvshmem_free(address)`: collective.
    free = "nvshmem_free": unsafe extern "C" fn(*mut c_void);
    /// `nvshmem_ptr(address, pe)`: the address at which a peer's copy can be loaded from and stored to; null if it
    /// cannot. Not to be given back to NVSHMEM's own transfers.
    ptr = "nvshmem_ptr": unsafe extern "C" fn(*const c_void, c_int) -> *mut c_void;
    /// `nvshmem_barrier_all()`: collective.
    barrier_all = "nvshmem_barrier_all": unsafe extern "C" fn();
    /// `nvshmemx_cumodule_init(module)`: tells a module's kernels of this start; 0 if it did.
    cumodule_init = "nvshmemx_cumodule_init": unsafe extern "C" fn(*mut c_void) -> c_int;
    /// `nvshmemx_cumodule_finalize(module)`.
    cumodule_finalize = "nvshmemx_cumodule_finalize": unsafe extern "C" fn(*mut c_void) -> c_int;
}

impl Library {
    /// Loads the first library on [`search_path`].
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load() -> Result<Self, LoadError> {
        Self::load_from(&search_path())
    }

    /// Loads the first library in the folders of `search`.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load_from(search: &SearchPath) -> Result<Self, LoadError> {
        match search.library() {
            Some(path) => Self::open(&path),
            None => Err(LoadError::NotFound { searched: search.folders().to_vec() }),
        }
    }

    /// Where it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of the library.
    pub fn version(&self) -> Version {
        self.version
    }
}

/// The loader's own words, which name the file; the error around them only says which call failed.
fn why(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_names_what_was_searched_and_what_to_install() {
        let folder = tempfile::tempdir().expect("folder");
        let search = SearchPath::new(vec![folder.path().into()]);
        let text = Library::load_from(&search).expect_err("empty").to_string();
        assert!(text.contains(&folder.path().display().to_string()), "{text}");
        assert!(text.contains("pip install nvidia-nvshmem-cu13") && text.contains("NVSHMEM_HOME"), "{text}");
    }

    #[test]
    fn what_is_no_library_and_what_is_another_is_told_apart() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join(HOST_LIBRARY);
        let search = SearchPath::new(vec![folder.path().into()]);
        std::fs::write(&path, "no ELF").expect("written");
        assert!(matches!(Library::load_from(&search), Err(LoadError::Load { .. })));
        // A library that every Linux system has, under NVSHMEM's name.
        let c_library = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let libc =
            c_library.lines().find_map(|line| Some(&line[line.find("/")?..]).filter(|path| path.contains("libc.so")));
        std::fs::remove_file(&path).expect("removed");
        std::os::unix::fs::symlink(libc.expect("a C library"), &path).expect("linked");
        assert!(matches!(
            Library::load_from(&search),
            Err(LoadError::Symbol { symbol: "nvshmemx_vendor_get_version_info", .. })
        ));
    }

    #[test]
    fn the_library_of_this_machine_tells_its_version() {
        match Library::load() {
            Ok(library) => {
                assert_eq!(library.version().major, MAJOR);
                assert!(library.path().ends_with(HOST_LIBRARY));
            }
            Err(LoadError::NotFound { .. }) => println!("skipping: no {HOST_LIBRARY} on this machine"),
            Err(error) => panic!("{error}"),
        }
    }
}
