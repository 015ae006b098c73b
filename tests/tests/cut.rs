//! The cut of the transition: what is left out, that it is within the tolerance, and that nobody waits for what it makes
//! superfluous.

mod cp;

use std::time::{Duration, Instant};

use cp::gradients::{Derived, check_training};
use cp::{Solved, check_rank, check_run, run};
use deltalink::compare::{Regime, tolerance};
use deltalink::error::InputError;
use deltalink::generate::{BetaKind, Decay, Keys, Spec};
use deltalink::inputs::{Beta, Gate, Inputs, Op};
use deltalink::op::whole::Share;
use deltalink::op::{CUT_TOLERANCE, Config, ContextParallel, CutReport, Forward, MWire, Mode, OpError};
use deltalink::plan::{Cuts, Plan};
use deltalink::reference::{Problem, recurrent, state_at};
use deltalink::tensor::{Buffer, Dtype, Tensor};
use deltalink::world::{WorldOptions, run_threads};

/// Modes that send M.
const SENDING: [Mode; 2] = [Mode::Overlap, Mode::Bulk];

/// Spectral norm of a matrix of rows of `columns`, from below by at most a little: power iteration.
fn norm(matrix: &[f64], columns: usize) -> f64 {
    let mut x: Vec<f64> = (0..columns).map(|i| 1.0 + 0.3 * (i as f64).sin()).collect();
    let mut size = 0.0;
    for _ in 0..60 {
        let length = x.iter().map(|x| x * x).sum::<f64>().sqrt();
        if length == 0.0 {
            return 0.0;
        }
        let rows = matrix.chunks_exact(columns);
        let y: Vec<f64> = rows.clone().map(|row| row.iter().zip(&x).map(|(a, x)| a * x / length).sum()).collect();
        size = y.iter().map(|y| y * y).sum::<f64>().sqrt();
        x = (0..columns).map(|c| rows.clone().zip(&y).map(|(row, y)| row[c] * y).sum()).collect();
    }
    size
}

fn forward(solved: &Solved, plan: &Plan, config: &Config) -> Vec<Forward> {
    run(plan, &solved.inputs(), config).unwrap()
}

fn total(parts: &[Forward]) -> CutReport {
    parts.iter().fold(CutReport::default(), |all, part| all.plus(part.report.cut))
}

/// `case`'s inputs with other gates, steps and keys, each by token, head and channel.
struct Made {
    g: Tensor,
    beta: Tensor,
    k: Tensor,
}

impl Made {
    fn new(
        inputs: &Inputs<'_>,
        g: impl Fn(usize, usize) -> f64,
        beta: impl Fn(usize, f64) -> f64,
        k: impl Fn(usize, usize, f64) -> f64,
    ) -> Self {
        let dims = inputs.dims().unwrap();
        let Gate::Given(old) = &inputs.gate else { panic!("not the gate that was asked for") };
        let Beta::Given(steps) = &inputs.beta else { panic!("not the beta that was asked for") };
        let width = if inputs.op == Op::Kda { dims.k } else { 1 };
        let made = |like: &deltalink::tensor::TensorView<'_>, width: usize, of: &dyn Fn(usize, usize, f64) -> f64| {
            let values = like.to_f64().into_iter().enumerate().map(|(i, x)| of(i / width, i % width, x));
            Tensor { shape: like.shape().to_vec(), data: Buffer::from_f64(like.dtype(), values) }
        };
        Self {
            g: made(old, width, &|row, channel, _| g(row / dims.hv, channel)),
            beta: made(steps, 1, &|row, _, x| beta(row / dims.hv, x)),
            k: made(&inputs.k, dims.k, &|row, channel, x| k(row / dims.h, channel, x)),
        }
    }

    fn inputs<'a>(&'a self, inputs: &Inputs<'a>) -> Inputs<'a> {
        Inputs {
            gate: Gate::Given(self.g.view()),
            beta: Beta::Given(self.beta.view()),
            k: self.k.view(),
            ..inputs.clone()
        }
    }
}

