//! Where the tensors of a call lie.

use kernels_gpu::convolution::ConvolutionTensors;
use kernels_gpu::params::Tensor as Param;
use kernels_gpu::tile::host::Checker;

use super::inputs::Sizes;
use super::{ConvolutionGradientsOut, ConvolutionInput, ConvolutionOut, ConvolutionUpstream};
use crate::exec::{ConvolutionSlot, ExecError, Executor, Scratch, Slot};
use crate::op::step::optional;
use crate::tensor::{Dtype, TensorViewMut};

fn slot(i: usize, which: ConvolutionSlot) -> Slot {
    Slot::Convolution(i as u8, which)
}

fn optional_output<X: Executor>(
    exec: &mut X,
    slot: Slot,
    x: Option<&mut TensorViewMut<'_>>,
) -> Result<Param, ExecError> {
    x.map_or_else(|| Ok(Param::absent()), |x| exec.output(slot, x))
}

/// The inputs of every convolution, without results.
pub(super) fn inputs<X: Executor>(
    exec: &mut X,
    inputs: &[ConvolutionInput<'_>],
) -> Result<Vec<ConvolutionTensors>, ExecError> {
    use ConvolutionSlot as S;
    let absent = Param::absent();
    let mut first_column = 0;
    let mut place = |(i, input): (usize, &ConvolutionInput<'_>)| {
        let channels = input.x.shape()[2] as u32;
        let tensors = ConvolutionTensors {
            x: exec.input(slot(i, S::X), &input.x)?,
            weight: exec.input(slot(i, S::Weight), &input.weight)?,
            bias: optional(exec, slot(i, S::Bias), input.bias.as_ref())?,
            initial: optional(exec, slot(i, S::InitialState), input.initial_state.as_ref())?,
            y: absent,
            finals: absent,
            dy: absent,
            d_finals: absent,
            dx: absent,
            d_initial: absent,
            shares: absent,
            d_weight: absent,
            d_bias: absent,
            channels,
            first_column,
            runs: 0,
            pad: 0,
        };
        first_column += channels;
        Ok(tensors)
    };
    inputs.iter().enumerate().map(&mut place).collect()
}

/// Lets kernels write the results of a forward call.
pub(super) fn place_outputs<X: Executor>(
    exec: &mut X,
    tensors: &mut [ConvolutionTensors],
    outputs: &mut [ConvolutionOut<'_>],
) -> Result<(), ExecError> {
    for (i, (tensors, output)) in tensors.iter_mut().zip(outputs).enumerate() {
        tensors.y = exec.output(slot(i, ConvolutionSlot::Y), &mut output.y)?;
        tensors.finals = optional_output(exec, slot(i, ConvolutionSlot::FinalState), output.final_state.as_mut())?;
    }
    Ok(())
}

/// Brings the results of a forward call into the caller's tensors.
pub(super) fn fetch_outputs<X: Executor>(exec: &mut X, outputs: &mut [ConvolutionOut<'_>]) -> Result<(), ExecError> {
    for (i, output) in outputs.iter_mut().enumerate() {
        exec.fetch(slot(i, ConvolutionSlot::Y), &mut output.y)?;
        if let Some(state) = &mut output.final_state {
            exec.fetch(slot(i, ConvolutionSlot::FinalState), state)?;
        }
    }
    Ok(())
}

/// Brings upstream gradients to the kernels, and lets them write the results of a backward call with `runs` runs of tokens.
pub(super) fn place_gradients<X: Executor>(
    exec: &mut X,
    tensors: &mut [ConvolutionTensors],
    upstream: &[ConvolutionUpstream<'_>],
    gradients: &mut [ConvolutionGradientsOut<'_>],
    (sizes, runs): (&Sizes, usize),
) -> Result<(), ExecError> {
    use ConvolutionSlot as S;
    for (i, ((t, upstream), results)) in tensors.iter_mut().zip(upstream).zip(gradients).enumerate() {
        let shares = runs * (sizes.width + 1) * sizes.channels[i];
        t.dy = exec.input(slot(i, S::DY), &upstream.dy)?;
        t.d_finals = optional(exec, slot(i, S::DFinalState), upstream.d_final_state.as_ref())?;
        t.dx = exec.output(slot(i, S::DX), &mut results.dx)?;
        t.d_initial = optional_output(exec, slot(i, S::DInitialState), results.d_initial_state.as_mut())?;
        t.shares = exec.scratch(Scratch::ConvolutionShares(i as u8), shares, Dtype::F32)?;
        t.d_weight = exec.output(slot(i, S::DWeight), &mut results.dweight)?;
        t.d_bias = optional_output(exec, slot(i, S::DBias), results.dbias.as_mut())?;
        t.runs = runs as u32;
    }
    Ok(())
}

/// Brings the results of a backward call into the caller's tensors.
pub(super) fn fetch_gradients<X: Executor>(
    exec: &mut X,
    gradients: &mut [ConvolutionGradientsOut<'_>],
) -> Result<(), ExecError> {
    use ConvolutionSlot as S;
    for (i, results) in gradients.iter_mut().enumerate() {
        exec.fetch(slot(i, S::DX), &mut results.dx)?;
        exec.fetch(slot(i, S::DWeight), &mut results.dweight)?;
        if let Some(dbias) = &mut results.dbias {
            exec.fetch(slot(i, S::DBias), dbias)?;
        }
        if let Some(d_initial) = &mut results.d_initial_state {
            exec.fetch(slot(i, S::DInitialState), d_initial)?;
        }
    }
    Ok(())
}

/// Tells the checker what a call must write.
pub(super) fn expect_written(checker: &mut Checker, tensors: &[ConvolutionTensors]) {
    for t in tensors {
        let results = [
            ("y", &t.y),
            ("final_state", &t.finals),
            ("dx", &t.dx),
            ("d_initial_state", &t.d_initial),
            ("shares", &t.shares),
            ("dweight", &t.d_weight),
            ("dbias", &t.d_bias),
        ];
        for (name, tensor) in results.into_iter().filter(|(_, tensor)| tensor.is_present()) {
            checker.expect_written(name, *tensor);
        }
    }
}
