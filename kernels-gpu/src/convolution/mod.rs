//! The short convolution in front of q, k and v: depthwise, causal, W taps over time, forward ([`convolve`]) and backward
//! ([`convolve_back`], [`sum_shares`]).
//!
//! ```text
//! z_t  = bias + sum over w of weight_w x_(t-(W-1)+w)         y_t = z_t, or y_t = z_t sigmoid(z_t)
//! dz_t = dy_t, or dy_t times the slope of SiLU at z_t        dx_t = sum over j of weight_(W-1-j) dz_(t+j)
//! dweight_w = sum over t of dz_t x_(t-(W-1)+w)               dbias = sum over t of dz_t
//! ```
//!
//! What lies before a sequence is its initial state, W-1 inputs; its final state is its last W-1 inputs, and where the
//! sequence is shorter these begin with what its initial state ends with. So a sequence is a line of W-1 places and its
//! tokens, and a PE that holds the first tokens holds these places as well.
//!
//! # The halo
//! A segment that began elsewhere needs the W-1 places before it. Every PE that holds some of them sends these rows itself,
//! those of all convolutions of the call (q, k and v) in one message, so that nobody waits for a chain, however short the
//! segments are. Backward the line goes on behind the last token with W-1 places for the gradients of the final state, which
//! belong to the PE that holds the last tokens; a segment that goes on elsewhere needs the W-1 places after it: dz of tokens
//! (in f32, so that dx does not depend on where the sequence is cut), then those gradients, each of which is added to dx of
//! the token W-1 places before it.
//!
//! # Order of the work
//! [`convolve_begin`] comes first: tickets and counts from zero, the next epoch, and which tensors the call has.
//!
//! Items are taken by ticket: first those that send, each a block of channels of a message, then all tokens that need nothing
//! from other PEs, and last those next to a cut, which wait. Backward a PE has all that it sends: the inputs before its
//! segments were kept by the forward step.

mod backward;
mod begin;
mod forward;
mod params;

pub use backward::{convolve_back, sum_shares};
pub use begin::{ConvolveBeginParams, convolve_begin};
pub use forward::convolve;
pub use params::{
    ConvolutionItem, ConvolutionMessage, ConvolutionSegment, ConvolutionSource, ConvolutionTables, ConvolutionTensors,
    ConvolveBackParams, ConvolveParams, ItemKind, SumItem, SumParams,
};

use crate::comm::Port;
use crate::element::{DtypeCode, Element};
use crate::params::{Matrix, NONE, Tensor};
use crate::tile::{ConvolutionRun, RESERVED_BYTES, Warpgroup};

/// Most convolutions of a call.
pub const MAX_CONVOLUTIONS: usize = 3;

/// Warpgroups in a block of each of the kernels.
pub const WARPGROUPS: usize = 1;

/// Bytes of shared memory of a block: the kernels have no tiles.
pub const SHARED_BYTES: usize = RESERVED_BYTES;

/// [`Port::step`] of [`convolve`].
pub const STEP_CONVOLVE: u32 = 16;
/// [`Port::step`] of [`convolve_back`].
pub const STEP_CONVOLVE_BACK: u32 = 17;

/// Takes items by ticket until there are no more, or until `work` on one, or a wait elsewhere on this PE, ran out of time.
/// `step` and `dtype` are those of the [`Port`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn each_item(
    wg: &mut Warpgroup<'_>,
    p: &ConvolutionTables,
    (step, dtype): (u32, DtypeCode),
    mut work: impl FnMut(&mut Warpgroup<'_>, &Port<'_>, &ConvolutionItem) -> bool,
) {
    wg.expect_shared(SHARED_BYTES);
    let port = Port { channel: &p.channel, trace: &p.trace, step, m_dtype: dtype };
    loop {
        let ticket = wg.next_ticket(p.ticket);
        if ticket >= p.items.len || !wg.sync_and(!port.trapped(wg)) {
            return;
        }
        let item: ConvolutionItem = wg.read(p.items, ticket as usize);
        if !work(wg, &port, &item) {
            return;
        }
    }
}

/// A tensor whose element type the compiler knows.
#[inline(always)]
fn typed<E: Element>(tensor: &Tensor) -> Tensor {
    Tensor { dtype: E::CODE as u32, ..*tensor }
}

/// No rows: zeros.
#[inline(always)]
fn nothing(dtype: DtypeCode) -> Matrix {
    Tensor { dtype: dtype as u32, ..Tensor::absent() }.matrix(0, 0, 0, 0, 1)
}

/// The item's channels of tokens `offset ..` of a segment in a `[tokens, D]` tensor.
#[inline(always)]
fn rows<E: Element>(
    tensor: &Tensor,
    t: &ConvolutionTensors,
    item: &ConvolutionItem,
    segment: &ConvolutionSegment,
    offset: usize,
    count: usize,
) -> Matrix {
    let d = t.channels as usize;
    let first = (segment.token as usize + offset) * d + item.first as usize;
    typed::<E>(tensor).matrix(first, count, item.count as usize, d, 1)
}

