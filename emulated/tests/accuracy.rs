//! The bodies for Hopper round the operands that the portable ones round, so that results of a GPU are those of the CPU back end but
//! for the order of sums.

use deltalink::compare::Checked;
use deltalink::generate::{BetaKind, Decay, GateKind, Keys, Spec};
use deltalink::inputs::Op;
use deltalink::tensor::Dtype;
use deltalink_emulated::check::{Run, beside_the_cpu};

/// Most relative RMS of a result in bf16 beside the CPU back end's. (Numbers that are almost the same round to neighbours here and there,
/// so that it is far above the differences inside.)
const BOUND: f64 = 2e-3;

/// The same where the state carries every rounding on and on: with large steps and hardly any decay, the same body with its sums in
/// another order is as far off. What is left is what bf16 results may differ from the reference.
const BOUND_LASTING: f64 = 5e-3;

fn check(op: Op) {
    let of = |decay| Spec { op, decay, beta: BetaKind::Logits, ..Spec::default() };
    // As in training: keys have a direction in common, and little is forgotten.
    let training = Spec { keys: Keys::CommonMean, beta: BetaKind::Small, ..of(Decay::Slow) };
    let problems =
        [(of(Decay::Fast), BOUND), (of(Decay::Default), BOUND), (training, BOUND), (of(Decay::Slow), BOUND_LASTING)];
    for (spec, bound) in problems {
        let sizes = Spec { t: 1024, h: 4, hv: 4, k: 128, v: 128, ..spec };
        let spec = Spec { dtype: Dtype::Bf16, gate: GateKind::Softplus, l2norm: true, ..sizes };
        let found = beside_the_cpu(&spec, &Run::on(1)).unwrap_or_else(|error| panic!("{spec:?}: {error}"));
        assert!(found.launched.iter().all(|name| name.contains("_hopper")), "{:?}", found.launched);
        assert_eq!(found.results.len(), 2, "outputs and final states");
        for Checked { name, error, .. } in found.results {
            println!("{op}, {:?} decays, {:?} keys, {:?} steps, {name}: {error}", spec.decay, spec.keys, spec.beta);
            assert!(error.within(bound), "{spec:?} {name}: {error}");
        }
    }
}

#[test]
fn kda_beside_the_cpu() {
    check(Op::Kda);
}

#[test]
fn gdn_beside_the_cpu() {
    check(Op::Gdn);
}
