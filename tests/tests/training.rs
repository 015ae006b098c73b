//! Gradients against golden vectors, against one PE bit by bit, on random problems, and call after call on one world.

mod cp;

use std::time::Duration;

use cp::gradients::{Derived, check_gradients, check_training, shares};
use cp::{MODES, plan_of};
use deltalink::compare::{GRADIENT_MEDIAN_F32, gradients_against_file};
use deltalink::file::InputFile;
use deltalink::generate::{BetaKind, Decay, GateKind, Keys, Spec};
use deltalink::inputs::{Op, StateLayout};
use deltalink::op::{Config, ContextParallel, Mode, OpError, Recompute, Saved, whole};
use deltalink::plan::{Cuts, Exchange, Plan, Sizes};
use deltalink::reference::Problem;
use deltalink::tensor::Dtype;
use deltalink::world::{WorldOptions, run_threads};
use deltalink_tests::{golden_cp_files, golden_files, load, name};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Relative RMS errors of the gradients that `file` expects.
fn check_golden(label: &str, file: &InputFile, plan: &Plan, config: &Config) -> Vec<f64> {
    let inputs = file.inputs();
    let upstream = file.upstream().unwrap_or_else(|| panic!("{label} has no upstream gradients"));
    let found = whole::backward(plan, &inputs, &upstream, config, &WorldOptions::default());
    let found = found.unwrap_or_else(|e| panic!("{label}: {e}")).gradients.to_f64();
    let problem = Problem::new(&inputs, file.cu_seqlens().as_deref()).unwrap();
    let checked = gradients_against_file(file, &problem, &found);
    assert!(checked.len() >= 5, "{label}: {checked:?}");
    for result in &checked {
        assert!(result.mismatch.is_none(), "{label}: {}", result.mismatch.as_ref().unwrap());
    }
    checked.iter().map(|checked| checked.error.rel_rms).collect()
}

#[test]
fn golden_gradients_on_one_pe() {
    let mut errors = Vec::new();
    for (i, path) in golden_files().iter().enumerate() {
        let file = load(path);
        let dims = file.inputs().dims().unwrap();
        let plan = plan_of(file.cu_seqlens().as_deref(), dims.b, dims.t, &Cuts::equal(1));
        let config = Config { chunk: [64, 16, 32][i % 3], checked: i % 2 == 0, ..Config::default() };
        errors.extend(check_golden(&format!("{}, chunk {}", name(path), config.chunk), &file, &plan, &config));
    }
    errors.sort_by(f64::total_cmp);
    let median = errors[errors.len() / 2];
    assert!(median < GRADIENT_MEDIAN_F32, "median relative error {median:e} of {}", errors.len());
}

#[test]
fn golden_gradients_with_their_own_cuts_in_every_mode() {
    for path in golden_cp_files() {
        let file = load(&path);
        let dims = file.inputs().dims().unwrap();
        let cuts = Cuts::offsets(file.cuts().unwrap());
        let plan = plan_of(file.cu_seqlens().as_deref(), dims.b, dims.t, &cuts);
        for (mode, chunk) in MODES.into_iter().zip([32, 64, 16]) {
            let config = Config { mode, chunk, checked: mode == Mode::Overlap, ..Config::default() };
            check_golden(&format!("{}, {mode}", name(&path)), &file, &plan, &config);
        }
    }
}

/// As for outputs: with cuts at chunk borders of each sequence exact mode does the same operations on the same numbers as
/// one PE. (Only the sums over tokens of the gate's parameters are put together from shares.)
#[test]
fn exact_mode_with_cuts_at_chunks_is_bitwise_that_of_one_pe() {
    let base = Spec { h: 1, hv: 2, decay: Decay::Slow, beta: BetaKind::Small, initial_state: true, ..Spec::default() };
    let cases = [
        (Spec { t: 130, k: 32, v: 80, ..base.clone() }, 32, vec![32, 64, 96]),
        (Spec { b: 2, t: 70, k: 16, v: 16, gate: GateKind::Softplus, ..base.clone() }, 16, vec![16, 48]),
        // The second sequence starts at 37: its chunks end at 53, 69, 85, ...
        (
            Spec { t: 130, k: 48, v: 48, cu_seqlens: Some(vec![0, 37, 37, 120, 130]), ..base },
            16,
            vec![16, 53, 101, 120],
        ),
    ];
    for (spec, chunk, cuts) in cases {
        for (op, dtype) in [(Op::Kda, Dtype::F32), (Op::Gdn, Dtype::F32), (Op::Kda, Dtype::Bf16), (Op::Gdn, Dtype::F16)]
        {
            let spec = Spec { op, dtype, ..spec.clone() };
            let (case, upstream) = (spec.generate(), spec.generate_upstream(true));
            let on = |cuts: &Cuts, mode, recompute| {
                let plan = plan_of(case.cu_seqlens(), spec.b, spec.t, cuts);
                let config = Config { mode, chunk, recompute, ..Config::default() };
                let options = WorldOptions::default();
                whole::backward(&plan, &case.inputs(), &upstream.view(), &config, &options).unwrap().gradients
            };
            let several = on(&Cuts::at(cuts.clone()), Mode::Exact, Recompute::All);
            for (mode, recompute) in [(Mode::Exact, Recompute::States), (Mode::Overlap, Recompute::All)] {
                let one = on(&Cuts::equal(1), mode, recompute);
                let inputs = case.inputs();
                for ((name, several), (_, one)) in several.named(&inputs).into_iter().zip(one.named(&inputs)) {
                    if !["dA_log", "ddt_bias"].contains(&name) {
                        assert_eq!(several.data.bytes(), one.data.bytes(), "{spec}: {name}, against {mode} on one PE");
                    }
                }
            }
        }
    }
}

