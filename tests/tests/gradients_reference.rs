//! The backward pass of the f64 reference against golden vectors, finite differences and itself.

mod differences;

use deltalink::compare::{Error, REFERENCE_TOLERANCE, against_file};
use deltalink::file::InputFile;
use deltalink::generate::{BetaKind, Decay, GateKind, Keys, Spec, shapes};
use deltalink::gradients::Gradients;
use deltalink::inputs::{Gate, Inputs, Op, StateLayout};
use deltalink::reference::{
    HeadGradients, Problem, Seeds, backward, backward_chunked, gradient_summary, segment_gradients, segment_summary,
    state_at, state_gradient_after,
};
use deltalink_tests::{golden_cp_files, golden_files, load, name};
use proptest::prelude::*;

fn problem(file: &InputFile) -> Problem {
    Problem::new(&file.inputs(), file.cu_seqlens().as_deref()).unwrap_or_else(|error| panic!("{error}"))
}

/// `max(max|q dq|, max|k dk|)`: dg is a difference of sums of such products, so this is what its rounding errors are
/// relative to.
fn products(file: &InputFile) -> f64 {
    let expected = |name: &str| file.expected(name).expect("a golden file has gradients").data.to_f64();
    let largest = |x: Vec<f64>, dx: Vec<f64>| x.iter().zip(dx).map(|(x, dx)| (x * dx).abs()).fold(0.0, f64::max);
    let inputs = file.inputs();
    largest(inputs.q.to_f64(), expected("dq")).max(largest(inputs.k.to_f64(), expected("dk")))
}

/// Every gradient is within the tolerance, in both norms; the file expects all of them.
fn assert_matches(file: &InputFile, how: &str, found: &Gradients<Vec<f64>>) {
    let inputs = file.inputs();
    let found = found.named(&inputs);
    let slices: Vec<(&str, &[f64])> = found.iter().map(|(name, x)| (*name, &x[..])).collect();
    let checked = against_file(file, &slices, REFERENCE_TOLERANCE);
    assert_eq!(checked.len(), found.len(), "{}: a golden file has all of these", file.path().display());
    for result in checked {
        let place = format!("{}, {how}, {}", name(file.path()), result.name);
        // Chunks lose the digits of dg that cancel; what is left must be far below the products that make it up.
        if result.name == "dg" && result.error.max_abs <= 1e-12 * products(file) {
            continue;
        }
        assert!(result.mismatch.is_none(), "{place}: {}", result.mismatch.unwrap_or_default());
        assert!(result.error.rel_max <= REFERENCE_TOLERANCE, "{place}: {:?}", result.error);
    }
}

#[test]
fn both_forms_match_every_golden_file() {
    for path in golden_files() {
        let file = load(&path);
        let p = problem(&file);
        let upstream = file.upstream().expect("a golden file has do");
        assert_matches(&file, "token by token", &backward(&p, &upstream).unwrap());
        for chunk in [16, 32, 64] {
            assert_matches(&file, &format!("chunk {chunk}"), &backward_chunked(&p, &upstream, chunk).unwrap());
        }
    }
}

/// What golden files expect of gradients must be all that they hold: a name that nothing finds would go unnoticed.
#[test]
fn every_gradient_in_the_golden_files_is_one_that_is_compared() {
    for path in golden_files() {
        let file = load(&path);
        let found = backward(&problem(&file), &file.upstream().expect("a golden file has do")).unwrap();
        let names: Vec<_> = found.named(&file.inputs()).into_iter().map(|(name, _)| name).collect();
        let all = ["dq", "dk", "dv", "dg", "dg_raw", "dA_log", "ddt_bias", "dbeta", "dbeta_logits", "dh0"];
        for gradient in all {
            assert_eq!(names.contains(&gradient), file.expected(gradient).is_some(), "{}: {gradient}", name(&path));
        }
    }
}

