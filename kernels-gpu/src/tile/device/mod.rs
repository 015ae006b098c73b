//! The GPU back end of the tile DSL: each operation is what one of a warpgroup's 128 threads does of it.
//!
//! Names, signatures and rules are those of the CPU back end ([`super::host`] on other targets), which
//! checks what cannot be checked here. Rows of a shared tile are padded by 16 bytes, so that the eight rows
//! that `ldmatrix` reads at once lie in different banks.
//!
//! compute-sanitizer's racecheck (seen with 2025.3.1) reports a write before a barrier of the block and a read after it as
//! a hazard where the writing warpgroup has passed one barrier of its own more than the reading one: it seems to count
//! barriers of all kinds alike. With the feature `racecheck` all warpgroups pass equally many before each barrier of the
//! block, so that what that tool reports is a race.

mod acc;
mod backward;
mod bounds;
mod convolution;
mod fragment;
mod global;
mod ops;
#[cfg(feature = "nvshmem")]
mod put;
// Every PE's memory is reached, as on the CPU.
#[cfg(emulated)]
#[path = "../host/put.rs"]
mod put;
mod rows;
mod shared;

pub use acc::Acc;
pub use shared::{DeviceElement, Shared};

use core::sync::atomic::{AtomicU64, Ordering};

use cuda_std::{ptx, thread, warp};

use super::{RESERVED_BYTES, padded_columns, tile_bytes};
use crate::element::Element;
use crate::params::{Array, Channel, Stamp, StampKind, TraceBuffer};

/// Threads of a warpgroup.
const THREADS: u32 = 128;
/// Number of the barrier of [`Warpgroup::give`]: 0 is the block's, those after it are warpgroups'.
const GIVEN: u32 = 5;
/// Shared bytes, at the start of the reserved area, in which one thread's result is given to its warpgroup.
const ELECT_BYTES: u32 = 64;
/// Where the block's ticket and vote lie in the reserved area: behind the warpgroups' elect slots.
const TICKET_AT: u32 = ELECT_BYTES * super::MAX_WARPGROUPS as u32;
const VOTE_AT: u32 = TICKET_AT + 8;

/// Barriers of one warpgroup between two of the block, with the feature `racecheck`. No kernel has more: the most are the
/// two for each row of a triangular inverse.
#[cfg(feature = "racecheck")]
const LEVEL: u32 = 160;

/// One thread's view of its warpgroup.
pub struct Warpgroup<'a> {
    index: u32,
    count: u32,
    /// Thread in the warpgroup.
    thread: u32,
    /// Shared address of the block's dynamic memory, and of the next tile.
    base: u32,
    cursor: u32,
    /// Barriers of this warpgroup's own since the last one of the block.
    #[cfg(feature = "racecheck")]
    own_barriers: u32,
    launch: core::marker::PhantomData<&'a ()>,
}

