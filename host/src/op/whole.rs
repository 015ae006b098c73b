//! A whole batch in one process: cut it up, run it on PEs that are threads, put the results together.

mod backward;

use std::time::Instant;

pub use backward::{
    PartBackward, UpstreamShare, WholeBackward, backward, gradients_of_rank, join_backward, join_gradients,
    one_backward,
};

use super::{Config, ContextParallel, Device, Forward, OpError, Report};
use crate::exec::Executor;
use crate::inputs::{Beta, Gate, Inputs, StateLayout};
use crate::plan::Plan;
use crate::tensor::{Buffer, Dtype, Tensor, TensorView};
use crate::trace::Trace;
use crate::world::{Pe, RunError, WorldOptions, run_threads};

/// Results of a whole batch.
#[derive(Clone, Debug)]
pub struct Whole {
    /// `[B,T,HV,V]`, in the element type of q.
    pub o: Tensor,
    /// f32 `[N,HV,K,V]` (or `[N,HV,V,K]`), if [`Config::final_state`].
    pub final_state: Option<Tensor>,
    /// Counts and times of each PE.
    pub reports: Vec<Report>,
    /// The timeline of all PEs, if [`Config::trace`].
    pub trace: Option<Trace>,
}

/// One PE's share of the inputs, copied.
#[derive(Clone, Debug)]
pub struct Share {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Option<Tensor>,
}

impl Share {
    /// What rank `rank` of `plan` holds of `whole`.
    ///
    /// # Panics
    /// If the tensors do not fit the plan ([`check_whole`] says so politely).
    pub fn new(plan: &Plan, rank: usize, whole: &Inputs<'_>) -> Self {
        let tokens = |x: &TensorView<'_>| take_tokens(x, plan.cuts[rank], plan.cuts[rank + 1]);
        let gate = match &whole.gate {
            Gate::Given(g) => g,
            Gate::Softplus { raw, .. } | Gate::LowerBound { raw, .. } => raw,
        };
        let (Beta::Given(beta) | Beta::Logits { logits: beta, .. }) = &whole.beta;
        let initial_state = whole.initial_state.as_ref().map(|h0| take_rows(h0, &plan.ranks[rank].starts));
        Self {
            q: tokens(&whole.q),
            k: tokens(&whole.k),
            v: tokens(&whole.v),
            gate: tokens(gate),
            beta: tokens(beta),
            initial_state,
        }
    }

    /// The share as inputs; what has no tokens (gate parameters, options) comes from `whole`.
    pub fn inputs<'a>(&'a self, whole: &Inputs<'a>) -> Inputs<'a> {
        let g = self.gate.view();
        let gate = match &whole.gate {
            Gate::Given(_) => Gate::Given(g),
            Gate::Softplus { a_log, dt_bias, .. } => {
                Gate::Softplus { raw: g, a_log: a_log.clone(), dt_bias: dt_bias.clone() }
            }
            Gate::LowerBound { a_log, dt_bias, bound, .. } => {
                Gate::LowerBound { raw: g, a_log: a_log.clone(), dt_bias: dt_bias.clone(), bound: *bound }
            }
        };
        let beta = match &whole.beta {
            Beta::Given(_) => Beta::Given(self.beta.view()),
            Beta::Logits { factor, .. } => Beta::Logits { logits: self.beta.view(), factor: *factor },
        };
        Inputs {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            gate,
            beta,
            initial_state: self.initial_state.as_ref().map(Tensor::view),
            ..whole.clone()
        }
    }
}

/// Checks that `whole` is what `plan` cuts up, and its values, which are copied from memory of the host.
///
/// # Errors
/// [`OpError::Input`].
pub fn check_whole(plan: &Plan, whole: &Inputs<'_>, config: &Config) -> Result<(), OpError> {
    use crate::error::InputError;
    let dims = whole.dims()?;
    whole.check_on_host()?;
    // Every rank holds all rows of the batch; packed sequences have one.
    let (want_b, want_t) = (plan.ranks[0].batch, plan.layout.tokens());
    if (dims.b, dims.t) != (want_b, want_t) {
        return Err(InputError::Tokens { b: dims.b, t: dims.t, want_b, want_t }.into());
    }
    if let Some(h0) = &whole.initial_state {
        let (found, want) = (h0.shape()[0], plan.layout.sequences());
        if found != want {
            return Err(InputError::StateRows { name: "h0", found, want, what: "in all" }.into());
        }
    }
    Ok(whole.check_values(config.allow_nonfinite)?)
}

