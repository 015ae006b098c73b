//! Errors of the heap, and how the PEs' requests are compared.

use std::time::Duration;

use super::{HostPool, PoolMemory};
use crate::world::WorldError;

/// An allocation did not take place, on any PE.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum HeapError {
    #[error(
        "the symmetric heap has no room for `{name}`: {requested} bytes asked for, the largest free block has \
         {largest_free} ({in_use} of {capacity} bytes in use); raise heap_bytes or drop objects first"
    )]
    OutOfMemory { name: String, requested: usize, largest_free: usize, capacity: usize, in_use: usize },
    #[error(transparent)]
    Mismatch(Box<Mismatch>),
    #[error(
        "what PE {rank} asks for in the allocation of `{name}` cannot be read ({reason}); start all PEs with one program"
    )]
    Unreadable { name: String, rank: usize, reason: String },
    #[error("the memory of `{name}` cannot be set to zero in {kind}: {reason}")]
    Memory { name: String, kind: &'static str, reason: String },
    #[error(
        "{count} {} of {bytes} bytes in all of the symmetric heap {} not given back after {waited:.1?}: {names}; drop the tensors \
         over this memory first",
        if *count == 1 { "loan" } else { "loans" },
        if *count == 1 { "was" } else { "were" }
    )]
    StillLent { count: usize, names: String, bytes: usize, waited: Duration },
    #[error(transparent)]
    World(#[from] WorldError),
}

/// What one PE asks of the heap, and where it would put it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Request {
    /// Number of the allocation on that PE, from 0.
    pub sequence: u64,
    /// Name of the object.
    pub name: String,
    /// Kind of memory.
    pub memory: String,
    /// Element type.
    pub element: String,
    /// Bytes of one element.
    pub element_bytes: usize,
    /// Number of elements.
    pub len: usize,
    /// Offset in the pool, in bytes; absent if there is no room.
    pub offset: Option<usize>,
}

impl std::fmt::Display for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Request { sequence, name, memory, element, element_bytes, len, offset } = self;
        write!(f, "`{name}` (allocation {sequence}: {len} x {element} of {element_bytes} bytes, ")?;
        match offset {
            Some(offset) if memory == HostPool::KIND => write!(f, "at offset {offset})"),
            Some(offset) => write!(f, "at offset {offset} in {memory})"),
            None => write!(f, "for which it has no room)"),
        }
    }
}

/// In what two requests differ first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Difference {
    /// Number or name: the PEs allocate in different orders.
    Order,
    /// Kind of memory.
    Memory,
    /// Element type.
    Element,
    /// Number of elements.
    Length,
    /// Offset: the requests agree, the pools do not, because the PEs have dropped different objects.
    Offset,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Difference::Order => "allocation order differs",
            Difference::Memory => "the memory of an allocation differs",
            Difference::Element => "the element type of an allocation differs",
            Difference::Length => "the length of an allocation differs",
            Difference::Offset => {
                "the offset of an allocation differs, because the PEs have dropped different objects before it"
            }
        })
    }
}

/// Two PEs do not make the same allocation. Every PE gets the same pair.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{difference}: PE {first_rank} asks for {first}, PE {second_rank} for {second}; \
     every PE must allocate the same objects and drop them between the same allocations"
)]
pub struct Mismatch {
    /// In what they differ.
    pub difference: Difference,
    /// One PE.
    pub first_rank: usize,
    /// What it asks for.
    pub first: Request,
    /// The other.
    pub second_rank: usize,
    /// What that asks for.
    pub second: Request,
}

impl Mismatch {
    /// Compares the requests of all PEs, by rank: the first that differs from PE 0's.
    pub(super) fn find(requests: &[Request]) -> Option<Self> {
        let first = requests.first()?;
        requests.iter().enumerate().find_map(|(second_rank, second)| {
            let difference = if (first.sequence, &first.name) != (second.sequence, &second.name) {
                Difference::Order
            } else if first.memory != second.memory {
                Difference::Memory
            } else if (&first.element, first.element_bytes) != (&second.element, second.element_bytes) {
                Difference::Element
            } else if first.len != second.len {
                Difference::Length
            } else if first.offset != second.offset {
                Difference::Offset
            } else {
                return None;
            };
            Some(Self { difference, first_rank: 0, first: first.clone(), second_rank, second: second.clone() })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let same = Request {
            sequence: 2,
            name: "slots".into(),
            memory: HostPool::KIND.into(),
            element: "f32".into(),
            element_bytes: 4,
            len: 8,
            offset: Some(256),
        };
        let found = |second: Request| Mismatch::find(&[same.clone(), same.clone(), second]);
        assert_eq!(found(same.clone()), None);
        let cases = [
            (Request { sequence: 3, ..same.clone() }, Difference::Order),
            (Request { name: "signals".into(), len: 9, ..same.clone() }, Difference::Order),
            (Request { memory: "GPU memory".into(), ..same.clone() }, Difference::Memory),
            (Request { element: "u64".into(), element_bytes: 8, ..same.clone() }, Difference::Element),
            (Request { len: 9, offset: None, ..same.clone() }, Difference::Length),
            (Request { offset: Some(0), ..same.clone() }, Difference::Offset),
            (Request { offset: None, ..same.clone() }, Difference::Offset),
        ];
        for (second, difference) in cases {
            let mismatch = found(second.clone()).expect("differs");
            assert_eq!((mismatch.difference, mismatch.second_rank, &mismatch.second), (difference, 2, &second));
        }
        let text = found(Request { offset: None, ..same.clone() }).expect("differs").to_string();
        assert!(text.contains("dropped different objects"), "{text}");
        assert!(text.contains("PE 0 asks for `slots` (allocation 2: 8 x f32 of 4 bytes, at offset 256)"), "{text}");
        assert!(
            text.contains("PE 2 for `slots` (allocation 2: 8 x f32 of 4 bytes, for which it has no room)"),
            "{text}"
        );
    }
}
