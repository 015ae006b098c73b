//! What kernels written for one architecture need beside the common operations: shared memory by address, and accumulators
//! of `wgmma`, 64 x 128 of a warpgroup, to and from tiles.
//!
//! Element `i` of a thread's 64 is row `16 warp + lane / 4 + 8 (i / 2 % 2)`, column `8 (i / 4) + 2 (lane % 4) + i % 2`.

use super::{DeviceElement, Shared, Warpgroup};
use crate::element::Element;
use crate::hopper::repeat;
use crate::tile::padded_columns;

impl Warpgroup<'_> {
    /// Shared address of the block's dynamic memory, aligned to 1024 bytes; the first
    /// [`RESERVED_BYTES`](crate::tile::RESERVED_BYTES) are the DSL's.
    #[inline(always)]
    pub fn base(&self) -> u32 {
        self.base
    }

    /// The tile at shared address `addr`, laid out as [`Warpgroup::shared`] lays it out.
    #[inline(always)]
    pub fn tile_at<E: Element>(&self, addr: u32, rows: usize, cols: usize) -> Shared<E> {
        Shared::new(addr, rows as u32, cols as u32, padded_columns(cols, E::CODE.size()) as u32)
    }

    /// Loads this thread's part of a 64 x 128 tile.
    #[inline(always)]
    pub fn load_fragment(&self, fragment: &mut [f32; 64], tile: Shared<f32>) {
        let (warp, lane) = self.warp_lane();
        let (row, column) = (16 * warp + lane / 4, 2 * (lane % 4));
        repeat!(I in 64 => {
            let (r, c) = (row + 8 * (I as u32 / 2 % 2), column + 8 * (I as u32 / 4) + I as u32 % 2);
            // SAFETY: inside the tile.
            fragment[I] = unsafe { f32::load(tile.at(r, c)) };
        });
    }

    /// Stores this thread's part of a 64 x 128 tile.
    #[inline(always)]
    pub fn store_fragment(&self, tile: Shared<f32>, fragment: &[f32; 64]) {
        let (warp, lane) = self.warp_lane();
        let (row, column) = (16 * warp + lane / 4, 2 * (lane % 4));
        repeat!(I in 64 => {
            let (r, c) = (row + 8 * (I as u32 / 2 % 2), column + 8 * (I as u32 / 4) + I as u32 % 2);
            // SAFETY: inside the tile.
            unsafe { f32::store(tile.at(r, c), fragment[I]) };
        });
    }
}
