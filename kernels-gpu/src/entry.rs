//! The kernels as a device module has them: one entry for each gate and element type.
//!
//! Names are `KERNEL_GATE_TYPE` or `KERNEL_TYPE`; parameters go by value; blocks are
//! `WARPGROUPS * 128` threads with the kernel's `shared_bytes` of dynamic shared memory.

use cuda_std::kernel;
use half::{bf16, f16};

use crate::convolution::{ConvolveBackParams, ConvolveParams, SumParams, convolve, convolve_back, sum_shares};
use crate::fixup::fix_out;
use crate::gate::{Gdn, Kda};
use crate::hopper;
use crate::params::{FixParams, PrepParams, ScanParams};
use crate::prep::prep;
use crate::scan::scan_push;
use crate::tile::Warpgroup;

macro_rules! entries {
    ($($name:ident = $kernel:path, $params:ty;)*) => {
        $(
            #[doc = concat!("[`", stringify!($kernel), "`].")]
            ///
            /// # Safety
            /// The parameters must describe memory of this device that lives as long as the launch.
            #[unsafe(no_mangle)]
            pub unsafe extern "ptx-kernel" fn $name(params: $params) {
                // SAFETY: the first thing in the kernel; the launcher's blocks are whole warpgroups.
                let mut wg = unsafe { Warpgroup::enter() };
                $kernel(&mut wg, &params);
            }
        )*
    };
}

entries! {
    prep_kda_f32 = prep::<Kda, f32>, PrepParams;
    prep_kda_bf16 = prep::<Kda, bf16>, PrepParams;
    prep_kda_f16 = prep::<Kda, f16>, PrepParams;
    prep_gdn_f32 = prep::<Gdn, f32>, PrepParams;
    prep_gdn_bf16 = prep::<Gdn, bf16>, PrepParams;
    prep_gdn_f16 = prep::<Gdn, f16>, PrepParams;
    scan_push_f32 = scan_push::<f32>, ScanParams;
    scan_push_bf16 = scan_push::<bf16>, ScanParams;
    scan_push_f16 = scan_push::<f16>, ScanParams;
    fix_out_f32 = fix_out::<f32>, FixParams;
    fix_out_bf16 = fix_out::<bf16>, FixParams;
    fix_out_f16 = fix_out::<f16>, FixParams;
    sum_shares_f32 = sum_shares, SumParams;
}

/// As `entries`, with bounds: walks over tokens need many threads on a multiprocessor, so that enough loads are on their way.
macro_rules! convolutions {
    ($($name:ident = $kernel:path, $params:ty, $blocks:literal;)*) => {
        $(
            #[doc = concat!("[`", stringify!($kernel), "`].")]
            ///
            /// # Safety
            /// As of the other entries.
            #[kernel(threads = 128, blocks_per_sm = $blocks)]
            pub unsafe fn $name(params: $params) {
                // SAFETY: as in the other entries.
                let mut wg = unsafe { Warpgroup::enter() };
                $kernel(&mut wg, &params);
            }
        )*
    };
}

convolutions! {
    convolve_f32 = convolve::<f32>, ConvolveParams, 8;
    convolve_bf16 = convolve::<bf16>, ConvolveParams, 8;
    convolve_f16 = convolve::<f16>, ConvolveParams, 8;
    convolve_back_f32 = convolve_back::<f32>, ConvolveBackParams, 5;
    convolve_back_bf16 = convolve_back::<bf16>, ConvolveBackParams, 5;
    convolve_back_f16 = convolve_back::<f16>, ConvolveBackParams, 5;
}

/// [`hopper::prep::prep`].
///
/// # Safety
/// As of the other entries.
#[kernel(threads = 256, blocks_per_sm = 2)]
pub unsafe fn prep_kda_bf16_hopper(params: PrepParams) {
    // SAFETY: as in the other entries.
    let mut wg = unsafe { Warpgroup::enter() };
    hopper::prep::prep::<Kda>(&mut wg, &params);
}

/// [`hopper::prep::prep`].
///
/// # Safety
/// As of the other entries.
#[kernel(threads = 256, blocks_per_sm = 2)]
pub unsafe fn prep_gdn_bf16_hopper(params: PrepParams) {
    // SAFETY: as in the other entries.
    let mut wg = unsafe { Warpgroup::enter() };
    hopper::prep::prep::<Gdn>(&mut wg, &params);
}

/// [`hopper::scan::scan_push`], one walking warpgroup in a block.
///
/// # Safety
/// As of the other entries.
#[kernel(threads = 256, registers = 240)]
pub unsafe fn scan_push_bf16_hopper_1(params: ScanParams) {
    // SAFETY: as in the other entries.
    let mut wg = unsafe { Warpgroup::enter() };
    hopper::scan::scan_push::<1>(&mut wg, &params);
}

/// [`hopper::scan::scan_push`], two walking warpgroups in a block.
///
/// # Safety
/// As of the other entries.
#[kernel(threads = 384, registers = 168)]
pub unsafe fn scan_push_bf16_hopper_2(params: ScanParams) {
    // SAFETY: as in the other entries.
    let mut wg = unsafe { Warpgroup::enter() };
    hopper::scan::scan_push::<2>(&mut wg, &params);
}
