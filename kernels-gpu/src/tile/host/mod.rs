//! The CPU back end of the tile DSL.
//!
//! A block's warpgroups are coroutines on one thread: each runs until it reaches a block barrier, and goes
//! on when all have. So the order of everything between two barriers is one of those that a GPU allows, and
//! the barrier is a barrier. Shared tiles live in an arena of f32 whatever their element type; values are
//! rounded to the element type when they are stored, so products see what a GPU's tensor cores would.
//!
//! In checked mode every shared element remembers who wrote and read it last and between which barriers
//! ([`check`]), and every launch knows which output elements must be written.

mod acc;
mod backward;
mod bounds;
pub mod check;
mod convolution;
mod global;
mod launch;
mod ops;
mod put;
mod rows;

pub use acc::Acc;
pub use check::{Checker, Fault, FaultKind};
pub use launch::{BlockRunner, LaunchContext};

use core::cell::Cell;
use core::marker::PhantomData;
use std::rc::Rc;

use corosensei::Yielder;

use super::{MAX_WARPGROUPS, SHARED_BYTES, tile_bytes};
use crate::element::Element;
use crate::params::{Stamp, StampKind, TraceBuffer};
use check::SharedLog;

/// A tile in shared memory, or a part or the transpose of one. Copying the handle copies no data.
pub struct Shared<E> {
    base: usize,
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
    element: PhantomData<E>,
}

impl<E> Clone for Shared<E> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E> Copy for Shared<E> {}

impl<E: Element> Shared<E> {
    /// Rows.
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[inline(always)]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The `rows` x `cols` part that starts at (`row`, `col`).
    ///
    /// # Panics
    /// With a [`Fault`] if the part does not lie inside.
    #[inline(always)]
    pub fn part(&self, row: usize, col: usize, rows: usize, cols: usize) -> Self {
        if row + rows > self.rows || col + cols > self.cols {
            check::raise(FaultKind::TileBounds { found: [row + rows, col + cols], bound: [self.rows, self.cols] });
        }
        let base = self.base + row * self.row_stride + col * self.col_stride;
        Self { base, rows, cols, ..*self }
    }

    /// Columns `start .. start + count`.
    #[inline(always)]
    pub fn columns(&self, start: usize, count: usize) -> Self {
        self.part(0, start, self.rows, count)
    }

    /// Rows `start .. start + count`.
    #[inline(always)]
    pub fn row_range(&self, start: usize, count: usize) -> Self {
        self.part(start, 0, count, self.cols)
    }

    /// The transpose.
    #[inline(always)]
    pub fn t(&self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..*self }
    }

    fn retype<F>(&self) -> Shared<F> {
        let Self { base, rows, cols, row_stride, col_stride, .. } = *self;
        Shared { base, rows, cols, row_stride, col_stride, element: PhantomData }
    }
}

/// What a block's warpgroups share.
pub(super) struct BlockShared {
    arena: *mut f32,
    arena_len: usize,
    ticket: Cell<u64>,
    votes: Cell<bool>,
    epoch: Cell<u32>,
    log: Option<std::cell::RefCell<SharedLog>>,
}

/// One warpgroup of a block: 128 threads on a GPU, one coroutine here.
pub struct Warpgroup<'a> {
    index: usize,
    count: usize,
    block: usize,
    grid: usize,
    block_shared: Rc<BlockShared>,
    yielder: Option<&'a Yielder<(), ()>>,
    launch: &'a LaunchContext<'a>,
    arena_cursor: usize,
    byte_cursor: usize,
    own_epoch: u32,
}

impl<'a> Warpgroup<'a> {
    /// This warpgroup's number in its block.
    #[inline(always)]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Warpgroups in the block.
    #[inline(always)]
    pub fn count(&self) -> usize {
        self.count
    }

    /// This block's number in the grid.
    #[inline(always)]
    pub fn block(&self) -> usize {
        self.block
    }

    /// Blocks in the grid.
    #[inline(always)]
    pub fn grid(&self) -> usize {
        self.grid
    }

    /// A tile that the whole block shares. Every warpgroup calls this in the same order.
    pub fn shared<E: Element>(&mut self, rows: usize, cols: usize) -> Shared<E> {
        self.allocate(rows, cols, 1, 0)
    }

    /// A tile for the operand copy of `wide`, which is this warpgroup's own: `wide` itself if operands are f32.
    pub fn private_operand<E: Element>(&mut self, wide: Shared<f32>) -> Shared<E> {
        if E::WIDE { wide.retype() } else { self.private(wide.rows, wide.cols) }
    }

    /// A tile of this warpgroup's own. Every warpgroup calls this in the same order.
    pub fn private<E: Element>(&mut self, rows: usize, cols: usize) -> Shared<E> {
        self.allocate(rows, cols, self.count, self.index)
    }

    /// Compares what has been allocated with what the launcher is told to provide: the kernel's `shared_bytes`.
    pub fn expect_shared(&self, bytes: usize) {
        if self.byte_cursor != bytes {
            check::raise(FaultKind::SharedSize { allocated: self.byte_cursor, declared: bytes });
        }
    }

