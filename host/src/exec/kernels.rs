//! The kernels by name: parameters, host function, entry of a device module.

use kernels_gpu::backward::{grad::grad, reduce::reduce, scan::scan_back, states::scan_states};
use kernels_gpu::begin::{BeginParams, begin};
use kernels_gpu::comm_bench::{CommBenchParams, comm_bench};
use kernels_gpu::fixup::{fix_out, join_parts};
use kernels_gpu::gate::{Gdn, Kda};
use kernels_gpu::params::{
    FixParams, GradParams, JoinParams, PrepParams, ReduceParams, ScanBackParams, ScanParams, StatesParams,
};
use kernels_gpu::prep::prep;
use kernels_gpu::scan::scan_push;
use kernels_gpu::tile::Warpgroup;

use crate::inputs::Op;
use crate::tensor::Dtype;

/// Launch parameters, which name their kernel.
pub trait Kernel: bytemuck::Pod + Sync {
    /// Name of the kernel, without gate and element type.
    const NAME: &'static str;
    /// Of a walk: its name where it was launched beside `prep`, and both count as one.
    const WITH_PREP: &'static str = Self::NAME;
    /// The kernel for the CPU.
    fn host_entry(op: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self);
    /// The kernel's name in a device module.
    fn device_entry(op: Op, dtype: Dtype) -> String;
    /// The name of the body for Hopper in a device module, for blocks of `warpgroups`: the portable one if there is no other.
    fn hopper_entry(op: Op, warpgroups: usize) -> String {
        let _ = warpgroups;
        Self::device_entry(op, Dtype::Bf16)
    }
}

/// Instantiates a kernel for the operand type of a launch.
macro_rules! by_dtype {
    ($dtype:expr, $e:ident => $body:expr) => {
        match $dtype {
            Dtype::F32 => {
                type $e = f32;
                $body
            }
            Dtype::Bf16 => {
                type $e = half::bf16;
                $body
            }
            Dtype::F16 => {
                type $e = half::f16;
                $body
            }
        }
    };
}

/// Instantiates a kernel for the delta rule and the operand type of a launch.
macro_rules! by_gate_and_dtype {
    ($op:expr, $dtype:expr, $kernel:ident) => {
        match $op {
            Op::Kda => by_dtype!($dtype, E => $kernel::<Kda, E>),
            Op::Gdn => by_dtype!($dtype, E => $kernel::<Gdn, E>),
        }
    };
}

impl Kernel for BeginParams {
    const NAME: &'static str = "begin";
    fn host_entry(_: Op, _: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        begin
    }
    fn device_entry(_: Op, _: Dtype) -> String {
        Self::NAME.to_owned()
    }
}

impl Kernel for PrepParams {
    const NAME: &'static str = "prep";
    fn host_entry(op: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        by_gate_and_dtype!(op, dtype, prep)
    }
    fn device_entry(op: Op, dtype: Dtype) -> String {
        format!("prep_{op}_{dtype}")
    }
    fn hopper_entry(op: Op, _: usize) -> String {
        format!("prep_{op}_bf16_hopper")
    }
}

impl Kernel for ScanParams {
    const NAME: &'static str = "scan_push";
    const WITH_PREP: &'static str = "prep + scan_push";
    fn host_entry(_: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        by_dtype!(dtype, E => scan_push::<E>)
    }
    fn device_entry(_: Op, dtype: Dtype) -> String {
        format!("scan_push_{dtype}")
    }
    fn hopper_entry(_: Op, warpgroups: usize) -> String {
        format!("scan_push_bf16_hopper_{}", warpgroups - 1)
    }
}

impl Kernel for FixParams {
    const NAME: &'static str = "fix_out";
    fn host_entry(_: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        by_dtype!(dtype, E => fix_out::<E>)
    }
    fn device_entry(_: Op, dtype: Dtype) -> String {
        format!("fix_out_{dtype}")
    }
    fn hopper_entry(_: Op, _: usize) -> String {
        "fix_out_bf16_hopper".into()
    }
}

impl Kernel for JoinParams {
    const NAME: &'static str = "join_parts";
    fn host_entry(_: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        by_dtype!(dtype, E => join_parts::<E>)
    }
    fn device_entry(_: Op, dtype: Dtype) -> String {
        format!("join_parts_{dtype}")
    }
}