/// One token without an initial state: the decay meets nothing, so its gradient is zero, not merely small.
#[test]
fn the_decay_of_the_only_token_has_no_gradient() {
    let path = golden_files().into_iter().find(|path| name(path) == "a_gdn_t1").expect("the golden file of one token");
    let file = load(path);
    let upstream = file.upstream().unwrap();
    for found in [backward(&problem(&file), &upstream), backward_chunked(&problem(&file), &upstream, 16)] {
        assert!(found.unwrap().dg.iter().all(|dg| *dg == 0.0));
    }
}

/// `ds_in` as golden files have it: what arrives at the state after each rank's last token; an empty rank passes it on.
#[test]
fn gradients_that_arrive_at_ranks_match_the_golden_files() {
    for path in golden_cp_files() {
        let file = load(&path);
        let p = problem(&file);
        let seeds = Seeds::new(&p, &file.upstream().unwrap()).unwrap();
        let mut ds_in = Vec::new();
        for cut in file.cuts().expect("offsets of the ranks").windows(2) {
            let (start, end) = (cut[0], cut[1]);
            // An empty rank has something to pass on only inside a sequence.
            let inside = end > 0 && p.sequence_of(end).is_some_and(|n| p.sequences[n].start < end);
            for head in 0..p.dims.hv {
                ds_in.extend(match start < end || inside {
                    true => state_gradient_after(&p, &seeds, head, end - 1),
                    false => vec![0.0; p.dims.k * p.dims.v],
                });
            }
        }
        let checked = against_file(&file, &[("ds_in", &ds_in)], REFERENCE_TOLERANCE);
        assert_eq!(checked.len(), 1, "{}: a golden file of ranks has ds_in", name(&path));
        for result in checked {
            assert!(result.mismatch.is_none(), "{}: {}", name(&path), result.mismatch.unwrap_or_default());
            assert!(result.error.rel_max <= REFERENCE_TOLERANCE, "{}: {:?}", name(&path), result.error);
        }
    }
}

/// Every rank walks its pieces for itself, from the state and the gradient that reach it; gradients travel from rank to rank as
/// `dS_in = M^T dS_out + dS_ext`. Together that is the whole.
#[test]
fn ranks_that_exchange_summaries_find_the_gradients_of_the_whole() {
    for path in golden_cp_files() {
        let file = load(&path);
        let p = problem(&file);
        let (k, v) = (p.dims.k, p.dims.v);
        let seeds = Seeds::new(&p, &file.upstream().unwrap()).unwrap();
        let cuts = file.cuts().expect("offsets of the ranks");
        for (n, sequence) in p.sequences.iter().enumerate() {
            for head in 0..p.dims.hv {
                let final_state = seeds.d_final_state(&p, n, head);
                let whole =
                    segment_gradients(&p, &seeds, head, sequence.tokens(), &p.initial_state(n, head), &final_state);
                let mut ds = final_state;
                for cut in cuts.windows(2).rev() {
                    let piece = cut[0].max(sequence.start)..cut[1].min(sequence.end);
                    if piece.is_empty() {
                        continue;
                    }
                    let s_in = state_at(&p, head, piece.start);
                    let found = segment_gradients(&p, &seeds, head, piece.clone(), &s_in, &ds);
                    assert_piece_of_whole(&whole, &found, piece.start - sequence.start, piece.len(), k, v);
                    let (m, _) = segment_summary(&p, head, piece.clone());
                    let external = gradient_summary(&p, &seeds, head, piece.clone());
                    ds = (0..k * v)
                        .map(|at| (0..k).map(|l| m[l * k + at / v] * ds[l * v + at % v]).sum::<f64>() + external[at])
                        .collect();
                    let error = Error::of(&found.d_state, &ds);
                    assert!(error.rel_rms < 1e-12, "{}: {error}", name(&path));
                }
                let error = Error::of(&ds, &whole.d_state);
                assert!(error.rel_rms < 1e-12, "{}: {error}", name(&path));
            }
        }
    }
}

