//! Objects of the heap in the hands of somebody else, who gives them back when and where he likes.
//!
//! A tensor of another framework over memory of the heap has an owner that neither knows of PEs nor of their threads: its deleter
//! runs on any thread, or when the program ends. So a [`Lent`] is `Send`, holds the object and with it the mapping of the memory,
//! and is given back by being dropped. The heap counts loans and knows their names: whoever takes the memory down asks first.
//!
//! The object itself goes back to the pool as ever, with its last reference on this PE. All PEs must have got the same objects
//! back before they allocate again, or the allocation says so.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::symmetric::Block;
use super::{Heap, HeapError, PoolMemory, Symmetric};
use crate::tensor::Location;

/// A reference to this PE's copy of an object, for an owner on any thread. Dropping it gives it back.
#[derive(Debug)]
pub struct Lent {
    lender: Arc<dyn Lender>,
    number: u64,
    name: Box<str>,
    address: u64,
    bytes: usize,
    location: Location,
}

impl Lent {
    /// Address of the first byte, in the memory of its location.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it lies.
    pub fn location(&self) -> Location {
        self.location
    }

    /// Name given at allocation.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.lender.take_back(self.number);
    }
}

/// What an object is lent by; keeps it.
trait Lender: std::fmt::Debug + Send + Sync {
    fn take_back(&self, number: u64);
}

impl<M: PoolMemory> Lender for Block<M> {
    fn take_back(&self, number: u64) {
        let shared = self.shared();
        shared.state().loans.open.remove(&number);
        shared.returned.notify_all();
    }
}

/// The loans of one PE's heap.
#[derive(Debug, Default)]
pub(super) struct Loans {
    /// Name and bytes, by number.
    open: BTreeMap<u64, (Box<str>, usize)>,
    made: u64,
    peak: usize,
}

impl Loans {
    pub(super) fn open(&self) -> usize {
        self.open.len()
    }

    pub(super) fn peak(&self) -> usize {
        self.peak
    }

    fn make(&mut self, name: &str, bytes: usize) -> u64 {
        self.made += 1;
        self.open.insert(self.made, (name.into(), bytes));
        self.peak = self.peak.max(self.open.len());
        self.made
    }

    /// The error that names them, if there are any: one entry for each name.
    fn error(&self, waited: Duration) -> Option<HeapError> {
        let mut named: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, _) in self.open.values() {
            *named.entry(name).or_default() += 1;
        }
        let named = named.into_iter().map(|(name, count)| match count {
            1 => format!("`{name}`"),
            _ => format!("`{name}` ({count} times)"),
        });
        let bytes = self.open.values().map(|(_, bytes)| bytes).sum();
        let names = named.collect::<Vec<_>>().join(", ");
        (!self.open.is_empty()).then_some(HeapError::StillLent { count: self.open.len(), names, bytes, waited })
    }
}

impl<T, M: PoolMemory> Symmetric<T, M> {
    /// Lends this PE's copy to an owner who is not bound to this PE's thread. The object stays until the loan is given back, whoever
    /// else drops it.
    pub fn lend(&self) -> Lent {
        let block = self.block();
        let bytes = self.len() * size_of::<T>();
        let number = block.shared().state().loans.make(self.name(), bytes);
        Lent {
            number,
            name: self.name().into(),
            // A PE reaches its own pool, or the object could not have been set to zero.
            address: self.address(self.rank()).unwrap_or(0),
            bytes,
            location: self.memory().location(),
            lender: Arc::clone(block) as Arc<dyn Lender>,
        }
    }
}

impl<M: PoolMemory> Heap<M> {
    /// Waits until nothing of this PE's heap is lent, for `patience` at most: before the memory is taken down.
    ///
    /// # Errors
    /// [`HeapError::StillLent`] with the names of what is.
    pub fn await_loans(&self, patience: Duration) -> Result<(), HeapError> {
        let begin = Instant::now();
        let mut state = self.shared.state();
        loop {
            let waited = begin.elapsed();
            let Some(error) = state.loans.error(waited) else { return Ok(()) };
            let Some(left) = patience.checked_sub(waited).filter(|left| !left.is_zero()) else { return Err(error) };
            state = self.shared.returned.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::{Pe, WorldOptions, run_threads};

    fn alone() -> Pe {
        Pe::alone(&WorldOptions { heap_bytes: 1 << 16, ..WorldOptions::default() }).unwrap()
    }

    #[test]
    fn a_loan_keeps_its_object_and_goes_back_on_any_thread() {
        let pe = alone();
        let object = pe.heap().alloc::<f32>("activations", 16).unwrap();
        let (first, second) = (object.lend(), object.lend());
        assert_eq!((first.address(), first.bytes(), first.name()), (object.addr() as u64, 64, "activations"));
        assert_eq!((first.location(), pe.heap().stats().lent), (Location::Host, 2));
        drop(object);
        assert_eq!((pe.heap().stats().live, pe.heap().stats().lent), (1, 2));
        std::thread::scope(|scope| drop(scope.spawn(move || drop(first))));
        let text = pe.heap().await_loans(Duration::ZERO).unwrap_err().to_string();
        assert!(text.contains("1 loan of 64 bytes") && text.contains("`activations`"), "{text}");
        drop(second);
        let stats = pe.heap().stats();
        assert_eq!((stats.live, stats.in_use, stats.lent, stats.peak_lent), (0, 0, 0, 2));
        assert_eq!(pe.heap().await_loans(Duration::ZERO), Ok(()));
    }

    #[test]
    fn the_heap_waits_for_what_comes_back_in_time() {
        let pe = alone();
        let lent = pe.heap().alloc::<u8>("late", 3).unwrap().lend();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                drop(lent);
            });
            assert_eq!(pe.heap().await_loans(Duration::from_secs(20)), Ok(()));
        });
    }

    #[test]
    fn loans_of_several_names_are_told_apart() {
        let pe = alone();
        let (a, b) = (pe.heap().alloc::<u8>("a", 3).unwrap(), pe.heap().alloc::<u8>("b", 5).unwrap());
        let _loans = [a.lend(), b.lend(), b.lend()];
        let error = pe.heap().await_loans(Duration::from_millis(1)).unwrap_err();
        let HeapError::StillLent { count, names, bytes, waited } = &error else { panic!("{error}") };
        assert_eq!((*count, &**names, *bytes), (3, "`a`, `b` (2 times)", 13));
        assert!(*waited >= Duration::from_millis(1), "{error}");
    }

    #[test]
    fn memory_outlives_the_world_that_lent_it() {
        let lent = run_threads(2, &WorldOptions { heap_bytes: 1 << 16, ..WorldOptions::default() }, |pe| {
            let mut object = pe.heap().alloc::<u32>("kept", 4)?;
            // SAFETY: nobody else uses this copy.
            unsafe { object.as_mut_slice() }.fill(7 + pe.rank() as u32);
            Ok::<_, HeapError>(object.lend())
        });
        for (rank, lent) in lent.unwrap().into_iter().enumerate() {
            // SAFETY: the loan keeps the memory, which holds four numbers.
            let values = unsafe { std::slice::from_raw_parts(lent.address() as *const u32, 4) };
            assert_eq!(values, [7 + rank as u32; 4]);
        }
    }
}
