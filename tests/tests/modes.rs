//! The modes against golden vectors, against one PE bit by bit, and call after call on one world.

mod cp;

use std::time::Duration;

use cp::{MODES, Solved, check_rank, check_run, plan_of, run};
use deltalink::compare::{Regime, against_file, tolerance};
use deltalink::file::InputFile;
use deltalink::generate::{BetaKind, Decay, GateKind, Spec};
use deltalink::inputs::{Op, StateLayout};
use deltalink::op::whole::{self, Share};
use deltalink::op::{Config, ContextParallel, Mode, OpError};
use deltalink::plan::{Cuts, Plan};
use deltalink::tensor::Dtype;
use deltalink::world::{WorldOptions, run_threads};
use deltalink_tests::{golden_cp_files, load, name};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Checks `file` on its own cuts in every mode, on inputs of type `dtype`.
fn check_golden(label: &str, file: &InputFile, dtype: Dtype, limit: f64) {
    let inputs = file.inputs();
    assert_eq!(inputs.dtype(), dtype);
    let dims = inputs.dims().unwrap();
    let plan = plan_of(file.cu_seqlens().as_deref(), dims.b, dims.t, &Cuts::offsets(file.cuts().unwrap()));
    for (mode, chunk) in MODES.into_iter().zip([32, 64, 16]) {
        let config = Config { mode, chunk, checked: mode != Mode::Bulk, ..Config::default() };
        let label = format!("{label}, {dtype}, {mode}");
        let result = whole::forward(&plan, &inputs, &config, &WorldOptions::default());
        let result = result.unwrap_or_else(|e| panic!("{label}: {e}"));
        let (o, ht) = (result.o.data.to_f64(), result.final_state.unwrap().data.to_f64());
        let checked = against_file(file, &[("o", &o), ("ht", &ht)], limit);
        assert_eq!(checked.len(), 2, "{label}");
        for result in checked {
            assert!(result.mismatch.is_none(), "{label}: {}", result.mismatch.unwrap());
        }
    }
}

#[test]
fn golden_vectors_with_their_own_cuts_in_every_mode() {
    let mut in_bf16 = 0;
    for path in golden_cp_files() {
        let (file, label) = (load(&path), name(&path));
        check_golden(&label, &file, Dtype::F32, tolerance(Dtype::F32, Regime::Ordinary));
        // What the file expects follows from inputs that bf16 holds exactly.
        if file.metadata().get("bf16_inputs").is_some_and(|exact| exact == "true") {
            check_golden(&label, &file.to_dtype(Dtype::Bf16), Dtype::Bf16, tolerance(Dtype::Bf16, Regime::Ordinary));
            in_bf16 += 1;
        }
    }
    assert!(in_bf16 > 5, "only {in_bf16} files with inputs that are exact in bf16");
}

/// Exact mode on several PEs is the computation of one PE cut into pieces: with cuts at chunk borders of each sequence
/// the same operations on the same numbers.
#[test]
fn exact_mode_with_cuts_at_chunks_is_bitwise_that_of_one_pe() {
    let base = Spec { h: 1, hv: 2, decay: Decay::Slow, beta: BetaKind::Small, initial_state: true, ..Spec::default() };
    let packed = |cu: &[usize]| Some(cu.to_vec());
    let cases = [
        (Spec { t: 200, k: 32, v: 80, ..base.clone() }, 32, vec![32, 64, 160]),
        (Spec { t: 150, k: 128, v: 32, ..base.clone() }, 64, vec![0, 128, 128]),
        (Spec { b: 2, t: 70, k: 16, v: 16, gate: GateKind::Softplus, ..base.clone() }, 16, vec![16, 48]),
        // The second sequence starts at 37: its chunks end at 53, 69, 85, ...
        (Spec { t: 130, k: 48, v: 48, cu_seqlens: packed(&[0, 37, 37, 120, 130]), ..base }, 16, vec![16, 53, 101, 120]),
    ];
    for (spec, chunk, cuts) in cases {
        for (op, dtype) in
            [Op::Kda, Op::Gdn].iter().flat_map(|&op| [Dtype::F32, Dtype::Bf16, Dtype::F16].map(|d| (op, d)))
        {
            let case = Spec { op, dtype, ..spec.clone() }.generate();
            let inputs = case.inputs();
            let on = |cuts: &Cuts, mode| {
                let plan = plan_of(case.cu_seqlens(), spec.b, spec.t, cuts);
                let config = Config { mode, chunk, ..Config::default() };
                whole::forward(&plan, &inputs, &config, &WorldOptions::default()).unwrap()
            };
            let several = on(&Cuts::at(cuts.clone()), Mode::Exact);
            for mode in [Mode::Exact, Mode::Overlap] {
                let one = on(&Cuts::equal(1), mode);
                assert_eq!(several.o.data.bytes(), one.o.data.bytes(), "{}: o", case.spec);
                let (several, one) = (several.final_state.as_ref().unwrap(), one.final_state.as_ref().unwrap());
                assert_eq!(several.data.bytes(), one.data.bytes(), "{}: ht", case.spec);
            }
        }
    }
}

