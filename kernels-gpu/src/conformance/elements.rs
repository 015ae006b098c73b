//! Elementwise operations of shared tiles, and the functions of gates.

use super::{B_ABSENT, TileCase, dispatch};
use crate::element::Element;
use crate::math;
use crate::tile::{OperandElement, Warpgroup};

/// The functions that [`super::TileOp::LoadFunction`] applies, by number.
pub const FUNCTIONS: [&str; 5] = ["exp", "ln_1p", "rsqrt", "sigmoid", "softplus"];

/// One of the elementwise operations.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn element_ops<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    dispatch! { wg, p,
        Load => load::<E>,
        LoadMap => load_map::<E>,
        LoadFunction => load_function,
        Fill => fill::<E>,
        Store => store::<E>,
        Convert => convert::<E>,
        ConvertRest => convert_rest::<E>,
        ConvertUp => convert_up::<E>,
        ToOperand => to_operand::<E>,
        MapWithRow => map_with_row,
        ScaleRows => scale_rows,
        InverseNorms => inverse_norms,
        Scalar => scalar,
    }
}

fn load<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let tile = p.loaded::<E>(wg, &p.a, (r, c), p.a_transposed());
    wg.sync();
    wg.store(p.own_out(wg), tile);
}

fn load_map<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let tile = p.oriented::<E>(wg, r, c, p.a_transposed());
    wg.load_map(tile, p.a.matrix(), p.factor, |x| 1.5 * x - 0.25);
    wg.sync();
    wg.store(p.own_out(wg), tile);
}

fn load_function(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let tile = p.tile::<f32>(wg, r, c);
    let which = p.span;
    wg.load_map(tile, p.a.matrix(), 0.0, |x| match which {
        0 => math::exp(x),
        1 => math::ln_1p(x),
        2 => math::rsqrt(x),
        3 => math::sigmoid(x),
        _ => math::softplus(x),
    });
    wg.sync();
    wg.store(p.own_out(wg), tile);
}

fn fill<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let tile = p.oriented::<E>(wg, r, c, p.a_transposed());
    wg.fill(tile, |i, j| p.factor * (c * i + j) as f32);
    wg.sync();
    wg.store(p.own_out(wg), tile);
}

fn store<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    // The result may be smaller than the tile: that is what is tested.
    load::<E>(wg, p);
}

fn convert<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let from = p.loaded::<f32>(wg, &p.a, (r, c), p.a_transposed());
    let to = p.oriented::<E>(wg, r, c, p.b_transposed());
    wg.sync();
    wg.convert(to, from, |x| 1.25 * x);
    wg.sync();
    wg.store(p.own_out(wg), to);
}

fn convert_rest<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let from = p.loaded::<f32>(wg, &p.a, (r, c), p.a_transposed());
    let to = p.oriented::<E>(wg, r, c, p.b_transposed());
    wg.sync();
    wg.convert(to, from, |x| x - <E as Element>::round(x));
    wg.sync();
    wg.store(p.own_out(wg), to);
}

fn convert_up<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let from = p.loaded::<E>(wg, &p.a, (r, c), p.a_transposed());
    let to = p.oriented::<f32>(wg, r, c, p.b_transposed());
    wg.sync();
    wg.convert(to, from, |x| 1.25 * x);
    wg.sync();
    wg.store(p.own_out(wg), to);
}

fn to_operand<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let wide = wg.private::<f32>(r, c);
    let operand = wg.private_operand::<E>(wide);
    wg.load(wide, p.a.matrix());
    wg.sync();
    wg.to_operand(operand, wide);
    wg.sync();
    wg.store(p.own_out(wg), operand);
}

fn map_with_row(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, rows) = p.extents();
    let tile = p.loaded::<f32>(wg, &p.a, (r, c), p.a_transposed());
    wg.sync();
    let row = (p.flags & B_ABSENT == 0).then(|| p.b.matrix());
    wg.map_with_row(tile, rows, row, |x, parameter| 0.5 * x + parameter);
    wg.sync();
    wg.store(p.own_out(wg), tile);
}

fn scale_rows(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let tile = p.loaded::<f32>(wg, &p.a, (r, c), p.a_transposed());
    let column = p.loaded::<f32>(wg, &p.b, (r, 1), p.b_transposed());
    wg.sync();
    wg.scale_rows(tile, column, p.factor);
    wg.sync();
    wg.store(p.own_out(wg), tile);
}

fn inverse_norms(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, _, _) = p.extents();
    let column = p.tile::<f32>(wg, r, 1);
    wg.inverse_norms(column, p.a.matrix(), p.factor);
    wg.sync();
    wg.store(p.own_out(wg), column);
}

fn scalar(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let tile = p.tile::<f32>(wg, r, c);
    let value = wg.scalar(p.a.matrix());
    wg.fill(tile, |_, _| value);
    wg.sync();
    wg.store(p.own_out(wg), tile);
}
