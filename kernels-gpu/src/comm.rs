//! The protocol of [`crate::protocol`] inside a kernel: collective operations of a warpgroup that send, await
//! and acknowledge summaries. None of them blocks forever: a wait that runs out leaves a [`TrapRecord`] for the
//! host and returns false, and the kernel then ends.

mod empty;
mod parts;

use core::sync::atomic::Ordering;

pub use empty::Sources;
pub use parts::SlotPart;

use crate::element::DtypeCode;
use crate::params::{Array, Channel, Matrix, StampKind, Target, Tensor, TraceBuffer};
use crate::protocol::{self, Expired, Medium, Message, TrapRecord, Wait, Watch, Writable};
use crate::tile::{OperandElement, Shared, Warpgroup};

#[cfg(any(not(target_arch = "nvptx64"), feature = "nvshmem"))]
mod puts;

/// How long a wait lasts before, and between, looks at whether it is useless, in nanoseconds. The look reads memory of the
/// host, and no wait that ends well may be longer for it: walks that looked after 5 us took some 100 us more where they waited.
const LOOK_NS: u64 = 2_000_000;

/// Words of [`crate::params::StepStats`].
const BYTES_SENT: usize = 0;
const MESSAGES: usize = 1;
const EMPTY_MESSAGES: usize = 2;
const SIGNAL_WAIT_NS: usize = 3;
const SLOT_WAIT_NS: usize = 4;

/// A kernel's side of a channel: the channel, the kernel's number for error messages, and where to stamp time.
#[derive(Clone, Copy)]
pub struct Port<'p> {
    /// The channel.
    pub channel: &'p Channel,
    /// Time stamps.
    pub trace: &'p TraceBuffer,
    /// Number of the kernel in error messages: a `STEP_*` constant.
    pub step: u32,
    /// Element type of M on the wire.
    pub m_dtype: DtypeCode,
}

/// [`Port::step`] of the scan.
pub const STEP_SCAN: u32 = 1;
/// [`Port::step`] of the correction.
pub const STEP_FIX: u32 = 2;
/// [`Port::step`] of the reverse scan.
pub const STEP_SCAN_BACK: u32 = 3;
/// [`Port::step`] of the join of parts.
pub const STEP_JOIN: u32 = 5;

/// Whom a segment's summary of one head goes to: a run of the table of targets.
#[derive(Clone, Copy)]
pub struct Targets {
    /// Of [`Target`].
    pub table: Array,
    /// First entry.
    pub first: u32,
    /// Entries.
    pub count: u32,
    /// Value heads.
    pub hv: u32,
    /// The head.
    pub head: u32,
}

impl Targets {
    fn message(&self, wg: &Warpgroup<'_>, port: &Port<'_>, i: u32, block: u32) -> Message {
        let Target { pe: dest, lane } = wg.read(self.table, (self.first + i) as usize);
        let row = lane * self.hv + self.head;
        Message { source: port.channel.pe, dest, row, block, epoch: port.epoch(wg) }
    }
}

/// The memory operations of the protocol, on behalf of one warpgroup.
pub(crate) struct Link<'w, 'a> {
    pub(crate) wg: &'w Warpgroup<'a>,
    pub(crate) port: Port<'w>,
}

impl Link<'_, '_> {
    fn words(&self, pe: u32) -> Array {
        let words = &self.port.channel.words;
        Array { addr: self.wg.read::<u64>(*words, pe as usize), len: self.port.channel.layout.words() as u64 }
    }

    fn own(&self, word: usize) -> &core::sync::atomic::AtomicU64 {
        self.wg.word(self.words(self.port.channel.pe), word)
    }
}

impl Medium for Link<'_, '_> {
    fn pe(&self) -> u32 {
        self.port.channel.pe
    }
    fn load_acquire(&self, word: usize) -> u64 {
        self.own(word).load(Ordering::Acquire)
    }
    fn store_release(&self, pe: u32, word: usize, value: u64) {
        #[cfg(any(not(target_arch = "nvptx64"), feature = "nvshmem"))]
        if self.port.puts_to(self.wg, pe) {
            return self.wg.set_signal(self.port.word_place(self.wg, pe, word), value, pe);
        }
        self.wg.word(self.words(pe), word).store(value, Ordering::Release);
    }
    fn load_local(&self, word: usize) -> u64 {
        self.own(word).load(Ordering::Relaxed)
    }
    fn store_local(&self, word: usize, value: u64) {
        self.own(word).store(value, Ordering::Relaxed);
    }
    fn increment(&self, word: usize) -> u64 {
        crate::tile::increment_acq_rel(self.own(word))
    }
    fn wait(&self, wait: &Wait, mut poll: impl FnMut() -> u64) -> Result<(), Expired> {
        let channel = self.port.channel;
        let mut found = poll();
        if wait.met_by(found) {
            return Ok(());
        }
        let start = self.wg.clock();
        let mut look = LOOK_NS;
        loop {
            let waited = self.wg.clock() - start;
            if waited > look {
                if waited > channel.timeout_ns || self.wg.give_up(channel) {
                    // The last epoch that the peer has signalled, of either parity.
                    let found = wait.sibling().map_or(found, |other| found.max(self.load_acquire(other)));
                    return Err(wait.expired(channel.pe, self.port.step, found, waited));
                }
                look = waited + LOOK_NS;
            }
            self.wg.relax(waited);
            found = poll();
            if wait.met_by(found) {
                return Ok(());
            }
        }
    }
}

