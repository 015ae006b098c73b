//! Inputs of one PE, in the kinds that are measured.

use half::{bf16, f16};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

use super::Setup;
use crate::gradients::Upstream;
use crate::inputs::{Beta, Gate, Inputs, Op, StateLayout};
use crate::tensor::{Buffer, Dtype, Tensor};

/// How fast states forget, with keys and step sizes to match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Gates {
    /// Within a few tokens (KDA: by about exp(-2.5) each; GDN: about exp(-0.8)), with steps of one half: the transition M of
    /// a segment is zero, as it is where inputs are plain random numbers.
    Fast,
    /// By 0.4 % each token, with steps of about 0.02 and keys around a mean: the transition matters.
    Slow,
}

impl std::fmt::Display for Gates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Gates::Fast => "fast",
            Gates::Slow => "slow",
        })
    }
}

/// The bound of KDA's gate.
const BOUND: f64 = -5.0;
/// The log decay about which slow gates lie.
const SLOW: f64 = -0.004;
/// Length of the mean of slow keys, in deviations of a channel.
const MEAN: f64 = 1.5;

/// Bytes of an element of the gate's input.
pub(super) fn gate_dtype(op: Op, dtype: Dtype) -> Dtype {
    if op == Op::Kda { dtype } else { Dtype::F32 }
}

/// One PE's tensors.
pub(super) struct Tensors {
    op: Op,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    beta: Tensor,
    d_o: Tensor,
}

impl Tensors {
    /// The tensors of PE `rank` for `tokens` tokens. KDA has the raw input of a gate with a lower bound, GDN the decay itself.
    pub fn draw(setup: &Setup, gates: Gates, tokens: usize, rank: usize) -> Self {
        let Setup { op, h, hv, k, v, dtype, backward, .. } = *setup;
        // A stream of random numbers for each PE and tensor.
        let seed = |tensor: u64| (rank as u64) << 8 | tensor;
        let tensor = |dtype, inner: &[usize], stream: u64, value: &(dyn Fn(usize, f64) -> f64 + Sync)| {
            let shape: Vec<usize> = [1, tokens].iter().chain(inner).copied().collect();
            Tensor { data: draw(dtype, shape.iter().product(), seed(stream), value), shape }
        };
        let slow = gates == Gates::Slow;
        // The same on all PEs.
        let mean = draw(Dtype::F32, h * k, u64::MAX, &|_, x| MEAN * x).to_f64();
        let gate_shape: &[usize] = if op == Op::Kda { &[hv, k] } else { &[hv] };
        let slow_input = logit(SLOW / BOUND);
        Self {
            op,
            q: tensor(dtype, &[h, k], 0, &|_, x| x),
            k: tensor(dtype, &[h, k], 1, &|i, x| if slow { x + mean[i % mean.len()] } else { x }),
            v: tensor(dtype, &[hv, v], 2, &|_, x| x),
            gate: tensor(gate_dtype(op, dtype), gate_shape, 3, &|_, x| match (op, gates) {
                (Op::Kda, Gates::Fast) => 0.1 * x,
                (Op::Kda, Gates::Slow) => slow_input + 0.5 * x,
                (Op::Gdn, Gates::Fast) => -(-x).exp().ln_1p(),
                (Op::Gdn, Gates::Slow) => SLOW * (0.5 * x).exp(),
            }),
            a_log: Tensor::zeros(Dtype::F32, &[hv]),
            dt_bias: Tensor::zeros(Dtype::F32, &[hv, k]),
            beta: tensor(dtype, &[hv], 4, &|_, x| sigmoid(if slow { x - 4.0 } else { x })),
            d_o: tensor(dtype, &[if backward { hv } else { 0 }, v], 5, &|_, x| x),
        }
    }

    /// What the operation gets.
    pub fn inputs(&self) -> Inputs<'_> {
        let gate = self.gate.view();
        Inputs {
            op: self.op,
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            gate: match self.op {
                Op::Kda => Gate::LowerBound {
                    raw: gate,
                    a_log: Some(self.a_log.view()),
                    dt_bias: Some(self.dt_bias.view()),
                    bound: BOUND as f32,
                },
                Op::Gdn => Gate::Given(gate),
            },
            beta: Beta::Given(self.beta.view()),
            scale: None,
            l2norm: true,
            initial_state: None,
            state_layout: StateLayout::default(),
        }
    }

    /// What its backward pass gets.
    pub fn upstream(&self) -> Upstream<'_> {
        Upstream { d_o: self.d_o.view(), d_final_state: None }
    }
}

/// `len` values, each made of its place and a standard normal number.
fn draw(dtype: Dtype, len: usize, seed: u64, value: &(dyn Fn(usize, f64) -> f64 + Sync)) -> Buffer {
    match dtype {
        Dtype::F32 => Buffer::F32(filled(len, seed, |i, x| value(i, x) as f32)),
        Dtype::Bf16 => Buffer::Bf16(filled(len, seed, |i, x| bf16::from_f64(value(i, x)))),
        Dtype::F16 => Buffer::F16(filled(len, seed, |i, x| f16::from_f64(value(i, x)))),
    }
}

/// On all cores: inputs of the sizes that are measured have hundreds of millions of elements.
fn filled<T: Copy + Default + Send>(len: usize, seed: u64, value: impl Fn(usize, f64) -> T + Sync) -> Vec<T> {
    const PIECE: usize = 1 << 16;
    let mut all = vec![T::default(); len];
    all.par_chunks_mut(PIECE).enumerate().for_each(|(piece, part)| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(piece as u64);
        for (i, x) in part.iter_mut().enumerate() {
            *x = value(piece * PIECE + i, StandardNormal.sample(&mut rng));
        }
    });
    all
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn logit(y: f64) -> f64 {
    (y / (1.0 - y)).ln()
}
