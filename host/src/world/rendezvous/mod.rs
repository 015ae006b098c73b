//! Passing the segment's address from PE 0 to the other processes of a launcher that offers no channel of its own:
//! a file ([`file`]) under Open MPI and Slurm, which number their jobs, a TCP port ([`tcp`]) under torchrun, which gives
//! one.
//!
//! The address alone gives nobody access: opening it needs the rights of the user who runs PE 0.

mod file;
mod tcp;

pub(super) use file::Job;
pub(super) use tcp::Port;

use std::time::{Duration, Instant};

use super::segment::HeapAddress;
use super::{WorldError, machine};

/// Between two looks at something that is not there yet.
const POLL: Duration = Duration::from_millis(5);

/// What PE 0 tells the others: `deltalink BOOT PID:FD SIZE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Note {
    machine: String,
    heap: HeapAddress,
    size: usize,
}

const MARK: &str = "deltalink";

impl Note {
    /// The note of a world of `size` PEs whose segment this process holds at `heap`.
    pub fn new(heap: HeapAddress, size: usize) -> Self {
        Self { machine: machine(), heap, size }
    }

    fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [MARK, machine, heap, size] = words[..] else { return None };
        Some(Self { machine: machine.into(), heap: HeapAddress::parse(heap)?, size: size.parse().ok()? })
    }

    /// The segment, for PE `rank` of a world of `size` on this machine.
    fn heap_for(&self, rank: usize, size: usize) -> Result<HeapAddress, WorldError> {
        let want = machine();
        if self.machine != want {
            return Err(WorldError::OtherMachine { rank, found: self.machine.clone(), want });
        }
        if self.size != size {
            return Err(WorldError::SizesDiffer {
                first_source: "PE 0's launcher",
                first: self.size,
                second_source: "this PE's launcher",
                second: size,
            });
        }
        Ok(self.heap)
    }
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{MARK} {} {} {}", self.machine, self.heap, self.size)
    }
}

/// A wait with an end.
struct Deadline {
    start: Instant,
    timeout: Duration,
}

impl Deadline {
    fn after(timeout: Duration) -> Self {
        Self { start: Instant::now(), timeout }
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.start.elapsed())
    }

    fn passed(&self) -> bool {
        self.left().is_zero()
    }

    fn pause(&self) {
        std::thread::sleep(POLL.min(self.left()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_written_and_nothing_else_is_one() {
        let note = Note::new(HeapAddress::parse("12:3").expect("pid:fd"), 4);
        assert_eq!(Note::parse(&note.to_string()), Some(note.clone()));
        for text in ["", "deltalink", "deltalink boot 12:3", "deltalink boot 12 4", "HTTP/1.1 400 Bad Request x"] {
            assert_eq!(Note::parse(text), None, "{text}");
        }
        assert_eq!(note.heap_for(1, 4), Ok(note.heap));
        assert!(matches!(note.heap_for(1, 3), Err(WorldError::SizesDiffer { first: 4, second: 3, .. })));
        let elsewhere = Note { machine: "another-boot".into(), ..note };
        assert!(matches!(elsewhere.heap_for(1, 4), Err(WorldError::OtherMachine { rank: 1, .. })));
    }
}
