//! What a call gets, and whether it fits together.

use std::ops::RangeInclusive;

use super::ShortConvolutionError;
use crate::error::InputError;
use crate::inputs::{first, unravel};
use crate::plan::RankPlan;
use crate::tensor::{Dtype, TensorView};

/// Numbers of taps.
pub const WIDTHS: RangeInclusive<usize> = 2..=8;

pub use kernels_gpu::convolution::MAX_CONVOLUTIONS;

/// One convolution of a call: of the whole batch, or of what one PE holds of it.
#[derive(Clone, Debug)]
pub struct ConvolutionInput<'a> {
    /// `[B,T,D]`; B and T are the same for all convolutions of a call, D need not be.
    pub x: TensorView<'a>,
    /// `[D,W]` in the type of x or f32; tap W-1 is the token itself. W is the same for all convolutions of a call.
    pub weight: TensorView<'a>,
    /// `[D]` in the type of x or f32; absent means zero.
    pub bias: Option<TensorView<'a>>,
    /// `[N,D,W-1]` in the type of x, the inputs just before each sequence, oldest first; absent means zero.
    /// On a PE of a context-parallel group: one row for each sequence that starts there.
    pub initial_state: Option<TensorView<'a>>,
}

/// Upstream gradients of one convolution: of a scalar loss L with respect to its results.
#[derive(Clone, Debug)]
pub struct ConvolutionUpstream<'a> {
    /// dL/dy, `[B,T,D]` in the type of x.
    pub dy: TensorView<'a>,
    /// dL/d final state, `[N,D,W-1]` in the type of x or f32; absent means zero.
    /// On a PE of a context-parallel group: one row for each sequence that ends there.
    pub d_final_state: Option<TensorView<'a>>,
}

/// Names of tensors in messages, by convolution.
pub(super) struct Names {
    x: &'static str,
    weight: &'static str,
    bias: &'static str,
    initial: &'static str,
    dy: &'static str,
    d_final: &'static str,
    pub y: &'static str,
    pub final_state: &'static str,
    pub dx: &'static str,
    pub dweight: &'static str,
    pub dbias: &'static str,
    pub d_initial: &'static str,
}

macro_rules! names {
    ($($i:literal)*) => {
        [$(Names {
            x: concat!("x of convolution ", $i),
            weight: concat!("weight of convolution ", $i),
            bias: concat!("bias of convolution ", $i),
            initial: concat!("initial_state of convolution ", $i),
            dy: concat!("dy of convolution ", $i),
            d_final: concat!("d_final_state of convolution ", $i),
            y: concat!("y of convolution ", $i),
            final_state: concat!("final_state of convolution ", $i),
            dx: concat!("dx of convolution ", $i),
            dweight: concat!("dweight of convolution ", $i),
            dbias: concat!("dbias of convolution ", $i),
            d_initial: concat!("d_initial_state of convolution ", $i),
        }),*]
    };
}

pub(super) const NAMES: [Names; MAX_CONVOLUTIONS] = names!(0 1 2);

/// Sizes of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub b: usize,
    pub t: usize,
    /// D of each convolution.
    pub channels: Vec<usize>,
    /// W.
    pub width: usize,
    pub dtype: Dtype,
}

impl Sizes {
    /// W - 1: how far a token sees.
    pub fn reach(&self) -> usize {
        self.width - 1
    }

    /// Channels of all convolutions together.
    pub fn columns(&self) -> usize {
        self.channels.iter().sum()
    }
}

fn expect_shape(name: &'static str, x: &TensorView<'_>, want: &[usize]) -> Result<(), InputError> {
    if x.shape() == want {
        return Ok(());
    }
    Err(InputError::Shape { name, shape: x.shape().to_vec(), want: want.to_vec() })
}

fn expect_dtype(name: &'static str, x: &TensorView<'_>, dtype: Dtype, or_f32: bool) -> Result<(), InputError> {
    if x.dtype() == dtype || or_f32 && x.dtype() == Dtype::F32 {
        return Ok(());
    }
    let want = if or_f32 && dtype != Dtype::F32 { format!("{dtype}, as x has, or f32") } else { dtype.to_string() };
    Err(InputError::Dtype { name, found: x.dtype(), want })
}

fn expect_rows(
    name: &'static str,
    x: &TensorView<'_>,
    [rows, d, reach]: [usize; 3],
    what: &'static str,
) -> Result<(), InputError> {
    let &[found, ..] = x.shape() else {
        return Err(InputError::Rank { name, shape: x.shape().to_vec(), want: 3 });
    };
    expect_shape(name, x, &[found, d, reach])?;
    if found == rows { Ok(()) } else { Err(InputError::StateRows { name, found, want: rows, what }) }
}

fn expect_finite(name: &'static str, x: &TensorView<'_>) -> Result<(), InputError> {
    match first(x, |y| !y.is_finite()) {
        Some(at) => Err(InputError::NonFinite { name, index: unravel(at, x.shape()), value: x.get(at) }),
        None => Ok(()),
    }
}

