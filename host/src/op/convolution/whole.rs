//! A whole batch in one process: cut it up, run it on PEs that are threads, put the results together.

use super::inputs::{check_inputs, check_upstream, check_values};
use super::{
    Activation, ConvolutionConfig, ConvolutionGradients, ConvolutionInput, ConvolutionOutput, ConvolutionUpstream,
    ShortConvolution, ShortConvolutionError,
};
use crate::error::InputError;
use crate::exec::Executor;
use crate::gradients::add_shares;
use crate::op::whole::{take_rows, take_tokens};
use crate::op::{Device, Report};
use crate::plan::Plan;
use crate::tensor::{Dtype, Tensor, TensorView};
use crate::world::{RunError, WorldError, WorldOptions, run_threads};

/// Results of a whole batch.
#[derive(Clone, Debug)]
pub struct WholeConvolution {
    /// One for each input.
    pub outputs: Vec<ConvolutionOutput>,
    /// Counts and times of each PE.
    pub reports: Vec<Report>,
}

/// Gradients of a whole batch.
#[derive(Clone, Debug)]
pub struct WholeConvolutionBackward {
    /// One for each input; shares of the gradients of weights and bias are added up in the order of the ranks.
    pub gradients: Vec<ConvolutionGradients>,
    /// Counts and times of each PE, of the backward call.
    pub reports: Vec<Report>,
}

/// One PE's share of one convolution's inputs, copied. Weights and bias are everybody's.
#[derive(Clone, Debug)]
pub struct Share {
    x: Tensor,
    initial_state: Option<Tensor>,
}

impl Share {
    /// What rank `rank` of `plan` holds of `whole`.
    ///
    /// # Panics
    /// If the tensors do not fit the plan.
    pub fn new(plan: &Plan, rank: usize, whole: &ConvolutionInput<'_>) -> Self {
        Self {
            x: take_tokens(&whole.x, plan.cuts[rank], plan.cuts[rank + 1]),
            initial_state: whole.initial_state.as_ref().map(|initial| take_rows(initial, &plan.ranks[rank].starts)),
        }
    }

    /// The share as an input.
    pub fn input<'a>(&'a self, whole: &ConvolutionInput<'a>) -> ConvolutionInput<'a> {
        let initial_state = self.initial_state.as_ref().map(Tensor::view);
        ConvolutionInput { x: self.x.view(), initial_state, ..whole.clone() }
    }
}

/// One PE's share of one convolution's upstream gradients, copied.
#[derive(Clone, Debug)]
pub struct UpstreamShare {
    dy: Tensor,
    d_final_state: Option<Tensor>,
}

impl UpstreamShare {
    /// What belongs to the results of rank `rank` of `plan`.
    ///
    /// # Panics
    /// If the tensors do not fit the plan.
    pub fn new(plan: &Plan, rank: usize, whole: &ConvolutionUpstream<'_>) -> Self {
        Self {
            dy: take_tokens(&whole.dy, plan.cuts[rank], plan.cuts[rank + 1]),
            d_final_state: whole.d_final_state.as_ref().map(|states| take_rows(states, &plan.ranks[rank].ends)),
        }
    }

    /// The share as upstream gradients.
    pub fn upstream(&self) -> ConvolutionUpstream<'_> {
        let d_final_state = self.d_final_state.as_ref().map(Tensor::view);
        ConvolutionUpstream { dy: self.dy.view(), d_final_state }
    }
}

/// A call on the whole batch.
struct Call<'a> {
    plan: &'a Plan,
    inputs: &'a [ConvolutionInput<'a>],
    activation: Activation,
    /// None for a forward call.
    upstream: Option<&'a [ConvolutionUpstream<'a>]>,
}

/// What a call returns on one PE.
struct PePart {
    outputs: Vec<ConvolutionOutput>,
    gradients: Vec<ConvolutionGradients>,
    report: Report,
}

