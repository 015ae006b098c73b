//! Operations of register tiles.

use super::{TileCase, dispatch};
use crate::tile::{Acc, OperandElement, Warpgroup};

/// One of the operations whose names begin with `Acc`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn acc_ops<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    dispatch! { wg, p,
        AccZeros => zeros::<E>,
        AccLoad => load::<E>,
        AccMma => mma::<E>,
        AccMmaSub => mma_sub::<E>,
        AccAdd => add::<E>,
        AccScaleColumns => scale_columns,
        AccStore => store::<E>,
        AccAddGlobal => add_global,
        AccStoreGlobal => store_global,
    }
}

/// The accumulated operand, in registers.
fn accumulated(wg: &mut Warpgroup<'_>, p: &TileCase) -> Acc {
    let (r, c, _) = p.extents();
    let tile = p.loaded::<f32>(wg, &p.c, (r, c), false);
    wg.sync();
    Acc::load(wg, tile)
}

fn zeros<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let tile = p.tile::<E>(wg, r, c);
    Acc::zeros(r, c).store(wg, tile);
    wg.sync();
    wg.store(p.own_out(wg), tile);
}

fn load<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let tile = p.loaded::<E>(wg, &p.a, (r, c), p.a_transposed());
    wg.sync();
    Acc::load(wg, tile).store_global(wg, p.own_out(wg));
}

fn mma<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, k) = p.extents();
    let a = p.loaded::<E>(wg, &p.a, (r, k), p.a_transposed());
    let b = p.loaded::<E>(wg, &p.b, (k, c), p.b_transposed());
    let mut acc = accumulated(wg, p);
    acc.mma(wg, a, b);
    acc.store_global(wg, p.own_out(wg));
}

fn mma_sub<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, k) = p.extents();
    let a = p.loaded::<E>(wg, &p.a, (r, k), p.a_transposed());
    let b = p.loaded::<E>(wg, &p.b, (k, c), p.b_transposed());
    let mut acc = accumulated(wg, p);
    acc.mma_sub(wg, a, b);
    acc.store_global(wg, p.own_out(wg));
}

fn add<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let tile = p.loaded::<E>(wg, &p.a, (r, c), p.a_transposed());
    let mut acc = accumulated(wg, p);
    acc.add(wg, tile);
    acc.store_global(wg, p.own_out(wg));
}

fn scale_columns(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (_, c, _) = p.extents();
    let factors = p.loaded::<f32>(wg, &p.b, (1, c), p.b_transposed());
    let mut acc = accumulated(wg, p);
    acc.scale_columns(wg, factors);
    acc.store_global(wg, p.own_out(wg));
}

fn store<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let tile = p.oriented::<E>(wg, r, c, p.a_transposed());
    accumulated(wg, p).store(wg, tile);
    wg.sync();
    wg.store(p.own_out(wg), tile);
}

fn add_global(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let mut acc = accumulated(wg, p);
    acc.add_global(wg, p.a.matrix());
    acc.store_global(wg, p.own_out(wg));
}

fn store_global(wg: &mut Warpgroup<'_>, p: &TileCase) {
    accumulated(wg, p).store_global(wg, p.own_out(wg));
}
