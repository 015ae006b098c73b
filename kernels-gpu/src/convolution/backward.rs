//! `convolve_back`: gradients of the inputs and of the initial states, and shares of those of weights and bias.
//! `sum_shares` adds these up.

use super::{
    ConvolutionItem, ConvolutionMessage, ConvolutionSegment, ConvolutionTensors, ConvolveBackParams, ItemKind,
    SHARED_BYTES, STEP_CONVOLVE_BACK, SumItem, SumParams, each_item, lane, message_rows, nothing, receive, rows, run,
    state,
};
use crate::comm::Port;
use crate::element::DtypeCode;
use crate::params::{Matrix, NONE};
use crate::tile::{ConvolutionBack, OperandElement, Warpgroup};

/// Persistent grid: blocks take items by ticket until there are no more.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn convolve_back<E: OperandElement>(wg: &mut Warpgroup<'_>, params: &ConvolveBackParams) {
    each_item(wg, &params.tables, (STEP_CONVOLVE_BACK, DtypeCode::F32), |wg, port, item| {
        if item.kind == ItemKind::Send as u32 {
            send::<E>(wg, params, port, item)
        } else {
            compute::<E>(wg, params, port, item)
        }
    });
}

/// Writes the item's channels of a message: dz of the segment's first tokens, and behind its last one, where the sequence
/// ends here, gradients of the final state. False if the slot did not become free in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn send<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    params: &ConvolveBackParams,
    port: &Port<'_>,
    item: &ConvolutionItem,
) -> bool {
    let p = &params.tables;
    let message: ConvolutionMessage = wg.read(p.messages, item.index as usize);
    let segment: ConvolutionSegment = wg.read(p.segments, message.segment as usize);
    let Some(part) = port.begin_part(wg, message.dest, message.lane) else { return false };
    let t: &ConvolutionTensors = &wg.read(p.tensors, item.tensor as usize);
    let target = message_rows::<f32>(p, t, item, part.address(), (message.first_row, message.rows));
    let tokens = segment.len.min(message.rows) as usize;
    let run = run::<E>(p, t, item, &segment, (0, tokens));
    wg.convolve_gradient(target.row_range(0, tokens), &run, rows::<E>(&t.dy, t, item, &segment, 0, tokens));
    let count = target.rows - tokens;
    if count > 0 {
        let from = final_gradients(params, t, item, &segment);
        let from = if from.rows > 0 { from.row_range(0, count) } else { from };
        wg.copy_rows(target.row_range(tokens, count), from);
    }
    let bytes = message.rows as u64 * p.columns as u64 * size_of::<f32>() as u64;
    port.finish_part(wg, part, (p.written, item.index as usize), p.parts.into(), bytes);
    true
}

/// The W-1 gradients of the final state, whatever their element type; no rows for zeros.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn final_gradients(
    params: &ConvolveBackParams,
    t: &ConvolutionTensors,
    item: &ConvolutionItem,
    segment: &ConvolutionSegment,
) -> Matrix {
    let mut from = state::<f32>(&t.d_finals, t, item, segment.final_row, params.tables.width as usize);
    from.tensor.dtype = t.d_finals.dtype;
    from
}

/// A run of tokens, after its halo if it needs one. False if the halo did not arrive in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn compute<E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    params: &ConvolveBackParams,
    port: &Port<'_>,
    item: &ConvolutionItem,
) -> bool {
    let p = &params.tables;
    if item.kind == ItemKind::Halo as u32 {
        let (t, segment) = tables(wg, params, item);
        let row = segment.after_lane;
        let to = lane::<f32>(&params.after, p, &t, item, row);
        if !receive::<f32>(wg, p, port, (&t, item, &segment), row, to) {
            return false;
        }
    }
    // Read again, so that little is kept in registers over the wait.
    let (t, segment) = &tables(wg, params, item);
    let (width, d) = (p.width as usize, t.channels as usize);
    let after = if item.kind == ItemKind::Halo as u32 {
        lane::<f32>(&params.after, p, t, item, segment.after_lane)
    } else {
        final_gradients(params, t, item, segment)
    };
    let (offset, len) = (item.offset as usize, item.len as usize);
    let given = (len + width - 1).min(segment.len as usize - offset);
    // Gradients of rows behind the segment that reach the run.
    let behind = len + width - 1 - given;
    let after = if after.rows > 0 { after.row_range(0, behind) } else { after };
    let run = run::<E>(p, t, item, segment, (offset, given));
    let d_before = if item.state != 0 {
        state::<f32>(&t.d_initial, t, item, segment.initial, width)
    } else {
        nothing(DtypeCode::F32)
    };
    let back = ConvolutionBack {
        dy: rows::<E>(&t.dy, t, item, segment, offset, given),
        after,
        real: if segment.after_lane != NONE { segment.real as usize } else { 0 },
        dx: rows::<E>(&t.dx, t, item, segment, offset, len),
        d_before,
        sums: super::typed::<f32>(&t.shares).matrix(
            item.run as usize * (width + 1) * d + item.first as usize,
            width + 1,
            item.count as usize,
            d,
            1,
        ),
    };
    wg.convolve_back(&back, &run);
    true
}

/// The item's tensors and segment.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn tables(
    wg: &Warpgroup<'_>,
    params: &ConvolveBackParams,
    item: &ConvolutionItem,
) -> (ConvolutionTensors, ConvolutionSegment) {
    let p = &params.tables;
    (wg.read(p.tensors, item.tensor as usize), wg.read(p.segments, item.index as usize))
}

/// One block for each item: adds up a tap's shares of all runs, in the order of the runs.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn sum_shares(wg: &mut Warpgroup<'_>, p: &SumParams) {
    wg.expect_shared(SHARED_BYTES);
    let item: SumItem = wg.read(p.items, wg.block());
    let t: ConvolutionTensors = wg.read(p.tensors, item.tensor as usize);
    let (width, d) = (p.width as usize, t.channels as usize);
    let (first, count, tap) = (item.first as usize, item.count as usize, item.tap as usize);
    let shares = super::typed::<f32>(&t.shares).matrix(tap * d + first, t.runs as usize, count, (width + 1) * d, 1);
    let target = if tap < width {
        super::typed::<f32>(&t.d_weight).matrix(first * width + tap, 1, count, 0, width)
    } else {
        super::typed::<f32>(&t.d_bias).matrix(first, 1, count, 0, 1)
    };
    wg.sum_columns(target, shares);
}
