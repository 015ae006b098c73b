//! Context parallelism on threads: every rank's outputs and final states against the f64 reference, and what it sent
//! against the plan.

mod cp;

use cp::{MODES, Solved, check_rank, check_run, run};
use deltalink::compare::{Regime, tolerance};
use deltalink::generate::{BetaKind, Decay, GateKind, Keys, Spec};
use deltalink::inputs::{Beta, Op, StateLayout};
use deltalink::op::{Config, MWire, Mode};
use deltalink::plan::{Cuts, Plan};
use deltalink::reference::{Problem, recurrent};
use deltalink::tensor::{Buffer, Dtype, Tensor};

/// Options that every case takes in turn, so that each meets every other somewhere.
struct Turn(usize);

impl Turn {
    fn config(&mut self) -> Config {
        let n = self.0;
        self.0 += 1;
        Config {
            chunk: [16, 64, 32][n % 3],
            m_wire: [MWire::Auto, MWire::F32][n / 2 % 2],
            final_state: n % 7 != 3,
            checked: n.is_multiple_of(2),
            workers: [None, Some(2), Some(1)][n / 3 % 3],
            ..Config::default()
        }
    }
}

/// Slow decay and small steps: what a rank forwards is mostly what it received.
fn slow(spec: Spec) -> Spec {
    Spec { decay: Decay::Slow, beta: BetaKind::Small, initial_state: true, ..spec }
}

fn both_ops(spec: &Spec, dtypes: &[Dtype]) -> Vec<Solved> {
    let ops = [Op::Kda, Op::Gdn];
    ops.iter()
        .flat_map(|&op| dtypes.iter().map(move |&dtype| Solved::new(&Spec { op, dtype, ..spec.clone() })))
        .collect()
}

const NARROW: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Over many ranks the roundings of M on the wire, one for each rank in between, add up.
fn regime(config: &Config, plan: &Plan, dtype: Dtype) -> Regime {
    let rounds_m = config.mode != Mode::Exact && config.m_wire.resolve(dtype) == Dtype::Bf16;
    if rounds_m && plan.span() > 5 { Regime::Hard } else { Regime::Ordinary }
}

/// Runs all modes on all cuts. Where a sequence goes over three ranks or more, the transition must matter.
#[track_caller]
fn check(label: &str, solved: &[Solved], cuts: &[Cuts]) -> Vec<f64> {
    let mut turn = Turn(0);
    let mut f32_errors = Vec::new();
    for solved in solved {
        let dtype = solved.case.spec.dtype;
        for cuts in cuts {
            let plan = solved.plan(cuts);
            if plan.span() > 2 {
                let weight = solved.forwarded_weight(&plan);
                assert!(weight > 0.1, "{label}: {}: the transition's weight is {weight}", solved.case.spec);
            }
            for mode in MODES {
                let config = Config { mode, ..turn.config() };
                let errors = check_run(label, solved, &plan, &config, tolerance(dtype, regime(&config, &plan, dtype)));
                if dtype == Dtype::F32 {
                    f32_errors.extend(errors.iter().map(|e| e.rel_rms));
                }
            }
        }
    }
    f32_errors
}

#[test]
fn one_long_sequence_over_one_to_eight_ranks() {
    let spec = slow(Spec { t: 331, h: 2, hv: 4, k: 32, v: 48, ..Spec::default() });
    let mut cuts: Vec<Cuts> = [1, 2, 3, 4, 8].map(Cuts::equal).to_vec();
    cuts.push(Cuts::at(vec![1, 130, 131, 300]));
    cuts.push(Cuts::at(vec![0, 64, 64, 65, 200, 331, 331]));
    let mut errors = check("one sequence", &both_ops(&spec, &NARROW), &cuts);
    errors.sort_by(f64::total_cmp);
    let median = errors[errors.len() / 2];
    assert!(median < 1e-5, "median relative error in f32 {median:e}");
}

