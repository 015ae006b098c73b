//! What each PE says about the operations it calls, so that errors can name calls that differ.
//!
//! A note costs two stores and no wait. It is for messages and for checks after the fact; nothing is ordered by it.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Pe;

/// Calls that a PE's notes go back.
const KEPT: usize = 8;

/// Bits of a note; the rest of the word is the call's number.
const NOTE_BITS: u32 = 24;

/// One PE's notes. Valid when zero: call 0 is none.
#[repr(C)]
pub(super) struct Calls {
    /// Number of the latest call.
    latest: AtomicU64,
    /// Number and note of call `n` at `n % KEPT`.
    notes: [AtomicU64; KEPT],
}

impl Calls {
    fn note(&self, note: u32) -> u64 {
        let number = self.latest.load(Ordering::Relaxed) + 1;
        let word = number << NOTE_BITS | u64::from(note) & ((1 << NOTE_BITS) - 1);
        self.notes[number as usize % KEPT].store(word, Ordering::Relaxed);
        // Release: who sees the number sees the note.
        self.latest.store(number, Ordering::Release);
        number
    }

    fn get(&self, number: u64) -> Option<u32> {
        let word = self.notes[number as usize % KEPT].load(Ordering::Relaxed);
        (word >> NOTE_BITS == number && number > 0).then_some((word & ((1 << NOTE_BITS) - 1)) as u32)
    }
}

impl Pe {
    fn calls(&self, rank: usize) -> &Calls {
        &self.member.segment.slots()[rank].calls
    }

    /// Notes that this PE begins its next call, and what it is (24 bits). Returns its number, from 1.
    pub(crate) fn note_call(&self, note: u32) -> u64 {
        self.calls(self.rank()).note(note)
    }

    /// What PE `rank` noted for call `number`; `None` if it has not begun it, or if that was long ago.
    pub(crate) fn noted_call(&self, rank: usize, number: u64) -> Option<u32> {
        // Acquire: with the release in `note`.
        let _ = self.calls(rank).latest.load(Ordering::Acquire);
        self.calls(rank).get(number)
    }

    /// Number of the latest call that PE `rank` noted; 0 for none.
    pub(crate) fn latest_call(&self, rank: usize) -> u64 {
        self.calls(rank).latest.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_go_back_a_few_calls() {
        let calls = Calls { latest: AtomicU64::new(0), notes: std::array::from_fn(|_| AtomicU64::new(0)) };
        assert_eq!((calls.get(0), calls.get(1)), (None, None));
        for number in 1..=20 {
            assert_eq!(calls.note(number as u32 * 3), number);
        }
        assert_eq!((calls.get(20), calls.get(13), calls.get(12), calls.get(21)), (Some(60), Some(39), None, None));
        assert_eq!(calls.note(u32::MAX), 21);
        assert_eq!(calls.get(21), Some(0xff_ffff));
    }
}
