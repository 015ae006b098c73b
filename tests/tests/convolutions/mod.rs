//! Random short convolutions, and what the f64 reference says about them.
#![allow(dead_code)] // every test file uses its own part

use deltalink::compare::{Regime, mismatch, tolerance};
use deltalink::op::convolution::whole::{WholeConvolution, WholeConvolutionBackward, backward, forward};
use deltalink::op::convolution::{
    Activation, ConvolutionConfig, ConvolutionGradients, ConvolutionInput, ConvolutionOutput, ConvolutionUpstream,
};
use deltalink::plan::{Cuts, Plan};
use deltalink::reference;
use deltalink::tensor::{Buffer, Dtype, Tensor};
use deltalink::world::WorldOptions;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// What a random call is like.
#[derive(Clone, Debug)]
pub struct Spec {
    pub b: usize,
    pub t: usize,
    pub cu_seqlens: Option<Vec<usize>>,
    pub channels: Vec<usize>,
    pub width: usize,
    pub dtype: Dtype,
    /// Weights, bias and gradients of final states in f32 whatever `dtype` is.
    pub wide_parameters: bool,
    pub silu: bool,
    pub bias: bool,
    pub initial_state: bool,
    pub final_gradient: bool,
    pub seed: u64,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            b: 1,
            t: 40,
            cu_seqlens: None,
            channels: vec![24, 8, 40],
            width: 4,
            dtype: Dtype::F32,
            wide_parameters: true,
            silu: true,
            bias: true,
            initial_state: true,
            final_gradient: true,
            seed: 1,
        }
    }
}

/// Tensors of one convolution.
pub struct Tensors {
    pub x: Tensor,
    pub weight: Tensor,
    pub bias: Option<Tensor>,
    pub initial: Option<Tensor>,
    pub dy: Tensor,
    pub d_final: Option<Tensor>,
}

pub struct Case {
    pub spec: Spec,
    pub tensors: Vec<Tensors>,
}

impl Spec {
    pub fn packed(cu_seqlens: &[usize]) -> Self {
        Self { t: *cu_seqlens.last().unwrap(), cu_seqlens: Some(cu_seqlens.to_vec()), ..Self::default() }
    }

    pub fn activation(&self) -> Activation {
        if self.silu { Activation::Silu } else { Activation::None }
    }

    pub fn sequences(&self) -> usize {
        self.cu_seqlens.as_ref().map_or(self.b, |cu| cu.len() - 1)
    }

    pub fn plan(&self, cuts: &Cuts) -> Plan {
        match &self.cu_seqlens {
            Some(cu) => Plan::packed(cu, cuts).unwrap(),
            None => Plan::batch(self.b, self.t, cuts).unwrap(),
        }
    }

    pub fn generate(&self) -> Case {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let mut random = |dtype: Dtype, shape: &[usize]| {
            let len = shape.iter().product();
            let values: Vec<f64> = (0..len).map(|_| rng.random_range(-1.5..1.5)).collect();
            Tensor { shape: shape.to_vec(), data: Buffer::from_f64(dtype, values) }
        };
        let parameters = if self.wide_parameters { Dtype::F32 } else { self.dtype };
        let (n, reach) = (self.sequences(), self.width - 1);
        let tensors = self.channels.iter().map(|&d| Tensors {
            x: random(self.dtype, &[self.b, self.t, d]),
            weight: random(parameters, &[d, self.width]),
            bias: self.bias.then(|| random(parameters, &[d])),
            initial: self.initial_state.then(|| random(self.dtype, &[n, d, reach])),
            dy: random(self.dtype, &[self.b, self.t, d]),
            d_final: self.final_gradient.then(|| random(parameters, &[n, d, reach])),
        });
        Case { tensors: tensors.collect(), spec: self.clone() }
    }
}

impl Tensors {
    pub fn input(&self) -> ConvolutionInput<'_> {
        ConvolutionInput {
            x: self.x.view(),
            weight: self.weight.view(),
            bias: self.bias.as_ref().map(Tensor::view),
            initial_state: self.initial.as_ref().map(Tensor::view),
        }
    }

    pub fn upstream(&self) -> ConvolutionUpstream<'_> {
        ConvolutionUpstream { dy: self.dy.view(), d_final_state: self.d_final.as_ref().map(Tensor::view) }
    }
}

