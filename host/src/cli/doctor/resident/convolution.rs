//! The short convolution of calls on tensors of the device.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Compared, ROUNDS, ResidentError};
use crate::exec::Executor;
use crate::op::Pending;
use crate::op::convolution::whole::{Share, UpstreamShare};
use crate::op::convolution::{
    Activation, ConvolutionConfig, ConvolutionGradients, ConvolutionInput, ConvolutionOutput, ConvolutionUpstream,
    DeviceConvolution, ShortConvolution, ShortConvolutionError,
};
use crate::plan::{Cuts, Plan};
use crate::tensor::{Buffer, Dtype, Tensor};
use crate::world::Pe;

/// Packed sequences, of which one is cut, and channels of the convolutions.
const OFFSETS: [usize; 4] = [0, 2, 301, 700];
const CHANNELS: [usize; 3] = [256, 65, 128];
const TAPS: usize = 4;
const SILU: Activation = Activation::Silu;

/// A PE's share on its device, and what ordinary calls make of it.
pub(super) struct Case<X: Executor> {
    rank: usize,
    dtype: Dtype,
    plan: Plan,
    resident: Vec<DeviceConvolution<X>>,
    want: Vec<(ConvolutionOutput, ConvolutionGradients)>,
    pub calls: usize,
}

/// What a device adds to the comparison.
pub(super) type More<X> = fn(&mut ShortConvolution<'_, X>, &mut Case<X>) -> Result<Option<usize>, ResidentError>;

impl<X: Executor> Case<X> {
    fn new(op: &mut ShortConvolution<'_, X>, pe: &Pe, dtype: Dtype) -> Result<Self, ResidentError> {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut random = |dtype: Dtype, shape: &[usize]| {
            let values = (0..shape.iter().product()).map(|_| rng.random_range(-1.5..1.5));
            Tensor { shape: shape.to_vec(), data: Buffer::from_f64(dtype, values) }
        };
        let (n, tokens) = (OFFSETS.len() - 1, OFFSETS[OFFSETS.len() - 1]);
        let tensors = CHANNELS.map(|d| {
            [
                random(dtype, &[1, tokens, d]),
                random(Dtype::F32, &[d, TAPS]),
                random(Dtype::F32, &[d]),
                random(dtype, &[n, d, TAPS - 1]),
                random(dtype, &[1, tokens, d]),
                random(Dtype::F32, &[n, d, TAPS - 1]),
            ]
        });
        let (plan, rank) = (Plan::packed(&OFFSETS, &Cuts::equal(pe.size()))?, pe.rank());
        let whole: Vec<_> = tensors
            .iter()
            .map(|[x, weight, bias, initial, ..]| ConvolutionInput {
                x: x.view(),
                weight: weight.view(),
                bias: Some(bias.view()),
                initial_state: Some(initial.view()),
            })
            .collect();
        let upstream = tensors
            .iter()
            .map(|[.., dy, d_final]| ConvolutionUpstream { dy: dy.view(), d_final_state: Some(d_final.view()) });
        let shares: Vec<_> = whole.iter().map(|input| Share::new(&plan, rank, input)).collect();
        let inputs: Vec<_> = shares.iter().zip(&whole).map(|(share, whole)| share.input(whole)).collect();
        let shares: Vec<_> = upstream.map(|whole| UpstreamShare::new(&plan, rank, &whole)).collect();
        let upstream: Vec<_> = shares.iter().map(UpstreamShare::upstream).collect();
        let (forward, saved) = op.forward_saving(&plan, &inputs, SILU)?;
        let backward = op.backward(&plan, &inputs, SILU, &saved, &upstream)?;
        op.release(saved);
        let want: Vec<_> = forward.outputs.into_iter().zip(backward.gradients).collect();
        let mut resident = Vec::new();
        for ((input, upstream), (output, gradients)) in inputs.iter().zip(&upstream).zip(&want) {
            resident.push(DeviceConvolution::new(op.executor_mut(), (input, upstream), (output, gradients))?);
        }
        Ok(Self { rank, dtype, plan, resident, want, calls: 0 })
    }

    /// A forward and a backward call, each awaited.
    pub(super) fn call(&mut self, op: &mut ShortConvolution<'_, X>) -> Result<(), ShortConvolutionError> {
        let mut on = DeviceConvolution::call(&mut self.resident)?;
        let (_, saved) = op.forward_saving_into(&self.plan, &on.inputs, SILU, &mut on.outputs)?;
        op.backward_into(&self.plan, &on.inputs, SILU, &saved, &on.upstream, &mut on.gradients)?;
        op.release(saved);
        self.calls += 2;
        Ok(())
    }

    /// The same, enqueued.
    pub(super) fn enqueue(&mut self, op: &mut ShortConvolution<'_, X>) -> Result<Pending<X>, ShortConvolutionError> {
        let mut on = DeviceConvolution::call(&mut self.resident)?;
        let (_, saved) = op.enqueue_forward_saving(&self.plan, &on.inputs, SILU, &mut on.outputs)?;
        let pending = op.enqueue_backward(&self.plan, &on.inputs, SILU, &saved, &on.upstream, &mut on.gradients)?;
        op.release(saved);
        self.calls += 2;
        Ok(pending)
    }

    /// Compares what lies on the device, and spoils it for the next comparison.
    pub(super) fn compare(&mut self, exec: &mut X, how: &str) -> Result<(), ResidentError> {
        let (rank, dtype) = (self.rank, self.dtype);
        for (one, (output, gradients)) in self.resident.iter_mut().zip(&self.want) {
            if let Some(what) = one.take_difference(exec, (output, gradients))? {
                return Err(ResidentError::Differs { rank, dtype, what, how: format!("{how} of convolutions") });
            }
        }
        Ok(())
    }
}

