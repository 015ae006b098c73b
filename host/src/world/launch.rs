//! Starting PEs as processes of this machine, and watching over them.

use std::ffi::{OsStr, OsString};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::launcher::{HEAP, PMI, RANK, SIZE};
use super::segment::{HeapAddress, Segment};
use super::{WorldError, WorldOptions};

/// Starts `size` processes of one program as the PEs of a world; each joins it with
/// [`Pe::from_environment`](super::Pe::from_environment). They inherit standard input, output and error.
#[derive(Clone, Debug)]
pub struct Launch {
    size: usize,
    options: WorldOptions,
    program: OsString,
    args: Vec<OsString>,
    grace: Duration,
}

/// Starts `size` processes of `program` with `args` and waits for them: [`Launch`] with its defaults.
///
/// # Errors
/// As [`Launch::run`].
pub fn spawn<A: Into<OsString>>(
    size: usize,
    options: &WorldOptions,
    program: impl AsRef<OsStr>,
    args: impl IntoIterator<Item = A>,
) -> Result<ExitReport, WorldError> {
    Launch::new(size, options, program).args(args).run()
}

impl Launch {
    /// `size` processes of `program`, without arguments.
    pub fn new(size: usize, options: &WorldOptions, program: impl AsRef<OsStr>) -> Self {
        let program = program.as_ref().to_os_string();
        Self { size, options: options.clone(), program, args: Vec::new(), grace: Duration::from_secs(5) }
    }

    /// Appends arguments, the same for all PEs.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// How long the others may take to stop by themselves after one PE failed; 5 s unless set.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Starts the PEs and waits until all have ended. When one ends badly the others are told, and killed if they do not
    /// stop within the grace time. That a PE did not succeed is in the report, not an error.
    ///
    /// # Errors
    /// [`WorldError`] if the shared memory or a process cannot be made; those already started are killed.
    pub fn run(&self) -> Result<ExitReport, WorldError> {
        let segment = Segment::shared(self.size, self.options.heap_bytes)?;
        let Some(heap) = segment.address() else {
            return Err(WorldError::Unsupported { what: "a world of processes" });
        };
        let mut crew = Crew { pes: Vec::with_capacity(self.size) };
        for rank in 0..self.size {
            let child = self.command(rank, heap).spawn().map_err(|error| WorldError::Spawn {
                rank,
                program: self.program.to_string_lossy().into_owned(),
                reason: error.to_string(),
            })?;
            crew.pes.push(Running { child, killed: false, status: None });
        }

        let mut deadline = None;
        while !crew.ended(&segment)? {
            if deadline.is_none() && segment.failure().get().is_some() {
                deadline = Some(Instant::now() + self.grace);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                crew.kill_rest();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(crew.report(segment.failure().get()))
    }

    fn command(&self, rank: usize, heap: HeapAddress) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        for name in PMI {
            command.env_remove(name);
        }
        command.env(RANK, rank.to_string()).env(SIZE, self.size.to_string()).env(HEAP, heap.to_string());
        command
    }
}

/// How one PE's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeExit {
    /// Exit code or signal.
    pub status: ExitStatus,
    /// Whether it was killed because it did not stop in time after another PE failed.
    pub killed: bool,
}

/// How the processes of a world ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExitReport {
    /// By rank.
    pub exits: Vec<PeExit>,
    /// The PE that failed first, and why: what it reported itself, or else how its process ended.
    pub failure: Option<(usize, String)>,
}

impl ExitReport {
    /// Whether every PE ended with exit code 0 and none reported a failure.
    pub fn success(&self) -> bool {
        self.failure.is_none() && self.exits.iter().all(|exit| exit.status.success())
    }
}

impl std::fmt::Display for ExitReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.failure {
            None => write!(f, "all {} PEs ended well", self.exits.len())?,
            Some((rank, message)) => write!(f, "PE {rank} failed first: {message}")?,
        }
        for (rank, exit) in self.exits.iter().enumerate().filter(|(_, exit)| !exit.status.success()) {
            let killed = if exit.killed { ", killed because it did not stop by itself" } else { "" };
            write!(f, "\n  PE {rank}: {}{killed}", exit.status)?;
        }
        Ok(())
    }
}

/// A started PE.
struct Running {
    child: Child,
    killed: bool,
    status: Option<ExitStatus>,
}

/// The started PEs; none outlives it.
struct Crew {
    pes: Vec<Running>,
}

impl Crew {
    /// Notes who has ended since the last call and tells the others; whether all have.
    fn ended(&mut self, segment: &Segment) -> Result<bool, WorldError> {
        for (rank, pe) in self.pes.iter_mut().enumerate().filter(|(_, pe)| pe.status.is_none()) {
            let status = pe.child.try_wait().map_err(|error| WorldError::Wait { rank, reason: error.to_string() })?;
            let Some(status) = status else { continue };
            pe.status = Some(status);
            if !status.success() {
                segment.failure().report(rank, &format!("its process ended with {status}"));
            }
            // A process may end without dropping its Pe. Release: after the failure above.
            segment.slots()[rank].left.store(1, Ordering::Release);
        }
        Ok(self.pes.iter().all(|pe| pe.status.is_some()))
    }

    fn kill_rest(&mut self) {
        for pe in self.pes.iter_mut().filter(|pe| pe.status.is_none() && !pe.killed) {
            // Fails only if it has just ended, which the next `ended` finds out.
            pe.killed = pe.child.kill().is_ok();
        }
    }

    fn report(&self, failure: Option<(usize, String)>) -> ExitReport {
        let exit = |pe: &Running| pe.status.map(|status| PeExit { status, killed: pe.killed });
        ExitReport { exits: self.pes.iter().filter_map(exit).collect(), failure }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.kill_rest();
        for pe in self.pes.iter_mut().filter(|pe| pe.status.is_none()) {
            // Killed above, so this does not wait for the program; without it a zombie would stay.
            let _ = pe.child.wait();
        }
    }
}
