//! Calls of the short convolution.

use std::sync::Arc;

use deltalink::op::convolution::{
    Activation, ConvolutionConfig, ConvolutionGradients, ConvolutionGradientsOut, ConvolutionInput, ConvolutionOut,
    ConvolutionOutput, ConvolutionUpstream,
};
use deltalink::tensor::{Dtype, Tensor};
use pyo3::prelude::*;

use crate::attention::total;
use crate::buffer::Buffer;
use crate::errors::Failure;
use crate::plan::Plan;
use crate::tensor::{CurrentStream, Held};
use crate::ticket::{Kept, Ticket};
use crate::world::World;

type Object<'py> = Bound<'py, PyAny>;

/// One convolution of a call, as a tuple (x, weight, bias, initial state).
type Arguments<'py> = (Object<'py>, Object<'py>, Option<Object<'py>>, Option<Object<'py>>);

/// The same, taken hold of.
struct Request {
    x: Held,
    weight: Held,
    bias: Option<Held>,
    initial_state: Option<Held>,
}

impl Request {
    fn all(arguments: &[Arguments<'_>], stream: CurrentStream) -> PyResult<Vec<Self>> {
        let one = |(x, weight, bias, initial_state): &Arguments<'_>| {
            Ok(Self {
                x: Held::new("x", x, stream)?,
                weight: Held::new("weight", weight, stream)?,
                bias: Held::optional("bias", bias.as_ref(), stream)?,
                initial_state: Held::optional("initial_state", initial_state.as_ref(), stream)?,
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

fn output(memory: &mut (Held, Option<Held>)) -> Result<ConvolutionOut<'_>, Failure> {
    let (y, final_state) = memory;
    Ok(ConvolutionOutput { y: y.view_mut()?, final_state: Held::view_mut_optional(final_state)? })
}

/// Computes outputs and, where there is a tensor for them, final states into `results`, tuples (y, final state). Returns a ticket for
/// the backward call, if asked to save. On a GPU the work is in stream `stream` when it returns.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // one call from Python, by position
pub fn convolution_forward(
    py: Python<'_>,
    world: &World,
    plan: &Plan,
    arguments: Vec<Arguments<'_>>,
    results: Vec<(Object<'_>, Option<Object<'_>>)>,
    silu: bool,
    checked: bool,
    allow_nonfinite: bool,
    sum_parameters: bool,
    save: bool,
    stream: u64,
) -> PyResult<Option<Buffer>> {
    let stream = CurrentStream(stream);
    let requests = Request::all(&arguments, stream)?;
    let held = results.iter().map(|(y, final_state)| {
        Ok((Held::new("y", y, stream)?, Held::optional("final_state", final_state.as_ref(), stream)?))
    });
    let mut memory = held.collect::<PyResult<Vec<_>>>()?;
    let activation = if silu { Activation::Silu } else { Activation::None };
    let final_state = memory.iter().any(|(_, final_state)| final_state.is_some());
    let config = ConvolutionConfig { final_state, checked, allow_nonfinite, ..ConvolutionConfig::default() };
    let (worker, plan) = (&world.worker, Arc::clone(&plan.inner));
    let (used, asked) = (config.clone(), Arc::clone(&plan));
    let saved = py.detach(move || {
        worker.call(move |desk| {
            let inputs = requests.iter().map(Request::input).collect::<Result<Vec<_>, _>>()?;
            let mut out = memory.iter_mut().map(output).collect::<Result<Vec<_>, _>>()?;
            Ok(desk.convolution(&used)?.forward(stream, &asked, (&inputs, activation), &mut out, save)?)
        })
    })?;
    Ok(saved.map(|saved| {
        let kept = Kept::Convolution { config, activation, call: saved.call };
        let ticket = Ticket::new(Arc::clone(worker), plan, kept, sum_parameters);
        Buffer::ticket(worker.number, "convolution", ticket, saved.bytes)
    }))
}

/// Memory for the gradients of one convolution, as a tuple (dx, dweight, dbias, gradient of the initial state).
type Results<'py> = (Object<'py>, Object<'py>, Option<Object<'py>>, Option<Object<'py>>);

/// The same, taken hold of.
fn held(results: &Results<'_>, stream: CurrentStream) -> PyResult<ConvolutionGradients<Held>> {
    let (dx, dweight, dbias, d_initial_state) = results;
    Ok(ConvolutionGradients {
        dx: Held::new("dx", dx, stream)?,
        dweight: Held::new("dweight", dweight, stream)?,
        dbias: Held::optional("dbias", dbias.as_ref(), stream)?,
        d_initial_state: Held::optional("d_initial_state", d_initial_state.as_ref(), stream)?,
    })
}

fn gradients(held: &mut ConvolutionGradients<Held>) -> Result<ConvolutionGradientsOut<'_>, Failure> {
    Ok(ConvolutionGradients {
        dx: held.dx.view_mut()?,
        dweight: held.dweight.view_mut()?,
        dbias: Held::view_mut_optional(&mut held.dbias)?,
        d_initial_state: Held::view_mut_optional(&mut held.d_initial_state)?,
    })
}

/// Computes gradients into `results`. Those of weights and biases are returned, by convolution, in place of written there if the PEs'
/// shares are added up; otherwise nothing is. On a GPU the rest is in stream `stream` when it returns.
#[pyfunction]
#[allow(clippy::type_complexity)] // lists of tuples, from and for Python
pub fn convolution_backward(
    py: Python<'_>,
    ticket: i64,
    arguments: Vec<Arguments<'_>>,
    upstream: Vec<(Object<'_>, Option<Object<'_>>)>,
    results: Vec<Results<'_>>,
    stream: u64,
) -> PyResult<Vec<(Option<Buffer>, Option<Buffer>)>> {
    let stream = CurrentStream(stream);
    let requests = Request::all(&arguments, stream)?;
    let upstream = upstream.iter().map(|(dy, d_final_state)| {
        Ok((Held::new("dy", dy, stream)?, Held::optional("d_final_state", d_final_state.as_ref(), stream)?))
    });
    let upstream = upstream.collect::<PyResult<Vec<_>>>()?;
    let mut memory = results.iter().map(|results| held(results, stream)).collect::<PyResult<Vec<_>>>()?;
    let sums = py.detach(move || {
        let ticket = Ticket::find(ticket)?;
        let Kept::Convolution { config, activation, call } = &ticket.kept else {
            return Err(ticket.other("convolution"));
        };
        let (config, activation, call) = (config.clone(), *activation, *call);
        let (plan, sum) = (Arc::clone(&ticket.plan), ticket.sum_parameters);
        ticket.worker.call(move |desk| {
            let pe = desk.pe;
            let inputs = requests.iter().map(Request::input).collect::<Result<Vec<_>, _>>()?;
            let upstream = upstream.iter().map(|(dy, d_final_state)| {
                Ok(ConvolutionUpstream { dy: dy.view()?, d_final_state: Held::view_optional(d_final_state)? })
            });
            let upstream = upstream.collect::<Result<Vec<_>, Failure>>()?;
            let mut out = memory.iter_mut().map(gradients).collect::<Result<Vec<_>, _>>()?;
            // Shares that are added up on the host go there.
            let share = |shape: &[usize]| sum.then(|| Tensor::zeros(Dtype::F32, shape));
            let of_one = |one: &ConvolutionGradientsOut<'_>| {
                (share(one.dweight.shape()), one.dbias.as_ref().and_then(|dbias| share(dbias.shape())))
            };
            let mut shares: Vec<_> = out.iter().map(of_one).collect();
            for (one, (weight, bias)) in out.iter_mut().zip(&mut shares) {
                if let Some(share) = weight {
                    one.dweight = share.view_mut();
                }
                if let Some(share) = bias {
                    one.dbias = Some(share.view_mut());
                }
            }
            let operation = desk.convolution(&config)?;
            operation.backward(stream, &plan, (&inputs, activation), call, (&upstream, &mut out), sum)?;
            drop(out);
            let added = |(weight, bias)| Ok((total(pe, "weight", weight)?, total(pe, "bias", bias)?));
            shares.into_iter().map(added).collect::<Result<Vec<_>, Failure>>()
        })
    })?;
    let buffer = |name, x: Option<Tensor>| x.map(|x| Buffer::result(name, x));
    Ok(sums.into_iter().map(|(weight, bias)| (buffer("dweight", weight), buffer("dbias", bias))).collect())
}
