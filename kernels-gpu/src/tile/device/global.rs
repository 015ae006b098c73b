//! Global memory: typed elements of matrices, plain values, atomic words.

use core::sync::atomic::AtomicU64;

use bytemuck::Pod;
use cuda_std::ptx;

use super::Warpgroup;
use crate::element::DtypeCode;
use crate::params::{Array, Matrix};

impl Matrix {
    /// Element (r, c), widened.
    ///
    /// # Safety
    /// It must lie inside the tensor.
    #[inline(always)]
    pub(crate) unsafe fn load(&self, r: usize, c: usize) -> f32 {
        let at = self.offset + r * self.row_stride + c * self.col_stride;
        // SAFETY: by contract; the launcher vouches for tensor and type.
        unsafe {
            match self.tensor.dtype() {
                DtypeCode::F32 => (self.tensor.addr as *const f32).add(at).read(),
                DtypeCode::Bf16 => f32::from_bits(u32::from((self.tensor.addr as *const u16).add(at).read()) << 16),
                DtypeCode::F16 => ptx::cvt_f32_f16((self.tensor.addr as *const u16).add(at).read()),
            }
        }
    }

    /// Rounds and stores element (r, c).
    ///
    /// # Safety
    /// It must lie inside the tensor, and no other thread may store it.
    #[inline(always)]
    pub(super) unsafe fn store(&self, r: usize, c: usize, x: f32) {
        let at = self.offset + r * self.row_stride + c * self.col_stride;
        // SAFETY: by contract; the launcher vouches for tensor and type.
        unsafe {
            match self.tensor.dtype() {
                DtypeCode::F32 => (self.tensor.addr as *mut f32).add(at).write(x),
                DtypeCode::Bf16 => (self.tensor.addr as *mut u16).add(at).write(ptx::cvt_rn_bf16_f32(x)),
                DtypeCode::F16 => (self.tensor.addr as *mut u16).add(at).write(ptx::cvt_rn_f16_f32(x)),
            }
        }
    }
}

impl Warpgroup<'_> {
    /// Value `index` of a table.
    #[inline(always)]
    pub fn read<T: Pod>(&self, array: Array, index: usize) -> T {
        // SAFETY: the launcher's arrays hold `len` values of the type that the parameter's documentation names, and
        // the CPU back end checks the kernels' indices.
        unsafe { (array.addr as *const T).add(index).read() }
    }

    /// Element (0, 0) of a matrix: a per-head scalar.
    #[inline(always)]
    pub fn scalar(&self, matrix: Matrix) -> f32 {
        // SAFETY: the CPU back end checks the kernels' indices.
        unsafe { matrix.load(0, 0) }
    }

    /// Word `index` of an array of u64, for atomic access.
    #[inline(always)]
    pub fn word(&self, array: Array, index: usize) -> &AtomicU64 {
        // SAFETY: the launcher's words live as long as the launch and are only accessed atomically meanwhile.
        unsafe { AtomicU64::from_ptr((array.addr as *mut u64).add(index)) }
    }
}
