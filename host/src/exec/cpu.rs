//! The CPU back end: blocks over a pool of threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kernels_gpu::tile::Warpgroup;
use kernels_gpu::tile::host::{BlockRunner, Checker, Fault, LaunchContext};

/// How many blocks a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// This many, in any order: for kernels whose blocks do not wait for each other.
    Blocks(usize),
    /// As many as run at the same time: for kernels that take their work by ticket.
    Resident,
}

/// One PE's executor.
pub struct Cpu {
    pool: Option<rayon::ThreadPool>,
    runners: Vec<Mutex<BlockRunner>>,
    origin: Instant,
}

/// The threads of a PE's executor could not be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot start {workers} worker threads ({reason}); ask for fewer workers")]
pub struct PoolError {
    /// Threads asked for.
    pub workers: usize,
    /// What the system said.
    pub reason: String,
}

/// A launch, apart from its kernel and parameters.
pub struct Launch<'a> {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: Grid,
    /// Warpgroups in a block.
    pub warpgroups: usize,
    /// Checked mode: what must be written.
    pub checker: Option<&'a Checker>,
    /// Polled in long waits.
    pub peer_failed: &'a (dyn Fn() -> bool + Sync),
}

impl Cpu {
    /// An executor with `workers` threads. With one, blocks run on the calling thread.
    ///
    /// # Errors
    /// [`PoolError`] if the system refuses the threads.
    pub fn new(workers: usize) -> Result<Self, PoolError> {
        let workers = workers.max(1);
        let pool = match workers {
            1 => None,
            _ => Some(
                rayon::ThreadPoolBuilder::new()
                    .num_threads(workers)
                    .thread_name(|i| format!("deltalink-worker-{i}"))
                    .build()
                    .map_err(|e| PoolError { workers, reason: e.to_string() })?,
            ),
        };
        let runners = (0..workers).map(|_| Mutex::new(BlockRunner::new())).collect();
        Ok(Self { pool, runners, origin: Instant::now() })
    }

    /// Blocks that run at the same time.
    pub fn workers(&self) -> usize {
        self.runners.len()
    }

    /// Zero of the clock in this executor's time stamps.
    pub fn origin(&self) -> Instant {
        self.origin
    }

    /// Sets the zero of the clock.
    pub fn set_origin(&mut self, origin: Instant) {
        self.origin = origin;
    }

    /// Runs a kernel to its end and returns how long it took.
    ///
    /// # Errors
    /// The first [`Fault`] of any block.
    pub fn launch<P: Sync + 'static>(
        &self,
        launch: &Launch<'_>,
        kernel: fn(&mut Warpgroup<'_>, &P),
        params: &P,
    ) -> Result<Duration, Fault> {
        let start = Instant::now();
        let blocks = match launch.grid {
            Grid::Blocks(blocks) => blocks,
            Grid::Resident => self.workers(),
        };
        let context = LaunchContext {
            kernel: launch.kernel,
            warpgroups: launch.warpgroups,
            grid: blocks,
            origin: self.origin,
            checker: launch.checker,
            peer_failed: launch.peer_failed,
        };
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let work = |worker: usize| -> Result<(), Fault> {
            // Each worker has a runner of its own: the lock is never contended.
            let mut runner = self.runners[worker].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            while !failed.load(Ordering::Relaxed) {
                let block = next.fetch_add(1, Ordering::Relaxed);
                if block >= blocks {
                    break;
                }
                if let Err(fault) = runner.run(&context, block, kernel, params) {
                    failed.store(true, Ordering::Relaxed);
                    return Err(fault);
                }
            }
            Ok(())
        };
        match &self.pool {
            None => work(0)?,
            Some(pool) => pool.broadcast(|context| work(context.index())).into_iter().collect::<Result<(), Fault>>()?,
        }
        Ok(start.elapsed())
    }
}
