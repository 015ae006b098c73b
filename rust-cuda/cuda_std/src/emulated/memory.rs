//! The shared memory of a block, and for every two bytes of it who touched them last.

use super::clocks::{Clocks, Moment};
use super::fault::FaultKind;

/// Where dynamic shared memory begins in the shared window: not at 0, as on hardware, and aligned to 1024.
pub(crate) const BASE: u32 = 1024;

/// Bytes that a record stands for.
const GRAIN: u32 = 2;

/// How two bytes of shared memory were used.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    written: Moment,
    /// The last reader only.
    read: Moment,
    /// Number of the last ordinary write, counted over the block; 0 if the last writer was a bulk copy.
    ordinary: u32,
    /// Asynchronous copies that will write here.
    incoming: u8,
    /// Asynchronous copies and products that read here.
    outgoing: u8,
    barrier: bool,
}

/// Shared memory.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// In words of 16 bytes, so that pointers into it are aligned as shared addresses are.
    words: Vec<u128>,
    records: Vec<Record>,
    bytes: u32,
    /// Ordinary writes and proxy fences, counted over the block.
    events: u32,
    /// When each thread last ordered its ordinary accesses before asynchronous ones.
    fences: Vec<u32>,
}

/// Who accesses memory asynchronously and on whose behalf, for messages and for what is ordered.
#[derive(Clone, Copy)]
pub(crate) struct Agent<'a> {
    pub(crate) thread: usize,
    pub(crate) clocks: &'a Clocks,
}

impl Memory {
    /// Memory of `bytes` bytes for a block of `threads`; every number in it is NaN.
    pub(crate) fn reset(&mut self, bytes: u32, threads: usize) {
        self.bytes = bytes;
        self.words.clear();
        self.words.resize(bytes.div_ceil(16) as usize, u128::MAX);
        self.records.clear();
        self.records.resize(bytes.div_ceil(GRAIN) as usize, Record::default());
        self.fences.clear();
        self.fences.resize(threads, 0);
        self.events = 0;
    }

    /// Pointer to the byte at shared address `address`; may lie outside, as an address may.
    pub(crate) fn pointer(&mut self, address: u64) -> *mut u8 {
        self.words.as_mut_ptr().cast::<u8>().wrapping_add((address as usize).wrapping_sub(BASE as usize))
    }

    fn all(&self) -> &[u8] {
        // SAFETY: plain bytes of the vector, all initialised.
        unsafe { core::slice::from_raw_parts(self.words.as_ptr().cast(), self.words.len() * 16) }
    }

