//! Launch parameters: the only thing that kernels and host share by value. All are `repr(C)` and Pod;
//! addresses are those of the memory that the kernel runs on.

mod backward;
mod beside;
mod channel;
mod forward;
mod tables;

use bytemuck::{Pod, Zeroable};

pub use backward::{BackItem, BackPass, GradParams, ReduceParams, ScanBackParams, StatesParams};
pub use beside::{Beside, BesidePass};
pub use channel::{Channel, Stamp, StampKind, StepMode, StepStats, TraceBuffer, Way};
pub use forward::{Cut, FixItem, FixParams, FixPass, GateForm, JoinParams, PrepParams, ScanItem, ScanParams};
pub use tables::{Chunk, NONE, Records, Segment, Sizes, Tables, Target};

use crate::element::DtypeCode;

/// A tensor in global memory: address, number of elements, element type.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Tensor {
    /// Address of the first element; 0 if the tensor is absent.
    pub addr: u64,
    /// Number of elements.
    pub len: u64,
    /// A [`DtypeCode`].
    pub dtype: u32,
    /// Zero.
    pub pad: u32,
}

impl Tensor {
    /// A tensor of `len` elements at `addr`.
    pub fn new(addr: u64, len: usize, dtype: DtypeCode) -> Self {
        Self { addr, len: len as u64, dtype: dtype as u32, pad: 0 }
    }

    /// No tensor.
    pub fn absent() -> Self {
        Self::zeroed()
    }

    /// Whether there is a tensor.
    #[inline(always)]
    pub fn is_present(&self) -> bool {
        self.addr != 0
    }

    /// Element type.
    #[inline(always)]
    pub fn dtype(&self) -> DtypeCode {
        DtypeCode::from_code(self.dtype)
    }

    /// The matrix `rows` x `cols` whose element (r, c) is element `offset + r*row_stride + c*col_stride`.
    #[inline(always)]
    pub fn matrix(&self, offset: usize, rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> Matrix {
        Matrix { tensor: *self, offset, rows, cols, row_stride, col_stride }
    }
}

/// A strided matrix inside a [`Tensor`]. A stride of 0 repeats a row or a column.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// The tensor it lies in.
    pub tensor: Tensor,
    /// Element of the tensor that is (0, 0).
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements between rows.
    pub row_stride: usize,
    /// Elements between columns.
    pub col_stride: usize,
}

impl Matrix {
    /// Columns `start .. start + count`.
    #[inline(always)]
    pub fn columns(mut self, start: usize, count: usize) -> Self {
        self.offset += start * self.col_stride;
        self.cols = count;
        self
    }

    /// Rows `start .. start + count`.
    #[inline(always)]
    pub fn row_range(mut self, start: usize, count: usize) -> Self {
        self.offset += start * self.row_stride;
        self.rows = count;
        self
    }
}

/// An array of plain values in global memory: tables, counters, words.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Array {
    /// Address of the first value.
    pub addr: u64,
    /// Number of values.
    pub len: u64,
}

impl Array {
    /// The values of `slice`. The slice must outlive every launch that gets the array.
    pub fn of<T: Pod>(slice: &[T]) -> Self {
        Self { addr: slice.as_ptr() as u64, len: slice.len() as u64 }
    }

    /// No values.
    pub fn empty() -> Self {
        Self::zeroed()
    }
}
