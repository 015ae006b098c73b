//! How many bytes a plan moves, and how many it keeps in the symmetric heap.

use super::Plan;

/// Columns of one block of a summary: the piece of `[S | M]` that one work item owns, sends and signals.
pub const COLUMNS: usize = 64;

/// Slots for each summary, by parity of the epoch: a PE may send the next call's summary while this one's is being read.
pub const SLOTS: usize = 2;

/// The sizes that traffic depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Sizes {
    /// Value heads.
    pub hv: usize,
    /// Key channels.
    pub k: usize,
    /// Value channels.
    pub v: usize,
    /// Bytes of one element of `M` on the wire: 2 for bf16, 4 for f32.
    pub m_bytes: usize,
}

impl Sizes {
    /// Bytes of `S` of all heads of one sequence: `HV * K * V` f32.
    pub fn s_bytes(&self) -> usize {
        self.hv * self.k * self.v * size_of::<f32>()
    }

    /// Bytes of `M` of all heads of one sequence: `HV * K * K` elements.
    pub fn m_bytes(&self) -> usize {
        self.hv * self.k * self.k * self.m_bytes
    }

    /// Blocks of up to [`COLUMNS`] columns that `S` of one head is sent in.
    pub fn s_blocks(&self) -> usize {
        self.v.div_ceil(COLUMNS)
    }

    /// Blocks of up to [`COLUMNS`] columns that `M` of one head is sent in.
    pub fn m_blocks(&self) -> usize {
        self.k.div_ceil(COLUMNS)
    }
}

/// Who gets whose summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Exchange {
    /// Modes overlap and bulk: each rank sends `(S, M)` to every later rank of the sequence; the first one only `S`.
    Push,
    /// Mode exact: each rank sends its final `S` to the next rank of the sequence only.
    Chain,
}

/// What one rank sends to another for one sequence, all heads together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Message {
    /// Sending rank.
    pub from: usize,
    /// Receiving rank.
    pub to: usize,
    /// Sequence.
    pub seq: usize,
    /// Bytes of `S`.
    pub bytes_s: usize,
    /// Bytes of `M`; 0 where none is sent.
    pub bytes_m: usize,
}

/// Symmetric heap of one PE, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct HeapBytes {
    /// Slots for summaries.
    pub slots: usize,
    /// Signals, 8 bytes for each (source rank, row, block).
    pub signals: usize,
    /// Acknowledgements, 8 bytes for each (destination rank, row).
    pub acks: usize,
}

impl HeapBytes {
    /// All of it.
    pub fn total(&self) -> usize {
        self.slots + self.signals + self.acks
    }
}

/// Symmetric heap that every PE of a group of `pes` needs, the same on all.
///
/// A row is one head of one lane, `lane * HV + head`. For each source rank there are [`SLOTS`] slots, each with, for
/// every row, `ceil(V / 64)` blocks of `64 * K` f32 for `S` and `ceil(K / 64)` blocks of `64 * K` elements for `M`.
/// A block has room for [`COLUMNS`] columns also where fewer are left, so that all blocks of one kind have one stride.
/// Nothing depends on the number of tokens.
pub fn heap_bytes(pes: usize, lanes: usize, sizes: &Sizes) -> HeapBytes {
    let rows = lanes * sizes.hv;
    let block = COLUMNS * sizes.k;
    let row = block * (sizes.s_blocks() * size_of::<f32>() + sizes.m_blocks() * sizes.m_bytes);
    HeapBytes {
        slots: pes * SLOTS * rows * row,
        signals: pes * rows * (sizes.s_blocks() + sizes.m_blocks()) * size_of::<u64>(),
        acks: pes * rows * size_of::<u64>(),
    }
}

impl Plan {
    /// Every message of one forward call, ordered by sender, sequence and receiver.
    pub fn traffic(&self, sizes: &Sizes, exchange: Exchange) -> Vec<Message> {
        let mut messages = Vec::new();
        for (from, rank) in self.ranks.iter().enumerate() {
            for (segment, send) in rank.sending() {
                let (targets, bytes_m) = match exchange {
                    Exchange::Chain => (&send.to[..1], 0),
                    Exchange::Push if segment.initial.is_some() => (&send.to[..], 0),
                    Exchange::Push => (&send.to[..], sizes.m_bytes()),
                };
                messages.extend(targets.iter().map(|target| Message {
                    from,
                    to: target.rank,
                    seq: segment.seq,
                    bytes_s: sizes.s_bytes(),
                    bytes_m,
                }));
            }
        }
        messages
    }

    /// [`heap_bytes`] for this plan.
    pub fn heap_bytes(&self, sizes: &Sizes) -> HeapBytes {
        heap_bytes(self.pes(), self.lanes, sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cuts;
    use super::*;

    const SIZES: Sizes = Sizes { hv: 32, k: 128, v: 128, m_bytes: 2 };

    fn pairs(messages: &[Message]) -> Vec<(usize, usize, usize)> {
        messages.iter().map(|m| (m.from, m.to, m.bytes_m)).collect()
    }

    #[test]
    fn only_ranks_after_the_first_send_m() {
        let plan = Plan::packed(&[0, 300], &Cuts::equal(3)).unwrap();
        let push = plan.traffic(&SIZES, Exchange::Push);
        let m = 32 * 128 * 128 * 2;
        assert_eq!(pairs(&push), [(0, 1, 0), (0, 2, 0), (1, 2, m)]);
        assert!(push.iter().all(|x| x.bytes_s == 2 << 20));
        assert_eq!(pairs(&plan.traffic(&SIZES, Exchange::Chain)), [(0, 1, 0), (1, 2, 0)]);
    }

    #[test]
    fn the_heap_is_3_mib_for_each_source_and_slot_at_32_heads() {
        let plan = Plan::packed(&[0, 8192], &Cuts::equal(8)).unwrap();
        let heap = plan.heap_bytes(&SIZES);
        assert_eq!(heap.slots, 8 * 2 * (3 << 20));
        assert_eq!(heap.signals, 8 * 32 * 4 * 8);
        assert_eq!(heap.acks, 8 * 32 * 8);
        assert_eq!(heap.total(), heap.slots + heap.signals + heap.acks);
        // M in f32 makes it as large as S.
        assert_eq!(plan.heap_bytes(&Sizes { m_bytes: 4, ..SIZES }).slots, 8 * 2 * (4 << 20));
        // A batch of 3 rows has 3 lanes.
        assert_eq!(Plan::batch(3, 8192, &Cuts::equal(8)).unwrap().heap_bytes(&SIZES).slots, 3 * heap.slots);
    }

    #[test]
    fn the_last_block_of_columns_keeps_the_stride() {
        let heap = heap_bytes(2, 1, &Sizes { hv: 1, k: 80, v: 16, m_bytes: 2 });
        assert_eq!(heap.slots, 2 * 2 * (64 * 80 * 4 + 2 * 64 * 80 * 2));
        assert_eq!(heap.signals, 2 * 3 * 8);
    }

    #[test]
    fn nothing_crosses_nothing_is_kept() {
        let plan = Plan::packed(&[0, 4, 8], &Cuts::equal(2)).unwrap();
        assert_eq!(plan.traffic(&SIZES, Exchange::Push), []);
        assert_eq!(plan.heap_bytes(&SIZES).total(), 0);
    }
}
