//! Forward and backward steps whose kernels are all the bodies for Hopper, on emulated threads.

use cuda_std::emulated::Schedule;
use deltalink::compare::{Allowance, gradients_within};
use deltalink::exec::ExecError;
use deltalink::generate::{BetaKind, Decay, GateKind, Spec};
use deltalink::inputs::{Op, StateLayout};
use deltalink::op::whole::{Share, UpstreamShare, WholeBackward, join_backward, one_backward};
use deltalink::op::{Config, ContextParallel, Mode, OpError, Recompute};
use deltalink::plan::{Cuts, Plan};
use deltalink::reference::{Problem, backward, transition_weight};
use deltalink::tensor::Dtype;
use deltalink::world::{WorldOptions, run_threads};
use deltalink_emulated::Emulated;

/// A problem that the bodies for Hopper compute, in which transitions matter.
fn spec(op: Op, t: usize) -> Spec {
    let shape = Spec { op, t, h: 1, hv: 2, k: 128, v: 128, dtype: Dtype::Bf16, ..Spec::default() };
    Spec { decay: Decay::Slow, beta: BetaKind::Small, gate: GateKind::Softplus, initial_state: true, ..shape }
}

/// A forward step that saves and its backward step on PEs with these cuts, and what the last PE launched.
fn train(spec: &Spec, cuts: &[usize], config: &Config, schedule: Schedule) -> (WholeBackward, Vec<String>) {
    train_beside(0, spec, cuts, config, schedule)
}

/// The same, with so many hundredths of the chunks prepared beside walks.
fn train_beside(
    percent: u32,
    spec: &Spec,
    cuts: &[usize],
    config: &Config,
    schedule: Schedule,
) -> (WholeBackward, Vec<String>) {
    let (case, upstream) = (spec.generate(), spec.generate_upstream(true));
    let whole = case.inputs();
    let cuts = Cuts::at(cuts.to_vec());
    let plan = match case.cu_seqlens() {
        Some(cu_seqlens) => Plan::packed(cu_seqlens, &cuts),
        None => Plan::batch(spec.b, spec.t, &cuts),
    };
    let plan = plan.expect("cuts inside the tokens");
    let parts = run_threads(plan.pes(), &WorldOptions::default(), |pe| -> Result<_, OpError> {
        let share = Share::new(&plan, pe.rank(), &whole);
        let (inputs, upstream) = (share.inputs(&whole), UpstreamShare::new(&plan, pe.rank(), &upstream.view()));
        let exec = Emulated::new(1, schedule, true).map_err(|error| OpError::from(ExecError::from(error)))?;
        // With room for all blocks of the walk.
        let exec = if percent > 0 { exec.with_percent_beside(percent).with_multiprocessors(132) } else { exec };
        let launched = exec.launches();
        let mut op = ContextParallel::on(pe, config.clone(), exec)?;
        let backward = one_backward(&mut op, &plan, &inputs, &upstream.view())?;
        Ok((backward, launched.names()))
    });
    let mut parts = parts.unwrap_or_else(|error| panic!("{spec} {config:?} {schedule:?}: {error}"));
    let launched = std::mem::take(&mut parts.last_mut().expect("a PE").1);
    (join_backward(&plan, &whole, parts.into_iter().map(|part| part.0).collect()), launched)
}

/// Gradients within the usual tolerances of the f64 reference.
fn check(spec: &Spec, cuts: &[usize], config: &Config, schedule: Schedule) -> Vec<String> {
    let what = format!("{spec} cuts {cuts:?} {:?} {:?} {schedule:?}", config.mode, config.recompute);
    let (case, upstream) = (spec.generate(), spec.generate_upstream(true));
    let inputs = case.inputs();
    let problem = Problem::new(&inputs, case.cu_seqlens()).expect("a problem");
    if cuts.len() > 1 {
        let all: Vec<usize> = [0].into_iter().chain(cuts.iter().copied()).chain([spec.t]).collect();
        let weight = transition_weight(&problem, &all);
        assert!(weight.max_forwarded > 0.1, "{what}: transitions do not matter here: {weight:?}");
    }
    let reference = backward(&problem, &upstream.view()).expect("a reference");
    let (found, launched) = train(spec, cuts, config, schedule);
    let found = found.gradients.to_f64();
    for checked in gradients_within(&inputs, &problem, &found, &reference, Allowance::default()) {
        println!("{what}: {}: {}", checked.name, checked.error);
        assert_eq!(checked.mismatch, None, "{what}");
    }
    launched
}

