//! The f64 reference against the golden vectors and against itself.

use deltalink::compare::{Error, REFERENCE_TOLERANCE, against_file};
use deltalink::file::InputFile;
use deltalink::generate::{BetaKind, Decay, Keys, Spec, shapes};
use deltalink::inputs::{Beta, Gate, Op};
use deltalink::reference::{Outputs, Problem, chunked, recurrent, segment_summary, state_at, transition_weight};
use deltalink_tests::{golden_cp_files, golden_files, load, name};

fn problem(file: &InputFile) -> Problem {
    Problem::new(&file.inputs(), file.cu_seqlens().as_deref()).unwrap_or_else(|error| panic!("{error}"))
}

/// Every named result that the file expects is within the tolerance, in both norms; all of them are expected.
fn assert_matches(file: &InputFile, how: &str, found: &[(&str, &[f64])]) {
    let checked = against_file(file, found, REFERENCE_TOLERANCE);
    assert_eq!(checked.len(), found.len(), "{}: a golden file has all of these", file.path().display());
    for result in checked {
        let place = format!("{}, {how}", name(file.path()));
        assert!(result.mismatch.is_none(), "{place}: {}", result.mismatch.unwrap_or_default());
        assert!(result.error.rel_max <= REFERENCE_TOLERANCE, "{place}, {}: {:?}", result.name, result.error);
    }
}

#[test]
fn recurrent_and_chunked_match_every_golden_file() {
    for path in golden_files() {
        let file = load(&path);
        let p = problem(&file);
        let check = |how: &str, Outputs { o, ht }: Outputs| assert_matches(&file, how, &[("o", &o), ("ht", &ht)]);
        check("recurrent", recurrent(&p));
        for chunk in [16, 32, 64] {
            check(&format!("chunk {chunk}"), chunked(&p, chunk));
        }
    }
}

/// `s_in`, `m` and `s_ext` as golden files have them: of each rank's last piece; an empty rank passes the state on.
#[test]
fn states_and_summaries_of_ranks_match_the_golden_files() {
    for path in golden_cp_files() {
        let file = load(&path);
        let p = problem(&file);
        let (mut s_in, mut m, mut s_ext) = (Vec::new(), Vec::new(), Vec::new());
        for cut in file.cuts().expect("offsets of the ranks").windows(2) {
            let (start, end) = (cut[0], cut[1]);
            let empty = start == end;
            let owner = p.sequence_of(start).map(|n| p.sequences[n]);
            let piece = if empty {
                start..end
            } else {
                let last = p.sequences[p.sequence_of(end - 1).expect("every token has a sequence")];
                last.start.max(start)..end
            };
            for head in 0..p.dims.hv {
                s_in.extend(match owner {
                    Some(sequence) if !empty || sequence.start < start => state_at(&p, head, start),
                    _ => vec![0.0; p.dims.k * p.dims.v],
                });
                let (transition, external) = segment_summary(&p, head, piece.clone());
                m.extend(transition);
                s_ext.extend(external);
            }
        }
        assert_matches(&file, "by rank", &[("s_in", &s_in), ("m", &m), ("s_ext", &s_ext)]);
    }
}

#[test]
fn transition_weights_match_the_golden_files() {
    for path in golden_cp_files() {
        let file = load(&path);
        let metadata = file.metadata();
        let found = transition_weight(&problem(&file), &file.cuts().expect("offsets of the ranks"));
        let expected: Vec<Vec<f64>> =
            metadata["m_ratio"].split(';').map(|rank| rank.split(',').map(|x| x.parse().unwrap()).collect()).collect();
        assert_eq!(found.ranks.len(), expected.len(), "{}", name(&path));
        for (found, expected) in found.ranks.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() <= 5.01e-4, "{}: {found}, printed {expected}", name(&path));
        }
        let max: f64 = metadata["m_ratio_max"].parse().unwrap();
        assert!((found.max - max).abs() <= 5.01e-4, "{}: {}, printed {max}", name(&path), found.max);
        assert!(found.max <= found.max_forwarded.max(found.max_ending), "{}: {found:?}", name(&path));
    }
}

/// Trained activations, cut into equal parts: the largest weight of each head is in the metadata.
#[test]
fn transition_weights_of_trained_activations_match() {
    let mut seen = 0;
    for path in golden_files() {
        let file = load(&path);
        for parts in [2, 4, 8] {
            let Some(printed) = file.metadata().get(&format!("m_ratio_p{parts}")) else { continue };
            let p = problem(&file);
            let cuts: Vec<usize> = (0..=parts).map(|r| r * p.dims.t / parts).collect();
            let found = transition_weight(&p, &cuts);
            for (head, expected) in printed.split(',').enumerate() {
                let (expected, found): (f64, f64) =
                    (expected.parse().unwrap(), found.ranks.iter().map(|rank| rank[head]).fold(0.0, f64::max));
                assert!((found - expected).abs() <= 5.01e-5, "{}, P = {parts}: {found}, {expected}", name(&path));
                seen += 1;
            }
        }
    }
    assert!(seen > 0, "no golden file has transition weights");
}