/// Holds every output row against the exact one: off by at most the tolerance, times what enters it, for every PE before, and
/// f32 rounding.
#[track_caller]
fn check_bound(label: &str, plan: &Plan, inputs: &Inputs<'_>, parts: &[Forward], tolerance: f64) -> f64 {
    let problem = Problem::new(inputs, None).unwrap();
    let expected = recurrent(&problem);
    let (hv, v) = (problem.dims.hv, problem.dims.v);
    let mut used: f64 = 0.0;
    for (rank, part) in parts.iter().enumerate() {
        let found = part.o.data.to_f64();
        for head in 0..hv {
            let arriving = (1..=rank).map(|r| plan.cuts[r]).filter(|&token| token < plan.layout.tokens());
            let arriving: f64 = arriving.map(|token| norm(&state_at(&problem, head, token), v)).sum();
            for token in plan.cuts[rank]..plan.cuts[rank + 1] {
                let row = |x: &[f64], token: usize| x[(token * hv + head) * v..][..v].to_vec();
                let (x, y) = (row(&found, token - plan.cuts[rank]), row(&expected.o, token));
                let off = x.iter().zip(&y).map(|(x, y)| (x - y) * (x - y)).sum::<f64>().sqrt();
                let q = problem.q(token, head).iter().map(|q| q * q).sum::<f64>().sqrt();
                let size = y.iter().map(|y| y * y).sum::<f64>().sqrt();
                let allowed = tolerance * problem.scale * q * arriving;
                let rounding = 3e-5 * (size + problem.scale * q * arriving.min(1.0)) + 1e-7;
                assert!(
                    off <= allowed + rounding,
                    "{label}, rank {rank}, token {token}: off by {off:e}, {allowed:e} allowed"
                );
                used = used.max((off - rounding) / allowed.max(f64::MIN_POSITIVE));
            }
        }
    }
    used
}

/// Tolerances that are large, so that what is left out is far above rounding; all kinds of gates, steps up to 2, keys longer
/// than 1.
#[test]
fn what_is_left_out_is_within_the_tolerance() {
    let mut cut = 0;
    let mut most: f64 = 0.0;
    for (i, (decay, keys, beta)) in [
        (Decay::Slow, Keys::Iso, BetaKind::Small),
        (Decay::Slow, Keys::CommonMean, BetaKind::Standard),
        (Decay::None, Keys::Iso, BetaKind::Standard),
        (Decay::None, Keys::Iso, BetaKind::UpTo2),
        (Decay::Default, Keys::CommonMean, BetaKind::UpTo2),
        (Decay::Fast, Keys::Iso, BetaKind::Standard),
        (Decay::Bursty, Keys::Iso, BetaKind::Standard),
    ]
    .into_iter()
    .enumerate()
    {
        for (op, length) in [(Op::Kda, 1.0), (Op::Gdn, 1.0), (Op::Kda, 1.06), (Op::Gdn, 1.06)] {
            let k = [16, 32, 80][i % 3];
            let spec = Spec {
                op,
                t: 430,
                h: 1,
                hv: 2,
                k,
                v: 48,
                decay,
                keys,
                beta,
                initial_state: true,
                seed: 7 + i as u64,
                ..Spec::default()
            };
            let case = spec.generate();
            let base = case.inputs();
            let gates = base.gate.clone();
            let made = Made::new(&base, |_, _| 0.0, |_, x| x, |_, _, x| x * length);
            let inputs = Inputs { gate: gates, ..made.inputs(&base) };
            let plan = Plan::batch(1, spec.t, &Cuts::at(vec![60, 240])).unwrap();
            for (tolerance, mode) in [(0.5f32, Mode::Overlap), (0.03, Mode::Bulk), (1e-3, Mode::Overlap)] {
                let config = Config {
                    mode,
                    chunk: 16,
                    cut_tolerance: tolerance,
                    checked: mode == Mode::Bulk,
                    ..Config::default()
                };
                let parts = run(&plan, &inputs, &config).unwrap();
                let label = format!("{op} {decay:?} {keys:?} {beta:?} |k| {length} tolerance {tolerance}");
                most = most.max(check_bound(&label, &plan, &inputs, &parts, f64::from(tolerance)));
                let report = total(&parts);
                assert!(report.largest_bound <= tolerance, "{label}: {report:?}");
                cut += usize::from(report.m_chunks_walked < report.m_chunks);
            }
        }
    }
    assert!(cut > 40, "only {cut} of 84 cases were cut");
    // The bound is a bound and not just a large number: some of what was left out comes near it.
    assert!(most > 0.02, "what was left out is at most {most} of what may be");
}

