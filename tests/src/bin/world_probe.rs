//! A PE, and a launcher of PEs, for the tests of worlds made of processes.
//!
//! `world-probe launch SIZE SCENARIO TIMEOUT_MS` starts PEs of this program and prints how they ended;
//! `world-probe pe SCENARIO TIMEOUT_MS` is one. Each prints one line per PE: `PE RANK ok: ..` or `PE RANK error: ..`.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use deltalink::world::{Launch, Pe, WorldOptions};
use deltalink_tests::world::{HEAP_BYTES, scenario};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["launch", size, scenario, timeout] => launch(number(size) as usize, scenario, timeout),
        ["pe", scenario, timeout] => pe(scenario, timeout),
        _ => panic!("usage: world-probe launch SIZE SCENARIO TIMEOUT_MS | pe SCENARIO TIMEOUT_MS"),
    }
}

/// Writes a line in one piece, so that the lines of PEs that share a pipe do not mix.
fn say(line: &str) {
    std::io::stdout().write_all(format!("{line}\n").as_bytes()).expect("standard output is open");
}

fn number(text: &str) -> u64 {
    text.parse().expect("a number")
}

fn options(timeout: &str) -> WorldOptions {
    WorldOptions { heap_bytes: HEAP_BYTES, timeout: Duration::from_millis(number(timeout)) }
}

fn launch(size: usize, scenario: &str, timeout: &str) -> ExitCode {
    let program = std::env::current_exe().expect("own path");
    let launch = Launch::new(size, &options(timeout), program).args(["pe", scenario, timeout]);
    // Spent in full where a PE does not stop by itself; elsewhere all have said their last long before.
    let grace = if matches!(scenario, "never-joins" | "deaf") { 3 } else { 60 };
    match launch.grace(Duration::from_secs(grace)).run() {
        Ok(report) => {
            say(&format!("world: {}", report.to_string().replace('\n', ";")));
            if report.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            say(&format!("world: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn pe(name: &str, timeout: &str) -> ExitCode {
    let mut options = options(timeout);
    const RANKS: [&str; 5] = ["DELTALINK_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID"];
    let rank = RANKS.into_iter().find_map(|name| std::env::var(name).ok());
    let size = ["DELTALINK_SIZE", "PMI_SIZE"].into_iter().find_map(|name| std::env::var(name).ok());
    let last = rank.as_ref().is_some_and(|rank| Some(number(rank) + 1) == size.as_deref().map(number));
    // What happens before a PE joins is no scenario of a joined PE.
    match name {
        "never-joins" if last => std::thread::sleep(Duration::from_secs(3600)),
        "other-options" if last => options.heap_bytes *= 2,
        "quits-unjoined" if last => return ExitCode::from(7),
        _ => {}
    }
    let pe = match Pe::from_environment(&options) {
        Ok(Some(pe)) => pe,
        Ok(None) => {
            say("world: this process is no PE");
            return ExitCode::from(3);
        }
        Err(error) => {
            say(&format!("PE {} error: {error}", rank.unwrap_or_default()));
            return ExitCode::FAILURE;
        }
    };
    if matches!(name, "never-joins" | "other-options" | "quits-unjoined") {
        say(&format!("PE {} ok: joined", pe.rank()));
        return ExitCode::SUCCESS;
    }
    let scenario = scenario(name).expect("a known scenario");
    let ran = pe.run(|pe| {
        let outcome = scenario(pe);
        match &outcome {
            Ok(text) => say(&format!("PE {} ok: {text}", pe.rank())),
            Err(error) => say(&format!("PE {} error: {error}", pe.rank())),
        }
        outcome
    });
    if ran.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
