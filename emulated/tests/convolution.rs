//! The short convolution as GPUs run it, on emulated GPUs: outputs, states and gradients of several PEs against the CPU back end on one,
//! with tensors in place and calls that are enqueued.

use cuda_std::emulated::{Order, Schedule, Timing};
use deltalink::compare::Error;
use deltalink::exec::{ExecError, Executor};
use deltalink::op::convolution::whole::{Share, UpstreamShare, backward, forward};
use deltalink::op::convolution::{
    Activation, ConvolutionConfig, ConvolutionGradients, ConvolutionInput, ConvolutionOutput, ConvolutionUpstream,
    ShortConvolution, ShortConvolutionError,
};
use deltalink::plan::{Cuts, Plan};
use deltalink::tensor::{Buffer, Dtype, Tensor};
use deltalink::world::{WorldOptions, run_threads};
use deltalink_emulated::Emulated;

const SILU: Activation = Activation::Silu;
const OFFSETS: [usize; 4] = [0, 2, 9, 40];
const CHANNELS: [usize; 2] = [130, 5];
const TAPS: usize = 4;

/// Some values without a pattern.
fn tensor(dtype: Dtype, shape: &[usize], seed: usize) -> Tensor {
    let value = |i: usize| ((i * 7919 + seed * 104_729) % 1000) as f64 / 500.0 - 1.0;
    Tensor { shape: shape.to_vec(), data: Buffer::from_f64(dtype, (0..shape.iter().product()).map(value)) }
}

/// x, weight, bias, initial state, dy, gradient of the final state.
fn tensors(dtype: Dtype) -> Vec<[Tensor; 6]> {
    let (n, tokens) = (OFFSETS.len() - 1, OFFSETS[OFFSETS.len() - 1]);
    let of = |(i, d): (usize, usize)| {
        [
            tensor(dtype, &[1, tokens, d], i),
            tensor(Dtype::F32, &[d, TAPS], i + 2),
            tensor(Dtype::F32, &[d], i + 4),
            tensor(dtype, &[n, d, TAPS - 1], i + 6),
            tensor(dtype, &[1, tokens, d], i + 8),
            tensor(Dtype::F32, &[n, d, TAPS - 1], i + 10),
        ]
    };
    CHANNELS.into_iter().enumerate().map(of).collect()
}

fn input([x, weight, bias, initial, ..]: &[Tensor; 6]) -> ConvolutionInput<'_> {
    let (bias, initial_state) = (Some(bias.view()), Some(initial.view()));
    ConvolutionInput { x: x.view(), weight: weight.view(), bias, initial_state }
}

fn upstream([.., dy, d_final]: &[Tensor; 6]) -> ConvolutionUpstream<'_> {
    ConvolutionUpstream { dy: dy.view(), d_final_state: Some(d_final.view()) }
}

/// The tokens that a rank holds of a tensor `[1, T, D]`.
fn tokens(whole: &Tensor, plan: &Plan, rank: usize) -> Vec<f64> {
    let d = whole.shape[2];
    whole.data.to_f64()[plan.cuts[rank] * d..plan.cuts[rank + 1] * d].to_vec()
}

/// Rows of those sequences of a tensor `[N, D, W-1]`.
fn rows(whole: &Tensor, sequences: &[usize]) -> Vec<f64> {
    let (row, values) = (whole.shape[1] * whole.shape[2], whole.data.to_f64());
    sequences.iter().flat_map(|&i| values[i * row..][..row].to_vec()).collect()
}

#[track_caller]
fn close(found: &Tensor, want: &[f64], limit: f64, what: &str) {
    let distance = Error::of(&found.data.to_f64(), want).rel_rms;
    assert!(want.is_empty() || distance <= limit, "{what}: {distance:e}");
}

type PeResult = (Vec<ConvolutionOutput>, Vec<ConvolutionGradients>);

