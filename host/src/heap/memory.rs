//! Where pools are.

use std::sync::Arc;

use crate::tensor::Location;
use crate::world::Member;

/// One kind of memory for the pools of a world's PEs: one pool for each PE, all of one capacity.
pub trait PoolMemory: std::fmt::Debug + Send + Sync + 'static {
    /// What errors call it.
    const KIND: &'static str;

    /// Where this PE's pool is.
    fn location(&self) -> Location;

    /// Bytes of a pool.
    fn capacity(&self) -> usize;

    /// Start of PE `rank`'s pool as this PE reaches it; nothing if it cannot.
    ///
    /// # Panics
    /// If there is no such PE.
    fn address(&self, rank: usize) -> Option<u64>;

    /// Sets bytes of this PE's pool to zero, for all PEs to see when it returns.
    ///
    /// # Errors
    /// What went wrong.
    fn zero(&self, offset: usize, bytes: usize) -> Result<(), String>;
}

/// Memory of the host: the segment that the PEs of a world share.
#[derive(Debug)]
pub struct HostPool {
    member: Arc<Member>,
}

impl HostPool {
    pub(super) fn new(member: Arc<Member>) -> Self {
        Self { member }
    }

    /// Start of PE `rank`'s pool.
    pub(super) fn start(&self, rank: usize) -> *mut u8 {
        self.member.segment().heap(rank)
    }
}

impl PoolMemory for HostPool {
    const KIND: &'static str = "host memory";

    fn location(&self) -> Location {
        Location::Host
    }

    fn capacity(&self) -> usize {
        self.member.segment().heap_bytes()
    }

    fn address(&self, rank: usize) -> Option<u64> {
        Some(self.start(rank) as u64)
    }

    fn zero(&self, offset: usize, bytes: usize) -> Result<(), String> {
        assert!(offset + bytes <= self.capacity(), "bytes {offset} and {bytes} more of {}", self.capacity());
        // SAFETY: inside this PE's pool; the heap calls this only for blocks that nobody uses. The collective step that
        // follows shows the zeros to all PEs.
        unsafe { self.start(self.member.rank()).add(offset).write_bytes(0, bytes) };
        Ok(())
    }
}
