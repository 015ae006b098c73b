//! The backward's walks for Hopper on emulated threads, between portable kernels: what they leave against what the portable
//! walks leave, and the gradients that come of it against the f64 reference.

mod launcher;

use cuda_std::emulated::Schedule;
use deltalink::compare::{self, Error};
use deltalink::generate::{BetaKind, Decay, GateKind, Spec};
use deltalink::inputs::{Op, StateLayout};
use deltalink::reference::{Problem, backward, transition_weight};
use deltalink::tensor::Dtype;
use deltalink_tests::backward_pes::{Setup, gradients_by};
use half::bf16;
use launcher::{Left, Walks};

/// A problem that the bodies for Hopper compute: two value heads for one of q and k.
fn spec(op: Op, t: usize) -> Spec {
    let shape = Spec { op, t, h: 1, hv: 2, k: 128, v: 128, dtype: Dtype::Bf16, ..Spec::default() };
    Spec { decay: Decay::Slow, beta: BetaKind::Small, gate: GateKind::Softplus, initial_state: true, ..shape }
}

fn f64s(x: &[bf16]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

/// Relative error of what walks round once, and differently only where f32 sums in another order decide.
const LIMIT: f64 = 1e-3;

/// Runs both bodies; their walks must leave the same, and the gradients must be right. Returns what the walks left.
fn check(spec: &Spec, cuts: &[usize], exact: bool, schedule: Schedule) -> Vec<Left> {
    let what = format!("{spec} cuts {cuts:?} exact {exact} {schedule:?}");
    let case = spec.generate();
    let inputs = case.inputs();
    let upstream = spec.generate_upstream(true);
    let upstream = upstream.view();
    let setup = Setup { inputs: &inputs, upstream: &upstream, cu_seqlens: case.cu_seqlens(), chunk: 64, cuts, exact };
    let (mut portable, mut hopper) = (Walks::portable(), Walks::hopper(schedule));
    let expected = gradients_by(&setup, &mut portable);
    let found = gradients_by(&setup, &mut hopper);
    hopper.assert_complete();
    assert_eq!(portable.left.len(), hopper.left.len());
    for (i, (p, h)) in portable.left.iter().zip(&hopper.left).enumerate() {
        assert_eq!(p.0, h.0);
        for (kind, p, h) in [("states", &p.1, &h.1), ("values", &p.2, &h.2)] {
            let error = Error::of(&f64s(h), &f64s(p));
            println!("{what}: launch {i}, {}: {kind}: {error}", hopper.left[i].0);
            assert!(error.within(LIMIT), "{what}: launch {i}, {}: {kind}: {error}", hopper.left[i].0);
        }
    }
    let (p, h) = (expected.d_initial_state.unwrap(), found.d_initial_state.clone().unwrap());
    let error = Error::of(&h, &p);
    assert!(error.within(LIMIT), "{what}: dh0: {error}");
    let problem = Problem::new(&inputs, case.cu_seqlens()).unwrap();
    let reference = backward(&problem, &upstream).unwrap();
    for checked in compare::gradients(&inputs, &problem, &found, &reference) {
        println!("{what}: {}: {}", checked.name, checked.error);
        assert!(checked.mismatch.is_none(), "{what}: {}", checked.mismatch.unwrap());
    }
    hopper.left
}

#[test]
fn in_every_order_of_events() {
    for (schedule, op) in Schedule::ALL.into_iter().zip([Op::Kda, Op::Gdn, Op::Gdn, Op::Kda]) {
        check(&spec(op, 260), &[0, 260], false, schedule);
    }
}

/// Sequences of every kind on three PEs: gradients and transitions travel, a PE in the middle walks twice, items follow each
/// other in one block, chunks are partial.
#[test]
fn pes_find_the_gradients_of_the_whole() {
    let cuts = [0, 70, 133, 240];
    for (op, exact, state_layout, schedule) in [
        (Op::Kda, false, StateLayout::KFirst, Schedule::ALL[0]),
        (Op::Gdn, false, StateLayout::VFirst, Schedule::ALL[3]),
        (Op::Kda, true, StateLayout::VFirst, Schedule::ALL[1]),
    ] {
        let cu_seqlens = Some(vec![0, 10, 10, 220, 240, 240]);
        let spec = Spec { cu_seqlens, state_layout, ..spec(op, 240) };
        let case = spec.generate();
        let problem = Problem::new(&case.inputs(), case.cu_seqlens()).unwrap();
        let weight = transition_weight(&problem, &cuts);
        assert!(weight.max_forwarded > 0.1, "{spec}: transitions do not matter here: {weight:?}");
        check(&spec, &cuts, exact, schedule);
    }
}

#[test]
fn decays_that_nothing_survives() {
    for (op, decay) in [(Op::Kda, Decay::AllStrong), (Op::Gdn, Decay::Bursty)] {
        check(&Spec { decay, gate: GateKind::Given, ..spec(op, 100) }, &[0, 100], false, Schedule::default());
    }
}

/// In exact mode with cuts between chunks, PEs find bit for bit what one PE finds.
#[test]
fn a_cut_changes_no_bit_in_exact_mode() {
    let spec = spec(Op::Kda, 200);
    let cuts = [0, 64, 128, 200];
    let one = check(&spec, &[0, 200], true, Schedule::default());
    let three = check(&spec, &cuts, true, Schedule::default());
    // All reverse scans first; then each PE's forward walk, and its second reverse scan, which has nothing to do.
    let [.., (name, states, values)] = &one[..] else { panic!("{} launches", one.len()) };
    let parts: Vec<&Left> = three.iter().skip(3).skip(1).step_by(2).collect();
    assert!(*name == "scan_back" && parts.len() == 3 && parts.iter().all(|part| part.0 == *name));
    assert_eq!(parts.iter().flat_map(|part| &part.1).collect::<Vec<_>>(), states.iter().collect::<Vec<_>>());
    assert_eq!(parts.iter().flat_map(|part| &part.2).collect::<Vec<_>>(), values.iter().collect::<Vec<_>>());
}
