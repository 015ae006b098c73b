//! `deltalink bench`, and the choice of GPUs.

use std::process::Output;

use serde_json::Value;

use crate::processes::{launched, mpiexec};
use crate::{deltalink, stderr, stdout, succeeds};

fn report(output: &Output) -> Value {
    serde_json::from_str(&succeeds(output)).unwrap_or_else(|e| panic!("{e}: {}", stdout(output)))
}

/// Every pair of size and number of blocks has times and rates.
fn complete(report: &Value, world: &str, pes: usize, points: usize) {
    assert_eq!((&report["schema"], &report["benchmark"]), (&1.into(), &"comm".into()));
    assert_eq!((&report["settings"]["world"], &report["settings"]["pes"]), (&world.into(), &pes.into()), "{report}");
    assert_eq!(report["settings"]["device"], "cpu");
    assert!(report["machine"]["cores"].as_u64().unwrap() > 0);
    assert!(report["date"].as_str().unwrap().ends_with('Z'));
    let measured = report["points"].as_array().unwrap();
    assert_eq!(measured.len(), points);
    for point in measured {
        assert!(point["time_us"]["median"].as_f64().unwrap() > 0.0, "{point}");
        assert!(point["bandwidth_gb_s"]["median"].as_f64().unwrap() > 0.0, "{point}");
        assert_eq!(point["time_us"]["samples"], 3 * pes, "{point}");
    }
}

const FEW: [&str; 12] =
    ["bench", "comm", "--device", "cpu", "--sizes", "16,8K", "--blocks", "1", "--repeats", "3", "--json", "-"];

#[test]
fn messages_are_measured_between_threads_and_between_processes() {
    complete(&report(&deltalink(&FEW)), "threads", 2, 2);
    let more = |extra: &[&'static str]| [&FEW[..], extra].concat();
    complete(&report(&deltalink(&more(&["--world", "virtual"]))), "threads", 2, 2);
    complete(&report(&deltalink(&more(&["--world", "processes", "--pes", "4"]))), "processes", 4, 2);
}

#[test]
fn messages_are_measured_under_a_launcher() {
    let Some(mpiexec) = mpiexec() else { return };
    complete(&report(&launched(&mpiexec, "2", &FEW)), "processes", 2, 2);
    for (pes, args, reason) in [
        ("2", &["bench", "comm", "--pes", "4"][..], "--pes asks for 4 PEs, the launcher started 2"),
        ("3", &["bench", "comm"], "3 PEs cannot be paired"),
        ("2", &["bench", "comm", "--world", "threads"], "--world threads was asked for in one of 2 processes"),
    ] {
        let output = launched(&mpiexec, pes, args);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        let message = format!("{}{}", stdout(&output), stderr(&output));
        assert_eq!(message.matches(reason).count(), 1, "{args:?}: {message}");
    }
}

#[test]
fn gpus_are_not_chosen_for_the_cpu() {
    for command in [&["bench", "comm"][..], &["run"], &["verify", "--quick"]] {
        let output = deltalink(&[command, &["--device", "cpu", "--gpus", "0,1"]].concat());
        assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
        assert!(stderr(&output).contains("--gpus [0, 1] was asked for with --device cpu"), "{}", stderr(&output));
    }
}
