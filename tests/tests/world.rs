//! One conformance suite for every way to run PEs: as threads, as processes of our launcher, as processes of `mpiexec`.

use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use deltalink::world::{RunError, WorldError, WorldOptions, run_threads};
use deltalink_tests::world::{HEAP_BYTES, scenario};

const PROBE: &str = env!("CARGO_BIN_EXE_world-probe");
/// No world of these tests may take longer, whatever happens in it.
const HANG: Duration = Duration::from_secs(90);
/// Timeout of worlds in which no wait should reach it.
const LONG: Duration = Duration::from_secs(60);
/// Timeout of worlds in which a wait must reach it.
const SHORT: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Threads,
    Processes,
    Mpiexec,
}

/// What a world showed.
#[derive(Debug)]
struct Seen {
    /// By rank; none if the PE ended without a word.
    said: Vec<Option<Result<String, String>>>,
    /// What the caller of the threads or of the launcher was told.
    told: String,
    success: bool,
    took: Duration,
}

impl Seen {
    fn error(&self, rank: usize) -> &str {
        match &self.said[rank] {
            Some(Err(text)) => text,
            other => panic!("PE {rank} said {other:?} instead of an error: {self:#?}"),
        }
    }

    /// All PEs but the last were told, long before the timeout, what `wants` lists.
    fn others_saw(&self, wants: &[&str]) {
        assert!(!self.success, "{self:#?}");
        assert!(self.took < LONG / 2, "a wait ran to its timeout: {self:#?}");
        for rank in 0..self.said.len() - 1 {
            for want in wants {
                assert!(self.error(rank).contains(want), "PE {rank} was not told {want:?}: {self:#?}");
            }
        }
    }

    fn told(&self, want: &str) {
        assert!(self.told.contains(want), "{want:?} is missing: {self:#?}");
    }
}

fn play(how: How, name: &str, size: usize, timeout: Duration) -> Seen {
    let start = Instant::now();
    let mut seen = match how {
        How::Threads => in_threads(name, size, timeout),
        How::Processes => {
            let mut command = Command::new(PROBE);
            command.args(["launch", &size.to_string(), name, &timeout.as_millis().to_string()]);
            in_processes(command, size)
        }
        How::Mpiexec => {
            let mut command = Command::new("mpiexec.hydra");
            command.args(["-n", &size.to_string(), "-launcher", "fork", PROBE, "pe", name]);
            command.arg(timeout.as_millis().to_string());
            in_processes(command, size)
        }
    };
    seen.took = start.elapsed();
    seen
}

fn in_threads(name: &str, size: usize, timeout: Duration) -> Seen {
    let scenario = scenario(name).expect("a known scenario");
    let options = WorldOptions { heap_bytes: HEAP_BYTES, timeout };
    let (done, finished) = mpsc::channel();
    thread::spawn(move || {
        let said = Mutex::new(vec![None; size]);
        let told = run_threads(size, &options, |pe| {
            let outcome = scenario(pe);
            let text = outcome.as_ref().map(String::clone).map_err(ToString::to_string);
            said.lock().expect("no panic while locked")[pe.rank()] = Some(text);
            outcome
        });
        let success = told.is_ok();
        let told = told.map_or_else(|error| error.to_string(), |values| format!("{} values", values.len()));
        let said = said.into_inner().expect("no panic while locked");
        done.send(Seen { said, told, success, took: Duration::ZERO }).expect("awaited");
    });
    finished.recv_timeout(HANG).unwrap_or_else(|_| panic!("{name} with {size} threads hangs"))
}

fn in_processes(mut command: Command, size: usize) -> Seen {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let mut pipe = child.stdout.take().expect("piped");
    let reader = thread::spawn(move || {
        let mut text = String::new();
        pipe.read_to_string(&mut text).map(|_| text)
    });
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("child") {
            break status;
        }
        if start.elapsed() > HANG {
            child.kill().expect("killed");
            panic!("{command:?} hangs");
        }
        thread::sleep(Duration::from_millis(5));
    };
    let text = reader.join().expect("reader").expect("UTF-8");
    let mut seen =
        Seen { said: vec![None; size], told: String::new(), success: status.success(), took: Duration::ZERO };
    for line in text.lines() {
        if let Some(told) = line.strip_prefix("world: ") {
            seen.told = told.into();
        } else if let Some((head, text)) = line.strip_prefix("PE ").and_then(|rest| rest.split_once(": "))
            && let Some((rank, kind)) = head.split_once(' ')
            && let Ok(rank) = rank.parse::<usize>()
        {
            seen.said[rank] = Some(if kind == "ok" { Ok(text.into()) } else { Err(text.into()) });
        }
    }
    seen
}

