//! Memory barriers in shared memory.

use super::block::{Block, Status, suspend, with};
use super::clocks::Past;
use super::fault::FaultKind;
use super::site::Site;

/// An mbarrier. It is kept beside the memory that it stands in.
#[derive(Debug)]
pub(crate) struct Mbarrier {
    count: u32,
    /// Arrivals that the phase still needs.
    pending: u32,
    /// Bytes announced and not arrived; below 0 if they came before they were announced.
    bytes: i64,
    /// The phase that is going on, from 0.
    phase: u32,
    /// Phases from the start that some thread has seen complete.
    seen: u32,
    /// What was released to the phase that goes on, and to the last complete one.
    past: Past,
    complete: Past,
}

impl Block {
    pub(crate) fn mbarrier_init(&mut self, address: u32, count: u32) -> Result<(), FaultKind> {
        let thread = self.current;
        if self.mbarriers.contains_key(&address) {
            return Err(FaultKind::HoldsBarrier { address });
        }
        if count == 0 || count >= 1 << 20 {
            return Err(FaultKind::Arrivals { address, phase: 0, count });
        }
        self.memory.set_barrier(&self.clocks, thread, address, true)?;
        let (past, complete) = (self.clocks.past(), self.clocks.past());
        let barrier = Mbarrier { count, pending: count, bytes: 0, phase: 0, seen: 0, past, complete };
        self.mbarriers.insert(address, barrier);
        Ok(())
    }

    pub(crate) fn mbarrier_inval(&mut self, address: u32) -> Result<(), FaultKind> {
        self.mbarriers.remove(&address).ok_or(FaultKind::NoBarrier { address })?;
        self.memory.set_barrier(&self.clocks, self.current, address, false)
    }

    /// Announces `bytes`, then takes `arrivals` of `thread`.
    pub(crate) fn mbarrier_arrive(
        &mut self,
        address: u32,
        thread: usize,
        arrivals: u32,
        bytes: u32,
    ) -> Result<(), FaultKind> {
        let barrier = self.mbarriers.get_mut(&address).ok_or(FaultKind::NoBarrier { address })?;
        barrier.bytes += i64::from(bytes);
        if barrier.pending < arrivals {
            return Err(FaultKind::Arrivals { address, phase: barrier.phase, count: barrier.count });
        }
        barrier.pending -= arrivals;
        if arrivals > 0 {
            self.clocks.release(thread, &mut barrier.past);
        }
        self.complete_phase(address)
    }

    /// `bytes` of a bulk copy to shared memory at `to` have arrived.
    pub(crate) fn mbarrier_bytes(&mut self, address: u32, to: u32, bytes: u32) -> Result<(), FaultKind> {
        let barrier = self.mbarriers.get_mut(&address).ok_or(FaultKind::NoBarrier { address })?;
        barrier.bytes -= i64::from(bytes);
        let moment = self.clocks.copy(&mut barrier.past);
        self.memory.complete_store(moment, false, to, bytes);
        self.complete_phase(address)
    }

    fn complete_phase(&mut self, address: u32) -> Result<(), FaultKind> {
        let barrier = self.mbarriers.get_mut(&address).ok_or(FaultKind::NoBarrier { address })?;
        if barrier.pending > 0 || barrier.bytes != 0 {
            return Ok(());
        }
        if barrier.seen < barrier.phase {
            return Err(FaultKind::Arrivals { address, phase: barrier.phase, count: barrier.count });
        }
        barrier.phase += 1;
        barrier.pending = barrier.count;
        barrier.complete.clone_from(&barrier.past);
        let (phase, complete) = (barrier.phase, &barrier.complete);
        for (number, thread) in self.threads.iter_mut().enumerate() {
            if let Status::WaitingPhase(at, parity, _) = thread.status
                && at == address
                && (phase - 1) % 2 == parity
            {
                thread.status = Status::Ready;
                thread.waits += 1;
                self.clocks.acquire(number, complete);
                barrier.seen = phase;
            }
        }
        Ok(())
    }

    /// Whether the phase of parity `parity` is complete, which the current thread then has seen.
    fn mbarrier_test(&mut self, address: u32, parity: u32) -> Result<bool, FaultKind> {
        let barrier = self.mbarriers.get_mut(&address).ok_or(FaultKind::NoBarrier { address })?;
        let complete = barrier.phase % 2 != parity % 2;
        if complete {
            self.threads[self.current].waits += 1;
            // Parity 1 before the first phase: there is nothing to see.
            barrier.seen = barrier.phase;
            self.clocks.acquire(self.current, &barrier.complete);
        }
        Ok(complete)
    }
}

/// Whether the phase of parity `parity` is complete; suspends the thread until then if `wait`.
pub(crate) fn test(site: Site, address: u32, parity: u32, wait: bool) -> bool {
    if with(site, |block| block.mbarrier_test(address, parity)) {
        return true;
    }
    if wait {
        suspend(site, Status::WaitingPhase(address, parity % 2, site));
        true
    } else {
        suspend(site, Status::Polling);
        false
    }
}
