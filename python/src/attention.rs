//! Calls of KDA and GDN.

use std::sync::Arc;

use deltalink::gradients::{Gradients, Upstream, add_shares};
use deltalink::inputs::{Beta, Gate, Inputs, Op, StateLayout};
use deltalink::op::{BackwardOut, Config, ForwardOut, Mode, Recompute};
use deltalink::tensor::{Buffer as Elements, Dtype, Tensor};
use deltalink::world::Pe;
use pyo3::prelude::*;

use crate::buffer::Buffer;
use crate::errors::Failure;
use crate::plan::Plan;
use crate::tensor::{CurrentStream, Held};
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
    q: Held,
    k: Held,
    v: Held,
    g: Held,
    beta: Held,
    a_log: Option<Held>,
    dt_bias: Option<Held>,
    initial_state: Option<Held>,
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
    fn new(arguments: &Arguments<'_>, stream: CurrentStream) -> PyResult<Self> {
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
            q: Held::new("q", &arguments.q, stream)?,
            k: Held::new("k", &arguments.k, stream)?,
            v: Held::new("v", &arguments.v, stream)?,
            g: Held::new("g", &arguments.g, stream)?,
            beta: Held::new("beta", &arguments.beta, stream)?,
            a_log: Held::optional("A_log", arguments.a_log.as_ref(), stream)?,
            dt_bias: Held::optional("dt_bias", arguments.dt_bias.as_ref(), stream)?,
            initial_state: Held::optional("initial_state", arguments.initial_state.as_ref(), stream)?,
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
        let (a_log, dt_bias) = (Held::view_optional(&self.a_log)?, Held::view_optional(&self.dt_bias)?);
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
            initial_state: Held::view_optional(&self.initial_state)?,
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

/// Computes outputs into `o` and, if there is a tensor for them, final states. Returns a ticket for the backward call, if asked to
/// save. On a GPU the work is in stream `stream` when it returns.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // one call from Python, by position
pub fn attention_forward(
    py: Python<'_>,
    world: &World,
    plan: &Plan,
    arguments: Arguments<'_>,
    options: Options,
    o: &Bound<'_, PyAny>,
    final_state: Option<&Bound<'_, PyAny>>,
    save: bool,
    stream: u64,
) -> PyResult<Option<Buffer>> {
    let stream = CurrentStream(stream);
    let request = Request::new(&arguments, stream)?;
    let (mut o, mut states) = (Held::new("o", o, stream)?, Held::optional("final_state", final_state, stream)?);
    let config = options.config(states.is_some())?;
    let (worker, plan) = (&world.worker, Arc::clone(&plan.inner));
    let (used, asked) = (config.clone(), Arc::clone(&plan));
    let saved = py.detach(move || {
        worker.call(move |desk| {
            let mut out = ForwardOut { o: o.view_mut()?, final_state: Held::view_mut_optional(&mut states)? };
            let operation = desk.operation(&used)?;
            Ok(operation.forward(stream, &asked, &request.inputs()?, &mut out, save)?)
        })
    })?;
    Ok(saved.map(|saved| {
        let kept = Kept::Attention { config, call: saved.call };
        let ticket = Ticket::new(Arc::clone(worker), plan, kept, options.sum_parameters);
        Buffer::ticket(worker.number, &arguments.op, ticket, saved.bytes)
    }))
}

/// Memory for gradients, by name.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Results<'py> {
    dq: Bound<'py, PyAny>,
    dk: Bound<'py, PyAny>,
    dv: Bound<'py, PyAny>,
    dg: Bound<'py, PyAny>,
    dbeta: Bound<'py, PyAny>,
    da_log: Option<Bound<'py, PyAny>>,
    ddt_bias: Option<Bound<'py, PyAny>>,
    d_initial_state: Option<Bound<'py, PyAny>>,
}

/// The same, taken hold of.
fn held(results: &Results<'_>, stream: CurrentStream) -> PyResult<Gradients<Held>> {
    let new = |name, x| Held::new(name, x, stream);
    let optional = |name, x: &Option<Bound<'_, PyAny>>| Held::optional(name, x.as_ref(), stream);
    Ok(Gradients {
        dq: new("dq", &results.dq)?,
        dk: new("dk", &results.dk)?,
        dv: new("dv", &results.dv)?,
        dg: new("dg", &results.dg)?,
        dbeta: new("dbeta", &results.dbeta)?,
        da_log: optional("dA_log", &results.da_log)?,
        ddt_bias: optional("ddt_bias", &results.ddt_bias)?,
        d_initial_state: optional("dh0", &results.d_initial_state)?,
    })
}