/// The item's channels of a state of W-1 rows, which in memory is `[rows, D, W-1]`; no rows if there is none.
#[inline(always)]
fn state<E: Element>(
    states: &Tensor,
    t: &ConvolutionTensors,
    item: &ConvolutionItem,
    row: u32,
    width: usize,
) -> Matrix {
    let reach = width - 1;
    if row == NONE || !states.is_present() {
        return nothing(E::CODE);
    }
    let first = (row as usize * t.channels as usize + item.first as usize) * reach;
    typed::<E>(states).matrix(first, reach, item.count as usize, 1, reach)
}

/// The item's channels of a lane of a `[lanes, W-1, columns]` tensor.
#[inline(always)]
fn lane<E: Element>(
    tensor: &Tensor,
    p: &ConvolutionTables,
    t: &ConvolutionTensors,
    item: &ConvolutionItem,
    lane: u32,
) -> Matrix {
    let (reach, columns) = (p.width as usize - 1, p.columns as usize);
    let first = lane as usize * reach * columns + (t.first_column + item.first) as usize;
    typed::<E>(tensor).matrix(first, reach, item.count as usize, columns, 1)
}

/// The item's channels of rows `first_row ..` of a message at `address`.
#[inline(always)]
fn message_rows<E: Element>(
    p: &ConvolutionTables,
    t: &ConvolutionTensors,
    item: &ConvolutionItem,
    address: u64,
    (first_row, rows): (u32, u32),
) -> Matrix {
    let layout = &p.channel.layout;
    let stride = layout.k as usize * size_of::<f32>() / E::CODE.size();
    let first = first_row as usize * stride + (t.first_column + item.first) as usize;
    Tensor::new(address, stride * layout.v as usize, E::CODE).matrix(
        first,
        rows as usize,
        item.count as usize,
        stride,
        1,
    )
}

/// The W-1 rows before a segment: inputs of other PEs, the initial state, or nothing.
#[inline(always)]
fn before_segment<E: Element>(
    p: &ConvolutionTables,
    t: &ConvolutionTensors,
    item: &ConvolutionItem,
    segment: &ConvolutionSegment,
) -> Matrix {
    if segment.before_lane != NONE {
        lane::<E>(&p.before, p, t, item, segment.before_lane)
    } else {
        state::<E>(&t.initial, t, item, segment.initial, p.width as usize)
    }
}

/// `count` tokens of a segment from `offset` on, which is 0 or at least W-1, with what their convolution needs.
#[inline(always)]
fn run<E: Element>(
    p: &ConvolutionTables,
    t: &ConvolutionTensors,
    item: &ConvolutionItem,
    segment: &ConvolutionSegment,
    (offset, count): (usize, usize),
) -> ConvolutionRun {
    let (width, first, channels) = (p.width as usize, item.first as usize, item.count as usize);
    let before = if offset == 0 {
        before_segment::<E>(p, t, item, segment)
    } else {
        rows::<E>(&t.x, t, item, segment, offset - (width - 1), width - 1)
    };
    let bias = if t.bias.is_present() { t.bias.matrix(first, 1, channels, 0, 1) } else { nothing(E::CODE) };
    ConvolutionRun {
        x: rows::<E>(&t.x, t, item, segment, offset, count),
        before,
        weight: t.weight.matrix(first * width, width, channels, 1, width),
        bias,
        silu: p.silu != 0,
    }
}

/// Waits for the item's halo and copies its channels to `to`, so that the slots are free again. False if a message did not
/// arrive in time.
#[inline(always)]
fn receive<E: Element>(
    wg: &mut Warpgroup<'_>,
    p: &ConvolutionTables,
    port: &Port<'_>,
    (t, item, segment): (&ConvolutionTensors, &ConvolutionItem, &ConvolutionSegment),
    row: u32,
    to: Matrix,
) -> bool {
    for i in 0..segment.sources {
        let source: ConvolutionSource = wg.read(p.sources, (segment.first_source + i) as usize);
        if !port.receive(wg, source.pe, row, 0) {
            return false;
        }
        let address = port.received_address(wg, source.pe, row);
        let from = message_rows::<E>(p, t, item, address, (source.first_row, source.rows));
        wg.copy_rows(to.row_range(source.first_row as usize, source.rows as usize), from);
    }
    let (table, first) = (p.sources, segment.first_source);
    port.finish_reading_part(wg, row, p.parts.into(), segment.sources, |wg, i| {
        wg.read::<ConvolutionSource>(table, (first + i) as usize).pe
    });
    true
}
