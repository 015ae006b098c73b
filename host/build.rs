//! With the feature `cuda`: builds the device module that the library embeds.

fn main() {
    #[cfg(feature = "cuda")]
    device_module();
}

/// Builds the kernels for Hopper and tells rustc where the module is. `DELTALINK_DEVICE_MODULE` names one that is there
/// already.
#[cfg(feature = "cuda")]
fn device_module() {
    const VARIABLE: &str = "DELTALINK_DEVICE_MODULE";
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    for source in ["../kernels-gpu/src", "../rust-cuda/cuda_std/src", "../rust-cuda/cuda_builder/src"] {
        println!("cargo::rerun-if-changed={source}");
    }
    let module = match std::env::var(VARIABLE) {
        Ok(path) => path,
        Err(_) => match cuda_builder::CudaBuilder::new("../kernels-gpu").arch("sm_90a").build() {
            Ok(built) => built.cubin.display().to_string(),
            Err(error) => {
                println!("cargo::error={}", error.to_string().replace('\n', " | "));
                return;
            }
        },
    };
    println!("cargo::rustc-env={VARIABLE}={module}");
}
