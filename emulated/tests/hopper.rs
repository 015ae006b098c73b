//! The bodies for Hopper, in whole steps on emulated GPUs, against the f64 reference.

use cuda_std::emulated::Schedule;
use deltalink::generate::Spec;
use deltalink::inputs::Op;
use deltalink::tensor::Dtype;
use deltalink_emulated::check::{Compared, Run, forward};

/// A problem that the bodies for Hopper compute.
fn spec(op: Op, t: usize) -> Spec {
    Spec { op, t, h: 1, hv: 1, k: 128, v: 128, dtype: Dtype::Bf16, ..Spec::default() }
}

/// Runs in every order of events, each of which must give the same.
fn in_all_orders(spec: &Spec, run: &Run) -> Compared {
    let mut last = None;
    for schedule in Schedule::ALL {
        let run = Run { schedule, ..run.clone() };
        let compared = forward(spec, &run).unwrap_or_else(|error| panic!("{spec:?} {run:?}: {error}"));
        println!("{schedule:?}: o {}, states {}", compared.o, compared.states);
        assert_eq!(compared.mismatch, None, "{spec:?} {run:?}");
        last = Some(compared);
    }
    last.expect("there is an order")
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
        let compared = in_all_orders(&spec(op, 128), &Run::on(2));
        let prep = format!("prep_{op}_bf16_hopper");
        assert_eq!(compared.launched, [&prep, "scan_push_bf16_hopper_2", "fix_out_bf16_hopper"]);
    }
}
