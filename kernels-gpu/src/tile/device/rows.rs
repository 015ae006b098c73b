//! Copies of rows without gaps, four elements at once, and several loads under way before the first is used. An element at a
//! time, with conditions between them, each load waits for the one before: that is most of what a merge took.

use cuda_std::ptx;

use super::{Acc, DeviceElement, Shared, THREADS, Warpgroup};
use crate::element::DtypeCode;
use crate::hopper::repeat;
use crate::params::Matrix;

/// Elements that lie side by side, as memory is read and written.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Four(f32, f32, f32, f32);

/// See [`Four`].
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Two(f32, f32);

impl Matrix {
    /// Whether its rows can be accessed four elements at a time, from any column that is a multiple of four.
    #[inline(always)]
    fn by_fours(&self) -> bool {
        self.col_stride == 1 && (self.row_stride | self.offset).is_multiple_of(4) && self.tensor.addr.is_multiple_of(16)
    }

    /// Address of element (r, c), if elements are of `T`.
    #[inline(always)]
    fn place<T>(&self, r: u32, c: u32) -> *mut T {
        (self.tensor.addr as *mut T).wrapping_add(self.offset + r as usize * self.row_stride + c as usize)
    }
}

impl Warpgroup<'_> {
    /// Takes this thread's share of `rows` x `cols` elements from `load(row, column)` to `store(row, column, elements)`, four at a
    /// time, eight times at once. False if rows have no such shares: then it has done nothing.
    #[inline(always)]
    fn by_fours(
        &self,
        rows: u32,
        cols: u32,
        load: impl Fn(u32, u32) -> [f32; 4],
        store: impl Fn(u32, u32, [f32; 4]),
    ) -> bool {
        let row = cols / 4;
        if row == 0 || !cols.is_multiple_of(4) || !THREADS.is_multiple_of(row) {
            return false;
        }
        let (mut r, c, step) = (self.thread / row, 4 * (self.thread % row), THREADS / row);
        while r < rows {
            let mut x = [[0.0f32; 4]; 8];
            // Beyond the last row: the last one again, so that no condition stands between loads.
            repeat!(I in 8 => {
                x[I] = load((r + step * I as u32).min(rows - 1), c);
            });
            repeat!(I in 8 => {
                let at = r + step * I as u32;
                if at < rows {
                    store(at, c, x[I]);
                }
            });
            r += 8 * step;
        }
        true
    }

    /// As [`Warpgroup::load`].
    #[inline(always)]
    pub fn load_rows(&mut self, tile: Shared<f32>, source: Matrix) {
        let (rows, cols) = tile.extent();
        let done = is_whole(&source, rows, cols)
            // SAFETY: inside matrix and tile, aligned.
            && self.by_fours(rows, cols, |r, c| unsafe { global(&source, r, c) }, |r, c, x| unsafe {
                f32::store_four(tile.at(r, c), x);
            });
        if !done {
            self.load(tile, source);
        }
    }

    /// Loads `source` rounded into `tile`, and into `rest` what that loses; where the tiles are larger they become zero.
    #[inline(always)]
    pub fn load_split<E: DeviceElement>(&mut self, tile: Shared<E>, rest: Shared<E>, source: Matrix) {
        let (rows, cols) = tile.extent();
        let done = is_whole(&source, rows, cols)
            // SAFETY: inside matrix and tiles, aligned.
            && self.by_fours(rows, cols, |r, c| unsafe { global(&source, r, c) }, |r, c, x| unsafe {
                E::store_four(tile.at(r, c), x);
                E::store_four(rest.at(r, c), x.map(|x| x - E::round(x)));
            });
        if !done {
            self.load(tile, source);
            self.load_map(rest, source, 0.0, |x| x - E::round(x));
        }
    }

    /// Copies `from` rounded into `tile`, and into `rest` what that loses.
    #[inline(always)]
    pub fn split<E: DeviceElement>(&mut self, tile: Shared<E>, rest: Shared<E>, from: Shared<f32>) {
        let (rows, cols) = tile.extent();
        // SAFETY: inside the tiles, whose rows are padded to 16 bytes.
        let done = self.by_fours(
            rows,
            cols,
            |r, c| unsafe { ptx::ld_shared_v4_f32(from.at(r, c)) },
            |r, c, x| unsafe {
                E::store_four(tile.at(r, c), x);
                E::store_four(rest.at(r, c), x.map(|x| x - E::round(x)));
            },
        );
        if !done {
            self.convert(tile, from, |x| x);
            self.convert(rest, from, |x| x - E::round(x));
        }
    }

    /// As [`Warpgroup::store`].
    #[inline(always)]
    pub fn store_rows(&mut self, target: Matrix, tile: Shared<f32>) {
        let (rows, cols) = (target.rows as u32, target.cols as u32);
        let dtype = target.tensor.dtype();
        let done = target.by_fours()
            && dtype != DtypeCode::F16
            // SAFETY: inside tile and matrix, aligned; the kernel gives each element to one block.
            && self.by_fours(rows, cols, |r, c| unsafe { ptx::ld_shared_v4_f32(tile.at(r, c)) }, |r, c, x| unsafe {
                let [x, y, z, w] = x;
                if dtype == DtypeCode::F32 {
                    target.place::<f32>(r, c).cast::<Four>().write(Four(x, y, z, w));
                } else {
                    let to = target.place::<u16>(r, c).cast();
                    ptx::st_global_v2_u32(to, ptx::cvt_rn_bf16x2_f32(y, x), ptx::cvt_rn_bf16x2_f32(w, z));
                }
            });
        if !done {
            self.store(target, tile);
        }
    }
}

impl Acc {
    /// As [`Acc::add_global`].
    #[inline(always)]
    pub fn add_rows(&mut self, wg: &mut Warpgroup<'_>, matrix: Matrix) {
        if self.cols != 64 || !is_whole(&matrix, self.rows, self.cols) {
            self.add_global(wg, matrix);
            return;
        }
        let (warp, lane) = wg.warp_lane();
        if 16 * warp < self.rows {
            let from = matrix.place::<f32>(16 * warp + lane / 4, 2 * (lane % 4));
            let mut x = [Two(0.0, 0.0); 16];
            repeat!(I in 16 => {
                let at = from.wrapping_add(I % 2 * 8 * matrix.row_stride + I / 2 * 8);
                // SAFETY: inside the matrix, in pairs that are aligned since fours are.
                x[I] = unsafe { at.cast::<Two>().read() };
            });
            repeat!(I in 16 => {
                self.data[2 * I] += x[I].0;
                self.data[2 * I + 1] += x[I].1;
            });
        }
    }
}

/// Whether `source` is f32, read by fours, and as large as a tile.
#[inline(always)]
fn is_whole(source: &Matrix, rows: u32, cols: u32) -> bool {
    source.by_fours()
        && source.tensor.dtype() == DtypeCode::F32
        && (source.rows, source.cols) == (rows as usize, cols as usize)
}

/// Elements (r, c ..) of an f32 matrix.
///
/// # Safety
/// They must lie inside it, and `c` must be a multiple of four, as by [`is_whole`].
#[inline(always)]
unsafe fn global(source: &Matrix, r: u32, c: u32) -> [f32; 4] {
    // SAFETY: by contract.
    let Four(x, y, z, w) = unsafe { source.place::<f32>(r, c).cast::<Four>().read() };
    [x, y, z, w]
}
