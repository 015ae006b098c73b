//! The kernels as a device module has them: one entry for each gate and element type.
//!
//! Names are `KERNEL_GATE_TYPE` or `KERNEL_TYPE`, and `conformance_FAMILY_TYPE` for tests of the tile DSL; parameters go by
//! value; blocks are `WARPGROUPS * 128` threads with the kernel's `shared_bytes` of dynamic shared memory.
//!
//! A module with NVSHMEM (feature `nvshmem`) has the portable bodies of the kernels that write into other PEs' memory, and
//! nothing else: the rest is the same with and without it, and is taken from the module without. Bodies for Hopper move
//! registers between warps, which is ignored in what is linked.
//!
//! Where the device's bodies run on emulated threads, the same lists say which body an entry's name stands for: [`find`].

/// A list of entries: `NAME = KERNEL, PARAMETERS`, and bounds as `cuda_std::kernel` takes them.
#[cfg(target_arch = "nvptx64")]
macro_rules! entries {
    ($($name:ident = $kernel:path, $params:ty $(, $bound:ident = $value:literal)*;)*) => {
        $(
            #[doc = concat!("[`", stringify!($kernel), "`].")]
            ///
            /// # Safety
            /// The parameters must describe memory of this device that lives as long as the launch.
            #[cuda_std::kernel($($bound = $value),*)]
            pub unsafe fn $name(params: $params) {
                // SAFETY: the first thing in the kernel; the launcher's blocks are whole warpgroups.
                let mut wg = unsafe { $crate::tile::Warpgroup::enter() };
                $kernel(&mut wg, &params);
            }
        )*
    };
}

/// As on a device, but for a function that finds an entry by its name.
#[cfg(emulated)]
macro_rules! entries {
    ($($name:ident = $kernel:path, $params:ty $(, $bound:ident = $value:literal)*;)*) => {
        /// The entry of this name.
        pub fn find(name: &str) -> Option<$crate::entry::Entry> {
            match name {
                $(stringify!($name) => {
                    unsafe fn body(params: *const u8) {
                        // SAFETY: the caller's word, see `Entry::run`.
                        let params = unsafe { &*params.cast::<$params>() };
                        // SAFETY: the first thing in the kernel, as on a device.
                        let mut wg = unsafe { $crate::tile::Warpgroup::enter() };
                        $kernel(&mut wg, params);
                    }
                    Some($crate::entry::Entry::new::<$params>(body))
                })*
                _ => None,
            }
        }
    };
}

// For the bodies for Hopper, whose entries stand beside them.
pub(crate) use entries;

#[cfg(emulated)]
mod emulated;
#[cfg(emulated)]
pub use emulated::{Entry, find};

/// Kernels that write into other PEs' memory.
mod sending {
    use half::{bf16, f16};

    use crate::backward::scan::scan_back;
    use crate::comm_bench::{CommBenchParams, comm_bench as exchange};
    use crate::convolution::{ConvolveBackParams, ConvolveParams, convolve, convolve_back};
    use crate::fixup::{fix_out, join_parts};
    use crate::params::{FixParams, JoinParams, ScanBackParams, ScanParams};
    use crate::scan::scan_push;

