//! `reduce`: sums in a fixed order, so that results do not depend on who was first: over the value heads that share a q/k head,
//! and over chunks. The latter have few results and many terms, so that the terms are what threads share. Where q and k were normalised it goes on to the rows as they were given:
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

/// Rows of a block that sums rows; of a block that sums columns, what their terms are split into.
const ROWS: usize = 16;
/// Columns of a block that sums columns: a sector of memory, and with [`ROWS`] an element for each thread.
const NARROW: usize = 8;

/// The grid and the shared memory of a launch.
pub struct Launch {
    /// Blocks.
    pub blocks: usize,
    /// Bytes of shared memory of a block.
    pub shared_bytes: usize,
}

/// How to launch [`reduce`].
pub fn launch(p: &ReduceParams) -> Launch {
    let (rows, cols) = (p.rows as usize, p.cols as usize);
    let (blocks, tiles) = if is_long(p) {
        (cols.div_ceil(NARROW), 2 * tile_bytes(ROWS, NARROW, 4) + tile_bytes(1, NARROW, 4))
    } else {
        (rows.div_ceil(ROWS), 2 * tile_bytes(ROWS, cols, 4) + 2 * tile_bytes(ROWS, 1, 4))
    };
    Launch { blocks, shared_bytes: RESERVED_BYTES + tiles }
}

/// Whether it is one row with terms of all chunks, so that blocks share its columns and threads the terms.
fn is_long(p: &ReduceParams) -> bool {
    p.rows == 1 && !p.x.is_present()
}

/// The grid is what [`launch`] says: a block for each 16 rows, or, of a single row, for each 8 columns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn reduce(wg: &mut Warpgroup<'_>, p: &ReduceParams) {
    let start = wg.clock();
    if is_long(p) {
        sum_columns(wg, p);
    } else {
        sum_rows(wg, p);
    }
    let end = wg.clock();
    wg.stamp_block(&p.trace, StampKind::Reduce, [start, end], [0, 0], 0);
}

/// 16 rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_rows(wg: &mut Warpgroup<'_>, p: &ReduceParams) {
    let cols = p.cols as usize;
    let sum = wg.shared::<f32>(ROWS, cols);
    let x = wg.shared::<f32>(ROWS, cols);
    let inverse_norms = wg.shared::<f32>(ROWS, 1);
    let dots = wg.shared::<f32>(ROWS, 1);
    wg.expect_shared(launch(p).shared_bytes);
    let first = wg.block() * ROWS;
    let rows = (p.rows as usize - first).min(ROWS);
    let sum = sum.row_range(0, rows);
    let stride = p.row_stride as usize;
    let source = p.source.matrix(first * stride, rows, cols, stride, 1);
    wg.load_sum(sum, source, p.terms as usize, p.term_stride as usize);
    if p.x.is_present() {
        let (norms, dots, y) = (inverse_norms.row_range(0, rows), dots.row_range(0, rows), x.row_range(0, rows));
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
    wg.store(p.target.matrix(first * cols, rows, cols, cols, 1), sum);
}

/// 8 columns of a single row: 16 sums of every 16th term, and then their sum.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_columns(wg: &mut Warpgroup<'_>, p: &ReduceParams) {
    let shares = wg.shared::<f32>(ROWS, NARROW);
    let last = wg.shared::<f32>(ROWS, NARROW);
    let sum = wg.shared::<f32>(1, NARROW);
    wg.expect_shared(launch(p).shared_bytes);
    let column = wg.block() * NARROW;
    let width = (p.cols as usize - column).min(NARROW);
    let (terms, stride) = (p.terms as usize, p.term_stride as usize);
    let (rounds, left) = (terms / ROWS, terms % ROWS);
    let (shares, sum) = (shares.part(0, 0, ROWS, width), sum.part(0, 0, 1, width));
    let terms_at = |term: usize, rows: usize| p.source.matrix(term * stride + column, rows, width, stride, 1);
    wg.load_sum(shares, terms_at(0, ROWS), rounds, ROWS * stride);
    if left > 0 {
        let last = last.part(0, 0, left, width);
        wg.load(last, terms_at(rounds * ROWS, left));
        wg.sync();
        wg.combine(shares.row_range(0, left), last, |sum, term| sum + term);
    }
    wg.sync();
    wg.column_sums(sum, shares);
    wg.sync();
    wg.store(p.target.matrix(column, 1, width, width, 1), sum);
}
