//! The short convolution over time: depthwise, causal, W taps, with everything in f64.

use std::ops::RangeInclusive;

use super::activation::sigmoid;
use super::problem::sequences;
use super::{ProblemError, Sequence};
use crate::error::InputError;
use crate::tensor::TensorView;

/// Numbers of taps.
const WIDTHS: RangeInclusive<usize> = 2..=8;

/// What follows the convolution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// `z sigmoid(z)`.
    Silu,
}

/// Per channel d and token t of a sequence,
/// `y_t = act( sum_w weight[d,w] x[t - (W-1) + w] + bias[d] )`: tap W-1 is the token itself. What lies before the sequence is
/// its initial state, never another sequence.
#[derive(Clone, Debug)]
pub struct Convolution<'a> {
    /// `[B,T,D]`.
    pub x: TensorView<'a>,
    /// `[D,W]`, W from 2 to 8.
    pub weight: TensorView<'a>,
    /// `[D]`; absent means zero.
    pub bias: Option<TensorView<'a>>,
    /// What follows.
    pub activation: Activation,
    /// `[N,D,W-1]`, the inputs just before each sequence, oldest first; absent means zero.
    pub initial_state: Option<TensorView<'a>>,
    /// `[N+1]` offsets of packed sequences, with B = 1; without them every batch row is a sequence.
    pub cu_seqlens: Option<&'a [usize]>,
}

/// The tensors do not describe a convolution.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum ConvolutionError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Problem(#[from] ProblemError),
    #[error("weight has {found} taps per channel; it must have {} to {}", WIDTHS.start(), WIDTHS.end())]
    Width { found: usize },
    #[error("{name} has {found} elements, it needs {want}: one for each element of what it is the gradient of")]
    Gradient { name: &'static str, found: usize, want: usize },
}

/// What the convolution returns.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvolutionOutputs {
    /// `[B,T,D]`.
    pub y: Vec<f64>,
    /// `[N,D,W-1]`, the last inputs of each sequence, oldest first. Those of a sequence shorter than W-1 begin with what its
    /// initial state ends with.
    pub final_state: Vec<f64>,
}

/// Gradients with respect to everything that a [`Convolution`] holds, in the shapes of these.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvolutionGradients {
    /// `[B,T,D]`.
    pub dx: Vec<f64>,
    /// `[D,W]`.
    pub dweight: Vec<f64>,
    /// `[D]`, if there is a bias.
    pub dbias: Option<Vec<f64>>,
    /// `[N,D,W-1]`, if there is an initial state.
    pub d_initial_state: Option<Vec<f64>>,
}

/// The outputs and the final states.
///
/// # Errors
/// [`ConvolutionError`], if the tensors do not fit together.
pub fn convolution(c: &Convolution<'_>) -> Result<ConvolutionOutputs, ConvolutionError> {
    let taps = Taps::new(c)?;
    let mut y = vec![0.0; taps.x.len()];
    let mut final_state = Vec::with_capacity(taps.sequences.len() * taps.d * (taps.w - 1));
    for (n, sequence) in taps.sequences.iter().enumerate() {
        for token in sequence.tokens() {
            for d in 0..taps.d {
                let z = taps.before_activation(n, token, d);
                y[token * taps.d + d] = match c.activation {
                    Activation::None => z,
                    Activation::Silu => z * sigmoid(z),
                };
            }
        }
        for d in 0..taps.d {
            final_state.extend((1..taps.w).map(|back| taps.input(taps.place(n, sequence.end + back - 1, 0, d))));
        }
    }
    Ok(ConvolutionOutputs { y, final_state })
}

