//! Running blocks.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use super::block::{Block, Raised, Status, WARPGROUP, enter, with};
use super::fault::{Fault, FaultKind};
use super::memory::Memory;
use super::site::Site;

/// When asynchronous instructions happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timing {
    /// At once.
    Eager,
    /// As late as the waits allow: copies to shared memory when no thread can go on without one, everything else in the
    /// wait for it.
    #[default]
    Lazy,
}

/// In which order threads of a block run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// The first one first.
    #[default]
    Ascending,
    /// The last one first.
    Descending,
}

/// Which of the possible orders of events comes to pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Of asynchronous instructions.
    pub timing: Timing,
    /// Of threads.
    pub order: Order,
}

impl Schedule {
    /// All of them.
    pub const ALL: [Schedule; 4] = [
        Schedule { timing: Timing::Lazy, order: Order::Ascending },
        Schedule { timing: Timing::Lazy, order: Order::Descending },
        Schedule { timing: Timing::Eager, order: Order::Ascending },
        Schedule { timing: Timing::Eager, order: Order::Descending },
    ];
}

/// A launch.
pub struct Launch<'a> {
    /// Name of the kernel, for faults.
    pub kernel: &'a str,
    /// Blocks of the grid.
    pub grid: u32,
    /// Threads of a block, a multiple of 32, at most 512.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Which of the possible orders of events comes to pass.
    pub schedule: Schedule,
    /// Zero of the device's clock.
    pub origin: Instant,
    /// Called while all threads of a block that can go on only look at the clock, as in a wait for another block.
    pub idle: &'a dyn Fn(),
}

/// Most threads of a block.
const MOST_THREADS: u32 = 4 * WARPGROUP as u32;
/// Stack of a thread.
const STACK_BYTES: usize = 256 * 1024;

/// Runs blocks one after another on the calling thread; keeps memory and stacks between them.
#[derive(Default)]
pub struct Emulator {
    stacks: Vec<DefaultStack>,
    memory: Memory,
}

impl std::fmt::Debug for Emulator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Emulator").field("stacks", &self.stacks.len()).finish_non_exhaustive()
    }
}

type Coroutines = Vec<Coroutine<(), (), (), DefaultStack>>;

impl Emulator {
    /// An emulator; memory is taken with the first block.
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs `kernel` as each thread of block `index` of the launch. Blocks of one launch that wait for each other must run at
    /// the same time, each on an emulator and a thread of the host of its own.
    ///
    /// # Errors
    /// [`Fault`] if the kernel broke a rule or panicked.
    ///
    /// # Panics
    /// If a block cannot have that many threads.
    pub fn run(&mut self, launch: &Launch<'_>, index: u32, kernel: &dyn Fn()) -> Result<(), Fault> {
        let threads = launch.threads;
        assert!(threads > 0 && threads.is_multiple_of(32) && threads <= MOST_THREADS, "{threads} threads in a block");
        let fault = |thread: Option<u32>, instruction: String, kind: FaultKind| Fault {
            kernel: launch.kernel.to_owned(),
            block: index,
            thread,
            instruction,
            kind,
        };
        while self.stacks.len() < threads as usize {
            let stack = DefaultStack::new(STACK_BYTES);
            let stack = stack.map_err(|e| fault(None, String::new(), FaultKind::Panic(format!("no stack: {e}"))))?;
            self.stacks.push(stack);
        }
        let block = RefCell::new(Block::new(launch, index, std::mem::take(&mut self.memory)));
        let mut coroutines: Coroutines = self
            .stacks
            .drain(..threads as usize)
            .enumerate()
            .map(|(thread, stack)| {
                let body = move |yielder: &Yielder<(), ()>, ()| {
                    with(Site::here("begin"), |block| {
                        block.threads[thread].yielder = yielder;
                        Ok(())
                    });
                    kernel();
                };
                // SAFETY: the coroutines end, or are unwound, below, while the kernel is still borrowed.
                unsafe { Coroutine::with_stack_unchecked(stack, body) }
            })
            .collect();
        let inside = enter(&block);
        let result = turns(launch, &block, &mut coroutines);
        for mut coroutine in coroutines {
            // Threads that a fault stopped halfway are unwound.
            coroutine.force_unwind();
            self.stacks.push(coroutine.into_stack());
        }
        drop(inside);
        let block = block.into_inner();
        let result = result.and_then(|()| {
            let left = block.left_under_way().or_else(|| block.products_under_way());
            left.map_or(Ok(()), |(thread, kind)| Err((Some(thread as u32), String::new(), kind)))
        });
        self.memory = block.memory;
        result.map_err(|(thread, instruction, kind)| fault(thread, instruction, kind))
    }
}

/// Gives the threads their turns until all have ended.
fn turns(
    launch: &Launch<'_>,
    block: &RefCell<Block>,
    coroutines: &mut Coroutines,
) -> Result<(), (Option<u32>, String, FaultKind)> {
    let threads = coroutines.len();
    loop {
        let (mut ran, mut polled) = (0, 0);
        for turn in 0..threads {
            let thread = match launch.schedule.order {
                Order::Ascending => turn,
                Order::Descending => threads - 1 - turn,
            };
            {
                let mut block = block.borrow_mut();
                if !matches!(block.threads[thread].status, Status::Ready | Status::Polling) {
                    continue;
                }
                block.threads[thread].status = Status::Ready;
                block.current = thread;
            }
            ran += 1;
            match catch_unwind(AssertUnwindSafe(|| coroutines[thread].resume(()))) {
                Ok(CoroutineResult::Yield(())) => {
                    polled += usize::from(block.borrow().threads[thread].status == Status::Polling);
                }
                Ok(CoroutineResult::Return(())) => block.borrow_mut().threads[thread].status = Status::Done,
                Err(payload) => {
                    let (instruction, kind) = match payload.downcast::<Raised>() {
                        Ok(raised) => (raised.instruction, raised.kind),
                        Err(payload) => (String::new(), FaultKind::Panic(message(&*payload))),
                    };
                    return Err((Some(thread as u32), instruction, kind));
                }
            }
        }
        if ran > polled {
            continue;
        }
        let mut block = block.borrow_mut();
        if block.threads.iter().all(|thread| thread.status == Status::Done) {
            return Ok(());
        }
        if block.deliver().map_err(|kind| (None, String::new(), kind))? {
            continue;
        }
        if ran == 0 {
            return Err((None, String::new(), FaultKind::Deadlock { waits: block.waits() }));
        }
        drop(block);
        (launch.idle)();
        std::thread::yield_now();
    }
}

fn message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_owned())
}
