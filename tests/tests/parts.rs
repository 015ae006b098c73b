//! Segments that a PE walks in parts: against the f64 reference as everything is, with what the PEs send, and forward and
//! backward.

mod cp;

use cp::gradients::{Derived, check_training, train};
use cp::{Solved, check_run, run};
use deltalink::compare::{Allowance, Regime, gradients_within, mismatch, tolerance};
use deltalink::generate::{BetaKind, Decay, GateKind, Spec};
use deltalink::inputs::{Gate, Inputs, Op, StateLayout};
use deltalink::op::whole;
use deltalink::op::{Config, Mode, Recompute, Segments, Transport};
use deltalink::plan::{Cuts, Plan};
use deltalink::reference::{Problem, backward, recurrent, transition_weight};
use deltalink::tensor::{Buffer, Dtype, Tensor};
use deltalink::world::WorldOptions;

const CHUNK: usize = 16;

fn in_parts(count: usize) -> Segments {
    Segments::At(count.try_into().unwrap())
}

fn config(parts: usize) -> Config {
    Config { segments: in_parts(parts), chunk: CHUNK, ..Config::default() }
}

/// Slow decay and small steps: what comes before a part is most of what comes after it.
fn slow(spec: Spec) -> Spec {
    Spec { decay: Decay::Slow, beta: BetaKind::Small, initial_state: true, ..spec }
}

/// Where a single sequence is cut if every PE cuts its segment into `parts` parts.
fn all_cuts(plan: &Plan, parts: usize) -> Vec<usize> {
    let mut cuts = Vec::new();
    for pair in plan.cuts.windows(2) {
        let chunks = (pair[1] - pair[0]).div_ceil(CHUNK);
        let parts = parts.min(chunks).max(1);
        cuts.extend((0..parts).map(|i| pair[0] + CHUNK * (i * (chunks / parts) + i.min(chunks % parts))));
    }
    cuts.push(plan.layout.tokens());
    cuts
}

/// Much of what parts hand on must come from before them, or a wrong M would not show.
#[track_caller]
fn assert_transitions_matter(problem: &Problem, plan: &Plan, parts: usize) {
    let weight = transition_weight(problem, &all_cuts(plan, parts));
    let forwarded = if parts * plan.pes() > 2 { weight.max_forwarded } else { weight.max_ending };
    assert!(forwarded > 0.1, "{parts} parts on {} PEs: the transition's weight is {forwarded}", plan.pes());
}

const MODES: [Mode; 2] = [Mode::Overlap, Mode::Bulk];

#[test]
fn one_sequence_on_one_to_three_pes() {
    for (i, (op, dtype)) in
        [(Op::Kda, Dtype::F32), (Op::Gdn, Dtype::F32), (Op::Kda, Dtype::Bf16), (Op::Gdn, Dtype::F16)]
            .into_iter()
            .enumerate()
    {
        let solved = Solved::new(&slow(Spec { op, dtype, t: 395, h: 1, hv: 2, k: 32, v: 48, ..Spec::default() }));
        for (cuts, parts) in
            [vec![], vec![150], vec![130, 270]].into_iter().flat_map(|c| [1, 2, 3, 8].map(|n| (c.clone(), n)))
        {
            let plan = solved.plan(&Cuts::at(cuts));
            if parts * plan.pes() > 1 {
                assert_transitions_matter(&solved.problem, &plan, parts);
            }
            for mode in MODES {
                let checked = (i + parts) % 2 == 0;
                let config = Config { mode, checked, workers: Some(1 + parts % 3), ..config(parts) };
                let found = check_run("parts", &solved, &plan, &config, tolerance(dtype, Regime::Ordinary));
                assert!(!found.is_empty());
            }
        }
    }
}

#[test]
fn reports_say_how_many_parts_there_were_and_what_they_took() {
    let solved = Solved::new(&slow(Spec { t: 200, h: 1, hv: 1, k: 16, v: 16, ..Spec::default() }));
    let plan = solved.plan(&Cuts::at(vec![190]));
    let reports = |segments| {
        let parts = run(&plan, &solved.inputs(), &Config { segments, ..config(1) }).unwrap();
        parts.into_iter().map(|part| (part.report.parts, part.report.scratch_bytes)).collect::<Vec<_>>()
    };
    let (whole, three) = (reports(in_parts(1)), reports(in_parts(3)));
    // The second PE has a single chunk.
    assert_eq!((whole[0].0, whole[1].0, three[0].0, three[1].0), (1, 1, 3, 1));
    assert!(three[0].1 > whole[0].1, "{three:?} {whole:?}");
    // A CPU has nothing that idles.
    assert_eq!(reports(Segments::Auto), whole);
}

