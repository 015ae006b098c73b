//! Memory of tensors as launch parameters have it.

use std::ops::Range;

use deltalink::tensor::{Buffer, Data, Dtype, TensorView};
use kernels_gpu::element::DtypeCode;
use kernels_gpu::params::Tensor as Param;

/// The kernels' number of an element type.
pub fn code(dtype: Dtype) -> DtypeCode {
    match dtype {
        Dtype::F32 => DtypeCode::F32,
        Dtype::Bf16 => DtypeCode::Bf16,
        Dtype::F16 => DtypeCode::F16,
    }
}

/// No tensor.
pub fn absent() -> Param {
    Param::absent()
}

fn address(data: Data<'_>) -> u64 {
    match data {
        Data::F32(x) => x.as_ptr() as u64,
        Data::Bf16(x) => x.as_ptr() as u64,
        Data::F16(x) => x.as_ptr() as u64,
    }
}

/// Rows `rows` of `row` elements each.
pub fn view(x: &TensorView<'_>, rows: &Range<usize>, row: usize) -> Param {
    let start = address(x.data()) + (rows.start * row * x.dtype().size()) as u64;
    Param::new(start, rows.len() * row, code(x.dtype()))
}

/// All of a tensor, if there is one.
pub fn optional(x: Option<&TensorView<'_>>) -> Param {
    x.map_or_else(absent, |x| Param::new(address(x.data()), x.data().len(), code(x.dtype())))
}

/// A result or scratch memory.
pub struct Memory(Buffer);

impl Memory {
    pub fn zeros(dtype: Dtype, len: usize) -> Self {
        Self(Buffer::zeros(dtype, len))
    }

    pub fn of(buffer: Buffer) -> Self {
        Self(buffer)
    }

    /// All of it.
    pub fn all(&mut self) -> Param {
        let (dtype, len) = (self.0.dtype(), self.0.data().len());
        Param::new(self.0.bytes_mut().as_mut_ptr() as u64, len, code(dtype))
    }

    /// Rows `rows` of `row` elements each.
    pub fn rows(&mut self, rows: &Range<usize>, row: usize) -> Param {
        let all = self.all();
        let start = all.addr + (rows.start * row * self.0.dtype().size()) as u64;
        Param { addr: start, len: (rows.len() * row) as u64, ..all }
    }

    pub fn values(&self) -> Vec<f64> {
        self.0.to_f64()
    }
}