    fn all_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { core::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.words.len() * 16) }
    }

    fn place(&self, address: u32, bytes: u32, align: u32) -> Result<usize, FaultKind> {
        let end = BASE + self.bytes;
        if address < BASE || address > end || bytes > end - address {
            return Err(FaultKind::Bounds { address, bytes, start: BASE, end });
        }
        if !address.is_multiple_of(align) {
            return Err(FaultKind::Misaligned { address: address.into(), align });
        }
        Ok((address - BASE) as usize)
    }

    fn records(&mut self, address: u32, bytes: u32) -> &mut [Record] {
        let first = (address - BASE) / GRAIN;
        &mut self.records[first as usize..][..bytes.div_ceil(GRAIN) as usize]
    }

    fn address_of(address: u32, record: usize) -> u32 {
        address + GRAIN * record as u32
    }

    /// What a thread loads.
    pub(crate) fn load<const N: usize>(
        &mut self,
        clocks: &Clocks,
        thread: usize,
        address: u32,
    ) -> Result<[u8; N], FaultKind> {
        let place = self.place(address, N as u32, N as u32)?;
        let now = clocks.now(thread);
        for (i, record) in self.records(address, N as u32).iter_mut().enumerate() {
            let address = Self::address_of(address, i);
            check_reader(record, address, clocks, thread)?;
            record.read = now;
        }
        let mut value = [0; N];
        value.copy_from_slice(&self.all()[place..place + N]);
        Ok(value)
    }

    /// A thread stores, by ordinary means.
    pub(crate) fn store(
        &mut self,
        clocks: &Clocks,
        thread: usize,
        address: u32,
        value: &[u8],
    ) -> Result<(), FaultKind> {
        let bytes = value.len() as u32;
        let place = self.place(address, bytes, bytes)?;
        // Several threads may store one value at the same time, as they do for a vote.
        let same = self.all()[place..place + value.len()] == *value;
        self.note_store(clocks, thread, address, bytes, same)?;
        self.all_mut()[place..place + value.len()].copy_from_slice(value);
        Ok(())
    }

    fn note_store(
        &mut self,
        clocks: &Clocks,
        thread: usize,
        address: u32,
        bytes: u32,
        same: bool,
    ) -> Result<(), FaultKind> {
        self.events += 1;
        let (now, ordinary) = (clocks.now(thread), self.events);
        for (i, record) in self.records(address, bytes).iter_mut().enumerate() {
            check_writer(record, Self::address_of(address, i), clocks, thread, same)?;
            *record = Record { written: now, read: Moment::default(), ordinary, ..*record };
        }
        Ok(())
    }

    /// A thread orders its ordinary accesses before asynchronous ones.
    pub(crate) fn proxy_fence(&mut self, thread: usize) {
        self.events += 1;
        self.fences[thread] = self.events;
    }

    /// A `cp.async` of `thread` will write here.
    pub(crate) fn announce_store(
        &mut self,
        agent: Agent<'_>,
        address: u32,
        bytes: u32,
        align: u32,
    ) -> Result<(), FaultKind> {
        self.place(address, bytes, align)?;
        for (i, record) in self.records(address, bytes).iter_mut().enumerate() {
            check_writer(record, Self::address_of(address, i), agent.clocks, agent.thread, false)?;
            record.incoming += 1;
        }
        Ok(())
    }

    /// As [`Memory::announce_store`], of a bulk copy: ordinary writes before it need a fence as well.
    pub(crate) fn announce_bulk_store(&mut self, agent: Agent<'_>, address: u32, bytes: u32) -> Result<(), FaultKind> {
        self.place(address, bytes, 16)?;
        self.check_fenced(agent.thread, address, bytes)?;
        self.announce_store(agent, address, bytes, 16)
    }

    /// The bytes of an asynchronous copy arrive.
    pub(crate) fn put(&mut self, address: u32, value: &[u8]) {
        let place = (address - BASE) as usize;
        self.all_mut()[place..place + value.len()].copy_from_slice(value);
    }

    /// A copy that was announced is complete: `thread`'s own, ordinary writes (`cp.async`), or the engine's.
    pub(crate) fn complete_store(&mut self, written: Moment, ordinary: bool, address: u32, bytes: u32) {
        self.events += 1;
        let ordinary = if ordinary { self.events } else { 0 };
        for record in self.records(address, bytes) {
            let incoming = record.incoming - 1;
            *record = Record { written, read: Moment::default(), ordinary, incoming, ..*record };
        }
    }

    /// An asynchronous reader may read here until [`Memory::complete_load`].
    pub(crate) fn announce_load(&mut self, agent: Agent<'_>, address: u32, bytes: u32) -> Result<(), FaultKind> {
        self.place(address, bytes, 16)?;
        self.check_fenced(agent.thread, address, bytes)?;
        for (i, record) in self.records(address, bytes).iter_mut().enumerate() {
            check_reader(record, Self::address_of(address, i), agent.clocks, agent.thread)?;
            record.outgoing += 1;
        }
        Ok(())
    }

    /// The end of [`Memory::announce_load`], as `thread` sees it.
    pub(crate) fn complete_load(&mut self, read: Moment, address: u32, bytes: u32) {
        for record in self.records(address, bytes) {
            record.outgoing -= 1;
            record.read = read;
        }
    }

    /// The bytes there, which [`Memory::announce_load`] has checked.
    pub(crate) fn get(&self, address: u32, bytes: u32) -> &[u8] {
        &self.all()[(address - BASE) as usize..][..bytes as usize]
    }

    fn check_fenced(&mut self, thread: usize, address: u32, bytes: u32) -> Result<(), FaultKind> {
        let first = ((address - BASE) / GRAIN) as usize;
        for (i, record) in self.records[first..first + bytes.div_ceil(GRAIN) as usize].iter().enumerate() {
            let writer = record.written.agent();
            if record.ordinary > 0 && self.fences[writer].max(self.fences[thread]) < record.ordinary {
                return Err(FaultKind::NoProxyFence { address: Self::address_of(address, i), writer: writer as u32 });
            }
        }
        Ok(())
    }

    /// Whether these 8 bytes hold an mbarrier from now on.
    pub(crate) fn set_barrier(
        &mut self,
        clocks: &Clocks,
        thread: usize,
        address: u32,
        barrier: bool,
    ) -> Result<(), FaultKind> {
        self.place(address, 8, 8)?;
        for record in self.records(address, 8) {
            record.barrier = false;
        }
        self.note_store(clocks, thread, address, 8, false)?;
        for record in self.records(address, 8) {
            record.barrier = barrier;
            // An mbarrier is not read as data: only its own fence applies to it.
            record.ordinary = 0;
        }
        Ok(())
    }
}

fn check_use(record: &Record, address: u32) -> Result<(), FaultKind> {
    if record.barrier {
        return Err(FaultKind::HoldsBarrier { address });
    }
    if record.incoming > 0 {
        return Err(FaultKind::CopyUnderWay { address, copy: "cp.async or a bulk copy".into() });
    }
    Ok(())
}

fn check_reader(record: &Record, address: u32, clocks: &Clocks, thread: usize) -> Result<(), FaultKind> {
    check_use(record, address)?;
    if !record.written.is_never() && !clocks.ordered(record.written, thread) {
        let (other, engine) = (record.written.agent(), clocks.engine());
        if other == engine {
            return Err(FaultKind::CopyUnderWay { address, copy: "cp.async.bulk".into() });
        }
        return Err(FaultKind::Race { address, other: other as u32, what: "wrote" });
    }
    Ok(())
}

/// `same`: what is written is what is there.
fn check_writer(record: &Record, address: u32, clocks: &Clocks, thread: usize, same: bool) -> Result<(), FaultKind> {
    if same && clocks.is_thread(record.written.agent()) {
        check_use(record, address)?;
    } else {
        check_reader(record, address, clocks, thread)?;
    }
    if record.outgoing > 0 {
        return Err(FaultKind::ReadUnderWay { address, reader: "a product or bulk copy".into() });
    }
    if !record.read.is_never() && !clocks.ordered(record.read, thread) {
        let other = record.read.agent();
        if !clocks.is_thread(other) {
            return Err(FaultKind::ReadUnderWay { address, reader: "a product of another warpgroup".into() });
        }
        return Err(FaultKind::Race { address, other: other as u32, what: "read" });
    }
    Ok(())
}