/// Every PE succeeds; returns what they said.
fn all_succeed(how: How, name: &str, size: usize) -> Vec<String> {
    let seen = play(how, name, size, LONG);
    assert!(seen.success, "{name} with {size}: {seen:#?}");
    let said = |text: &Option<Result<String, String>>| match text {
        Some(Ok(text)) => text.clone(),
        _ => panic!("{name} with {size}: {seen:#?}"),
    };
    seen.said.iter().map(said).collect()
}

fn all_say(how: How, name: &str, size: usize, wants: &[&str]) {
    for text in all_succeed(how, name, size) {
        for want in wants {
            assert!(text.contains(want), "{want:?} is missing in {text:?}");
        }
    }
}

mod suite {
    use super::*;

    const SIZES: [usize; 5] = [1, 2, 3, 4, 8];
    const SEVERAL: [usize; 4] = [2, 3, 4, 8];

    pub fn barriers(how: How) {
        SIZES.iter().for_each(|&size| all_say(how, "barriers", size, &["1000 rounds"]));
    }

    pub fn put_with_signal(how: How) {
        SIZES.iter().for_each(|&size| all_say(how, "put-signal", size, &["200 blocks"]));
    }

    pub fn gathers(how: How) {
        SIZES.iter().for_each(|&size| all_say(how, "gathers", size, &["gathered"]));
    }

    pub fn heap_reuse(how: How) {
        SIZES.iter().for_each(|&size| all_say(how, "heap-reuse", size, &["reused"]));
    }

    pub fn lending(how: How) {
        SIZES.iter().for_each(|&size| all_say(how, "lending", size, &["given back"]));
    }

    pub fn element_types(how: How) {
        SIZES.iter().for_each(|&size| all_say(how, "element-types", size, &["typed"]));
    }

    pub fn out_of_memory(how: How) {
        let wants = [
            "no room for `second`: 1048576 bytes asked for",
            "largest free block has 524288 (524288 of 1048576 bytes in use)",
            "raise heap_bytes",
        ];
        SIZES.iter().for_each(|&size| all_say(how, "out-of-memory", size, &wants));
    }

    pub fn differing_requests(how: How) {
        for size in SEVERAL {
            let last = size - 1;
            let wants = [
                "allocation order differs: PE 0 asks for `first` (allocation 0: 8 x f32 of 4 bytes, at offset 0)",
                &format!("PE {last} for `second` (allocation 0: 8 x f32"),
                "the element type of an allocation differs: PE 0 asks for `x` (allocation 1: 8 x f32",
                &format!("PE {last} for `x` (allocation 1: 8 x u32"),
                "the length of an allocation differs: PE 0 asks for `x` (allocation 2: 8 x f32",
                &format!("PE {last} for `x` (allocation 2: 9 x f32"),
                &format!("PE {last} for `x` (allocation 3: 2097152 x u8 of 1 bytes, for which it has no room"),
            ];
            all_say(how, "differing-requests", size, &wants);
        }
    }

    pub fn differing_frees(how: How) {
        for size in SEVERAL {
            let wants = [
                "because the PEs have dropped different objects before it",
                "PE 0 asks for `next` (allocation 1: 8 x f32 of 4 bytes, at offset 256)",
                &format!("PE {} for `next` (allocation 1: 8 x f32 of 4 bytes, at offset 0)", size - 1),
            ];
            all_say(how, "differing-frees", size, &wants);
        }
    }

    pub fn different_calls(how: How) {
        for size in SEVERAL {
            let last = size - 1;
            let seen = play(how, "diverged", size, LONG);
            let want = format!("PE 0 is in all-gather `lengths`, PE {last} in barrier `step 2`");
            seen.others_saw(&[&want]);
            assert!(seen.error(last).contains(&want), "{seen:#?}");
            seen.told(&want);
        }
    }

