//! Short convolutions whose tensors lie where kernels run, whose results go into the caller's memory, and that need not wait for
//! their work; captured and replayed. Everything bit for bit as calls on the host's tensors compute it.

mod convolutions;
mod recorder;

use convolutions::Spec;
use deltalink::error::InputError;
use deltalink::exec::Waits;
use deltalink::op::convolution::whole::{Share, UpstreamShare};
use deltalink::op::convolution::{
    ConvolutionConfig, ConvolutionGradients, ConvolutionGradientsOut, ConvolutionOutput, DeviceCall, DeviceConvolution,
    SavedConvolution, ShortConvolution, ShortConvolutionError,
};
use deltalink::op::{OpError, Pending};
use deltalink::plan::{Cuts, Plan};
use deltalink::tensor::{Dtype, Location, TensorViewMut};
use deltalink::world::{Pe, WorldOptions, run_threads};
use recorder::Recorder;

type Op<'a> = ShortConvolution<'a, Recorder>;
type Outcome<T = ()> = Result<T, ShortConvolutionError>;

/// What calls on the host's tensors make of one convolution.
type Want = (ConvolutionOutput, ConvolutionGradients);

/// Everything of a PE.
struct Rank<'a> {
    spec: &'a Spec,
    plan: &'a Plan,
    resident: Vec<DeviceConvolution<Recorder>>,
    want: Vec<Want>,
}

impl<'a> Rank<'a> {
    /// A PE's share, and what calls on the host's tensors make of it.
    fn new(op: &mut Op<'_>, spec: &'a Spec, plan: &'a Plan, rank: usize) -> Outcome<Self> {
        let case = spec.generate();
        let (whole, upstream) = (case.inputs(), case.upstream());
        let shares: Vec<_> = whole.iter().map(|input| Share::new(plan, rank, input)).collect();
        let inputs: Vec<_> = shares.iter().zip(&whole).map(|(share, whole)| share.input(whole)).collect();
        let shares: Vec<_> = upstream.iter().map(|whole| UpstreamShare::new(plan, rank, whole)).collect();
        let upstream: Vec<_> = shares.iter().map(UpstreamShare::upstream).collect();
        let (forward, saved) = op.forward_saving(plan, &inputs, spec.activation())?;
        let backward = op.backward(plan, &inputs, spec.activation(), &saved, &upstream)?;
        op.release(saved);
        let want: Vec<_> = forward.outputs.into_iter().zip(backward.gradients).collect();
        let device = |((input, upstream), (output, gradients))| {
            DeviceConvolution::new(op.executor_mut(), (input, upstream), (output, gradients))
        };
        let pairs = want.iter().map(|(output, gradients): &Want| (output, gradients));
        let resident = inputs.iter().zip(&upstream).zip(pairs).map(device).collect::<Result<_, _>>()?;
        Ok(Self { spec, plan, resident, want })
    }

    fn call(&mut self, op: &mut Op<'_>) -> Outcome {
        let (plan, silu) = (self.plan, self.spec.activation());
        let mut on = DeviceConvolution::call(&mut self.resident)?;
        let (_, saved) = op.forward_saving_into(plan, &on.inputs, silu, &mut on.outputs)?;
        op.backward_into(plan, &on.inputs, silu, &saved, &on.upstream, &mut on.gradients)?;
        op.release(saved);
        Ok(())
    }

    fn enqueue(&mut self, op: &mut Op<'_>) -> Outcome<Pending<Recorder>> {
        let (plan, silu) = (self.plan, self.spec.activation());
        let mut on = DeviceConvolution::call(&mut self.resident)?;
        let (_, saved) = op.enqueue_forward_saving(plan, &on.inputs, silu, &mut on.outputs)?;
        let pending = op.enqueue_backward(plan, &on.inputs, silu, &saved, &on.upstream, &mut on.gradients)?;
        op.release(saved);
        Ok(pending)
    }

    fn compare(&mut self, op: &mut Op<'_>, how: &str) -> Outcome {
        for (i, (one, (output, gradients))) in self.resident.iter_mut().zip(&self.want).enumerate() {
            let different = one.take_difference(op.executor_mut(), (output, gradients))?;
            assert_eq!(different, None, "{how}, convolution {i}");
        }
        Ok(())
    }
}

fn config() -> ConvolutionConfig {
    ConvolutionConfig { workers: Some(1), ..ConvolutionConfig::default() }
}

