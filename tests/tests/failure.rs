//! A PE that fails, stops or does not come: the others end in bounded time, with an error that names it.

mod cp;

use std::sync::Mutex;
use std::time::Duration;

use cp::failing::{LONG, NOT_FOREVER, ODD, Outcome, TIMEOUT, assert_blames_the_odd_one, refusal, stay_away};
use cp::{MODES, Solved, check_rank, options};
use deltalink::compare::{Regime, tolerance};
use deltalink::generate::{BetaKind, Decay, Spec};
use deltalink::inputs::Inputs;
use deltalink::op::whole::Share;
use deltalink::op::{Config, ContextParallel, Forward, Mode, OpError};
use deltalink::plan::{Cuts, Plan};
use deltalink::tensor::Dtype;
use deltalink::world::{Pe, RunError, run_threads};
use kernels_gpu::protocol::Awaited;

fn problem() -> (Solved, Plan) {
    let spec = Spec { t: 60, h: 1, hv: 2, decay: Decay::Slow, beta: BetaKind::Small, ..Spec::default() };
    let solved = Solved::new(&spec);
    let plan = solved.plan(&Cuts::equal(3));
    (solved, plan)
}

/// One PE of a running test: its operation, and its inputs.
struct Rank<'a> {
    pe: &'a Pe,
    op: ContextParallel<'a>,
    plan: &'a Plan,
    inputs: Inputs<'a>,
}

impl Rank<'_> {
    fn step(&mut self) -> Result<Forward, OpError> {
        self.op.forward(self.plan, &self.inputs)
    }
}

