//! Summaries that are put, with their signals, where they would otherwise be stored: the same bits, call after call, also where
//! each PE sends its own way.

mod cp;

use cp::failing::LONG;
use cp::{MODES, Solved, check_rank, options, plan_of};
use deltalink::compare::{Regime, tolerance};
use deltalink::generate::{BetaKind, Decay, Spec};
use deltalink::inputs::Op;
use deltalink::op::whole::{self, Share, Whole};
use deltalink::op::{Config, ContextParallel, OpError, Recompute, Transport};
use deltalink::plan::{Cuts, Plan};
use deltalink::tensor::Dtype;
use deltalink::world::{Pe, WorldOptions, run_threads};

fn slow(spec: Spec) -> Spec {
    Spec { decay: Decay::Slow, beta: BetaKind::Small, initial_state: true, ..spec }
}

fn specs() -> [Spec; 3] {
    [
        // Three rows of a batch are three lanes, which leave from slots of their own.
        slow(Spec { b: 3, t: 70, h: 1, hv: 2, k: 48, v: 80, ..Spec::default() }),
        slow(Spec { t: 90, cu_seqlens: Some(vec![0, 8, 60, 90]), op: Op::Gdn, hv: 4, ..Spec::default() }),
        slow(Spec { t: 100, h: 1, hv: 1, k: 128, v: 64, dtype: Dtype::Bf16, ..Spec::default() }),
    ]
}

fn bytes(whole: &Whole) -> (Vec<u8>, Vec<u8>) {
    (whole.o.data.bytes().to_vec(), whole.final_state.as_ref().unwrap().data.bytes().to_vec())
}

#[test]
fn puts_give_the_bits_of_stores() {
    for spec in specs() {
        let solved = Solved::new(&spec);
        let plan = solved.plan(&Cuts::equal(4));
        for mode in MODES {
            let by = |transport| {
                let config = Config { mode, transport, chunk: 16, checked: true, ..Config::default() };
                let whole = whole::forward(&plan, &solved.inputs(), &config, &WorldOptions::default());
                whole.unwrap_or_else(|error| panic!("{mode}, {transport:?}: {error}"))
            };
            let (stored, put) = (by(Transport::Auto), by(Transport::Put));
            assert!(bytes(&stored) == bytes(&put), "{mode}: {spec:?}");
            let sent = |whole: &Whole| whole.reports.iter().map(|r| (r.bytes_sent, r.messages)).collect::<Vec<_>>();
            assert_eq!(sent(&stored), sent(&put), "{mode}");
        }
    }
}

#[test]
fn gradients_are_put_as_well() {
    for spec in specs() {
        let (case, upstream) = (spec.generate(), spec.generate_upstream(true));
        let plan = plan_of(case.cu_seqlens(), spec.b, spec.t, &Cuts::equal(4));
        for mode in MODES {
            let by = |transport| {
                let config = Config { mode, transport, chunk: 16, recompute: Recompute::States, ..Config::default() };
                let options = WorldOptions::default();
                let trained = whole::backward(&plan, &case.inputs(), &upstream.view(), &config, &options);
                trained.unwrap_or_else(|error| panic!("{mode}, {transport:?}: {error}")).gradients
            };
            assert!(by(Transport::Auto) == by(Transport::Put), "{mode}: {spec:?}");
        }
    }
}

/// Calls of every PE, which sends as `transport` says; slots and staging places are used many times over.
fn many_calls(solved: &Solved, plan: &Plan, config: &Config, transport: impl Fn(&Pe) -> Transport + Sync) {
    let whole = solved.inputs();
    let limit = tolerance(whole.dtype(), Regime::Ordinary);
    run_threads(plan.pes(), &options(LONG), |pe| {
        let share = Share::new(plan, pe.rank(), &whole);
        let config = Config { transport: transport(pe), ..config.clone() };
        let mut op = ContextParallel::new(pe, config)?;
        for call in 0..12 {
            let result = op.forward(plan, &share.inputs(&whole))?;
            check_rank(&format!("call {call}"), plan, pe.rank(), &whole, &result, &solved.expected, limit);
        }
        Ok::<_, OpError>(())
    })
    .unwrap_or_else(|error| panic!("{}: {error}", config.mode));
}

#[test]
fn each_pe_may_send_its_own_way_call_after_call() {
    for spec in specs() {
        let solved = Solved::new(&spec);
        let plan = solved.plan(&Cuts::at(vec![20, 21, 55]));
        for (mode, odd) in MODES.into_iter().zip([0, 1, 0]) {
            let config = Config { mode, chunk: 32, workers: Some(2), ..Config::default() };
            let way = |pe: &Pe| if pe.rank() % 2 == odd { Transport::Put } else { Transport::Auto };
            many_calls(&solved, &plan, &config, way);
        }
    }
}
