//! Calls of KDA and GDN.

use std::sync::Arc;

use deltalink::gradients::{Gradients, Upstream, add_shares};
use deltalink::inputs::{Beta, Gate, Inputs, Op, StateLayout};
use deltalink::op::{Config, Mode, Recompute};
use deltalink::tensor::{Buffer as Elements, Tensor};
use deltalink::world::Pe;
use pyo3::prelude::*;

use crate::buffer::Buffer;
use crate::errors::Failure;
use crate::plan::Plan;
use crate::tensor::Input;
use crate::ticket::{Kept, Ticket};
use crate::world::World;

/// What a call computes with, by name.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Arguments<'py> {
    op: String,
    q: Bound<'py, PyAny>,
    k: Bound<'py, PyAny>,
    v: Bound<'py, PyAny>,
    g: Bound<'py, PyAny>,
    beta: Bound<'py, PyAny>,
    a_log: Option<Bound<'py, PyAny>>,
    dt_bias: Option<Bound<'py, PyAny>>,
    initial_state: Option<Bound<'py, PyAny>>,
    scale: Option<f32>,
    l2norm: bool,
    /// "given", "softplus" or "lower_bound".
    gate: String,
    lower_bound: f32,
    /// 0 if beta is given, otherwise what the sigmoid of its logits is multiplied by.
    beta_factor: f32,
    state_v_first: bool,
}

/// The same, taken hold of.
struct Request {
    op: Op,
    q: Input,
    k: Input,
    v: Input,
    g: Input,
    beta: Input,
    a_log: Option<Input>,
    dt_bias: Option<Input>,
    initial_state: Option<Input>,
    scale: Option<f32>,
    l2norm: bool,
    gate: GateKind,
    lower_bound: f32,
    beta_factor: f32,
    state_layout: StateLayout,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum GateKind {
    Given,
    Softplus,
    LowerBound,
}

impl Request {
    fn new(arguments: &Arguments<'_>) -> PyResult<Self> {
        let op = match arguments.op.as_str() {
            "kda" => Op::Kda,
            "gdn" => Op::Gdn,
            found => return Err(Failure::Option { option: "op", found: found.into(), choices: "kda or gdn" }.into()),
        };
        let gate = match arguments.gate.as_str() {
            "given" => GateKind::Given,
            "softplus" => GateKind::Softplus,
            "lower_bound" => GateKind::LowerBound,
            found => {
                let choices = "given, softplus or lower_bound";
                return Err(Failure::Option { option: "gate", found: found.into(), choices }.into());
            }
        };
        Ok(Self {
            op,
            q: Input::new("q", &arguments.q)?,
            k: Input::new("k", &arguments.k)?,
            v: Input::new("v", &arguments.v)?,
            g: Input::new("g", &arguments.g)?,
            beta: Input::new("beta", &arguments.beta)?,
            a_log: Input::optional("A_log", arguments.a_log.as_ref())?,
            dt_bias: Input::optional("dt_bias", arguments.dt_bias.as_ref())?,
            initial_state: Input::optional("initial_state", arguments.initial_state.as_ref())?,
            scale: arguments.scale,
            l2norm: arguments.l2norm,
            gate,
            lower_bound: arguments.lower_bound,
            beta_factor: arguments.beta_factor,
            state_layout: if arguments.state_v_first { StateLayout::VFirst } else { StateLayout::KFirst },
        })
    }

    fn inputs(&self) -> Result<Inputs<'_>, Failure> {
        let g = self.g.view()?;
        let (a_log, dt_bias) = (Input::view_optional(&self.a_log)?, Input::view_optional(&self.dt_bias)?);
        let gate = match (self.gate, a_log) {
            (GateKind::Given, _) => Gate::Given(g),
            (GateKind::Softplus, Some(a_log)) => Gate::Softplus { raw: g, a_log, dt_bias },
            (GateKind::Softplus, None) => {
                let (option, found) = ("A_log", "None".into());
                return Err(Failure::Option { option, found, choices: "a tensor [HV], or set lower_bound" });
            }
            (GateKind::LowerBound, a_log) => Gate::LowerBound { raw: g, a_log, dt_bias, bound: self.lower_bound },
        };
        let beta = self.beta.view()?;
        let beta = match self.beta_factor {
            0.0 => Beta::Given(beta),
            factor => Beta::Logits { logits: beta, factor },
        };
        Ok(Inputs {
            op: self.op,
            q: self.q.view()?,
            k: self.k.view()?,
            v: self.v.view()?,
            gate,
            beta,
            scale: self.scale,
            l2norm: self.l2norm,
            initial_state: Input::view_optional(&self.initial_state)?,
            state_layout: self.state_layout,
        })
    }
}

/// How a call runs, by name.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Options {
    mode: String,
    chunk: usize,
    recompute: String,
    checked: bool,
    allow_nonfinite: bool,
    sum_parameters: bool,
}