    // Convolutions have bounds: walks over tokens need many threads on a multiprocessor, so that enough loads are on their way.
    entries! {
        scan_push_f32 = scan_push::<f32>, ScanParams;
        scan_push_bf16 = scan_push::<bf16>, ScanParams;
        scan_push_f16 = scan_push::<f16>, ScanParams;
        fix_out_f32 = fix_out::<f32>, FixParams;
        fix_out_bf16 = fix_out::<bf16>, FixParams;
        fix_out_f16 = fix_out::<f16>, FixParams;
        join_parts_f32 = join_parts::<f32>, JoinParams;
        join_parts_bf16 = join_parts::<bf16>, JoinParams;
        join_parts_f16 = join_parts::<f16>, JoinParams;
        scan_back_f32 = scan_back::<f32>, ScanBackParams;
        scan_back_bf16 = scan_back::<bf16>, ScanBackParams;
        scan_back_f16 = scan_back::<f16>, ScanBackParams;
        comm_bench = exchange, CommBenchParams;
        convolve_f32 = convolve::<f32>, ConvolveParams, threads = 128, blocks_per_sm = 8;
        convolve_bf16 = convolve::<bf16>, ConvolveParams, threads = 128, blocks_per_sm = 8;
        convolve_f16 = convolve::<f16>, ConvolveParams, threads = 128, blocks_per_sm = 8;
        convolve_back_f32 = convolve_back::<f32>, ConvolveBackParams, threads = 128, blocks_per_sm = 5;
        convolve_back_bf16 = convolve_back::<bf16>, ConvolveBackParams, threads = 128, blocks_per_sm = 5;
        convolve_back_f16 = convolve_back::<f16>, ConvolveBackParams, threads = 128, blocks_per_sm = 5;
    }
}

/// Kernels that reach no other PE.
#[cfg(not(feature = "nvshmem"))]
mod local {
    use half::{bf16, f16};

    use crate::backward::{grad::grad, reduce::reduce, states::scan_states};
    use crate::begin::{BeginParams, begin as first};
    use crate::conformance::TileCase;
    use crate::conformance::acc::acc_ops;
    use crate::conformance::block::block_ops;
    use crate::conformance::decay::decay_ops;
    use crate::conformance::elements::element_ops;
    use crate::convolution::{ConvolveBeginParams, SumParams, convolve_begin as first_convolve, sum_shares};
    use crate::gate::{Gdn, Kda};
    use crate::params::{GradParams, PrepParams, ReduceParams, StatesParams};
    use crate::prep::prep;

    entries! {
        begin = first, BeginParams;
        convolve_begin = first_convolve, ConvolveBeginParams;
        prep_kda_f32 = prep::<Kda, f32>, PrepParams;
        prep_kda_bf16 = prep::<Kda, bf16>, PrepParams;
        prep_kda_f16 = prep::<Kda, f16>, PrepParams;
        prep_gdn_f32 = prep::<Gdn, f32>, PrepParams;
        prep_gdn_bf16 = prep::<Gdn, bf16>, PrepParams;
        prep_gdn_f16 = prep::<Gdn, f16>, PrepParams;
        scan_states_f32 = scan_states::<f32>, StatesParams;
        scan_states_bf16 = scan_states::<bf16>, StatesParams;
        scan_states_f16 = scan_states::<f16>, StatesParams;
        grad_kda_f32 = grad::<Kda, f32>, GradParams;
        grad_kda_bf16 = grad::<Kda, bf16>, GradParams;
        grad_kda_f16 = grad::<Kda, f16>, GradParams;
        grad_gdn_f32 = grad::<Gdn, f32>, GradParams;
        grad_gdn_bf16 = grad::<Gdn, bf16>, GradParams;
        grad_gdn_f16 = grad::<Gdn, f16>, GradParams;
        reduce_f32 = reduce, ReduceParams;
        sum_shares_f32 = sum_shares, SumParams;
        conformance_acc_f32 = acc_ops::<f32>, TileCase;
        conformance_acc_bf16 = acc_ops::<bf16>, TileCase;
        conformance_acc_f16 = acc_ops::<f16>, TileCase;
        conformance_elements_f32 = element_ops::<f32>, TileCase;
        conformance_elements_bf16 = element_ops::<bf16>, TileCase;
        conformance_elements_f16 = element_ops::<f16>, TileCase;
        conformance_decay_f32 = decay_ops::<f32>, TileCase;
        conformance_decay_bf16 = decay_ops::<bf16>, TileCase;
        conformance_decay_f16 = decay_ops::<f16>, TileCase;
        conformance_block_f32 = block_ops, TileCase;
    }
}
