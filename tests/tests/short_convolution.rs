//! The short convolution: every rank's outputs, states and gradients against the f64 reference, wherever the sequences are
//! cut; and the same bits as on one PE.

mod convolutions;

use convolutions::{Case, Spec, same_bits};
use deltalink::op::Transport;
use deltalink::op::convolution::whole::{Share, UpstreamShare};
use deltalink::op::convolution::{ConvolutionConfig, ShortConvolution, ShortConvolutionError};
use deltalink::plan::{Cuts, Plan};
use deltalink::tensor::Dtype;
use deltalink::world::{WorldOptions, run_threads};
use proptest::prelude::*;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

fn config() -> ConvolutionConfig {
    ConvolutionConfig { workers: Some(1), ..ConvolutionConfig::default() }
}

/// Cuts for up to 8 PEs, with ranks of 0, 1 and 2 tokens.
fn all_cuts(t: usize) -> Vec<Cuts> {
    vec![
        Cuts::equal(1),
        Cuts::equal(2),
        Cuts::at(vec![t - 1]),
        Cuts::at(vec![0, t]),
        Cuts::at(vec![1, 3]),
        Cuts::at(vec![t / 2, t / 2 + 1, t / 2 + 3]),
        Cuts::equal(4),
        Cuts::at(vec![2, 3, 4, 4, 6, 7, t - 2]),
        Cuts::equal(8),
    ]
}

#[track_caller]
fn check_all_cuts(spec: &Spec, config: &ConvolutionConfig) {
    let case = spec.generate();
    let one_plan = spec.plan(&Cuts::equal(1));
    let one = case.run(&one_plan, config);
    for cuts in all_cuts(spec.t) {
        let plan = spec.plan(&cuts);
        let results = case.run(&plan, config);
        case.check(&plan, &results);
        case.check_bitwise(&plan, &results, &one);
    }
}

#[test]
fn every_number_of_taps_with_all_cuts() {
    for width in 2..=8 {
        check_all_cuts(&Spec { width, seed: width as u64, ..Spec::default() }, &config());
    }
}

#[test]
fn every_element_type_with_and_without_silu_and_bias() {
    for (i, dtype) in DTYPES.into_iter().enumerate() {
        for (silu, bias) in [(false, false), (false, true), (true, false), (true, true)] {
            let wide_parameters = silu == bias;
            check_all_cuts(&Spec { dtype, silu, bias, wide_parameters, seed: i as u64, ..Spec::default() }, &config());
        }
    }
}

#[test]
fn packed_sequences_short_ones_and_empty_ones() {
    // Sequences that end at cuts, that are shorter than the taps reach, and without tokens at the start, inside and at the end.
    for cu in [&[0, 0, 1, 3, 20, 20, 22, 40][..], &[0, 20, 40], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 40, 40], &[0, 39, 40]] {
        for width in [2, 4, 8] {
            check_all_cuts(&Spec { width, ..Spec::packed(cu) }, &config());
        }
    }
}

#[test]
fn batches() {
    for (b, initial_state) in [(3, true), (2, false)] {
        check_all_cuts(&Spec { b, initial_state, t: 19, width: 5, ..Spec::default() }, &config());
    }
}

#[test]
fn without_states() {
    check_all_cuts(&Spec { initial_state: false, final_gradient: false, ..Spec::default() }, &config());
    check_all_cuts(&Spec { initial_state: false, width: 8, ..Spec::packed(&[0, 2, 40]) }, &config());
}

#[test]
fn one_convolution_of_a_call_or_two_and_many_channels() {
    for channels in [vec![1], vec![128, 129], vec![300, 7, 257]] {
        let spec = Spec { channels, dtype: Dtype::Bf16, ..Spec::default() };
        let case = spec.generate();
        for cuts in [Cuts::equal(1), Cuts::at(vec![1, 20])] {
            let plan = spec.plan(&cuts);
            case.check(&plan, &case.run(&plan, &config()));
        }
    }
}