/// What a kernel computes must not depend on which of a PE's blocks did it.
#[test]
fn gradients_do_not_depend_on_the_number_of_workers() {
    let spec = Spec { t: 90, h: 1, hv: 2, k: 32, v: 80, initial_state: true, l2norm: true, ..Spec::default() };
    let (case, upstream) = (spec.generate(), spec.generate_upstream(true));
    let plan = plan_of(None, 1, 90, &Cuts::at(vec![30, 60]));
    let with = |workers| {
        let config = Config { chunk: 16, workers: Some(workers), ..Config::default() };
        whole::backward(&plan, &case.inputs(), &upstream.view(), &config, &WorldOptions::default()).unwrap().gradients
    };
    assert_eq!(with(1), with(3));
}

/// A problem and a way to run it, all drawn from `seed`.
fn draw(seed: u64) -> (Spec, Cuts, Config) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut one_of = |n: usize| rng.random_range(0..n);
    let op = [Op::Kda, Op::Gdn][one_of(2)];
    let gate = match one_of(4) {
        0 => GateKind::Softplus,
        1 if op == Op::Kda => GateKind::LowerBound,
        _ => GateKind::Given,
    };
    let (t, h) = (one_of(64), 1 + one_of(2));
    let mut spec = Spec {
        op,
        gate,
        t,
        h,
        hv: h * (1 + one_of(2)),
        k: [16, 32, 48][one_of(3)],
        v: [16, 32, 80][one_of(3)],
        dtype: [Dtype::F32, Dtype::F32, Dtype::Bf16][one_of(3)],
        decay: [Decay::Slow, Decay::Default, Decay::Slow, Decay::Fast][one_of(4)],
        beta: [BetaKind::Small, BetaKind::Standard, BetaKind::Logits][one_of(3)],
        keys: Keys::Iso,
        l2norm: one_of(2) == 0,
        initial_state: one_of(3) > 0,
        state_layout: [StateLayout::KFirst, StateLayout::VFirst][one_of(2)],
        seed,
        ..Spec::default()
    };
    if one_of(2) == 0 {
        let mut offsets: Vec<usize> = (0..one_of(5)).map(|_| one_of(t + 1)).chain([0, t]).collect();
        offsets.sort_unstable();
        spec.cu_seqlens = Some(offsets);
    } else {
        spec.b = 1 + one_of(2);
    }
    let mut cuts: Vec<usize> = (0..one_of(5)).map(|_| one_of(t + 1)).collect();
    cuts.sort_unstable();
    let config = Config {
        mode: MODES[one_of(3)],
        chunk: [16, 32, 64][one_of(3)],
        recompute: [Recompute::All, Recompute::States][one_of(2)],
        checked: one_of(3) == 0,
        workers: Some(1 + one_of(2)),
        final_state: one_of(2) == 0,
        ..Config::default()
    };
    (spec, Cuts::at(cuts), config)
}

#[test]
fn two_hundred_random_configurations() {
    let mut crossing = 0;
    for seed in 0..200 {
        let (spec, cuts, config) = draw(seed);
        let derived = Derived::new(&spec, seed % 3 > 0);
        let plan = derived.plan(&cuts);
        crossing += usize::from(plan.span() > 2);
        check_training(&format!("seed {seed}"), &derived, &plan, &config);
    }
    assert!(crossing > 50, "only {crossing} of them have a rank in the middle of a sequence");
}