#[test]
fn every_kernel_has_its_body_for_hopper() {
    let op = Op::Kda;
    let all = check(&spec(op, 130), &[], &Config::default(), Schedule::ALL[0]);
    let walks = ["scan_back_bf16_hopper", "scan_states_bf16_hopper"].map(str::to_owned);
    let [prep, grad] = ["prep", "grad"].map(|kernel| format!("{kernel}_{op}_bf16_hopper"));
    let reduce = "reduce_f32".to_owned();
    let forward = [prep.clone(), "scan_push_bf16_hopper_1".to_owned()];
    let expected = [&forward[..], &[prep], &walks, &[grad], &vec![reduce; 4]].concat();
    assert_eq!(all, expected);
}

/// `grad` goes through the norms itself where no value heads share one of q and k, and then nothing but shares is summed.
#[test]
fn norms_of_heads_that_nobody_shares() {
    for op in [Op::Kda, Op::Gdn] {
        let all = check(&Spec { l2norm: true, h: 2, ..spec(op, 100) }, &[], &Config::default(), Schedule::ALL[1]);
        assert_eq!(all.iter().filter(|name| *name == "reduce_f32").count(), 2, "{all:?}");
    }
}

#[test]
fn pes_in_every_mode() {
    let overlap = Config::default();
    check(&spec(Op::Gdn, 200), &[70], &overlap, Schedule::ALL[1]);
    let cu_seqlens = Some(vec![0, 10, 10, 200, 210, 210]);
    let packed = Spec { cu_seqlens, state_layout: StateLayout::VFirst, ..spec(Op::Kda, 210) };
    check(&packed, &[60, 133], &overlap, Schedule::ALL[2]);
    check(&packed, &[60, 133], &Config { mode: Mode::Bulk, ..overlap.clone() }, Schedule::ALL[3]);
    check(&packed, &[60, 133], &Config { mode: Mode::Exact, ..overlap }, Schedule::ALL[0]);
}

/// The records that the forward step kept are those that it would compute again: images in both steps.
#[test]
fn kept_records_change_no_bit() {
    let spec = spec(Op::Kda, 130);
    let again = Config::default();
    let kept = Config { recompute: Recompute::States, ..again.clone() };
    let ((again, _), (kept, launched)) =
        (train(&spec, &[64], &again, Schedule::default()), train(&spec, &[64], &kept, Schedule::default()));
    assert_eq!(launched.iter().filter(|name| name.starts_with("prep")).count(), 1, "{launched:?}");
    assert_eq!(kept.gradients.to_f64(), again.gradients.to_f64());
}

/// Which chunks are prepared beside a walk changes no bit, from the first on and from the last on, of one PE and of the last of two,
/// whose forward walk has columns of M and waits for everything.
#[test]
fn what_is_prepared_beside_a_walk_changes_no_bit() {
    for op in [Op::Kda, Op::Gdn] {
        let spec = spec(op, 300);
        for (cuts, preps) in [(&[][..], 4), (&[100], 3)] {
            let train = |percent| train_beside(percent, &spec, cuts, &Config::default(), Schedule::default());
            let (before, beside) = (train(0), train(60));
            assert_eq!(beside.1.iter().filter(|name| name.starts_with("prep")).count(), preps, "{:?}", beside.1);
            assert_eq!(beside.0.gradients.to_f64(), before.0.gradients.to_f64(), "{op} {cuts:?}");
        }
    }
}

/// In exact mode with cuts between chunks, PEs find bit for bit what one PE finds, but for sums over tokens: the states that
/// the forward's scan hands over are those of the backward's walk.
#[test]
fn a_cut_changes_no_bit_in_exact_mode() {
    for op in [Op::Kda, Op::Gdn] {
        let spec = spec(op, 200);
        let config = Config { mode: Mode::Exact, ..Config::default() };
        let one = train(&spec, &[], &config, Schedule::default()).0.gradients.to_f64();
        let three = train(&spec, &[64, 128], &config, Schedule::default()).0.gradients.to_f64();
        assert!(one.dq == three.dq && one.dk == three.dk && one.dv == three.dv, "{op}: dq, dk or dv");
        assert!(one.dg == three.dg && one.dbeta == three.dbeta, "{op}: dg or dbeta");
        assert_eq!(one.d_initial_state, three.d_initial_state, "{op}");
    }
}
