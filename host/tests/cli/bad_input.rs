//! What cannot be computed is refused: exit code 2, a message that names it and says what to do, and no output file.

use crate::files::{Problem, argument};
use crate::{deltalink, stderr, stdout};

/// Runs on `input`, which must be refused for reasons that contain all of `reasons`.
fn refused(problem: &Problem, input: &str, more: &[&str], reasons: &[&str]) {
    let output = argument(&problem.path("out.safetensors"));
    let args = [&["run", "--input", input, "--output", &output], more].concat();
    let result = deltalink(&args);
    let message = stderr(&result);
    assert_eq!(result.status.code(), Some(2), "{args:?}: {message}{}", stdout(&result));
    assert!(message.starts_with("error: "), "{message}");
    for reason in reasons {
        assert!(message.contains(reason), "{reason:?} is not in: {message}");
    }
    assert_eq!(stdout(&result), "");
    let left: Vec<_> =
        std::fs::read_dir(problem.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == "in.safetensors"), "left behind: {left:?}");
}

fn refused_as_is(problem: &Problem, reasons: &[&str]) {
    refused(problem, &problem.input(), &[], reasons);
}

#[test]
fn a_file_that_is_not_there() {
    let problem = Problem::new(20);
    let path = argument(&problem.path("absent.safetensors"));
    refused(&problem, &path, &[], &["absent.safetensors does not exist; check the path"]);
}

#[test]
fn a_file_that_is_cut_off() {
    let problem = Problem::new(20);
    let path = problem.input();
    let bytes = std::fs::read(&path).unwrap();
    for length in [0, 5, 200, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        refused(&problem, &path, &[], &["in.safetensors is not a whole safetensors file", "deltalink help run"]);
    }
}

#[test]
fn a_file_of_text() {
    let problem = Problem::new(20);
    let path = problem.input();
    std::fs::write(&path, "q k v\n1 2 3\n").unwrap();
    refused(&problem, &path, &[], &["is not a whole safetensors file", "q, k, v, beta"]);
}

#[test]
fn a_tensor_that_is_missing() {
    let mut problem = Problem::new(20);
    problem.tensors.retain(|(name, _)| *name != "beta");
    refused_as_is(&problem, &["has no tensor beta", "or beta_logits", "It has: g, k, q, v"]);
}

#[test]
fn tensors_of_wrong_ranks_shapes_and_types() {
    refused_as_is(&Problem::new(20).tensor("q", &[20, 2, 16], 0.1), &["q has 3 dimensions", "it needs 4"]);
    refused_as_is(
        &Problem::new(20).tensor("k", &[1, 19, 2, 16], 0.1),
        &["k has shape [1, 19, 2, 16]", "[1, 20, 2, 16]"],
    );
    refused_as_is(&Problem::new(20).tensor("g", &[1, 20, 2, 16], -0.1), &["g has 4 dimensions", "it needs 3"]);
    refused_as_is(
        &Problem::new(20).offsets("q", &[1, 2, 3]),
        &["tensor q has element type I64, it needs F32, BF16 or F16"],
    );
    refused_as_is(
        &Problem::new(20).tensor("o", &[1, 20, 2, 17], 0.0),
        &["tensor o has shape [1, 20, 2, 17], the result has [1, 20, 2, 16]"],
    );
}

#[test]
fn heads_that_do_not_divide_and_heads_that_are_too_wide() {
    let uneven = Problem::new(20).tensor("v", &[1, 20, 3, 16], 0.1);
    refused_as_is(&uneven, &["HV = 3 value heads is not a positive multiple of H = 2"]);
    let wide = Problem::new(20).tensor("q", &[1, 20, 2, 272], 0.1).tensor("k", &[1, 20, 2, 272], 0.1);
    refused_as_is(&wide, &["K = 272", "a multiple of 16 from 16 to 256"]);
}

#[test]
fn packed_sequences_that_do_not_fit_the_tokens() {
    let packed = |offsets: &[i64]| Problem::new(20).offsets("cu_seqlens", offsets);
    refused_as_is(&packed(&[0, 12, 8, 20]), &["cu_seqlens[2] = 8 is below cu_seqlens[1] = 12"]);
    refused_as_is(&packed(&[0, 12]), &["cu_seqlens ends at 12", "T = 20"]);
    refused_as_is(&packed(&[2, 20]), &["cu_seqlens starts at 2"]);
    refused_as_is(&packed(&[0, -3, 20]), &["cu_seqlens holds -3"]);
}