/// Runs `body` on every PE, with an operation that has been called before.
fn on_every_pe(spec: &Spec, cuts: &Cuts, body: impl Fn(&Pe, &mut Op<'_>, &mut Rank<'_>) -> Outcome + Sync) {
    let plan = spec.plan(cuts);
    let end = run_threads(plan.pes(), &WorldOptions::default(), |pe| {
        let mut op = ShortConvolution::on(pe, config(), Recorder::new(1)?)?;
        let mut rank = Rank::new(&mut op, spec, &plan, pe.rank())?;
        // Its tensors may have got the memory that the calls on the host's gave back.
        rank.call(&mut op)?;
        body(pe, &mut op, &mut rank)
    });
    end.unwrap_or_else(|error| panic!("{spec:?}, {cuts:?}: {error}"));
}

/// One PE, two and three, of which some hold fewer tokens than the taps reach.
fn all_cuts(t: usize) -> Vec<Cuts> {
    let cuts =
        [vec![], vec![t / 2], vec![t - 1], vec![1, 3], vec![t / 2, t / 2 + 1], vec![0, t - 2], vec![t / 3, t / 2]];
    cuts.into_iter().map(Cuts::at).collect()
}

fn specs() -> Vec<Spec> {
    vec![
        Spec::default(),
        Spec { dtype: Dtype::Bf16, channels: vec![130, 7], width: 8, ..Spec::packed(&[0, 0, 3, 20, 21, 40]) },
        Spec { b: 3, t: 19, width: 5, dtype: Dtype::F16, wide_parameters: false, ..Spec::default() },
        Spec { silu: false, bias: false, initial_state: false, final_gradient: false, width: 2, ..Spec::default() },
    ]
}

#[test]
fn calls_on_the_devices_tensors_and_enqueued_ones_are_ordinary_ones() {
    for spec in specs() {
        for cuts in all_cuts(spec.t) {
            on_every_pe(&spec, &cuts, |pe, op, rank| {
                rank.call(op)?;
                rank.compare(op, "calls with memory for their results")?;
                // Both slots of every row are used again.
                for _ in 0..4 {
                    drop(rank.enqueue(op)?);
                }
                let last = rank.enqueue(op)?;
                let report = op.wait(last)?;
                assert_eq!(report.tokens, rank.plan.ranks[pe.rank()].tokens * spec.b);
                rank.compare(op, "enqueued calls")
            });
        }
    }
}

#[test]
fn captured_calls_are_replayed_among_others_and_back_to_back() {
    for spec in specs() {
        for cuts in all_cuts(spec.t) {
            on_every_pe(&spec, &cuts, |pe, op, rank| {
                op.executor_mut().begin();
                let made = rank.enqueue(op)?;
                let captured = op.executor_mut().end();
                // A first kernel, the convolution where there is one, and backward sums as well.
                assert!(captured.launches() <= 5, "{} launches", captured.launches());
                assert_eq!(op.poll(&made), Err(OpError::Captured { rank: pe.rank() }.into()));
                for turn in 0..3 {
                    op.executor_mut().replay(&captured, pe)?;
                    rank.compare(op, "a replay")?;
                    if turn != 1 {
                        // Epochs go on from whatever was launched last.
                        rank.call(op)?;
                        rank.compare(op, "a call between replays")?;
                    }
                }
                for _ in 0..5 {
                    op.executor_mut().replay(&captured, pe)?;
                }
                op.check_enqueued()?;
                rank.compare(op, "replays back to back")
            });
        }
    }
}

#[test]
fn captured_calls_have_their_own_tensors() {
    let spec = Spec::default();
    on_every_pe(&spec, &Cuts::equal(3), |pe, op, rank| {
        let other = Spec { seed: 7, ..spec.clone() };
        let mut other = Rank::new(op, &other, rank.plan, pe.rank())?;
        let capture = |op: &mut Op<'_>, rank: &mut Rank<'_>| -> Outcome<_> {
            rank.call(op)?;
            op.executor_mut().begin();
            drop(rank.enqueue(op)?);
            Ok(op.executor_mut().end())
        };
        // Both find their tables in the same place.
        let (first, second) = (capture(op, rank)?, capture(op, &mut other)?);
        for _ in 0..3 {
            op.executor_mut().replay(&first, pe)?;
            op.executor_mut().replay(&second, pe)?;
        }
        rank.compare(op, "the first captured calls")?;
        other.compare(op, "the second captured calls")
    });
}