#[test]
fn runs_of_tokens_longer_than_one_item_and_several_workers() {
    let spec = Spec { t: 700, channels: vec![130, 16], ..Spec::packed(&[0, 129, 131, 500, 700]) };
    let case = spec.generate();
    let one = case.run(&spec.plan(&Cuts::equal(1)), &config());
    for cuts in [Cuts::equal(1), Cuts::at(vec![128, 132, 262]), Cuts::equal(3)] {
        let plan = spec.plan(&cuts);
        let results = case.run(&plan, &ConvolutionConfig { workers: Some(3), ..config() });
        case.check(&plan, &results);
        case.check_bitwise(&plan, &results, &one);
    }
}

#[test]
fn checked_mode_finds_nothing() {
    let checked = ConvolutionConfig { checked: true, ..config() };
    check_all_cuts(&Spec { channels: vec![5, 3], ..Spec::default() }, &checked);
    check_all_cuts(&Spec { channels: vec![4], width: 8, ..Spec::packed(&[0, 0, 2, 3, 30, 33]) }, &checked);
}

#[test]
fn halos_that_are_put_are_those_that_are_stored() {
    let put = ConvolutionConfig { transport: Transport::Put, ..config() };
    check_all_cuts(&Spec { dtype: Dtype::Bf16, channels: vec![200, 7], width: 8, ..Spec::default() }, &put);
    check_all_cuts(&Spec { b: 3, t: 19, ..Spec::default() }, &ConvolutionConfig { workers: Some(3), ..put });
}

#[test]
fn shares_of_weight_gradients_are_the_same_in_every_run() {
    let spec = Spec { t: 600, channels: vec![40], ..Spec::default() };
    let (case, plan) = (spec.generate(), spec.plan(&Cuts::equal(3)));
    let config = ConvolutionConfig { workers: Some(4), ..config() };
    let first = case.run(&plan, &config);
    for _ in 0..4 {
        let again = case.run(&plan, &config);
        let (first, again) = (&first.backward.gradients[0], &again.backward.gradients[0]);
        assert!(same_bits(&first.dweight, &again.dweight));
        assert_eq!(first.dbias, again.dbias);
    }
}

#[test]
fn q_k_and_v_go_in_one_message_from_every_pe_that_holds_some_of_their_rows() {
    // 40 tokens on ranks of 20, 1, 1 and 18; W = 4, 72 channels.
    let spec = Spec { dtype: Dtype::Bf16, ..Spec::default() };
    let case = spec.generate();
    let plan = spec.plan(&Cuts::at(vec![20, 21, 22]));
    let results = case.run(&plan, &config());
    let counts = |reports: &[deltalink::op::Report]| -> Vec<_> {
        reports.iter().map(|report| (report.messages, report.bytes_sent)).collect()
    };
    // Rows: to rank 1 all three, to rank 2 two and one, to rank 3 one, one and one.
    let (row, wide_row) = (72 * 2, 72 * 4);
    assert_eq!(counts(&results.forward.reports), [(3, 6 * row), (2, 2 * row), (1, row), (0, 0)]);
    assert_eq!(counts(&results.backward.reports), [(0, 0), (1, wide_row), (2, 2 * wide_row), (3, 6 * wide_row)]);
    // Nothing crosses a cut between sequences.
    let spec = Spec::packed(&[0, 20, 40]);
    let results = spec.generate().run(&spec.plan(&Cuts::equal(2)), &config());
    assert_eq!(counts(&results.forward.reports), [(0, 0), (0, 0)]);
    assert_eq!(counts(&results.backward.reports), [(0, 0), (0, 0)]);
}

