//! The 8 rows of a thread in tensors of the caller: an instruction for each address, and predicates only where a chunk ends among them.

use cuda_std::ptx;

use super::body::Place;
use crate::hopper::{CHANNELS, repeat, unpack};
use crate::params::Tensor;

/// This thread's two channels in the rows of its tokens and a head.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    from: u64,
    /// Bytes from row to row.
    stride: u32,
    /// Of the chunk: this thread's first row, and rows from there on.
    first: u32,
    rows: u32,
}

impl Rows {
    /// In a tensor `[tokens, heads, 128]` of elements of `bytes` bytes.
    #[inline(always)]
    pub fn of(at: &Place, x: &Tensor, heads: u32, head: u32, bytes: u32) -> Self {
        let first = 8 * at.s;
        let element = (at.token * heads as usize + head as usize) * CHANNELS + at.channel as usize;
        Self {
            from: x.addr + element as u64 * bytes as u64,
            stride: heads * CHANNELS as u32 * bytes,
            first,
            rows: at.len - first.min(at.len),
        }
    }

    /// Where row `i` is.
    #[inline(always)]
    pub fn row(&self, i: u32) -> u64 {
        ptx::mad_wide_u32(self.first + i, self.stride, self.from)
    }

    /// Whether row `i` is in the chunk.
    #[inline(always)]
    pub fn has(&self, i: u32) -> bool {
        i < self.rows
    }

    /// Whether all of them are.
    #[inline(always)]
    pub fn whole(&self) -> bool {
        self.rows >= 8
    }

    /// Pairs of bf16; zeros beyond the chunk.
    ///
    /// # Safety
    /// The rows of the chunk exist, in bf16.
    #[inline(always)]
    pub unsafe fn pairs(&self) -> [u32; 8] {
        let mut x = [0u32; 8];
        // SAFETY: by contract.
        unsafe {
            if self.whole() {
                repeat!(I in 8 => { x[I] = ptx::ld_global_nc_u32(self.row(I as u32) as *const u32); });
            } else {
                repeat!(I in 8 => {
                    let from = self.row(I as u32) as *const u32;
                    x[I] = ptx::ld_global_nc_u32_if(from, self.has(I as u32) as u32);
                });
            }
        }
        x
    }

    /// Of elements of 4 bytes or 2; zeros beyond the chunk.
    ///
    /// # Safety
    /// The rows of the chunk exist, in f32 if `wide`, else in bf16.
    #[inline(always)]
    pub unsafe fn load(&self, wide: bool) -> [[f32; 2]; 8] {
        let mut x = [[0f32; 2]; 8];
        // SAFETY: by contract.
        unsafe {
            if !wide {
                let pairs = self.pairs();
                repeat!(I in 8 => { x[I] = unpack(pairs[I]); });
            } else if self.whole() {
                repeat!(I in 8 => { x[I] = ptx::ld_global_nc_v2_f32(self.row(I as u32) as *const f32); });
            } else {
                repeat!(I in 8 => {
                    let from = self.row(I as u32) as *const u32;
                    let [a, b] = ptx::ld_global_nc_v2_u32_if(from, self.has(I as u32) as u32);
                    x[I] = [f32::from_bits(a), f32::from_bits(b)];
                });
            }
        }
        x
    }

    /// Stores the rows of the chunk, in f32 if `wide`, else rounded to bf16.
    ///
    /// # Safety
    /// The rows of the chunk exist, in that type; one writer for each pair.
    #[inline(always)]
    pub unsafe fn store(&self, wide: bool, x: &[[f32; 2]; 8]) {
        // SAFETY: by contract.
        unsafe {
            let f32s = |i: u32, x: [f32; 2]| ptx::st_global_v2_f32(self.row(i) as *mut f32, x[0], x[1]);
            let bf16s = |i: u32, x: [f32; 2]| {
                ptx::st_global_u32(self.row(i) as *mut u32, ptx::cvt_rn_bf16x2_f32(x[1], x[0]));
            };
            match (wide, self.whole()) {
                (true, true) => repeat!(I in 8 => { f32s(I as u32, x[I]); }),
                (true, false) => repeat!(I in 8 => { if self.has(I as u32) { f32s(I as u32, x[I]); } }),
                (false, true) => repeat!(I in 8 => { bf16s(I as u32, x[I]); }),
                (false, false) => repeat!(I in 8 => { if self.has(I as u32) { bf16s(I as u32, x[I]); } }),
            }
        }
    }
}
