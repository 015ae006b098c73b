//! Kernels and tensors of the short convolution.

use half::{bf16, f16};
use kernels_gpu::convolution::{
    ConvolveBackParams, ConvolveBeginParams, ConvolveParams, SumParams, convolve, convolve_back, convolve_begin,
    sum_shares,
};
use kernels_gpu::tile::Warpgroup;

use super::Kernel;
use crate::inputs::Op;
use crate::tensor::Dtype;

/// The tensors of one convolution of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // named as in `op::convolution`
pub enum ConvolutionSlot {
    X,
    Weight,
    Bias,
    InitialState,
    Y,
    FinalState,
    DY,
    DFinalState,
    DX,
    DInitialState,
    DWeight,
    DBias,
}

impl Kernel for ConvolveBeginParams {
    const NAME: &'static str = "convolve_begin";
    fn host_entry(_: Op, _: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        convolve_begin
    }
    fn device_entry(_: Op, _: Dtype) -> String {
        Self::NAME.to_owned()
    }
}

impl Kernel for ConvolveParams {
    const NAME: &'static str = "convolve";
    fn host_entry(_: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        match dtype {
            Dtype::F32 => convolve::<f32>,
            Dtype::Bf16 => convolve::<bf16>,
            Dtype::F16 => convolve::<f16>,
        }
    }
    fn device_entry(_: Op, dtype: Dtype) -> String {
        format!("convolve_{dtype}")
    }
}

impl Kernel for ConvolveBackParams {
    const NAME: &'static str = "convolve_back";
    fn host_entry(_: Op, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        match dtype {
            Dtype::F32 => convolve_back::<f32>,
            Dtype::Bf16 => convolve_back::<bf16>,
            Dtype::F16 => convolve_back::<f16>,
        }
    }
    fn device_entry(_: Op, dtype: Dtype) -> String {
        format!("convolve_back_{dtype}")
    }
}

impl Kernel for SumParams {
    const NAME: &'static str = "sum_shares";
    fn host_entry(_: Op, _: Dtype) -> fn(&mut Warpgroup<'_>, &Self) {
        sum_shares
    }
    fn device_entry(_: Op, _: Dtype) -> String {
        // Shares are f32 whatever the tensors are.
        "sum_shares_f32".to_owned()
    }
}

/// Names, in a device module, of those of these kernels that write into other PEs' memory.
#[cfg(feature = "cuda")]
pub(super) fn sending_entries() -> Vec<String> {
    let mut names = Vec::new();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        names.push(ConvolveParams::device_entry(Op::Kda, dtype));
        names.push(ConvolveBackParams::device_entry(Op::Kda, dtype));
    }
    names
}

/// Names of the others.
#[cfg(feature = "cuda")]
pub(super) fn local_entries() -> Vec<String> {
    [ConvolveBeginParams::device_entry, SumParams::device_entry].map(|name| name(Op::Kda, Dtype::F32)).to_vec()
}
