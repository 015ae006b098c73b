//! Seeded random problems for tests, `verify` and benchmarks.
//!
//! The same [`Spec`] always gives the same problem. Each tensor has its own random stream, so that two specs that
//! differ in the gate, say, still share q, k and v.

mod shapes;
mod spec;
mod upstream;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal, Uniform};

pub use shapes::shapes;
pub use spec::{BetaKind, Decay, GateKind, Keys, Spec};
pub use upstream::RandomUpstream;

use crate::inputs::{Beta, Gate, Inputs, Op};
use crate::tensor::{Buffer, Dtype, Tensor};

/// A generated problem: the tensors that [`Case::inputs`] borrows.
#[derive(Clone, Debug)]
pub struct Case {
    /// What it was made from.
    pub spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// `g`, or the gate's raw input.
    gate: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    beta: Tensor,
    h0: Option<Tensor>,
}

/// The random stream of each tensor.
#[derive(Clone, Copy)]
enum Stream {
    Q,
    K,
    V,
    Gate,
    Bias,
    Beta,
    State,
    Output,
    FinalState,
}

impl Case {
    /// The inputs of the call.
    pub fn inputs(&self) -> Inputs<'_> {
        let spec = &self.spec;
        let gate = self.gate.view();
        Inputs {
            op: spec.op,
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            gate: match spec.gate {
                GateKind::Given => Gate::Given(gate),
                GateKind::Softplus => {
                    Gate::Softplus { raw: gate, a_log: self.a_log.view(), dt_bias: Some(self.dt_bias.view()) }
                }
                GateKind::LowerBound => Gate::LowerBound {
                    raw: gate,
                    a_log: Some(self.a_log.view()),
                    dt_bias: Some(self.dt_bias.view()),
                    bound: GateKind::BOUND,
                },
            },
            beta: match spec.beta {
                BetaKind::Logits => Beta::Logits { logits: self.beta.view(), factor: 1.0 },
                BetaKind::Logits2 => Beta::Logits { logits: self.beta.view(), factor: 2.0 },
                BetaKind::Standard | BetaKind::Small | BetaKind::UpTo2 => Beta::Given(self.beta.view()),
            },
            scale: None,
            l2norm: spec.l2norm,
            initial_state: self.h0.as_ref().map(Tensor::view),
            state_layout: spec.state_layout,
        }
    }

    /// `[N+1]` offsets of packed sequences.
    pub fn cu_seqlens(&self) -> Option<&[usize]> {
        self.spec.cu_seqlens.as_deref()
    }
}

impl Spec {
    /// Draws the tensors.
    pub fn generate(&self) -> Case {
        let (dtype, rows) = (self.dtype, [self.b, self.t]);
        let tensor = |dtype, inner: &[usize], data: Vec<f64>| Tensor {
            shape: rows.iter().chain(inner).copied().collect(),
            data: Buffer::from_f64(dtype, data),
        };
        let width = self.decay_width();
        let gate_inner: &[usize] = if self.op == Op::Kda { &[self.hv, self.k] } else { &[self.hv] };
        let (dt_bias, gate) = self.gate_and_bias();
        let gate_dtype = if self.gate == GateKind::Given { Dtype::F32 } else { dtype };
        let a_log = (0..self.hv).map(|head| self.strength(head).ln());
        Case {
            q: tensor(dtype, &[self.h, self.k], self.unit_rows(Stream::Q)),
            k: tensor(dtype, &[self.h, self.k], self.unit_rows(Stream::K)),
            v: tensor(dtype, &[self.hv, self.v], normal(self.rng(Stream::V), self.b * self.t * self.hv * self.v)),
            gate: tensor(gate_dtype, gate_inner, gate),
            a_log: Tensor { shape: vec![self.hv], data: Buffer::from_f64(Dtype::F32, a_log) },
            dt_bias: Tensor {
                shape: if self.op == Op::Kda { vec![self.hv, width] } else { vec![self.hv] },
                data: Buffer::from_f64(Dtype::F32, dt_bias),
            },
            beta: tensor(dtype, &[self.hv], self.step_sizes()),
            h0: self.initial_state.then(|| self.states(Stream::State)),
            spec: self.clone(),
        }
    }