/// So many chunks on one rank that the correction is cut into several items, of which one merges the state and the others
/// wait for it.
#[test]
fn corrections_of_many_chunks() {
    let spec = slow(Spec { t: 700, h: 1, hv: 2, k: 16, v: 80, ..Spec::default() });
    let solved = both_ops(&spec, &[Dtype::F32, Dtype::Bf16]);
    for (i, solved) in solved.iter().enumerate() {
        let plan = solved.plan(&Cuts::at(vec![40, 350]));
        for (mode, workers) in [Mode::Overlap, Mode::Bulk].into_iter().flat_map(|mode| [1, 2, 3].map(|n| (mode, n))) {
            let config = Config {
                mode,
                chunk: 16,
                workers: Some(workers),
                checked: (i + workers) % 2 == 0,
                ..Config::default()
            };
            let limit = tolerance(solved.case.spec.dtype, Regime::Ordinary);
            check_run("many chunks", solved, &plan, &config, limit);
        }
    }
}

#[test]
fn packed_sequences_that_start_end_and_go_on_anywhere() {
    // Empty ones at the start, in between and at the end; single tokens; one that covers several ranks.
    let cu_seqlens = vec![0, 0, 1, 40, 41, 41, 260, 261, 300, 300];
    let spec = slow(Spec { t: 300, h: 1, hv: 2, k: 48, v: 32, cu_seqlens: Some(cu_seqlens), ..Spec::default() });
    let spec = Spec { state_layout: StateLayout::VFirst, ..spec };
    let cuts = [
        Cuts::equal(2),
        Cuts::equal(3),
        Cuts::equal(8),
        // At sequence borders, beside them, ranks without tokens and with one.
        Cuts::at(vec![1, 41, 41, 150, 259, 260, 261]),
        Cuts::at(vec![0, 39, 42, 300]),
    ];
    check("packed", &both_ops(&spec, &NARROW), &cuts);
}

#[test]
fn batches_of_several_lanes() {
    let spec = slow(Spec { b: 3, t: 110, h: 1, hv: 3, k: 16, v: 80, ..Spec::default() });
    let cuts = [Cuts::equal(2), Cuts::equal(4), Cuts::at(vec![1, 2, 70, 70])];
    check("batch", &both_ops(&spec, &[Dtype::F32, Dtype::Bf16]), &cuts);
}

#[test]
fn several_column_blocks_of_keys_and_values() {
    let shapes = [(80, 128), (128, 80), (144, 16), (256, 64), (64, 256)];
    for (i, (k, v)) in shapes.into_iter().enumerate() {
        let layout = [StateLayout::VFirst, StateLayout::KFirst][i % 2];
        let spec = slow(Spec { t: 100, h: 1, hv: 2, k, v, state_layout: layout, ..Spec::default() });
        // Each operation in one type, in turn.
        let dtypes = if i % 2 == 0 { [Dtype::F32, Dtype::Bf16] } else { [Dtype::Bf16, Dtype::F32] };
        let solved = [Op::Kda, Op::Gdn].into_iter().zip(dtypes);
        let solved: Vec<_> = solved.map(|(op, dtype)| Solved::new(&Spec { op, dtype, ..spec.clone() })).collect();
        check("columns", &solved, &[Cuts::at(vec![30, 70])]);
    }
    let spec = slow(Spec { t: 70, h: 1, hv: 1, k: 256, v: 256, ..Spec::default() });
    check("columns", &both_ops(&spec, &[Dtype::Bf16]), &[Cuts::at(vec![20, 50])]);
}

/// Strong gates: what arrives is forgotten, and nothing may become infinite or NaN on the way.
#[test]
fn gates_as_strong_as_they_come() {
    for decay in [Decay::Default, Decay::Fast, Decay::Bursty, Decay::AllStrong] {
        let spec = Spec { t: 150, h: 1, hv: 2, decay, initial_state: true, ..Spec::default() };
        for solved in both_ops(&spec, &NARROW) {
            let dtype = solved.case.spec.dtype;
            for (cuts, mode) in [Cuts::equal(3), Cuts::at(vec![1, 70])].iter().flat_map(|c| MODES.map(|mode| (c, mode)))
            {
                let config = Config { mode, checked: mode == Mode::Overlap, ..Config::default() };
                let hard = matches!(decay, Decay::Bursty | Decay::AllStrong);
                let regime = if hard { Regime::Hard } else { Regime::Ordinary };
                check_run(&format!("{decay:?}"), &solved, &solved.plan(cuts), &config, tolerance(dtype, regime));
            }
        }
    }
}

