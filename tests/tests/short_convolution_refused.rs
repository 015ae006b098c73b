//! Short convolutions that are refused before anything runs, and PEs that fail, stop or do not come: the others end in bounded
//! time, with an error that says what was awaited and from whom.

mod convolutions;
#[allow(dead_code)] // what only tests of other operations need
#[path = "cp/failing.rs"]
mod failing;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use convolutions::{Case, Spec};
use deltalink::op::convolution::whole::{Share, UpstreamShare, backward, forward};
use deltalink::op::convolution::{
    Activation, ConvolutionConfig, ConvolutionForward, ConvolutionInput, ConvolutionUpstream, SavedConvolution,
    ShortConvolution, ShortConvolutionError,
};
use deltalink::plan::{Cuts, Plan};
use deltalink::tensor::{Buffer, Dtype, Tensor};
use deltalink::world::{Pe, RunError, WorldError, WorldOptions, run_threads};
use failing::{LONG, NOT_FOREVER, TIMEOUT, stay_away};
use kernels_gpu::protocol::Awaited;

fn options(timeout: Duration) -> WorldOptions {
    WorldOptions { timeout, ..WorldOptions::default() }
}

fn config() -> ConvolutionConfig {
    ConvolutionConfig { workers: Some(1), ..ConvolutionConfig::default() }
}

