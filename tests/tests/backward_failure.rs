//! Backward calls that cannot be: what is refused before anything is launched, and PEs that fail, stop, or do something else,
//! of which the others learn in bounded time, with an error that names them.

mod cp;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use cp::failing::{LONG, NOT_FOREVER, ODD, Outcome, TIMEOUT, assert_blames_the_odd_one, refusal, stay_away};
use cp::gradients::{Derived, check_gradients, shares};
use cp::{MODES, options};
use deltalink::error::InputError;
use deltalink::generate::{BetaKind, Decay, Spec};
use deltalink::gradients::{Gradients, Upstream};
use deltalink::inputs::Inputs;
use deltalink::op::{Backward, Config, ContextParallel, Mode, OpError, Saved, SavedHandle, whole};
use deltalink::plan::{Cuts, Plan};
use deltalink::tensor::{Buffer, Dtype, Tensor};
use deltalink::world::{Pe, RunError, WorldOptions, run_threads};

fn problem() -> (Derived, Plan) {
    let spec = Spec { t: 60, h: 1, hv: 2, decay: Decay::Slow, beta: BetaKind::Small, ..Spec::default() };
    let derived = Derived::new(&spec, true);
    let plan = derived.plan(&Cuts::equal(3));
    (derived, plan)
}

/// One PE of a running test: its operation, and its share.
struct Rank<'a> {
    pe: &'a Pe,
    op: ContextParallel<'a>,
    plan: &'a Plan,
    inputs: Inputs<'a>,
    upstream: Upstream<'a>,
}

impl Rank<'_> {
    fn forward(&mut self) -> Result<Saved, OpError> {
        Ok(self.op.forward_saving(self.plan, &self.inputs)?.1)
    }

    fn backward(&mut self, saved: Saved) -> Result<Backward, OpError> {
        self.op.backward(self.plan, &self.inputs, saved, &self.upstream)
    }
}