fn assert_piece_of_whole(whole: &HeadGradients, piece: &HeadGradients, first: usize, len: usize, k: usize, v: usize) {
    for (what, whole, piece, width) in [
        ("dq", &whole.dq, &piece.dq, k),
        ("dk", &whole.dk, &piece.dk, k),
        ("dv", &whole.dv, &piece.dv, v),
        ("dg", &whole.dg, &piece.dg, k),
        ("dbeta", &whole.dbeta, &piece.dbeta, 1),
    ] {
        let error = Error::of(piece, &whole[first * width..][..len * width]);
        assert!(error.rel_rms < 1e-12, "{what}: {error}");
    }
}

/// The two forms share no arithmetic, so they agree only if both are right.
#[test]
fn both_forms_agree_on_every_shape_and_kind_of_input() {
    for (i, shape) in shapes().into_iter().enumerate() {
        for op in [Op::Kda, Op::Gdn] {
            let decay = [Decay::Slow, Decay::Default, Decay::Bursty, Decay::Fast, Decay::None, Decay::AllStrong][i % 6];
            let gate = match (i % 3, op) {
                (0, _) => GateKind::Given,
                (1, Op::Kda) => GateKind::LowerBound,
                _ => GateKind::Softplus,
            };
            let spec = Spec {
                op,
                decay,
                gate,
                keys: [Keys::Iso, Keys::CommonMean][i % 2],
                beta: [BetaKind::Standard, BetaKind::UpTo2, BetaKind::Logits2, BetaKind::Logits][i % 4],
                l2norm: i % 5 == 0,
                initial_state: i % 4 != 0,
                state_layout: [StateLayout::KFirst, StateLayout::VFirst][i % 2],
                seed: i as u64,
                ..shape.clone()
            };
            let case = spec.generate();
            let inputs = case.inputs();
            let p = Problem::new(&inputs, case.cu_seqlens()).unwrap();
            let upstream = spec.generate_upstream(i % 3 != 1);
            let expected = backward(&p, &upstream.view()).unwrap();
            let found = backward_chunked(&p, &upstream.view(), 64).unwrap();
            for ((name, found), (_, expected)) in found.named(&inputs).iter().zip(expected.named(&inputs)) {
                let error = Error::of(found, expected);
                // Gradients of the gate may be what is left of large sums, or nothing: one token without a state has none.
                let gate = ["dg", "dg_raw", "dA_log", "ddt_bias"].contains(name);
                let negligible = gate && error.max_abs < 1e-11;
                assert!(error.rel_rms < 1e-10 || negligible, "{spec}, {decay:?} {gate:?}, {name}: {error}");
            }
        }
    }
}

#[test]
fn both_layouts_of_states_give_the_same_gradients() {
    let spec = Spec { k: 16, v: 48, t: 20, initial_state: true, ..Spec::default() };
    let found = [StateLayout::KFirst, StateLayout::VFirst].map(|state_layout| {
        let spec = Spec { state_layout, ..spec.clone() };
        let p = Problem::new(&spec.generate().inputs(), None).unwrap();
        backward(&p, &spec.generate_upstream(true).view()).unwrap()
    });
    let [mut k_first, mut v_first] = found;
    let (a, b) = (k_first.d_initial_state.take().unwrap(), v_first.d_initial_state.take().unwrap());
    assert_eq!(k_first, v_first);
    let turned = b.chunks_exact(16 * 48).flat_map(|s| (0..16 * 48).map(|i| s[i % 48 * 16 + i / 48]));
    assert_eq!(a, turned.collect::<Vec<_>>());
}

