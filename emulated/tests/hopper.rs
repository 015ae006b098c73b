//! The bodies for Hopper, in whole steps on emulated GPUs, against the f64 reference.

use cuda_std::emulated::Schedule;
use deltalink::compare::Regime;
use deltalink::generate::{BetaKind, Decay, GateKind, Keys, Spec};
use deltalink::inputs::Op;
use deltalink::op::{Config, Mode, Transport};
use deltalink::plan::Cuts;
use deltalink::tensor::Dtype;
use deltalink_emulated::check::{Compared, Run, forward};

/// A problem that the bodies for Hopper compute.
fn spec(op: Op, t: usize) -> Spec {
    Spec { op, t, h: 1, hv: 1, k: 128, v: 128, dtype: Dtype::Bf16, ..Spec::default() }
}

fn compared(spec: &Spec, run: &Run) -> Compared {
    let compared = forward(spec, run).unwrap_or_else(|error| panic!("{spec:?} {run:?}: {error}"));
    assert!(compared.mismatches().is_empty(), "{spec:?} {run:?}: {:?}", compared.mismatches());
    let hopper = compared.launched.iter().all(|name| name.contains("_hopper"));
    assert!(hopper && !compared.launched.is_empty(), "{:?}", compared.launched);
    compared
}

/// Runs in every order of events.
fn in_all_orders(spec: &Spec, run: &Run) -> Compared {
    let [mut last, ..] = Schedule::ALL.map(|schedule| compared(spec, &Run { schedule, ..run.clone() }));
    last.launched.dedup();
    last
}

#[test]
fn one_pe() {
    for op in [Op::Kda, Op::Gdn] {
        let compared = in_all_orders(&spec(op, 128), &Run::on(1));
        let prep = format!("prep_{op}_bf16_hopper");
        assert_eq!(compared.launched, [&prep, "scan_push_bf16_hopper_1"]);
    }
}

#[test]
fn two_pes() {
    for op in [Op::Kda, Op::Gdn] {
        let compared = in_all_orders(&spec(op, 256), &Run::on(2));
        let prep = format!("prep_{op}_bf16_hopper");
        assert_eq!(compared.launched, [&prep, "scan_push_bf16_hopper_2", "fix_out_bf16_hopper"]);
    }
}

/// Several chunks in each segment, the last one short, so that stages are used again and parities turn.
#[test]
fn long_segments_with_a_partial_chunk() {
    for op in [Op::Kda, Op::Gdn] {
        let spec = Spec { decay: Decay::Slow, beta: BetaKind::Small, initial_state: true, ..spec(op, 687) };
        in_all_orders(&spec, &Run::on(1));
        in_all_orders(&spec, &Run { cuts: Cuts::at(vec![330]), ..Run::on(2) });
    }
}

#[test]
fn several_sequences_and_grouped_heads() {
    let packed = vec![0, 70, 70, 71, 200, 333];
    for op in [Op::Kda, Op::Gdn] {
        let spec = Spec { h: 1, hv: 2, initial_state: true, cu_seqlens: Some(packed.clone()), ..spec(op, 333) };
        in_all_orders(&spec, &Run::on(1));
        in_all_orders(&spec, &Run { cuts: Cuts::at(vec![40, 250]), ..Run::on(3) });
    }
}

#[test]
fn a_batch_on_three_pes_with_two_blocks_each() {
    let spec = Spec { b: 2, h: 2, hv: 2, ..spec(Op::Kda, 200) };
    compared(&spec, &Run { workers: 2, ..Run::on(3) });
}

#[test]
fn gates_from_raw_inputs_norms_and_logits() {
    for (op, gate) in [(Op::Kda, GateKind::Softplus), (Op::Kda, GateKind::LowerBound), (Op::Gdn, GateKind::Softplus)] {
        let spec = Spec { gate, beta: BetaKind::Logits, l2norm: true, ..spec(op, 100) };
        in_all_orders(&spec, &Run::on(1));
    }
}

/// Normalised rows have products of another type in `prep`.
#[test]
fn decays_of_every_strength_with_norms() {
    for op in [Op::Kda, Op::Gdn] {
        for decay in [Decay::None, Decay::Slow, Decay::Fast, Decay::Bursty, Decay::AllStrong] {
            let spec = Spec { decay, l2norm: true, h: 1, hv: 2, ..spec(op, 200) };
            compared(&spec, &Run { regime: Regime::Hard, ..Run::on(2) });
        }
    }
}

#[test]
fn decays_of_every_strength() {
    for op in [Op::Kda, Op::Gdn] {
        for decay in [Decay::None, Decay::Fast, Decay::Bursty, Decay::AllStrong] {
            // With no decay at all nothing is forgotten.
            let hard = Spec { decay, beta: BetaKind::Small, ..spec(op, 130) };
            compared(&hard, &Run { regime: Regime::Hard, ..Run::on(2) });
        }
    }
}

#[test]
fn correlated_keys_and_steps_up_to_two() {
    for op in [Op::Kda, Op::Gdn] {
        for (keys, beta) in [(Keys::CommonMean, BetaKind::Standard), (Keys::Iso, BetaKind::UpTo2)] {
            let spec = Spec { keys, beta, ..spec(op, 192) };
            compared(&spec, &Run { regime: Regime::Hard, ..Run::on(2) });
        }
    }
}

#[test]
fn every_mode_and_transport() {
    for (mode, transport) in
        [(Mode::Bulk, Transport::Auto), (Mode::Exact, Transport::Auto), (Mode::Overlap, Transport::Put)]
    {
        let config = Config { mode, transport, ..Config::default() };
        compared(&spec(Op::Kda, 256), &Run { config, ..Run::on(2) });
    }
}
