//! Who runs where: a world of PEs (processing elements) that share memory.
//!
//! A PE is a thread ([`run_threads`]) or a process, started by [`Launch`] or by a launcher such as `mpiexec.hydra`,
//! Open MPI's `mpirun`, `srun` or `torchrun` (see [`Pe::from_environment`]). Either way all PEs map one segment, which holds every PE's heap: a put is a store to the
//! peer's memory, a signal an atomic. Only how the segment comes about differs; collective steps, failure reports and
//! the [heap](crate::heap) are the same code.
//!
//! Nothing here waits forever: each wait ends when all PEs have arrived, when one failed or left, or at the timeout,
//! and the error names the PE.

mod calls;
mod collective;
mod control;
mod environment;
mod error;
mod invitation;
mod launch;
mod launcher;
#[cfg(feature = "cuda")]
pub mod nvshmem;
mod pmi;
mod rendezvous;
mod segment;
mod subset;
mod threads;
#[cfg(feature = "cuda")]
pub mod virtual_pes;
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(crate) use collective::{Member, Purpose, Step};
pub use error::{RunError, WorldError};
pub use invitation::Invitation;
pub use launch::{ExitReport, Launch, PeExit, spawn};
pub use segment::MAX_SIZE;
pub use threads::run_threads;
pub use watch::Watch;

use crate::heap::Heap;
use segment::Segment;

/// What a world is made with; must be the same for all its PEs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldOptions {
    /// Bytes of each PE's symmetric heap. Pages that are never touched cost no memory.
    pub heap_bytes: usize,
    /// Bound of every wait for other PEs.
    pub timeout: Duration,
}

impl Default for WorldOptions {
    /// 256 MiB and 60 s.
    fn default() -> Self {
        Self { heap_bytes: 256 << 20, timeout: Duration::from_secs(60) }
    }
}

/// One PE's membership of a world.
///
/// Collective calls (`barrier`, `all_gather`, `gather` and [`Heap::alloc`]) must be made by every PE in the same order
/// with the same `what`, which names the step in errors. After one of them failed the PE makes no further step.
///
/// Dropping it tells the others that this PE takes part in no further step; it waits for nobody.
#[derive(Debug)]
pub struct Pe {
    member: Arc<Member>,
    heap: Heap,
    place: Place,
    /// The launcher's process manager, told at the end that this process ends well.
    manager: Option<pmi::Client>,
}

/// Which PE a thread or process is, by whom.
#[derive(Clone, Copy, Debug)]
struct Place {
    rank: usize,
    /// Rank among the PEs of this machine.
    local_rank: usize,
    /// As errors name it.
    launcher: &'static str,
}

impl Pe {
    fn join(
        segment: Arc<Segment>,
        place: Place,
        timeout: Duration,
        manager: Option<pmi::Client>,
    ) -> Result<Self, WorldError> {
        let member = Member::join(segment, place.rank, timeout)?;
        Ok(Self { heap: Heap::new(Arc::clone(&member)), member, place, manager })
    }

    /// The only PE of a world of its own, on the calling thread: for one device, without context parallelism.
    ///
    /// # Errors
    /// [`WorldError::Map`] if there is no memory for the heap.
    pub fn alone(options: &WorldOptions) -> Result<Self, WorldError> {
        let segment = Segment::anonymous(1, options.heap_bytes)?;
        let place = Place { rank: 0, local_rank: 0, launcher: "the program" };
        Self::join(Arc::new(segment), place, options.timeout, None)
    }

    /// Joins the world that this process was started for, if any. Returns when all PEs have joined; `None` if no launcher
    /// started this process.
    ///
    /// | launcher | variables that tell | PEs meet |
    /// |---|---|---|
    /// | [`Launch`] | `DELTALINK_RANK`, `DELTALINK_SIZE`, `DELTALINK_HEAP` | in the launcher's segment |
    /// | `mpiexec.hydra`, `nvshmrun` (PMI-1) | `PMI_RANK`, `PMI_SIZE`, `PMI_FD`, or `PMI_PORT`, `PMI_ID` | through the launcher |
    /// | Open MPI's `mpirun` | `OMPI_COMM_WORLD_RANK`, `_SIZE`; `PMIX_NAMESPACE` or `OMPI_MCA_ess_base_jobid` | at a file |
    /// | `torchrun` | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` | at TCP port `MASTER_PORT` + 77, or `DELTALINK_PORT` |
    /// | Slurm's `srun` | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_JOB_ID`, `SLURM_STEP_ID` | at a file |
    ///
    /// The first that is there counts. The file lies in `XDG_RUNTIME_DIR` or `/tmp`, is named after user and job, and is
    /// gone when all have joined. All PEs must be on one machine.
    ///
    /// # Errors
    /// [`WorldError`] if the world cannot be joined, was made with other options, or a PE does not join in time.
    pub fn from_environment(options: &WorldOptions) -> Result<Option<Self>, WorldError> {
        environment::join(options)
    }

