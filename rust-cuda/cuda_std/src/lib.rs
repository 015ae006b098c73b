//! Device library for kernels written in Rust.
//!
//! Modules and names are those of Rust-CUDA's `cuda_std`, for the part that is used here; underneath is rustc's
//! own `nvptx64-nvidia-cuda` target. `ptx` is the only home of assembly. For any other target the same names are
//! those of an emulation ([`emulated`]), which runs device code and checks it.
//!
//! Device code is built by `cuda_builder`: it marks assembly as convergent, which keeps LLVM from duplicating
//! barriers and matrix instructions into the arms of a branch. Without that step this library is not sound.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(stdarch_nvptx, asm_experimental_arch, core_float_math))]

pub use cuda_std_macros::kernel;

#[cfg(not(target_arch = "nvptx64"))]
pub mod emulated;
pub mod math;
#[cfg(target_arch = "nvptx64")]
pub mod ptx;
#[cfg(not(target_arch = "nvptx64"))]
#[path = "emulated/ptx/mod.rs"]
pub mod ptx;
pub mod shared;
#[cfg(target_arch = "nvptx64")]
pub mod thread;
#[cfg(not(target_arch = "nvptx64"))]
#[path = "emulated/thread.rs"]
pub mod thread;
pub mod warp;

/// A panic ends the kernel with a trap: the host sees a launch failure. Messages are not formatted, since that
/// would cost every kernel registers and local memory.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: `trap` has no precondition.
    unsafe { core::arch::nvptx::trap() }
}