impl Warpgroup<'_> {
    /// The calling thread's warpgroup.
    ///
    /// # Safety
    /// Once per thread, at the start of a kernel whose block size is a multiple of 128.
    pub unsafe fn enter() -> Self {
        let thread = thread::thread_idx_x();
        let base = cuda_std::shared::dynamic();
        // From one lane, so that the assembler sees that a warp has one index and branches on it do not diverge.
        // SAFETY: the kernel begins here, so that all lanes of the warp are here.
        let index = unsafe { cuda_std::warp::shuffle_idx(thread / THREADS, 0) };
        Self {
            index,
            count: thread::block_dim_x() / THREADS,
            thread: thread % THREADS,
            base,
            cursor: base + RESERVED_BYTES as u32,
            #[cfg(feature = "racecheck")]
            own_barriers: 0,
            launch: core::marker::PhantomData,
        }
    }

    /// This warpgroup's number in its block.
    #[inline(always)]
    pub fn index(&self) -> usize {
        self.index as usize
    }

    /// Warpgroups in the block.
    #[inline(always)]
    pub fn count(&self) -> usize {
        self.count as usize
    }

    /// This block's number in the grid.
    #[inline(always)]
    pub fn block(&self) -> usize {
        thread::block_idx_x() as usize
    }

    /// Blocks in the grid.
    #[inline(always)]
    pub fn grid(&self) -> usize {
        thread::grid_dim_x() as usize
    }

    /// Warp in the warpgroup and lane in the warp.
    #[inline(always)]
    fn warp_lane(&self) -> (u32, u32) {
        (self.thread / 32, self.thread % 32)
    }

    /// A tile that the whole block shares.
    #[inline(always)]
    pub fn shared<E: Element>(&mut self, rows: usize, cols: usize) -> Shared<E> {
        self.allocate(rows, cols, 1, 0)
    }

    /// A tile of this warpgroup's own.
    #[inline(always)]
    pub fn private<E: Element>(&mut self, rows: usize, cols: usize) -> Shared<E> {
        self.allocate(rows, cols, self.count, self.index)
    }

    /// A tile for the operand copy of `wide`: `wide` itself if operands are f32.
    #[inline(always)]
    pub fn private_operand<E: Element>(&mut self, wide: Shared<f32>) -> Shared<E> {
        if E::WIDE { wide.retype() } else { self.private(wide.rows(), wide.cols()) }
    }

    /// Checked by the CPU back end.
    #[inline(always)]
    pub fn expect_shared(&self, _: usize) {}

    #[inline(always)]
    fn allocate<E: Element>(&mut self, rows: usize, cols: usize, copies: u32, which: u32) -> Shared<E> {
        let bytes = tile_bytes(rows, cols, E::CODE.size()) as u32;
        let addr = self.cursor + bytes * which;
        self.cursor += bytes * copies;
        Shared::new(addr, rows as u32, cols as u32, padded_columns(cols, E::CODE.size()) as u32)
    }

    /// Barrier of this warpgroup.
    #[inline(always)]
    pub fn sync(&mut self) {
        #[cfg(feature = "racecheck")]
        {
            self.own_barriers += 1;
        }
        const { assert!(super::MAX_WARPGROUPS == 4) };
        // The id stands in the instruction: with one in a register the assembler would reserve all 16 barriers.
        // SAFETY: control flow around tile operations is uniform in the warpgroup, and so is its index; barrier 0 is the
        // block's.
        unsafe {
            match self.index {
                0 => ptx::bar_sync_id::<1, THREADS>(),
                1 => ptx::bar_sync_id::<2, THREADS>(),
                2 => ptx::bar_sync_id::<3, THREADS>(),
                _ => ptx::bar_sync_id::<4, THREADS>(),
            }
        }
    }

    /// Barrier of the block.
    #[inline(always)]
    pub fn sync_block(&mut self) {
        #[cfg(feature = "racecheck")]
        self.level_barriers();
        thread::sync_threads();
    }

    /// Says that this warpgroup has read what another one, that calls [`Warpgroup::sync_given`], overwrites next, and goes on. All
    /// `warpgroups` of the block come to one of the two.
    ///
    /// Not a barrier of the block that all wait for: nobody needs that, and compute-sanitizer's synccheck takes one for an error where
    /// warpgroups come to it from different places.
    #[inline(always)]
    pub fn give(&mut self, warpgroups: usize) {
        const { assert!(super::MAX_WARPGROUPS == 4 && GIVEN > 4) };
        // SAFETY: all warpgroups of the block come; whole warps do, whose lanes meet first: the barrier counts warps.
        unsafe {
            warp::sync();
            match warpgroups {
                2 => ptx::bar_arrive_id::<GIVEN, 256>(),
                3 => ptx::bar_arrive_id::<GIVEN, 384>(),
                _ => ptx::bar_arrive_id::<GIVEN, 512>(),
            }
        }
    }

    /// Waits until all other warpgroups have come to [`Warpgroup::give`].
    #[inline(always)]
    pub fn sync_given(&mut self, warpgroups: usize) {
        // SAFETY: as of `give`.
        unsafe {
            warp::sync();
            match warpgroups {
                2 => ptx::bar_sync_id::<GIVEN, 256>(),
                3 => ptx::bar_sync_id::<GIVEN, 384>(),
                _ => ptx::bar_sync_id::<GIVEN, 512>(),
            }
        }
    }

    /// Passes as many more barriers of this warpgroup as it takes to have passed [`LEVEL`] since the last one of the block.
    #[cfg(feature = "racecheck")]
    fn level_barriers(&mut self) {
        assert!(self.own_barriers <= LEVEL);
        while self.own_barriers < LEVEL {
            self.sync();
        }
        self.own_barriers = 0;
    }

    /// Barrier of the block that tells whether `vote`, which is the same for a warpgroup, was true on all of them.
    pub fn sync_and(&mut self, vote: bool) -> bool {
        let at = self.base + VOTE_AT;
        self.sync_block();
        // SAFETY: the reserved area is this module's; each warpgroup writes a word of its own, and the barriers order the
        // accesses.
        unsafe {
            if self.thread == 0 {
                ptx::st_shared_u32(at + 4 * self.index, vote as u32);
            }
            self.sync_block();
            let (mut all, mut i) = (1, 0);
            while i < self.count {
                all &= ptx::ld_shared_u32(at + 4 * i);
                i += 1;
            }
            all != 0
        }
    }

    /// The next number of the counter `ticket` (one u64), the same for the whole block; contains barriers.
    pub fn next_ticket(&mut self, ticket: Array) -> u64 {
        let at = self.base + TICKET_AT;
        self.sync_block();
        // SAFETY: as in `sync_and`.
        unsafe {
            if thread::thread_idx_x() == 0 {
                let number = self.word(ticket, 0).fetch_add(1, Ordering::Relaxed);
                ptx::st_shared_u64(at, number);
            }
            self.sync_block();
            ptx::ld_shared_u64(at)
        }
    }

    /// The first warpgroup's `value`, for the whole block; contains barriers.
    #[inline(always)]
    pub fn share_block(&mut self, value: u64) -> u64 {
        let at = self.base + TICKET_AT;
        self.sync_block();
        // SAFETY: as in `sync_and`.
        unsafe {
            if thread::thread_idx_x() == 0 {
                ptx::st_shared_u64(at, value);
            }
            self.sync_block();
            ptx::ld_shared_u64(at)
        }
    }

    /// Runs `f` on one thread and gives its result, of at most 64 bytes, to the whole warpgroup; contains barriers.
    pub fn elect<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> T {
        const { assert!(size_of::<T>() <= ELECT_BYTES as usize && align_of::<T>() <= 16) };
        // SAFETY: the slot is this warpgroup's, large enough, and the barriers order the accesses. Every thread takes
        // a bitwise copy of the value; T is plain data (no T with a destructor is used by kernels).
        unsafe {
            let slot = ptx::cvta_shared_u64((self.base + ELECT_BYTES * self.index).into()) as *mut T;
            self.sync();
            if self.thread == 0 {
                slot.write(f(self));
            }
            self.sync();
            slot.read()
        }
    }

    /// Nanoseconds on the device's clock.
    #[inline(always)]
    pub fn clock(&self) -> u64 {
        // SAFETY: reads a special register.
        unsafe { ptx::globaltimer() }
    }

    /// Between two polls of a wait that has lasted `waited` nanoseconds.
    #[inline(always)]
    pub fn relax(&self, waited: u64) {
        if waited > 20_000 {
            // SAFETY: only delays this thread.
            unsafe { ptx::nanosleep(200) }
        }
    }

    /// Whether waiting on is useless: another block of this PE has given up, or the host says that another PE has failed.
    #[inline(always)]
    pub fn give_up(&self, channel: &Channel) -> bool {
        let word = |addr| self.word(Array { addr, len: 1 }, 0).load(Ordering::Relaxed);
        word(channel.trap.addr) != crate::protocol::TrapRecord::CLEAR || word(channel.watch.addr) != 0
    }

    /// Records a span, if there is a trace. Call on one thread ([`Warpgroup::elect`]).
    pub fn stamp(&self, trace: &TraceBuffer, kind: StampKind, span: [u64; 2], [head, part]: [u32; 2], bytes: u64) {
        if trace.cursor.len == 0 {
            return;
        }
        let place = self.word(trace.cursor, 0).fetch_add(1, Ordering::Relaxed);
        if place < trace.stamps.len {
            let [start_ns, end_ns] = span;
            let block = self.block() as u32;
            let stamp = Stamp { start_ns, end_ns, kind: kind as u32, block, head, part, bytes };
            // SAFETY: the place is inside the array and handed out once; the launcher vouches for the array.
            unsafe { (trace.stamps.addr as *mut Stamp).wrapping_add(place as usize).write(stamp) };
        }
    }

    /// [`Warpgroup::stamp`] by one thread of the block.
    pub fn stamp_block(&self, trace: &TraceBuffer, kind: StampKind, span: [u64; 2], place: [u32; 2], bytes: u64) {
        if thread::thread_idx_x() == 0 {
            self.stamp(trace, kind, span, place, bytes);
        }
    }
}

/// Adds 1 with acquire and release ordering and returns the sum.
#[inline(always)]
pub fn increment_acq_rel(word: &AtomicU64) -> u64 {
    // A fetch_add with an ordering loses it on this target: the wrapper states it in the instruction.
    // SAFETY: a valid, aligned word.
    unsafe { ptx::atom_add_acq_rel_gpu_u64(word.as_ptr(), 1) + 1 }
}
