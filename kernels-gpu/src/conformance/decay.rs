//! Operations with running products of decays, and the triangular inverse.

use super::{TileCase, dispatch};
use crate::tile::{OperandElement, Shared, Warpgroup};

/// One of the operations of chunks.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn decay_ops<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    dispatch! { wg, p,
        ScalePrefix => scale_prefix::<E>,
        ScaleSuffix => scale_suffix::<E>,
        TotalDecay => total_decay,
        ScalePairwise => scale_pairwise,
        DiagonalScores => diagonal_scores::<E>,
        InvertUnitLower => invert_unit_lower,
    }
}

/// The decays b of `rows` rows: one column, or as many as there are.
fn decays(wg: &mut Warpgroup<'_>, p: &TileCase, rows: usize) -> Shared<f32> {
    p.loaded(wg, &p.b, (rows, p.b.cols as usize), p.b_transposed())
}

fn scale_prefix<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let from = p.loaded::<f32>(wg, &p.a, (r, c), p.a_transposed());
    let decay = decays(wg, p, r);
    let to = p.tile::<E>(wg, r, c);
    wg.sync();
    wg.scale_prefix(to, from, decay, p.span as usize);
    wg.sync();
    wg.store(p.own_out(wg), to);
}

fn scale_suffix<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let from = p.loaded::<f32>(wg, &p.a, (r, c), p.a_transposed());
    let decay = decays(wg, p, r);
    let to = p.tile::<E>(wg, r, c);
    wg.sync();
    wg.scale_suffix(to, from, decay, p.span as usize);
    wg.sync();
    wg.store(p.own_out(wg), to);
}

fn total_decay(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let decay = decays(wg, p, r);
    let row = p.tile::<f32>(wg, 1, c);
    wg.sync();
    wg.total_decay(row, decay);
    wg.sync();
    wg.store(p.own_out(wg), row);
}

fn scale_pairwise(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, _, _) = p.extents();
    let scores = p.loaded::<f32>(wg, &p.c, (r, r), false);
    let decay = decays(wg, p, r);
    wg.sync();
    wg.scale_pairwise(scores, decay);
    wg.sync();
    wg.store(p.own_out(wg), scores);
}

fn diagonal_scores<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, _, k) = p.extents();
    let scores = p.loaded::<f32>(wg, &p.c, (r, r), false);
    let left = p.loaded::<f32>(wg, &p.a, (r, k), false);
    let right = p.loaded::<f32>(wg, &p.b, (r, k), false);
    let decay = p.loaded::<f32>(wg, &p.d, (r, k), false);
    wg.sync();
    wg.diagonal_scores::<E>(scores, left, right, decay);
    wg.sync();
    wg.store(p.own_out(wg), scores);
}

fn invert_unit_lower(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, _, _) = p.extents();
    let tile = p.loaded::<f32>(wg, &p.c, (r, r), false);
    wg.sync();
    wg.invert_unit_lower(tile);
    wg.sync();
    wg.store(p.own_out(wg), tile);
}
