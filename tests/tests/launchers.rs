//! Worlds under launchers that only tell each process its place: Open MPI, Slurm and torchrun, played by a spawner that
//! sets their variables, and Open MPI itself where it is installed.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const PROBE: &str = env!("CARGO_BIN_EXE_world-probe");
/// Timeout of worlds in which no wait should reach it.
const LONG: Duration = Duration::from_secs(150);
/// Timeout of worlds in which a wait must reach it.
const SHORT: Duration = Duration::from_millis(400);

/// Variables that would tell a process of another world, this test's own included.
const FOREIGN: [&str; 24] = [
    "DELTALINK_RANK",
    "DELTALINK_SIZE",
    "DELTALINK_HEAP",
    "DELTALINK_PORT",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_FD",
    "PMI_PORT",
    "PMI_ID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "SLURM_NNODES",
];

/// What a launcher tells the process that is to be PE `rank` of `size`.
type Variables = dyn Fn(usize, usize) -> Vec<(&'static str, String)>;

fn open_mpi(rank: usize, size: usize) -> Vec<(&'static str, String)> {
    vec![
        ("OMPI_COMM_WORLD_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_SIZE", size.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", size.to_string()),
        ("OMPI_MCA_ess_base_jobid", "3551002625".into()),
    ]
}

fn slurm(rank: usize, size: usize) -> Vec<(&'static str, String)> {
    vec![
        ("SLURM_PROCID", rank.to_string()),
        ("SLURM_NTASKS", "64".into()),
        ("SLURM_STEP_NUM_TASKS", size.to_string()),
        ("SLURM_JOB_ID", "4711".into()),
        ("SLURM_STEP_ID", "2".into()),
        ("SLURM_NNODES", "1".into()),
    ]
}

fn torchrun(rank: usize, size: usize) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("LOCAL_WORLD_SIZE", size.to_string()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", "29500".into()),
    ]
}

/// A port that nobody listens on. It lies below those that the system hands out by itself, so that nobody is given it before
/// it is used here, and each call returns another one.
fn free_port() -> u16 {
    const FIRST: u32 = 20_000;
    const COUNT: u32 = 10_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let begin = std::process::id();
    (0..COUNT)
        .map(|_| FIRST + (begin + NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT)
        .map(|port| u16::try_from(port).expect("below 30000"))
        .find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok())
        .expect("a free port")
}

fn start(
    scenario: &str,
    timeout: Duration,
    variables: Vec<(&'static str, String)>,
    runtime: &tempfile::TempDir,
) -> Child {
    let mut command = Command::new(PROBE);
    for name in FOREIGN {
        command.env_remove(name);
    }
    command.args(["pe", scenario, &timeout.as_millis().to_string()]).envs(variables);
    command.env("XDG_RUNTIME_DIR", runtime.path()).stdout(Stdio::piped()).spawn().expect("starts")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn finish(children: Vec<Child>) -> Vec<Output> {
    children.into_iter().map(|child| child.wait_with_output().expect("ends")).collect()
}

/// Every PE succeeds, and nothing stays behind in the runtime folder.
fn all_succeed(scenario: &str, size: usize, variables: &Variables) {
    let runtime = tempfile::tempdir().expect("folder");
    // The last first: whoever comes early has to wait for PE 0.
    let ranks = (0..size).rev();
    let outputs = finish(ranks.map(|rank| start(scenario, LONG, variables(rank, size), &runtime)).collect());
    for output in &outputs {
        assert!(output.status.success(), "{scenario} with {size}: {}", text(output));
    }
    assert_eq!(std::fs::read_dir(runtime.path()).expect("folder").count(), 0, "a note stayed behind");
}

#[test]
fn open_mpis_variables_make_a_world() {
    for size in [1, 2, 4] {
        all_succeed("put-signal", size, &open_mpi);
        all_succeed("gathers", size, &open_mpi);
    }
}

#[test]
fn slurms_variables_make_a_world() {
    for size in [2, 4] {
        all_succeed("put-signal", size, &slurm);
        all_succeed("heap-reuse", size, &slurm);
    }
}

#[test]
fn torchruns_variables_make_a_world() {
    for size in [1, 2, 4] {
        let port = free_port().to_string();
        let with_port = move |rank, size| [torchrun(rank, size), vec![("DELTALINK_PORT", port.clone())]].concat();
        all_succeed("put-signal", size, &with_port);
        all_succeed("gathers", size, &with_port);
    }
}

#[test]
fn torchruns_own_variables_are_enough() {
    // What torchrun itself sets, with the name of a host; the PEs meet beside its port, which it keeps for its own use.
    let master = (free_port() - 77).to_string();
    let variables = move |rank: usize, size: usize| {
        let mut variables = torchrun(rank, size);
        variables.retain(|(name, _)| !name.starts_with("MASTER_"));
        variables.extend([("MASTER_ADDR", "localhost".to_owned()), ("MASTER_PORT", master.clone())]);
        variables.push(("LOCAL_RANK", rank.to_string()));
        variables
    };
    all_succeed("put-signal", 3, &variables);
}

#[test]
fn a_step_of_slurm_without_its_number_of_tasks_uses_the_jobs() {
    let variables = |rank: usize, size: usize| {
        let mut variables = slurm(rank, size);
        variables.retain(|(name, _)| !matches!(*name, "SLURM_STEP_NUM_TASKS" | "SLURM_NTASKS" | "SLURM_STEP_ID"));
        // As older versions name the step.
        variables.extend([("SLURM_NTASKS", size.to_string()), ("SLURM_STEPID", "0".to_owned())]);
        variables
    };
    all_succeed("gathers", 3, &variables);
}

#[test]
fn processes_of_one_rank_are_told_that_they_are_two() {
    // As when a launcher's variables are inherited by two processes: both take themselves for PE 1.
    let runtime = tempfile::tempdir().expect("folder");
    let ranks = [0, 1, 1];
    // PE 2 never comes. The other three must have started before their time is up.
    let outputs = finish(ranks.map(|rank| start("barriers", SHORT * 15, slurm(rank, 3), &runtime)).into());
    let said: String = outputs.iter().map(text).collect();
    assert!(outputs.iter().any(|output| !output.status.success()), "{said}");
    assert!(said.contains("PE 1 has already joined, as process"), "{said}");
}

#[test]
fn a_world_in_the_same_job_follows_one_that_was_killed() {
    let runtime = tempfile::tempdir().expect("folder");
    // PE 0 posts its note and waits for a PE that does not come, until it is killed.
    let mut first = start("barriers", LONG, open_mpi(0, 2), &runtime);
    let begun = Instant::now();
    // A draft is renamed when it is complete.
    let posted = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.is_ok_and(|entry| entry.path().extension().is_none_or(|extension| extension != "new"))
    };
    while !std::fs::read_dir(runtime.path()).expect("folder").any(posted) {
        assert!(begun.elapsed() < LONG, "no note");
        std::thread::sleep(Duration::from_millis(5));
    }
    first.kill().expect("killed");
    first.wait().expect("ended");
    assert_eq!(std::fs::read_dir(runtime.path()).expect("folder").count(), 1, "a note stayed behind");
    // Started first, so that it meets the old note; if it is slow it meets the new one, which is as good.
    let late = start("put-signal", LONG, open_mpi(1, 2), &runtime);
    std::thread::sleep(Duration::from_millis(100));
    let outputs = finish(vec![late, start("put-signal", LONG, open_mpi(0, 2), &runtime)]);
    for output in &outputs {
        assert!(output.status.success(), "{}", text(output));
    }
    assert_eq!(std::fs::read_dir(runtime.path()).expect("folder").count(), 0);
}

#[test]
fn a_pe_that_is_alone_says_who_is_missing() {
    let runtime = tempfile::tempdir().expect("folder");
    let alone = |variables: Vec<_>| {
        let output = finish(vec![start("barriers", SHORT, variables, &runtime)]).remove(0);
        assert!(!output.status.success());
        text(&output)
    };
    let said = alone(open_mpi(1, 2));
    assert!(said.contains("the PEs cannot meet at") && said.contains("did PE 0 start?"), "{said}");
    assert!(alone(slurm(0, 2)).contains("(PE 1 never joined the world)"));
    let port = || vec![("DELTALINK_PORT", free_port().to_string())];
    assert!(alone([torchrun(0, 2), port()].concat()).contains("PE 1 did not ask within 400.0ms"));
    assert!(alone([torchrun(1, 2), port()].concat()).contains("no answer of PE 0 within 400.0ms"));
}

#[test]
fn the_port_that_is_taken_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("bound").port().to_string();
    let runtime = tempfile::tempdir().expect("folder");
    let variables = [torchrun(0, 2), vec![("DELTALINK_PORT", port.clone())]].concat();
    let output = finish(vec![start("barriers", LONG, variables, &runtime)]).remove(0);
    let said = text(&output);
    assert!(said.contains(&format!("127.0.0.1:{port}")) && said.contains("DELTALINK_PORT"), "{said}");
}

#[test]
fn several_machines_are_refused_at_once() {
    let runtime = tempfile::tempdir().expect("folder");
    let mut variables = torchrun(0, 4);
    variables.retain(|(name, _)| *name != "LOCAL_WORLD_SIZE");
    variables.push(("LOCAL_WORLD_SIZE", "2".into()));
    let begun = Instant::now();
    let output = finish(vec![start("barriers", LONG, variables, &runtime)]).remove(0);
    assert!(begun.elapsed() < LONG / 2);
    assert!(text(&output).contains("torchrun has spread the 4 PEs over several machines"), "{}", text(&output));
}

/// Open MPI's own launcher, if it is there; in CI it must be.
fn mpirun() -> Option<&'static str> {
    let is_open_mpi = |program: &&str| {
        let version = Command::new(program).arg("--version").output();
        // Called by its name in Debian, it says "OpenRTE".
        version.is_ok_and(|output| ["Open MPI", "OpenRTE"].iter().any(|name| text(&output).contains(name)))
    };
    let found = ["mpirun.openmpi", "mpirun"].into_iter().find(is_open_mpi);
    let required = std::env::var("DELTALINK_REQUIRE_OPENMPI").is_ok_and(|value| value == "1");
    assert!(
        found.is_some() || !required,
        "Open MPI's mpirun does not run, and DELTALINK_REQUIRE_OPENMPI=1 asks for it"
    );
    if found.is_none() {
        println!("skipping: no mpirun of Open MPI here (install openmpi-bin to test worlds started by it)");
    }
    found
}

fn under_open_mpi(program: &str, size: usize, scenario: &str) -> Output {
    let mut command = Command::new(program);
    for name in FOREIGN {
        command.env_remove(name);
    }
    // Root and more processes than cores: as in a container.
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", &size.to_string()]);
    command.args([PROBE, "pe", scenario, &LONG.as_millis().to_string()]);
    command.output().expect("runs")
}

#[test]
fn open_mpi_starts_a_world() {
    let Some(program) = mpirun() else { return };
    for size in [1, 4] {
        for scenario in ["put-signal", "gathers"] {
            let output = under_open_mpi(program, size, scenario);
            assert!(output.status.success(), "{scenario} with {size}: {output:?}");
            assert_eq!(text(&output).matches(" ok: ").count(), size, "{output:?}");
        }
    }
}

#[test]
fn open_mpi_stops_a_world_in_which_a_pe_fails() {
    let Some(program) = mpirun() else { return };
    let begun = Instant::now();
    let output = under_open_mpi(program, 3, "fails");
    assert!(!output.status.success() && begun.elapsed() < LONG / 2, "{output:?}");
    assert!(text(&output).contains("the disk is full"), "{output:?}");
}
