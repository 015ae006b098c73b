//! A wait that nobody satisfied: what was awaited, from whom, and what was there instead.

use bytemuck::{Pod, Zeroable};

/// What a wait waits for.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Awaited {
    /// A block of a peer's summary.
    Signal = 1,
    /// A peer's word that it has read a row, so that its slot may be written again.
    Ack = 2,
    /// The initial state that another block of this PE merges.
    Merged = 3,
    /// Records that `prep` makes on this PE, beside the kernel that waits: block `block` is the chunk, the row its value head.
    Records = 4,
}

impl Awaited {
    /// The epoch that a word of this kind tells. A signal says in its lowest bit whether the message is empty.
    pub const fn epoch_of(self, word: u64) -> u64 {
        match self {
            Self::Signal => word >> 1,
            Self::Ack | Self::Merged | Self::Records => word,
        }
    }

    /// The kind of this number, if there is one.
    pub const fn from_u32(kind: u32) -> Option<Self> {
        match kind {
            1 => Some(Self::Signal),
            2 => Some(Self::Ack),
            3 => Some(Self::Merged),
            4 => Some(Self::Records),
            _ => None,
        }
    }
}

/// One wait: the word to watch, the epoch it must reach, and whom to name if it does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// What is awaited.
    pub awaited: Awaited,
    /// The PE that will write the word.
    pub peer: u32,
    /// Row (lane and value head).
    pub row: u32,
    /// Block of the row.
    pub block: u32,
    /// The word must tell at least this, see [`Awaited::epoch_of`].
    pub epoch: u64,
    /// Index of the word in this PE's words.
    pub word: usize,
}

impl Wait {
    /// Whether the word `found` ends the wait. Words only grow, and acks may already be an epoch ahead: hence at least.
    pub const fn met_by(&self, found: u64) -> bool {
        self.awaited.epoch_of(found) >= self.epoch
    }

    /// For a signal, the word of the other parity: what the peer signalled last may stand there.
    pub const fn sibling(&self) -> Option<usize> {
        match self.awaited {
            Awaited::Signal => Some(self.word ^ 1),
            Awaited::Ack | Awaited::Merged | Awaited::Records => None,
        }
    }

    /// The record of giving up: on PE `pe`, in kernel `step`, after `waited_ns`, with `found` in the word.
    pub const fn expired(&self, pe: u32, step: u32, found: u64, waited_ns: u64) -> Expired {
        Expired {
            pe,
            step,
            awaited: self.awaited as u32,
            peer: self.peer,
            row: self.row,
            block: self.block,
            epoch: self.epoch,
            found: self.awaited.epoch_of(found),
            waited_ns,
        }
    }
}

/// A wait that was given up.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Expired {
    /// PE that waited.
    pub pe: u32,
    /// Kernel that waited, by the number its launcher gave it.
    pub step: u32,
    /// [`Awaited`] as a number.
    pub awaited: u32,
    /// PE that should have written the word.
    pub peer: u32,
    /// Row (lane and value head).
    pub row: u32,
    /// Block of the row.
    pub block: u32,
    /// Epoch awaited.
    pub epoch: u64,
    /// Epoch that the word told at the end.
    pub found: u64,
    /// How long, in nanoseconds.
    pub waited_ns: u64,
}

impl core::fmt::Display for Expired {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { pe, step, peer, row, block, epoch, found, .. } = self;
        let (ms, us) = (self.waited_ns / 1_000_000, self.waited_ns / 1000 % 1000);
        write!(f, "PE {pe}, step {step}, waited {ms}.{us:03} ms for ")?;
        match Awaited::from_u32(self.awaited) {
            Some(Awaited::Signal) => write!(f, "block {block} of row {row} of epoch {epoch} from PE {peer}")?,
            Some(Awaited::Ack) => {
                write!(f, "PE {peer} to have read row {row} of epoch {epoch}, to send block {block}")?
            }
            Some(Awaited::Merged) => write!(f, "its own merge of block {block} of row {row} of epoch {epoch}")?,
            Some(Awaited::Records) => {
                return write!(
                    f,
                    "its own records of chunk {block}, which prep makes beside it; check that nothing else keeps all \
                     multiprocessors of the GPU busy, or set DELTALINK_BESIDE=0 to prepare everything first"
                );
            }
            None => write!(f, "something of unknown kind {} (row {row}, block {block}, epoch {epoch})", self.awaited)?,
        }
        write!(
            f,
            " and found epoch {found}; check that PE {peer} still runs and issued the same operations in the same order"
        )
    }
}