#[test]
fn an_enqueued_call_moves_nothing_and_takes_no_memory() {
    let spec = Spec { channels: vec![200, 24], ..Spec::packed(&[0, 13, 40]) };
    on_every_pe(&spec, &Cuts::at(vec![14, 30]), |_, op, rank| {
        drop(rank.enqueue(op)?);
        let (moved, scratch) = (op.executor().moved, op.scratch_bytes());
        for _ in 0..5 {
            drop(rank.enqueue(op)?);
        }
        assert_eq!((op.executor().moved, op.scratch_bytes()), (moved, scratch));
        rank.compare(op, "enqueued calls")
    });
}

#[test]
fn forward_calls_that_do_not_save_are_those_that_do() {
    let spec = Spec { width: 6, ..Spec::default() };
    on_every_pe(&spec, &Cuts::at(vec![2, 38]), |_, op, rank| {
        let silu = spec.activation();
        for turn in 0..3 {
            let mut on = DeviceConvolution::call(&mut rank.resident)?;
            let (_, saved) = op.forward_saving_into(rank.plan, &on.inputs, silu, &mut on.outputs)?;
            op.backward_into(rank.plan, &on.inputs, silu, &saved, &on.upstream, &mut on.gradients)?;
            op.release(saved);
            // Outputs again, of other kernels' making.
            for one in &mut on.outputs {
                // SAFETY: the device is the host's memory, and no kernel runs.
                unsafe { std::ptr::write_bytes(one.y.address() as *mut u8, 0xff, one.y.byte_len()) };
            }
            if turn == 0 {
                op.forward_into(rank.plan, &on.inputs, silu, &mut on.outputs)?;
            } else {
                let pending = op.enqueue_forward(rank.plan, &on.inputs, silu, &mut on.outputs)?;
                op.wait(pending)?;
            }
            rank.compare(op, "a call that does not save")?;
        }
        Ok(())
    });
}

#[test]
fn pes_that_share_a_device_wait_between_kernels_and_cannot_enqueue() {
    for spec in specs() {
        for cuts in all_cuts(spec.t) {
            on_every_pe(&spec, &cuts, |pe, op, rank| {
                op.executor_mut().waits = Waits::Host;
                for _ in 0..3 {
                    rank.call(op)?;
                    rank.compare(op, "calls that wait on the host")?;
                }
                let enqueued = rank.enqueue(op).map(drop);
                let alone = pe.size() == 1;
                assert!(alone || matches!(enqueued, Err(ShortConvolutionError::Op(OpError::CannotEnqueue { .. }))));
                assert!(!alone || enqueued.is_ok());
                Ok(())
            });
        }
    }
}

#[test]
fn what_only_a_first_call_makes_is_missing_in_a_capture() {
    let spec = Spec::default();
    on_every_pe(&spec, &Cuts::equal(2), |pe, op, rank| {
        let refused = |op: &mut Op<'_>, rank: &mut Rank<'_>, part: &str| {
            op.executor_mut().begin();
            let error = rank.enqueue(op).expect_err("refused").to_string();
            assert!(error.starts_with(part), "{error}");
            op.executor_mut().end();
        };
        // Another plan, of which nobody knows yet.
        let plan = spec.plan(&Cuts::at(vec![7]));
        let mut fresh = Op::on(pe, config(), Recorder::new(1)?)?;
        let mut other = Rank::new(&mut fresh, &spec, &plan, pe.rank())?;
        refused(op, &mut other, "the agreement of all PEs on a call");
        // Memory for what is saved did not come back.
        let mut on = DeviceConvolution::call(&mut rank.resident)?;
        let (_, held) = op.enqueue_forward_saving(rank.plan, &on.inputs, spec.activation(), &mut on.outputs)?;
        if held.bytes() > 0 {
            refused(op, rank, "memory that a step keeps");
        }
        // A call that waits.
        op.executor_mut().begin();
        let error = rank.call(op).expect_err("refused");
        op.executor_mut().end();
        assert_eq!(error, OpError::Captures { rank: pe.rank() }.into());
        // The operation is as good as before.
        op.release(held);
        drop(rank.enqueue(op)?);
        rank.compare(op, "a call after refused ones")
    });
}