/// Gates of GDN without steps: M is exactly a number times the identity, so the chunk of the cut is known.
#[test]
fn gates_just_below_and_just_above_the_tolerance() {
    for (op, chunks) in [(Op::Gdn, 3), (Op::Kda, 3), (Op::Gdn, 6), (Op::Kda, 6)] {
        // The middle PE has 6 chunks of 16.
        let spec = Spec { op, t: 200, h: 1, hv: 2, k: 32, v: 32, initial_state: true, ..Spec::default() };
        let case = spec.generate();
        let base = case.inputs();
        let plan = Plan::batch(1, spec.t, &Cuts::at(vec![50, 146])).unwrap();
        for (factor, cut) in [(1.001, true), (0.999, false)] {
            let g = f64::from(1e-3f32).ln() / f64::from(16 * chunks) * factor;
            let made = Made::new(&base, |_, _| g, |_, _| 0.0, |_, _, x| x);
            let inputs = made.inputs(&base);
            for mode in SENDING {
                let config = Config { mode, chunk: 16, cut_tolerance: 1e-3, checked: true, ..Config::default() };
                let parts = run(&plan, &inputs, &config).unwrap();
                let report = parts[1].report.cut;
                let walked = if cut { chunks } else { (chunks + 1).min(6) };
                let is_empty = cut || chunks < 6;
                let found =
                    (report.m_chunks, report.m_chunks_walked, report.empty_messages, report.largest_bound > 0.0);
                let want = (12, 2 * u64::try_from(walked).unwrap(), if is_empty { 2 } else { 0 }, is_empty);
                assert_eq!(found, want, "{op}, {chunks} chunks, {factor}, {mode}");
                assert_eq!(parts[1].report.bytes_sent, if is_empty { 8192 } else { 16384 }, "{op} {factor} {mode}");
                check_bound("just there", &plan, &inputs, &parts, 1e-3);
            }
        }
    }
}

/// A channel that never decays, but whose key every token erases: no bound that is known before the walk sees it, the norm does.
#[test]
fn erasing_is_measured() {
    let spec = Spec { t: 200, h: 1, hv: 2, k: 32, v: 32, initial_state: true, ..Spec::default() };
    let case = spec.generate();
    let base = case.inputs();
    let plan = Plan::batch(1, spec.t, &Cuts::at(vec![50, 146])).unwrap();
    let tolerance = 1e-3f32;
    for (factor, walked) in [(1.003, 3), (0.997, 4)] {
        // 31 channels remain of which each has decayed by exp(g) a token.
        let g = (f64::from(tolerance) / 31f64.sqrt()).ln() / 48.0 * factor;
        let key = |channel| f64::from(u8::from(channel == 0));
        let made = Made::new(&base, |_, c| if c == 0 { 0.0 } else { g }, |_, _| 1.0, |_, c, _| key(c));
        let inputs = made.inputs(&base);
        let config = Config { chunk: 16, cut_tolerance: tolerance, checked: true, ..Config::default() };
        let parts = run(&plan, &inputs, &config).unwrap();
        let report = parts[1].report.cut;
        assert_eq!((report.m_chunks_walked, report.empty_messages), (2 * walked, 2), "{factor}");
        check_bound("erased", &plan, &inputs, &parts, f64::from(tolerance));
    }
}

