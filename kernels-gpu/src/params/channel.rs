//! How PEs exchange summaries, and what a step counts and records.

use bytemuck::{Pod, Zeroable};

use super::Array;
use crate::protocol::ChannelLayout;

/// How one step exchanges summaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum StepMode {
    /// Push from inside the scan, late correction.
    Overlap = 0,
    /// The scan leaves its summaries in this PE's own slots; the host exchanges them between launches.
    Bulk = 1,
    /// The scan waits for the state before the segment: no M, no correction.
    Exact = 2,
}

/// How a kernel writes into another PE's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Way {
    /// By its own stores, at the address at which it reaches that memory.
    Stores = 0,
    /// By puts with signals out of this PE's symmetric memory.
    Puts = 1,
}

/// A PE's side of a channel: its layout and where every PE's part of it lies.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Channel {
    /// Offsets of slots and words.
    pub layout: ChannelLayout,
    /// Zero.
    pub pad: u32,
    /// Of u64: address of each PE's payload area, as this PE reaches it; 0 if it does not.
    pub payload: Array,
    /// Of u64: address of each PE's words, as this PE reaches them; 0 if it does not.
    pub words: Array,
    /// Of u32: the [`Way`] to each PE's memory.
    pub ways: Array,
    /// One [`crate::protocol::TrapRecord`]: the first wait that expired on this PE.
    pub trap: Array,
    /// One [`crate::protocol::Watch`], in memory that the host reads and writes while kernels run.
    pub watch: Array,
    /// One [`StepStats`].
    pub stats: Array,
    /// One u64: the epoch of this step.
    pub epoch: Array,
    /// Bound of every wait, in nanoseconds.
    pub timeout_ns: u64,
    /// This PE.
    pub pe: u32,
    /// A [`StepMode`].
    pub mode: u32,
}

/// What a step counts on one PE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct StepStats {
    /// Bytes written into other PEs' slots, signals not counted.
    pub bytes_sent: u64,
    /// Messages (blocks) sent.
    pub messages: u64,
    /// Of these, blocks of M that are empty.
    pub empty_messages: u64,
    /// Nanoseconds spent in waits for signals, summed over blocks.
    pub signal_wait_ns: u64,
    /// Nanoseconds spent in waits for free slots, summed over blocks.
    pub slot_wait_ns: u64,
}

/// A recorder of what happened when, filled by kernels.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct TraceBuffer {
    /// Of [`Stamp`]; empty to record nothing.
    pub stamps: Array,
    /// One u64: stamps asked for (more than the array holds means that some were lost).
    pub cursor: Array,
}

/// One recorded span.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Stamp {
    /// Start, nanoseconds on the PE's clock.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// A [`StampKind`].
    pub kind: u32,
    /// Block of the grid.
    pub block: u32,
    /// Value head.
    pub head: u32,
    /// Column block of a message, or chunk.
    pub part: u32,
    /// Bytes moved, if any.
    pub bytes: u64,
}

/// What a [`Stamp`] records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum StampKind {
    /// `prep` of one chunk and head.
    Prep = 0,
    /// The scan of a group of column blocks of one head.
    Scan = 1,
    /// Writing a summary block into consumers' slots.
    Put = 2,
    /// Waiting for a signal.
    Wait = 3,
    /// Waiting for a free slot.
    SlotWait = 4,
    /// Merging the summaries of earlier PEs into the state before the segment.
    Merge = 5,
    /// Correcting outputs.
    FixOut = 6,
    /// The forward scan again, for the states before the chunks.
    States = 7,
    /// The reverse scan of a group of column blocks of one head.
    ScanBack = 8,
    /// `grad` of one chunk and head.
    Grad = 9,
    /// Sums over value heads or chunks.
    Reduce = 10,
}
