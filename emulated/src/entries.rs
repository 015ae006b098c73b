//! The kernels by the names of their entries in a device module.

use cuda_std::emulated::{Emulator, Fault, Launch};
use half::{bf16, f16};
use kernels_gpu_emulated::backward::{grad::grad, reduce::reduce, scan::scan_back, states::scan_states};
use kernels_gpu_emulated::comm_bench::{CommBenchParams, comm_bench};
use kernels_gpu_emulated::conformance::TileCase;
use kernels_gpu_emulated::conformance::{acc::acc_ops, block::block_ops, decay::decay_ops, elements::element_ops};
use kernels_gpu_emulated::convolution::{ConvolveBackParams, ConvolveParams, SumParams};
use kernels_gpu_emulated::convolution::{convolve, convolve_back, sum_shares};
use kernels_gpu_emulated::fixup::fix_out;
use kernels_gpu_emulated::gate::{Gdn, Kda};
use kernels_gpu_emulated::hopper;
use kernels_gpu_emulated::params::{
    FixParams, GradParams, PrepParams, ReduceParams, ScanBackParams, ScanParams, StatesParams,
};
use kernels_gpu_emulated::prep::prep;
use kernels_gpu_emulated::scan::scan_push;
use kernels_gpu_emulated::tile::Warpgroup;

/// A kernel, with its parameters still to come.
#[derive(Clone, Copy)]
pub struct Entry {
    bytes: usize,
    body: unsafe fn(*const u8),
}

impl Entry {
    /// Runs block `block` of a launch with these parameters.
    ///
    /// # Errors
    /// [`Fault`] if the kernel broke a rule.
    ///
    /// # Panics
    /// If `P` is not as large as the kernel's parameters.
    ///
    /// # Safety
    /// The parameters must be those of this kernel, and describe memory that lives as long as the call.
    pub unsafe fn run<P: Copy>(
        &self,
        emulator: &mut Emulator,
        launch: &Launch<'_>,
        block: u32,
        params: &P,
    ) -> Result<(), Fault> {
        assert_eq!(size_of::<P>(), self.bytes, "{}: parameters of another kernel", launch.kernel);
        // SAFETY: by contract; the parameters outlive the call.
        emulator.run(launch, block, &|| unsafe { (self.body)(std::ptr::from_ref(params).cast()) })
    }
}

macro_rules! entries {
    ($($name:ident = $kernel:expr, $params:ty;)*) => {
        /// The kernel whose entry in a device module has this name.
        pub fn entry(name: &str) -> Option<Entry> {
            match name {
                $(stringify!($name) => {
                    unsafe fn body(params: *const u8) {
                        // SAFETY: the caller's word, see `Entry::run`; the first thing in the kernel, as on a device.
                        let (params, mut wg) = unsafe { (&*params.cast::<$params>(), Warpgroup::enter()) };
                        $kernel(&mut wg, params);
                    }
                    Some(Entry { bytes: size_of::<$params>(), body })
                })*
                _ => None,
            }
        }
    };
}

entries! {
    prep_kda_bf16_hopper = hopper::prep::prep::<Kda>, PrepParams;
    prep_gdn_bf16_hopper = hopper::prep::prep::<Gdn>, PrepParams;
    scan_push_bf16_hopper_1 = hopper::scan::scan_push::<1>, ScanParams;
    scan_push_bf16_hopper_2 = hopper::scan::scan_push::<2>, ScanParams;
    fix_out_bf16_hopper = hopper::fix::fix_out, FixParams;
    scan_states_bf16_hopper = hopper::backward::states::scan_states, StatesParams;
    scan_back_bf16_hopper = hopper::backward::scan::scan_back, ScanBackParams;
    grad_kda_bf16_hopper = hopper::backward::grad::grad::<Kda>, GradParams;
    grad_gdn_bf16_hopper = hopper::backward::grad::grad::<Gdn>, GradParams;
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
    scan_back_f32 = scan_back::<f32>, ScanBackParams;
    scan_back_bf16 = scan_back::<bf16>, ScanBackParams;
    scan_back_f16 = scan_back::<f16>, ScanBackParams;
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
    comm_bench = comm_bench, CommBenchParams;
    convolve_f32 = convolve::<f32>, ConvolveParams;
    convolve_bf16 = convolve::<bf16>, ConvolveParams;
    convolve_f16 = convolve::<f16>, ConvolveParams;
    convolve_back_f32 = convolve_back::<f32>, ConvolveBackParams;
    convolve_back_bf16 = convolve_back::<bf16>, ConvolveBackParams;
    convolve_back_f16 = convolve_back::<f16>, ConvolveBackParams;
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
