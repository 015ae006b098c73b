//! Global memory: typed elements of matrices, plain values, atomic words.

use std::sync::atomic::AtomicU64;

use bytemuck::Pod;
use half::{bf16, f16};

use super::check::raise;
use super::{FaultKind, Warpgroup};
use crate::params::{Array, Matrix};

/// An element as it lies in global memory.
pub(super) trait Raw: Copy {
    fn widen(self) -> f32;
    fn narrow(x: f32) -> Self;
}

impl Raw for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
}
impl Raw for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        bf16::from_bits((<bf16 as crate::element::Element>::round(x).to_bits() >> 16) as u16)
    }
}
impl Raw for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        f16::from_f32(x)
    }
}

/// Runs `$body` with `$raw` standing for the type of the matrix's elements.
macro_rules! with_raw {
    ($matrix:expr, $raw:ident => $body:expr) => {
        match $matrix.tensor.dtype() {
            crate::element::DtypeCode::F32 => {
                type $raw = f32;
                $body
            }
            crate::element::DtypeCode::Bf16 => {
                type $raw = half::bf16;
                $body
            }
            crate::element::DtypeCode::F16 => {
                type $raw = half::f16;
                $body
            }
        }
    };
}
pub(super) use with_raw;

impl Matrix {
    /// Ends the kernel with a fault if an element lies outside the tensor.
    #[inline]
    pub(super) fn check_bounds(&self, op: &'static str) {
        if self.rows == 0 || self.cols == 0 {
            return;
        }
        let last = self.offset + (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride;
        if last >= self.tensor.len as usize {
            raise(FaultKind::GlobalBounds { op, element: last, len: self.tensor.len as usize });
        }
    }

    /// Address of (0, 0) as a pointer to elements of type `T`.
    #[inline(always)]
    pub(super) fn pointer<T: Raw>(&self) -> *mut T {
        (self.tensor.addr as *mut T).wrapping_add(self.offset)
    }
}

impl Warpgroup<'_> {
    /// Value `index` of a table.
    #[inline]
    pub fn read<T: Pod>(&self, array: Array, index: usize) -> T {
        if index >= array.len as usize {
            raise(FaultKind::GlobalBounds { op: "read", element: index, len: array.len as usize });
        }
        // SAFETY: the launcher's arrays hold `len` values of the type that the parameter's documentation names.
        unsafe { (array.addr as *const T).wrapping_add(index).read() }
    }

    /// Element (0, 0) of a matrix: a per-head scalar.
    pub fn scalar(&self, matrix: Matrix) -> f32 {
        matrix.check_bounds("scalar");
        // SAFETY: inside the tensor, as just checked; the launcher vouches for tensor and type.
        with_raw!(matrix, T => unsafe { matrix.pointer::<T>().read() }.widen())
    }

    /// Word `index` of an array of u64, for atomic access.
    #[inline]
    pub fn word(&self, array: Array, index: usize) -> &AtomicU64 {
        if index >= array.len as usize {
            raise(FaultKind::GlobalBounds { op: "word", element: index, len: array.len as usize });
        }
        // SAFETY: the launcher's words live as long as the launch and are only accessed atomically meanwhile.
        unsafe { AtomicU64::from_ptr((array.addr as *mut u64).wrapping_add(index)) }
    }

    /// Tells the checker which elements of `matrix` have been stored.
    pub(super) fn note_stores(&self, matrix: &Matrix) {
        let Some(checker) = self.launch.checker else { return };
        let size = matrix.tensor.dtype().size();
        for r in 0..matrix.rows {
            for c in 0..matrix.cols {
                let element = matrix.offset + r * matrix.row_stride + c * matrix.col_stride;
                checker.stored(matrix.tensor.addr + (element * size) as u64);
            }
        }
    }
}
