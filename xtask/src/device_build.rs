//! `cargo xtask device-build`.

use std::path::PathBuf;

use cuda_builder::{BuildError, CudaBuilder, Nvshmem};

/// What to build.
#[derive(clap::Args)]
pub struct Arguments {
    /// Architecture
    #[arg(long, default_value = "sm_90a")]
    arch: String,
    /// With the crate's feature nvshmem, and linked with NVSHMEM, into a module of its own beside the plain one
    #[arg(long)]
    nvshmem: bool,
    /// Features of the crate, separated by commas
    #[arg(long, value_delimiter = ',')]
    features: Vec<String>,
    /// Kernels to keep, separated by commas; all if not given
    #[arg(long, value_delimiter = ',')]
    kernels: Vec<String>,
    /// Kernels that are hot beside those that say so: local memory, spills and serialised wgmma fail the build
    #[arg(long, value_delimiter = ',')]
    hot: Vec<String>,
    /// Folder of the crate
    #[arg(long = "crate", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels-gpu"))]
    krate: PathBuf,
}

/// The functions through which kernels call NVSHMEM.
const SHIM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../nvshmem-device-shim/shim.cu");

/// Builds, and prints the table of resources, warnings, and where the module is.
pub fn device_build(arguments: Arguments) -> Result<(), BuildError> {
    let mut builder = CudaBuilder::new(arguments.krate)
        .arch(arguments.arch)
        .features(arguments.features)
        .kernels(arguments.kernels)
        .hot(arguments.hot);
    if arguments.nvshmem {
        builder = builder.module("nvshmem").features(["nvshmem"]).nvshmem(Nvshmem { shim: SHIM.into() });
    }
    let built = builder.build()?;
    println!("{}\n", built.table());
    for warning in &built.warnings {
        println!("warning: {warning}");
    }
    println!("{}", built.cubin.display());
    Ok(())
}
