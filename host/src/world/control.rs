//! What the PEs share besides their heaps: a header, a slot per PE, one failure record, two letters per PE.
//!
//! All of it is valid when zero, as fresh memory is. Nothing is ever reset: arrivals are epochs that only grow, and
//! the first failure stays.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use super::WorldError;
use super::calls::Calls;

const MAGIC: [u8; 8] = *b"dltalink";
/// Counts the changes of everything in this file and of the letters.
const FORMAT: u64 = 2;
const FAILURE_TEXT: usize = 4096 - 128;

/// Describes the segment to a process that opens it. Written before the segment is shared, read-only after.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Header {
    magic: [u8; 8],
    format: u64,
    crate_version: [u8; 32],
    size: u64,
    heap_bytes: u64,
}

impl Header {
    pub(super) fn new(size: usize, heap_bytes: usize) -> Self {
        let mut crate_version = [0; 32];
        let version = env!("CARGO_PKG_VERSION").as_bytes();
        let kept = version.len().min(crate_version.len());
        crate_version[..kept].copy_from_slice(&version[..kept]);
        Self { magic: MAGIC, format: FORMAT, crate_version, size: size as u64, heap_bytes: heap_bytes as u64 }
    }

    /// Checks that `self`, found at `path`, is what a PE that expects `want` can use.
    pub(super) fn check(&self, path: &str, want: &Header) -> Result<(), WorldError> {
        if self.magic != want.magic {
            let reason = format!("it starts with {:?}", String::from_utf8_lossy(&self.magic));
            return Err(WorldError::Foreign { path: path.into(), reason });
        }
        let version =
            |header: &Header| String::from_utf8_lossy(&header.crate_version).trim_end_matches('\0').to_string();
        let fields = [
            ("format", self.format.to_string(), want.format.to_string()),
            ("deltalink version", version(self), version(want)),
            ("number of PEs", self.size.to_string(), want.size.to_string()),
            ("heap bytes per PE", self.heap_bytes.to_string(), want.heap_bytes.to_string()),
        ];
        match fields.into_iter().find(|(_, found, want)| found != want) {
            None => Ok(()),
            Some((field, found, want)) => Err(WorldError::Header { path: path.into(), field, found, want }),
        }
    }
}

/// One PE's words, on cache lines of its own (128 bytes: adjacent lines are fetched in pairs).
#[repr(C, align(128))]
pub(super) struct Slot {
    /// 0, then the process that took this rank.
    pub(super) joined: AtomicU64,
    /// The last collective step (epoch) this PE has arrived at.
    pub(super) arrived: AtomicU64,
    /// 1 once the PE takes part in no further step.
    pub(super) left: AtomicU64,
    /// What this PE says about its calls.
    pub(super) calls: Calls,
}

/// The first failure of any PE. `state` is 0, then `rank + 1` with bit 0 of its low bits telling whether `text` is complete.
#[repr(C, align(128))]
pub(super) struct Failure {
    state: AtomicU64,
    len: AtomicU64,
    text: [AtomicU8; FAILURE_TEXT],
}

const WRITTEN: u64 = 1;

impl Failure {
    /// Records why `rank` stops, unless another failure is recorded: what follows from a failure must not hide it.
    pub(super) fn report(&self, rank: usize, message: &str) {
        let claimed = (rank as u64 + 1) << 1;
        // Release on success: who sees the failure also sees every arrival that the reporter had seen, which lets a
        // PE in the same step still complete it (see `Turn::wait`).
        if self.state.compare_exchange(0, claimed, Ordering::Release, Ordering::Relaxed).is_err() {
            return;
        }
        let end = message.floor_char_boundary(FAILURE_TEXT);
        for (cell, &byte) in self.text.iter().zip(&message.as_bytes()[..end]) {
            cell.store(byte, Ordering::Relaxed);
        }
        self.len.store(end as u64, Ordering::Relaxed);
        // Release: publishes text and length.
        self.state.store(claimed | WRITTEN, Ordering::Release);
    }

    /// Who failed first, and why.
    pub(super) fn get(&self) -> Option<(usize, String)> {
        // Acquire: pairs with the two releases in `report`.
        let mut state = self.state.load(Ordering::Acquire);
        if state == 0 {
            return None;
        }
        // The reporter may be between claim and text, or killed there: give it a moment, no more.
        for _ in 0..100 {
            if state & WRITTEN != 0 {
                break;
            }
            std::thread::sleep(Duration::from_micros(100));
            state = self.state.load(Ordering::Acquire);
        }
        let rank = (state >> 1) as usize - 1;
        if state & WRITTEN == 0 {
            return Some((rank, "it stopped while it was saying why".into()));
        }
        let len = (self.len.load(Ordering::Relaxed) as usize).min(FAILURE_TEXT);
        let text: Vec<u8> = self.text[..len].iter().map(|cell| cell.load(Ordering::Relaxed)).collect();
        Some((rank, String::from_utf8_lossy(&text).into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blank() -> Box<Failure> {
        Box::new(Failure {
            state: AtomicU64::new(0),
            len: AtomicU64::new(0),
            text: std::array::from_fn(|_| AtomicU8::new(0)),
        })
    }

    #[test]
    fn the_first_failure_stays() {
        let failure = blank();
        assert_eq!(failure.get(), None);
        failure.report(3, "no memory");
        failure.report(1, "PE 3 failed");
        assert_eq!(failure.get(), Some((3, "no memory".into())));
    }

    #[test]
    fn a_long_message_is_cut_at_a_character() {
        let failure = blank();
        failure.report(0, &"é".repeat(FAILURE_TEXT));
        let (_, text) = failure.get().expect("reported");
        assert_eq!(text, "é".repeat(FAILURE_TEXT / 2));
    }

    #[test]
    fn a_reporter_that_died_is_still_named() {
        let failure = blank();
        failure.state.store((2 + 1) << 1, Ordering::Relaxed);
        assert_eq!(failure.get().map(|(rank, _)| rank), Some(2));
    }

    #[test]
    fn a_header_of_another_world_is_refused() {
        let mine = Header::new(4, 1 << 20);
        assert_eq!(mine.check("x", &mine), Ok(()));
        let text = |found: Header| found.check("/proc/1/fd/3", &mine).expect_err("differs").to_string();
        assert!(text(Header::new(2, 1 << 20)).contains("number of PEs 2, this PE has 4"));
        assert!(text(Header::new(4, 1 << 21)).contains("heap bytes per PE 2097152, this PE has 1048576"));
        assert!(text(Header { format: 99, ..mine }).contains("format 99, this PE has 2"));
        assert!(text(Header { crate_version: [b'9'; 32], ..mine }).contains("deltalink version 999"));
        assert!(text(Header { magic: *b"\x7fELF\0\0\0\0", ..mine }).contains("is not memory shared"));
    }
}
