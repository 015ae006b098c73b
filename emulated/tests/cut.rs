//! The cut of the transition in the bodies for Hopper, on emulated GPUs.

use cuda_std::emulated::Schedule;
use deltalink::compare::Regime;
use deltalink::generate::{Decay, Spec};
use deltalink::inputs::Op;
use deltalink::op::{Config, CutReport, Mode};
use deltalink::plan::Cuts;
use deltalink::tensor::Dtype;
use deltalink_emulated::check::{Run, forward};

/// A problem that the bodies for Hopper compute.
fn spec(op: Op, t: usize, decay: Decay) -> Spec {
    let spec = Spec { op, t, h: 1, hv: 1, k: 128, v: 128, dtype: Dtype::Bf16, ..Spec::default() };
    Spec { decay, initial_state: true, ..spec }
}

fn cut(spec: &Spec, run: &Run) -> Vec<CutReport> {
    let compared = forward(spec, run).unwrap_or_else(|error| panic!("{spec:?} {run:?}: {error}"));
    assert_eq!(compared.mismatches(), Vec::<&String>::new(), "{spec:?} {run:?}");
    assert!(compared.launched.contains(&"scan_push_bf16_hopper_2".to_owned()), "{:?}", compared.launched);
    compared.cuts
}

/// What is known before the walk: M stops early, S goes on without corrections, and the last PE does not need the first.
#[test]
fn bounds_that_are_known_before_the_walk() {
    for (op, decay) in [(Op::Gdn, Decay::Default), (Op::Kda, Decay::Fast)] {
        for (schedule, mode) in Schedule::ALL.into_iter().zip([Mode::Overlap, Mode::Bulk, Mode::Overlap, Mode::Bulk]) {
            let config = Config { mode, ..Config::default() };
            let run = Run { cuts: Cuts::at(vec![70, 500]), schedule, config, ..Run::on(3) };
            let cuts = cut(&spec(op, 900, decay), &run);
            assert_eq!(cuts[0], CutReport::default());
            for report in &cuts[1..] {
                assert!(report.m_chunks_walked < report.m_chunks, "{op} {decay:?} {schedule:?}: {report:?}");
                assert!(report.m_chunks_walked > 0 && report.largest_bound > 0.0, "{op} {decay:?}: {report:?}");
            }
            // One head, two blocks of M, one PE behind.
            assert_eq!(cuts[1].empty_messages, 2, "{op} {decay:?} {schedule:?}");
        }
    }
}

/// Without decay only the norm of M itself says that keys have been erased: it is measured after 32 chunks.
#[test]
fn norms_that_are_measured_between_runs() {
    let config = Config { cut_tolerance: 0.08, ..Config::default() };
    let run = Run { cuts: Cuts::at(vec![64]), regime: Regime::Hard, config, ..Run::on(2) };
    let cuts = cut(&spec(Op::Kda, 64 + 36 * 64, Decay::None), &run);
    assert_eq!((cuts[1].m_chunks, cuts[1].m_chunks_walked), (2 * 36, 2 * 32), "{:?}", cuts[1]);
    assert!(cuts[1].largest_bound > 0.0 && cuts[1].largest_bound <= 0.08, "{:?}", cuts[1]);
}

/// Where M matters it is walked to the end, in runs, and all of it is corrected.
#[test]
fn transitions_that_matter() {
    let run = Run { cuts: Cuts::at(vec![64]), regime: Regime::Hard, ..Run::on(2) };
    let cuts = cut(&spec(Op::Gdn, 64 + 35 * 64, Decay::None), &run);
    assert_eq!((cuts[1].m_chunks, cuts[1].m_chunks_walked, cuts[1].largest_bound), (70, 70, 0.0), "{:?}", cuts[1]);
}

/// The portable bodies as a GPU runs them: the same cut as on the CPU, where steps are too small to erase anything in between.
#[test]
fn portable_bodies_cut_where_the_cpu_does() {
    for (op, dtype) in [(Op::Gdn, Dtype::Bf16), (Op::Kda, Dtype::F32)] {
        let spec = Spec { op, t: 260, h: 1, hv: 2, k: 48, v: 32, dtype, decay: Decay::Fast, ..Spec::default() };
        let config = Config { chunk: 16, ..Config::default() };
        let run = Run { cuts: Cuts::at(vec![30, 150]), hopper: false, config, ..Run::on(3) };
        let compared = forward(&spec, &run).unwrap_or_else(|error| panic!("{spec:?} {run:?}: {error}"));
        assert_eq!(compared.mismatches(), Vec::<&String>::new(), "{spec:?}");
        assert!(compared.launched.contains(&format!("scan_push_{dtype}")), "{:?}", compared.launched);
        // Two heads, of which each walks its one block of M for one chunk.
        let report = compared.cuts[1];
        assert_eq!((report.m_chunks, report.m_chunks_walked, report.empty_messages), (16, 2, 2), "{op} {dtype}");
    }
}
