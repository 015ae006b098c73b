use super::*;
use crate::inputs::StateLayout;
use crate::reference::{Problem, recurrent, transition_weight};

fn problem(spec: &Spec) -> Problem {
    let case = spec.generate();
    let inputs = case.inputs();
    inputs.check_values(false).unwrap();
    Problem::new(&inputs, case.cu_seqlens()).unwrap()
}

/// The activated decays of a head.
fn decays(spec: &Spec, head: usize) -> Vec<f64> {
    let p = problem(spec);
    (0..spec.b * spec.t).flat_map(|token| p.g(token, head).to_vec()).collect()
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

#[test]
fn every_shape_is_a_valid_problem_with_every_kind_of_input() {
    let shapes = shapes();
    for (i, shape) in shapes.iter().enumerate() {
        for op in [Op::Kda, Op::Gdn] {
            let gate = match (i % 3, op) {
                (0, _) => GateKind::Given,
                (1, Op::Kda) => GateKind::LowerBound,
                _ => GateKind::Softplus,
            };
            let beta = [BetaKind::Standard, BetaKind::UpTo2, BetaKind::Logits, BetaKind::Logits2][i % 4];
            let spec = Spec { op, gate, beta, l2norm: i % 2 == 0, initial_state: true, ..shape.clone() };
            assert_eq!(problem(&spec).sequences.len(), spec.sequences(), "{spec}");
        }
    }
    assert!(shapes.iter().any(|s| s.b > 1) && shapes.iter().any(|s| s.hv > s.h) && shapes.iter().any(|s| s.k != s.v));
    for size in [16, 48, 80, 112, 256] {
        assert!(shapes.iter().any(|s| s.k == size) && shapes.iter().any(|s| s.v == size), "{size}");
    }
}

#[test]
fn the_seed_decides_everything_and_options_leave_other_tensors_alone() {
    let spec = Spec { initial_state: true, ..Spec::default() };
    let (a, b) = (spec.generate(), spec.generate());
    assert!(a.q == b.q && a.k == b.k && a.gate == b.gate && a.beta == b.beta && a.h0 == b.h0);
    let other = Spec { seed: 2, ..spec.clone() }.generate();
    assert!(a.q != other.q && a.k != other.k && a.gate != other.gate && a.beta != other.beta && a.h0 != other.h0);
    let faster = Spec { decay: Decay::Fast, ..spec }.generate();
    assert!(a.q == faster.q && a.beta == faster.beta && a.gate != faster.gate);
}

#[test]
fn upstream_gradients_fit_the_results_in_either_layout_and_follow_the_seed() {
    let spec = Spec { k: 16, v: 48, cu_seqlens: Some(vec![0, 60, 60, 200]), dtype: Dtype::Bf16, ..Spec::default() };
    let case = spec.generate();
    let p = Problem::new(&case.inputs(), case.cu_seqlens()).unwrap();
    let upstream = spec.generate_upstream(true);
    let view = upstream.view();
    view.check(&p.dims, StateLayout::KFirst, 3).unwrap();
    assert_eq!(view.d_o.dtype(), Dtype::Bf16);
    assert!(spec.generate_upstream(false).view().d_final_state.is_none());

    let v_first = Spec { state_layout: StateLayout::VFirst, ..spec.clone() };
    let turned = v_first.generate_upstream(true);
    turned.view().check(&p.dims, StateLayout::VFirst, 3).unwrap();
    assert_eq!(turned.view().d_o.to_f64(), view.d_o.to_f64());
    let (k_first, v_first) = (view.d_final_state.unwrap(), turned.view().d_final_state.unwrap());
    assert_eq!(k_first.get(48 + 2), v_first.get(2 * 16 + 1), "channel 1 of the key, 2 of the value");

    let again = spec.generate_upstream(true);
    assert_eq!(again.view().d_o.to_f64(), view.d_o.to_f64());
    let other = Spec { seed: 2, ..spec }.generate_upstream(true);
    assert_ne!(other.view().d_o.to_f64(), view.d_o.to_f64());
    assert_ne!(other.view().d_final_state.unwrap().to_f64(), k_first.to_f64());
}

#[test]
fn rows_are_unit_vectors_unless_the_operation_normalises() {
    let longest = |l2norm| {
        let case = Spec { l2norm, ..Spec::default() }.generate();
        let rows = case.k.data.to_f64();
        rows.chunks_exact(32).map(|row| row.iter().map(|x| x * x).sum::<f64>().sqrt()).fold(0.0, f64::max)
    };
    assert!((longest(false) - 1.0).abs() < 1e-6);
    assert!(longest(true) > 2.0);
}

#[test]
fn common_mean_keys_are_correlated() {
    let cosine = |keys| {
        let p = problem(&Spec { keys, ..Spec::default() });
        let products = (1..200).map(|t| p.k(t, 0).iter().zip(p.k(t - 1, 0)).map(|(x, y)| x * y).sum::<f64>());
        products.sum::<f64>() / 199.0
    };
    assert!(cosine(Keys::Iso).abs() < 0.1, "{}", cosine(Keys::Iso));
    assert!((0.5..0.9).contains(&cosine(Keys::CommonMean)), "{}", cosine(Keys::CommonMean));
}

#[test]
fn gates_of_every_kind_give_the_decay_that_was_asked_for() {
    for op in [Op::Kda, Op::Gdn] {
        for (decay, range) in [
            (Decay::None, -1e-20..=0.0),
            (Decay::Slow, -0.01..=-0.002),
            (Decay::Default, -0.3..=-0.05),
            (Decay::Fast, -6.0..=-1.5),
            (Decay::AllStrong, -160.1..=-159.9),
        ] {
            for gate in [GateKind::Given, GateKind::Softplus] {
                let spec = Spec { op, gate, decay, ..Spec::default() };
                let found = mean(&decays(&spec, 0));
                assert!(range.contains(&found), "{op} {gate:?} {decay:?}: {found}");
            }
        }
        let bursts = decays(&Spec { op, decay: Decay::Bursty, ..Spec::default() }, 0);
        let strong = bursts.iter().filter(|g| **g < -30.0).count() as f64 / bursts.len() as f64;
        assert!((0.01..0.1).contains(&strong) && bursts[0] < -30.0, "{op}: {strong}");
    }
    let bounded = Spec { gate: GateKind::LowerBound, decay: Decay::AllStrong, ..Spec::default() };
    assert!(decays(&bounded, 0).iter().all(|g| (-5.0..-4.9).contains(g)));
}

#[test]
fn heads_differ_in_strength() {
    for gate in [GateKind::Given, GateKind::Softplus, GateKind::LowerBound] {
        let spec = Spec { gate, hv: 4, ..Spec::default() };
        let means: Vec<f64> = (0..4).map(|head| mean(&decays(&spec, head))).collect();
        assert!(means.windows(2).all(|w| w[1] < 1.05 * w[0]), "{gate:?}: {means:?}");
    }
}

#[test]
fn step_sizes_fill_their_ranges() {
    let range = |beta| {
        let p = problem(&Spec { beta, ..Spec::default() });
        let all: Vec<f64> = (0..200).map(|t| p.beta(t, 0)).collect();
        (all.iter().copied().fold(f64::INFINITY, f64::min), all.iter().copied().fold(0.0, f64::max))
    };
    for (beta, most, least) in [
        (BetaKind::Standard, 1.0, 0.8),
        (BetaKind::Small, 0.4, 0.03),
        (BetaKind::UpTo2, 2.0, 1.6),
        (BetaKind::Logits, 1.0, 0.8),
        (BetaKind::Logits2, 2.0, 1.6),
    ] {
        let (low, high) = range(beta);
        assert!(low > 0.0 && (least..most).contains(&high), "{beta:?}: {low}..{high}");
    }
}

#[test]
fn both_state_layouts_hold_the_same_states() {
    let spec = Spec { k: 16, v: 48, initial_state: true, ..Spec::default() };
    let v_first = Spec { state_layout: StateLayout::VFirst, ..spec.clone() };
    assert_eq!(v_first.generate().h0.unwrap().shape, [1, 2, 48, 16]);
    assert_eq!(recurrent(&problem(&spec)), recurrent(&problem(&v_first)));
}

#[test]
fn slow_decay_and_small_steps_make_the_transition_matter() {
    let cuts = [0, 50, 100, 150, 200];
    let weight = |spec: Spec| transition_weight(&problem(&spec), &cuts);
    let slow = weight(Spec { decay: Decay::Slow, beta: BetaKind::Small, ..Spec::default() });
    assert!(slow.max_forwarded > 0.3 && slow.max_ending > 0.3, "{slow:?}");
    let gone = weight(Spec { decay: Decay::AllStrong, ..Spec::default() });
    assert!(gone.max < 1e-100, "{gone:?}");
}
