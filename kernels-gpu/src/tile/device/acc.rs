//! Register tiles: 32 f32 of each thread hold up to 64 x 64, in the fragment order of `mma.sync.m16n8`.
//!
//! Warp w of the warpgroup owns rows 16 w .. 16 w + 16. Element 4 j + i of a thread is row
//! `16 w + lane / 4 + 8 (i / 2)`, column `8 j + 2 (lane % 4) + i % 2`.

use cuda_std::ptx;

use super::{DeviceElement, Shared, Warpgroup};
use crate::element::{DtypeCode, Element};
use crate::math::flush;
use crate::params::Matrix;

/// An accumulator tile of `rows` x `cols`, both multiples of 16 and at most 64.
pub struct Acc {
    pub(super) rows: u32,
    pub(super) cols: u32,
    pub(super) data: [f32; 32],
}

/// Runs `$body` for each of a thread's elements inside the tile, with row `$r`, column `$c` and element `$x`. A
/// macro, so that the array is indexed by constants and stays in registers.
macro_rules! for_each {
    ($wg:expr, $acc:expr, |$r:ident, $c:ident, $x:ident| $body:expr) => {{
        let (warp, lane) = $wg.warp_lane();
        let (row, col) = (16 * warp + lane / 4, 2 * (lane % 4));
        if 16 * warp < $acc.rows {
            crate::tile::device::acc::for_each_column!(0 1 2 3 4 5 6 7, $acc, row, col, |$r, $c, $x| $body);
        }
    }};
}
macro_rules! for_each_column {
    ($($j:literal)*, $acc:expr, $row:ident, $col:ident, |$r:ident, $c:ident, $x:ident| $body:expr) => {
        $(if 8 * $j < $acc.cols {
            { let ($r, $c) = ($row, $col + 8 * $j); let $x = &mut $acc.data[4 * $j]; $body; }
            { let ($r, $c) = ($row, $col + 8 * $j + 1); let $x = &mut $acc.data[4 * $j + 1]; $body; }
            { let ($r, $c) = ($row + 8, $col + 8 * $j); let $x = &mut $acc.data[4 * $j + 2]; $body; }
            { let ($r, $c) = ($row + 8, $col + 8 * $j + 1); let $x = &mut $acc.data[4 * $j + 3]; $body; }
        })*
    };
}
pub(super) use for_each_column;

