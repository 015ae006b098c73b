//! PEs that are processes: started by the program itself, or by MPICH's `mpiexec.hydra`.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{command, deltalink, stderr, stdout, succeeds};

fn reports(output: &Output) -> Vec<Value> {
    serde_json::from_str(&succeeds(output)).unwrap_or_else(|e| panic!("{e}: {}", stdout(output)))
}

fn checked(reports: &[Value], pes: usize) {
    assert_eq!(reports.len(), 3);
    for report in reports {
        assert_eq!((&report["world"], &report["passed"]), (&"processes".into(), &true.into()), "{report}");
        assert_eq!(report["pe"].as_array().unwrap().len(), pes);
        let tokens: u64 = report["pe"].as_array().unwrap().iter().map(|pe| pe["tokens"].as_u64().unwrap()).sum();
        assert!(tokens == 512 || tokens == 256, "{report}");
    }
}

#[test]
fn the_program_starts_its_pes() {
    checked(&reports(&deltalink(&["run", "--world", "processes", "--json", "-"])), 4);
    checked(&reports(&deltalink(&["run", "--world", "processes", "--pes", "1", "--json", "-"])), 1);
    // The report is written once.
    let text = succeeds(&deltalink(&["run", "--op", "kda", "--world", "processes", "--pes", "3"]));
    assert_eq!(text.matches("3 PEs (processes)").count(), 1, "{text}");
}

#[test]
fn a_pe_that_dies_is_named() {
    // It would go on for days: the PE is there to be killed, however late.
    let mut command = command(&["run", "--op", "kda", "--world", "processes", "--repeat", "4000000000"]);
    let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pe = pe_of(launcher.id(), 2);
    assert!(Command::new("kill").args(["-KILL", &pe.to_string()]).status().unwrap().success());
    let output = launcher.wait_with_output().unwrap();
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{message}{}", stdout(&output));
    assert!(message.contains("PE 2 failed: its process ended with signal: 9"), "{message}");
    assert_eq!(message.matches("error: ").count(), 1, "{message}");
}

/// Process number of PE `rank` that `launcher` has started.
fn pe_of(launcher: u32, rank: usize) -> u32 {
    let deadline = Instant::now() + Duration::from_secs(120);
    let wanted = format!("DELTALINK_RANK={rank}");
    while Instant::now() < deadline {
        for process in
            std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
        {
            let file = |name: &str| std::fs::read_to_string(format!("/proc/{process}/{name}")).unwrap_or_default();
            // Parent's number: the second field after the name, which is in parentheses.
            let parent =
                file("stat").rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
            if parent == Some(launcher) && file("environ").split('\0').any(|variable| variable == wanted) {
                return process;
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("PE {rank} did not start");
}

/// `mpiexec.hydra`; without it tests are skipped, unless DELTALINK_REQUIRE_MPIEXEC=1.
pub fn mpiexec() -> Option<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).map(|folder| folder.join("mpiexec.hydra")).find(|path| path.is_file());
    if found.is_none() {
        let required = std::env::var("DELTALINK_REQUIRE_MPIEXEC").is_ok_and(|value| value == "1");
        assert!(!required, "DELTALINK_REQUIRE_MPIEXEC=1, and mpiexec.hydra is not on PATH; install MPICH's hydra");
        println!("skipping: mpiexec.hydra is not on PATH; install MPICH's hydra");
    }
    found
}

pub fn launched(mpiexec: &PathBuf, pes: &str, args: &[&str]) -> Output {
    let mut command = Command::new(mpiexec);
    command.args(["-launcher", "fork", "-n", pes, env!("CARGO_BIN_EXE_deltalink")]).args(args);
    command.stdin(Stdio::null()).output().expect("mpiexec.hydra starts")
}

#[test]
fn mpiexec_starts_the_pes() {
    let Some(mpiexec) = mpiexec() else { return };
    checked(&reports(&launched(&mpiexec, "4", &["run", "--json", "-"])), 4);
    checked(&reports(&launched(&mpiexec, "2", &["run", "--pes", "2", "--mode", "exact", "--json", "-"])), 2);
}

#[test]
fn what_mpiexec_started_repeats_and_compares() {
    let Some(mpiexec) = mpiexec() else { return };
    let args = ["run", "--backward", "--op", "kda", "--repeat", "10", "--jitter", "200", "--json", "-"];
    let reports: Vec<Value> = serde_json::from_str(&succeeds(&launched(&mpiexec, "3", &args))).unwrap();
    let found = &reports[0]["repetitions"];
    assert_eq!((&found["repetitions"], &found["different"]), (&10.into(), &0.into()), "{found}");
    assert_eq!((&found["backward"], &reports[0]["passed"]), (&true.into(), &true.into()), "{found}");
}

#[test]
fn what_mpiexec_started_is_told_what_is_wrong_once() {
    let Some(mpiexec) = mpiexec() else { return };
    for (args, reason) in [
        (&["run", "--pes", "3"][..], "--pes asks for 3 PEs, the launcher started 2"),
        (&["run", "--world", "threads"], "--world threads was asked for in one of 2 processes"),
        (&["run", "--input", "absent.safetensors"], "absent.safetensors does not exist"),
        (&["run", "--cuts", "1,2"], "--cuts has 2 offsets, which make 3 PEs, and there are 2"),
    ] {
        let output = launched(&mpiexec, "2", args);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        let message = format!("{}{}", stdout(&output), stderr(&output));
        assert_eq!(message.matches(reason).count(), 1, "{args:?}: {message}");
    }
}