    pub fn a_pe_leaves_early(how: How) {
        for size in SEVERAL {
            let seen = play(how, "leaves-early", size, LONG);
            seen.others_saw(&[&format!("PE {}, which has already finished", size - 1), "barrier `one more`"]);
        }
    }

    pub fn a_pe_fails(how: How) {
        for name in ["fails", "fails-polled", "fails-in-allocation"] {
            for size in SEVERAL {
                let last = size - 1;
                let seen = play(how, name, size, LONG);
                seen.others_saw(&[&format!("PE {last} failed: the disk is full")]);
                assert_eq!(seen.error(last), "the disk is full");
                seen.told(&format!("PE {last}"));
                seen.told("the disk is full");
            }
        }
    }

    pub fn a_pe_panics(how: How) {
        for size in SEVERAL {
            let last = size - 1;
            let seen = play(how, "panics", size, LONG);
            seen.others_saw(&[&format!("PE {last} failed: panicked: a bug in PE {last}")]);
            assert_eq!(seen.said[last], None);
            seen.told(&format!("PE {last}"));
            seen.told("a bug in PE");
        }
    }

    pub fn a_pe_is_late(how: How) {
        for size in SEVERAL {
            let last = size - 1;
            let seen = play(how, "late", size, SHORT);
            assert!(!seen.success && seen.took >= SHORT, "{seen:#?}");
            for rank in 0..size {
                let text = seen.error(rank);
                assert!(text.contains(&format!("in barrier `lunch` (step 2) for PE {last}")), "{seen:#?}");
            }
            seen.told(&format!("for PE {last}"));
        }
    }
}