impl Acc {
    /// Zeros.
    #[inline(always)]
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows: rows as u32, cols: cols as u32, data: [0.0; 32] }
    }

    /// The values of a shared tile.
    #[inline(always)]
    pub fn load<E: DeviceElement>(wg: &mut Warpgroup<'_>, tile: Shared<E>) -> Self {
        let mut acc = Self::zeros(tile.rows(), tile.cols());
        acc.add(wg, tile);
        acc
    }

    /// self += a b.
    #[inline(always)]
    pub fn mma<E: DeviceElement>(&mut self, wg: &mut Warpgroup<'_>, a: Shared<E>, b: Shared<E>) {
        self.product::<E, false>(wg, a, b);
    }

    /// self -= a b.
    #[inline(always)]
    pub fn mma_sub<E: DeviceElement>(&mut self, wg: &mut Warpgroup<'_>, a: Shared<E>, b: Shared<E>) {
        self.product::<E, true>(wg, a, b);
    }

    #[inline(always)]
    fn product<E: DeviceElement, const SUBTRACT: bool>(&mut self, wg: &mut Warpgroup<'_>, a: Shared<E>, b: Shared<E>) {
        if E::WIDE {
            self.product_wide::<E, SUBTRACT>(wg, a, b);
        } else {
            self.product_tensor::<E, SUBTRACT>(wg, a, b);
        }
    }

    /// f32 operands: fused multiply-adds, since the tensor cores would round them to tf32.
    #[inline(always)]
    fn product_wide<E: DeviceElement, const SUBTRACT: bool>(
        &mut self,
        wg: &mut Warpgroup<'_>,
        a: Shared<E>,
        b: Shared<E>,
    ) {
        let (_, inner) = a.extent();
        let mut k = 0;
        while k < inner {
            for_each!(wg, self, |r, c, x| {
                // SAFETY: inside the tiles.
                let (a, b) = unsafe { (E::load(a.at(r, k)), E::load(b.at(k, c))) };
                *x = ptx::fma_rn_f32(if SUBTRACT { -a } else { a }, b, *x)
            });
            k += 1;
        }
    }

    /// 16-bit operands: `mma.sync.m16n8k16` over fragments that `ldmatrix` brings, transposed where the tile is.
    #[inline(always)]
    fn product_tensor<E: DeviceElement, const SUBTRACT: bool>(
        &mut self,
        wg: &mut Warpgroup<'_>,
        a: Shared<E>,
        b: Shared<E>,
    ) {
        let (warp, lane) = wg.warp_lane();
        if 16 * warp >= self.rows {
            return;
        }
        // Lane l gives the address of row l % 8 of 8 x 8 matrix l / 8 of four.
        let (row, matrix) = (lane % 8, lane / 8);
        let (low, high) = (matrix & 1, matrix >> 1);
        let (_, inner) = a.extent();
        let a_rows = a.strides().1 == 1;
        let b_rows = b.strides().1 == 1;
        let mut k = 0;
        while k < inner {
            // SAFETY: addresses inside the tiles, aligned to 16 bytes since parts start at multiples of 16 and rows are
            // padded to 16 bytes; all lanes of the warp take part.
            let mut fa = unsafe {
                if a_rows {
                    ptx::ldmatrix_x4(a.at(16 * warp + 8 * low + row, k + 8 * high))
                } else {
                    ptx::ldmatrix_x4_trans(a.at(16 * warp + 8 * low, k + 8 * high + row))
                }
            };
            if SUBTRACT {
                // The sign bits of both halves.
                fa = [fa[0] ^ 0x8000_8000, fa[1] ^ 0x8000_8000, fa[2] ^ 0x8000_8000, fa[3] ^ 0x8000_8000];
            }
            macro_rules! columns {
                ($($j:literal)*) => {
                    $(if 16 * $j < self.cols {
                        // SAFETY: as above.
                        unsafe {
                            let fb = if b_rows {
                                ptx::ldmatrix_x4_trans(b.at(k + 8 * low + row, 16 * $j + 8 * high))
                            } else {
                                ptx::ldmatrix_x4(b.at(k + 8 * low, 16 * $j + 8 * high + row))
                            };
                            self.multiply::<E, { 8 * $j }>(fa, [fb[0], fb[1]]);
                            self.multiply::<E, { 8 * $j + 4 }>(fa, [fb[2], fb[3]]);
                        }
                    })*
                };
            }
            columns!(0 1 2 3);
            k += 16;
        }
    }

    /// The 16 x 8 tile whose elements start at `AT` += a b, over 16 inner elements.
    ///
    /// # Safety
    /// All lanes of the warp take part.
    #[inline(always)]
    unsafe fn multiply<E: Element, const AT: usize>(&mut self, a: [u32; 4], b: [u32; 2]) {
        let mut d = [self.data[AT], self.data[AT + 1], self.data[AT + 2], self.data[AT + 3]];
        // SAFETY: by contract.
        unsafe {
            match E::CODE {
                DtypeCode::Bf16 => ptx::mma_m16n8k16_f32_bf16(&mut d, a, b),
                _ => ptx::mma_m16n8k16_f32_f16(&mut d, a, b),
            }
        }
        [self.data[AT], self.data[AT + 1], self.data[AT + 2], self.data[AT + 3]] = d;
    }

    /// self += the values of a shared tile.
    #[inline(always)]
    pub fn add<E: DeviceElement>(&mut self, wg: &mut Warpgroup<'_>, tile: Shared<E>) {
        // SAFETY: inside the tile.
        for_each!(wg, self, |r, c, x| *x += unsafe { E::load(tile.at(r, c)) });
    }

    /// Multiplies column c by element c of the row `factors`, and sets tiny results to zero.
    #[inline(always)]
    pub fn scale_columns(&mut self, wg: &mut Warpgroup<'_>, factors: Shared<f32>) {
        // SAFETY: inside the tile.
        for_each!(wg, self, |_r, c, x| *x = flush(*x * unsafe { f32::load(factors.at(0, c)) }));
    }

    /// Stores into a shared tile, rounded to its element type.
    #[inline(always)]
    pub fn store<E: DeviceElement>(&self, wg: &mut Warpgroup<'_>, tile: Shared<E>) {
        let mut copy = Self { rows: self.rows, cols: self.cols, data: self.data };
        // SAFETY: inside the tile.
        for_each!(wg, copy, |r, c, x| unsafe { E::store(tile.at(r, c), *x) });
    }

    /// self += the elements of `matrix`, which may be smaller than the tile: the rest stays.
    #[inline(always)]
    pub fn add_global(&mut self, wg: &mut Warpgroup<'_>, matrix: Matrix) {
        for_each!(wg, self, |r, c, x| {
            let (r, c) = (r as usize, c as usize);
            if r < matrix.rows && c < matrix.cols {
                // SAFETY: inside the matrix.
                *x += unsafe { matrix.load(r, c) };
            }
        });
    }

    /// Stores into `matrix`, which may be smaller than the tile: the rest is left out.
    #[inline(always)]
    pub fn store_global(&mut self, wg: &mut Warpgroup<'_>, matrix: Matrix) {
        for_each!(wg, self, |r, c, x| {
            let (r, c) = (r as usize, c as usize);
            if r < matrix.rows && c < matrix.cols {
                // SAFETY: inside the matrix; the kernel gives each element to one thread.
                unsafe { matrix.store(r, c, *x) };
            }
        });
    }
}
