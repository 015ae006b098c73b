//! With the feature `cuda`: builds the device modules that the library embeds.

fn main() {
    #[cfg(feature = "cuda")]
    device_modules();
}

/// Builds the kernels for Hopper, alone and with NVSHMEM, and tells rustc where the modules are. The variables name modules
/// that are there already.
#[cfg(feature = "cuda")]
fn device_modules() {
    use cuda_builder::{CudaBuilder, Nvshmem};

    const SHIM: &str = "../nvshmem-device-shim/shim.cu";
    for source in ["../kernels-gpu/src", "../rust-cuda/cuda_std/src", "../rust-cuda/cuda_builder/src", SHIM] {
        println!("cargo::rerun-if-changed={source}");
    }
    let kernels = || CudaBuilder::new("../kernels-gpu").arch("sm_90a");
    module("DELTALINK_DEVICE_MODULE", kernels());
    let nvshmem = kernels().module("nvshmem").features(["nvshmem"]).nvshmem(Nvshmem { shim: SHIM.into() });
    module("DELTALINK_NVSHMEM_MODULE", nvshmem);
}

#[cfg(feature = "cuda")]
fn module(variable: &str, builder: cuda_builder::CudaBuilder) {
    println!("cargo::rerun-if-env-changed={variable}");
    let module = match std::env::var(variable) {
        Ok(path) => path,
        Err(_) => match builder.build() {
            Ok(built) => built.cubin.display().to_string(),
            Err(error) => {
                println!("cargo::error={}", error.to_string().replace('\n', " | "));
                return;
            }
        },
    };
    println!("cargo::rustc-env={variable}={module}");
}
