//! What a call counts and times on one PE.

use std::time::Duration;

use kernels_gpu::params::{Stamp, StampKind};

use crate::exec::Waits;
use crate::trace::{Args, Event, Kind, Trace};

/// How long one kernel took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelTime {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// From launch to end, waits included.
    pub time: Duration,
}

/// What was left out of transitions because it is too small to matter, see [`Config::cut_tolerance`](super::Config::cut_tolerance).
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CutReport {
    /// Chunks, times column blocks of M, that the walks of M would have taken.
    pub m_chunks: u64,
    /// Those that they have taken. A backward call walks none.
    pub m_chunks_walked: u64,
    /// Messages (column blocks of M) that said that they are empty in place of carrying a payload.
    pub empty_messages: u64,
    /// The largest of the bounds on the norm of what was left out; 0 if nothing was.
    pub largest_bound: f32,
}

impl CutReport {
    /// Both: counts added up, and the larger of the bounds.
    pub fn plus(self, other: Self) -> Self {
        Self {
            m_chunks: self.m_chunks + other.m_chunks,
            m_chunks_walked: self.m_chunks_walked + other.m_chunks_walked,
            empty_messages: self.empty_messages + other.empty_messages,
            largest_bound: self.largest_bound.max(other.largest_bound),
        }
    }
}

/// Counts and times of one call on one PE.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Report {
    /// Tokens of this PE.
    pub tokens: usize,
    /// Parts of the segment that this PE cut into most; 1 if it walked all of them whole.
    pub parts: usize,
    /// Payload bytes sent to other PEs.
    pub bytes_sent: u64,
    /// Messages (column blocks) sent.
    pub messages: u64,
    /// What was left out.
    pub cut: CutReport,
    /// Kernel by kernel; stays with the PE.
    #[serde(skip)]
    pub kernels: Vec<KernelTime>,
    /// From the begin of the first kernel to the end of the last, on the device's stream; on the CPU on the host's clock.
    /// What the host does in between (the exchange of bulk mode) counts, bringing tensors there and back does not.
    pub device_time: Duration,
    /// Time in kernels, waits not counted.
    pub compute: Duration,
    /// Time in which a worker only waited for other PEs' summaries, averaged over workers. Bulk: the whole exchange.
    pub exposed_wait: Duration,
    /// Time spent waiting for a slot to become free, averaged over workers.
    pub slot_wait: Duration,
    /// Scratch memory in use.
    pub scratch_bytes: usize,
    /// Symmetric heap in use.
    pub heap_bytes: usize,
    /// Most bytes of device memory held at once so far: inputs and results that were brought there, scratch, what steps kept, and
    /// heap.
    pub peak_device_bytes: usize,
    /// Where the step waited for other PEs.
    pub waits: Waits,
}

/// The stamps that a step's kernels left, as a timeline.
pub(super) fn timeline(title: &str, rank: usize, stamps: &[Stamp], asked: u64, hv: usize) -> Trace {
    let mut trace = Trace::new(title, "block");
    let kept = stamps.len().min(asked as usize);
    for stamp in &stamps[..kept] {
        let (name, kind) = match stamp.kind {
            x if x == StampKind::Prep as u32 => ("prep", Kind::Compute),
            x if x == StampKind::Scan as u32 => ("scan", Kind::Compute),
            x if x == StampKind::Put as u32 => ("put", Kind::Put),
            x if x == StampKind::Wait as u32 => ("wait", Kind::Wait),
            x if x == StampKind::SlotWait as u32 => ("slot_wait", Kind::Wait),
            x if x == StampKind::Merge as u32 => ("merge", Kind::Compute),
            x if x == StampKind::States as u32 => ("states", Kind::Compute),
            x if x == StampKind::ScanBack as u32 => ("scan_back", Kind::Compute),
            x if x == StampKind::Grad as u32 => ("grad", Kind::Compute),
            x if x == StampKind::Reduce as u32 => ("reduce", Kind::Compute),
            _ => ("fix_out", Kind::Compute),
        };
        let chunk = matches!(name, "prep" | "fix_out" | "grad").then_some(stamp.part);
        let bytes = (stamp.bytes > 0).then_some(stamp.bytes);
        trace.events.push(Event {
            name: name.into(),
            kind,
            pe: rank as u32,
            // Blocks of kernels without tickets are many and short; what matters is which worker ran them, and blocks of the
            // other kernels stay on one.
            track: if matches!(name, "prep" | "grad" | "reduce") { 0 } else { stamp.block },
            start_ns: stamp.start_ns,
            end_ns: stamp.end_ns,
            args: Args { head: Some(stamp.head % hv as u32), chunk, bytes },
        });
    }
    trace
}
