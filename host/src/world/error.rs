//! Errors of the world: who waits or failed, in what, and what to do.

use std::time::Duration;

/// A world of PEs could not be set up, or a collective step did not complete.
///
/// After a step failed, the PE takes part in no further step: each later call returns the same error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum WorldError {
    #[error("a world of {found} PEs was asked for; it needs 1 to {max}")]
    Size { found: usize, max: usize },
    #[error("{size} PEs with {heap_bytes} bytes of heap each exceed the address space; ask for a smaller heap")]
    TooLarge { size: usize, heap_bytes: usize },
    #[error("cannot map {bytes} bytes for {size} PEs and their heaps ({reason}); ask for fewer PEs or a smaller heap")]
    Map { size: usize, bytes: usize, reason: String },
    #[error(
        "PE {waiter} waited {waited:.1?} in {what} (step {epoch}) for {}, which did not arrive{}; \
         look at what held it up, or raise the timeout if it is only slow",
        pes(missing),
        absent(never_joined)
    )]
    Timeout {
        waiter: usize,
        what: String,
        missing: Vec<usize>,
        /// Those of `missing` that never joined the world.
        never_joined: Vec<usize>,
        epoch: u64,
        waited: Duration,
    },
    #[error("PE {rank} failed: {message}")]
    PeFailed { rank: usize, message: String },
    #[error(
        "PE {waiter} waits in {what} (step {epoch}) for PE {rank}, which has already finished; \
         every PE must make the same collective calls in the same order"
    )]
    PeLeft { rank: usize, waiter: usize, what: String, epoch: u64 },
    #[error(
        "at step {epoch} PE {first} is in {first_what}, PE {second} in {second_what}; \
         every PE must make the same collective calls in the same order"
    )]
    Diverged { epoch: u64, first: usize, first_what: String, second: usize, second_what: String },
    #[error("PE {rank} has left the world and can take no part in {what}; keep its Pe until the last collective call")]
    Closed { rank: usize, what: String },
    #[error("{root} is not a PE of this world of {size}; a root is 0 to {}", size - 1)]
    Root { root: usize, size: usize },
    #[error(
        "cannot open the memory shared by the PEs, {path} ({reason}); this needs the same user, the same PID namespace \
         (container) and ptrace read access to that process (hidepid mounts, non-dumpable processes and \
         container or Yama policies refuse it); start all PEs as one user in one container, or run them as threads"
    )]
    Open { path: String, reason: String },
    #[error(
        "{path} is not memory shared by PEs of this world ({reason}); is it from another PID namespace (container)?"
    )]
    Foreign { path: String, reason: String },
    #[error(
        "{path} was made with {field} {found}, this PE has {want}; start all PEs with one program and one set of options"
    )]
    Header { path: String, field: &'static str, found: String, want: String },
    #[error("PE {rank} has already joined, as process {pid}; every rank must be started once")]
    RankTaken { rank: usize, pid: u64 },
    #[error("this process has already joined a world; join once and keep the Pe")]
    AlreadyJoined,
    #[error(
        "environment variable {name} is {value:?}; it must be {want} (it is set by what starts the PEs, not by hand)"
    )]
    Variable { name: String, value: String, want: String },
    #[error("environment variable {name} is missing although {because} is set; both are set by what starts the PEs")]
    MissingVariable { name: String, because: String },
    #[error("{first_source} says {first} PEs, {second_source} says {second}; start the PEs with one launcher only")]
    SizesDiffer { first_source: &'static str, first: usize, second_source: &'static str, second: usize },
    #[error("{asked} PEs were asked for, {launcher} started {found}; ask for as many as it starts")]
    Started { asked: usize, launcher: &'static str, found: usize },
    #[error(
        "{launcher} has spread the {size} PEs over several machines ({variable}={value}); this world needs one machine: \
         start all PEs on one"
    )]
    SeveralMachines { launcher: &'static str, size: usize, variable: &'static str, value: String },
    #[error("the PEs cannot meet at {place}: {reason}")]
    Rendezvous { place: String, reason: String },
    #[error("PE 0 and PE {rank} run on different machines (boot {found} and {want}); this world needs one machine")]
    OtherMachine { rank: usize, found: String, want: String },
    #[error("the launcher's process manager did not complete `{command}` ({reason})")]
    Pmi { command: String, reason: String },
    #[error("cannot start PE {rank} as {program} ({reason})")]
    Spawn { rank: usize, program: String, reason: String },
    #[error("cannot learn how PE {rank} ended ({reason})")]
    Wait { rank: usize, reason: String },
    #[error("{what} needs Linux; run the PEs as threads")]
    Unsupported { what: &'static str },
}

/// What came of a PE's body, for the caller of [`run_threads`](super::run_threads) and [`Pe::run`](super::Pe::run).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum RunError<E: std::fmt::Display> {
    #[error(transparent)]
    World(WorldError),
    #[error("PE {rank}: {error}")]
    Pe { rank: usize, error: E },
    #[error("PE {rank} panicked: {message}")]
    Panic { rank: usize, message: String },
}

/// "PE 1", "PEs 1 and 3", "PEs 1, 2 and 3".
fn pes(ranks: &[usize]) -> String {
    match ranks {
        [] => "no PE".into(),
        [one] => format!("PE {one}"),
        [most @ .., last] => {
            let most: Vec<String> = most.iter().map(usize::to_string).collect();
            format!("PEs {} and {last}", most.join(", "))
        }
    }
}

fn absent(never_joined: &[usize]) -> String {
    if never_joined.is_empty() { String::new() } else { format!(" ({} never joined the world)", pes(never_joined)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_names_who_is_missing() {
        let error = WorldError::Timeout {
            waiter: 0,
            what: "barrier `step`".into(),
            missing: vec![1, 2, 5],
            never_joined: vec![5],
            epoch: 7,
            waited: Duration::from_millis(1500),
        };
        assert_eq!(
            error.to_string(),
            "PE 0 waited 1.5s in barrier `step` (step 7) for PEs 1, 2 and 5, which did not arrive (PE 5 never joined \
             the world); look at what held it up, or raise the timeout if it is only slow"
        );
    }
}
