//! What can go wrong: what was asked, what was found, what to do.

use std::path::PathBuf;

/// A device module could not be built.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum BuildError {
    #[error(
        "no Rust toolchain can build device code (1.95 or newer, with the source of its own core library):{}\n\
         run `cargo xtask setup`, or `rustup component add rust-src`, or let {variable} name a rustc",
        list(tried)
    )]
    NoToolchain { tried: Vec<String>, variable: &'static str },
    #[error(
        "no LLVM that can read the output of rustc (its LLVM is {wanted}; an older one cannot):{}\n\
         run `cargo xtask setup`, or `rustup component add llvm-tools`, or let {variable} name a folder with opt and llc",
        list(tried)
    )]
    NoLlvm { wanted: String, tried: Vec<String>, variable: &'static str },
    #[error("no {tool} of CUDA 12.3 or newer:{}\nrun `cargo xtask setup`, or set CUDA_HOME", list(tried))]
    NoCudaTool { tool: &'static str, tried: Vec<String> },
    #[error("NVSHMEM's device library is not in {}; run `cargo xtask setup`", folder.display())]
    NoNvshmem { folder: PathBuf },
    #[error("{what} failed ({status}): {command}\n{output}")]
    Command { what: &'static str, status: String, command: String, output: String },
    #[error("{what} could not be started: {command}: {source}")]
    Start { what: &'static str, command: String, source: std::io::Error },
    #[error("{action} {}: {source}", path.display())]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{} has no kernel: mark entry points with #[kernel] and compile them for nvptx64", krate.display())]
    NoKernels { krate: PathBuf },
    #[error("the crate has no kernel {name}; it has {}", found.join(", "))]
    UnknownKernel { name: String, found: Vec<String> },
    #[error("line {line} of the LLVM IR calls assembly in a form that cannot be marked convergent: {text}")]
    UnknownAssembly { line: usize, text: String },
    #[error(
        "{function} has an atomic read-modify-write with ordering {ordering}, which this target drops \
         (rust-lang/rust#136480); use cuda_std::ptx (atom_add_acq_rel_gpu_u64, red_release_sys_add_u64), or Relaxed"
    )]
    LostOrdering { function: String, ordering: String },
    #[error(
        "nothing defines {}; functions named dl_* come with CudaBuilder::nvshmem, mathematics from cuda_std",
        names.join(", ")
    )]
    Undefined { names: Vec<String> },
    #[error("the kernel {kernel} is not in the PTX as expected: {why}")]
    Ptx { kernel: String, why: &'static str },
    #[error("hot kernels must not be built like this:{}", list(faults))]
    Hot { faults: Vec<Fault> },
}

/// Something that makes a kernel slow: it fails the build of a hot kernel and is a warning for others.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the messages say what each field is
pub enum Fault {
    /// Arrays that were not kept in registers.
    Local { kernel: String, arrays: usize },
    /// Registers that did not fit.
    Spills { kernel: String, stores: u64, loads: u64 },
    /// `wgmma` that run one after the other, by what ptxas says.
    Serialized { kernel: String, warnings: Vec<String> },
    /// `setmaxnreg` without effect.
    SetmaxnregIgnored { kernel: String },
    /// Calls of panics; never fails a build.
    Panics { kernel: String, calls: usize },
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Local { kernel, arrays } => write!(
                f,
                "{kernel}: {arrays} functions keep arrays in local memory; index register arrays by constants, in \
                 unrolled code"
            ),
            Fault::Spills { kernel, stores, loads } => write!(
                f,
                "{kernel}: {stores} bytes of spill stores and {loads} of spill loads; use fewer registers or allow more"
            ),
            Fault::Serialized { kernel, warnings } => write!(
                f,
                "{kernel}: {} wgmma serialised; leave accumulators alone between issue and wait ({})",
                warnings.len(),
                warnings.join("; ")
            ),
            Fault::SetmaxnregIgnored { kernel } => write!(
                f,
                "{kernel}: setmaxnreg is ignored; its #[kernel] needs threads and registers, and its module must not be \
                 linked with NVSHMEM (ptxas then assumes any caller): put such kernels into a module of their own"
            ),
            Fault::Panics { kernel, calls } => {
                write!(f, "{kernel}: {calls} calls of panics are left; check bounds once, outside of loops")
            }
        }
    }
}

fn list(items: &[impl std::fmt::Display]) -> String {
    items.iter().map(|item| format!("\n  - {item}")).collect()
}