fn memory(held: &mut Gradients<Held>) -> Result<BackwardOut<'_>, Failure> {
    Ok(Gradients {
        dq: held.dq.view_mut()?,
        dk: held.dk.view_mut()?,
        dv: held.dv.view_mut()?,
        dg: held.dg.view_mut()?,
        dbeta: held.dbeta.view_mut()?,
        da_log: Held::view_mut_optional(&mut held.da_log)?,
        ddt_bias: Held::view_mut_optional(&mut held.ddt_bias)?,
        d_initial_state: Held::view_mut_optional(&mut held.d_initial_state)?,
    })
}

/// Computes gradients with respect to everything that the forward call got into `results`. Those of `A_log` and `dt_bias` are returned
/// in place of written there if the PEs' shares are added up. On a GPU the rest is in stream `stream` when it returns.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // one call from Python, by position
pub fn attention_backward(
    py: Python<'_>,
    ticket: i64,
    arguments: Arguments<'_>,
    d_o: &Bound<'_, PyAny>,
    d_final_state: Option<&Bound<'_, PyAny>>,
    results: Results<'_>,
    stream: u64,
) -> PyResult<(Option<Buffer>, Option<Buffer>)> {
    let stream = CurrentStream(stream);
    let request = Request::new(&arguments, stream)?;
    let (d_o, d_final_state) = (Held::new("do", d_o, stream)?, Held::optional("dht", d_final_state, stream)?);
    let mut results = held(&results, stream)?;
    let sums = py.detach(move || {
        let ticket = Ticket::find(ticket)?;
        let Kept::Attention { config, call } = &ticket.kept else { return Err(ticket.other("attention")) };
        let (config, call, plan) = (config.clone(), *call, Arc::clone(&ticket.plan));
        let sum = ticket.sum_parameters;
        ticket.worker.call(move |desk| {
            let pe = desk.pe;
            let upstream = Upstream { d_o: d_o.view()?, d_final_state: Held::view_optional(&d_final_state)? };
            let mut out = memory(&mut results)?;
            // Shares that are added up on the host go there.
            let share = |shape: &[usize]| sum.then(|| Tensor::zeros(Dtype::F32, shape));
            let mut a_log = out.da_log.as_ref().and_then(|x| share(x.shape()));
            let mut dt_bias = out.ddt_bias.as_ref().and_then(|x| share(x.shape()));
            if let Some(share) = &mut a_log {
                out.da_log = Some(share.view_mut());
            }
            if let Some(share) = &mut dt_bias {
                out.ddt_bias = Some(share.view_mut());
            }
            let operation = desk.operation(&config)?;
            operation.backward(stream, &plan, &request.inputs()?, call, &upstream, &mut out, sum)?;
            drop(out);
            Ok((total(pe, "A_log", a_log)?, total(pe, "dt_bias", dt_bias)?))
        })
    })?;
    let buffer = |name, x: Option<Tensor>| x.map(|x| Buffer::result(name, x));
    Ok((buffer("dA_log", sums.0), buffer("ddt_bias", sums.1)))
}

/// The sum of all PEs' shares, if this PE has one. Collective then.
pub fn total(pe: &Pe, what: &str, share: Option<Tensor>) -> Result<Option<Tensor>, Failure> {
    share.map(|share| sum_over_pes(pe, what, &share)).transpose()
}

/// The sum of all PEs' f32 tensors like `share`, in the order of the ranks: the same bits everywhere. Collective.
fn sum_over_pes(pe: &Pe, what: &str, share: &Tensor) -> Result<Tensor, Failure> {
    let all = pe.all_gather(&format!("gradient of {what}"), share.data.bytes())?;
    let shares = all.iter().map(|bytes| {
        let values = bytes.chunks_exact(4).map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]]));
        Tensor { shape: share.shape.clone(), data: Elements::F32(values.collect()) }
    });
    let shares: Vec<Tensor> = shares.collect();
    Ok(add_shares(&shares).unwrap_or_else(|| share.clone()))
}