/// The message with which `inputs` are refused, by the call for a whole batch and by that of one PE.
#[track_caller]
fn refused(inputs: &[ConvolutionInput<'_>]) -> String {
    let plan = Plan::batch(1, 40, &Cuts::equal(1)).unwrap();
    let whole = forward(&plan, inputs, Activation::None, &config(), &WorldOptions::default()).expect_err("bad inputs");
    let one = run_threads(1, &WorldOptions::default(), |pe| {
        let mut op = ShortConvolution::new(pe, config())?;
        let error = op.forward(&plan, inputs, Activation::None).expect_err("bad inputs");
        // Nothing was launched: the same operation still works.
        let case = Spec::default().generate();
        op.forward(&plan, &case.inputs(), Activation::None).map(|_| error.to_string())
    });
    let (whole, one) = (whole.to_string(), one.unwrap().remove(0));
    // How many sequences there are is said in another way on one PE.
    assert_eq!(one.replace("that start on this PE", "in all"), whole);
    whole
}

fn zeros(dtype: Dtype, shape: &[usize]) -> Tensor {
    Tensor::zeros(dtype, shape)
}

#[test]
fn shapes_types_and_counts_are_named() {
    let case = Spec::default().generate();
    let good = case.inputs();
    type Change = fn(&mut crate::convolutions::Tensors, Tensor);
    let x: Change = |tensors, with| tensors.x = with;
    let weight: Change = |tensors, with| tensors.weight = with;
    let bias: Change = |tensors, with| tensors.bias = Some(with);
    let initial: Change = |tensors, with| tensors.initial = Some(with);
    let f32s = |shape: &[usize]| zeros(Dtype::F32, shape);
    let cases: Vec<(Change, Tensor, &str)> = vec![
        (x, f32s(&[40, 8]), "x of convolution 1 has 2 dimensions (shape [40, 8]), it needs 3"),
        (x, f32s(&[1, 39, 8]), "x of convolution 1 has shape [1, 39, 8], the other tensors ask for [1, 40, 8]"),
        (x, f32s(&[1, 40, 0]), "x of convolution 1 has no channels; leave it out"),
        (x, zeros(Dtype::Bf16, &[1, 40, 8]), "x of convolution 1 has element type bf16, it needs f32"),
        (weight, f32s(&[8]), "weight of convolution 1 has 1 dimensions (shape [8]), it needs 2"),
        (weight, f32s(&[8, 1]), "weight of convolution 1 has 1 taps per channel; it must have 2 to 8"),
        (weight, f32s(&[8, 9]), "weight of convolution 1 has 9 taps per channel; it must have 2 to 8"),
        (weight, f32s(&[8, 5]), "weight of convolution 1 has shape [8, 5], the other tensors ask for [8, 4]"),
        (weight, f32s(&[4, 4]), "weight of convolution 1 has shape [4, 4], the other tensors ask for [8, 4]"),
        (weight, zeros(Dtype::F16, &[8, 4]), "weight of convolution 1 has element type f16, it needs f32"),
        (bias, f32s(&[7]), "bias of convolution 1 has shape [7], the other tensors ask for [8]"),
        (
            initial,
            f32s(&[1, 8, 4]),
            "initial_state of convolution 1 has shape [1, 8, 4], the other tensors ask for [1, 8, 3]",
        ),
        (initial, f32s(&[2, 8, 3]), "initial_state of convolution 1 has 2 rows, the plan has 1 sequences in all"),
        (initial, zeros(Dtype::Bf16, &[1, 8, 3]), "initial_state of convolution 1 has element type bf16, it needs f32"),
    ];
    for (change, with, message) in cases {
        let mut case = Spec::default().generate();
        change(&mut case.tensors[1], with);
        assert_eq!(refused(&case.inputs()), message);
    }
    assert_eq!(refused(&[]), "0 convolutions in one call; a call takes 1 to 3, such as those of q, k and v");
    let four: Vec<_> = good.iter().chain(&good[..1]).cloned().collect();
    assert!(refused(&four).starts_with("4 convolutions in one call"));
    let shorter = Spec { t: 39, ..Spec::default() }.generate();
    assert!(refused(&shorter.inputs()).contains("[B, T] = [1, 39] tokens, the plan gives this PE [1, 40]"));
    // Parameters of narrow tensors are theirs or f32.
    let mut narrow = Spec { dtype: Dtype::Bf16, ..Spec::default() }.generate();
    narrow.tensors[0].weight = zeros(Dtype::F16, &[24, 4]);
    let message = "weight of convolution 0 has element type f16, it needs bf16, as x has, or f32";
    assert_eq!(refused(&narrow.inputs()), message);
}

#[test]
fn upstream_gradients_must_fit_the_results() {
    let case = Spec::default().generate();
    let plan = case.spec.plan(&Cuts::equal(2));
    let refused = |upstream: &[ConvolutionUpstream<'_>]| {
        let options = WorldOptions::default();
        backward(&plan, &case.inputs(), Activation::Silu, upstream, &config(), &options).unwrap_err().to_string()
    };
    let good = case.upstream();
    assert!(refused(&good[..2]).starts_with("2 upstream gradients for 3 convolutions"));
    let with = |dy: Tensor, d_final: Tensor| {
        let mut upstream = good.clone();
        upstream[2] = ConvolutionUpstream { dy: dy.view(), d_final_state: Some(d_final.view()) };
        refused(&upstream)
    };
    let (dy, d_final) = (zeros(Dtype::F32, &[1, 40, 40]), zeros(Dtype::F32, &[1, 40, 3]));
    let message = with(zeros(Dtype::F32, &[1, 40, 8]), d_final.clone());
    assert_eq!(message, "dy of convolution 2 has shape [1, 40, 8], the other tensors ask for [1, 40, 40]");
    let message = with(zeros(Dtype::Bf16, &[1, 40, 40]), d_final);
    assert_eq!(message, "dy of convolution 2 has element type bf16, it needs f32");
    let message = with(dy.clone(), zeros(Dtype::F32, &[2, 40, 3]));
    assert_eq!(message, "d_final_state of convolution 2 has 2 rows, the plan has 1 sequences in all");
    let message = with(dy, zeros(Dtype::F16, &[1, 40, 3]));
    assert_eq!(message, "d_final_state of convolution 2 has element type f16, it needs f32");
}

#[test]
fn values_that_are_not_finite_are_refused_or_go_no_farther_than_the_taps_reach() {
    let mut case = Spec { bias: false, initial_state: false, ..Spec::default() }.generate();
    let at = 19;
    let Buffer::F32(x) = &mut case.tensors[1].x.data else { panic!("f32") };
    x[at * 8 + 5] = f32::NAN;
    assert!(refused(&case.inputs()).starts_with("x of convolution 1[0, 19, 5] is NaN"));
    let config = ConvolutionConfig { allow_nonfinite: true, ..config() };
    for cuts in [Cuts::equal(1), Cuts::equal(2), Cuts::at(vec![18, 19, 20, 21, 22])] {
        let results = case.run(&case.spec.plan(&cuts), &config);
        let nan = |tensor: &Tensor| -> Vec<usize> {
            let values = tensor.data.to_f64();
            (0..40).filter(|t| values[t * 8 + 5].is_nan()).collect()
        };
        assert_eq!(nan(&results.forward.outputs[1].y), (at..at + 4).collect::<Vec<_>>());
        // dz of those tokens is NaN, and dx of those that they see.
        assert_eq!(nan(&results.backward.gradients[1].dx), (at - 3..at + 4).collect::<Vec<_>>());
        assert!(results.forward.outputs[0].y.data.to_f64().iter().all(|y| y.is_finite()));
    }
}

#[test]
fn pes_that_are_called_differently_say_how() {
    let case = Spec::default().generate();
    let plan = case.spec.plan(&Cuts::equal(2));
    let differing = |odd: fn(&Spec) -> Spec, odd_activation: Activation| {
        let end = run_threads(2, &WorldOptions::default(), |pe| {
            let (case, activation) = match pe.rank() {
                0 => (case.spec.generate(), Activation::Silu),
                _ => (odd(&case.spec).generate(), odd_activation),
            };
            let whole = case.inputs();
            let shares: Vec<_> = whole.iter().map(|input| Share::new(&plan, pe.rank(), input)).collect();
            let inputs: Vec<_> = shares.iter().zip(&whole).map(|(share, whole)| share.input(whole)).collect();
            ShortConvolution::new(pe, config())?.forward(&plan, &inputs, activation).map(|_| ())
        });
        end.unwrap_err().to_string()
    };
    let message = differing(|spec| spec.clone(), Activation::None);
    assert!(message.contains("PE 1 was called with the activation = None, PE 0 with Silu"), "{message}");
    let message = differing(|spec| Spec { width: 5, ..spec.clone() }, Activation::Silu);
    assert!(message.contains("the number of taps = 5, PE 0 with 4"), "{message}");
    let message = differing(|spec| Spec { channels: vec![24, 8], ..spec.clone() }, Activation::Silu);
    assert!(message.contains("the channels = [24, 8], PE 0 with [24, 8, 40]"), "{message}");
    let message = differing(|spec| Spec { dtype: Dtype::Bf16, ..spec.clone() }, Activation::Silu);
    assert!(message.contains("the element type = bf16, PE 0 with f32"), "{message}");
}

/// One PE of a running test: its operation, and its share.
struct Rank<'a> {
    op: ShortConvolution<'a>,
    plan: &'a Plan,
    inputs: Vec<ConvolutionInput<'a>>,
    upstream: Vec<ConvolutionUpstream<'a>>,
}

