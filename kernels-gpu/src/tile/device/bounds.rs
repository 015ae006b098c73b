//! Operations that bound norms.

use cuda_std::{ptx, warp};

use super::{DeviceElement, ELECT_BYTES, Shared, Warpgroup};
use crate::params::Matrix;
use crate::tile::Within;

impl Warpgroup<'_> {
    /// column(r, 0) = the largest of itself and of row r of `tile`.
    #[inline(always)]
    pub fn raise_to_row_maxima(&mut self, column: Shared<f32>, tile: Shared<f32>) {
        let (warp, lane) = self.warp_lane();
        let (rows, cols) = tile.extent();
        let mut r = warp;
        while r < rows {
            // SAFETY: inside the tiles; rows are uniform in a warp, so that all its lanes are here.
            unsafe {
                let mut most = f32::NEG_INFINITY;
                let mut c = lane;
                while c < cols {
                    most = most.max(f32::load(tile.at(r, c)));
                    c += 32;
                }
                let mut distance = 16;
                while distance > 0 {
                    most = most.max(warp::shuffle_xor(most, distance));
                    distance /= 2;
                }
                if lane == 0 {
                    f32::store(column.at(r, 0), most.max(f32::load(column.at(r, 0))));
                }
            }
            r += 4;
        }
    }

    /// The sum of the squares of a tile of this warpgroup's own, for all of it; contains barriers of the warpgroup.
    #[inline(always)]
    pub fn sum_of_squares(&mut self, tile: Shared<f32>) -> f32 {
        let (rows, cols) = tile.extent();
        let mut sum = 0.0;
        self.sync();
        self.each(rows, cols, |r, c| {
            // SAFETY: inside the tile.
            let x = unsafe { f32::load(tile.at(r, c)) };
            sum += x * x;
        });
        self.sum(sum)
    }

    /// The sum over the warpgroup's threads, for all of them; contains barriers of the warpgroup.
    #[inline(always)]
    fn sum(&mut self, x: f32) -> f32 {
        let (warp, lane) = self.warp_lane();
        let slot = self.base + ELECT_BYTES * self.index;
        let mut sum = x;
        // SAFETY: all lanes are here; the slot is this warpgroup's and the barriers order the accesses.
        unsafe {
            let mut distance = 16;
            while distance > 0 {
                sum += warp::shuffle_xor(sum, distance);
                distance /= 2;
            }
            if lane == 0 {
                ptx::st_shared_u32(slot + 4 * warp, sum.to_bits());
            }
            self.sync();
            let of = |warp: u32| f32::from_bits(ptx::ld_shared_u32(slot + 4 * warp));
            let total = of(0) + of(1) + of(2) + of(3);
            self.sync();
            total
        }
    }

    /// Of `factors`, f32 rows (factor, growth): the least number of rows at the start whose factors' product, times the
    /// product of all growths, is at most `limit`, the product, and that of all growths. Collective over a warp.
    #[inline(always)]
    pub fn first_within(&mut self, factors: Matrix, limit: f32, least: f32) -> Within {
        let lane = ptx::laneid();
        // SAFETY: inside the matrix; all lanes of the warp are here, since the number of rows is the same for them.
        unsafe {
            let n = warp::shuffle_idx(factors.rows as u32, 0);
            let at = |r: u32, c: usize| if r < n { factors.load(r as usize, c) } else { 1.0 };
            let mut growth = 1.0;
            let mut r = 0;
            while r < n {
                growth *= at(r + lane, 1);
                r += 32;
            }
            let mut distance = 16;
            while distance > 0 {
                growth *= warp::shuffle_xor(growth, distance);
                distance /= 2;
            }
            let mut within = Within { rows: n + 1, bound: 0.0, growth };
            if warp::all(growth <= limit) {
                within = Within { rows: 0, bound: growth, growth };
            }
            let mut before = 1.0f32;
            let mut first = 0;
            while warp::all(first < n && within.rows > n) {
                // Products of this and all lanes before.
                let mut product = at(first + lane, 0);
                let mut distance = 1;
                while distance < 32 {
                    let other = warp::shuffle_up(product, distance);
                    if lane >= distance {
                        product = (product * other).max(least);
                    }
                    distance *= 2;
                }
                let here = (before * product).max(least);
                let hit = first + lane < n && here * growth <= limit;
                let mut earliest = if hit { lane } else { 32 };
                let mut distance = 16;
                while distance > 0 {
                    earliest = earliest.min(warp::shuffle_xor(earliest, distance));
                    distance /= 2;
                }
                if warp::any(hit) {
                    let bound = warp::shuffle_idx(here, earliest) * growth;
                    within = Within { rows: first + earliest + 1, bound, growth };
                }
                before = warp::shuffle_idx(here, 31);
                first += 32;
            }
            within
        }
    }
}
