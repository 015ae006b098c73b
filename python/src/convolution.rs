//! Calls of the short convolution.

use std::sync::Arc;

use deltalink::op::convolution::{Activation, ConvolutionConfig, ConvolutionInput, ConvolutionUpstream};
use pyo3::prelude::*;

use crate::attention::sum_over_pes;
use crate::buffer::Buffer;
use crate::device::AnyConvolution;
use crate::errors::Failure;
use crate::plan::Plan;
use crate::tensor::{CurrentStream, Held};
use crate::ticket::{Kept, Ticket};
use crate::world::World;

/// All tensors of a convolution are in the host's memory, also where the operation computes on a GPU.
const HOST: CurrentStream = CurrentStream(0);

/// One convolution of a call, as a tuple (x, weight, bias, initial state).
type Arguments<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>);

/// The same, taken hold of.
struct Request {
    x: Held,
    weight: Held,
    bias: Option<Held>,
    initial_state: Option<Held>,
}

impl Request {
    fn all(arguments: &[Arguments<'_>]) -> PyResult<Vec<Self>> {
        let one = |(x, weight, bias, initial_state): &Arguments<'_>| {
            Ok(Self {
                x: Held::new("x", x, HOST)?,
                weight: Held::new("weight", weight, HOST)?,
                bias: Held::optional("bias", bias.as_ref(), HOST)?,
                initial_state: Held::optional("initial_state", initial_state.as_ref(), HOST)?,
            })
        };
        arguments.iter().map(one).collect()
    }

    fn input(&self) -> Result<ConvolutionInput<'_>, Failure> {
        Ok(ConvolutionInput {
            x: self.x.view()?,
            weight: self.weight.view()?,
            bias: Held::view_optional(&self.bias)?,
            initial_state: Held::view_optional(&self.initial_state)?,
        })
    }
}

/// Of each convolution the output and, if asked for, the final state; and a ticket for the backward call, if asked for.
#[pyfunction]
#[allow(clippy::too_many_arguments, clippy::type_complexity)] // one call from Python, by position
pub fn convolution_forward(
    py: Python<'_>,
    world: &World,
    plan: &Plan,
    arguments: Vec<Arguments<'_>>,
    silu: bool,
    final_state: bool,
    checked: bool,
    allow_nonfinite: bool,
    sum_parameters: bool,
    save: bool,
) -> PyResult<(Vec<(Buffer, Option<Buffer>)>, Option<Buffer>)> {
    let requests = Request::all(&arguments)?;
    let activation = if silu { Activation::Silu } else { Activation::None };
    let config = ConvolutionConfig { final_state, checked, allow_nonfinite, ..ConvolutionConfig::default() };
    let (worker, plan) = (&world.worker, Arc::clone(&plan.inner));
    let (used, asked) = (config.clone(), Arc::clone(&plan));
    let forward = py.detach(move || {
        worker.call(move |desk| {
            let inputs = requests.iter().map(Request::input).collect::<Result<Vec<_>, _>>()?;
            Ok(match desk.convolution(&used)? {
                AnyConvolution::Cpu(one) => one.forward(&asked, &inputs, activation)?,
                #[cfg(feature = "cuda")]
                AnyConvolution::Gpu(one) => one.forward(&asked, &inputs, activation)?,
            })
        })
    })?;
    let saved = save.then(|| {
        let kept = Kept::Convolution { config, activation, saved: forward.saved };
        let ticket = Ticket::new(Arc::clone(worker), plan, kept, sum_parameters);
        Buffer::ticket(worker.number, "convolution", ticket, 0)
    });
    let outputs = forward.outputs.into_iter().map(|output| {
        let state = output.final_state.map(|state| Buffer::result("final_state", state));
        (Buffer::result("y", output.y), state)
    });
    Ok((outputs.collect(), saved))
}

/// Of each convolution the gradients of x and weight, and of bias and initial state where there is one.
#[pyfunction]
#[allow(clippy::type_complexity)] // a list of tuples, for Python
pub fn convolution_backward(
    py: Python<'_>,
    ticket: i64,
    arguments: Vec<Arguments<'_>>,
    upstream: Vec<(Bound<'_, PyAny>, Option<Bound<'_, PyAny>>)>,
) -> PyResult<Vec<(Buffer, Buffer, Option<Buffer>, Option<Buffer>)>> {
    let requests = Request::all(&arguments)?;
    let upstream = upstream.iter().map(|(dy, d_final_state)| {
        Ok((Held::new("dy", dy, HOST)?, Held::optional("d_final_state", d_final_state.as_ref(), HOST)?))
    });
    let upstream = upstream.collect::<PyResult<Vec<_>>>()?;
    let gradients = py.detach(move || {
        let ticket = Ticket::find(ticket)?;
        let Kept::Convolution { config, activation, saved } = &ticket.kept else {
            return Err(ticket.other("convolution"));
        };
        let (config, activation, saved) = (config.clone(), *activation, saved.clone());
        let (plan, sum_parameters) = (Arc::clone(&ticket.plan), ticket.sum_parameters);
        ticket.worker.call(move |desk| {
            let pe = desk.pe;
            let inputs = requests.iter().map(Request::input).collect::<Result<Vec<_>, _>>()?;
            let upstream = upstream.iter().map(|(dy, d_final_state)| {
                Ok(ConvolutionUpstream { dy: dy.view()?, d_final_state: Held::view_optional(d_final_state)? })
            });
            let upstream = upstream.collect::<Result<Vec<_>, Failure>>()?;
            let backward = match desk.convolution(&config)? {
                AnyConvolution::Cpu(one) => one.backward(&plan, &inputs, activation, &saved, &upstream)?,
                #[cfg(feature = "cuda")]
                AnyConvolution::Gpu(one) => one.backward(&plan, &inputs, activation, &saved, &upstream)?,
            };
            let mut gradients = backward.gradients;
            if sum_parameters {
                for one in &mut gradients {
                    one.dweight = sum_over_pes(pe, "weight", &one.dweight)?;
                    if let Some(share) = &mut one.dbias {
                        *share = sum_over_pes(pe, "bias", share)?;
                    }
                }
            }
            Ok(gradients)
        })
    })?;
    let one = |one: deltalink::op::convolution::ConvolutionGradients| {
        let optional = |name, x: Option<_>| x.map(|x| Buffer::result(name, x));
        let (dbias, dh0) = (optional("dbias", one.dbias), optional("d_initial_state", one.d_initial_state));
        (Buffer::result("dx", one.dx), Buffer::result("dweight", one.dweight), dbias, dh0)
    };
    Ok(gradients.into_iter().map(one).collect())
}
