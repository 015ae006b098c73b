//! What a call returns, and the memory that a caller may give for it.

use super::inputs::{ConvolutionInput, NAMES, Sizes};
use crate::error::InputError;
use crate::op::Report;
use crate::op::out::expect;
use crate::plan::RankPlan;
use crate::tensor::{Dtype, Tensor, TensorViewMut};

/// Results of one convolution.
#[derive(Clone, Debug)]
pub struct ConvolutionOutput<T = Tensor> {
    /// `[B,T,D]` in the type of x.
    pub y: T,
    /// `[N,D,W-1]` in the type of x, the last inputs of each sequence, oldest first; those of a sequence shorter than W-1
    /// begin with what its initial state ends with. There if [`ConvolutionConfig::final_state`](super::ConvolutionConfig::final_state)
    /// asks for it, and only then. Of one PE: a row for each sequence that ends there, in the order of
    /// [`crate::plan::RankPlan::ends`].
    pub final_state: Option<T>,
}

/// Memory that the caller gives for the results of one convolution of a forward call. All of it is written.
pub type ConvolutionOut<'a> = ConvolutionOutput<TensorViewMut<'a>>;

/// What a forward call returns on one PE.
#[derive(Clone, Debug)]
pub struct ConvolutionForward {
    /// One for each input.
    pub outputs: Vec<ConvolutionOutput>,
    /// Counts and times.
    pub report: Report,
}

/// Gradients of one convolution.
#[derive(Clone, Debug)]
pub struct ConvolutionGradients<T = Tensor> {
    /// `[B,T,D]` in the type of x.
    pub dx: T,
    /// f32 `[D,W]`. Of one PE: its tokens' share, to be added up over all PEs.
    pub dweight: T,
    /// f32 `[D]`, if there is a bias. Of one PE: its tokens' share, to be added up over all PEs.
    pub dbias: Option<T>,
    /// f32 `[N,D,W-1]`, if there is an initial state. Of one PE: a row for each sequence that starts there.
    pub d_initial_state: Option<T>,
}

/// Memory that the caller gives for the gradients of one convolution of a backward call. All of it is written.
pub type ConvolutionGradientsOut<'a> = ConvolutionGradients<TensorViewMut<'a>>;

/// What a backward call returns on one PE.
#[derive(Clone, Debug)]
pub struct ConvolutionBackward {
    /// One for each input.
    pub gradients: Vec<ConvolutionGradients>,
    /// Counts and times.
    pub report: Report,
}

/// A result by name, and the shape and type that it must have.
type Wanted<'a, 'b> = (&'static str, Option<&'a TensorViewMut<'b>>, Option<(Vec<usize>, Dtype)>, &'static str);

fn check<'a, 'b: 'a>(wanted: impl IntoIterator<Item = Wanted<'a, 'b>>) -> Result<(), InputError> {
    let one = |(name, found, want, why): Wanted<'_, '_>| {
        expect(name, found, want.as_ref().map(|(shape, dtype)| (&shape[..], *dtype)), why)
    };
    wanted.into_iter().try_for_each(one)
}

impl ConvolutionOutput {
    /// Zeros for the results of a PE's calls.
    pub(super) fn zeros(input: &ConvolutionInput<'_>, sizes: &Sizes, rank: &RankPlan, final_state: bool) -> Self {
        let states = [rank.ends.len(), input.x.shape()[2], sizes.reach()];
        Self {
            y: Tensor::zeros(sizes.dtype, input.x.shape()),
            final_state: final_state.then(|| Tensor::zeros(sizes.dtype, &states)),
        }
    }

    /// The results as memory.
    pub fn view_mut(&mut self) -> ConvolutionOut<'_> {
        ConvolutionOutput { y: self.y.view_mut(), final_state: self.final_state.as_mut().map(Tensor::view_mut) }
    }
}

