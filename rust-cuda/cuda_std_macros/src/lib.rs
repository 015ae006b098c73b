//! The `#[kernel]` attribute. Use it through `cuda_std::kernel`.

mod kernel;

use proc_macro::TokenStream;

/// Makes a function an entry point of the device module.
///
/// ```ignore
/// #[kernel(threads = 128, registers = 168)]
/// pub unsafe fn scale(out: *mut f32, factor: f32) { .. }
/// ```
///
/// The function becomes `#[unsafe(no_mangle)] pub unsafe extern "ptx-kernel" fn`; for targets other than
/// `nvptx64` it is left out. The crate needs `#![feature(abi_ptx, asm_experimental_arch)]` on the device.
///
/// What may be passed is what a launch can copy: raw pointers, numbers, and `Copy` structs. References, slices,
/// generic parameters and results are refused here; a struct aligned to more than 16 bytes is refused when the
/// device crate is compiled (rustc cannot pass one; pass a pointer to it).
///
/// Arguments, all optional, numbers but for the first:
/// * `hot`: local memory, spills and serialised `wgmma` fail the build.
/// * `threads`: threads of a block (`.reqntid`); launching with another number fails. `setmaxnreg` needs it.
/// * `registers`: most registers of a thread (`.maxnreg`). `setmaxnreg` needs it.
/// * `blocks_per_sm`: blocks that must fit one multiprocessor (`.minnctapersm`); with `threads`, without `registers`.
/// * `cluster`: blocks of a cluster (`.reqnctapercluster`).
///
/// They travel as a line of module assembly that starts with `// cuda_std::kernel`; `cuda_builder` turns it into
/// the directives.
#[proc_macro_attribute]
pub fn kernel(arguments: TokenStream, item: TokenStream) -> TokenStream {
    kernel::expand(arguments.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}