#[test]
fn memory_that_does_not_fit_is_refused_by_name() {
    let spec = Spec { channels: vec![8, 16], ..Spec::default() };
    on_every_pe(&spec, &Cuts::equal(1), |pe, op, rank| {
        let silu = spec.activation();
        let input = |error: InputError| ShortConvolutionError::from(error);
        let on = DeviceConvolution::call(&mut rank.resident)?;
        let DeviceCall { inputs, upstream, outputs: mut out, mut gradients } = on;
        let error = op.forward_into(rank.plan, &inputs, silu, &mut out[..1]).expect_err("refused");
        assert_eq!(error, ShortConvolutionError::Results { found: 1, want: 2 });
        // The first one's memory in place of the second one's.
        out.swap(0, 1);
        let error = op.forward_into(rank.plan, &inputs, silu, &mut out).expect_err("refused");
        let (shape, want) = (vec![1, 40, 16], vec![1, 40, 8]);
        assert_eq!(error, input(InputError::Shape { name: "y of convolution 0", shape, want }));
        out.swap(0, 1);
        let state = out[1].final_state.take();
        let error = op.forward_into(rank.plan, &inputs, silu, &mut out).expect_err("refused").to_string();
        assert!(error.starts_with("memory for final_state of convolution 1 was not given"), "{error}");
        out[1].final_state = state;
        let (_, saved) = op.forward_saving_into(rank.plan, &inputs, silu, &mut out)?;
        let bias = gradients[0].dbias.take();
        let backward =
            |op: &mut Op<'_>, saved: &SavedConvolution<Recorder>, gradients: &mut [ConvolutionGradientsOut<'_>]| {
                op.backward_into(rank.plan, &inputs, silu, saved, &upstream, gradients)
            };
        let error = backward(op, &saved, &mut gradients).expect_err("refused").to_string();
        assert!(error.starts_with("memory for dbias of convolution 0 was not given"), "{error}");
        gradients[0].dbias = bias;
        // A result where an input is.
        let at = inputs[1].x.address();
        // SAFETY: refused, so nobody writes it.
        let over = unsafe { TensorViewMut::from_raw(at, &[1, 40, 8], Dtype::F32, Location::Host) };
        let own = std::mem::replace(&mut gradients[0].dx, over.expect("aligned"));
        let error = backward(op, &saved, &mut gradients).expect_err("refused").to_string();
        assert!(
            error.starts_with("dx of convolution 0, which is written, shares memory with x of convolution 1"),
            "{error}"
        );
        gradients[0].dx = own;
        // What another operation saved, and what one is waited for.
        let mut other = Op::on(pe, config(), Recorder::new(1)?)?;
        let error = backward(&mut other, &saved, &mut gradients).expect_err("refused").to_string();
        assert!(error.contains("a forward call with operation = number"), "{error}");
        let pending = op.enqueue_backward(rank.plan, &inputs, silu, &saved, &upstream, &mut gradients)?;
        let error = other.poll(&pending).expect_err("refused");
        assert!(matches!(error, ShortConvolutionError::Op(OpError::ForeignPending { .. })), "{error}");
        op.wait(pending)?;
        rank.compare(op, "calls after refused ones")
    });
}

/// PE 1 does not come to the second call: where that is enqueued its failure shows when it is asked for.
#[test]
fn a_halo_that_never_comes_shows_at_the_next_call_at_latest() {
    let spec = Spec::default();
    let plan = spec.plan(&Cuts::equal(2));
    let options = WorldOptions { timeout: std::time::Duration::from_secs(3), ..WorldOptions::default() };
    let end = run_threads(2, &options, |pe| -> Outcome {
        let mut op = ShortConvolution::on(pe, config(), Recorder::new(1)?)?;
        let mut rank = Rank::new(&mut op, &spec, &plan, pe.rank())?;
        if pe.rank() == 0 {
            return Ok(());
        }
        let mut on = DeviceConvolution::call(&mut rank.resident)?;
        drop(op.enqueue_forward(&plan, &on.inputs, spec.activation(), &mut on.outputs)?);
        let error = op.forward_into(&plan, &on.inputs, spec.activation(), &mut on.outputs).expect_err("nobody sent");
        let first = error.to_string();
        assert!(first.contains("in convolve, halo of lane 0") && first.contains("epoch 2 from PE 0"), "{first}");
        let again = op.check_enqueued().expect_err("failed before");
        assert_eq!(again, ShortConvolutionError::FailedBefore { rank: 1, first });
        Ok(())
    });
    end.unwrap();
}
