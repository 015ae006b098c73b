//! Operations that bound norms.

use super::check::raise;
use super::{FaultKind, Shared, Warpgroup};
use crate::params::Matrix;
use crate::tile::Within;

impl Warpgroup<'_> {
    /// column(r, 0) = the largest of itself and of row r of `tile`.
    pub fn raise_to_row_maxima(&mut self, column: Shared<f32>, tile: Shared<f32>) {
        Self::same_shape("raise_to_row_maxima", [tile.rows, 1], [column.rows, column.cols]);
        self.log_read(&tile);
        self.log_update(&column);
        for r in 0..tile.rows {
            let p = self.at(&column, r, 0);
            // SAFETY: see `at`.
            unsafe { p.write((0..tile.cols).fold(p.read(), |most, c| most.max(self.at(&tile, r, c).read()))) };
        }
    }

    /// The sum of the squares of a tile of this warpgroup's own, for all of it; contains barriers of the warpgroup.
    pub fn sum_of_squares(&mut self, tile: Shared<f32>) -> f32 {
        self.sync();
        self.log_read(&tile);
        let mut lanes = [0.0f32; 16];
        for r in 0..tile.rows {
            for c in 0..tile.cols {
                // SAFETY: see `at`.
                let x = unsafe { self.at(&tile, r, c).read() };
                lanes[c % 16] += x * x;
            }
        }
        self.sync();
        lanes.iter().sum()
    }

    /// Of `factors`, f32 rows (factor, growth): the least number of rows at the start whose factors' product, times the
    /// product of all growths, is at most `limit`, the product, and that of all growths. Collective over a warp.
    pub fn first_within(&mut self, factors: Matrix, limit: f32, least: f32) -> Within {
        factors.check_bounds("first_within");
        if factors.cols != 2 {
            raise(FaultKind::Shapes { op: "first_within", shapes: vec![[factors.rows, factors.cols]] });
        }
        let at = |r, c| self.scalar(factors.row_range(r, 1).columns(c, 1));
        let growth = (0..factors.rows).fold(1.0, |product, r| product * at(r, 1));
        let mut product = 1.0f32;
        for r in 0..=factors.rows {
            if product * growth <= limit {
                return Within { rows: r as u32, bound: product * growth, growth };
            }
            if r < factors.rows {
                product = (product * at(r, 0)).max(least);
            }
        }
        Within { rows: factors.rows as u32 + 1, bound: 0.0, growth }
    }
}