#[test]
fn gradients_on_one_to_three_pes() {
    for (i, (op, dtype)) in
        [(Op::Kda, Dtype::F32), (Op::Gdn, Dtype::F32), (Op::Kda, Dtype::Bf16), (Op::Gdn, Dtype::F16)]
            .into_iter()
            .enumerate()
    {
        let gate = [GateKind::Given, GateKind::Softplus][i % 2];
        let spec = Spec { op, dtype, gate, t: 330, h: 1, hv: 2, k: 32, v: 48, ..Spec::default() };
        let derived = Derived::new(&slow(spec), i != 1);
        for (cuts, parts) in
            [vec![], vec![150], vec![110, 220]].into_iter().flat_map(|c| [1, 2, 3, 8].map(|n| (c.clone(), n)))
        {
            let plan = derived.plan(&Cuts::at(cuts));
            if parts * plan.pes() > 1 {
                assert_transitions_matter(&derived.solved.problem, &plan, parts);
            }
            let mode = MODES[parts / 2 % 2];
            let recompute = [Recompute::All, Recompute::States][parts % 2];
            let config =
                Config { mode, recompute, checked: parts % 3 == 0, workers: Some(1 + parts % 3), ..config(parts) };
            let found = check_training("parts", &derived, &plan, &config);
            assert!(found.len() >= 5, "{found:?}");
        }
    }
}

#[test]
fn packed_sequences_batches_and_grouped_heads() {
    // Empty sequences, ones that are shorter than a chunk, ones with fewer chunks than parts, and cuts inside long ones.
    let packed = Spec { t: 500, h: 1, hv: 2, k: 16, v: 80, ..Spec::default() };
    let packed = Spec { cu_seqlens: Some(vec![0, 0, 7, 150, 160, 160, 420, 480, 500]), ..packed };
    let batch = Spec { b: 2, t: 170, h: 2, hv: 4, k: 80, v: 32, state_layout: StateLayout::VFirst, ..Spec::default() };
    for (spec, cuts) in [(packed, [vec![], vec![60, 300]]), (batch, [vec![], vec![100]])] {
        for op in [Op::Kda, Op::Gdn] {
            let derived = Derived::new(&slow(Spec { op, ..spec.clone() }), true);
            for (cuts, parts) in cuts.iter().flat_map(|cuts| [2, 3].map(|parts| (cuts, parts))) {
                let plan = derived.plan(&Cuts::at(cuts.clone()));
                let config = Config { checked: true, mode: MODES[parts % 2], ..config(parts) };
                check_run("parts", &derived.solved, &plan, &config, tolerance(Dtype::F32, Regime::Ordinary));
                check_training("parts", &derived, &plan, &Config { checked: parts == 2, ..config });
            }
        }
    }
}

#[test]
fn every_transport_and_no_final_states() {
    let derived = Derived::new(&slow(Spec { t: 300, h: 1, hv: 1, k: 32, v: 16, ..Spec::default() }), false);
    let plan = derived.plan(&Cuts::equal(3));
    assert_transitions_matter(&derived.solved.problem, &plan, 3);
    let config = Config { transport: Transport::Put, final_state: false, ..config(3) };
    check_run("puts", &derived.solved, &plan, &config, tolerance(Dtype::F32, Regime::Ordinary));
    check_training("puts", &derived, &plan, &config);
}

