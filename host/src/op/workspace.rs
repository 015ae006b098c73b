//! Scratch memory between kernels, kept from call to call.

use kernels_gpu::element::DtypeCode;
use kernels_gpu::params::Tensor as Param;

use crate::tensor::Dtype;

/// Raw memory that holds elements of any supported type.
#[derive(Default)]
pub(super) struct Scratch {
    words: Vec<u64>,
}

impl Scratch {
    /// A tensor of `len` elements; its contents are whatever was there.
    pub fn tensor(&mut self, len: usize, dtype: Dtype) -> Param {
        let words = (len * dtype.size()).div_ceil(8);
        if self.words.len() < words {
            self.words = vec![0; words];
        }
        match len {
            0 => Param::absent(),
            _ => Param::new(self.words.as_mut_ptr() as u64, len, code(dtype)),
        }
    }
}

/// All scratch tensors of a call.
#[derive(Default)]
pub(super) struct Workspace {
    /// Operands of every chunk and head.
    pub operands: Scratch,
    /// Decay of every chunk and head.
    pub decay: Scratch,
    /// Outputs before correction.
    pub o_local: Scratch,
    /// q-tilde.
    pub q_tilde: Scratch,
    /// This PE's own summaries.
    pub own: Scratch,
    /// Merged states before receiving segments.
    pub state_in: Scratch,
}

impl Workspace {
    /// Bytes in use.
    pub fn bytes(&self) -> usize {
        let Self { operands, decay, o_local, q_tilde, own, state_in } = self;
        [operands, decay, o_local, q_tilde, own, state_in].iter().map(|s| s.words.len() * 8).sum()
    }
}

/// The kernels' number of an element type.
pub(super) fn code(dtype: Dtype) -> DtypeCode {
    match dtype {
        Dtype::F32 => DtypeCode::F32,
        Dtype::Bf16 => DtypeCode::Bf16,
        Dtype::F16 => DtypeCode::F16,
    }
}