impl Port<'_> {
    /// The epoch of this step.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn epoch(&self, wg: &Warpgroup<'_>) -> u64 {
        wg.read(self.channel.epoch, 0)
    }

    /// Whether some block of this PE has given up waiting.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn trapped(&self, wg: &Warpgroup<'_>) -> bool {
        wg.word(self.trap_state(), 0).load(Ordering::Relaxed) != TrapRecord::CLEAR
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn trap_state(&self) -> Array {
        Array { addr: self.channel.trap.addr, len: 1 }
    }

    /// Leaves `expired` for the host, unless an earlier one is there.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) fn trap(&self, wg: &Warpgroup<'_>, expired: Expired) {
        let state = wg.word(self.trap_state(), 0);
        // Relaxed claim: it only elects a writer. The release store below publishes the record.
        if state.compare_exchange(TrapRecord::CLEAR, TrapRecord::CLAIMED, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            let record = self.channel.trap.addr as *mut TrapRecord;
            // SAFETY: the claim makes this the only writer, and nobody reads the record before the state is SET.
            unsafe { (&raw mut (*record).expired).write(expired) };
            state.store(TrapRecord::SET, Ordering::Release);
            // The host may look at any time, and cannot reach the record where it was claimed: no exchange works there.
            let copy = self.channel.watch.addr as *mut Watch;
            // SAFETY: this is the only writer, as above, and the host reads the record only after it has read SET.
            let state = unsafe {
                (&raw mut (*copy).trap.expired).write(expired);
                core::sync::atomic::AtomicU64::from_ptr(&raw mut (*copy).trap.state)
            };
            state.store(TrapRecord::SET, Ordering::Release);
        }
    }

    /// Runs a wait of the protocol on one thread: counts and stamps its time, and traps if it expired.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wait<T>(
        &self,
        wg: &mut Warpgroup<'_>,
        counter: usize,
        kind: StampKind,
        (row, block): (u32, u32),
        wait: impl Fn(&Link<'_, '_>) -> Result<T, Expired>,
    ) -> Option<T> {
        let start = wg.clock();
        let result = wait(&Link { wg, port: *self });
        let end = wg.clock();
        wg.word(self.channel.stats, counter).fetch_add(end - start, Ordering::Relaxed);
        wg.stamp(self.trace, kind, [start, end], [row, block], 0);
        match result {
            Ok(value) => Some(value),
            Err(expired) => {
                self.trap(wg, expired);
                None
            }
        }
    }

    /// The slot of `message` as a matrix `[columns, K]` in the payload memory of `pe`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn slot(&self, wg: &Warpgroup<'_>, pe: u32, message: &Message) -> Matrix {
        let layout = &self.channel.layout;
        let slot = message.slot(layout);
        let dtype = if layout.is_state(message.block) { DtypeCode::F32 } else { self.m_dtype };
        let (k, columns) = (layout.k as usize, layout.columns(message.block).1 as usize);
        let base: u64 = wg.read(self.channel.payload, pe as usize);
        Tensor::new(base + slot.offset as u64, columns * k, dtype).matrix(0, columns, k, k, 1)
    }

    /// Waits until the slot of `message` may be written; nothing if it did not become free in time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn free_slot(&self, wg: &mut Warpgroup<'_>, message: Message) -> Option<Writable> {
        let layout = &self.channel.layout;
        wg.elect(|wg| {
            self.wait(wg, SLOT_WAIT_NS, StampKind::SlotWait, (message.row, message.block), |link| {
                protocol::before_write(link, layout, message)
            })
        })
    }

    /// Sends `tile`, block `block`, to every target: waits for the slot, stores, signals. False if a slot did not
    /// become free in time. What cannot be stored is put, out of this PE's own slot of `send_row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn push<E: OperandElement>(
        &self,
        wg: &mut Warpgroup<'_>,
        targets: Targets,
        send_row: u32,
        block: u32,
        tile: Shared<E>,
    ) -> bool {
        let layout = &self.channel.layout;
        #[cfg(any(not(target_arch = "nvptx64"), feature = "nvshmem"))]
        if !self.put_where_needed(wg, targets, send_row, block, tile) {
            return false;
        }
        for i in 0..targets.count {
            let message = targets.message(wg, self, i, block);
            #[cfg(any(not(target_arch = "nvptx64"), feature = "nvshmem"))]
            if self.puts_to(wg, message.dest) {
                continue;
            }
            let Some(writable) = self.free_slot(wg, message) else { return false };
            let start = wg.clock();
            wg.store(self.slot(wg, message.dest, &message), tile);
            // Every thread's part of the tile is stored before one of them signals.
            wg.sync();
            wg.elect(|wg| {
                protocol::publish(&Link { wg, port: *self }, layout, writable);
                self.count_message(wg, &message, start);
            });
        }
        let _ = send_row; // only puts need it
        true
    }

    /// Bulk mode: leaves `tile` in this PE's own slot of `send_row`, from which the host's exchange takes it,
    /// once every target has read what it got before. False if one did not in time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn stage<E: OperandElement>(
        &self,
        wg: &mut Warpgroup<'_>,
        targets: Targets,
        send_row: u32,
        block: u32,
        tile: Shared<E>,
    ) -> bool {
        let layout = &self.channel.layout;
        for i in 0..targets.count {
            let message = targets.message(wg, self, i, block);
            let Some(writable) = self.free_slot(wg, message) else { return false };
            wg.elect(|wg| {
                protocol::leave_to_exchange(&Link { wg, port: *self }, layout, writable);
                let now = wg.clock();
                self.count_message(wg, &message, now);
            });
        }
        let own = self.staged(wg, send_row, block);
        wg.store(self.slot(wg, self.channel.pe, &own), tile);
        true
    }

    /// The slot of this PE's own out of which `block` leaves, where it is not stored at its destination.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn staged(&self, wg: &Warpgroup<'_>, send_row: u32, block: u32) -> Message {
        let pe = self.channel.pe;
        Message { source: pe, dest: pe, row: send_row, block, epoch: self.epoch(wg) }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn count_message(&self, wg: &Warpgroup<'_>, message: &Message, start: u64) {
        let bytes = self.channel.layout.block_bytes(message.block) as u64;
        wg.word(self.channel.stats, BYTES_SENT).fetch_add(bytes, Ordering::Relaxed);
        wg.word(self.channel.stats, MESSAGES).fetch_add(1, Ordering::Relaxed);
        wg.stamp(self.trace, StampKind::Put, [start, wg.clock()], [message.row, message.block], bytes);
    }

    /// Waits for block `block` of row `row` from `source`. False if it did not arrive in time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn receive(&self, wg: &mut Warpgroup<'_>, source: u32, row: u32, block: u32) -> bool {
        let message = Message { source, dest: self.channel.pe, row, block, epoch: self.epoch(wg) };
        let layout = &self.channel.layout;
        wg.elect(|wg| {
            self.wait(wg, SIGNAL_WAIT_NS, StampKind::Wait, (row, block), |link| {
                protocol::receive(link, layout, message)
            })
        })
        .is_some()
    }

    /// The slot of a message that is known to have arrived.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn received(&self, wg: &Warpgroup<'_>, source: u32, row: u32, block: u32) -> Matrix {
        let message = Message { source, dest: self.channel.pe, row, block, epoch: self.epoch(wg) };
        self.slot(wg, self.channel.pe, &message)
    }

    /// Notes that one of the readers of `row` (there is one for each block of S) has read all it needs. The sources
    /// are entries `first ..` of the table of sources.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn finish_reading(&self, wg: &mut Warpgroup<'_>, row: u32, table: Array, first: u32, count: u32) {
        let (layout, epoch) = (&self.channel.layout, self.epoch(wg));
        wg.elect(|wg| {
            let sources = (first..first + count).map(|i| wg.read::<u32>(table, i as usize));
            let link = Link { wg, port: *self };
            protocol::finish_reading(&link, layout, row, epoch, layout.s_blocks().into(), sources);
        });
    }

    /// Tells this PE's other blocks that the state before block `block` of `row` is merged and stored.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn publish_merged(&self, wg: &mut Warpgroup<'_>, row: u32, block: u32) {
        let epoch = self.epoch(wg);
        wg.elect(|wg| protocol::publish_merged(&Link { wg, port: *self }, &self.channel.layout, row, block, epoch));
    }

    /// Waits for [`Port::publish_merged`]. False if it did not come in time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn await_merged(&self, wg: &mut Warpgroup<'_>, row: u32, block: u32) -> bool {
        let (layout, epoch) = (&self.channel.layout, self.epoch(wg));
        let done = wg.elect(|wg| {
            self.wait(wg, SIGNAL_WAIT_NS, StampKind::Wait, (row, block), |link| {
                protocol::await_merged(link, layout, row, block, epoch)
            })
        });
        done.is_some()
    }
}
