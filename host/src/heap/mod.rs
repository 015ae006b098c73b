//! The symmetric heap: one pool per PE, allocated at start, in which every PE makes the same allocations.
//!
//! An object has the same offset in every pool, so a peer's copy is found by arithmetic. Allocation is collective and
//! checked: the PEs compare number, name, element type, length and resulting offset before anybody uses the memory.
//!
//! Frees are local: the last reference to a [`Symmetric`] returns the block to this PE's pool. That is safe although peers
//! may still hold theirs: the block is given out again only by an allocation that has the same offset on *every* PE, and
//! an allocation clears its memory only after every PE has entered it. So a PE's puts into the old object, made while
//! it held the object, are over by then. If PEs free differently, offsets differ and the next allocation says so.
//!
//! An object can be [lent](Symmetric::lend) to an owner on any thread; the heap knows what is, and whoever takes the memory down asks.
//!
//! The pools are in memory of one kind ([`PoolMemory`]): the segment that the PEs of a world share ([`HostPool`]), or GPUs
//! (`DevicePool`, feature `cuda`). The order of allocations is kept by the world either way.

#[cfg(feature = "cuda")]
mod device;
mod error;
mod lent;
mod memory;
mod pool;
mod symmetric;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

#[cfg(feature = "cuda")]
pub use device::{DevicePool, Reach};
pub use error::{Difference, HeapError, Mismatch, Request};
pub use lent::Lent;
pub use memory::{HostPool, PoolMemory};
pub use symmetric::Symmetric;

use crate::world::{Member, Pe, Purpose, Step};
use lent::Loans;
use pool::Pool;
use symmetric::Block;

/// Alignment of every object, in bytes.
pub const ALIGN: usize = 256;

/// Use of one PE's heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapStats {
    /// Bytes of the pool.
    pub capacity: usize,
    /// Bytes of live objects, each rounded up to [`ALIGN`].
    pub in_use: usize,
    /// Most bytes that were in use at once.
    pub peak: usize,
    /// Number of live objects.
    pub live: usize,
    /// Number of loans that were not given back ([`Lent`]).
    pub lent: usize,
    /// Most loans there were at once.
    pub peak_lent: usize,
}

/// One PE's pool of the symmetric heap. A clone is the same pool.
#[derive(Debug)]
pub struct Heap<M: PoolMemory = HostPool> {
    shared: Arc<Shared<M>>,
}

impl<M: PoolMemory> Clone for Heap<M> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

/// What the heap's handles and its objects have in common.
#[derive(Debug)]
struct Shared<M> {
    member: Arc<Member>,
    memory: M,
    state: Mutex<State>,
    /// A loan was given back.
    returned: Condvar,
}

#[derive(Debug)]
struct State {
    pool: Pool,
    /// Number of the next allocation.
    sequence: u64,
    loans: Loans,
}

impl<M> Shared<M> {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics between two related changes of the state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Heap {
    /// The heap in the segment that a world's PEs share.
    pub(crate) fn new(member: Arc<Member>) -> Self {
        Self::with(Arc::clone(&member), HostPool::new(member))
    }
}

impl<M: PoolMemory> Heap<M> {
    /// A heap of `pe` in other memory than its world's. Every PE must make one of the same kind and capacity.
    pub fn over(pe: &Pe, memory: M) -> Self {
        Self::with(pe.member(), memory)
    }

    fn with(member: Arc<Member>, memory: M) -> Self {
        let pool = Pool::new(memory.capacity(), ALIGN);
        let state = Mutex::new(State { pool, sequence: 0, loans: Loans::default() });
        Self { shared: Arc::new(Shared { member, memory, state, returned: Condvar::new() }) }
    }

    /// Number of PEs.
    pub fn pes(&self) -> usize {
        self.shared.member.segment().size()
    }

    /// The memory.
    pub fn memory(&self) -> &M {
        &self.shared.memory
    }

    /// Whether this is the last handle of the heap, and no object lives.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_unused_elsewhere(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }

    /// Allocates `len` elements on every PE, all zero everywhere when it returns. Collective: every PE makes the same
    /// allocations in the same order, and has dropped the same objects before.
    ///
    /// # Errors
    /// The same on every PE: [`HeapError::Mismatch`] if the requests or the resulting offsets differ,
    /// [`HeapError::OutOfMemory`] if no free range is large enough; the heap remains usable after either.
    /// [`HeapError::World`] if a PE did not take part, [`HeapError::Memory`] if the memory could not be cleared: the other
    /// PEs are told.
    pub fn alloc<T: bytemuck::Pod>(&self, name: &str, len: usize) -> Result<Symmetric<T, M>, HeapError> {
        const { assert!(align_of::<T>() <= ALIGN, "the element type needs more alignment than the heap gives") };
        let Shared { member, memory, .. } = &*self.shared;
        let mut turn = member.turn();
        let bytes = len.saturating_mul(size_of::<T>());
        let (request, block) = self.reserve::<T>(name, len, bytes);

        let contents = serde_json::to_vec(&request).map_err(|error| HeapError::Unreadable {
            name: name.into(),
            rank: member.rank(),
            reason: error.to_string(),
        })?;
        let step = Step { purpose: Purpose::Allocation, what: name };
        let gathered = turn.gather(step, &contents, true)?.unwrap_or_default();
        let requests = gathered.iter().enumerate().map(|(rank, contents)| {
            let unreadable =
                |error: serde_json::Error| HeapError::Unreadable { name: name.into(), rank, reason: error.to_string() };
            serde_json::from_slice(contents).map_err(unreadable)
        });
        let requests: Vec<Request> = requests.collect::<Result<_, _>>()?;
        if let Some(mismatch) = Mismatch::find(&requests) {
            return Err(HeapError::Mismatch(Box::new(mismatch)));
        }
        // All PEs gave the same answer here, so all return or none.
        let Some(block) = block else {
            let state = self.shared.state();
            return Err(HeapError::OutOfMemory {
                name: name.into(),
                requested: bytes,
                largest_free: state.pool.largest_free(),
                capacity: state.pool.capacity(),
                in_use: state.pool.in_use(),
            });
        };

        // The block belongs to this call alone: peers reach it only through an object that they held before, and all of
        // them have entered this allocation after their use of it.
        memory.zero(block.offset(), block.bytes()).map_err(|reason| {
            let error = HeapError::Memory { name: name.into(), kind: M::KIND, reason };
            member.report_failure(&error.to_string());
            error
        })?;
        turn.step(Step { purpose: Purpose::AllocationReady, what: name })?;
        Ok(Symmetric::new(block, len))
    }

    /// Takes the memory before it is agreed on; dropping the block gives it back.
    fn reserve<T>(&self, name: &str, len: usize, bytes: usize) -> (Request, Option<Block<M>>) {
        let mut state = self.shared.state();
        let sequence = state.sequence;
        state.sequence += 1;
        let offset = state.pool.reserve(bytes);
        let block = offset.map(|offset| Block::new(Arc::clone(&self.shared), name, offset, bytes));
        let element = std::any::type_name::<T>().to_string();
        let memory = M::KIND.into();
        (Request { sequence, name: name.into(), memory, element, element_bytes: size_of::<T>(), len, offset }, block)
    }

    /// Use of this PE's pool.
    pub fn stats(&self) -> HeapStats {
        let state = self.shared.state();
        let (pool, loans) = (&state.pool, &state.loans);
        HeapStats {
            capacity: pool.capacity(),
            in_use: pool.in_use(),
            peak: pool.peak(),
            live: pool.live(),
            lent: loans.open(),
            peak_lent: loans.peak(),
        }
    }
}
