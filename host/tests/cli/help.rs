//! Help and usage errors.

use crate::{deltalink, stderr, stdout, succeeds};

#[test]
fn help_teaches() {
    insta::assert_snapshot!("help", succeeds(&deltalink(&["--help"])));
    insta::assert_snapshot!("help_run", succeeds(&deltalink(&["help", "run"])));
    insta::assert_snapshot!("help_verify", succeeds(&deltalink(&["help", "verify"])));
    insta::assert_snapshot!("help_doctor", succeeds(&deltalink(&["help", "doctor"])));
    insta::assert_snapshot!("help_bench_comm", succeeds(&deltalink(&["help", "bench", "comm"])));
}

#[test]
fn the_version_is_told() {
    assert_eq!(succeeds(&deltalink(&["--version"])), format!("deltalink {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn usage_errors_have_exit_code_2() {
    for (args, reason) in [
        (&["compute"][..], "unrecognized subcommand 'compute'"),
        (&["run", "--pes", "many"], "invalid value 'many' for '--pes <P>'"),
        (&["run", "--chunk", "48"], "[possible values: 16, 32, 64]"),
        (&["run", "--timeout", "0"], "0 is not in 1..=86400"),
        (&["verify", "--pes", "9"], "9 is not in 1..=8"),
        (&["verify", "--case", "99999"], "there is no case 99999; cases are numbered 0 to"),
        (&["plan", "--pes", "4", "--tokens", "3", "--heads", "1"], "there are only 3 tokens to share out"),
        (&["bench", "comm", "--sizes", "48"], "a message has a power of two of bytes, from 16 to 1M"),
        (&["bench", "comm", "--blocks", "129"], "129 is not in 1..=128"),
        (&["bench", "comm", "--pes", "5"], "5 PEs cannot be paired"),
        (&["trace", "absent.json"], "cannot read the trace absent.json"),
    ] {
        let output = deltalink(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        let message = stderr(&output);
        assert!(message.starts_with("error: ") && message.contains(reason), "{args:?}: {message}");
        assert_eq!(stdout(&output), "", "{args:?}");
    }
}

#[test]
fn the_other_subcommands_are_there() {
    let plan = succeeds(&deltalink(&["plan", "--pes", "2", "--tokens", "1000", "--heads", "2", "--json", "-"]));
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["plan"]["cuts"], serde_json::json!([0, 500, 1000]));
    assert!(succeeds(&deltalink(&["doctor"])).contains("The CPU back end can run here."));
}
