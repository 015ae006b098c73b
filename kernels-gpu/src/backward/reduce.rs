//! `reduce`: sums in a fixed order, so that results do not depend on who was first: over the value heads that share a q/k head,
//! and over chunks. Where q and k were normalised it goes on to the rows as they were given:
//!
//! ```text
//! y = x r,  r = 1 / norm of x         dx = r (dy - y (y . dy))
//! ```
//! which is linear in dy, so that it comes after the sum over heads, once.

use crate::params::{ReduceParams, StampKind};
use crate::prep::NORM_EPSILON;
use crate::tile::{RESERVED_BYTES, Warpgroup, tile_bytes};

/// Warpgroups in a block.
pub const WARPGROUPS: usize = 1;

/// Rows of a block.
const ROWS: usize = 16;
/// Most columns that are worked on at once.
const COLUMNS: usize = 256;

/// Bytes of shared memory of a block.
pub const fn shared_bytes(cols: usize) -> usize {
    let width = if cols < COLUMNS { cols } else { COLUMNS };
    RESERVED_BYTES + 2 * tile_bytes(ROWS, width, 4) + 2 * tile_bytes(ROWS, 1, 4)
}

/// Blocks of a launch that sums `rows` rows.
pub const fn blocks(rows: usize) -> usize {
    rows.div_ceil(ROWS)
}

/// The grid: one block for each 16 rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn reduce(wg: &mut Warpgroup<'_>, p: &ReduceParams) {
    let start = wg.clock();
    let cols = p.cols as usize;
    let width = cols.min(COLUMNS);
    let sum = wg.shared::<f32>(ROWS, width);
    let x = wg.shared::<f32>(ROWS, width);
    let inverse_norms = wg.shared::<f32>(ROWS, 1);
    let dots = wg.shared::<f32>(ROWS, 1);
    wg.expect_shared(shared_bytes(cols));
    let first = wg.block() * ROWS;
    let rows = (p.rows as usize - first).min(ROWS);
    let mut column = 0;
    while column < cols {
        let width = (cols - column).min(COLUMNS);
        let sum = sum.part(0, 0, rows, width);
        let stride = p.row_stride as usize;
        let source = p.source.matrix(first * stride + column, rows, width, stride, 1);
        wg.load_sum(sum, source, p.terms as usize, p.term_stride as usize);
        if p.x.is_present() {
            let (norms, dots, y) =
                (inverse_norms.row_range(0, rows), dots.row_range(0, rows), x.part(0, 0, rows, width));
            let source = p.x.matrix(first * cols, rows, cols, cols, 1);
            wg.inverse_norms(norms, source, NORM_EPSILON);
            wg.load(y, source);
            wg.fill(dots, |_, _| 0.0);
            wg.sync();
            wg.scale_rows(y, norms, 1.0);
            wg.sync();
            wg.add_row_dots(dots, y, sum);
            wg.sync();
            wg.scale_rows(y, dots, 1.0);
            wg.sync();
            wg.combine(sum, y, |dy, along| dy - along);
            wg.sync();
            wg.scale_rows(sum, norms, 1.0);
        }
        wg.sync();
        wg.store(p.target.matrix(first * cols + column, rows, width, cols, 1), sum);
        wg.sync();
        column += width;
    }
    let end = wg.clock();
    wg.stamp_block(&p.trace, StampKind::Reduce, [start, end], [0, 0], 0);
}
