//! The kernels of the backward pass against golden vectors and the f64 reference.

use deltalink::compare::{self, Checked, Error, gradients_against_file};
use deltalink::generate::{BetaKind, Case, Decay, GateKind, Keys, Spec, shapes};
use deltalink::gradients::Gradients;
use deltalink::inputs::{Beta, Inputs, Op, StateLayout};
use deltalink::reference::{Problem, backward, transition_weight};
use deltalink::tensor::{Dtype, TensorView};
use deltalink_tests::backward_pes::{Setup, gradients};
use deltalink_tests::{golden_files, load, name};

#[test]
fn golden_vectors_in_f32_on_one_pe() {
    let mut errors = Vec::new();
    for path in golden_files() {
        let file = load(&path);
        let inputs = file.inputs();
        let dims = inputs.dims().unwrap();
        let cu = file.cu_seqlens();
        let problem = Problem::new(&inputs, cu.as_deref()).unwrap();
        for chunk in [16, 32, 64] {
            let found = gradients(&Setup {
                inputs: &inputs,
                upstream: &file.upstream().expect("a golden file has do"),
                cu_seqlens: cu.as_deref(),
                chunk,
                cuts: &[0, dims.b * dims.t],
                exact: false,
            });
            for checked in gradients_against_file(&file, &problem, &found) {
                println!("{} chunk {chunk} {}: {}", name(&path), checked.name, checked.error);
                assert!(checked.mismatch.is_none(), "{} chunk {chunk}: {}", name(&path), checked.mismatch.unwrap());
                errors.push(checked.error.rel_rms);
            }
        }
    }
    errors.sort_by(f64::total_cmp);
    let median = errors[errors.len() / 2];
    assert!(median < 1e-6, "median relative error {median:e}");
}

/// Compares with the reference; returns the errors.
#[track_caller]
fn assert_close(
    what: &str,
    inputs: &Inputs<'_>,
    p: &Problem,
    found: &Gradients<Vec<f64>>,
    expected: &Gradients<Vec<f64>>,
) -> Vec<f64> {
    let judge = |checked: Checked| {
        println!("{what} {}: {}", checked.name, checked.error);
        assert!(checked.mismatch.is_none(), "{what}: {}", checked.mismatch.unwrap());
        checked.error.rel_rms
    };
    compare::gradients(inputs, p, found, expected).into_iter().map(judge).collect()
}

/// Every shape with one of the kinds of input each.
fn cases(dtype: Dtype) -> impl Iterator<Item = (Spec, Case, usize)> {
    // A few tokens have gradients of single numbers, of which 16 bits may leave nothing.
    let shapes = shapes().into_iter().filter(move |shape| dtype == Dtype::F32 || shape.t >= 63);
    shapes.enumerate().flat_map(move |(i, shape)| {
        [Op::Kda, Op::Gdn].map(|op| {
            let gate = match (i % 3, op) {
                (0, _) => GateKind::Given,
                (1, Op::Kda) => GateKind::LowerBound,
                _ => GateKind::Softplus,
            };
            let spec = Spec {
                op,
                dtype,
                gate,
                // f16 has no numbers below 6e-8, which is where gradients of states are after strong decays.
                decay: if dtype == Dtype::F16 {
                    Decay::Slow
                } else {
                    [Decay::Slow, Decay::Default, Decay::Bursty][i % 3]
                },
                beta: [BetaKind::Standard, BetaKind::Logits, BetaKind::Small, BetaKind::Logits2][i % 4],
                l2norm: i % 2 == 0,
                initial_state: i % 4 != 0,
                state_layout: [StateLayout::KFirst, StateLayout::VFirst][i % 2],
                seed: i as u64,
                ..shape.clone()
            };
            let case = spec.generate();
            (spec, case, [64, 32, 16][i % 3])
        })
    })
}