/// Computes a whole batch on as many threads as the plan has PEs, on the device that `config` names.
///
/// # Errors
/// [`OpError`], of the inputs or of the PE that failed first.
pub fn forward(plan: &Plan, whole: &Inputs<'_>, config: &Config, options: &WorldOptions) -> Result<Whole, OpError> {
    Ok(join(plan, whole, forward_by(plan, whole, config, options, |_, step| step())?))
}

/// As [`forward`], with what each PE does in the caller's hands: `body` gets its PE and what computes that PE's share, which
/// may be called again and again, by all PEs alike. Returns what it returned, by rank.
///
/// # Errors
/// [`OpError`], of the inputs or of the PE that failed first.
pub fn forward_by<T: Send>(
    plan: &Plan,
    whole: &Inputs<'_>,
    config: &Config,
    options: &WorldOptions,
    body: impl Fn(&Pe, &mut dyn FnMut() -> Result<Forward, OpError>) -> Result<T, OpError> + Sync,
) -> Result<Vec<T>, OpError> {
    check_whole(plan, whole, config)?;
    on_all_pes(&ForwardJob { plan, whole, body }, plan, whole, config, options)
}

/// What each PE does with its operation, whatever the device.
trait Job: Sync {
    type Part: Send;

    /// Directions in which summaries travel: channels of each that the heap must hold.
    const DIRECTIONS: usize;

    fn run<X: Executor>(&self, op: ContextParallel<'_, X>, pe: &Pe) -> Result<Self::Part, OpError>;
}

struct ForwardJob<'a, F> {
    plan: &'a Plan,
    whole: &'a Inputs<'a>,
    body: F,
}

impl<T: Send, F> Job for ForwardJob<'_, F>
where
    F: Fn(&Pe, &mut dyn FnMut() -> Result<Forward, OpError>) -> Result<T, OpError> + Sync,
{
    type Part = T;
    const DIRECTIONS: usize = 1;

    fn run<X: Executor>(&self, mut op: ContextParallel<'_, X>, pe: &Pe) -> Result<T, OpError> {
        let share = Share::new(self.plan, pe.rank(), self.whole);
        let inputs = share.inputs(self.whole);
        (self.body)(pe, &mut || op.forward(self.plan, &inputs))
    }
}

/// Runs `job` on as many threads as the plan has PEs; the parts by rank.
fn on_all_pes<J: Job>(
    job: &J,
    plan: &Plan,
    whole: &Inputs<'_>,
    config: &Config,
    options: &WorldOptions,
) -> Result<Vec<J::Part>, OpError> {
    let origin = Instant::now();
    let parts = match config.device {
        Device::Cpu => run_threads(plan.pes(), options, |pe| {
            let mut op = ContextParallel::new(pe, config.clone())?;
            op.set_clock_origin(origin);
            job.run(op, pe)
        }),
        #[cfg(feature = "cuda")]
        Device::Cuda => on_gpus(job, plan, whole, config, options, origin),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => return Err(OpError::NoCuda),
    };
    // Sizes that only a build for GPUs asks for.
    let _ = (whole, J::DIRECTIONS);
    parts.map_err(|error| match error {
        RunError::World(error) => OpError::World(error),
        RunError::Pe { error, .. } => error,
        RunError::Panic { rank, message } => OpError::World(crate::world::WorldError::PeFailed { rank, message }),
    })
}

/// On all GPUs of this machine, PEs dealt out to them in turn.
#[cfg(feature = "cuda")]
fn on_gpus<J: Job>(
    job: &J,
    plan: &Plan,
    whole: &Inputs<'_>,
    config: &Config,
    options: &WorldOptions,
    origin: Instant,
) -> Result<Vec<J::Part>, RunError<OpError>> {
    use crate::exec::ExecError;
    use crate::exec::cuda::{CudaError, CudaExecutor, Gpu, Kernels, Sharing};
    use crate::world::virtual_pes::run_virtual_pes;

    let failed = |error: OpError| RunError::Pe { rank: 0, error };
    let gpus = || -> Result<Vec<Gpu>, CudaError> { (0..Gpu::count()?).map(Gpu::open).collect() };
    let gpus = gpus().map_err(|error| failed(ExecError::from(error).into()))?;
    if config.transport == super::Transport::Put && plan.pes() > 1 {
        return Err(failed(ExecError::PutsOfThreads.into()));
    }
    let dims = whole.dims().map_err(|error| failed(error.into()))?;
    let layout = super::channel::layout(plan, whole, &dims, config).map_err(failed)?;
    let pool_bytes = J::DIRECTIONS * super::channel::heap_bytes(&layout);
    // The same on all PEs, also where the last round of dealing leaves GPUs out: they must agree on whether they share.
    let sharing = Sharing { pes: plan.pes().div_ceil(gpus.len()), concurrent: false };
    run_virtual_pes(plan.pes(), &gpus, options, pool_bytes, |virtual_pe| {
        let kernels = Kernels::direct(virtual_pe.gpu).map_err(ExecError::from)?;
        let exec = CudaExecutor::new(virtual_pe.gpu, kernels, virtual_pe.heap.clone(), sharing);
        let exec = exec.map_err(ExecError::from)?;
        let mut op = ContextParallel::on(virtual_pe.pe, config.clone(), exec)?;
        op.set_clock_origin(origin);
        job.run(op, virtual_pe.pe)
    })
}