/// Three rounds of enqueued calls, of which the last one's results are returned.
fn on_pe<X: Executor>(
    mut op: ShortConvolution<'_, X>,
    plan: &Plan,
    rank: usize,
    tensors: &[[Tensor; 6]],
) -> Result<PeResult, ShortConvolutionError> {
    let whole: Vec<_> = tensors.iter().map(input).collect();
    let shares: Vec<_> = whole.iter().map(|input| Share::new(plan, rank, input)).collect();
    let inputs: Vec<_> = shares.iter().zip(&whole).map(|(share, whole)| share.input(whole)).collect();
    let shares: Vec<_> = tensors.iter().map(|t| UpstreamShare::new(plan, rank, &upstream(t))).collect();
    let upstream: Vec<_> = shares.iter().map(UpstreamShare::upstream).collect();
    let (forward, saved) = op.forward_saving(plan, &inputs, SILU)?;
    let backward = op.backward(plan, &inputs, SILU, &saved, &upstream)?;
    op.release(saved);
    let (mut outputs, mut gradients) = (forward.outputs, backward.gradients);
    for _ in 0..2 {
        let mut out: Vec<_> = outputs.iter_mut().map(ConvolutionOutput::view_mut).collect();
        let (_, saved) = op.enqueue_forward_saving(plan, &inputs, SILU, &mut out)?;
        let mut out: Vec<_> = gradients.iter_mut().map(ConvolutionGradients::view_mut).collect();
        let pending = op.enqueue_backward(plan, &inputs, SILU, &saved, &upstream, &mut out)?;
        op.release(saved);
        op.wait(pending)?;
    }
    Ok((outputs, gradients))
}

fn check(dtype: Dtype, cuts: &Cuts, schedule: Schedule, limit: f64) {
    let tensors = tensors(dtype);
    let (inputs, gradients): (Vec<_>, Vec<_>) = tensors.iter().map(|t| (input(t), upstream(t))).unzip();
    let (config, options) = (ConvolutionConfig::default(), WorldOptions::default());
    let one = Plan::packed(&OFFSETS, &Cuts::equal(1)).unwrap();
    let outputs = forward(&one, &inputs, SILU, &config, &options).unwrap().outputs;
    let gradients = backward(&one, &inputs, SILU, &gradients, &config, &options).unwrap().gradients;
    let plan = Plan::packed(&OFFSETS, cuts).unwrap();
    let parts = run_threads(plan.pes(), &options, |pe| {
        let exec = Emulated::new(1, schedule, false).map_err(ExecError::from)?;
        let launches = exec.launches();
        let result = on_pe(ShortConvolution::on(pe, config.clone(), exec)?, &plan, pe.rank(), &tensors)?;
        assert_eq!(launches.names()[0], format!("convolve_{dtype}"));
        Ok::<_, ShortConvolutionError>(result)
    });
    let parts = parts.unwrap_or_else(|error| panic!("{dtype} {cuts:?} {schedule:?}: {error}"));
    for (rank, (found_outputs, found_gradients)) in parts.iter().enumerate() {
        let own = &plan.ranks[rank];
        for (found, want) in found_outputs.iter().zip(&outputs) {
            close(&found.y, &tokens(&want.y, &plan, rank), limit, "y");
            let (found, want) = (found.final_state.as_ref().unwrap(), want.final_state.as_ref().unwrap());
            assert_eq!(found.data.to_f64(), rows(want, &own.ends), "final states of PE {rank}");
        }
        for (found, want) in found_gradients.iter().zip(&gradients) {
            close(&found.dx, &tokens(&want.dx, &plan, rank), limit, "dx");
            let (found, want) = (found.d_initial_state.as_ref().unwrap(), want.d_initial_state.as_ref().unwrap());
            close(found, &rows(want, &own.starts), 1e-5, "d_initial_state");
        }
    }
    for (i, want) in gradients.iter().enumerate() {
        let sum = |part: fn(&ConvolutionGradients) -> &Tensor| {
            let mut sum = vec![0.0; part(want).data.to_f64().len()];
            for (_, gradients) in &parts {
                for (sum, x) in sum.iter_mut().zip(part(&gradients[i]).data.to_f64()) {
                    *sum += x;
                }
            }
            Error::of(&sum, &part(want).data.to_f64()).rel_rms
        };
        assert!(sum(|g| &g.dweight) < 1e-5 && sum(|g| g.dbias.as_ref().unwrap()) < 1e-5, "sums of convolution {i}");
    }
}

#[test]
fn pes_whose_parts_are_shorter_than_the_taps_reach() {
    let last_first = Schedule { timing: Timing::Eager, order: Order::Descending };
    check(Dtype::F32, &Cuts::at(vec![20, 21]), Schedule::default(), 1e-6);
    check(Dtype::Bf16, &Cuts::at(vec![1]), last_first, 5e-3);
}

#[test]
fn one_pe_alone() {
    check(Dtype::F16, &Cuts::equal(1), Schedule::default(), 1e-3);
}
