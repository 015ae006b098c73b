//! References to objects of the symmetric heap.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::{HostPool, PoolMemory, Shared};

/// A block of this PE's pool; dropping it gives the block back.
#[derive(Debug)]
pub(super) struct Block<M> {
    shared: Arc<Shared<M>>,
    name: Box<str>,
    offset: usize,
    bytes: usize,
}

impl<M> Block<M> {
    pub(super) fn new(shared: Arc<Shared<M>>, name: &str, offset: usize, bytes: usize) -> Self {
        Self { shared, name: name.into(), offset, bytes }
    }

    pub(super) fn shared(&self) -> &Shared<M> {
        &self.shared
    }

    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl<M> Drop for Block<M> {
    fn drop(&mut self) {
        self.shared.state().pool.release(self.offset, self.bytes);
    }
}

/// `len` elements at the same offset of every PE's pool: one's own copy and, by address, each peer's.
///
/// A clone is one more reference to the same object; the last one dropped on this PE returns the block to this PE's pool.
/// The memory stays mapped while any reference lives. A PE may use peers' copies only while it holds a reference itself.
///
/// Access is by raw address: who may read or write what when is the business of the protocol that uses the object.
///
/// What there is besides depends on the memory `M`: in [`HostPool`] pointers and slices, on GPUs addresses and copies.
pub struct Symmetric<T, M: PoolMemory = HostPool> {
    block: Arc<Block<M>>,
    len: usize,
    /// Hands out addresses of `T`, owns none.
    element: PhantomData<fn() -> T>,
}

impl<T, M: PoolMemory> Clone for Symmetric<T, M> {
    fn clone(&self) -> Self {
        Self { block: Arc::clone(&self.block), len: self.len, element: PhantomData }
    }
}

impl<T, M: PoolMemory> std::fmt::Debug for Symmetric<T, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Symmetric")
            .field("name", &self.name())
            .field("element", &std::any::type_name::<T>())
            .field("len", &self.len)
            .field("offset", &self.offset())
            .field("references", &Arc::strong_count(&self.block))
            .finish()
    }
}

impl<T: bytemuck::Pod> Symmetric<T> {
    /// This PE's copy.
    pub fn addr(&self) -> *mut T {
        self.peer_addr(self.rank())
    }

    /// PE `rank`'s copy, mapped in this process; `len` elements, aligned to [`ALIGN`](super::ALIGN).
    ///
    /// # Panics
    /// If there is no such PE.
    pub fn peer_addr(&self, rank: usize) -> *mut T {
        self.block.shared.memory.start(rank).wrapping_add(self.block.offset).cast()
    }

    /// This PE's copy.
    ///
    /// # Safety
    /// While the slice lives nobody writes this copy: no peer's put, no mutable slice, no atomic store. Peers' earlier
    /// puts must have been waited for with acquire (a signal or a collective call).
    pub unsafe fn as_slice(&self) -> &[T] {
        // SAFETY: `len` elements, initialised (zeroed on allocation) and aligned, alive while `self` is; the rest is the
        // caller's promise.
        unsafe { std::slice::from_raw_parts(self.addr(), self.len) }
    }

    /// This PE's copy, for writing.
    ///
    /// # Safety
    /// While the slice lives nobody else reads or writes this copy, through another reference or from another PE.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`.
        unsafe { std::slice::from_raw_parts_mut(self.addr(), self.len) }
    }
}

impl Symmetric<u64> {
    /// Element `index` of PE `rank`'s copy as a signal word. All plain access to it (see
    /// [`as_slice`](Self::as_slice)) must be kept apart in time.
    ///
    /// # Panics
    /// If there is no such PE or element.
    pub fn atomic(&self, rank: usize, index: usize) -> &AtomicU64 {
        assert!(index < self.len, "element {index} of `{}`, which has {}", self.name(), self.len);
        // SAFETY: inside the object, aligned, alive while `self` is; plain access, which could race with this, is unsafe
        // and excludes it by contract.
        unsafe { AtomicU64::from_ptr(self.peer_addr(rank).wrapping_add(index)) }
    }
}

impl<T, M: PoolMemory> Symmetric<T, M> {
    pub(super) fn new(block: Block<M>, len: usize) -> Self {
        Self { block: Arc::new(block), len, element: PhantomData }
    }

    pub(super) fn block(&self) -> &Arc<Block<M>> {
        &self.block
    }

    /// The memory in which it lies.
    pub fn memory(&self) -> &M {
        &self.block.shared.memory
    }

    /// This PE.
    pub(super) fn rank(&self) -> usize {
        self.block.shared.member.rank()
    }

    /// Address at which this PE reaches PE `rank`'s copy, where kernels run that use this memory; nothing if it cannot.
    ///
    /// # Panics
    /// If there is no such PE.
    pub fn address(&self, rank: usize) -> Option<u64> {
        Some(self.memory().address(rank)? + self.offset() as u64)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Name given at allocation.
    pub fn name(&self) -> &str {
        &self.block.name
    }

    /// Bytes from the start of every PE's pool.
    pub fn offset(&self) -> usize {
        self.block.offset
    }
}