/// A call with all results.
pub struct Results {
    pub forward: WholeConvolution,
    pub backward: WholeConvolutionBackward,
}

impl Case {
    pub fn inputs(&self) -> Vec<ConvolutionInput<'_>> {
        self.tensors.iter().map(Tensors::input).collect()
    }

    pub fn upstream(&self) -> Vec<ConvolutionUpstream<'_>> {
        self.tensors.iter().map(Tensors::upstream).collect()
    }

    #[track_caller]
    pub fn run(&self, plan: &Plan, config: &ConvolutionConfig) -> Results {
        let (inputs, act, options) = (self.inputs(), self.spec.activation(), WorldOptions::default());
        let failed = |error| -> ! { panic!("{:?}, cuts {:?}: {error}", self.spec, plan.cuts) };
        let outputs = forward(plan, &inputs, act, config, &options).unwrap_or_else(|error| failed(error));
        let gradients = backward(plan, &inputs, act, &self.upstream(), config, &options);
        Results { forward: outputs, backward: gradients.unwrap_or_else(|error| failed(error)) }
    }

    /// Holds everything against the f64 reference.
    #[track_caller]
    pub fn check(&self, plan: &Plan, results: &Results) {
        for (i, tensors) in self.tensors.iter().enumerate() {
            let input = tensors.input();
            let problem = reference::Convolution {
                x: input.x,
                weight: input.weight,
                bias: input.bias,
                activation: self.spec.activation(),
                initial_state: input.initial_state,
                cu_seqlens: self.spec.cu_seqlens.as_deref(),
            };
            let outputs = reference::convolution(&problem).unwrap();
            let d_final = tensors.d_final.as_ref().map(|states| states.data.to_f64());
            let gradients =
                reference::convolution_backward(&problem, &tensors.dy.data.to_f64(), d_final.as_deref()).unwrap();
            let check = |name: &str, found: &Tensor, expected: &[f64], tolerance: f64| {
                let found_values = found.data.to_f64();
                let account = mismatch(name, &found.shape, &found_values, expected, tolerance);
                assert!(account.is_none(), "{:?}, cuts {:?}, {i}: {}", self.spec, plan.cuts, account.unwrap());
            };
            // What is returned in f32 is not rounded to the tensors' type; states are copies.
            let rounded = tolerance(self.spec.dtype, Regime::Ordinary).min(if self.spec.dtype == Dtype::F32 {
                1e-6
            } else {
                1.0
            });
            let ConvolutionOutput { y, final_state } = &results.forward.outputs[i];
            check("y", y, &outputs.y, rounded);
            check("final_state", final_state.as_ref().unwrap(), &outputs.final_state, 0.0);
            let ConvolutionGradients { dx, dweight, dbias, d_initial_state } = &results.backward.gradients[i];
            check("dx", dx, &gradients.dx, rounded);
            check("dweight", dweight, &gradients.dweight, 1e-5);
            assert_eq!(dbias.is_some(), self.spec.bias);
            assert_eq!(d_initial_state.is_some(), self.spec.initial_state);
            if let (Some(found), Some(expected)) = (dbias, &gradients.dbias) {
                check("dbias", found, expected, 1e-5);
            }
            if let (Some(found), Some(expected)) = (d_initial_state, &gradients.d_initial_state) {
                check("d_initial_state", found, expected, 1e-6);
            }
        }
    }

    /// Requires the same bits of everything that is not a sum over tokens.
    #[track_caller]
    pub fn check_bitwise(&self, plan: &Plan, results: &Results, one: &Results) {
        for (i, (found, want)) in results.forward.outputs.iter().zip(&one.forward.outputs).enumerate() {
            let label = format!("{:?}, cuts {:?}, {i}", self.spec, plan.cuts);
            assert!(same_bits(&found.y, &want.y), "{label}: y");
            assert_eq!(found.final_state, want.final_state, "{label}: final_state");
            let (found, want) = (&results.backward.gradients[i], &one.backward.gradients[i]);
            assert!(same_bits(&found.dx, &want.dx), "{label}: dx");
            assert_eq!(found.d_initial_state, want.d_initial_state, "{label}: d_initial_state");
        }
    }
}

pub fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    a.shape == b.shape && a.data.bytes() == b.data.bytes()
}