    fn allocate<E: Element>(&mut self, rows: usize, cols: usize, copies: usize, which: usize) -> Shared<E> {
        let len = rows * cols;
        self.byte_cursor += tile_bytes(rows, cols, E::CODE.size()) * copies;
        if self.byte_cursor > SHARED_BYTES {
            check::raise(FaultKind::SharedBudget { asked: self.byte_cursor, limit: SHARED_BYTES });
        }
        let base = self.arena_cursor + len * which;
        self.arena_cursor += len * copies;
        assert!(self.arena_cursor <= self.block_shared.arena_len, "the arena covers the budget in the smallest type");
        Shared { base, rows, cols, row_stride: cols, col_stride: 1, element: PhantomData }
    }

    /// Barrier of this warpgroup.
    pub fn sync(&mut self) {
        self.own_epoch += 1;
    }

    /// Barrier of the block.
    pub fn sync_block(&mut self) {
        self.own_epoch += 1;
        match self.yielder {
            Some(yielder) => yielder.suspend(()),
            None => self.block_shared.epoch.set(self.block_shared.epoch.get() + 1),
        }
    }

    /// Barrier of the block that tells whether `vote` was true on all warpgroups.
    pub fn sync_and(&mut self, vote: bool) -> bool {
        self.sync_block();
        if self.index == 0 {
            self.block_shared.votes.set(true);
        }
        self.sync_block();
        if !vote {
            self.block_shared.votes.set(false);
        }
        self.sync_block();
        self.block_shared.votes.get()
    }

    /// The next number of the counter `ticket` (one u64), the same for the whole block; contains barriers.
    pub fn next_ticket(&mut self, ticket: crate::params::Array) -> u64 {
        self.sync_block();
        if self.index == 0 {
            let number = self.word(ticket, 0).fetch_add(1, core::sync::atomic::Ordering::Relaxed);
            self.block_shared.ticket.set(number);
        }
        self.sync_block();
        self.block_shared.ticket.get()
    }

    /// The first warpgroup's `value`, for the whole block; contains barriers.
    pub fn share_block(&mut self, value: u64) -> u64 {
        self.sync_block();
        if self.index == 0 {
            self.block_shared.ticket.set(value);
        }
        self.sync_block();
        self.block_shared.ticket.get()
    }

    /// Runs `f` on one thread and gives its result to the whole warpgroup; contains a barrier of the warpgroup.
    pub fn elect<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> T {
        let result = f(self);
        self.sync();
        result
    }

    /// Nanoseconds on this PE's clock.
    #[inline(always)]
    pub fn clock(&self) -> u64 {
        self.launch.clock()
    }

    /// Between two polls of a wait that has lasted `waited` nanoseconds.
    pub fn relax(&self, waited: u64) {
        match waited {
            0..20_000 => std::hint::spin_loop(),
            20_000..1_000_000 => std::thread::yield_now(),
            _ => std::thread::sleep(std::time::Duration::from_micros(50)),
        }
    }

    /// Whether waiting on is useless: another PE has failed.
    pub fn give_up(&self, _: &crate::params::Channel) -> bool {
        (self.launch.peer_failed)()
    }

    /// Records a span, if there is a trace. Call on one thread ([`Warpgroup::elect`]).
    pub fn stamp(&self, trace: &TraceBuffer, kind: StampKind, span: [u64; 2], [head, part]: [u32; 2], bytes: u64) {
        if trace.cursor.len == 0 {
            return;
        }
        // Relaxed: the cursor only hands out places; the host reads the stamps after the launch.
        let place = self.word(trace.cursor, 0).fetch_add(1, core::sync::atomic::Ordering::Relaxed);
        if place < trace.stamps.len {
            let [start_ns, end_ns] = span;
            let stamp = Stamp { start_ns, end_ns, kind: kind as u32, block: self.block as u32, head, part, bytes };
            // SAFETY: the place is inside the array and handed out once; the launcher vouches for the array.
            unsafe { (trace.stamps.addr as *mut Stamp).wrapping_add(place as usize).write(stamp) };
        }
    }

    /// [`Warpgroup::stamp`] by one thread of the block's first warpgroup.
    pub fn stamp_block(&self, trace: &TraceBuffer, kind: StampKind, span: [u64; 2], place: [u32; 2], bytes: u64) {
        if self.index == 0 {
            self.stamp(trace, kind, span, place, bytes);
        }
    }
}

const _: () = assert!(MAX_WARPGROUPS <= 255, "the log keeps a warpgroup in a byte");

/// What a tile's element must be able to do; on the CPU every [`Element`] can.
pub trait OperandElement: Element {}
impl<E: Element> OperandElement for E {}

/// Adds 1 with acquire and release ordering and returns the sum.
pub fn increment_acq_rel(word: &core::sync::atomic::AtomicU64) -> u64 {
    word.fetch_add(1, core::sync::atomic::Ordering::AcqRel) + 1
}
