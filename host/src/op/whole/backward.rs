//! Training a whole batch in one process.

use super::{Job, Share, Whole, check_whole, join, on_all_pes, put_rows, put_tokens, take_rows, take_tokens};
use crate::exec::Executor;
use crate::gradients::{Gradients, Upstream, add_shares};
use crate::inputs::Inputs;
use crate::op::training::check_upstream;
use crate::op::{Backward, Config, ContextParallel, Forward, OpError, Report};
use crate::plan::Plan;
use crate::tensor::Tensor;
use crate::trace::Trace;
use crate::world::{Pe, WorldOptions};

/// Results of a forward and a backward call over a whole batch.
#[derive(Clone, Debug)]
pub struct WholeBackward {
    /// Of the forward call.
    pub forward: Whole,
    /// Complete: those of `A_log` and `dt_bias` are added up over the PEs, in the order of their ranks.
    pub gradients: Gradients,
    /// Bytes of device memory that each PE kept between the two calls.
    pub saved_bytes: Vec<usize>,
    /// Counts and times of each PE's backward call.
    pub reports: Vec<Report>,
    /// The timeline of the backward call of all PEs, if [`Config::trace`].
    pub trace: Option<Trace>,
}

/// One PE's share of upstream gradients, copied.
#[derive(Clone, Debug)]
pub struct UpstreamShare {
    d_o: Tensor,
    d_final_state: Option<Tensor>,
}

impl UpstreamShare {
    /// What rank `rank` of `plan` gets of `upstream`.
    ///
    /// # Panics
    /// If the tensors do not fit the plan.
    pub fn new(plan: &Plan, rank: usize, upstream: &Upstream<'_>) -> Self {
        let ends = &plan.ranks[rank].ends;
        Self {
            d_o: take_tokens(&upstream.d_o, plan.cuts[rank], plan.cuts[rank + 1]),
            d_final_state: upstream.d_final_state.as_ref().map(|dht| take_rows(dht, ends)),
        }
    }

    /// The share as the operation takes it.
    pub fn view(&self) -> Upstream<'_> {
        Upstream { d_o: self.d_o.view(), d_final_state: self.d_final_state.as_ref().map(Tensor::view) }
    }
}

/// Computes a whole batch and its gradients on as many threads as the plan has PEs, on the device that `config` names.
///
/// # Errors
/// [`OpError`], of the inputs or of the PE that failed first.
pub fn backward(
    plan: &Plan,
    whole: &Inputs<'_>,
    upstream: &Upstream<'_>,
    config: &Config,
    options: &WorldOptions,
) -> Result<WholeBackward, OpError> {
    let parts = backward_by(plan, whole, upstream, config, options, |_, step| step(&mut || {}))?;
    Ok(join_backward(plan, whole, parts))
}

/// What computes one PE's share forward and backward; it calls its argument between the two calls.
pub type BackwardStep<'a> = dyn FnMut(&mut dyn FnMut()) -> Result<PartBackward, OpError> + 'a;

/// As [`backward`], with what each PE does in the caller's hands, as [`forward_by`](super::forward_by) has it for forward calls.
///
/// # Errors
/// [`OpError`], of the inputs or of the PE that failed first.
pub fn backward_by<T: Send>(
    plan: &Plan,
    whole: &Inputs<'_>,
    upstream: &Upstream<'_>,
    config: &Config,
    options: &WorldOptions,
    body: impl Fn(&Pe, &mut BackwardStep<'_>) -> Result<T, OpError> + Sync,
) -> Result<Vec<T>, OpError> {
    check_whole(plan, whole, config)?;
    check_upstream(upstream, whole, &whole.dims()?, plan.layout.sequences(), config.allow_nonfinite)?;
    on_all_pes(&BackwardJob { plan, whole, upstream, body }, plan, whole, config, options)
}

/// What one PE returns of a forward and a backward call.
#[derive(Clone, Debug)]
pub struct PartBackward {
    /// Of the forward call.
    pub forward: Forward,
    /// Bytes of device memory that were kept between the two calls.
    pub saved_bytes: usize,
    /// Of the backward call.
    pub backward: Backward,
}

/// A forward and a backward call of one PE on its shares.
///
/// # Errors
/// [`OpError`] of either call.
pub fn one_backward<X: Executor>(
    op: &mut ContextParallel<'_, X>,
    plan: &Plan,
    share: &Inputs<'_>,
    upstream: &Upstream<'_>,
) -> Result<PartBackward, OpError> {
    one_backward_by(op, plan, share, upstream, &mut || {})
}

/// As [`one_backward`]; calls `between` between the two calls.
///
/// # Errors
/// [`OpError`] of either call.
pub fn one_backward_by<X: Executor>(
    op: &mut ContextParallel<'_, X>,
    plan: &Plan,
    share: &Inputs<'_>,
    upstream: &Upstream<'_>,
    between: &mut dyn FnMut(),
) -> Result<PartBackward, OpError> {
    let (forward, saved) = op.forward_saving(plan, share)?;
    let saved_bytes = saved.bytes();
    between();
    let backward = op.backward(plan, share, saved, upstream)?;
    Ok(PartBackward { forward, saved_bytes, backward })
}

/// Puts the PEs' results together, in the order of the ranks.
///
/// # Panics
/// If a part does not fit the plan.
pub fn join_backward(plan: &Plan, whole: &Inputs<'_>, parts: Vec<PartBackward>) -> WholeBackward {
    let gradients = join_gradients(plan, whole, parts.iter().map(|part| &part.backward.gradients));
    let (mut forwards, mut saved_bytes, mut reports, mut traces) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for PartBackward { forward, saved_bytes: bytes, backward } in parts {
        forwards.push(forward);
        saved_bytes.push(bytes);
        reports.push(backward.report);
        traces.extend(backward.trace);
    }
    let trace = (!traces.is_empty()).then(|| Trace::merge(traces));
    WholeBackward { forward: join(plan, whole, forwards), gradients, saved_bytes, reports, trace }
}

struct BackwardJob<'a, F> {
    plan: &'a Plan,
    whole: &'a Inputs<'a>,
    upstream: &'a Upstream<'a>,
    body: F,
}