/// As in a trained model: some channels forget fast, some hardly, and keys erase what is left.
#[test]
fn gates_of_which_some_channels_are_slow() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let spec = Spec { t: 1500, h: 1, hv: 2, k: 16, v: 32, dtype, initial_state: true, ..Spec::default() };
        let case = spec.generate();
        let base = case.inputs();
        let made =
            Made::new(&base, |t, c| -0.5 * f64::from((c % 4) as u8) - 1e-4 * (t % 3) as f64, |_, x| x, |_, _, x| x);
        let inputs = made.inputs(&base);
        let expected = recurrent(&Problem::new(&inputs, None).unwrap());
        let plan = Plan::batch(1, spec.t, &Cuts::at(vec![200, 800, 1400])).unwrap();
        for (mode, m_wire) in [(Mode::Overlap, MWire::Auto), (Mode::Bulk, MWire::F32), (Mode::Overlap, MWire::Bf16)] {
            // f16 holds nothing below 6e-8: there erasing ends.
            let cut_tolerance = if dtype == Dtype::F16 { 1e-5 } else { CUT_TOLERANCE };
            let config = Config { mode, m_wire, cut_tolerance, ..Config::default() };
            let parts = run(&plan, &inputs, &config).unwrap();
            for (rank, part) in parts.iter().enumerate() {
                let limit = tolerance(dtype, Regime::Hard);
                check_rank("slow channels", &plan, rank, &inputs, part, &expected, limit);
            }
            let report = total(&parts);
            assert!(
                report.m_chunks_walked < report.m_chunks && report.m_chunks_walked > 0,
                "{dtype} {mode}: {report:?}"
            );
            assert!(report.empty_messages > 0 && report.largest_bound <= cut_tolerance, "{dtype} {mode}: {report:?}");
        }
    }
}

/// Slow gates, tolerance 0 and exact mode leave out nothing.
#[test]
fn what_matters_is_not_left_out() {
    let slow = Spec { t: 300, decay: Decay::Slow, beta: BetaKind::Small, initial_state: true, ..Spec::default() };
    for (decay, mode, cut_tolerance, cuts) in [
        (Decay::Slow, Mode::Overlap, CUT_TOLERANCE, false),
        (Decay::Fast, Mode::Overlap, 0.0, false),
        (Decay::Fast, Mode::Bulk, 0.0, false),
        (Decay::Fast, Mode::Exact, CUT_TOLERANCE, false),
        (Decay::Fast, Mode::Overlap, CUT_TOLERANCE, true),
        (Decay::Fast, Mode::Bulk, CUT_TOLERANCE, true),
    ] {
        for op in [Op::Kda, Op::Gdn] {
            let solved = Solved::new(&Spec { op, decay, ..slow.clone() });
            let plan = solved.plan(&Cuts::equal(3));
            let config = Config { mode, cut_tolerance, chunk: 16, checked: true, ..Config::default() };
            check_run("left out", &solved, &plan, &config, tolerance(Dtype::F32, Regime::Ordinary));
            let report = total(&forward(&solved, &plan, &config));
            let found = report.m_chunks_walked < report.m_chunks && report.empty_messages > 0;
            assert_eq!(found, cuts, "{op} {decay:?} {mode} {cut_tolerance}: {report:?}");
            assert_eq!(report.largest_bound > 0.0, cuts, "{op} {decay:?} {mode} {cut_tolerance}: {report:?}");
        }
    }
}

/// One to eight PEs, uneven cuts, packed sequences, lanes, several blocks of M, every type of M: with and without the cut.
#[test]
fn results_differ_by_no_more_than_the_tolerance() {
    let packed = Some(vec![0, 90, 90, 400, 410]);
    let specs = [
        Spec { t: 410, k: 80, v: 80, ..Spec::default() },
        Spec { t: 410, k: 144, v: 16, cu_seqlens: packed, ..Spec::default() },
        Spec { b: 2, t: 200, k: 32, v: 32, ..Spec::default() },
    ];
    for (i, spec) in specs.into_iter().enumerate() {
        for (op, decay) in [(Op::Kda, Decay::Default), (Op::Gdn, Decay::Default), (Op::Kda, Decay::Fast)] {
            let solved = Solved::new(&Spec { op, decay, initial_state: true, ..spec.clone() });
            for (n, cuts) in
                [Cuts::equal(1), Cuts::equal(2), Cuts::equal(8), Cuts::at(vec![1, 70, 130])].iter().enumerate()
            {
                let plan = solved.plan(cuts);
                for mode in SENDING {
                    let m_wire = [MWire::Auto, MWire::Bf16, MWire::F32][(i + n) % 3];
                    let config = Config { mode, m_wire, chunk: 16, ..Config::default() };
                    let with = forward(&solved, &plan, &config);
                    let without = forward(&solved, &plan, &Config { cut_tolerance: 0.0, ..config });
                    for (with, without) in with.iter().zip(&without) {
                        let states = |part: &Forward| part.final_state.as_ref().unwrap().data.to_f64();
                        let close = |x: f64, y: f64| (x - y).abs() <= f64::from(CUT_TOLERANCE) * (2.0 * y.abs() + 40.0);
                        let values = with.o.data.to_f64().into_iter().zip(without.o.data.to_f64());
                        let states = states(with).into_iter().zip(states(without));
                        assert!(values.chain(states).all(|(x, y)| close(x, y)), "{op} {decay:?} {cuts:?} {mode}");
                        assert!(with.report.bytes_sent <= without.report.bytes_sent);
                    }
                }
            }
        }
    }
}