/// Forward and backward calls in a given order on one world; PEs sleep now and then so that they drift apart.
fn run_calls(problems: &[Derived], plans: &[Plan], config: &Config, order: &[Call]) {
    let pes = plans[0].pes();
    let parts = run_threads(pes, &WorldOptions::default(), |pe| {
        let mut op = ContextParallel::new(pe, config.clone())?;
        let mut rng = ChaCha8Rng::seed_from_u64(pe.rank() as u64);
        let mut saved: Vec<Option<Saved>> = problems.iter().map(|_| None).collect();
        let mut gradients = Vec::new();
        for &call in order {
            if rng.random_bool(0.3) {
                std::thread::sleep(Duration::from_millis(rng.random_range(1..8)));
            }
            let (Call::Forward(i) | Call::Backward(i)) = call;
            let whole = problems[i].solved.inputs();
            let (share, upstream) = shares(&problems[i], &plans[i], pe.rank(), &whole);
            let inputs = share.inputs(&whole);
            match call {
                Call::Forward(_) => saved[i] = Some(op.forward_saving(&plans[i], &inputs)?.1),
                Call::Backward(_) => {
                    let saved = saved[i].take().expect("forward comes first");
                    gradients.push((i, op.backward(&plans[i], &inputs, saved, &upstream.view())?.gradients));
                }
            }
        }
        Ok::<_, OpError>(gradients)
    });
    let parts = parts.unwrap_or_else(|e| panic!("{e}"));
    for call in 0..parts[0].len() {
        let (i, of_call): (usize, Vec<_>) = (parts[0][call].0, parts.iter().map(|part| part[call].1.clone()).collect());
        check_gradients(&format!("backward call {call}, problem {i}"), &problems[i], &plans[i], &of_call);
    }
}

#[derive(Clone, Copy)]
enum Call {
    Forward(usize),
    Backward(usize),
}

/// Layers: forward through all of them, back in reverse order, step after step; and micro-batches whose order is another.
#[test]
fn forward_and_backward_calls_in_every_order() {
    use Call::{Backward as B, Forward as F};
    let spec = |seed| Spec {
        decay: Decay::Slow,
        beta: BetaKind::Small,
        t: 60,
        h: 1,
        hv: 2,
        k: 32,
        v: 80,
        initial_state: true,
        seed,
        ..Spec::default()
    };
    let problems: Vec<_> = (0..3).map(|seed| Derived::new(&spec(seed), true)).collect();
    let same: Vec<_> = problems.iter().map(|p| p.plan(&Cuts::at(vec![10, 30, 31]))).collect();
    let layers = [F(0), F(1), F(2), B(2), B(1), B(0), F(0), F(1), B(1), B(0), F(2), B(2), F(2), B(2)];
    let batches = [F(0), F(1), B(0), F(2), B(1), B(2), F(0), B(0), F(1), F(2), B(1), F(0), B(2), B(0)];
    for (i, mode) in MODES.into_iter().enumerate() {
        for (j, order) in [layers, batches].iter().enumerate() {
            let recompute = [Recompute::All, Recompute::States][(i + j) % 2];
            let config = Config { mode, chunk: 16, recompute, checked: j == 0, ..Config::default() };
            run_calls(&problems, &same, &config, order);
        }
    }
    // Other plans in between: each change is agreed on, in both directions.
    let cuts = [vec![10, 30, 31], vec![0, 20, 60], vec![15, 30, 45]];
    let changing: Vec<_> = problems.iter().zip(cuts).map(|(p, cuts)| p.plan(&Cuts::at(cuts))).collect();
    run_calls(&problems, &changing, &Config { chunk: 32, ..Config::default() }, &layers);
}

#[test]
fn what_is_saved_does_not_grow_with_tokens_unless_asked_to() {
    let bytes = |t: usize, recompute| {
        let spec = Spec { t, h: 1, hv: 2, k: 32, v: 48, ..Spec::default() };
        let (case, upstream) = (spec.generate(), spec.generate_upstream(false));
        let plan = plan_of(None, 1, t, &Cuts::equal(3));
        let config = Config { recompute, ..Config::default() };
        whole::backward(&plan, &case.inputs(), &upstream.view(), &config, &WorldOptions::default()).unwrap().saved_bytes
    };
    // The state before the segment where one arrives, and M where it goes on, with what was noted of its block and that of S: f32.
    let (state, m) = (2 * 32 * 48 * 4, 2 * (32 * 32 * 4 + 2 * 16));
    assert_eq!(bytes(90, Recompute::All), [0, state + m, state]);
    assert_eq!(bytes(360, Recompute::All), [0, state + m, state]);
    let sizes = Sizes { hv: 2, k: 32, v: 48, m_bytes: 4 };
    let plan = plan_of(None, 1, 90, &Cuts::equal(3));
    assert_eq!([0, 1, 2].map(|rank| plan.saved_bytes(rank, &sizes, Exchange::Push)), [0, state + m, state]);
    // One chunk of 64 on each PE, then two.
    let record = 2 * (64 * (3 * 32 + 2 * 64) + 32) * 4;
    assert_eq!(bytes(90, Recompute::States), [record, record + state + m, record + state]);
    assert_eq!(bytes(360, Recompute::States), [2 * record, 2 * record + state + m, 2 * record + state]);
}