macro_rules! conformance {
    ($($how:ident: $module:ident),*; $tests:tt) => { $( conformance!(@module $how $module $tests); )* };
    (@module $how:ident $module:ident [$($test:ident),* $(,)?]) => {
        mod $module {
            $( #[test] fn $test() { super::suite::$test(super::How::$how); } )*
        }
    };
}

conformance!(Threads: threads, Processes: processes; [
    barriers,
    put_with_signal,
    gathers,
    heap_reuse,
    lending,
    element_types,
    out_of_memory,
    differing_requests,
    differing_frees,
    different_calls,
    a_pe_leaves_early,
    a_pe_fails,
    a_pe_panics,
    a_pe_is_late,
]);

#[test]
fn a_killed_process_is_named_to_all() {
    for size in [2, 4] {
        let last = size - 1;
        let seen = play(How::Processes, "killed", size, LONG);
        seen.others_saw(&[&format!("PE {last} failed: its process ended with signal: 9 (SIGKILL)")]);
        seen.told(&format!("PE {last} failed first: its process ended with signal: 9 (SIGKILL)"));
        seen.told(&format!("PE {last}: signal: 9 (SIGKILL)"));
        seen.told("PE 0: exit status: 1");
    }
}

#[test]
fn a_process_that_exits_in_the_middle_is_named_to_all() {
    let seen = play(How::Processes, "exits", 3, LONG);
    seen.others_saw(&["PE 2, which has already finished", "barrier `after`"]);
}

#[test]
fn a_process_that_never_joins_is_named_and_stopped() {
    for size in [2, 4] {
        let last = size - 1;
        let seen = play(How::Processes, "never-joins", size, SHORT);
        assert!(!seen.success, "{seen:#?}");
        for rank in 0..last {
            let text = seen.error(rank);
            assert!(text.contains(&format!("in the start of the world (step 1) for PE {last}")), "{seen:#?}");
            assert!(text.contains(&format!("(PE {last} never joined the world)")), "{seen:#?}");
        }
        seen.told(&format!("PE {last}: signal: 9 (SIGKILL), killed because it did not stop by itself"));
    }
}

#[test]
fn a_process_that_dies_before_joining_is_named_at_once() {
    let seen = play(How::Processes, "quits-unjoined", 3, LONG);
    seen.others_saw(&["PE 2 failed: its process ended with exit status: 7"]);
}

#[test]
fn a_process_that_does_not_stop_is_killed() {
    let seen = play(How::Processes, "deaf", 2, LONG);
    assert!(!seen.success && seen.took < LONG / 2, "{seen:#?}");
    seen.told("PE 0 failed first: the disk is full");
    seen.told("PE 1: signal: 9 (SIGKILL), killed because it did not stop by itself");
}

#[test]
fn a_process_with_other_options_is_refused() {
    let seen = play(How::Processes, "other-options", 2, LONG);
    assert!(seen.error(1).contains("was made with heap bytes per PE 1048576, this PE has 2097152"), "{seen:#?}");
    seen.others_saw(&["PE 1 failed: its process ended with exit status: 1"]);
}

#[test]
fn a_process_that_nobody_launched_is_no_pe() {
    let mut command = Command::new(PROBE);
    command.args(["pe", "barriers", "1000"]);
    for name in ["DELTALINK_HEAP", "DELTALINK_RANK", "DELTALINK_SIZE", "PMI_FD", "PMI_PORT", "PMI_RANK", "PMI_SIZE"] {
        command.env_remove(name);
    }
    in_processes(command, 1).told("this process is no PE");
}

#[test]
fn a_world_without_pes_is_refused() {
    let options = WorldOptions { heap_bytes: HEAP_BYTES, timeout: SHORT };
    let refused = run_threads(0, &options, |_| Ok::<_, WorldError>(()));
    assert!(matches!(refused, Err(RunError::World(WorldError::Size { found: 0, .. }))), "{refused:?}");
    let seen = play(How::Processes, "barriers", 0, SHORT);
    seen.told("a world of 0 PEs was asked for");
}

#[test]
fn a_heap_used_after_its_pe_left_says_so() {
    let options = WorldOptions { heap_bytes: HEAP_BYTES, timeout: SHORT };
    let kept = run_threads(2, &options, |pe| {
        let mut object = pe.heap().alloc::<u64>("kept", 4)?;
        // SAFETY: each PE writes its own copy only.
        unsafe { object.as_mut_slice() }.fill(7);
        Ok::<_, deltalink::heap::HeapError>((pe.heap().clone(), object))
    });
    for (rank, (heap, object)) in kept.expect("both end well").into_iter().enumerate() {
        // SAFETY: the PEs are gone, nobody writes.
        assert_eq!(unsafe { object.as_slice() }, [7; 4], "the memory lives as long as the object");
        let error = heap.alloc::<u64>("late", 1).expect_err("closed").to_string();
        assert!(error.contains(&format!("PE {rank} has left the world")), "{error}");
    }
}

/// Whether `mpiexec.hydra` can be tested; in CI it must be there.
fn mpiexec_is_there() -> bool {
    let there = Command::new("mpiexec.hydra").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if there.is_ok_and(|status| status.success()) {
        return true;
    }
    let required = std::env::var("DELTALINK_REQUIRE_MPIEXEC").is_ok_and(|value| value == "1");
    assert!(!required, "mpiexec.hydra does not run, and DELTALINK_REQUIRE_MPIEXEC=1 asks for it");
    println!("skipping: mpiexec.hydra does not run here (install MPICH to test worlds started by it)");
    false
}

#[test]
fn mpiexec_starts_a_world() {
    if !mpiexec_is_there() {
        return;
    }
    for size in [1, 4] {
        for name in ["barriers", "put-signal", "gathers", "heap-reuse"] {
            all_succeed(How::Mpiexec, name, size);
        }
    }
    all_say(How::Mpiexec, "differing-frees", 4, &["PE 3 for `next`"]);
}

#[test]
fn mpiexec_gives_a_port_instead_of_a_descriptor() {
    if !mpiexec_is_there() {
        return;
    }
    let mut command = Command::new("mpiexec.hydra");
    command.args(["-n", "4", "-launcher", "fork", "-pmi-port", PROBE, "pe", "gathers"]);
    command.arg(LONG.as_millis().to_string());
    let seen = in_processes(command, 4);
    assert!(seen.success && seen.said.iter().all(|said| *said == Some(Ok("gathered".into()))), "{seen:#?}");
}

#[test]
fn mpiexec_stops_a_world_in_which_a_pe_fails() {
    if !mpiexec_is_there() {
        return;
    }
    for name in ["fails", "panics", "killed"] {
        let seen = play(How::Mpiexec, name, 4, LONG);
        assert!(!seen.success && seen.took < LONG / 2, "{name}: {seen:#?}");
    }
}