impl Kernel for ScanBackParams {
    const NAME: &'static str = "scan_back";
    const WITH_PREP: &'static str = "prep + scan_back";
    fn host_entry(_: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        by_dtype!(dtype, E => scan_back::<E>)
    }
    fn device_entry(_: Op, dtype: Dtype) -> String {
        format!("scan_back_{dtype}")
    }
    fn hopper_entry(_: Op, _: usize) -> String {
        "scan_back_bf16_hopper".into()
    }
}

impl Kernel for StatesParams {
    const NAME: &'static str = "scan_states";
    fn host_entry(_: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        by_dtype!(dtype, E => scan_states::<E>)
    }
    fn device_entry(_: Op, dtype: Dtype) -> String {
        format!("scan_states_{dtype}")
    }
    fn hopper_entry(_: Op, _: usize) -> String {
        "scan_states_bf16_hopper".into()
    }
}

impl Kernel for GradParams {
    const NAME: &'static str = "grad";
    fn host_entry(op: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        by_gate_and_dtype!(op, dtype, grad)
    }
    fn device_entry(op: Op, dtype: Dtype) -> String {
        format!("grad_{op}_{dtype}")
    }
    fn hopper_entry(op: Op, _: usize) -> String {
        format!("grad_{op}_bf16_hopper")
    }
}

impl Kernel for ReduceParams {
    const NAME: &'static str = "reduce";
    fn host_entry(_: Op, _: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        reduce
    }
    fn device_entry(_: Op, _: Dtype) -> String {
        // Sums are f32 whatever the operands are.
        "reduce_f32".to_owned()
    }
}

impl Kernel for CommBenchParams {
    const NAME: &'static str = "comm_bench";
    fn host_entry(_: Op, _: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        comm_bench
    }
    fn device_entry(_: Op, _: Dtype) -> String {
        Self::NAME.to_owned()
    }
}

/// Names of a device module's kernels that there are for every device and that write into other PEs' memory: those of a
/// module with NVSHMEM.
#[cfg(feature = "cuda")]
pub(super) fn sending_entries() -> Vec<String> {
    let mut names = vec![CommBenchParams::NAME.to_owned()];
    names.extend(super::convolution::sending_entries());
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        names.extend([
            ScanParams::device_entry(Op::Kda, dtype),
            FixParams::device_entry(Op::Kda, dtype),
            JoinParams::device_entry(Op::Kda, dtype),
            ScanBackParams::device_entry(Op::Kda, dtype),
        ]);
    }
    names
}

/// Names of the others that there are for every device.
#[cfg(feature = "cuda")]
pub(super) fn local_entries() -> Vec<String> {
    let mut names =
        [ReduceParams::device_entry, BeginParams::device_entry].map(|name| name(Op::Kda, Dtype::F32)).to_vec();
    names.extend(super::convolution::local_entries());
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        for op in [Op::Kda, Op::Gdn] {
            names.extend([PrepParams::device_entry(op, dtype), GradParams::device_entry(op, dtype)]);
        }
        names.push(StatesParams::device_entry(Op::Kda, dtype));
    }
    names
}

/// Names of a device module's kernels for Hopper, which one with NVSHMEM does not have.
#[cfg(feature = "cuda")]
pub(super) fn hopper_entries() -> Vec<String> {
    let mut names = Vec::new();
    names.extend([Op::Kda, Op::Gdn].map(|op| PrepParams::hopper_entry(op, kernels_gpu::hopper::PREP_WARPGROUPS)));
    names.push(FixParams::hopper_entry(Op::Kda, kernels_gpu::fixup::WARPGROUPS));
    let warpgroups = kernels_gpu::hopper::backward::grad::WARPGROUPS;
    names.extend([Op::Kda, Op::Gdn].map(|op| GradParams::hopper_entry(op, warpgroups)));
    names.extend([1, 2].map(|walkers| ScanParams::hopper_entry(Op::Kda, walkers + 1)));
    let walk = kernels_gpu::hopper::backward::walk::WARPGROUPS;
    names.extend([StatesParams::hopper_entry(Op::Kda, walk), ScanBackParams::hopper_entry(Op::Kda, walk)]);
    names
}