/// A first call that succeeds everywhere; then PE [`ODD`] does `odd`, and the others call once more, and a third time
/// if that failed.
fn second_call(mode: Mode, timeout: Duration, odd: impl Fn(&mut Rank<'_>) -> Result<(), OpError> + Sync) -> Outcome {
    let (solved, plan) = problem();
    let whole = solved.inputs();
    Outcome::of(|calls| {
        run_threads(3, &options(timeout), |pe| {
            let share = Share::new(&plan, pe.rank(), &whole);
            let op = ContextParallel::new(pe, Config { mode, ..Config::default() })?;
            let mut rank = Rank { pe, op, plan: &plan, inputs: share.inputs(&whole) };
            let first = rank.step()?;
            check_rank(
                "first call",
                &plan,
                pe.rank(),
                &whole,
                &first,
                &solved.expected,
                tolerance(Dtype::F32, Regime::Ordinary),
            );
            // A PE that is still in its first call would fail in that one.
            pe.barrier("first calls")?;
            if pe.rank() == ODD {
                return odd(&mut rank);
            }
            let second = rank.step().map(|_| ());
            calls.lock().unwrap()[pe.rank()] = Some(second.clone());
            if let Err(first) = &second {
                let again = rank.step().map(|_| ()).unwrap_err();
                assert_eq!(again, OpError::FailedBefore { rank: rank.pe.rank(), first: first.to_string() });
            }
            second
        })
    })
}

#[test]
fn a_pe_that_returns_an_error_ends_the_waits_of_the_others_at_once() {
    for mode in MODES {
        let outcome = second_call(mode, LONG, |_| Err(refusal()));
        assert!(outcome.elapsed < NOT_FOREVER, "{mode}: {:?}", outcome.elapsed);
        assert!(matches!(&outcome.end, Err(RunError::Pe { rank: ODD, error }) if *error == refusal()), "{mode}");
        assert_blames_the_odd_one(mode, outcome.error(2), &refusal().to_string());
        // PE 0 waits for nobody, except in the collective exchange of bulk mode.
        match mode {
            Mode::Bulk => assert_blames_the_odd_one(mode, outcome.error(0), &refusal().to_string()),
            _ => assert_eq!(outcome.calls[0], Some(Ok(())), "{mode}"),
        }
    }
}

#[test]
fn a_pe_that_panics_ends_the_waits_of_the_others_at_once() {
    for mode in MODES {
        let outcome = second_call(mode, LONG, |_| panic!("out of luck"));
        assert!(outcome.elapsed < NOT_FOREVER, "{mode}: {:?}", outcome.elapsed);
        let Err(RunError::Panic { rank: ODD, message }) = &outcome.end else { panic!("{mode}: {:?}", outcome.end) };
        assert_eq!(message, "out of luck");
        assert_blames_the_odd_one(mode, outcome.error(2), "panicked: out of luck");
    }
}

#[test]
fn a_pe_that_never_calls_is_named_when_the_time_is_up() {
    for mode in MODES {
        let outcome = second_call(mode, TIMEOUT, |rank| {
            stay_away(rank.pe);
            Ok(())
        });
        outcome.assert_the_odd_one_is_missed(mode, 2, 0, "scan_push");
    }
}

#[test]
fn a_pe_that_leaves_without_its_call_is_named() {
    for mode in MODES {
        let outcome = second_call(mode, TIMEOUT, |_| Ok(()));
        assert!(outcome.elapsed < NOT_FOREVER, "{mode}: {:?}", outcome.elapsed);
        let message = outcome.error(2).to_string();
        assert!(message.contains("PE 1"), "{mode}: {message}");
    }
}

#[test]
fn a_pe_that_is_slow_but_in_time_is_waited_for() {
    for mode in MODES {
        let outcome = second_call(mode, LONG, |rank| {
            std::thread::sleep(Duration::from_millis(300));
            rank.step().map(|_| ())
        });
        assert!(outcome.end.is_ok(), "{mode}: {:?}", outcome.end);
        assert_eq!([&outcome.calls[0], &outcome.calls[2]], [&Some(Ok(())), &Some(Ok(()))], "{mode}");
    }
}

/// A producer runs ahead of a consumer that has stopped, until its slots are full.
#[test]
fn a_consumer_that_stops_reading_stops_its_producer_at_the_second_unread_message() {
    let (solved, plan) = problem();
    let whole = solved.inputs();
    let calls = Mutex::new(Vec::new());
    let end = run_threads(3, &options(TIMEOUT), |pe| {
        let share = Share::new(&plan, pe.rank(), &whole);
        let mut op = ContextParallel::new(pe, Config::default())?;
        op.forward(&plan, &share.inputs(&whole))?;
        if pe.rank() != 0 {
            stay_away(pe);
            return Ok(());
        }
        // Two slots take the messages of calls 2 and 3; call 4 needs that of call 2 again.
        for _ in 2..=4 {
            let result = op.forward(&plan, &share.inputs(&whole)).map(|_| ());
            calls.lock().unwrap().push(result.clone());
            result?;
        }
        Ok::<_, OpError>(())
    });
    let calls = calls.into_inner().unwrap();
    assert_eq!(calls[..2], [Ok(()), Ok(())]);
    let Err(OpError::Expired(wait)) = &calls[2] else { panic!("{calls:?}") };
    let (awaited, message) = (Awaited::from_u32(wait.expired.awaited), wait.to_string());
    assert_eq!((awaited, wait.expired.peer, wait.expired.epoch), (Some(Awaited::Ack), 1, 2), "{message}");
    assert!(message.contains("in scan_push, head 0, lane 0") && message.contains("PE 1 to have read"), "{message}");
    assert!(matches!(end, Err(RunError::Pe { rank: 0, .. })));
}

/// One PE comes with another plan, which makes its call collective; the others, which know theirs, do not meet it.
#[test]
fn a_pe_that_changes_its_plan_alone_stops_everyone() {
    for mode in MODES {
        let outcome = second_call(mode, TIMEOUT, |rank| {
            let (solved, _) = problem();
            let plan = solved.plan(&Cuts::at(vec![10, 30]));
            let whole = solved.inputs();
            let share = Share::new(&plan, ODD, &whole);
            let error = rank.op.forward(&plan, &share.inputs(&whole)).map(|_| ()).unwrap_err();
            assert!(error.to_string().contains("PE 0") || error.to_string().contains("PE 2"), "{error}");
            Err(error)
        });
        assert!(outcome.end.is_err() && outcome.elapsed < NOT_FOREVER, "{mode}: {:?}", outcome.elapsed);
        let message = outcome.error(2).to_string();
        assert!(message.contains("PE 1") || message.contains("PE 0"), "{mode}: {message}");
    }
}