/// Checks the shapes and types of a call in which `starts` sequences start.
pub(super) fn check_inputs(
    inputs: &[ConvolutionInput<'_>],
    starts: usize,
    what: &'static str,
) -> Result<Sizes, ShortConvolutionError> {
    if !(1..=MAX_CONVOLUTIONS).contains(&inputs.len()) {
        return Err(ShortConvolutionError::Count { found: inputs.len() });
    }
    let mut sizes = Sizes { b: 0, t: 0, channels: Vec::new(), width: 0, dtype: inputs[0].x.dtype() };
    for (input, names) in inputs.iter().zip(&NAMES) {
        let &[b, t, d] = input.x.shape() else {
            return Err(InputError::Rank { name: names.x, shape: input.x.shape().to_vec(), want: 3 }.into());
        };
        let &[_, width] = input.weight.shape() else {
            return Err(InputError::Rank { name: names.weight, shape: input.weight.shape().to_vec(), want: 2 }.into());
        };
        if d == 0 {
            return Err(ShortConvolutionError::NoChannels { name: names.x });
        }
        if !WIDTHS.contains(&width) {
            return Err(ShortConvolutionError::Width { name: names.weight, found: width });
        }
        if sizes.channels.is_empty() {
            (sizes.b, sizes.t, sizes.width) = (b, t, width);
        }
        let dtype = sizes.dtype;
        expect_shape(names.x, &input.x, &[sizes.b, sizes.t, d])?;
        expect_dtype(names.x, &input.x, dtype, false)?;
        expect_shape(names.weight, &input.weight, &[d, sizes.width])?;
        expect_dtype(names.weight, &input.weight, dtype, true)?;
        if let Some(bias) = &input.bias {
            expect_shape(names.bias, bias, &[d])?;
            expect_dtype(names.bias, bias, dtype, true)?;
        }
        if let Some(initial) = &input.initial_state {
            expect_rows(names.initial, initial, [starts, d, width - 1], what)?;
            expect_dtype(names.initial, initial, dtype, false)?;
        }
        sizes.channels.push(d);
    }
    Ok(sizes)
}

/// Checks that a PE's share is what the plan gives it.
pub(super) fn check_share(inputs: &[ConvolutionInput<'_>], rank: &RankPlan) -> Result<Sizes, ShortConvolutionError> {
    let sizes = check_inputs(inputs, rank.starts.len(), "that start on this PE")?;
    if (sizes.b, sizes.t) != (rank.batch, rank.tokens) {
        let (want_b, want_t) = (rank.batch, rank.tokens);
        return Err(InputError::Tokens { b: sizes.b, t: sizes.t, want_b, want_t }.into());
    }
    Ok(sizes)
}

/// Checks upstream gradients of a call with `ends` sequences that end.
pub(super) fn check_upstream(
    upstream: &[ConvolutionUpstream<'_>],
    sizes: &Sizes,
    ends: usize,
    what: &'static str,
) -> Result<(), ShortConvolutionError> {
    let (found, want) = (upstream.len(), sizes.channels.len());
    if found != want {
        return Err(ShortConvolutionError::Upstream { found, want });
    }
    for ((upstream, &d), names) in upstream.iter().zip(&sizes.channels).zip(&NAMES) {
        expect_shape(names.dy, &upstream.dy, &[sizes.b, sizes.t, d])?;
        expect_dtype(names.dy, &upstream.dy, sizes.dtype, false)?;
        if let Some(d_final) = &upstream.d_final_state {
            expect_rows(names.d_final, d_final, [ends, d, sizes.reach()], what)?;
            expect_dtype(names.d_final, d_final, sizes.dtype, true)?;
        }
    }
    Ok(())
}

/// All tensors that a call reads, by name.
pub(super) fn tensors<'a, 'b>(
    inputs: &'a [ConvolutionInput<'b>],
    upstream: &'a [ConvolutionUpstream<'b>],
) -> Vec<(&'static str, &'a TensorView<'b>)> {
    let mut all = Vec::with_capacity(4 * inputs.len() + 2 * upstream.len());
    for (input, names) in inputs.iter().zip(&NAMES) {
        all.extend([(names.x, &input.x), (names.weight, &input.weight)]);
        all.extend(input.bias.as_ref().map(|bias| (names.bias, bias)));
        all.extend(input.initial_state.as_ref().map(|initial| (names.initial, initial)));
    }
    for (upstream, names) in upstream.iter().zip(&NAMES) {
        all.push((names.dy, &upstream.dy));
        all.extend(upstream.d_final_state.as_ref().map(|d_final| (names.d_final, d_final)));
    }
    all
}

/// Checks that all values of tensors on the host are finite.
pub(super) fn check_values(
    inputs: &[ConvolutionInput<'_>],
    upstream: &[ConvolutionUpstream<'_>],
) -> Result<(), InputError> {
    tensors(inputs, upstream).into_iter().try_for_each(|(name, x)| expect_finite(name, x))
}

/// Checks that there is memory for the results of each of `want` convolutions.
pub(super) fn check_count(found: usize, want: usize) -> Result<(), ShortConvolutionError> {
    if found == want { Ok(()) } else { Err(ShortConvolutionError::Results { found, want }) }
}
