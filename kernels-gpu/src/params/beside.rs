//! Walks that start before all records of their chunks are there.

use bytemuck::{Pod, Zeroable};

use super::Array;

/// Which launch of `prep` it is, where there are two: one before a walk, and one beside it.
///
/// A walk takes few multiprocessors and long, `prep` all of them. So the first chunks that a walk comes to are prepared before it
/// starts, and the others while it walks, on the multiprocessors that it does not take. They are told apart by their *number*: chunks
/// are counted in the order in which the walk comes to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum BesidePass {
    /// The only one.
    Only = 0,
    /// The one before the walk. It clears what the other one sets.
    Before = 1,
    /// The one beside the walk. It starts when all blocks of the walk run, and waits for nobody, except that its last block ends
    /// after the walk.
    Beside = 2,
}

/// How a walk, and `prep` before and beside it, tell each other what is there. All zero: everything is, before the walk starts.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Beside {
    /// One u64 for each chunk from number [`Beside::first`] on and value head: 1 once its records are there.
    pub ready: Array,
    /// Number of the first chunk that is prepared beside the walk.
    pub first: u32,
    /// Chunks in all.
    pub chunks: u32,
    /// 1 if the walk comes to the last chunk first.
    pub from_the_end: u32,
    /// Of a launch of `prep`: a [`BesidePass`].
    pub pass: u32,
}

impl Beside {
    /// Everything is prepared before the walk.
    pub const fn none() -> Self {
        let ready = Array { addr: 0, len: 0 };
        Self { ready, first: 0, chunks: 0, from_the_end: 0, pass: BesidePass::Only as u32 }
    }

    /// The chunk of number `number`.
    #[inline(always)]
    pub fn chunk(&self, number: u32) -> u32 {
        if self.from_the_end != 0 { self.chunks - 1 - number } else { number }
    }

    /// The chunk that is the `index`-th of this launch of `prep`.
    #[inline(always)]
    pub fn chunk_of_launch(&self, index: u32) -> u32 {
        self.chunk(if self.pass == BesidePass::Beside as u32 { self.first + index } else { index })
    }

    /// Place in [`Beside::ready`] of a chunk and head, of `hv`; nothing if it was prepared before the walk.
    #[inline(always)]
    pub fn place(&self, chunk: u32, head: u32, hv: u32) -> Option<usize> {
        if self.ready.len == 0 {
            return None;
        }
        // Numbers are their own inverse.
        let number = self.chunk(chunk);
        (number >= self.first).then(|| ((number - self.first) * hv + head) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_numbered_as_the_walk_comes_to_them() {
        let ready = Array { addr: 64, len: 6 };
        let forwards = Beside { ready, first: 3, chunks: 5, from_the_end: 0, pass: BesidePass::Beside as u32 };
        assert_eq!([0, 1].map(|index| forwards.chunk_of_launch(index)), [3, 4]);
        assert_eq!([2, 3, 4].map(|chunk| forwards.place(chunk, 1, 3)), [None, Some(1), Some(4)]);
        let back = Beside { from_the_end: 1, ..forwards };
        assert_eq!([0, 1].map(|index| back.chunk_of_launch(index)), [1, 0]);
        assert_eq!([2, 1, 0].map(|chunk| back.place(chunk, 2, 3)), [None, Some(2), Some(5)]);
        let before = Beside { pass: BesidePass::Before as u32, ..back };
        assert_eq!([0, 1, 2].map(|index| before.chunk_of_launch(index)), [4, 3, 2]);
    }

    #[test]
    fn nothing_is_awaited_where_everything_is_there() {
        assert_eq!((Beside::none().place(7, 0, 4), Beside::none().chunk_of_launch(7)), (None, 7));
    }
}