impl Rank<'_> {
    fn forward(&mut self) -> Result<ConvolutionForward, ShortConvolutionError> {
        self.op.forward(self.plan, &self.inputs, Activation::Silu)
    }

    fn forward_saving(&mut self) -> Result<(ConvolutionForward, SavedConvolution), ShortConvolutionError> {
        self.op.forward_saving(self.plan, &self.inputs, Activation::Silu)
    }

    fn both(&mut self) -> Result<(), ShortConvolutionError> {
        let (_, saved) = self.forward_saving()?;
        self.op.backward(self.plan, &self.inputs, Activation::Silu, &saved, &self.upstream).map(|_| ())
    }
}

/// Runs `body` on three PEs that share [`Spec::default`].
fn on_three(
    timeout: Duration,
    body: impl Fn(&Pe, Rank<'_>) -> Result<(), ShortConvolutionError> + Sync,
) -> Result<(), RunError<ShortConvolutionError>> {
    let case: Case = Spec::default().generate();
    let plan = case.spec.plan(&Cuts::equal(3));
    let end = run_threads(3, &options(timeout), |pe| {
        let (whole, rank) = (case.inputs(), pe.rank());
        let shares: Vec<_> = whole.iter().map(|input| Share::new(&plan, rank, input)).collect();
        let inputs = shares.iter().zip(&whole).map(|(share, whole)| share.input(whole)).collect();
        let shares: Vec<_> = case.upstream().iter().map(|whole| UpstreamShare::new(&plan, rank, whole)).collect();
        let upstream = shares.iter().map(UpstreamShare::upstream).collect();
        let op = ShortConvolution::new(pe, config())?;
        body(pe, Rank { op, plan: &plan, inputs, upstream })
    });
    end.map(|_| ())
}

#[test]
fn a_saved_state_of_another_call_is_refused() {
    let end = on_three(TIMEOUT, |_, mut rank| {
        let (_, saved) = rank.forward_saving()?;
        let error = rank
            .op
            .backward(rank.plan, &rank.inputs, Activation::None, &saved, &rank.upstream)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("a forward call with the activation = Silu saved, the call is one with None"),
            "{error}"
        );
        rank.op.backward(rank.plan, &rank.inputs, Activation::Silu, &saved, &rank.upstream).map(|_| ())
    });
    assert_eq!(end, Ok(()));
}