    /// What the PE's heaps have in common with it.
    pub(crate) fn member(&self) -> Arc<Member> {
        Arc::clone(&self.member)
    }

    /// This PE, from 0.
    pub fn rank(&self) -> usize {
        self.member.rank
    }

    /// This PE among those of its machine, from 0, by its launcher's word: what a PE chooses its GPU by.
    pub fn local_rank(&self) -> usize {
        self.place.local_rank
    }

    /// Number of PEs.
    pub fn size(&self) -> usize {
        self.member.segment.size()
    }

    /// Checks that the launcher started as many PEs as the user asked for.
    ///
    /// # Errors
    /// [`WorldError::Started`] with both numbers, on every PE.
    pub fn expect_size(&self, asked: usize) -> Result<(), WorldError> {
        let (found, launcher) = (self.size(), self.place.launcher);
        if found == asked { Ok(()) } else { Err(WorldError::Started { asked, launcher, found }) }
    }

    /// Bound of every wait for other PEs.
    pub fn timeout(&self) -> Duration {
        self.member.timeout
    }

    /// This PE's part of the symmetric heap.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Waits until every PE is here. What a PE did before is visible to all after.
    ///
    /// # Errors
    /// [`WorldError`] naming the PE that failed, left, is elsewhere or did not arrive in time.
    pub fn barrier(&self, what: &str) -> Result<(), WorldError> {
        self.member.turn().step(Step { purpose: Purpose::Barrier, what })
    }

    /// The bytes of every PE, by rank. Their lengths may differ and may exceed the mailbox.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier).
    pub fn all_gather(&self, what: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, WorldError> {
        let gathered = self.member.turn().gather(Step { purpose: Purpose::AllGather, what }, bytes, true)?;
        Ok(gathered.unwrap_or_default())
    }

    /// The bytes of every PE, by rank, on PE `root`; `None` on the others.
    ///
    /// # Errors
    /// [`WorldError::Root`] if there is no such PE, otherwise as [`barrier`](Self::barrier).
    pub fn gather(&self, what: &str, root: usize, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>, WorldError> {
        if root >= self.size() {
            return Err(WorldError::Root { root, size: self.size() });
        }
        let step = Step { purpose: Purpose::Gather { root }, what };
        self.member.turn().gather(step, bytes, root == self.rank())
    }

    /// Tells the other PEs why this one stops: their current or next wait ends with [`WorldError::PeFailed`].
    /// The first report of any PE stays; later ones are its consequences.
    pub fn report_failure(&self, message: &str) {
        self.member.report_failure(message);
    }

    /// The PE that failed first (this one if it reported itself), and why. One atomic load while nobody failed, so that
    /// long waits of other code can poll it.
    pub fn failed_peer(&self) -> Option<(usize, String)> {
        self.member.segment.failure().get()
    }

    /// Runs `body` as this PE's part of the program, then leaves the world. If it returns an error or panics, the other
    /// PEs are told why.
    ///
    /// # Errors
    /// [`RunError::Pe`] with the error of `body`, [`RunError::Panic`] with the message of its panic.
    pub fn run<T, E: std::fmt::Display>(self, body: impl FnOnce(&Pe) -> Result<T, E>) -> Result<T, RunError<E>> {
        let rank = self.rank();
        match catch_unwind(AssertUnwindSafe(|| body(&self))) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                self.report_failure(&error.to_string());
                Err(RunError::Pe { rank, error })
            }
            Err(payload) => {
                let message = panic_message(payload.as_ref());
                self.report_failure(&format!("panicked: {message}"));
                Err(RunError::Panic { rank, message })
            }
        }
    }
}

impl Drop for Pe {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.report_failure("panicked");
        }
        self.member.closed.store(true, Ordering::Relaxed);
        // Release: who sees that this PE left also sees its last arrival and its failure.
        self.member.segment.slots()[self.rank()].left.store(1, Ordering::Release);
        // Without the farewell the launcher takes the end of this process for a failure and stops the others.
        if let Some(manager) = self.manager.take().filter(|_| self.failed_peer().is_none()) {
            manager.finalize();
        }
    }
}

/// Identifies the running kernel.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = boot.trim();
    if boot.is_empty() { "unknown".into() } else { boot.into() }
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no message)").to_string()
}