fn check_generated_shapes(dtype: Dtype, median: f64) {
    let mut errors = Vec::new();
    for (i, (spec, case, chunk)) in cases(dtype).enumerate() {
        let inputs = case.inputs();
        let upstream = spec.generate_upstream(i % 3 != 1);
        let found = gradients(&Setup {
            inputs: &inputs,
            upstream: &upstream.view(),
            cu_seqlens: case.cu_seqlens(),
            chunk,
            cuts: &[0, spec.b * spec.t],
            exact: false,
        });
        let problem = Problem::new(&inputs, case.cu_seqlens()).unwrap();
        let expected = backward(&problem, &upstream.view()).unwrap();
        let what = format!("{spec} chunk {chunk}");
        errors.extend(assert_close(&what, &inputs, &problem, &found, &expected));
    }
    errors.sort_by(f64::total_cmp);
    assert!(errors[errors.len() / 2] < median, "median relative error {:e}", errors[errors.len() / 2]);
}

#[test]
fn generated_shapes_in_f32() {
    check_generated_shapes(Dtype::F32, 1e-6);
}

#[test]
fn generated_shapes_in_bf16() {
    check_generated_shapes(Dtype::Bf16, 5e-3);
}

#[test]
fn generated_shapes_in_f16() {
    check_generated_shapes(Dtype::F16, 2e-3);
}

/// Decays that nothing survives, and step sizes of zero, by which dbeta must not be lost.
#[test]
fn extremes_stay_exact() {
    for (decay, keys) in [(Decay::AllStrong, Keys::Iso), (Decay::Fast, Keys::CommonMean), (Decay::None, Keys::Iso)] {
        let spec = Spec { decay, keys, initial_state: true, k: 64, v: 48, ..Spec::default() };
        let case = spec.generate();
        let upstream = spec.generate_upstream(true);
        let zeros = vec![0.0f32; spec.b * spec.t * spec.hv];
        for no_steps in [false, true] {
            let mut inputs = case.inputs();
            if no_steps {
                inputs.beta = Beta::Given(TensorView::new(&[spec.b, spec.t, spec.hv], &zeros[..]).unwrap());
            }
            let found = gradients(&Setup {
                inputs: &inputs,
                upstream: &upstream.view(),
                cu_seqlens: None,
                chunk: 64,
                cuts: &[0, spec.t],
                exact: false,
            });
            let problem = Problem::new(&inputs, None).unwrap();
            let expected = backward(&problem, &upstream.view()).unwrap();
            if no_steps {
                // Nothing is written, so little is left of the other gradients; dbeta says what writing would do.
                let error = Error::of(&found.dbeta, &expected.dbeta);
                assert!(error.within(1e-6), "{decay:?} {keys:?}: dbeta: {error}");
                assert!(Error::of(&found.dk, &expected.dk).max_abs < 1e-5);
            } else {
                assert_close(&format!("{decay:?} {keys:?}"), &inputs, &problem, &found, &expected);
            }
        }
    }
}

/// Gradients that come from other PEs, through the channel and the transposed transitions.
#[test]
fn pes_find_the_gradients_of_the_whole() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for (i, (cu, k, v)) in [
            (vec![0, 300], 80, 112),
            (vec![0, 10, 10, 280, 300, 300], 64, 64),
            (vec![0, 300], 128, 48),
            (vec![0, 100, 300], 256, 32),
        ]
        .into_iter()
        .enumerate()
        {
            let spec = Spec {
                op: [Op::Kda, Op::Gdn][i % 2],
                dtype,
                t: 300,
                h: 1,
                hv: 2,
                k,
                v,
                decay: Decay::Slow,
                beta: BetaKind::Small,
                gate: GateKind::Softplus,
                initial_state: true,
                cu_seqlens: Some(cu),
                ..Spec::default()
            };
            let case = spec.generate();
            let inputs = case.inputs();
            let upstream = spec.generate_upstream(true);
            let problem = Problem::new(&inputs, case.cu_seqlens()).unwrap();
            let expected = backward(&problem, &upstream.view()).unwrap();
            let cuts = [0, 70, 133, 201, 300];
            let weight = transition_weight(&problem, &cuts);
            assert!(weight.max_forwarded > 0.1, "{spec}: transitions do not matter here: {weight:?}");
            for exact in [false, true] {
                let found = gradients(&Setup {
                    inputs: &inputs,
                    upstream: &upstream.view(),
                    cu_seqlens: case.cu_seqlens(),
                    chunk: 32,
                    cuts: &cuts,
                    exact,
                });
                assert_close(&format!("{spec} exact {exact}"), &inputs, &problem, &found, &expected);
            }
        }
    }
}
