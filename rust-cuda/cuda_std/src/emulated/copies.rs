//! Asynchronous copies, and when they happen.

use std::collections::VecDeque;

use super::Timing;
use super::block::Block;
use super::fault::FaultKind;
use super::memory::Agent;

/// A copy of one thread by `cp.async`.
#[derive(Clone, Copy, Debug)]
enum Small {
    Copy {
        to: u32,
        from: *const u8,
        bytes: u32,
    },
    /// An arrival once all before are done.
    Arrive {
        barrier: u32,
    },
}

/// A bulk copy to shared memory.
#[derive(Clone, Copy, Debug)]
struct ToShared {
    to: u32,
    from: *const u8,
    bytes: u32,
    barrier: u32,
}

/// A bulk copy to global memory.
#[derive(Clone, Copy, Debug)]
struct ToGlobal {
    to: *mut u8,
    from: u32,
    bytes: u32,
    /// Whether the bytes have been read, and waited for.
    read: bool,
}

/// What a thread has under way. Groups are the oldest first; the last one is not committed.
#[derive(Debug)]
struct OfThread {
    small: VecDeque<Vec<Small>>,
    bulk: VecDeque<Vec<ToGlobal>>,
}

/// All copies under way.
#[derive(Debug)]
pub(crate) struct Copies {
    threads: Vec<OfThread>,
    to_shared: Vec<ToShared>,
}

/// Bytes of a `cp.async`.
const SMALL: u32 = 16;

impl Copies {
    pub(crate) fn new(threads: usize) -> Self {
        let of_thread = || OfThread { small: VecDeque::from([Vec::new()]), bulk: VecDeque::from([Vec::new()]) };
        Self { threads: std::iter::repeat_with(of_thread).take(threads).collect(), to_shared: Vec::new() }
    }
}

fn aligned(address: u64, align: u32) -> Result<(), FaultKind> {
    match address {
        0 => Err(FaultKind::Null),
        _ if !address.is_multiple_of(align.into()) => Err(FaultKind::Misaligned { address, align }),
        _ => Ok(()),
    }
}

impl Block {
    /// Begins a `cp.async` of `bytes` bytes, zeros behind them.
    pub(crate) fn copy_small(&mut self, to: u32, from: *const u8, bytes: u32) -> Result<(), FaultKind> {
        if bytes > 0 {
            aligned(from as u64, SMALL)?;
        }
        let agent = Agent { thread: self.current, clocks: &self.clocks };
        self.memory.announce_store(agent, to, SMALL, SMALL)?;
        let copy = Small::Copy { to, from, bytes: bytes.min(SMALL) };
        if self.timing == Timing::Eager {
            self.move_small(copy);
        }
        self.copies.threads[self.current].small.back_mut().expect("a group is open").push(copy);
        Ok(())
    }

    fn move_small(&mut self, copy: Small) {
        if let Small::Copy { to, from, bytes } = copy {
            let mut value = [0; SMALL as usize];
            // SAFETY: the caller of `cp.async` vouches for its source until it has waited.
            unsafe { core::ptr::copy_nonoverlapping(from, value.as_mut_ptr(), bytes as usize) };
            self.memory.put(to, &value);
        }
    }

    /// Lets `barrier` count an arrival when this thread's copies so far are done.
    pub(crate) fn copy_small_arrive(&mut self, barrier: u32) -> Result<(), FaultKind> {
        if !self.mbarriers.contains_key(&barrier) {
            return Err(FaultKind::NoBarrier { address: barrier });
        }
        self.copies.threads[self.current].small.back_mut().expect("a group is open").push(Small::Arrive { barrier });
        Ok(())
    }

    pub(crate) fn commit_small(&mut self) {
        self.copies.threads[self.current].small.push_back(Vec::new());
    }

    /// The current thread waits until `groups` of its groups are under way; all copies, if nothing is said.
    pub(crate) fn wait_small(&mut self, groups: Option<usize>) -> Result<(), FaultKind> {
        let thread = self.current;
        if groups.is_none() {
            self.commit_small();
        }
        while self.copies.threads[thread].small.len() > groups.unwrap_or(0) + 1 {
            self.finish_small(thread)?;
        }
        Ok(())
    }

    /// The oldest group of `thread`'s is done.
    fn finish_small(&mut self, thread: usize) -> Result<(), FaultKind> {
        for copy in self.copies.threads[thread].small.pop_front().unwrap_or_default() {
            match copy {
                Small::Copy { to, .. } => {
                    if self.timing == Timing::Lazy {
                        self.move_small(copy);
                    }
                    self.memory.complete_store(self.clocks.now(thread), true, to, SMALL);
                }
                Small::Arrive { barrier } => self.mbarrier_arrive(barrier, thread, 1, 0)?,
            }
        }
        Ok(())
    }

