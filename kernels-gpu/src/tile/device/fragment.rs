//! What kernels written for one architecture need beside the common operations: shared memory by address, and accumulators
//! of `wgmma`, 64 x 128 of a warpgroup, to and from tiles.
//!
//! Element `i` of a thread's 64 is row `16 warp + lane / 4 + 8 (i / 2 % 2)`, column `8 (i / 4) + 2 (lane % 4) + i % 2`.

use cuda_std::ptx;

use super::{Shared, Warpgroup};
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
        let rows = self.fragment_rows(tile);
        repeat!(I in 32 => {
            // SAFETY: inside the tile, whose rows are padded to 16 bytes.
            let [a, b] = unsafe { ptx::ld_shared_v2_f32(rows[I % 2] + 32 * (I as u32 / 2)) };
            fragment[2 * I] = a;
            fragment[2 * I + 1] = b;
        });
    }

    /// Stores this thread's part of a 64 x 128 tile.
    #[inline(always)]
    pub fn store_fragment(&self, tile: Shared<f32>, fragment: &[f32; 64]) {
        let rows = self.fragment_rows(tile);
        repeat!(I in 32 => {
            // SAFETY: as in `load_fragment`.
            unsafe { ptx::st_shared_v2_f32(rows[I % 2] + 32 * (I as u32 / 2), fragment[2 * I], fragment[2 * I + 1]) };
        });
    }

    /// Addresses of this thread's first pair in each of its two rows. The others lie at constant distances from them: an address
    /// for each would be in registers, and alive from the load to the store.
    #[inline(always)]
    fn fragment_rows(&self, tile: Shared<f32>) -> [u32; 2] {
        let (warp, lane) = self.warp_lane();
        let (row, column) = (16 * warp + lane / 4, 2 * (lane % 4));
        [tile.at(row, column), tile.at(row + 8, column)]
    }
}