#[test]
fn cuts_that_do_not_cover_the_tokens() {
    let offsets = Problem::new(20).offsets("rank_token_offsets", &[0, 5, 10, 15, 19]);
    refused_as_is(&offsets, &["the offsets cover tokens 0..19, the tensors hold 0..20"]);
    let problem = Problem::new(20);
    let input = problem.input();
    refused(&problem, &input, &["--cuts", "5,21"], &["cut 1 = 21 lies beyond the end, T = 20"]);
    refused(&problem, &input, &["--cuts", "9,5"], &["cut 1 = 5 is below the cut before it, 9"]);
    refused(
        &problem,
        &input,
        &["--cuts", "9", "--pes", "3"],
        &["--cuts has 1 offsets, which make 2 PEs", "give 2 offsets"],
    );
}

#[test]
fn more_pes_than_tokens() {
    let problem = Problem::new(3);
    refused_as_is(&problem, &["4 PEs were asked for and there are only 3 tokens", "ask for at most 3 PEs"]);
}

#[test]
fn a_log_decay_above_zero() {
    let problem = Problem::new(20).element("g", 7, 0.25);
    refused_as_is(&problem, &["g[0, 3, 1] is 0.25; the log decay must be at most 0"]);
}

#[test]
fn values_that_are_not_finite_unless_allowed() {
    let problem = Problem::new(20).element("k", 37, f32::NAN);
    refused_as_is(&problem, &["k[0, 1, 0, 5] is NaN", "--allow-nonfinite"]);
    for world in ["threads", "processes"] {
        let output = argument(&problem.path("out.safetensors"));
        let args = ["run", "--input", &problem.input(), "--allow-nonfinite", "--output", &output, "--world", world];
        let result = deltalink(&args);
        let text = crate::succeeds(&result);
        assert!(text.contains("the input is not finite, so the errors are not judged"), "{text}");
        assert!(problem.path("out.safetensors").exists());
    }
}

#[test]
fn operations_that_do_not_exist() {
    refused_as_is(&Problem::new(20).metadata("op", "mamba"), &["metadata op is \"mamba\", it must be kda or gdn"]);
    let problem = Problem::new(20);
    let input = problem.input();
    refused(
        &problem,
        &input,
        &["--op", "mamba"],
        &["invalid value 'mamba' for '--op <OP>'", "[possible values: kda, gdn]"],
    );
    refused(&problem, &input, &["--op", "kda"], &["in.safetensors holds gdn tensors, --op asks for kda"]);
}

#[test]
fn outputs_that_cannot_be_written() {
    let problem = Problem::new(20);
    let input = problem.input();
    let absent = argument(&problem.path("absent/file"));
    for option in ["--output", "--trace", "--json"] {
        for world in ["threads", "processes"] {
            let result = deltalink(&["run", "--input", &input, option, &absent, "--world", world]);
            let message = stderr(&result);
            assert_eq!(result.status.code(), Some(2), "{option}: {message}");
            assert!(message.contains("absent/file cannot be written"), "{option}: {message}");
            assert_eq!((message.lines().count(), stdout(&result).as_str()), (1, ""), "{message}");
        }
    }
    let folder = argument(problem.folder.path());
    let message = stderr(&deltalink(&["run", "--input", &input, "--output", &folder]));
    assert!(message.contains("cannot be written: is a directory"), "{message}");
}

#[test]
fn a_heap_that_is_too_small() {
    let problem = Problem::new(400).metadata("op", "gdn").tensor("v", &[1, 400, 2, 256], 0.1);
    let problem = problem.tensor("q", &[1, 400, 2, 256], 0.1).tensor("k", &[1, 400, 2, 256], 0.1);
    let more = ["--heap-mib", "1", "--pes", "8"];
    refused(&problem, &problem.input(), &more, &["the symmetric heap has no room", "--heap-mib makes"]);
}