/// Checks shapes, types and presence of memory for the results of a PE.
pub(super) fn check_outputs(
    out: &[ConvolutionOut<'_>],
    inputs: &[ConvolutionInput<'_>],
    sizes: &Sizes,
    rank: &RankPlan,
    final_state: bool,
) -> Result<(), InputError> {
    for ((out, input), names) in out.iter().zip(inputs).zip(&NAMES) {
        let states = vec![rank.ends.len(), input.x.shape()[2], sizes.reach()];
        let why = "ConvolutionConfig::final_state decides whether final states are returned";
        check([
            (names.y, Some(&out.y), Some((input.x.shape().to_vec(), sizes.dtype)), "y is always computed"),
            (names.final_state, out.final_state.as_ref(), final_state.then_some((states, sizes.dtype)), why),
        ])?;
    }
    Ok(())
}

impl ConvolutionGradients {
    /// Zeros for the gradients of a PE's inputs.
    pub(super) fn zeros(input: &ConvolutionInput<'_>, sizes: &Sizes) -> Self {
        let d = input.x.shape()[2];
        let zeros = |shape: &[usize]| Tensor::zeros(Dtype::F32, shape);
        Self {
            dx: Tensor::zeros(sizes.dtype, input.x.shape()),
            dweight: zeros(&[d, sizes.width]),
            dbias: input.bias.as_ref().map(|_| zeros(&[d])),
            d_initial_state: input.initial_state.as_ref().map(|initial| zeros(initial.shape())),
        }
    }

    /// The gradients as memory.
    pub fn view_mut(&mut self) -> ConvolutionGradientsOut<'_> {
        ConvolutionGradients {
            dx: self.dx.view_mut(),
            dweight: self.dweight.view_mut(),
            dbias: self.dbias.as_mut().map(Tensor::view_mut),
            d_initial_state: self.d_initial_state.as_mut().map(Tensor::view_mut),
        }
    }
}

/// As [`check_outputs`].
pub(super) fn check_gradients(
    out: &[ConvolutionGradientsOut<'_>],
    inputs: &[ConvolutionInput<'_>],
    sizes: &Sizes,
) -> Result<(), InputError> {
    let why = "there is a gradient for each input that there is";
    for ((out, input), names) in out.iter().zip(inputs).zip(&NAMES) {
        let d = input.x.shape()[2];
        let wide = |shape: Vec<usize>| Some((shape, Dtype::F32));
        let initial = input.initial_state.as_ref().and_then(|initial| wide(initial.shape().to_vec()));
        check([
            (names.dx, Some(&out.dx), Some((input.x.shape().to_vec(), sizes.dtype)), why),
            (names.dweight, Some(&out.dweight), wide(vec![d, sizes.width]), why),
            (names.dbias, out.dbias.as_ref(), input.bias.as_ref().and_then(|_| wide(vec![d])), why),
            (names.d_initial, out.d_initial_state.as_ref(), initial, why),
        ])?;
    }
    Ok(())
}

/// The memory by name.
pub(super) fn named_outputs<'a, 'b>(out: &'a [ConvolutionOut<'b>]) -> Vec<(&'static str, &'a TensorViewMut<'b>)> {
    let of_one = |(out, names): (&'a ConvolutionOut<'b>, &super::inputs::Names)| {
        let states = out.final_state.as_ref().map(|states| (names.final_state, states));
        std::iter::once((names.y, &out.y)).chain(states).collect::<Vec<_>>()
    };
    out.iter().zip(&NAMES).flat_map(of_one).collect()
}

/// The memory by name.
pub(super) fn named_gradients<'a, 'b>(
    out: &'a [ConvolutionGradientsOut<'b>],
) -> Vec<(&'static str, &'a TensorViewMut<'b>)> {
    let of_one = |(out, names): (&'a ConvolutionGradientsOut<'b>, &super::inputs::Names)| {
        let optional = [(names.dbias, out.dbias.as_ref()), (names.d_initial, out.d_initial_state.as_ref())];
        let optional = optional.into_iter().filter_map(|(name, x)| Some((name, x?)));
        [(names.dx, &out.dx), (names.dweight, &out.dweight)].into_iter().chain(optional).collect::<Vec<_>>()
    };
    out.iter().zip(&NAMES).flat_map(of_one).collect()
}