/// Puts the PEs' results together, in the order of the ranks.
pub fn join(plan: &Plan, whole: &Inputs<'_>, parts: Vec<Forward>) -> Whole {
    let shape = whole.v.shape().to_vec();
    let mut o = Tensor::zeros(whole.dtype(), &shape);
    let (k, v) = (whole.q.shape()[3], shape[3]);
    let state_shape = match whole.state_layout {
        StateLayout::KFirst => [plan.layout.sequences(), shape[2], k, v],
        StateLayout::VFirst => [plan.layout.sequences(), shape[2], v, k],
    };
    let wants_states = parts.iter().any(|part| part.final_state.is_some());
    let mut states = wants_states.then(|| Tensor::zeros(Dtype::F32, &state_shape));
    let (mut reports, mut traces) = (Vec::new(), Vec::new());
    for (rank, part) in parts.into_iter().enumerate() {
        put_tokens(&mut o, &part.o, plan.cuts[rank]);
        if let (Some(states), Some(part)) = (&mut states, &part.final_state) {
            put_rows(states, part, &plan.ranks[rank].ends);
        }
        reports.push(part.report);
        traces.extend(part.trace);
    }
    let trace = (!traces.is_empty()).then(|| Trace::merge(traces));
    Whole { o, final_state: states, reports, trace }
}

/// Tokens `first .. last` of every row of `[B,T,..]`.
pub(super) fn take_tokens(x: &TensorView<'_>, first: usize, last: usize) -> Tensor {
    let shape = x.shape();
    let row: usize = shape[2..].iter().product();
    let ranges = (0..shape[0]).map(|b| (b * shape[1] + first) * row..(b * shape[1] + last) * row);
    let mut taken = shape.to_vec();
    taken[1] = last - first;
    Tensor { shape: taken, data: gather(x, ranges) }
}

/// Puts `part`, a run of tokens of every row, at token `first` of the rows of `to`.
fn put_tokens(to: &mut Tensor, part: &Tensor, first: usize) {
    let (b, t, len) = (to.shape[0], to.shape[1], part.shape[1]);
    let token = to.shape[2..].iter().product::<usize>() * to.data.dtype().size();
    for row in 0..b {
        let from = &part.data.bytes()[row * len * token..][..len * token];
        to.data.bytes_mut()[(row * t + first) * token..][..len * token].copy_from_slice(from);
    }
}

/// Puts the rows of `part` at `rows` of the outermost dimension of `to`.
fn put_rows(to: &mut Tensor, part: &Tensor, rows: &[usize]) {
    let row = to.shape[1..].iter().product::<usize>() * to.data.dtype().size();
    for (i, &at) in rows.iter().enumerate() {
        to.data.bytes_mut()[at * row..][..row].copy_from_slice(&part.data.bytes()[i * row..][..row]);
    }
}

/// Rows `rows` of the outermost dimension.
pub(super) fn take_rows(x: &TensorView<'_>, rows: &[usize]) -> Tensor {
    let row: usize = x.shape()[1..].iter().product();
    let mut taken = x.shape().to_vec();
    taken[0] = rows.len();
    Tensor { shape: taken, data: gather(x, rows.iter().map(|&r| r * row..(r + 1) * row)) }
}

fn gather(x: &TensorView<'_>, ranges: impl Iterator<Item = std::ops::Range<usize>>) -> Buffer {
    use crate::tensor::Data;
    fn collect<T: Copy>(x: &[T], ranges: impl Iterator<Item = std::ops::Range<usize>>) -> Vec<T> {
        ranges.flat_map(|range| x[range].iter().copied()).collect()
    }
    match x.data() {
        Data::F32(x) => Buffer::F32(collect(x, ranges)),
        Data::Bf16(x) => Buffer::Bf16(collect(x, ranges)),
        Data::F16(x) => Buffer::F16(collect(x, ranges)),
    }
}