/// The second of four PEs passes nothing on. So the last two need not wait for the first one, which is late; its messages are
/// acknowledged all the same, and the slots are used again.
#[test]
fn nobody_waits_for_what_is_forgotten() {
    let spec = Spec { t: 400, k: 32, v: 80, decay: Decay::Fast, initial_state: true, ..Spec::default() };
    let solved = Solved::new(&spec);
    let plan = solved.plan(&Cuts::equal(4));
    let whole = solved.inputs();
    let config = Config { chunk: 16, workers: Some(1), ..Config::default() };
    let results = run_threads(4, &WorldOptions::default(), |pe| {
        let share = Share::new(&plan, pe.rank(), &whole);
        let share = share.inputs(&whole);
        let mut op = ContextParallel::new(pe, config.clone())?;
        let mut calls = vec![op.forward(&plan, &share)?];
        pe.barrier("the first call is over")?;
        let (mut began, mut ended) = (Instant::now(), Vec::new());
        for call in 0..3 {
            if pe.rank() == 0 && call == 0 {
                std::thread::sleep(Duration::from_millis(1500));
                began = Instant::now();
            }
            calls.push(op.forward(&plan, &share)?);
            ended.push(Instant::now());
        }
        Ok::<_, OpError>((calls, began, ended))
    });
    let results = results.unwrap();
    for (rank, (calls, ..)) in results.iter().enumerate() {
        for part in calls {
            let limit = tolerance(Dtype::F32, Regime::Ordinary);
            check_rank("forgotten", &plan, rank, &whole, part, &solved.expected, limit);
        }
    }
    let (_, late, _) = &results[0];
    for rank in [2, 3] {
        assert!(results[rank].2[0] < *late, "PE {rank} waited for PE 0");
    }
    assert!(results[1].2[0] > *late, "PE 1 did not wait for PE 0, whose state it starts from");
}

/// Training: M that is empty is neither kept nor sent back.
#[test]
fn gradients_with_transitions_that_are_empty() {
    for (i, decay) in [Decay::Default, Decay::Fast, Decay::Slow].into_iter().enumerate() {
        let derived = Derived::new(
            &Spec { t: 420, h: 1, hv: 2, k: 80, v: 32, decay, initial_state: true, ..Spec::default() },
            true,
        );
        let plan = derived.solved.plan(&Cuts::at(vec![30, 200, 340]));
        for mode in SENDING {
            let config = Config { mode, chunk: 32, checked: i == 0, ..Config::default() };
            check_training("empty transitions", &derived, &plan, &config);
            let parts = cp::gradients::train(&derived, &plan, &config).unwrap();
            let empty: u64 = parts.iter().map(|part| part.backward.report.cut.empty_messages).sum();
            assert_eq!(empty > 0, decay != Decay::Slow, "{decay:?} {mode}: {empty} empty messages");
        }
    }
}

#[test]
fn tolerances_out_of_range_are_refused() {
    for bad in [1.0, -1e-3, 1e-16, f32::NAN, f32::INFINITY] {
        let refused = run_threads(1, &WorldOptions::default(), |pe| {
            let config = Config { cut_tolerance: bad, ..Config::default() };
            Ok::<_, OpError>(ContextParallel::new(pe, config).err())
        });
        let error = refused.unwrap().remove(0).expect("an error");
        assert!(matches!(&error, OpError::Input(InputError::CutTolerance { .. })), "{bad}: {error}");
    }
}