/// One part is what there was before there were parts, and what parts give follows from their number alone.
#[test]
fn bits_depend_on_the_number_of_parts_only() {
    let derived = Derived::new(&slow(Spec { t: 260, h: 1, hv: 2, k: 32, v: 32, ..Spec::default() }), true);
    let bits = |cuts: &[usize], config: &Config| {
        let plan = derived.plan(&Cuts::at(cuts.to_vec()));
        let parts = train(&derived, &plan, config).unwrap();
        let of = |part: &cp::gradients::Trained| {
            let gradients = part.backward.gradients.to_f64();
            let forward = (part.forward.o.data.to_f64(), part.forward.final_state.as_ref().map(|s| s.data.to_f64()));
            (forward, [gradients.dq, gradients.dk, gradients.dv, gradients.dg, gradients.dbeta])
        };
        parts.iter().map(of).collect::<Vec<_>>()
    };
    for cuts in [&[][..], &[100]] {
        let one = bits(cuts, &config(1));
        assert!(one == bits(cuts, &Config { segments: Segments::Auto, ..config(1) }), "auto on the CPU is one part");
        let three = bits(cuts, &Config { workers: Some(1), ..config(3) });
        assert!(one != three, "three parts multiply in another order");
        for (mode, workers) in [(Mode::Overlap, 3), (Mode::Bulk, 2)] {
            assert!(
                three == bits(cuts, &Config { mode, workers: Some(workers), ..config(3) }),
                "{mode}, {workers} workers"
            );
        }
        let exact = |parts| bits(cuts, &Config { mode: Mode::Exact, ..config(parts) });
        assert!(exact(1) == exact(3), "exact mode never cuts");
    }
}

/// Every head has decays of its own: one keeps what it has, one forgets all of it in its tenth chunk, which is the last of one part
/// or in the middle of one, one forgets at every token.
#[test]
fn heads_of_which_each_forgets_in_its_own_way() {
    let mut walked = Vec::new();
    for (op, parts, cuts) in [
        (Op::Kda, 2, vec![]),
        (Op::Gdn, 3, vec![]),
        (Op::Kda, 8, vec![150]),
        (Op::Gdn, 2, vec![64]),
        (Op::Kda, 3, vec![64, 320]),
        (Op::Gdn, 2, vec![64, 320]),
    ] {
        let derived = Derived::new(&slow(Spec { op, t: 395, h: 1, hv: 3, k: 32, v: 32, ..Spec::default() }), true);
        let base = derived.solved.inputs();
        let Gate::Given(given) = &base.gate else { panic!("not the gate that was asked for") };
        let width = if op == Op::Kda { 32 } else { 1 };
        let value = |i: usize, slow: f64| match (i / width % 3, i / width / 3) {
            (0, _) => slow,
            (1, token) if token / CHUNK == 9 => -4.0,
            (1, _) => 0.3 * slow,
            _ => -1.5 + slow,
        };
        let values = given.to_f64().into_iter().enumerate().map(|(i, x)| value(i, x));
        let g = Tensor { shape: given.shape().to_vec(), data: Buffer::from_f64(given.dtype(), values) };
        let inputs = Inputs { gate: Gate::Given(g.view()), ..base.clone() };
        let problem = Problem::new(&inputs, None).unwrap();
        let plan = derived.plan(&Cuts::at(cuts));
        assert_transitions_matter(&problem, &plan, parts);
        let upstream = derived.upstream.view();
        let (expected, reference) = (recurrent(&problem), backward(&problem, &upstream).unwrap());
        for mode in MODES {
            let label = format!("{op}, {parts} parts, cuts {:?}, {mode}", plan.cuts);
            let config = Config { mode, checked: mode == Mode::Bulk, ..config(parts) };
            let found = whole::backward(&plan, &inputs, &upstream, &config, &WorldOptions::default()).unwrap();
            let limit = tolerance(Dtype::F32, Regime::Ordinary);
            let forward = &found.forward;
            let states = &forward.final_state.as_ref().unwrap().data;
            for (name, found, expected) in [("o", &forward.o.data, &expected.o), ("ht", states, &expected.ht)] {
                let wrong = mismatch(name, &[expected.len()], &found.to_f64(), expected, limit);
                assert_eq!(wrong, None, "{label}");
            }
            let found_gradients = found.gradients.to_f64();
            for checked in gradients_within(&inputs, &problem, &found_gradients, &reference, Allowance::default()) {
                assert_eq!(checked.mismatch, None, "{label}");
            }
            let cut = forward
                .reports
                .iter()
                .fold((0, 0), |all, report| (all.0 + report.cut.m_chunks, all.1 + report.cut.m_chunks_walked));
            walked.push((label, cut));
        }
    }
    for (label, (all, walked)) in walked {
        // Of the head that forgets everywhere no more than a chunk or two of a part, of the one that never does all.
        assert!(walked < all && 3 * walked > all, "{label}: {walked} of {all} chunks of M were walked");
    }
}
