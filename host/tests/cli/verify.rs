//! `deltalink verify` on PEs of every kind.

use std::process::Output;

use serde_json::{Value, json};

use crate::processes::{launched, mpiexec};
use crate::{deltalink, stderr, stdout, succeeds};

fn report(output: &Output) -> Value {
    serde_json::from_str(&succeeds(output)).unwrap_or_else(|e| panic!("{e}: {}", stdout(output)))
}

/// Few enough cases for a test, of every group.
const FEW: [&str; 8] = ["verify", "--quick", "--seed", "3", "--device", "cpu", "--json", "-"];

#[test]
fn processes_compute_the_cases_that_threads_do() {
    let few = |extra: &[&'static str]| report(&deltalink(&[&FEW[..], &["--pes", "2,3"], extra].concat()));
    let (threads, processes) = (few(&[]), few(&["--world", "processes"]));
    for (report, world, count) in [(&threads, "threads", Value::Null), (&processes, "processes", json!(3))] {
        assert_eq!((&report["passed"], &report["world"], &report["processes"]), (&true.into(), &world.into(), &count));
        assert_eq!((&report["pes"], &report["left_out"]), (&json!([2, 3]), &json!(0)));
    }
    // The same cases with the same results: a PE computes the same whatever it is.
    assert!(threads["cases"].as_u64().unwrap() > 50, "{threads}");
    for field in ["cases", "bitwise", "groups", "transition_weight"] {
        assert_eq!(threads[field], processes[field], "{field}");
    }
}

#[test]
fn a_launcher_bounds_the_pes_of_the_cases() {
    let Some(mpiexec) = mpiexec() else { return };
    let report = report(&launched(&mpiexec, "2", &FEW));
    assert_eq!((&report["passed"], &report["processes"]), (&true.into(), &2.into()));
    assert_eq!(report["pes"], json!([1, 2]));
    assert!(report["left_out"].as_u64().unwrap() > 100, "{report}");
    let text = stdout(&launched(&mpiexec, "2", &["verify", "--quick", "--pes", "2", "--device", "cpu"]));
    assert!(text.contains("PEs were processes, 2 in all, on cpu; cases ran on 2 PEs."), "{text}");
}

#[test]
fn cases_that_a_launchers_world_cannot_hold_are_refused_once() {
    let Some(mpiexec) = mpiexec() else { return };
    for (args, reason) in [
        (&["verify", "--pes", "2,3"][..], "what --pes 3 asks for is on 3 PEs, the launcher started 2"),
        (&["verify", "--case", "400"], "case 400 is on 6 PEs, the launcher started 2"),
        (&["verify", "--case", "99999"], "there is no case 99999"),
    ] {
        let output = launched(&mpiexec, "2", args);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        let message = format!("{}{}", stdout(&output), stderr(&output));
        assert_eq!(message.matches(reason).count(), 1, "{args:?}: {message}");
    }
}