#[test]
fn nothing_is_sent_where_no_sequence_crosses_a_cut() {
    let spec = Spec { t: 120, cu_seqlens: Some(vec![0, 40, 40, 90, 120]), initial_state: true, ..Spec::default() };
    let solved = Solved::new(&spec);
    let plan = solved.plan(&Cuts::at(vec![40, 40, 90]));
    assert_eq!(plan.span(), 1);
    for mode in MODES {
        let config = Config { mode, checked: true, ..Config::default() };
        check_run("no crossing", &solved, &plan, &config, tolerance(Dtype::F32, Regime::Ordinary));
        for part in run(&plan, &solved.inputs(), &config).unwrap() {
            assert_eq!((part.report.bytes_sent, part.report.messages, part.report.heap_bytes), (0, 0, 0), "{mode}");
        }
    }
}

/// A problem, its plan, and each rank's share.
struct Step {
    solved: Solved,
    plan: Plan,
    shares: Vec<Share>,
    tolerance: f64,
}

impl Step {
    fn new(spec: Spec, cuts: &Cuts) -> Self {
        let solved = Solved::new(&spec);
        let plan = solved.plan(cuts);
        let shares = (0..plan.pes()).map(|rank| Share::new(&plan, rank, &solved.inputs())).collect();
        Self { tolerance: tolerance(spec.dtype, Regime::Ordinary), solved, plan, shares }
    }
}

/// Runs all steps one after the other in one world, by the operation whose number `op_of` gives for each step; PEs
/// sleep now and then so that they drift apart.
fn run_steps(steps: &[Step], configs: &[Config], op_of: impl Fn(usize) -> usize + Sync) {
    let pes = steps[0].plan.pes();
    run_threads(pes, &WorldOptions::default(), |pe| {
        let mut ops =
            configs.iter().map(|config| ContextParallel::new(pe, config.clone())).collect::<Result<Vec<_>, _>>()?;
        let mut rng = ChaCha8Rng::seed_from_u64(pe.rank() as u64);
        for (i, step) in steps.iter().enumerate() {
            if rng.random_bool(0.4) {
                std::thread::sleep(Duration::from_millis(rng.random_range(1..15)));
            }
            let whole = step.solved.inputs();
            let inputs = step.shares[pe.rank()].inputs(&whole);
            let found = ops[op_of(i)].forward(&step.plan, &inputs)?;
            let label = format!("step {i}, {}", step.solved.case.spec);
            check_rank(&label, &step.plan, pe.rank(), &whole, &found, &step.solved.expected, step.tolerance);
        }
        Ok::<_, OpError>(())
    })
    .unwrap_or_else(|e| panic!("{e}"));
}

fn slow(seed: u64) -> Spec {
    Spec { decay: Decay::Slow, beta: BetaKind::Small, h: 1, hv: 2, k: 32, v: 80, seed, ..Spec::default() }
}

/// The same plan again and again: PEs meet in nothing but signals and acks, slots are used many times over.
#[test]
fn many_calls_with_one_plan_and_changing_inputs() {
    for (mode, op) in MODES.into_iter().zip([Op::Kda, Op::Gdn, Op::Kda]) {
        for checked in [false, true] {
            let spec = |i: u64| Spec { t: 100, op, initial_state: i.is_multiple_of(3), ..slow(i) };
            let steps: Vec<Step> = (0..14).map(|i| Step::new(spec(i), &Cuts::at(vec![10, 40, 41]))).collect();
            let config = Config { mode, checked, chunk: 16, workers: checked.then_some(2), ..Config::default() };
            run_steps(&steps, &[config], |_| 0);
        }
    }
}

/// Plans with other cuts, other sequences, other sizes and other numbers of lanes, which share channels or need new ones.
#[test]
fn many_calls_with_changing_plans() {
    for mode in MODES {
        let packed = |cu: &[usize]| Some(cu.to_vec());
        let step = |i: usize| {
            let spec = slow(i as u64);
            match i % 6 {
                0 => Step::new(Spec { t: 100, ..spec }, &Cuts::equal(4)),
                1 => Step::new(Spec { t: 100, ..spec }, &Cuts::at(vec![0, 1, 99])),
                2 => Step::new(Spec { t: 100, cu_seqlens: packed(&[0, 30, 80, 80, 100]), ..spec }, &Cuts::equal(4)),
                // Nothing crosses: no channel takes part.
                3 => {
                    Step::new(Spec { t: 40, cu_seqlens: packed(&[0, 10, 20, 40]), ..spec }, &Cuts::at(vec![10, 20, 40]))
                }
                // Two lanes of one head: as many rows as one lane of two heads.
                4 => Step::new(Spec { b: 2, t: 60, hv: 1, ..spec }, &Cuts::equal(4)),
                _ => {
                    let spec = Spec { op: Op::Gdn, k: 64, v: 16, dtype: Dtype::Bf16, ..spec };
                    Step::new(
                        Spec { b: 3, t: 50, state_layout: StateLayout::VFirst, ..spec },
                        &Cuts::at(vec![20, 20, 33]),
                    )
                }
            }
        };
        let steps: Vec<Step> = (0..18).map(|i| step(i / 2 + i % 2 * (i / 4))).collect();
        run_steps(&steps, &[Config { mode, chunk: 32, ..Config::default() }], |_| 0);
    }
}

#[test]
fn modes_that_take_turns_in_one_world() {
    let cuts = Cuts::at(vec![30, 31, 70]);
    let steps: Vec<Step> = (0..15).map(|i| Step::new(Spec { t: 100, initial_state: true, ..slow(i) }, &cuts)).collect();
    let configs = MODES.map(|mode| Config { mode, checked: mode == Mode::Exact, ..Config::default() });
    run_steps(&steps, &configs, |i| [0, 1, 2, 2, 0, 0, 1, 0][i % 8]);
}