/// Gradients of `sum(y * dy) + sum(final_state * d_final_state)`; `dy` is `[B,T,D]`, `d_final_state` `[N,D,W-1]`.
///
/// # Errors
/// [`ConvolutionError`], if the tensors do not fit together.
pub fn convolution_backward(
    c: &Convolution<'_>,
    dy: &[f64],
    d_final_state: Option<&[f64]>,
) -> Result<ConvolutionGradients, ConvolutionError> {
    let taps = Taps::new(c)?;
    let (d_all, w_all) = (taps.d, taps.w);
    let states = taps.sequences.len() * d_all * (w_all - 1);
    expect_len("dy", dy.len(), taps.x.len())?;
    expect_len("d_final_state", d_final_state.map_or(states, <[f64]>::len), states)?;

    let mut dx = vec![0.0; taps.x.len()];
    let mut dweight = vec![0.0; d_all * w_all];
    let mut dbias = vec![0.0; d_all];
    let mut d_initial = vec![0.0; states];
    for (n, sequence) in taps.sequences.iter().enumerate() {
        let mut reach = |place: Place, gradient: f64| match place {
            Place::Token(at) => dx[at] += gradient,
            Place::State(at) => d_initial[at] += gradient,
        };
        for token in sequence.tokens() {
            for d in 0..d_all {
                let slope = match c.activation {
                    Activation::None => 1.0,
                    Activation::Silu => {
                        let z = taps.before_activation(n, token, d);
                        sigmoid(z) * (1.0 + z * sigmoid(-z))
                    }
                };
                let dz = slope * dy[token * d_all + d];
                dbias[d] += dz;
                for w in 0..w_all {
                    let place = taps.place(n, token, w, d);
                    dweight[d * w_all + w] += dz * taps.input(place);
                    reach(place, dz * taps.weight[d * w_all + w]);
                }
            }
        }
        if let Some(gradients) = d_final_state {
            for d in 0..d_all {
                for back in 1..w_all {
                    let place = taps.place(n, sequence.end + back - 1, 0, d);
                    reach(place, gradients[(n * d_all + d) * (w_all - 1) + back - 1]);
                }
            }
        }
    }
    Ok(ConvolutionGradients {
        dx,
        dweight,
        dbias: c.bias.is_some().then_some(dbias),
        d_initial_state: c.initial_state.is_some().then_some(d_initial),
    })
}

/// Where an input of a sequence is kept.
#[derive(Clone, Copy)]
enum Place {
    /// Index into x.
    Token(usize),
    /// Index into the initial states.
    State(usize),
}

/// The tensors, checked and widened.
struct Taps {
    sequences: Vec<Sequence>,
    d: usize,
    w: usize,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    initial: Option<Vec<f64>>,
}

impl Taps {
    fn new(c: &Convolution<'_>) -> Result<Self, ConvolutionError> {
        let &[b, t, d] = c.x.shape() else {
            return Err(InputError::Rank { name: "x", shape: c.x.shape().to_vec(), want: 3 }.into());
        };
        let &[weight_d, w] = c.weight.shape() else {
            return Err(InputError::Rank { name: "weight", shape: c.weight.shape().to_vec(), want: 2 }.into());
        };
        if !WIDTHS.contains(&w) {
            return Err(ConvolutionError::Width { found: w });
        }
        let expect = |name, shape: &[usize], want: &[usize]| match shape == want {
            true => Ok(()),
            false => Err(InputError::Shape { name, shape: shape.to_vec(), want: want.to_vec() }),
        };
        expect("weight", &[weight_d, w], &[d, w])?;
        if let Some(bias) = &c.bias {
            expect("bias", bias.shape(), &[d])?;
        }
        let sequences = sequences(b, t, c.cu_seqlens)?;
        if let Some(initial) = &c.initial_state {
            expect("initial_state", initial.shape(), &[sequences.len(), d, w - 1])?;
        }
        Ok(Self {
            sequences,
            d,
            w,
            x: c.x.to_f64(),
            weight: c.weight.to_f64(),
            bias: c.bias.as_ref().map_or_else(|| vec![0.0; d], TensorView::to_f64),
            initial: c.initial_state.as_ref().map(TensorView::to_f64),
        })
    }

    /// What tap `w` of `token` sees in channel `d` of sequence `n`.
    fn place(&self, n: usize, token: usize, w: usize, d: usize) -> Place {
        // Position on the state followed by the sequence: the state has W-1 places, so the tap's offset cancels.
        let at = token + w - self.sequences[n].start;
        match at.checked_sub(self.w - 1) {
            Some(token) => Place::Token((self.sequences[n].start + token) * self.d + d),
            None => Place::State((n * self.d + d) * (self.w - 1) + at),
        }
    }

    fn input(&self, place: Place) -> f64 {
        match place {
            Place::Token(at) => self.x[at],
            Place::State(at) => self.initial.as_ref().map_or(0.0, |initial| initial[at]),
        }
    }

    fn before_activation(&self, n: usize, token: usize, d: usize) -> f64 {
        let tap = |w| self.weight[d * self.w + w] * self.input(self.place(n, token, w, d));
        self.bias[d] + (0..self.w).map(tap).sum::<f64>()
    }
}

fn expect_len(name: &'static str, found: usize, want: usize) -> Result<(), ConvolutionError> {
    if found == want { Ok(()) } else { Err(ConvolutionError::Gradient { name, found, want }) }
}

#[cfg(test)]
mod tests;