/// PE 1 stops before its second forward call, or after it and before its backward call.
#[test]
fn a_pe_that_never_sends_is_named_when_the_time_is_up() {
    for backward in [false, true] {
        let errors = Mutex::new(vec![None; 3]);
        let start = Instant::now();
        let end = on_three(TIMEOUT, |pe, mut rank| {
            rank.both()?;
            if pe.rank() == 1 {
                if backward {
                    rank.forward()?;
                }
                stay_away(pe);
                return Ok(());
            }
            // Only the call under test: in a call of both, PE 0 and PE 2 would both wait for PE 1 and either could be first.
            let result = if backward { rank.both() } else { rank.forward().map(|_| ()) };
            errors.lock().unwrap()[pe.rank()] = result.as_ref().err().cloned();
            if let Err(first) = &result {
                let again = rank.forward().map(|_| ()).unwrap_err();
                let (rank, first) = (pe.rank(), first.to_string());
                assert_eq!(again, ShortConvolutionError::FailedBefore { rank, first });
            }
            result
        });
        assert!(end.is_err() && start.elapsed() < NOT_FOREVER, "{:?}", start.elapsed());
        let errors = errors.into_inner().unwrap();
        // Forward PE 2 waits for PE 1, backward PE 0 does.
        let (waiter, kernel) = if backward { (0, "convolve_back") } else { (2, "convolve") };
        let Some(ShortConvolutionError::Expired(wait)) = &errors[waiter] else { panic!("{errors:?}") };
        let (expired, message) = (&wait.expired, wait.to_string());
        assert_eq!((expired.pe, expired.epoch, expired.found), (waiter as u32, 2, 1), "{message}");
        assert_eq!((expired.peer, Awaited::from_u32(expired.awaited)), (1, Some(Awaited::Signal)), "{message}");
        for part in
            [&format!("in {kernel}, halo of lane 0: PE {waiter}, step"), "of epoch 2 from PE 1", "found epoch 1"]
        {
            assert!(message.contains(part), "{message}");
        }
    }
}

#[test]
fn a_pe_that_fails_ends_the_waits_of_the_others_at_once() {
    let refusal = ShortConvolutionError::Count { found: 7 };
    let error = Mutex::new(None);
    let start = Instant::now();
    let end = on_three(LONG, |pe, mut rank| {
        rank.both()?;
        if pe.rank() == 1 {
            return Err(refusal.clone());
        }
        let result = rank.both();
        if pe.rank() == 2 {
            *error.lock().unwrap() = result.as_ref().err().cloned();
        }
        result
    });
    assert!(start.elapsed() < NOT_FOREVER, "{:?}", start.elapsed());
    assert_eq!(end, Err(RunError::Pe { rank: 1, error: refusal.clone() }));
    let error = error.into_inner().unwrap().expect("PE 2 waits for PE 1").to_string();
    assert!(error.contains("PE 1") && error.contains(&refusal.to_string()), "{error}");
}

/// A producer runs ahead of a consumer that has stopped, until its slots are full.
#[test]
fn a_consumer_that_stops_reading_stops_its_producer_at_the_second_unread_message() {
    let calls = Mutex::new(Vec::new());
    let end = on_three(TIMEOUT, |pe, mut rank| {
        rank.forward()?;
        if pe.rank() != 0 {
            stay_away(pe);
            return Ok(());
        }
        // Two slots take the messages of calls 2 and 3; call 4 needs that of call 2 again.
        for _ in 2..=4 {
            let result = rank.forward().map(|_| ());
            calls.lock().unwrap().push(result.clone());
            result?;
        }
        Ok(())
    });
    let calls = calls.into_inner().unwrap();
    assert_eq!(calls[..2], [Ok(()), Ok(())]);
    let Err(ShortConvolutionError::Expired(wait)) = &calls[2] else { panic!("{calls:?}") };
    let (awaited, message) = (Awaited::from_u32(wait.expired.awaited), wait.to_string());
    assert_eq!((awaited, wait.expired.peer, wait.expired.epoch), (Some(Awaited::Ack), 1, 2), "{message}");
    assert!(message.contains("in convolve, halo of lane 0") && message.contains("PE 1 to have read"), "{message}");
    assert!(matches!(end, Err(RunError::Pe { rank: 0, .. })));
}

/// One PE comes with another plan, which makes its call collective; the others, which know theirs, do not meet it.
#[test]
fn a_pe_that_changes_its_plan_alone_stops_everyone() {
    let start = Instant::now();
    let end = on_three(TIMEOUT, |pe, mut rank| {
        rank.forward()?;
        if pe.rank() != 1 {
            return rank.forward().map(|_| ());
        }
        let spec = Spec::default();
        let (case, plan) = (spec.generate(), spec.plan(&Cuts::at(vec![10, 30])));
        let whole = case.inputs();
        let shares: Vec<_> = whole.iter().map(|input| Share::new(&plan, 1, input)).collect();
        let inputs: Vec<_> = shares.iter().zip(&whole).map(|(share, whole)| share.input(whole)).collect();
        rank.op.forward(&plan, &inputs, Activation::Silu).map(|_| ())
    });
    assert!(start.elapsed() < NOT_FOREVER, "{:?}", start.elapsed());
    let message = match end {
        Err(RunError::Pe { error, .. }) => error.to_string(),
        Err(RunError::World(error @ WorldError::Timeout { .. })) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(message.contains("PE "), "{message}");
}