    /// Begins a bulk copy to shared memory, whose bytes `barrier` counts.
    pub(crate) fn copy_to_shared(
        &mut self,
        to: u32,
        from: *const u8,
        bytes: u32,
        barrier: u32,
    ) -> Result<(), FaultKind> {
        if bytes == 0 || !bytes.is_multiple_of(16) {
            return Err(FaultKind::CopyBytes { bytes });
        }
        aligned(from as u64, 16)?;
        if !self.mbarriers.contains_key(&barrier) {
            return Err(FaultKind::NoBarrier { address: barrier });
        }
        let agent = Agent { thread: self.current, clocks: &self.clocks };
        self.memory.announce_bulk_store(agent, to, bytes)?;
        let copy = ToShared { to, from, bytes, barrier };
        match self.timing {
            Timing::Eager => self.arrive_in_shared(copy),
            Timing::Lazy => {
                self.copies.to_shared.push(copy);
                Ok(())
            }
        }
    }

    fn arrive_in_shared(&mut self, copy: ToShared) -> Result<(), FaultKind> {
        let ToShared { to, from, bytes, barrier } = copy;
        // SAFETY: the caller of the copy vouches for its source until the barrier says that it is done.
        self.memory.put(to, unsafe { core::slice::from_raw_parts(from, bytes as usize) });
        self.mbarrier_bytes(barrier, to, bytes)
    }

    /// Does something that was put off until nobody could go on without it. Whether there was anything.
    pub(crate) fn deliver(&mut self) -> Result<bool, FaultKind> {
        // The youngest first: copies of different groups have no order, and this is the one that surprises.
        if let Some(copy) = self.copies.to_shared.pop() {
            return self.arrive_in_shared(copy).map(|()| true);
        }
        for thread in 0..self.threads.len() {
            let holds = |group: &Vec<Small>| group.iter().any(|copy| matches!(copy, Small::Arrive { .. }));
            if let Some(last) = self.copies.threads[thread].small.iter().rposition(holds) {
                if last + 1 == self.copies.threads[thread].small.len() {
                    self.copies.threads[thread].small.push_back(Vec::new());
                }
                for _ in 0..=last {
                    self.finish_small(thread)?;
                }
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Begins a bulk copy to global memory.
    pub(crate) fn copy_to_global(&mut self, to: *mut u8, from: u32, bytes: u32) -> Result<(), FaultKind> {
        if bytes == 0 || !bytes.is_multiple_of(16) {
            return Err(FaultKind::CopyBytes { bytes });
        }
        aligned(to as u64, 16)?;
        let agent = Agent { thread: self.current, clocks: &self.clocks };
        self.memory.announce_load(agent, from, bytes)?;
        let copy = ToGlobal { to, from, bytes, read: false };
        if self.timing == Timing::Eager {
            self.leave_to_global(copy);
        }
        self.copies.threads[self.current].bulk.back_mut().expect("a group is open").push(copy);
        Ok(())
    }

    fn leave_to_global(&self, copy: ToGlobal) {
        let value = self.memory.get(copy.from, copy.bytes);
        // SAFETY: the caller of the copy vouches for its destination until it has waited.
        unsafe { core::ptr::copy_nonoverlapping(value.as_ptr(), copy.to, value.len()) };
    }

    pub(crate) fn commit_bulk(&mut self) {
        self.copies.threads[self.current].bulk.push_back(Vec::new());
    }

    /// The current thread waits until `groups` of its bulk groups are under way, or still read.
    pub(crate) fn wait_bulk(&mut self, groups: usize, only_read: bool) {
        let thread = self.current;
        let done = self.copies.threads[thread].bulk.len().saturating_sub(groups + 1);
        for number in 0..done {
            let mut group = std::mem::take(&mut self.copies.threads[thread].bulk[number]);
            for copy in group.iter_mut().filter(|copy| !copy.read) {
                if self.timing == Timing::Lazy {
                    self.leave_to_global(*copy);
                }
                copy.read = true;
                self.memory.complete_load(self.clocks.now(thread), copy.from, copy.bytes);
            }
            self.copies.threads[thread].bulk[number] = group;
        }
        if !only_read {
            self.copies.threads[thread].bulk.drain(..done);
        }
    }

    /// What the threads of the block leave under way at their end.
    pub(crate) fn left_under_way(&self) -> Option<(usize, FaultKind)> {
        let ended = |what: &str| FaultKind::EndedEarly { what: what.into() };
        for (thread, copies) in self.copies.threads.iter().enumerate() {
            if copies.small.iter().any(|group| !group.is_empty()) {
                return Some((thread, ended("a cp.async")));
            }
            if copies.bulk.iter().any(|group| !group.iter().all(|copy| copy.read)) {
                return Some((thread, ended("a bulk copy out of shared memory")));
            }
        }
        (!self.copies.to_shared.is_empty()).then(|| (0, ended("a bulk copy into shared memory")))
    }
}
