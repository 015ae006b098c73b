//! Builds device modules from Rust crates.
//!
//! The way of a crate: rustc's LLVM IR before any optimisation, calls of assembly marked convergent ([`ir`]), LLVM's
//! `opt` and `llc`, launch bounds put into the PTX ([`ptx`]), `ptxas`, and `nvlink` with the NVSHMEM shim if asked for.
//! What ptxas says about every kernel becomes a table ([`resources`]).
//!
//! The build guards against what was seen to go wrong on the way:
//!
//! | hazard | guard |
//! | --- | --- |
//! | MIR jump threading duplicates barriers into the arms of a branch (rust-lang/rust#137086) | the pass is switched off |
//! | assembly is not convergent, LLVM may do the same | every call of it is marked, and none may be left over |
//! | `fetch_add` and the like lose their ordering (rust-lang/rust#136480) | ordered read-modify-writes fail the build |
//! | arguments aligned to more than 16 bytes crash rustc | `#[kernel]` refuses them |
//! | `core` built for another `target-cpu` | it is always passed; one target folder for each architecture |
//! | references to arguments keep them in local memory | everything is inlined and put into registers before LLVM simplifies |
//! | LLVM hoists addresses out of loops until registers spill | it moves nothing out of loops, ptxas does |
//! | local memory, spills, serialised `wgmma`, ignored `setmaxnreg` | fail the build of a hot kernel, warnings for others |
//! | functions that nothing defines (libm, forgotten NVSHMEM) | fail the build, by name |
//! | panics left in a hot kernel | a warning |
//!
//! A kernel is hot if its `#[kernel]` says so or [`CudaBuilder::hot`] names it.

mod artifacts;
mod builder;
mod command;
mod error;
pub mod ir;
pub mod ptx;
pub mod resources;
mod shim;
mod tools;

pub use artifacts::Artifacts;
pub use builder::{CudaBuilder, Nvshmem};
pub use error::{BuildError, Fault};
pub use tools::{CudaTools, Llvm, RustToolchain, cuda_folder, target_folder};
