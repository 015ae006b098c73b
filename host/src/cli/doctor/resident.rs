//! Part of `deltalink doctor --self-test`: calls whose tensors lie on the device, against ordinary ones, bit for bit. On GPUs also
//! on a stream of somebody else, and captured and replayed. The short convolution's are in [`convolution`].

mod convolution;

use std::time::Duration;

use crate::exec::cpu::Cpu;
use crate::exec::{DeviceInputs, DeviceTensor, ExecError, Executor};
use crate::generate::{BetaKind, Decay, GateKind, RandomUpstream, Spec};
use crate::gradients::{Gradients, Upstream};
use crate::inputs::Inputs;
use crate::op::whole::{Share, UpstreamShare};
use crate::op::{Config, ContextParallel, ForwardOut, OpError, Pending, Saved};
use crate::plan::{Cuts, Plan, PlanError};
use crate::tensor::{Dtype, Tensor};
use crate::world::{Pe, RunError, WorldError, WorldOptions, run_threads};

/// Rounds of calls that wait for none of them.
const ROUNDS: usize = 5;
/// Bound of waits.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Symmetric memory of a PE: the slots of both directions for the problems below.
const HEAP_BYTES: usize = 64 << 20;

/// Calls on the device do not do what ordinary ones do.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub(in super::super) enum ResidentError {
    #[error("PE {rank}, {dtype}: {what} of {how} differs from that of an ordinary call")]
    Differs { rank: usize, dtype: Dtype, what: &'static str, how: String },
    #[cfg(feature = "cuda")]
    #[error("captured calls have {others} copies or fills beside {kernels} launches; there should be none")]
    Copies { kernels: usize, others: usize },
    #[error(transparent)]
    Op(#[from] OpError),
    #[error(transparent)]
    Convolution(#[from] crate::op::convolution::ShortConvolutionError),
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[error(transparent)]
    Input(#[from] crate::error::InputError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    World(#[from] WorldError),
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Virtual(#[from] crate::world::virtual_pes::VirtualError),
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::exec::cuda::CudaError),
}

/// What was compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Compared {
    pub pes: usize,
    /// Calls whose results were compared.
    pub calls: usize,
    /// Launches in captured calls, forward and backward, on PE 0.
    pub captured: Option<usize>,
}

/// KDA and GDN first, then the short convolution.
pub(in super::super) type Both = [Compared; 2];

/// One that the kernels for Hopper take, and one that they do not.
fn specs() -> [Spec; 2] {
    let base = Spec { decay: Decay::Slow, beta: BetaKind::Small, l2norm: true, ..Spec::default() };
    [
        Spec { t: 300, h: 2, hv: 4, k: 128, v: 128, dtype: Dtype::Bf16, gate: GateKind::LowerBound, ..base.clone() },
        Spec { t: 150, h: 1, hv: 2, k: 32, v: 48, gate: GateKind::Softplus, initial_state: true, ..base },
    ]
}

/// A PE's share of a problem on its device, and what ordinary calls make of it.
struct Case<X: Executor> {
    rank: usize,
    dtype: Dtype,
    inputs: DeviceInputs<X>,
    d_o: DeviceTensor<X>,
    o: DeviceTensor<X>,
    states: DeviceTensor<X>,
    gradients: Gradients<DeviceTensor<X>>,
    want: (Tensor, Tensor, Gradients),
    calls: usize,
}

impl<X: Executor> Case<X> {
    fn new(
        op: &mut ContextParallel<'_, X>,
        rank: usize,
        plan: &Plan,
        inputs: &Inputs<'_>,
        upstream: &Upstream<'_>,
    ) -> Result<Self, ResidentError> {
        let (forward, saved) = op.forward_saving(plan, inputs)?;
        let gradients = op.backward(plan, inputs, saved, upstream)?.gradients;
        let states = forward.final_state.unwrap_or_else(|| Tensor::zeros(Dtype::F32, &[0]));
        let exec = op.executor_mut();
        Ok(Self {
            rank,
            dtype: inputs.dtype(),
            inputs: DeviceInputs::of(exec, inputs)?,
            d_o: DeviceTensor::of(exec, &upstream.d_o)?,
            o: DeviceTensor::new(exec, &forward.o.shape, inputs.dtype())?,
            states: DeviceTensor::new(exec, &states.shape, Dtype::F32)?,
            gradients: gradients.try_map(|x| DeviceTensor::new(exec, &x.shape, x.data.dtype()))?,
            want: (forward.o, states, gradients),
            calls: 0,
        })
    }

    /// Enqueues a forward and a backward call.
    fn enqueue(
        &mut self,
        op: &mut ContextParallel<'_, X>,
        plan: &Plan,
        host: &Inputs<'_>,
    ) -> Result<Pending<X>, OpError> {
        let inputs = self.inputs.inputs(host)?;
        let upstream = Upstream { d_o: self.d_o.view()?, d_final_state: None };
        let mut out = ForwardOut { o: self.o.view_mut()?, final_state: Some(self.states.view_mut()?) };
        let (_, saved): (_, Saved<X>) = op.enqueue_forward_saving(plan, &inputs, &mut out)?;
        let mut out = self.gradients.try_map_mut(DeviceTensor::view_mut)?;
        self.calls += 2;
        op.enqueue_backward(plan, &inputs, saved, &upstream, &mut out)
    }

    /// The same calls, each awaited.
    fn call(&mut self, op: &mut ContextParallel<'_, X>, plan: &Plan, host: &Inputs<'_>) -> Result<(), OpError> {
        let inputs = self.inputs.inputs(host)?;
        let upstream = Upstream { d_o: self.d_o.view()?, d_final_state: None };
        let mut out = ForwardOut { o: self.o.view_mut()?, final_state: Some(self.states.view_mut()?) };
        let (_, saved) = op.forward_saving_into(plan, &inputs, &mut out)?;
        let mut out = self.gradients.try_map_mut(DeviceTensor::view_mut)?;
        op.backward_into(plan, &inputs, saved, &upstream, &mut out)?;
        self.calls += 2;
        Ok(())
    }

    /// Compares what lies on the device, and spoils it for the next comparison.
    fn compare(&mut self, exec: &mut X, how: &str) -> Result<(), ResidentError> {
        let (rank, dtype) = (self.rank, self.dtype);
        let differs = |what| ResidentError::Differs { rank, dtype, what, how: how.to_owned() };
        let mut same = |found: &mut DeviceTensor<X>, want: &Tensor, what| {
            let alike = found.read(exec)?.data.bytes() == want.data.bytes();
            found.spoil(exec)?;
            if alike { Ok(()) } else { Err(differs(what)) }
        };
        let (o, states, gradients) = &self.want;
        same(&mut self.o, o, "o")?;
        same(&mut self.states, states, "the final state")?;
        let Gradients { dq, dk, dv, dg, dbeta, da_log, ddt_bias, d_initial_state } = &mut self.gradients;
        same(dq, &gradients.dq, "dq")?;
        same(dk, &gradients.dk, "dk")?;
        same(dv, &gradients.dv, "dv")?;
        same(dg, &gradients.dg, "dg")?;
        same(dbeta, &gradients.dbeta, "dbeta")?;
        let optional = [
            (da_log, &gradients.da_log, "dA_log"),
            (ddt_bias, &gradients.ddt_bias, "ddt_bias"),
            (d_initial_state, &gradients.d_initial_state, "dh0"),
        ];
        for (found, want, what) in optional {
            if let Some((found, want)) = found.as_mut().zip(want.as_ref()) {
                same(found, want, what)?;
            }
        }
        Ok(())
    }
}

/// What a device adds to the comparison: it has the operation, the case and what it is called with.
type More<X> =
    fn(&mut ContextParallel<'_, X>, &mut Case<X>, &Plan, &Inputs<'_>) -> Result<Option<usize>, ResidentError>;

/// Compares on one PE, all problems.
fn compare_on<X: Executor>(
    pe: &Pe,
    mut executor: impl FnMut() -> Result<X, ResidentError>,
    more: More<X>,
) -> Result<Compared, ResidentError> {
    let mut compared = Compared { pes: pe.size(), ..Compared::default() };
    for spec in specs() {
        let (problem, upstream): (_, RandomUpstream) = (spec.generate(), spec.generate_upstream(false));
        let plan = Plan::batch(spec.b, spec.t, &Cuts::equal(pe.size()))?;
        let whole = problem.inputs();
        let (share, upstream) =
            (Share::new(&plan, pe.rank(), &whole), UpstreamShare::new(&plan, pe.rank(), &upstream.view()));
        let host = share.inputs(&whole);
        let mut op = ContextParallel::on(pe, Config::default(), executor()?)?;
        let mut case = Case::new(&mut op, pe.rank(), &plan, &host, &upstream.view())?;
        case.call(&mut op, &plan, &host)?;
        case.compare(op.executor_mut(), "calls with tensors on the device")?;
        for _ in 1..ROUNDS {
            // Dropped: what goes wrong shows below.
            drop(case.enqueue(&mut op, &plan, &host)?);
        }
        let last = case.enqueue(&mut op, &plan, &host)?;
        op.wait(last)?;
        case.compare(op.executor_mut(), "calls that were enqueued")?;
        compared.captured = more(&mut op, &mut case, &plan, &host)?.or(compared.captured);
        compared.calls += case.calls;
    }
    Ok(compared)
}

fn options() -> WorldOptions {
    WorldOptions { heap_bytes: HEAP_BYTES, timeout: TIMEOUT }
}

fn first<T>(parts: Result<Vec<T>, RunError<ResidentError>>) -> Result<T, ResidentError> {
    let parts = parts.map_err(|error| match error {
        RunError::World(error) => error.into(),
        RunError::Pe { error, .. } => error,
        RunError::Panic { rank, message } => WorldError::PeFailed { rank, message }.into(),
    })?;
    Ok(parts.into_iter().next().expect("a world has a PE"))
}

/// On the CPU, with two PEs.
pub(super) fn on_cpu() -> Result<Both, ResidentError> {
    let executor = || Ok(Cpu::new(1).map_err(ExecError::from)?);
    first(run_threads(2, &options(), |pe| {
        let rule = compare_on(pe, executor, |_, _, _, _| Ok(None))?;
        Ok([rule, convolution::compare_on(pe, executor, |_, _| Ok(None))?])
    }))
}

/// On GPUs: with two PEs if there are two.
#[cfg(feature = "cuda")]
pub(super) fn on_gpus() -> Result<Both, ResidentError> {
    use crate::exec::cuda::{CudaExecutor, Gpu, Kernels, Sharing};
    use crate::world::virtual_pes::run_virtual_pes;
    let gpus = (0..Gpu::count()?.min(2)).map(Gpu::open).collect::<Result<Vec<_>, _>>()?;
    first(run_virtual_pes(gpus.len(), &gpus, &options(), HEAP_BYTES, |on| {
        let executor = || Ok(CudaExecutor::new(on.gpu, Kernels::direct(on.gpu)?, on.heap.clone(), Sharing::NONE)?);
        let rule = compare_on(on.pe, executor, streams_and_graphs)?;
        Ok([rule, convolution::compare_on(on.pe, executor, convolution::streams_and_graphs)?])
    }))
}

/// Calls on a stream that the executor did not make, and captured ones, mixed with ordinary ones.
#[cfg(feature = "cuda")]
fn streams_and_graphs(
    op: &mut ContextParallel<'_, crate::exec::cuda::CudaExecutor>,
    case: &mut Case<crate::exec::cuda::CudaExecutor>,
    plan: &Plan,
    host: &Inputs<'_>,
) -> Result<Option<usize>, ResidentError> {
    let stream = op.executor().gpu().stream()?;
    // SAFETY: a stream of the executor's GPU, which lives until the executor has another one, below or when this fails: then
    // the operation is not used again.
    unsafe { op.executor_mut().use_stream(stream.raw() as u64)? };
    let compared = (|| {
        for _ in 0..ROUNDS {
            drop(case.enqueue(op, plan, host)?);
        }
        // Only the stream is awaited, as its owner would.
        stream.synchronize()?;
        op.check_enqueued()?;
        case.compare(op.executor_mut(), "calls on another stream")?;

        let captured = op.capture(|op| case.enqueue(op, plan, host).map(drop))?;
        for round in 0..ROUNDS {
            // SAFETY: the tensors are the case's, which stays.
            let replayed = unsafe { op.replay(&captured)? };
            op.wait(replayed)?;
            case.compare(op.executor_mut(), &format!("replay {round} of captured calls"))?;
            if round % 2 == 0 {
                case.call(op, plan, host)?;
                case.compare(op.executor_mut(), "ordinary calls between replays")?;
            }
        }
        for _ in 0..ROUNDS {
            // SAFETY: as above.
            drop(unsafe { op.replay(&captured)? });
        }
        stream.synchronize()?;
        op.check_enqueued()?;
        case.compare(op.executor_mut(), "replays back to back")?;
        match captured.counts() {
            (kernels, 0) => Ok(kernels),
            (kernels, others) => Err(ResidentError::Copies { kernels, others }),
        }
    })();
    // SAFETY: the default stream lives as long as the context.
    unsafe { op.executor_mut().use_stream(0)? };
    compared.map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_on_the_cpus_memory_are_ordinary_ones() {
        let [rule, convolution] = on_cpu().unwrap();
        assert_eq!(rule, Compared { pes: 2, calls: 2 * 2 * (1 + ROUNDS), captured: None });
        assert_eq!(convolution, rule);
    }
}
