//! `convolve`: outputs and final states.

use super::{
    ConvolutionItem, ConvolutionMessage, ConvolutionSegment, ConvolutionTensors, ConvolveParams, ItemKind,
    STEP_CONVOLVE, before_segment, each_item, lane, message_rows, receive, rows, run, state,
};
use crate::comm::Port;
use crate::params::{Matrix, NONE};
use crate::tile::{OperandElement, Warpgroup};

/// Persistent grid: blocks take items by ticket until there are no more.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn convolve<E: OperandElement>(wg: &mut Warpgroup<'_>, params: &ConvolveParams) {
    each_item(wg, &params.tables, (STEP_CONVOLVE, E::CODE), |wg, port, item| {
        if item.kind == ItemKind::Send as u32 {
            send::<E>(wg, params, port, item)
        } else {
            compute::<E>(wg, params, port, item)
        }
    });
}

/// Writes the item's channels of a message: inputs, and where the sequence starts here, what its initial state ends with.
/// False if the slot did not become free in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn send<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    params: &ConvolveParams,
    port: &Port<'_>,
    item: &ConvolutionItem,
) -> bool {
    let p = &params.tables;
    let message: ConvolutionMessage = wg.read(p.messages, item.index as usize);
    let segment: ConvolutionSegment = wg.read(p.segments, message.segment as usize);
    let Some(part) = port.begin_part(wg, message.dest, message.lane) else { return false };
    let t: ConvolutionTensors = wg.read(p.tensors, item.tensor as usize);
    let target = message_rows::<E>(p, &t, item, part.address(), (message.first_row, message.rows));
    places::<E>(wg, params, &t, item, &segment, message.position, target);
    let bytes = message.rows as u64 * p.columns as u64 * E::CODE.size() as u64;
    port.finish_part(wg, part, (p.written, item.index as usize), p.parts.into(), bytes);
    true
}

/// Copies places `position ..` of a segment, which may begin before its first token, to `target`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn places<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    params: &ConvolveParams,
    t: &ConvolutionTensors,
    item: &ConvolutionItem,
    segment: &ConvolutionSegment,
    position: i32,
    target: Matrix,
) {
    let p = &params.tables;
    let reach = p.width as usize - 1;
    let missing = (position.min(0).unsigned_abs() as usize).min(target.rows);
    if missing > 0 {
        let before = before_segment::<E>(p, t, item, segment);
        let first = (reach as i32 + position) as usize;
        let before = if before.rows > 0 { before.row_range(first, missing) } else { before };
        wg.copy_rows(target.row_range(0, missing), before);
    }
    let count = target.rows - missing;
    if count > 0 {
        let from = rows::<E>(&t.x, t, item, segment, position.max(0) as usize, count);
        wg.copy_rows(target.row_range(missing, count), from);
    }
}

/// A run of tokens, after its halo if it needs one; and the final state, if it is the item's. False if the halo did not
/// arrive in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn compute<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    params: &ConvolveParams,
    port: &Port<'_>,
    item: &ConvolutionItem,
) -> bool {
    let p = &params.tables;
    // Tables are read again for each part of the work, so that little is kept in registers from one to the next.
    if item.kind == ItemKind::Halo as u32 {
        let (t, segment) = tables(wg, params, item);
        let row = segment.before_lane;
        let to = lane::<E>(&p.before, p, &t, item, row);
        if !receive::<E>(wg, p, port, (&t, item, &segment), row, to) {
            return false;
        }
    }
    if item.state != 0 {
        let (t, segment) = tables(wg, params, item);
        if segment.final_row != NONE && t.finals.is_present() {
            let width = p.width as usize;
            let target = state::<E>(&t.finals, &t, item, segment.final_row, width);
            places::<E>(wg, params, &t, item, &segment, segment.len as i32 - (width as i32 - 1), target);
        }
    }
    let (offset, len) = (item.offset as usize, item.len as usize);
    if len > 0 {
        let (t, segment) = tables(wg, params, item);
        let run = run::<E>(p, &t, item, &segment, (offset, len));
        wg.convolve(rows::<E>(&t.y, &t, item, &segment, offset, len), &run);
    }
    true
}

/// The item's tensors and segment.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn tables(
    wg: &Warpgroup<'_>,
    params: &ConvolveParams,
    item: &ConvolutionItem,
) -> (ConvolutionTensors, ConvolutionSegment) {
    let p = &params.tables;
    (wg.read(p.tensors, item.tensor as usize), wg.read(p.segments, item.index as usize))
}