/// Computes outputs of a whole batch on as many threads as the plan has PEs, on the device that `config` names.
///
/// # Errors
/// [`ShortConvolutionError`], of the inputs or of the PE that failed first.
pub fn forward(
    plan: &Plan,
    inputs: &[ConvolutionInput<'_>],
    activation: Activation,
    config: &ConvolutionConfig,
    options: &WorldOptions,
) -> Result<WholeConvolution, ShortConvolutionError> {
    let call = Call { plan, inputs, activation, upstream: None };
    let parts = call.run(config, options)?;
    let mut outputs = Vec::new();
    for (i, input) in inputs.iter().enumerate() {
        let part = |rank: usize| &parts[rank].outputs[i];
        let states = || {
            let reach = input.weight.shape()[1] - 1;
            let shape = [plan.layout.sequences(), input.x.shape()[2], reach];
            let ends = |rank: usize| &plan.ranks[rank].ends[..];
            join_rows(plan, input.x.dtype(), &shape, ends, |rank| part(rank).final_state.as_ref())
        };
        outputs.push(ConvolutionOutput {
            y: join_tokens(plan, &input.x, |rank| &part(rank).y),
            final_state: config.final_state.then(states),
        });
    }
    Ok(WholeConvolution { outputs, reports: parts.into_iter().map(|part| part.report).collect() })
}

/// Computes gradients of a whole batch, with a forward call before; otherwise as [`forward`].
///
/// # Errors
/// As [`forward`].
pub fn backward(
    plan: &Plan,
    inputs: &[ConvolutionInput<'_>],
    activation: Activation,
    upstream: &[ConvolutionUpstream<'_>],
    config: &ConvolutionConfig,
    options: &WorldOptions,
) -> Result<WholeConvolutionBackward, ShortConvolutionError> {
    let call = Call { plan, inputs, activation, upstream: Some(upstream) };
    let parts = call.run(config, options)?;
    let mut gradients = Vec::new();
    for (i, input) in inputs.iter().enumerate() {
        let part = |rank: usize| &parts[rank].gradients[i];
        let starts = |rank: usize| &plan.ranks[rank].starts[..];
        let initial = input.initial_state.as_ref();
        let d_initial_state = initial.map(|initial| {
            join_rows(plan, Dtype::F32, initial.shape(), starts, |rank| part(rank).d_initial_state.as_ref())
        });
        gradients.push(ConvolutionGradients {
            dx: join_tokens(plan, &input.x, |rank| &part(rank).dx),
            dweight: add_shares((0..plan.pes()).map(|rank| &part(rank).dweight)).expect("at least one rank"),
            dbias: add_shares((0..plan.pes()).flat_map(|rank| part(rank).dbias.as_ref())),
            d_initial_state,
        });
    }
    Ok(WholeConvolutionBackward { gradients, reports: parts.into_iter().map(|part| part.report).collect() })
}

impl Call<'_> {
    /// Checks the whole batch, and runs the call on every PE.
    fn run(&self, config: &ConvolutionConfig, options: &WorldOptions) -> Result<Vec<PePart>, ShortConvolutionError> {
        let sequences = self.plan.layout.sequences();
        let sizes = check_inputs(self.inputs, sequences, "in all")?;
        let (want_b, want_t) = (self.plan.ranks[0].batch, self.plan.layout.tokens());
        if (sizes.b, sizes.t) != (want_b, want_t) {
            return Err(InputError::Tokens { b: sizes.b, t: sizes.t, want_b, want_t }.into());
        }
        if let Some(upstream) = self.upstream {
            check_upstream(upstream, &sizes, sequences, "in all")?;
        }
        if !config.allow_nonfinite {
            check_values(self.inputs, self.upstream.unwrap_or_default())?;
        }
        let parts = match config.device {
            Device::Cpu => run_threads(self.plan.pes(), options, |pe| {
                self.on_pe(pe.rank(), ShortConvolution::new(pe, config.clone())?)
            }),
            #[cfg(feature = "cuda")]
            Device::Cuda => self.on_gpus(&sizes, config, options),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda => return Err(crate::op::OpError::NoCuda.into()),
        };
        parts.map_err(|error| match error {
            RunError::World(error) => error.into(),
            RunError::Pe { error, .. } => error,
            RunError::Panic { rank, message } => WorldError::PeFailed { rank, message }.into(),
        })
    }

    fn on_pe<X: Executor>(
        &self,
        rank: usize,
        mut op: ShortConvolution<'_, X>,
    ) -> Result<PePart, ShortConvolutionError> {
        let shares: Vec<_> = self.inputs.iter().map(|input| Share::new(self.plan, rank, input)).collect();
        let inputs: Vec<_> = shares.iter().zip(self.inputs).map(|(share, whole)| share.input(whole)).collect();
        let Some(upstream) = self.upstream else {
            let forward = op.forward(self.plan, &inputs, self.activation)?;
            return Ok(PePart { outputs: forward.outputs, gradients: Vec::new(), report: forward.report });
        };
        let (forward, saved) = op.forward_saving(self.plan, &inputs, self.activation)?;
        let shares: Vec<_> = upstream.iter().map(|whole| UpstreamShare::new(self.plan, rank, whole)).collect();
        let upstream: Vec<_> = shares.iter().map(UpstreamShare::upstream).collect();
        let backward = op.backward(self.plan, &inputs, self.activation, &saved, &upstream)?;
        Ok(PePart { outputs: forward.outputs, gradients: backward.gradients, report: backward.report })
    }

    /// On all GPUs of this machine, PEs dealt out to them in turn.
    #[cfg(feature = "cuda")]
    fn on_gpus(
        &self,
        sizes: &super::Sizes,
        config: &ConvolutionConfig,
        options: &WorldOptions,
    ) -> Result<Vec<PePart>, RunError<ShortConvolutionError>> {
        use super::{Direction, halo, layout};
        use crate::exec::ExecError;
        use crate::exec::cuda::{CudaError, CudaExecutor, Gpu, Kernels, Sharing};
        use crate::op::channel::heap_bytes;
        use crate::world::virtual_pes::run_virtual_pes;

        let failed = |error: ShortConvolutionError| RunError::Pe { rank: 0, error };
        let gpus = || -> Result<Vec<Gpu>, CudaError> { (0..Gpu::count()?).map(Gpu::open).collect() };
        let gpus = gpus().map_err(|error| failed(ExecError::from(error).into()))?;
        let pes = self.plan.pes();
        if config.transport == crate::op::Transport::Put && pes > 1 {
            return Err(failed(ExecError::PutsOfThreads.into()));
        }
        let mut pool_bytes = 0;
        for direction in [Direction::Forward, Direction::Backward] {
            let layout = layout(pes, halo::lanes(self.plan, direction), sizes, direction).map_err(failed)?;
            pool_bytes += heap_bytes(&layout);
        }
        // The same on all PEs, also where the last round of dealing leaves GPUs out.
        let sharing = Sharing { pes: pes.div_ceil(gpus.len()), concurrent: false };
        run_virtual_pes(pes, &gpus, options, pool_bytes, |virtual_pe| {
            let kernels = Kernels::direct(virtual_pe.gpu).map_err(ExecError::from)?;
            let exec = CudaExecutor::new(virtual_pe.gpu, kernels, virtual_pe.heap.clone(), sharing);
            let exec = exec.map_err(ExecError::from)?;
            self.on_pe(virtual_pe.pe.rank(), ShortConvolution::on(virtual_pe.pe, config.clone(), exec)?)
        })
    }
}

/// Puts the ranks' tokens together to a tensor like `whole`.
fn join_tokens<'a>(plan: &Plan, whole: &TensorView<'_>, part: impl Fn(usize) -> &'a Tensor) -> Tensor {
    let (mut all, shape) = (Tensor::zeros(whole.dtype(), whole.shape()), whole.shape());
    let token = shape[2] * whole.dtype().size();
    for rank in 0..plan.pes() {
        let (first, len) = (plan.cuts[rank], plan.cuts[rank + 1] - plan.cuts[rank]);
        for row in 0..shape[0] {
            let from = &part(rank).data.bytes()[row * len * token..][..len * token];
            all.data.bytes_mut()[(row * shape[1] + first) * token..][..len * token].copy_from_slice(from);
        }
    }
    all
}

/// Puts the ranks' rows, of the sequences that `rows` names, together.
fn join_rows<'a>(
    plan: &'a Plan,
    dtype: Dtype,
    shape: &[usize],
    rows: impl Fn(usize) -> &'a [usize],
    part: impl Fn(usize) -> Option<&'a Tensor>,
) -> Tensor {
    let mut all = Tensor::zeros(dtype, shape);
    let row = shape[1..].iter().product::<usize>() * dtype.size();
    for rank in 0..plan.pes() {
        let part = part(rank).expect("every rank returns what was asked for");
        for (i, &sequence) in rows(rank).iter().enumerate() {
            all.data.bytes_mut()[sequence * row..][..row].copy_from_slice(&part.data.bytes()[i * row..][..row]);
        }
    }
    all
}
