//! Gradients on one PE and on several: every rank's against the f64 reference, and what it sent against the plan.

mod cp;

use cp::MODES;
use cp::gradients::{Derived, assert_transition_matters, check_training};
use deltalink::compare::{Checked, GRADIENT_MEDIAN_F32};
use deltalink::generate::{BetaKind, Decay, GateKind, Spec};
use deltalink::inputs::{Op, StateLayout};
use deltalink::op::{Config, MWire, Recompute};
use deltalink::plan::Cuts;
use deltalink::tensor::Dtype;

/// Slow decay and small steps: what a rank passes on is mostly what it received.
fn slow(spec: Spec) -> Spec {
    Spec { decay: Decay::Slow, beta: BetaKind::Small, initial_state: true, ..spec }
}

/// Options that every case takes in turn, so that each meets every other somewhere.
fn turn(n: usize) -> Config {
    Config {
        chunk: [16, 64, 32][n % 3],
        m_wire: [MWire::Auto, MWire::F32][n / 2 % 2],
        recompute: [Recompute::All, Recompute::States][n / 3 % 2],
        checked: n.is_multiple_of(2),
        workers: [None, Some(2), Some(1)][n / 3 % 3],
        ..Config::default()
    }
}

fn both_ops(spec: &Spec, dtypes: &[Dtype]) -> Vec<Derived> {
    let ops = [Op::Kda, Op::Gdn];
    let all = ops.iter().flat_map(|&op| dtypes.iter().map(move |&dtype| (op, dtype)));
    all.enumerate().map(|(i, (op, dtype))| Derived::new(&Spec { op, dtype, ..spec.clone() }, i % 3 != 1)).collect()
}

/// Runs all modes on all cuts; where a sequence goes over three ranks or more, the transition must matter. In f32 the median
/// over everything must be small as well.
#[track_caller]
fn check(label: &str, derived: &[Derived], cuts: &[Cuts]) {
    let mut n = 0;
    let mut f32_errors = Vec::new();
    for derived in derived {
        for cuts in cuts {
            let plan = derived.plan(cuts);
            assert_transition_matters(label, derived, &plan);
            for mode in MODES {
                let checked = check_training(label, derived, &plan, &Config { mode, ..turn(n) });
                n += 1;
                if derived.solved.case.spec.dtype == Dtype::F32 {
                    f32_errors.extend(checked);
                }
            }
        }
    }
    assert_median(label, &f32_errors);
}

#[track_caller]
fn assert_median(label: &str, checked: &[Checked]) {
    let mut errors: Vec<f64> = checked.iter().map(|checked| checked.error.rel_rms).collect();
    errors.sort_by(f64::total_cmp);
    if let Some(median) = errors.get(errors.len() / 2) {
        assert!(*median < GRADIENT_MEDIAN_F32, "{label}: median relative error in f32 {median:e}");
    }
}

const F32_AND_BF16: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];

#[test]
fn one_long_sequence_over_one_to_eight_ranks() {
    let spec = slow(Spec { t: 203, h: 1, hv: 2, k: 32, v: 48, ..Spec::default() });
    let mut cuts: Vec<Cuts> = [1, 2, 3, 4, 8].map(Cuts::equal).to_vec();
    cuts.push(Cuts::at(vec![0, 64, 64, 65, 120, 203, 203]));
    check("one sequence", &both_ops(&spec, &F32_AND_BF16), &cuts);
}

#[test]
fn packed_sequences_that_start_end_and_go_on_anywhere() {
    let cu_seqlens = vec![0, 0, 1, 40, 41, 41, 180, 181, 200, 200];
    let spec = slow(Spec { t: 200, h: 1, hv: 2, k: 48, v: 32, cu_seqlens: Some(cu_seqlens), ..Spec::default() });
    let spec = Spec { state_layout: StateLayout::VFirst, ..spec };
    let cuts = [Cuts::equal(3), Cuts::at(vec![1, 41, 41, 110, 179, 180, 181])];
    check("packed", &both_ops(&spec, &F32_AND_BF16), &cuts);
}

#[test]
fn batches_of_several_lanes() {
    let spec = slow(Spec { b: 3, t: 70, h: 1, hv: 3, k: 16, v: 80, ..Spec::default() });
    check("batch", &both_ops(&spec, &F32_AND_BF16), &[Cuts::equal(2), Cuts::at(vec![1, 2, 50, 50])]);
}

/// Every form of gate, step size and normalisation that the operation computes itself, with its own gradient.
#[test]
fn through_the_activations() {
    for (gate, beta, l2norm) in [
        (GateKind::Softplus, BetaKind::Logits, true),
        (GateKind::Softplus, BetaKind::Logits2, false),
        (GateKind::LowerBound, BetaKind::Logits2, true),
    ] {
        let spec = Spec { t: 90, h: 1, hv: 2, k: 80, v: 32, gate, beta, l2norm, decay: Decay::Slow, ..Spec::default() };
        let ops: &[Op] = if gate == GateKind::LowerBound { &[Op::Kda] } else { &[Op::Kda, Op::Gdn] };
        for (&op, dtype) in ops.iter().flat_map(|op| F32_AND_BF16.map(|dtype| (op, dtype))) {
            let derived = Derived::new(&Spec { op, dtype, ..spec.clone() }, true);
            let plan = derived.plan(&Cuts::at(vec![31, 60]));
            for (n, mode) in MODES.into_iter().enumerate() {
                check_training(&format!("{gate:?} {beta:?}"), &derived, &plan, &Config { mode, ..turn(n) });
            }
        }
    }
}

#[test]
fn several_column_blocks_of_keys_and_values() {
    for (i, (k, v)) in [(80, 128), (144, 16), (64, 256)].into_iter().enumerate() {
        let spec = slow(Spec { t: 75, h: 1, hv: 1, k, v, ..Spec::default() });
        let dtypes = if i % 2 == 0 { [Dtype::F32, Dtype::Bf16] } else { [Dtype::Bf16, Dtype::F32] };
        let derived = [Op::Kda, Op::Gdn].into_iter().zip(dtypes);
        let derived: Vec<_> =
            derived.map(|(op, dtype)| Derived::new(&Spec { op, dtype, ..spec.clone() }, true)).collect();
        check("columns", &derived, &[Cuts::at(vec![20, 50])]);
    }
}
