//! Tensors of a call that a device holds for a caller.

use super::{
    ConvolutionGradients, ConvolutionGradientsOut, ConvolutionInput, ConvolutionOut, ConvolutionOutput,
    ConvolutionUpstream, ShortConvolutionError,
};
use crate::exec::{DeviceTensor, ExecError, Executor};
use crate::tensor::{Tensor, TensorView};

/// Copies of the tensors of one convolution of a call where kernels use them in place, and memory for all of its results.
#[derive(Debug)]
pub struct DeviceConvolution<X: Executor> {
    x: DeviceTensor<X>,
    weight: DeviceTensor<X>,
    bias: Option<DeviceTensor<X>>,
    initial_state: Option<DeviceTensor<X>>,
    dy: DeviceTensor<X>,
    d_final_state: Option<DeviceTensor<X>>,
    output: ConvolutionOutput<DeviceTensor<X>>,
    gradients: ConvolutionGradients<DeviceTensor<X>>,
}

/// The tensors of calls of both directions, each with one entry for each convolution.
#[derive(Debug, Default)]
pub struct DeviceCall<'a> {
    /// What is read forward and backward.
    pub inputs: Vec<ConvolutionInput<'a>>,
    /// What is read backward.
    pub upstream: Vec<ConvolutionUpstream<'a>>,
    /// For the results of a forward call.
    pub outputs: Vec<ConvolutionOut<'a>>,
    /// For the results of a backward call.
    pub gradients: Vec<ConvolutionGradientsOut<'a>>,
}

impl<X: Executor> DeviceConvolution<X> {
    /// Copies of `input` and `upstream`, which lie on the host, and memory for results like `output` and `gradients`.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for them.
    ///
    /// # Panics
    /// If a tensor lies on a GPU.
    pub fn new(
        exec: &mut X,
        (input, upstream): (&ConvolutionInput<'_>, &ConvolutionUpstream<'_>),
        (output, gradients): (&ConvolutionOutput, &ConvolutionGradients),
    ) -> Result<Self, ExecError> {
        let mut of = |x: &TensorView<'_>| DeviceTensor::of(exec, x);
        let (x, weight, dy) = (of(&input.x)?, of(&input.weight)?, of(&upstream.dy)?);
        let bias = input.bias.as_ref().map(&mut of).transpose()?;
        let initial_state = input.initial_state.as_ref().map(&mut of).transpose()?;
        let d_final_state = upstream.d_final_state.as_ref().map(&mut of).transpose()?;
        let mut like = |x: &Tensor| DeviceTensor::new(exec, &x.shape, x.data.dtype());
        let output = ConvolutionOutput {
            y: like(&output.y)?,
            final_state: output.final_state.as_ref().map(&mut like).transpose()?,
        };
        let gradients = ConvolutionGradients {
            dx: like(&gradients.dx)?,
            dweight: like(&gradients.dweight)?,
            dbias: gradients.dbias.as_ref().map(&mut like).transpose()?,
            d_initial_state: gradients.d_initial_state.as_ref().map(&mut like).transpose()?,
        };
        Ok(Self { x, weight, bias, initial_state, dy, d_final_state, output, gradients })
    }

    /// Borrows all tensors for calls.
    ///
    /// # Errors
    /// As [`DeviceTensor::view`].
    pub fn call(all: &mut [Self]) -> Result<DeviceCall<'_>, ShortConvolutionError> {
        let mut call = DeviceCall::default();
        for one in all {
            call.inputs.push(ConvolutionInput {
                x: one.x.view()?,
                weight: one.weight.view()?,
                bias: one.bias.as_ref().map(DeviceTensor::view).transpose()?,
                initial_state: one.initial_state.as_ref().map(DeviceTensor::view).transpose()?,
            });
            call.upstream.push(ConvolutionUpstream {
                dy: one.dy.view()?,
                d_final_state: one.d_final_state.as_ref().map(DeviceTensor::view).transpose()?,
            });
            let (output, gradients) = (&mut one.output, &mut one.gradients);
            call.outputs.push(ConvolutionOutput {
                y: output.y.view_mut()?,
                final_state: output.final_state.as_mut().map(DeviceTensor::view_mut).transpose()?,
            });
            call.gradients.push(ConvolutionGradients {
                dx: gradients.dx.view_mut()?,
                dweight: gradients.dweight.view_mut()?,
                dbias: gradients.dbias.as_mut().map(DeviceTensor::view_mut).transpose()?,
                d_initial_state: gradients.d_initial_state.as_mut().map(DeviceTensor::view_mut).transpose()?,
            });
        }
        Ok(call)
    }

    /// The first of the results that is not, bit for bit, the one given, by its name; after all work of `exec` so far. The memory holds no
    /// results afterwards.
    ///
    /// # Errors
    /// [`ExecError`] if some of that work failed.
    pub fn take_difference(
        &mut self,
        exec: &mut X,
        (output, gradients): (&ConvolutionOutput, &ConvolutionGradients),
    ) -> Result<Option<&'static str>, ExecError> {
        let mut first = None;
        let pairs = [
            ("y", Some(&mut self.output.y), Some(&output.y)),
            ("the final state", self.output.final_state.as_mut(), output.final_state.as_ref()),
            ("dx", Some(&mut self.gradients.dx), Some(&gradients.dx)),
            ("dweight", Some(&mut self.gradients.dweight), Some(&gradients.dweight)),
            ("dbias", self.gradients.dbias.as_mut(), gradients.dbias.as_ref()),
            (
                "the gradient of the initial state",
                self.gradients.d_initial_state.as_mut(),
                gradients.d_initial_state.as_ref(),
            ),
        ];
        for (name, found, want) in pairs {
            let alike = match (found, want) {
                (Some(found), Some(want)) => {
                    let alike = found.read(exec)?.data.bytes() == want.data.bytes();
                    found.spoil(exec)?;
                    alike
                }
                (found, want) => found.is_none() && want.is_none(),
            };
            first = first.or((!alike).then_some(name));
        }
        Ok(first)
    }
}