    fn rng(&self, stream: Stream) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(stream as u64);
        rng
    }

    /// Channels of the decay per head.
    fn decay_width(&self) -> usize {
        if self.op == Op::Kda { self.k } else { 1 }
    }

    /// Gate strength of a head; no two heads share one, so that mixed-up heads show.
    fn strength(&self, head: usize) -> f64 {
        0.5 + (head as f64 + 1.0) / self.hv as f64
    }

    /// Rows of q or k: unit vectors, or of various lengths if the operation normalises them.
    fn unit_rows(&self, stream: Stream) -> Vec<f64> {
        let mut rng = self.rng(stream);
        let common: Vec<f64> = normal(&mut rng, self.h * self.k);
        let weight = if self.keys == Keys::CommonMean { 1.5 } else { 0.0 };
        let mut rows = normal(&mut rng, self.b * self.t * self.h * self.k);
        for (i, row) in rows.chunks_exact_mut(self.k).enumerate() {
            let common = &common[i % self.h * self.k..][..self.k];
            row.iter_mut().zip(common).for_each(|(x, mean)| *x += weight * mean);
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            let length = if self.l2norm { 1.0 + (i % 7) as f64 } else { 1.0 };
            row.iter_mut().for_each(|x| *x *= length / norm);
        }
        rows
    }

    /// The bias, and `g` or the raw input from which the gate makes it.
    fn gate_and_bias(&self) -> (Vec<f64>, Vec<f64>) {
        let width = self.decay_width();
        let bias: Vec<f64> =
            normal(self.rng(Stream::Bias), self.hv * width).iter().map(|x| f64::from((0.3 * x) as f32)).collect();
        let raw = self.decays().into_iter().enumerate().map(|(i, g)| {
            let a = self.strength(i / width % self.hv);
            let bias = bias[i % bias.len()];
            match self.gate {
                GateKind::Given => g,
                GateKind::Softplus => inverse_softplus(-g / a) - bias,
                GateKind::LowerBound => logit(g / f64::from(GateKind::BOUND)) / a - bias,
            }
        });
        let raw = raw.collect();
        (bias, raw)
    }

    /// The log decays that the gate shall give, `[B,T,HV,width]`.
    fn decays(&self) -> Vec<f64> {
        let mut rng = self.rng(Stream::Gate);
        let (width, burst) = (self.decay_width(), Uniform::new(0.0, 1.0).expect("a range"));
        let mut decays = Vec::with_capacity(self.b * self.t * self.hv * width);
        for token in 0..self.b * self.t {
            for head in 0..self.hv {
                let (is_burst, size): (f64, f64) = (burst.sample(&mut rng), burst.sample(&mut rng));
                // The first token bursts too, so that short sequences have one.
                let burst = self.decay == Decay::Bursty && (token == 0 || is_burst < 1.0 / 24.0);
                for _ in 0..width {
                    let x: f64 = StandardNormal.sample(&mut rng);
                    let g = match self.decay {
                        Decay::None => 0.0,
                        _ if burst => -160.0 * (1.0 - 0.8 * size),
                        Decay::Slow | Decay::Bursty => -0.004 * (0.5 * x).exp(),
                        Decay::Default => -0.1 * (0.7 * x).exp(),
                        Decay::Fast => -3.0 * (0.3 * x).exp(),
                        Decay::AllStrong => -160.0,
                    };
                    let strength = if burst || self.decay == Decay::AllStrong { 1.0 } else { self.strength(head) };
                    decays.push(g * strength);
                }
            }
        }
        decays
    }

    /// beta, or its logits.
    fn step_sizes(&self) -> Vec<f64> {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let draws = normal(self.rng(Stream::Beta), self.b * self.t * self.hv).into_iter();
        draws
            .map(|x| match self.beta {
                BetaKind::Standard => sigmoid(x),
                BetaKind::Small => sigmoid(x - 4.0),
                BetaKind::UpTo2 => 2.0 * sigmoid(x),
                BetaKind::Logits | BetaKind::Logits2 => x,
            })
            .collect()
    }
}

fn normal(rng: impl rand::Rng, len: usize) -> Vec<f64> {
    StandardNormal.sample_iter(rng).take(len).collect()
}

/// The x with `ln(1 + exp(x)) = y`; no decay at all becomes one of about 1e-30.
fn inverse_softplus(y: f64) -> f64 {
    let y = y.max(1e-30);
    y + (-(-y).exp_m1()).ln()
}

/// The x with `sigmoid(x) = y`, for y kept off 0 and 1: decays beyond the bound become ones just short of it.
fn logit(y: f64) -> f64 {
    let y = y.clamp(1e-30, 1.0 - 1e-3);
    (y / (1.0 - y)).ln()
}

#[cfg(test)]
mod tests;