#[test]
fn empty_sequences_hand_the_gradient_of_their_state_through() {
    let spec = Spec { t: 20, cu_seqlens: Some(vec![0, 0, 20, 20]), initial_state: true, ..Spec::default() };
    let case = spec.generate();
    let p = Problem::new(&case.inputs(), case.cu_seqlens()).unwrap();
    let upstream = spec.generate_upstream(true);
    let dht = upstream.view().d_final_state.unwrap().to_f64();
    let size = spec.hv * spec.k * spec.v;
    for found in [backward(&p, &upstream.view()), backward_chunked(&p, &upstream.view(), 16)] {
        let dh0 = found.unwrap().d_initial_state.unwrap();
        for (n, passes) in [(0, true), (1, false), (2, true)] {
            let row = n * size..(n + 1) * size;
            assert_eq!(dh0[row.clone()] == dht[row], passes, "sequence {n}");
        }
    }
}

/// Small problems of every kind.
fn small() -> impl Strategy<Value = (Spec, bool)> {
    let op = prop_oneof![Just(Op::Kda), Just(Op::Gdn)];
    let sizes = (1usize..=2, 1usize..=7, 1usize..=2, 1usize..=2, 1usize..=2, 1usize..=2);
    let decay = prop::sample::select(vec![
        Decay::None,
        Decay::Slow,
        Decay::Default,
        Decay::Fast,
        Decay::Bursty,
        Decay::AllStrong,
    ]);
    let gate = prop::sample::select(vec![GateKind::Given, GateKind::Softplus, GateKind::LowerBound]);
    let beta = prop::sample::select(vec![BetaKind::Standard, BetaKind::UpTo2, BetaKind::Logits, BetaKind::Logits2]);
    let keys = prop_oneof![Just(Keys::Iso), Just(Keys::CommonMean)];
    let layout = prop_oneof![Just(StateLayout::KFirst), Just(StateLayout::VFirst)];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (op, sizes, decay, gate, beta, keys, layout, flags, any::<u64>()).prop_map(
        |(op, (b, t, h, group, k, v), decay, gate, beta, keys, state_layout, flags, seed)| {
            let (l2norm, initial_state, packed, final_state) = flags;
            let gate = if op == Op::Gdn && gate == GateKind::LowerBound { GateKind::Softplus } else { gate };
            let cu_seqlens = packed.then(|| vec![0, t / 2, t / 2, t]);
            let b = if packed { 1 } else { b };
            let (hv, k, v) = (h * group, 16 * k, 16 * v);
            let spec = Spec {
                op,
                b,
                t,
                h,
                hv,
                k,
                v,
                gate,
                decay,
                keys,
                beta,
                l2norm,
                initial_state,
                state_layout,
                cu_seqlens,
                seed,
                ..Spec::default()
            };
            (spec, final_state)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn gradients_are_what_differences_of_the_loss_say((spec, final_state) in small()) {
        let case = spec.generate();
        let upstream = spec.generate_upstream(final_state);
        let checked = differences::check(&case.inputs(), case.cu_seqlens(), &upstream.view(), spec.seed);
        let gate_parameters = if spec.gate == GateKind::Given { 0 } else { 2 };
        prop_assert_eq!(checked.len(), 5 + gate_parameters + usize::from(spec.initial_state));
    }
}

/// A gate may come without its optional parameters.
#[test]
fn gates_without_parameters_have_no_gradients_of_them() {
    let spec = Spec { t: 9, k: 16, v: 16, gate: GateKind::LowerBound, ..Spec::default() };
    let (case, upstream) = (spec.generate(), spec.generate_upstream(true));
    let mut inputs = case.inputs();
    let Gate::LowerBound { a_log, dt_bias, .. } = &mut inputs.gate else { panic!("the gate that was asked for") };
    (*a_log, *dt_bias) = (None, None);
    assert_eq!(differences::check(&inputs, None, &upstream.view(), 1), ["dq", "dk", "dv", "dg_raw", "dbeta"]);
}

/// A factor of q that is not the usual one.
#[test]
fn the_scale_counts() {
    let spec = Spec { t: 9, k: 16, v: 16, initial_state: true, ..Spec::default() };
    let (case, upstream) = (spec.generate(), spec.generate_upstream(true));
    let inputs = Inputs { scale: Some(0.7), ..case.inputs() };
    differences::check(&inputs, None, &upstream.view(), 2);
}
