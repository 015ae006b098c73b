//! The portable bodies as GPUs run them, on emulated GPUs: steps forward and backward in every element type against the f64
//! reference.

use cuda_std::emulated::{Order, Schedule, Timing};
use deltalink::generate::{Decay, GateKind, Spec};
use deltalink::inputs::Op;
use deltalink::op::{Config, Recompute};
use deltalink::plan::Cuts;
use deltalink::tensor::Dtype;
use deltalink_emulated::check::{Run, backward};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

fn check(spec: &Spec, run: &Run) {
    let compared = backward(spec, run).unwrap_or_else(|error| panic!("{spec:?} {run:?}: {error}"));
    assert!(compared.mismatches().is_empty(), "{spec:?} {run:?}: {:?}", compared.mismatches());
    let portable = compared.launched.iter().all(|name| !name.contains("hopper"));
    assert!(portable && compared.launched.iter().any(|name| name.starts_with("grad_")), "{:?}", compared.launched);
}

#[test]
fn gradients_of_small_problems_in_every_type() {
    for (i, dtype) in DTYPES.into_iter().enumerate() {
        for op in [Op::Kda, Op::Gdn] {
            let spec = Spec { op, dtype, t: 45, h: 1, hv: 1, k: 32, v: 16, initial_state: true, ..Spec::default() };
            let config = Config { chunk: [16, 32, 64][i], ..Config::default() };
            check(&spec, &Run { config, ..Run::on(2) });
        }
    }
}

#[test]
fn gradients_of_packed_sequences_from_raw_gates_last_thread_first() {
    let spec = Spec {
        t: 60,
        h: 1,
        hv: 2,
        k: 16,
        v: 48,
        gate: GateKind::Softplus,
        decay: Decay::Slow,
        l2norm: true,
        dtype: Dtype::Bf16,
        cu_seqlens: Some(vec![0, 7, 7, 50, 60]),
        ..Spec::default()
    };
    let config = Config { chunk: 16, recompute: Recompute::States, ..Config::default() };
    let schedule = Schedule { timing: Timing::Eager, order: Order::Descending };
    check(&spec, &Run { config, schedule, cuts: Cuts::at(vec![20, 41]), ..Run::on(3) });
}