/// The two forms share no arithmetic, so they agree only if both are right.
#[test]
fn both_forms_agree_on_every_shape() {
    for (i, shape) in shapes().into_iter().enumerate() {
        for op in [Op::Kda, Op::Gdn] {
            let decay = [Decay::Slow, Decay::Default, Decay::Bursty, Decay::Fast, Decay::None, Decay::AllStrong][i % 6];
            let keys = [Keys::Iso, Keys::CommonMean][i % 2];
            let beta = [BetaKind::Standard, BetaKind::UpTo2, BetaKind::Logits2][i % 3];
            let spec = Spec { op, decay, keys, beta, initial_state: i % 4 != 0, seed: i as u64, ..shape.clone() };
            let case = spec.generate();
            let p = Problem::new(&case.inputs(), case.cu_seqlens()).unwrap();
            let (a, b) = (recurrent(&p), chunked(&p, 64));
            for (what, found, expected) in [("o", &b.o, &a.o), ("ht", &b.ht, &a.ht)] {
                let error = Error::of(found, expected);
                assert!(error.rel_rms < 1e-12, "{spec}, {decay:?}, {keys:?}, {beta:?}, {what}: {error}");
            }
        }
    }
}

#[test]
fn summaries_of_two_runs_compose_to_that_of_both() {
    let spec = Spec { t: 90, decay: Decay::Slow, beta: BetaKind::Small, initial_state: true, ..Spec::default() };
    let case = spec.generate();
    let p = Problem::new(&case.inputs(), None).unwrap();
    let (k, v) = (spec.k, spec.v);
    let apply = |(m, s_ext): &(Vec<f64>, Vec<f64>), s: &[f64]| -> Vec<f64> {
        let product = |i: usize, j: usize| (0..k).map(|l| m[i * k + l] * s[l * v + j]).sum::<f64>();
        (0..k * v).map(|at| product(at / v, at % v) + s_ext[at]).collect()
    };
    for head in 0..spec.hv {
        let s = p.initial_state(0, head);
        let halves = apply(&segment_summary(&p, head, 37..90), &apply(&segment_summary(&p, head, 0..37), &s));
        let whole = apply(&segment_summary(&p, head, 0..90), &s);
        let expected = &recurrent(&p).ht[head * k * v..][..k * v];
        for found in [&halves, &whole] {
            assert!(Error::of(found, expected).rel_rms < 1e-13);
        }
        assert_eq!(state_at(&p, head, 0), s);
        let before_last = state_at(&p, head, 89);
        assert!(Error::of(&apply(&segment_summary(&p, head, 89..90), &before_last), expected).rel_rms < 1e-13);
    }
}

/// Batch rows are cut at the same tokens: the weight of a rank is the largest of its rows.
#[test]
fn transition_weight_of_a_batch_is_the_largest_of_its_rows() {
    let spec = Spec { b: 2, t: 60, decay: Decay::Slow, beta: BetaKind::Small, ..Spec::default() };
    let case = spec.generate();
    let inputs = case.inputs();
    let cuts = [0, 20, 20, 45, 60];
    let both = transition_weight(&Problem::new(&inputs, None).unwrap(), &cuts);
    let rows: Vec<_> = (0..2)
        .map(|b| {
            let mut row = inputs.clone();
            (row.q, row.k, row.v) = (row.q.rows(b, b + 1), row.k.rows(b, b + 1), row.v.rows(b, b + 1));
            if let Gate::Given(g) = &mut row.gate {
                *g = g.rows(b, b + 1);
            }
            if let Beta::Given(beta) = &mut row.beta {
                *beta = beta.rows(b, b + 1);
            }
            transition_weight(&Problem::new(&row, None).unwrap(), &cuts)
        })
        .collect();
    for rank in 0..4 {
        for head in 0..spec.hv {
            assert_eq!(both.ranks[rank][head], rows[0].ranks[rank][head].max(rows[1].ranks[rank][head]));
        }
    }
    assert_eq!(both.ranks[0], [0.0, 0.0], "the first rank receives nothing");
    assert_eq!(both.ranks[1], [0.0, 0.0], "an empty rank has no piece");
    assert!(both.max_forwarded > 0.1 && both.max_ending > 0.1, "{both:?}");
}

/// Packed: one sequence arrives and ends inside a rank, the next one starts there: the rank forwards nothing received.
#[test]
fn a_sequence_that_ends_inside_a_rank_counts_as_ending_only() {
    let spec = Spec {
        t: 100,
        cu_seqlens: Some(vec![0, 70, 70, 100]),
        decay: Decay::Slow,
        beta: BetaKind::Small,
        ..Spec::default()
    };
    let case = spec.generate();
    let p = Problem::new(&case.inputs(), case.cu_seqlens()).unwrap();
    let weight = transition_weight(&p, &[0, 50, 100]);
    assert_eq!(weight.ranks, [[0.0; 2], [0.0; 2]]);
    assert_eq!((weight.max, weight.max_forwarded), (0.0, 0.0));
    assert!(weight.max_ending > 0.1, "{weight:?}");
}

#[test]
fn empty_sequences_hand_their_initial_state_through() {
    let spec = Spec { t: 20, cu_seqlens: Some(vec![0, 0, 20, 20]), initial_state: true, ..Spec::default() };
    let case = spec.generate();
    let p = Problem::new(&case.inputs(), case.cu_seqlens()).unwrap();
    let size = spec.k * spec.v;
    for Outputs { ht, .. } in [recurrent(&p), chunked(&p, 16)] {
        for (n, passes) in [(0, true), (1, false), (2, true)] {
            for head in 0..spec.hv {
                let found = &ht[(n * spec.hv + head) * size..][..size];
                assert_eq!(found == p.initial_state(n, head), passes, "sequence {n}");
            }
        }
    }
}