/// Calls of changing plans and sizes on one operation, forward and backward in any order: slots and signals are used again.
#[test]
fn call_after_call_on_one_operation() {
    let specs = [
        Spec::default(),
        Spec { seed: 2, ..Spec::packed(&[0, 3, 17, 40]) },
        Spec { seed: 3, channels: vec![40, 24, 8], ..Spec::default() },
        Spec { seed: 4, silu: false, width: 7, ..Spec::default() },
    ];
    let cases: Vec<Case> = specs.iter().map(Spec::generate).collect();
    let plans: Vec<Plan> = specs.iter().map(|spec| spec.plan(&Cuts::at(vec![1, 2, 16, 18]))).collect();
    let expected: Vec<_> = cases.iter().zip(&plans).map(|(case, plan)| case.run(plan, &config())).collect();
    run_threads(5, &WorldOptions::default(), |pe| -> Result<(), ShortConvolutionError> {
        let mut op = ShortConvolution::new(pe, config())?;
        let rank = pe.rank();
        let shares: Vec<Vec<_>> = cases
            .iter()
            .zip(&plans)
            .map(|(case, plan)| case.inputs().iter().map(|input| Share::new(plan, rank, input)).collect())
            .collect();
        for order in [[0, 0, 1, 2], [2, 2, 3, 0], [1, 1, 1, 1]] {
            let mut saved = Vec::new();
            for i in order {
                let whole = cases[i].inputs();
                let inputs: Vec<_> = shares[i].iter().zip(&whole).map(|(share, whole)| share.input(whole)).collect();
                let (found, left) = op.forward_saving(&plans[i], &inputs, specs[i].activation())?;
                for (found, want) in found.outputs.iter().zip(&expected[i].forward.outputs) {
                    let (first, len) = (plans[i].cuts[rank], plans[i].cuts[rank + 1] - plans[i].cuts[rank]);
                    let (d, size) = (want.y.shape[2], 4);
                    let want = &want.y.data.bytes()[first * d * size..][..len * d * size];
                    assert_eq!(found.y.data.bytes(), want, "rank {rank}, case {i}");
                }
                saved.push((i, left));
            }
            // The last forward call first, and one of them twice.
            for (i, saved) in saved.iter().take(1).chain(saved.iter().rev()) {
                let (i, whole) = (*i, cases[*i].inputs());
                let inputs: Vec<_> = shares[i].iter().zip(&whole).map(|(share, whole)| share.input(whole)).collect();
                let upstream: Vec<_> =
                    cases[i].upstream().iter().map(|whole| UpstreamShare::new(&plans[i], rank, whole)).collect();
                let upstream: Vec<_> = upstream.iter().map(UpstreamShare::upstream).collect();
                let found = op.backward(&plans[i], &inputs, specs[i].activation(), saved, &upstream)?;
                for (found, want) in found.gradients.iter().zip(&expected[i].backward.gradients) {
                    let (first, len) = (plans[i].cuts[rank], plans[i].cuts[rank + 1] - plans[i].cuts[rank]);
                    let (d, size) = (want.dx.shape[2], 4);
                    let want = &want.dx.data.bytes()[first * d * size..][..len * d * size];
                    assert_eq!(found.dx.data.bytes(), want, "rank {rank}, case {i}");
                }
            }
            for (_, saved) in saved {
                op.release(saved);
            }
        }
        Ok(())
    })
    .unwrap();
}

fn any_spec() -> impl Strategy<Value = (Spec, Vec<usize>)> {
    let layout = prop_oneof![
        (1usize..4, 0usize..30).prop_map(|(b, t)| (b, t, None)),
        prop::collection::vec(prop_oneof![3 => 0usize..6, 1 => 0usize..140], 1..7).prop_map(|lens| {
            let cu: Vec<usize> = std::iter::once(0)
                .chain(lens.iter().scan(0, |sum, len| {
                    *sum += len;
                    Some(*sum)
                }))
                .collect();
            (1, *cu.last().unwrap(), Some(cu))
        }),
    ];
    let cuts = prop::collection::vec(0.0..1.0f64, 0..8);
    let channels = prop::collection::vec(prop_oneof![4 => 1usize..20, 1 => 120usize..140], 1..4);
    let options = (2usize..=8, prop::sample::select(&DTYPES[..]), any::<[bool; 5]>(), any::<u64>());
    (layout, cuts, channels, options).prop_map(|((b, t, cu_seqlens), cuts, channels, (width, dtype, flags, seed))| {
        let [wide_parameters, silu, bias, initial_state, final_gradient] = flags;
        let mut cuts: Vec<usize> = cuts.into_iter().map(|at| (at * (t + 1) as f64) as usize).collect();
        cuts.sort_unstable();
        let spec = Spec {
            b,
            t,
            cu_seqlens,
            channels,
            width,
            dtype,
            wide_parameters,
            silu,
            bias,
            initial_state,
            final_gradient,
            seed,
        };
        (spec, cuts)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn anything_at_all((spec, cuts) in any_spec()) {
        let (case, plan) = (spec.generate(), spec.plan(&Cuts::at(cuts)));
        let results = case.run(&plan, &config());
        case.check(&plan, &results);
        case.check_bitwise(&plan, &results, &case.run(&spec.plan(&Cuts::equal(1)), &config()));
    }
}
