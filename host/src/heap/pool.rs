//! Which ranges of a pool are free: first fit, and neighbours joined when they come free.
//!
//! What is free depends only on which objects live, not on the order in which others were freed. So PEs that have dropped
//! the same objects, in any order, give the next object the same offset.

use std::collections::BTreeMap;

/// Free ranges of a pool of `capacity` bytes.
#[derive(Debug)]
pub(super) struct Pool {
    capacity: usize,
    align: usize,
    /// Length by offset; never adjacent, never empty.
    free: BTreeMap<usize, usize>,
    in_use: usize,
    peak: usize,
    live: usize,
}

impl Pool {
    pub(super) fn new(capacity: usize, align: usize) -> Self {
        let free = if capacity == 0 { BTreeMap::new() } else { BTreeMap::from([(0, capacity)]) };
        Self { capacity, align, free, in_use: 0, peak: 0, live: 0 }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn in_use(&self) -> usize {
        self.in_use
    }

    pub(super) fn peak(&self) -> usize {
        self.peak
    }

    pub(super) fn live(&self) -> usize {
        self.live
    }

    pub(super) fn largest_free(&self) -> usize {
        self.free.values().copied().max().unwrap_or(0)
    }

    /// The bytes that an object of `bytes` takes: at least one unit, so that each object has a place of its own.
    fn rounded(&self, bytes: usize) -> Option<usize> {
        bytes.max(1).checked_next_multiple_of(self.align)
    }

    /// The offset of the lowest free range that holds `bytes`.
    pub(super) fn reserve(&mut self, bytes: usize) -> Option<usize> {
        let taken = self.rounded(bytes)?;
        let (&offset, &length) = self.free.iter().find(|&(_, &length)| length >= taken)?;
        self.free.remove(&offset);
        if length > taken {
            self.free.insert(offset + taken, length - taken);
        }
        self.in_use += taken;
        self.peak = self.peak.max(self.in_use);
        self.live += 1;
        Some(offset)
    }

    /// Gives back what `reserve(bytes)` returned.
    pub(super) fn release(&mut self, offset: usize, bytes: usize) {
        let Some(taken) = self.rounded(bytes) else { return };
        let (mut start, mut length) = (offset, taken);
        if let Some((&before, &space)) = self.free.range(..offset).next_back()
            && before + space == offset
        {
            self.free.remove(&before);
            (start, length) = (before, length + space);
        }
        if let Some(space) = self.free.remove(&(offset + taken)) {
            length += space;
        }
        self.free.insert(start, length);
        self.in_use -= taken;
        self.live -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_join_whatever_the_order_of_frees() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut pool = Pool::new(1024, 256);
            let offsets: Vec<usize> = (0..3).map(|_| pool.reserve(256).expect("fits")).collect();
            assert_eq!(offsets, [0, 256, 512]);
            for i in order {
                pool.release(offsets[i], 256);
            }
            assert_eq!(pool.free, BTreeMap::from([(0, 1024)]));
        }
    }

    #[test]
    fn the_first_hole_that_is_large_enough_is_taken() {
        let mut pool = Pool::new(4096, 256);
        let offsets: Vec<usize> = [300, 256, 1000, 256].map(|bytes| pool.reserve(bytes).expect("fits")).to_vec();
        assert_eq!(offsets, [0, 512, 768, 1792]);
        pool.release(512, 256);
        pool.release(0, 300);
        assert_eq!(pool.reserve(1000), Some(2048), "the hole of 768 bytes is too small");
        assert_eq!(pool.reserve(768), Some(0));
    }

    #[test]
    fn nothing_fits_where_there_is_no_room() {
        let mut pool = Pool::new(1000, 256);
        assert_eq!(pool.reserve(769), None, "rounds up to 1024");
        assert_eq!(pool.reserve(usize::MAX), None);
        assert_eq!(pool.reserve(768), Some(0));
        assert_eq!((pool.in_use(), pool.peak(), pool.live(), pool.largest_free()), (768, 768, 1, 232));
        assert_eq!(Pool::new(0, 256).reserve(0), None);
    }

    proptest! {
        #[test]
        fn live_objects_never_overlap(steps in prop::collection::vec((any::<prop::sample::Index>(), 0usize..3000), 1..200)) {
            let mut pool = Pool::new(32 << 10, 256);
            let mut live: Vec<(usize, usize)> = Vec::new();
            for (pick, bytes) in steps {
                // Sizes above 2000 mean a free, so that the pool fills up and drains.
                if bytes > 2000 && !live.is_empty() {
                    let (offset, bytes) = live.swap_remove(pick.index(live.len()));
                    pool.release(offset, bytes);
                } else if let Some(offset) = pool.reserve(bytes) {
                    let end = offset + bytes.max(1);
                    prop_assert!(offset % 256 == 0 && end <= pool.capacity());
                    prop_assert!(live.iter().all(|&(other, size)| end <= other || other + size.max(1) <= offset));
                    live.push((offset, bytes));
                }
                let taken: usize = live.iter().map(|&(_, bytes)| bytes.max(1).next_multiple_of(256)).sum();
                prop_assert_eq!((pool.in_use(), pool.live()), (taken, live.len()));
                prop_assert_eq!(pool.free.values().sum::<usize>(), pool.capacity() - taken);
            }
            for (offset, bytes) in live {
                pool.release(offset, bytes);
            }
            prop_assert_eq!(&pool.free, &BTreeMap::from([(0, 32 << 10)]));
        }
    }
}