/// Compares on one PE.
pub(super) fn compare_on<X: Executor>(
    pe: &Pe,
    mut executor: impl FnMut() -> Result<X, ResidentError>,
    more: More<X>,
) -> Result<Compared, ResidentError> {
    let mut compared = Compared { pes: pe.size(), ..Compared::default() };
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut op = ShortConvolution::on(pe, ConvolutionConfig::default(), executor()?)?;
        let mut case = Case::new(&mut op, pe, dtype)?;
        case.call(&mut op)?;
        case.compare(op.executor_mut(), "calls with tensors on the device")?;
        for _ in 1..ROUNDS {
            // Dropped: what goes wrong shows below.
            drop(case.enqueue(&mut op)?);
        }
        let last = case.enqueue(&mut op)?;
        op.wait(last)?;
        case.compare(op.executor_mut(), "calls that were enqueued")?;
        compared.captured = more(&mut op, &mut case)?.or(compared.captured);
        compared.calls += case.calls;
    }
    Ok(compared)
}

/// Calls on a stream that the executor did not make, and captured ones, mixed with ordinary ones.
#[cfg(feature = "cuda")]
pub(super) fn streams_and_graphs(
    op: &mut ShortConvolution<'_, crate::exec::cuda::CudaExecutor>,
    case: &mut Case<crate::exec::cuda::CudaExecutor>,
) -> Result<Option<usize>, ResidentError> {
    let stream = op.executor().gpu().stream()?;
    // SAFETY: a stream of the executor's GPU, which lives until the executor has another one, below or when this fails: then
    // the operation is not used again.
    unsafe { op.executor_mut().use_stream(stream.raw() as u64)? };
    let compared = (|| {
        for _ in 0..ROUNDS {
            drop(case.enqueue(op)?);
        }
        // Only the stream is awaited, as its owner would.
        stream.synchronize()?;
        op.check_enqueued()?;
        case.compare(op.executor_mut(), "calls on another stream")?;
        let captured = op.capture(|op| case.enqueue(op).map(drop))?;
        for round in 0..ROUNDS {
            // SAFETY: the tensors are the case's, which stays.
            let replayed = unsafe { op.replay(&captured)? };
            op.wait(replayed)?;
            case.compare(op.executor_mut(), &format!("replay {round} of captured calls"))?;
            if round % 2 == 0 {
                case.call(op)?;
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
