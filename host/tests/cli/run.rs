//! `deltalink run` and `deltalink verify` with PEs as threads.

use std::io::Read;
use std::process::Stdio;

use deltalink::file::InputFile;
use serde_json::Value;

use crate::files::{Problem, argument};
use crate::{command, deltalink, stderr, succeeds};

/// Names and types of everything in `value`, one line each; lists by their first element.
fn schema(path: &str, value: &Value, lines: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| schema(&format!("{path}.{name}"), value, lines))
        }
        Value::Array(items) if items.is_empty() => lines.push(format!("{path}[]: empty")),
        Value::Array(items) => schema(&format!("{path}[]"), &items[0], lines),
        Value::Null => lines.push(format!("{path}: null")),
        Value::Bool(_) => lines.push(format!("{path}: bool")),
        Value::Number(number) if number.is_f64() => lines.push(format!("{path}: float")),
        Value::Number(_) => lines.push(format!("{path}: integer")),
        Value::String(_) => lines.push(format!("{path}: string")),
    }
}

/// The text with what differs from run to run made equal: in tables, times and errors become # and columns are one space
/// apart.
fn redacted(text: &str) -> String {
    let word = |word: &str| match word {
        "us" | "ms" | "s" => None,
        _ if word.starts_with('─') => Some("─".to_owned()),
        // Whole numbers are counts, and those the same every time.
        _ if word.starts_with(|c: char| c.is_ascii_digit()) && word.contains(['.', 'e']) => Some("#".to_owned()),
        _ => Some(word.to_owned()),
    };
    let line = |line: &str| match line.strip_prefix("  ") {
        Some(row) => format!("  {}\n", row.split_whitespace().filter_map(word).collect::<Vec<_>>().join(" ")),
        None => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[test]
fn without_arguments_the_bundled_inputs_are_checked() {
    let output = deltalink(&[]);
    insta::assert_snapshot!("run", redacted(&succeeds(&output)));
    // Nothing but the report where standard error is no terminal.
    assert_eq!(stderr(&output), "");
}

#[test]
fn segments_are_walked_in_as_many_parts_as_are_asked_for() {
    let run = |segments: &str, mode: &str| {
        deltalink(&["run", "--op", "kda", "--pes", "2", "--chunk", "16", "--segments", segments, "--mode", mode])
    };
    let told = ", segments in up to 3 parts\n";
    let output = succeeds(&run("3", "overlap"));
    assert!(output.contains(told), "{output}");
    assert!(!succeeds(&run("1", "overlap")).contains("parts"));
    assert!(!succeeds(&run("3", "exact")).contains("parts"));
    let refused = run("0", "overlap");
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("it must be auto, or a number of parts from 1 on"), "{}", stderr(&refused));
}

#[test]
fn the_report_is_for_programs_too() {
    let problem = Problem::new(40);
    let file = argument(&problem.path("report.json"));
    let table = succeeds(&deltalink(&["run", "--op", "kda", "--json", &file]));
    assert!(table.contains("f64 reference"), "{table}");
    let report: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let mut lines = Vec::new();
    schema("", &report, &mut lines);
    insta::assert_snapshot!("run_json", lines.join("\n"));

    let alone = succeeds(&deltalink(&["run", "--json", "-"]));
    let all: Value = serde_json::from_str(&alone).unwrap();
    let inputs: Vec<&str> = all.as_array().unwrap().iter().map(|input| input["input"].as_str().unwrap()).collect();
    assert_eq!(inputs, ["b_kda_story_t512_two_heads", "b_gdn_story_t512_two_heads", "b_gdn_story_t256_slow"]);
    // S [64,64] of 2 heads goes to 3 PEs; the second one sends M as well, to 2.
    let sent = |input: usize, pe: usize| all[input]["pe"][pe]["bytes_sent"].as_u64().unwrap();
    assert_eq!([sent(0, 0), sent(0, 1), sent(0, 3)], [3 * 2 * 64 * 64 * 4, 2 * 2 * 2 * 64 * 64 * 4, 0]);
    assert!(all[0]["transition_weight"].as_f64().unwrap() > 0.1, "{}", all[0]["transition_weight"]);
}

#[test]
fn every_mode_type_and_chunk_is_right() {
    for (mode, dtype, chunk, pes) in [
        ("bulk", "bf16", "32", "3"),
        ("exact", "f16", "16", "8"),
        ("overlap", "bf16", "64", "2"),
        ("exact", "f32", "64", "1"),
    ] {
        let args = ["run", "--mode", mode, "--dtype", dtype, "--chunk", chunk, "--pes", pes, "--json", "-"];
        let reports: Value = serde_json::from_str(&succeeds(&deltalink(&args))).unwrap();
        for report in reports.as_array().unwrap() {
            assert_eq!(
                (&report["mode"], &report["dtype"], &report["passed"]),
                (&mode.into(), &dtype.into(), &true.into())
            );
            assert_eq!(report["pes"].to_string(), pes);
            // The cuts of 512 and 256 tokens are at multiples of all chunk lengths used with exact.
            if mode == "exact" {
                assert_eq!(report["error_vs_one_pe"]["o"]["max_abs"], 0.0, "{report}");
            }
        }
    }
}

#[test]
fn results_are_written_and_can_be_read() {
    let problem = Problem::new(50).offsets("cu_seqlens", &[0, 10, 10, 50]);
    let (first, second) = (problem.path("first.safetensors"), problem.path("second.safetensors"));
    let input = problem.input();
    succeeds(&deltalink(&["run", "--input", &input, "--output", &argument(&first), "--cuts", "13,30", "--checked"]));
    succeeds(&deltalink(&["run", "--input", &input, "--output", &argument(&second), "--world", "processes"]));
    let shapes = |path| {
        let bytes = std::fs::read(path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        ["o", "ht"].map(|name| tensors.tensor(name).unwrap().shape().to_vec())
    };
    assert_eq!(shapes(&first), [vec![1, 50, 2, 16], vec![3, 2, 16, 16]]);
    assert_eq!(shapes(&first), shapes(&second));
}

#[test]
fn what_the_file_expects_is_compared_too() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/c_kda_p4_varlen.safetensors");
    let cuts = InputFile::load(golden).unwrap().cuts().unwrap();
    let report = deltalink(&["run", "--input", golden, "--json", "-"]);
    let report: Value = serde_json::from_str(&succeeds(&report)).unwrap();
    let tokens: Vec<u64> =
        report[0]["pe"].as_array().unwrap().iter().map(|pe| pe["tokens"].as_u64().unwrap()).collect();
    let want: Vec<u64> = cuts.windows(2).map(|cut| (cut[1] - cut[0]) as u64).collect();
    assert_eq!(tokens, want, "the file's own cuts are used");
    assert!(report[0]["error_vs_file"]["o"]["rel_rms"].as_f64().unwrap() < 1e-5);
    assert!(report[0]["error_vs_file"]["ht"]["rel_rms"].as_f64().unwrap() < 1e-5);

    // bf16 cannot hold these inputs: what the file expects is then the result of another problem.
    let problem = Problem::new(20).tensor("o", &[1, 20, 2, 16], 0.5);
    let rounded = deltalink(&["run", "--input", &problem.input(), "--dtype", "bf16", "--json", "-"]);
    let report: Value = serde_json::from_str(&succeeds(&rounded)).unwrap();
    assert_eq!(report[0]["error_vs_file"], serde_json::json!({}));
}

#[test]
fn a_wrong_result_is_shown_and_has_exit_code_1() {
    let problem = Problem::new(20).tensor("o", &[1, 20, 2, 16], 0.5);
    for world in ["threads", "processes"] {
        let output = deltalink(&["run", "--input", &problem.input(), "--world", world]);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        let text = crate::stdout(&output);
        assert!(text.contains("WRONG") && text.contains("against the file: o: relative RMS error"), "{text}");
        assert!(text.contains("640 of 640 elements are off; first o[0, 0, 0, 0] is"), "{text}");
        assert_eq!(stderr(&output), "");
    }
}

#[test]
fn the_timeline_has_all_pes_on_one_axis() {
    let folder = tempfile::tempdir().unwrap();
    let path = argument(&folder.path().join("trace.json"));
    for world in ["threads", "processes"] {
        succeeds(&deltalink(&["run", "--op", "kda", "--pes", "3", "--world", world, "--trace", &path]));
        let figures: Value = serde_json::from_str(&succeeds(&deltalink(&["trace", &path, "--json", "-"]))).unwrap();
        assert_eq!(figures["pes"].as_array().unwrap().len(), 3, "{world}");
        let heads = &figures["heads"];
        let has = |head: &Value, name: &str| head[name].is_u64();
        for head in heads["times"].as_array().unwrap() {
            assert!(has(head, "scan_end_ns"), "{world}: {head}");
            // The last PE sends nothing, the first awaits nothing.
            assert_eq!(has(head, "put_begin_ns"), head["pe"] != 2, "{world}: {head}");
            assert_eq!(has(head, "seen_ns") && has(head, "corrected_ns"), head["pe"] != 0, "{world}: {head}");
            if head["pe"] != 0 {
                assert!(head["seen_ns"].as_u64() <= head["corrected_ns"].as_u64(), "{world}: {head}");
            }
        }
        // On axes of their own, PEs would be apart by the time between their starts, and messages would arrive before they leave.
        assert_eq!(heads["sent"], 4, "{world}: {heads}");
        assert!(heads["soonest_ns"].as_i64().unwrap() >= 0, "{world}: {heads}");
    }
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let mut run = command(&["run", "--op", "kda"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(run.stdout.take());
    let mut message = String::new();
    run.stderr.take().unwrap().read_to_string(&mut message).unwrap();
    assert_eq!((run.wait().unwrap().code(), message.as_str()), (Some(0), ""));
}

#[test]
fn verify_checks_a_case() {
    let report = succeeds(&deltalink(&["verify", "--case", "0", "--json", "-"]));
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["cases"], &report["passed"]), (&1.into(), &true.into()));
    let table = succeeds(&deltalink(&["verify", "--case", "1", "--seed", "3"]));
    assert!(table.contains("All 1 cases are right (seed 3)."), "{table}");
}

/// The errors of gradients, overall and by PE, of every input.
#[test]
fn gradients_are_checked_too() {
    for world in ["threads", "processes"] {
        let args = ["run", "--backward", "--recompute", "states", "--pes", "3", "--world", world, "--json", "-"];
        let all: Value = serde_json::from_str(&succeeds(&deltalink(&args))).unwrap();
        for report in all.as_array().unwrap() {
            assert_eq!(report["passed"], true, "{report}");
            let raw = report["error"].get("dg_raw").is_some();
            let mut names = vec!["dq", "dk", "dv", "dbeta", if raw { "dg_raw" } else { "dg" }];
            for what in ["error", "error_vs_one_pe", "error_vs_file"] {
                let parameters: &[&str] = if raw { &["dA_log", "ddt_bias"] } else { &[] };
                for name in names.iter().chain(parameters) {
                    let error =
                        report[what][name]["rel_rms"].as_f64().unwrap_or_else(|| panic!("{what} of {name}: {report}"));
                    assert!(error < 1e-4, "{what} of {name}: {error}");
                }
            }
            names.sort_unstable();
            for pe in report["pe"].as_array().unwrap() {
                let found: Vec<&String> = pe["error"].as_object().unwrap().keys().collect();
                assert_eq!(found, names, "{pe}");
                assert!(pe["backward"]["saved_bytes"].as_u64().unwrap() > 0, "{pe}");
            }
            let sent = |pe: usize| report["pe"][pe]["backward"]["bytes_sent"].as_u64().unwrap();
            assert!(sent(0) == 0 && sent(1) > 0 && sent(2) > 0, "{report}");
        }
    }
    let text = succeeds(&deltalink(&["run", "--backward", "--op", "kda", "--pes", "2"]));
    for part in ["backward:", "rel. RMS against", "its part on PE 1", "the file"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn gradients_go_to_the_output_and_the_timeline() {
    let problem = Problem::new(40);
    let (output, trace) = (argument(&problem.path("y.safetensors")), argument(&problem.path("trace.json")));
    succeeds(&deltalink(&["run", "--backward", "--op", "kda", "--output", &output, "--trace", &trace]));
    let bytes = std::fs::read(&output).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for (name, shape) in [("dq", vec![1, 512, 2, 64]), ("dbeta", vec![1, 512, 2]), ("dA_log", vec![2])] {
        assert_eq!(tensors.tensor(name).unwrap().shape(), shape, "{name}");
    }
    let trace = std::fs::read_to_string(&trace).unwrap();
    for kernel in ["scan_back", "grad", "states", "fix_out"] {
        assert!(trace.contains(&format!("\"{kernel}\"")), "{kernel} is not in the timeline");
    }
}

#[test]
fn an_input_without_upstream_gradients_is_refused() {
    let problem = Problem::new(40);
    let output = deltalink(&["run", "--backward", "--input", &problem.input()]);
    assert_eq!(output.status.code(), Some(2));
    let message = stderr(&output);
    assert!(message.contains("has no tensor do, the gradient of the loss with respect to o"), "{message}");
}

#[test]
fn verify_checks_gradients() {
    let report: Value =
        serde_json::from_str(&succeeds(&deltalink(&["verify", "--backward", "--case", "412", "--json", "-"]))).unwrap();
    assert_eq!((&report["backward"], &report["passed"]), (&true.into(), &true.into()), "{report}");
    assert!(report["groups"][0]["gradients"].as_f64().unwrap() > 0.0, "{report}");
}

/// `args` as text and as JSON: every repetition had the bits of the first.
fn all_alike(args: &[&str], said: &str, repetitions: u64, backward: bool) {
    let text = succeeds(&deltalink(args));
    assert!(text.contains(said), "{text}");
    let reports: Value = serde_json::from_str(&succeeds(&deltalink(&[args, &["--json", "-"]].concat()))).unwrap();
    for report in reports.as_array().unwrap() {
        let found = &report["repetitions"];
        assert_eq!((&found["repetitions"], &found["different"]), (&repetitions.into(), &0.into()), "{report}");
        assert_eq!(found["backward"], backward, "{report}");
        assert!(found["slowest_us"].as_f64() >= found["median_us"].as_f64(), "{report}");
    }
}

#[test]
fn repetitions_are_held_against_the_first() {
    for world in ["threads", "processes"] {
        let args =
            ["run", "--op", "gdn", "--pes", "3", "--world", world, "--repeat", "6", "--jitter", "500", "--seed", "7"];
        let said = "6 repetitions, delays of up to 500 us (seed 7): all the same bit for bit";
        all_alike(&args, said, 6, false);
    }
}

#[test]
fn repetitions_have_their_gradients_too() {
    for world in ["threads", "processes"] {
        let args =
            ["run", "--op", "kda", "--backward", "--pes", "3", "--world", world, "--repeat", "50", "--jitter", "300"];
        let said = "50 repetitions of forward and backward, delays of up to 300 us (seed 0): all the same bit for bit";
        all_alike(&args, said, 50, true);
    }
}

#[test]
fn puts_are_right_and_reported() {
    let reports: Value =
        serde_json::from_str(&succeeds(&deltalink(&["run", "--transport", "put", "--json", "-"]))).unwrap();
    for report in reports.as_array().unwrap() {
        assert_eq!((&report["passed"], &report["transport"]), (&true.into(), &"put".into()), "{report}");
        assert_eq!(report["waits"], "kernels");
        let peaks: Vec<u64> =
            report["pe"].as_array().unwrap().iter().map(|pe| pe["peak_device_bytes"].as_u64().unwrap()).collect();
        // At least the slots: two of each source, row and block of S alone.
        assert!(peaks.iter().all(|&peak| peak > 4 * 2 * 2 * 64 * 64 * 4), "{report}");
        assert_eq!(report["peak_device_bytes"].as_u64(), peaks.iter().copied().max());
    }
}
