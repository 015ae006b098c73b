//! Running blocks: one coroutine per warpgroup, in turn between barriers.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Instant;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult};

use super::check::SharedLog;
use super::{BlockShared, Checker, Fault, FaultKind, Warpgroup};
use crate::tile::{MAX_WARPGROUPS, RESERVED_BYTES, SHARED_BYTES};

/// Elements of a block's arena: the shared memory of a GPU block, in the smallest element type.
const ARENA_LEN: usize = SHARED_BYTES / 2;
/// Stack of a warpgroup's coroutine: a few register tiles of 16 KiB, and room.
const STACK_BYTES: usize = 512 * 1024;

/// What every block of a launch shares on the CPU.
pub struct LaunchContext<'a> {
    /// Name of the kernel, for faults.
    pub kernel: &'static str,
    /// Warpgroups in a block.
    pub warpgroups: usize,
    /// Blocks.
    pub grid: usize,
    /// Zero of the PE's clock.
    pub origin: Instant,
    /// Checked mode: what must be written. Also turns on the log of shared memory.
    pub checker: Option<&'a Checker>,
    /// Polled in long waits: whether another PE has failed, so that waiting on is useless.
    pub peer_failed: &'a (dyn Fn() -> bool + Sync),
}

impl LaunchContext<'_> {
    /// Nanoseconds since the origin.
    #[inline(always)]
    pub fn clock(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }
}

/// Runs blocks one after another on the calling thread; keeps the arena and the stacks between them.
pub struct BlockRunner {
    arena: Vec<f32>,
    stacks: Vec<DefaultStack>,
    log: Option<SharedLog>,
}

impl Default for BlockRunner {
    fn default() -> Self {
        Self::new()
    }
}

/// What a coroutine needs, as pointers: it must not borrow, and never outlives [`BlockRunner::run`].
struct Job<P> {
    launch: *const LaunchContext<'static>,
    params: *const P,
    kernel: fn(&mut Warpgroup<'_>, &P),
    shared: Rc<BlockShared>,
    block: usize,
    index: usize,
}

impl<P> Job<P> {
    /// Runs the kernel as one warpgroup.
    ///
    /// # Safety
    /// `launch` and `params` must be valid.
    unsafe fn run(self, yielder: Option<&corosensei::Yielder<(), ()>>) {
        // SAFETY: by the contract of this function.
        let (launch, params) = unsafe { (&*self.launch, &*self.params) };
        let mut warpgroup = Warpgroup {
            index: self.index,
            count: launch.warpgroups,
            block: self.block,
            grid: launch.grid,
            block_shared: self.shared,
            yielder,
            launch,
            arena_cursor: 0,
            byte_cursor: RESERVED_BYTES,
            own_epoch: 0,
        };
        (self.kernel)(&mut warpgroup, params);
    }
}

impl BlockRunner {
    /// A runner; memory is taken with the first block.
    pub fn new() -> Self {
        Self { arena: Vec::new(), stacks: Vec::new(), log: None }
    }

    /// Runs block `block` of the launch.
    ///
    /// # Errors
    /// [`Fault`] if the kernel broke a rule or panicked.
    pub fn run<P: 'static>(
        &mut self,
        launch: &LaunchContext<'_>,
        block: usize,
        kernel: fn(&mut Warpgroup<'_>, &P),
        params: &P,
    ) -> Result<(), Fault> {
        assert!((1..=MAX_WARPGROUPS).contains(&launch.warpgroups), "a block has 1 to {MAX_WARPGROUPS} warpgroups");
        if self.arena.is_empty() {
            self.arena = vec![0.0; ARENA_LEN];
        }
        let log = launch.checker.is_some().then(|| {
            let mut log = self.log.take().unwrap_or_else(|| SharedLog::new(ARENA_LEN, MAX_WARPGROUPS));
            log.clear();
            RefCell::new(log)
        });
        let shared = Rc::new(BlockShared {
            arena: self.arena.as_mut_ptr(),
            arena_len: ARENA_LEN,
            ticket: Cell::new(0),
            votes: Cell::new(false),
            epoch: Cell::new(0),
            log,
        });
        let job = |index| Job {
            launch: std::ptr::from_ref(launch).cast(),
            params,
            kernel,
            shared: shared.clone(),
            block,
            index,
        };
        let result = if launch.warpgroups == 1 {
            // SAFETY: both references outlive the call.
            catch_unwind(AssertUnwindSafe(|| unsafe { job(0).run(None) })).map_err(|payload| (0, payload_kind(payload)))
        } else {
            self.run_together(launch.warpgroups, &shared, job)
        };
        if let Some(shared) = Rc::into_inner(shared) {
            self.log = shared.log.map(RefCell::into_inner).or(self.log.take());
        }
        result.map_err(|(warpgroup, kind)| Fault {
            kernel: launch.kernel.to_owned(),
            place: Some((block, warpgroup)),
            kind,
        })
    }

    /// Runs all warpgroups in turn from barrier to barrier.
    fn run_together<P: 'static>(
        &mut self,
        warpgroups: usize,
        shared: &Rc<BlockShared>,
        job: impl Fn(usize) -> Job<P>,
    ) -> Result<(), (usize, FaultKind)> {
        while self.stacks.len() < warpgroups {
            let stack = DefaultStack::new(STACK_BYTES)
                .map_err(|e| (0, FaultKind::Panic(format!("no memory for a warpgroup's stack: {e}"))))?;
            self.stacks.push(stack);
        }
        let mut coroutines: Vec<_> = self
            .stacks
            .drain(..)
            .enumerate()
            .map(|(index, stack)| {
                let job = (index < warpgroups).then(|| job(index));
                Coroutine::with_stack(stack, move |yielder, ()| {
                    if let Some(job) = job {
                        // SAFETY: coroutines run only inside `run_together`, whose caller's borrows of the
                        // launch context and the parameters are alive; unfinished ones are unwound here below.
                        unsafe { job.run(Some(yielder)) }
                    }
                })
            })
            .collect();
        let mut result = Ok(());
        'phases: loop {
            let mut waiting = 0;
            for (index, coroutine) in coroutines.iter_mut().enumerate().take(warpgroups) {
                if coroutine.done() {
                    continue;
                }
                match catch_unwind(AssertUnwindSafe(|| coroutine.resume(()))) {
                    Ok(CoroutineResult::Yield(())) => waiting += 1,
                    Ok(CoroutineResult::Return(())) => {}
                    Err(payload) => {
                        result = Err((index, payload_kind(payload)));
                        break 'phases;
                    }
                }
            }
            if waiting == 0 {
                break;
            }
            if waiting < warpgroups {
                result = Err((0, FaultKind::DivergentBarrier { waiting, of: warpgroups }));
                break;
            }
            shared.epoch.set(shared.epoch.get() + 1);
        }
        self.stacks = coroutines
            .into_iter()
            .map(|mut coroutine| {
                // Warpgroups that a fault stopped halfway are unwound; those that had not begun, and the spare stacks'
                // coroutines, only drop what they hold. Nothing of the kernel runs any more.
                coroutine.force_unwind();
                coroutine.into_stack()
            })
            .collect();
        result
    }
}

/// The fault that a kernel's unwinding carries.
fn payload_kind(payload: Box<dyn Any + Send>) -> FaultKind {
    match payload.downcast::<FaultKind>() {
        Ok(kind) => *kind,
        Err(payload) => FaultKind::Panic(
            payload
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| payload.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                .unwrap_or_else(|| "without a message".to_owned()),
        ),
    }
}