/// Runs `body` on three PEs.
fn on_three<T: Send>(
    mode: Mode,
    timeout: Duration,
    body: impl Fn(&mut Rank<'_>) -> Result<T, OpError> + Sync,
) -> Result<Vec<T>, RunError<OpError>> {
    let (derived, plan) = problem();
    let whole = derived.solved.inputs();
    run_threads(3, &options(timeout), |pe| {
        let (share, upstream) = shares(&derived, &plan, pe.rank(), &whole);
        let op = ContextParallel::new(pe, Config { mode, ..Config::default() })?;
        let (inputs, upstream) = (share.inputs(&whole), upstream.view());
        body(&mut Rank { pe, op, plan: &plan, inputs, upstream })
    })
}

/// A forward and a backward call that succeed everywhere, and a forward call; then PE [`ODD`] does `odd`, and the others
/// call backward.
fn second_call(
    mode: Mode,
    timeout: Duration,
    odd: impl Fn(&mut Rank<'_>, Saved) -> Result<(), OpError> + Sync,
) -> Outcome {
    Outcome::of(|calls| {
        on_three(mode, timeout, |rank| {
            let saved = rank.forward()?;
            rank.backward(saved)?;
            let saved = rank.forward()?;
            // A PE that is still in its forward call would fail in that one.
            rank.pe.barrier("forward calls")?;
            if rank.pe.rank() == ODD {
                return odd(rank, saved);
            }
            let second = rank.backward(saved).map(|_| ());
            calls.lock().unwrap()[rank.pe.rank()] = Some(second.clone());
            if let Err(first) = &second {
                let again = rank.forward().map(|_| ()).unwrap_err();
                assert_eq!(again, OpError::FailedBefore { rank: rank.pe.rank(), first: first.to_string() });
            }
            second
        })
    })
}

#[test]
fn a_pe_that_fails_ends_the_waits_of_the_others_at_once() {
    for mode in MODES {
        let outcome = second_call(mode, LONG, |_, _| Err(refusal()));
        assert!(outcome.elapsed < NOT_FOREVER, "{mode}: {:?}", outcome.elapsed);
        assert!(matches!(&outcome.end, Err(RunError::Pe { rank: ODD, error }) if *error == refusal()), "{mode}");
        // The gradients flow to PE 0: it waits for PE 1. PE 2 waits for nobody, but for the collective exchange.
        assert_blames_the_odd_one(mode, outcome.error(0), &refusal().to_string());
        match mode {
            Mode::Bulk => assert_blames_the_odd_one(mode, outcome.error(2), &refusal().to_string()),
            _ => assert_eq!(outcome.calls[2], Some(Ok(())), "{mode}"),
        }
    }
}

#[test]
fn a_pe_that_panics_is_named() {
    let outcome = second_call(Mode::Overlap, LONG, |_, _| panic!("out of luck"));
    assert!(outcome.elapsed < NOT_FOREVER, "{:?}", outcome.elapsed);
    assert_blames_the_odd_one(Mode::Overlap, outcome.error(0), "panicked: out of luck");
}

#[test]
fn a_pe_that_never_calls_is_named_when_the_time_is_up() {
    for mode in MODES {
        let outcome = second_call(mode, TIMEOUT, |rank, _| {
            stay_away(rank.pe);
            Ok(())
        });
        outcome.assert_the_odd_one_is_missed(mode, 0, 2, "scan_back");
    }
}

#[test]
fn a_pe_that_is_slow_but_in_time_is_waited_for() {
    for mode in MODES {
        let outcome = second_call(mode, LONG, |rank, saved| {
            std::thread::sleep(Duration::from_millis(200));
            rank.backward(saved).map(|_| ())
        });
        assert!(outcome.end.is_ok(), "{mode}: {:?}", outcome.end);
    }
}

/// In the steady state nobody meets, so that the calls differ shows when a message does not come.
#[test]
fn a_pe_that_calls_forward_where_the_others_call_backward_is_named_with_both_calls() {
    for mode in [Mode::Overlap, Mode::Exact] {
        let outcome = second_call(mode, TIMEOUT, |rank, _| rank.forward().map(|_| ()));
        // Each of the two waits for the other; the one whose time is up first says so.
        let message = outcome.error(0).to_string();
        let said = [
            "PE 1 is in call 4, forward, while this PE (0) is in call 4, backward",
            "PE 0 is in call 4, backward, while this PE (1) is in call 4, forward",
        ];
        assert!(said.iter().any(|said| message.contains(said)), "{mode}: {message}");
    }
}

/// Where the PEs compare what they are about to do, it shows at once.
#[test]
fn first_calls_that_differ_are_named_at_once() {
    let start = Instant::now();
    let end = on_three(Mode::Overlap, LONG, |rank| {
        let saved = rank.forward()?;
        if rank.pe.rank() != ODD {
            return rank.backward(saved).map(|_| ());
        }
        // Another operation of this PE: its first call is collective as well.
        let mut other = ContextParallel::new(rank.pe, Config::default())?;
        other.forward(rank.plan, &rank.inputs).map(|_| ())
    });
    let message = end.unwrap_err().to_string();
    assert!(message.contains("PE 1 was called with the direction = forward, PE 0 with backward"), "{message}");
    assert!(start.elapsed() < NOT_FOREVER);
}

#[test]
fn pes_that_pass_what_different_calls_saved_are_told() {
    // At the first backward call by comparison, later by what the PEs note.
    for agreed in [false, true] {
        let end = on_three(Mode::Overlap, LONG, |rank| {
            if agreed {
                let saved = rank.forward()?;
                rank.backward(saved)?;
            }
            let (first, second) = (rank.forward()?, rank.forward()?);
            let saved = if rank.pe.rank() == ODD { first } else { second };
            rank.backward(saved).map(|_| ())
        });
        let message = end.unwrap_err().to_string();
        let said = if agreed { "different forward calls saved" } else { "the saved state = that of 2 calls before" };
        assert!(message.contains(said), "{message}");
    }
}

/// Refused: nothing is launched, the operation goes on, and a saved state that is held stays.
#[test]
fn what_is_refused_before_anything_is_launched() {
    let (derived, plan) = problem();
    let whole = derived.solved.inputs();
    let parts = run_threads(3, &WorldOptions::default(), |pe| {
        let (share, upstream) = shares(&derived, &plan, pe.rank(), &whole);
        let (inputs, good) = (share.inputs(&whole), upstream.view());
        let mut op = ContextParallel::new(pe, Config::default())?;
        let mut other = ContextParallel::new(pe, Config::default())?;
        let saved = op.forward_saving(&plan, &inputs)?.1;
        let foreign = other.forward_saving(&plan, &inputs)?.1;
        let other_plan = derived.plan(&Cuts::at(vec![20, 40]));
        let uneven = derived.plan(&Cuts::at(vec![19, 39]));
        assert_eq!(other_plan, plan);

        let refused = |saved: &Saved, plan: &Plan, inputs: &Inputs<'_>, upstream: &Upstream<'_>| {
            op.check_backward(plan, inputs, saved, upstream).unwrap_err().to_string()
        };
        let message = refused(&foreign, &plan, &inputs, &good);
        assert!(message.contains("a saved state of the operation = number"), "{message}");
        let (uneven_share, uneven_upstream) = shares(&derived, &uneven, pe.rank(), &whole);
        let message = refused(&saved, &uneven, &uneven_share.inputs(&whole), &uneven_upstream.view());
        assert!(message.contains("the cuts = [0, 20, 40, 60], the call is one with [0, 19, 39, 60]"), "{message}");
        let scaled = Inputs { scale: Some(3.0), ..inputs.clone() };
        let message = refused(&saved, &plan, &scaled, &good);
        assert!(message.contains("scale = ") && message.contains("one with 3"), "{message}");

        let short = Tensor::zeros(Dtype::F32, &[1, 7, 2, 64]);
        let d_o = Upstream { d_o: short.view(), ..good.clone() };
        assert!(refused(&saved, &plan, &inputs, &d_o).contains("do has shape [1, 7, 2, 64]"));
        let half = Tensor::zeros(Dtype::Bf16, good.d_o.shape());
        let d_o = Upstream { d_o: half.view(), ..good.clone() };
        assert!(refused(&saved, &plan, &inputs, &d_o).contains("do has element type bf16, it needs f32, as o has"));
        let mut bad = Tensor::zeros(Dtype::F32, good.d_o.shape());
        let Buffer::F32(values) = &mut bad.data else { unreachable!() };
        values[3] = f32::NAN;
        let d_o = Upstream { d_o: bad.view(), ..good.clone() };
        assert!(refused(&saved, &plan, &inputs, &d_o).contains("do[0, 0, 0, 3] is NaN"));
        let states = Tensor::zeros(Dtype::F32, &[2, 2, 64, 64]);
        let dht = Upstream { d_final_state: Some(states.view()), ..good.clone() };
        assert!(refused(&saved, &plan, &inputs, &dht).contains("dht has shape [2, 2, 64, 64]"));

        let handle = op.hold(saved);
        let error = op.backward_held(&plan, &inputs, handle, &d_o).unwrap_err();
        assert!(matches!(error, OpError::Input(InputError::NonFinite { name: "do", .. })), "{error}");
        let backward = op.backward_held(&plan, &inputs, handle, &good)?;
        let spent = OpError::SpentHandle { rank: pe.rank(), handle: handle.0 };
        assert_eq!(op.backward_held(&plan, &inputs, handle, &good).unwrap_err(), spent);
        assert!(spent.to_string().contains("was used already"), "{spent}");
        assert!(!op.release(handle) && !op.release(SavedHandle(77)));
        let held = other.hold(foreign);
        assert!(other.release(held) && !other.release(held));
        Ok::<_, OpError>(backward.gradients)
    });
    let parts: Vec<Gradients> = parts.unwrap_or_else(|e| panic!("{e}"));
    check_gradients("after refusals", &derived, &plan, &parts);
}

/// Another PE's saved state: rows and sizes may be the same, what is in it is not.
#[test]
fn what_another_pe_saved_is_refused() {
    let slots = Mutex::new(vec![None, None]);
    let spec = Spec { t: 60, h: 1, hv: 2, ..Spec::default() };
    let derived = Derived::new(&spec, false);
    let plan = derived.plan(&Cuts::equal(2));
    let whole = derived.solved.inputs();
    run_threads(2, &WorldOptions::default(), |pe| {
        let (share, upstream) = shares(&derived, &plan, pe.rank(), &whole);
        let inputs = share.inputs(&whole);
        let mut op = ContextParallel::new(pe, Config::default())?;
        slots.lock().unwrap()[pe.rank()] = Some(op.forward_saving(&plan, &inputs)?.1);
        pe.barrier("exchange of what does not belong to it")?;
        let other = slots.lock().unwrap()[1 - pe.rank()].take().expect("the other one's");
        let error = op.backward(&plan, &inputs, other, &upstream.view()).unwrap_err().to_string();
        let said = format!("the PE = {}, the call is one with {}", 1 - pe.rank(), pe.rank());
        assert!(error.contains(&said), "{error}");
        Ok::<_, OpError>(())
    })
    .unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn values_that_are_not_finite_go_through_if_allowed() {
    let (derived, plan) = problem();
    let whole = derived.solved.inputs();
    let mut d_o = Tensor::zeros(Dtype::F32, whole.v.shape());
    let Buffer::F32(values) = &mut d_o.data else { unreachable!() };
    values[0] = f32::INFINITY;
    let upstream = Upstream { d_o: d_o.view(), d_final_state: None };
    let run = |allow_nonfinite| {
        let config = Config { allow_nonfinite, ..Config::default() };
        whole::backward(&plan, &whole, &upstream, &config, &WorldOptions::default())
    };
    assert!(matches!(run(false).unwrap_err(), OpError::Input(InputError::NonFinite { name: "do", .. })));
    let gradients = run(true).unwrap().gradients.to_f64();
    // No other query enters the first token's output.
    let of_a_token = gradients.dq.len() / 60;
    assert!(!gradients.dq[0].is_finite() && gradients.dq[of_a_token..].iter().all(|x| *x == 0.0));
}
