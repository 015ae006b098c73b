//! Segments that a PE walks in parts, on emulated GPUs, against the f64 reference.

use cuda_std::emulated::Schedule;
use deltalink::generate::{BetaKind, Decay, Spec};
use deltalink::inputs::Op;
use deltalink::op::{Config, Mode, Recompute, Segments, Transport};
use deltalink::plan::Cuts;
use deltalink::reference::{Problem, transition_weight};
use deltalink::tensor::Dtype;
use deltalink_emulated::check::{Compared, Run, backward, forward};

/// A problem that the bodies for Hopper compute, in which transitions matter.
fn spec(op: Op, t: usize) -> Spec {
    let shape = Spec { op, t, h: 1, hv: 1, k: 128, v: 128, dtype: Dtype::Bf16, ..Spec::default() };
    Spec { decay: Decay::Slow, beta: BetaKind::Small, initial_state: true, ..shape }
}

fn run(parts: usize, cuts: &[usize]) -> Run {
    let config = Config { segments: Segments::At(parts.try_into().expect("a part at least")), ..Config::default() };
    Run { config, cuts: Cuts::at(cuts.to_vec()), ..Run::on(cuts.len() + 1) }
}

/// Results as they should be.
fn right(spec: &Spec, run: &Run, computed: Result<Compared, String>) -> Compared {
    let compared = computed.unwrap_or_else(|error| panic!("{spec:?} {run:?}: {error}"));
    assert_eq!(compared.mismatches(), Vec::<&String>::new(), "{spec:?} {run:?}");
    compared
}

/// A wrong M would show at these cuts.
fn assert_transitions_matter(spec: &Spec, cuts: &[usize]) {
    let case = spec.generate();
    let problem = Problem::new(&case.inputs(), case.cu_seqlens()).expect("a problem");
    let all: Vec<usize> = [0].into_iter().chain(cuts.iter().copied()).chain([spec.t]).collect();
    let weight = transition_weight(&problem, &all).max_forwarded;
    assert!(weight > 0.1, "{spec} {cuts:?}: the transition's weight is {weight}");
}

#[test]
fn hopper_on_one_pe_in_all_orders() {
    for op in [Op::Kda, Op::Gdn] {
        let spec = spec(op, 64 * 4 + 20);
        assert_transitions_matter(&spec, &[128, 192]);
        for schedule in Schedule::ALL {
            let run = Run { schedule, ..run(3, &[]) };
            let compared = right(&spec, &run, forward(&spec, &run));
            let prep = format!("prep_{op}_bf16_hopper");
            let after = ["join_parts_bf16", "fix_out_bf16_hopper"];
            assert_eq!(compared.launched, [&[&prep, "scan_push_bf16_hopper_2"][..], &after].concat());
            assert_eq!(compared.parts, [3]);
        }
    }
}

#[test]
fn hopper_between_other_pes() {
    let spec = Spec { hv: 2, ..spec(Op::Kda, 64 * 6) };
    assert_transitions_matter(&spec, &[100, 164, 228, 292]);
    for (mode, transport, workers) in
        [(Mode::Overlap, Transport::Auto, 2), (Mode::Bulk, Transport::Auto, 1), (Mode::Overlap, Transport::Put, 1)]
    {
        let run = run(2, &[100, 228]);
        let run = Run { config: Config { mode, transport, ..run.config }, workers, ..run };
        assert_eq!(right(&spec, &run, forward(&spec, &run)).parts, [2, 2, 2]);
    }
}

#[test]
fn hopper_backward() {
    for (op, parts, cuts, recompute) in [
        (Op::Kda, 3, vec![], Recompute::All),
        (Op::Gdn, 3, vec![], Recompute::States),
        (Op::Kda, 2, vec![64, 192], Recompute::All),
    ] {
        let spec = spec(op, 64 * 4 + 20);
        assert_transitions_matter(&spec, &[64, 128, 192]);
        for schedule in [Schedule::default(), Schedule::ALL[1]] {
            let run = run(parts, &cuts);
            let run = Run { config: Config { recompute, ..run.config }, schedule, ..run };
            let compared = right(&spec, &run, backward(&spec, &run));
            assert!(compared.results.len() > 5, "{:?}", compared.results);
            assert!(
                compared.launched.iter().any(|name| name == "grad_kda_bf16_hopper" || name == "grad_gdn_bf16_hopper")
            );
        }
    }
}

/// Fast decay: M of a part is gone after a chunk, so parts need hardly any correction, and a PE in the middle sends no M.
#[test]
fn transitions_that_end_early() {
    let spec = Spec { decay: Decay::Fast, beta: BetaKind::Standard, ..spec(Op::Kda, 64 * 9) };
    let run = run(2, &[64, 448]);
    let compared = right(&spec, &run, forward(&spec, &run));
    let middle = compared.cuts[1];
    assert!(middle.m_chunks_walked < middle.m_chunks && middle.empty_messages == 2, "{middle:?}");
}

#[test]
fn portable_bodies() {
    for (dtype, k, cuts) in [(Dtype::F32, 48, vec![]), (Dtype::Bf16, 80, vec![90]), (Dtype::F32, 16, vec![50, 120])] {
        let spec = Spec { k, v: 80, dtype, hv: 2, ..spec(Op::Gdn, 200) };
        let run = run(3, &cuts);
        let run = Run { config: Config { chunk: 16, ..run.config }, hopper: false, workers: 2, ..run };
        let compared = right(&spec, &run, backward(&spec, &run));
        assert!(compared.parts.iter().all(|&parts| parts == 3), "{:?}", compared.parts);
    }
}

/// With as many multiprocessors as a GPU has, a few heads are spread over them without being asked for.
#[test]
fn a_gpu_spreads_few_heads_by_itself() {
    let spec = Spec { k: 16, v: 16, dtype: Dtype::F32, ..spec(Op::Kda, 16 * 320) };
    let config = Config { chunk: 16, ..Config::default() };
    for (multiprocessors, parts) in [(132, 8), (2, 1)] {
        let run = Run { config: config.clone(), hopper: false, multiprocessors, ..Run::on(1) };
        assert_eq!(right(&spec, &run, forward(&spec, &run)).parts, [parts], "{multiprocessors} multiprocessors");
    }
}