impl core::error::Error for Expired {}

/// The page on which a PE's kernels leave the first [`Expired`] for the host to read.
///
/// A kernel claims it by exchanging `state` from [`CLEAR`](Self::CLEAR) to [`CLAIMED`](Self::CLAIMED), writes `expired`,
/// then stores [`SET`](Self::SET) with release; a host that loads `SET` with acquire may read the rest.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TrapRecord {
    /// Progress of the record.
    pub state: u64,
    /// The first wait that was given up; later ones usually follow from it.
    pub expired: Expired,
}

impl TrapRecord {
    /// No wait was given up.
    pub const CLEAR: u64 = 0;
    /// A kernel is writing `expired`.
    pub const CLAIMED: u64 = 1;
    /// `expired` is complete.
    pub const SET: u64 = 2;
}

/// What a PE's kernels and its host tell each other while kernels run, in memory that both reach at any time.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Watch {
    /// Set by the host: another PE has failed, waiting on is useless.
    pub abort: u64,
    /// A copy of the record that kernels claim among themselves, for a host that looks before they have ended.
    pub trap: TrapRecord,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    fn wait(awaited: Awaited) -> Expired {
        let found = if awaited == Awaited::Signal { 6 << 1 | 1 } else { 6 };
        Wait { awaited, peer: 1, row: 5, block: 2, epoch: 7, word: 40 }.expired(3, 9, found, 10_002_345_678)
    }

    #[test]
    fn records_have_the_size_of_their_fields() {
        assert_eq!(size_of::<Expired>(), 6 * 4 + 3 * 8);
        assert_eq!(size_of::<TrapRecord>(), 8 + size_of::<Expired>());
        assert_eq!(TrapRecord::zeroed().state, TrapRecord::CLEAR);
    }

    #[test]
    fn a_signal_is_met_whether_the_message_is_empty_or_not() {
        let wait = Wait { awaited: Awaited::Signal, peer: 1, row: 0, block: 0, epoch: 7, word: 0 };
        assert!(!wait.met_by(6 << 1 | 1) && wait.met_by(7 << 1) && wait.met_by(7 << 1 | 1) && wait.met_by(9 << 1));
        assert!(!Wait { awaited: Awaited::Ack, ..wait }.met_by(6) && Wait { awaited: Awaited::Ack, ..wait }.met_by(7));
    }

    #[test]
    fn messages_say_who_waited_for_what() {
        let text = wait(Awaited::Signal).to_string();
        for part in ["PE 3, step 9", "10002.345 ms", "block 2 of row 5 of epoch 7 from PE 1", "found epoch 6"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(wait(Awaited::Ack).to_string().contains("PE 1 to have read row 5 of epoch 7"));
        assert!(wait(Awaited::Merged).to_string().contains("its own merge"));
        let records = wait(Awaited::Records).to_string();
        assert!(records.contains("records of chunk 2") && records.contains("DELTALINK_BESIDE=0"), "{records}");
        let unknown = Expired { awaited: 77, ..wait(Awaited::Ack) };
        assert!(unknown.to_string().contains("unknown kind 77"));
    }

    #[test]
    fn kinds_survive_the_record() {
        for kind in [Awaited::Signal, Awaited::Ack, Awaited::Merged, Awaited::Records] {
            assert_eq!(Awaited::from_u32(wait(kind).awaited), Some(kind));
        }
        assert_eq!(Awaited::from_u32(0), None);
    }
}
