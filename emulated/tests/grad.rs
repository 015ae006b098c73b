//! The Hopper bodies of a backward step, `grad` above all, against the f64 reference beside the portable bodies: problems that try
//! its decays, its steps, its heads and its gates.

use cuda_std::emulated::Schedule;
use deltalink::compare::{Allowance, gradients_within};
use deltalink::exec::ExecError;
use deltalink::exec::cpu::Cpu;
use deltalink::generate::{BetaKind, Decay, GateKind, Keys, Spec};
use deltalink::gradients::Gradients;
use deltalink::inputs::{Beta, Inputs, Op};
use deltalink::op::whole::{Share, UpstreamShare, join_backward, one_backward};
use deltalink::op::{Config, ContextParallel, OpError};
use deltalink::plan::{Cuts, Plan};
use deltalink::reference::{Problem, backward};
use deltalink::tensor::{Buffer, Dtype, Tensor};
use deltalink::world::{WorldOptions, run_threads};
use deltalink_emulated::Emulated;

/// Gradients of the problem, with its own steps or these, from bodies for Hopper (with a schedule) or portable ones.
fn gradients(spec: &Spec, steps: Option<&Tensor>, schedule: Option<Schedule>) -> Gradients {
    let (case, upstream) = (spec.generate(), spec.generate_upstream(false));
    let whole = with_steps(case.inputs(), steps);
    let plan = match case.cu_seqlens() {
        Some(cu_seqlens) => Plan::packed(cu_seqlens, &Cuts::equal(1)),
        None => Plan::batch(spec.b, spec.t, &Cuts::equal(1)),
    };
    let plan = plan.expect("one PE");
    let parts = run_threads(1, &WorldOptions::default(), |pe| -> Result<_, OpError> {
        let share = Share::new(&plan, 0, &whole);
        let (inputs, upstream) = (share.inputs(&whole), UpstreamShare::new(&plan, 0, &upstream.view()));
        match schedule {
            Some(schedule) => {
                let exec = Emulated::new(1, schedule, true).map_err(ExecError::from)?;
                let launches = exec.launches();
                let mut op = ContextParallel::on(pe, Config::default(), exec)?;
                let result = one_backward(&mut op, &plan, &inputs, &upstream.view())?;
                let names = launches.names();
                assert!(names.iter().any(|name| name.starts_with("grad") && name.contains("hopper")), "{names:?}");
                Ok(result)
            }
            None => {
                let cpu = Cpu::new(1).map_err(ExecError::from)?;
                let mut op = ContextParallel::on(pe, Config::default(), cpu)?;
                one_backward(&mut op, &plan, &inputs, &upstream.view())
            }
        }
    });
    let parts = parts.unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    join_backward(&plan, &whole, parts).gradients
}

/// Compares with the f64 reference, as `deltalink verify` does, in these orders of events; and requires that errors are about as
/// large as those of portable bodies.
fn check(spec: &Spec, schedules: &[Schedule]) {
    check_with(spec, None, schedules);
}

/// The inputs, with these steps if there are any.
fn with_steps<'a>(inputs: Inputs<'a>, steps: Option<&'a Tensor>) -> Inputs<'a> {
    match steps {
        Some(steps) => Inputs { beta: Beta::Given(steps.view()), ..inputs },
        None => inputs,
    }
}

/// [`check`] with these steps, if there are any, in place of the problem's own.
fn check_with(spec: &Spec, steps: Option<&Tensor>, schedules: &[Schedule]) {
    let (case, upstream) = (spec.generate(), spec.generate_upstream(false));
    let inputs = with_steps(case.inputs(), steps);
    let problem = Problem::new(&inputs, case.cu_seqlens()).expect("a problem");
    let reference = backward(&problem, &upstream.view()).expect("a reference");
    let judged =
        |found: &Gradients| gradients_within(&inputs, &problem, &found.to_f64(), &reference, Allowance::default());
    let portable = judged(&gradients(spec, steps, None));
    for &schedule in schedules {
        let found = judged(&gradients(spec, steps, Some(schedule)));
        for (found, portable) in found.iter().zip(&portable) {
            println!("{spec} {schedule:?} {}: {} (portable {})", found.name, found.error, portable.error);
        }
        for (found, portable) in found.iter().zip(&portable) {
            assert_eq!(found.mismatch, None, "{spec:?} {schedule:?}");
            // One number for each head: what the errors of one body come to says little about the other's.
            let few = found.name == "dA_log" || (found.name == "ddt_bias" && matches!(spec.op, Op::Gdn));
            let limit = 1.5 * portable.error.rel_rms + if few { 5e-3 } else { 1e-3 };
            assert!(
                found.error.rel_rms <= limit || found.error.rel_rms.is_nan(),
                "{spec:?} {}: {}",
                found.name,
                found.error
            );
        }
    }
}

/// A problem that the body computes.
fn spec(op: Op, t: usize) -> Spec {
    Spec { op, t, h: 1, hv: 1, k: 128, v: 128, dtype: Dtype::Bf16, ..Spec::default() }
}

#[test]
fn whole_chunks_in_every_order_of_events() {
    for op in [Op::Kda, Op::Gdn] {
        check(&spec(op, 128), &Schedule::ALL);
    }
}

#[test]
fn partial_chunks_shared_heads_and_every_gate() {
    let last = &Schedule::ALL[3..];
    for op in [Op::Kda, Op::Gdn] {
        check(&Spec { t: 65, h: 1, hv: 2, l2norm: true, ..spec(op, 65) }, last);
        check(&Spec { cu_seqlens: Some(vec![0, 37, 37, 101]), gate: GateKind::Softplus, ..spec(op, 101) }, last);
        check(&Spec { beta: BetaKind::Logits2, h: 2, hv: 2, l2norm: true, seed: 3, ..spec(op, 17) }, last);
    }
    check(&Spec { gate: GateKind::LowerBound, hv: 3, beta: BetaKind::Logits, ..spec(Op::Kda, 90) }, last);
}

#[test]
fn weak_and_strong_decays_and_steps() {
    let first = &Schedule::ALL[..1];
    for op in [Op::Kda, Op::Gdn] {
        for decay in [Decay::None, Decay::Slow, Decay::Fast, Decay::Bursty, Decay::AllStrong] {
            check(&Spec { decay, beta: BetaKind::UpTo2, ..spec(op, 128) }, first);
        }
        check(&Spec { decay: Decay::Slow, keys: Keys::CommonMean, beta: BetaKind::Small, ..spec(op, 128) }, first);
    }
}

/// A step of 0 has a gradient too, which is a quotient of what the floor of beta leaves; 2 turns a key's direction round.
#[test]
fn steps_of_nothing_and_of_two() {
    for op in [Op::Kda, Op::Gdn] {
        let spec = spec(op, 70);
        let steps: Vec<f64> = (0..70).map(|token| [0.0, 2.0, 0.0, 0.5, 1.0][token % 5]).collect();
        let steps = Tensor { shape: vec![1, 70, 1], data: Buffer::from_f64(Dtype::Bf16, steps) };
        check_with(&spec, Some(&steps), &Schedule::ALL[..1]);
    }
}