impl<T: Send, F> Job for BackwardJob<'_, F>
where
    F: Fn(&Pe, &mut BackwardStep<'_>) -> Result<T, OpError> + Sync,
{
    type Part = T;
    const DIRECTIONS: usize = 2;

    fn run<X: Executor>(&self, mut op: ContextParallel<'_, X>, pe: &Pe) -> Result<T, OpError> {
        let share = Share::new(self.plan, pe.rank(), self.whole);
        let upstream = UpstreamShare::new(self.plan, pe.rank(), self.upstream);
        let (inputs, upstream) = (share.inputs(self.whole), upstream.view());
        (self.body)(pe, &mut |between| one_backward_by(&mut op, self.plan, &inputs, &upstream, between))
    }
}

/// Puts the PEs' gradients together, in the order of the ranks.
///
/// # Panics
/// If a part does not fit the plan.
pub fn join_gradients<'a>(
    plan: &Plan,
    whole: &Inputs<'_>,
    parts: impl IntoIterator<Item = &'a Gradients>,
) -> Gradients {
    let parts: Vec<&Gradients> = parts.into_iter().collect();
    let mut all = Gradients::zeros(whole);
    for (rank, part) in parts.iter().enumerate() {
        let first = plan.cuts[rank];
        put_tokens(&mut all.dq, &part.dq, first);
        put_tokens(&mut all.dk, &part.dk, first);
        put_tokens(&mut all.dv, &part.dv, first);
        put_tokens(&mut all.dg, &part.dg, first);
        put_tokens(&mut all.dbeta, &part.dbeta, first);
        if let (Some(all), Some(part)) = (&mut all.d_initial_state, &part.d_initial_state) {
            put_rows(all, part, &plan.ranks[rank].starts);
        }
    }
    Gradients {
        da_log: add_shares(parts.iter().filter_map(|part| part.da_log.as_ref())),
        ddt_bias: add_shares(parts.iter().filter_map(|part| part.ddt_bias.as_ref())),
        ..all
    }
}

/// What of the whole gradients, by name, belongs to the tokens and sequences of rank `rank`; gate parameters have no such part.
pub fn gradients_of_rank(
    plan: &Plan,
    rank: usize,
    whole: &Inputs<'_>,
    gradients: &Gradients<Vec<f64>>,
) -> Vec<(&'static str, Vec<f64>)> {
    let (b, t) = (plan.ranks[rank].batch, plan.layout.tokens());
    let (first, last) = (plan.cuts[rank], plan.cuts[rank + 1]);
    let part = |(name, all): (&'static str, &Vec<f64>)| match name {
        "dA_log" | "ddt_bias" => None,
        "dh0" => {
            let size = all.len() / plan.layout.sequences().max(1);
            let rows = plan.ranks[rank].starts.iter();
            Some((name, rows.flat_map(|&seq| all[seq * size..][..size].iter().copied()).collect()))
        }
        _ => {
            let width = if t == 0 { 0 } else { all.len() / (b * t) };
            let row = |row: usize| (row * t + first) * width..(row * t + last) * width;
            Some((name, (0..b).flat_map(|i| all[row(i)].iter().copied()).collect()))
        }
    };
    gradients.named(whole).into_iter().filter_map(part).collect()
}