/// Where rounding errors reinforce each other: no decay, steps up to 2, correlated keys.
#[test]
fn hard_regimes() {
    for (decay, keys, beta) in [
        (Decay::None, Keys::Iso, BetaKind::Standard),
        (Decay::None, Keys::Iso, BetaKind::UpTo2),
        (Decay::None, Keys::CommonMean, BetaKind::Small),
        (Decay::None, Keys::CommonMean, BetaKind::UpTo2),
        (Decay::Slow, Keys::CommonMean, BetaKind::Standard),
    ] {
        let spec =
            Spec { t: 190, h: 2, hv: 2, k: 64, v: 32, decay, keys, beta, initial_state: true, ..Spec::default() };
        for solved in both_ops(&spec, &NARROW) {
            let dtype = solved.case.spec.dtype;
            let plan = solved.plan(&Cuts::at(vec![50, 95, 140]));
            for (mode, chunk) in MODES.into_iter().zip([64, 32, 16]) {
                let label = format!("{decay:?} {keys:?} {beta:?}");
                let config = Config { mode, chunk, ..Config::default() };
                check_run(&label, &solved, &plan, &config, tolerance(dtype, Regime::Hard));
            }
        }
    }
}

/// Every form of gate, step size and normalisation that the operation computes itself.
#[test]
fn activations_inside_the_operation() {
    for (gate, beta, l2norm) in [
        (GateKind::Softplus, BetaKind::Logits, true),
        (GateKind::Softplus, BetaKind::Logits2, false),
        (GateKind::LowerBound, BetaKind::Logits2, true),
    ] {
        let spec =
            Spec { t: 140, h: 2, hv: 4, k: 80, v: 32, gate, beta, l2norm, decay: Decay::Slow, ..Spec::default() };
        let ops: &[Op] = if gate == GateKind::LowerBound { &[Op::Kda] } else { &[Op::Kda, Op::Gdn] };
        for (&op, dtype) in ops.iter().flat_map(|op| NARROW.map(|dtype| (op, dtype))) {
            let solved = Solved::new(&Spec { op, dtype, ..spec.clone() });
            let plan = solved.plan(&Cuts::at(vec![31, 90]));
            for mode in MODES {
                let config = Config { mode, checked: mode == Mode::Bulk, ..Config::default() };
                check_run(&format!("{gate:?} {beta:?}"), &solved, &plan, &config, tolerance(dtype, Regime::Hard));
            }
        }
    }
}

/// Steps of either sign and zero steps are what they are: a negative one adds what a positive one erases.
#[test]
fn negative_and_zero_steps_are_computed_as_given() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let case = Spec { t: 90, dtype, decay: Decay::Default, ..Spec::default() }.generate();
        let mut inputs = case.inputs();
        let Beta::Given(beta) = &inputs.beta else { panic!("not the beta that was asked for") };
        let signed = beta.to_f64().into_iter().enumerate().map(|(i, x)| [x, -x, 0.0][i % 3]);
        let signed = Tensor { shape: beta.shape().to_vec(), data: Buffer::from_f64(dtype, signed) };
        inputs.beta = Beta::Given(signed.view());
        let expected = recurrent(&Problem::new(&inputs, None).unwrap());
        let plan = Plan::batch(1, 90, &Cuts::at(vec![20, 50])).unwrap();
        for (rank, part) in run(&plan, &inputs, &Config::default()).unwrap().iter().enumerate() {
            let limit = tolerance(dtype, Regime::Hard);
            check_rank("signed steps", &plan, rank, &inputs, part, &expected, limit);
        }
    }
}