impl Options {
    fn config(&self, final_state: bool) -> Result<Config, Failure> {
        let mode = match self.mode.as_str() {
            "overlap" => Mode::Overlap,
            "bulk" => Mode::Bulk,
            "exact" => Mode::Exact,
            found => {
                let choices = "overlap, bulk or exact";
                return Err(Failure::Option { option: "mode", found: found.into(), choices });
            }
        };
        let recompute = match self.recompute.as_str() {
            "all" => Recompute::All,
            "states" => Recompute::States,
            found => {
                let choices = "all or states";
                return Err(Failure::Option { option: "recompute", found: found.into(), choices });
            }
        };
        let (checked, allow_nonfinite) = (self.checked, self.allow_nonfinite);
        Ok(Config { mode, chunk: self.chunk, recompute, final_state, checked, allow_nonfinite, ..Config::default() })
    }
}

/// Outputs `o` and, if asked for, the final states and a ticket for the backward call.
#[pyfunction]
pub fn attention_forward(
    py: Python<'_>,
    world: &World,
    plan: &Plan,
    arguments: Arguments<'_>,
    options: Options,
    final_state: bool,
    save: bool,
) -> PyResult<(Buffer, Option<Buffer>, Option<Buffer>)> {
    let request = Request::new(&arguments)?;
    let config = options.config(final_state)?;
    let (worker, plan) = (&world.worker, Arc::clone(&plan.inner));
    let (used, asked) = (config.clone(), Arc::clone(&plan));
    let (forward, handle) = py.detach(move || {
        worker.call(move |desk| {
            let operation = desk.operation(&used)?;
            let inputs = request.inputs()?;
            if save {
                let (forward, saved) = operation.forward_saving(&asked, &inputs)?;
                let bytes = saved.bytes();
                Ok((forward, Some((operation.hold(saved), bytes))))
            } else {
                Ok((operation.forward(&asked, &inputs)?, None))
            }
        })
    })?;
    let saved = handle.map(|(handle, bytes)| {
        let kept = Kept::Attention { config, handle };
        let ticket = Ticket::new(Arc::clone(worker), plan, kept, options.sum_parameters);
        Buffer::ticket(worker.number, &arguments.op, ticket, bytes)
    });
    let states = forward.final_state.map(|states| Buffer::result("final_state", states));
    Ok((Buffer::result("o", forward.o), states, saved))
}

/// The gradients of q, k, v, g, beta, and of `A_log`, `dt_bias` and the initial states where there are any.
type GradientBuffers = (Vec<Buffer>, Option<Buffer>, Option<Buffer>, Option<Buffer>);

/// Gradients with respect to everything that the forward call got, from those with respect to its results.
#[pyfunction]
pub fn attention_backward(
    py: Python<'_>,
    ticket: i64,
    arguments: Arguments<'_>,
    d_o: &Bound<'_, PyAny>,
    d_final_state: Option<&Bound<'_, PyAny>>,
) -> PyResult<GradientBuffers> {
    let request = Request::new(&arguments)?;
    let (d_o, d_final_state) = (Input::new("do", d_o)?, Input::optional("dht", d_final_state)?);
    let gradients = py.detach(move || {
        let ticket = Ticket::find(ticket)?;
        let Kept::Attention { config, handle } = &ticket.kept else { return Err(ticket.other("attention")) };
        let (config, handle, plan) = (config.clone(), *handle, Arc::clone(&ticket.plan));
        let sum_parameters = ticket.sum_parameters;
        ticket.worker.call(move |desk| {
            let pe = desk.pe;
            let operation = desk.operation(&config)?;
            let d_final_state = Input::view_optional(&d_final_state)?;
            let upstream = Upstream { d_o: d_o.view()?, d_final_state };
            let backward = operation.backward_held(&plan, &request.inputs()?, handle, &upstream)?;
            let mut gradients = backward.gradients;
            if sum_parameters {
                add_up(pe, &mut gradients)?;
            }
            Ok(gradients)
        })
    })?;
    let Gradients { dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_initial_state } = gradients;
    let always = [("dq", dq), ("dk", dk), ("dv", dv), ("dg", dg), ("dbeta", dbeta)];
    let always = always.into_iter().map(|(name, x)| Buffer::result(name, x)).collect();
    let optional = |name, x: Option<Tensor>| x.map(|x| Buffer::result(name, x));
    Ok((always, optional("dA_log", da_log), optional("ddt_bias", ddt_bias), optional("dh0", d_initial_state)))
}

/// Replaces the PE's shares of the gradients of parameters by their sums over all PEs, in the order of the ranks: the same
/// bits everywhere. Collective.
fn add_up(pe: &Pe, gradients: &mut Gradients) -> Result<(), Failure> {
    for (what, share) in [("A_log", &mut gradients.da_log), ("dt_bias", &mut gradients.ddt_bias)] {
        if let Some(share) = share {
            *share = sum_over_pes(pe, what, share)?;
        }
    }
    Ok(())
}

/// The sum of all PEs' f32 tensors like `share`. Collective.
pub fn sum_over_pes(pe: &Pe, what: &str, share: &Tensor) -> Result<Tensor, Failure> {
    let all = pe.all_gather(&format!("gradient of {what}"), share.data.bytes())?;
    let shares = all.iter().map(|bytes| {
        let values = bytes.chunks_exact(4).map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]]));
        Tensor { shape: share.shape.clone(), data: Elements::F32(values.collect()) }
    });
    let shares: Vec<Tensor> = shares.collect();
    Ok(add_shares(&shares).unwrap_or_else(|| share.clone()))
}
