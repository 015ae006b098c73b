//! How many bytes a plan moves, and how many it keeps in the symmetric heap.

use kernels_gpu::params::Cut;
use kernels_gpu::protocol::{BLOCK_COLUMNS, ChannelLayout};

use super::{Plan, PlanError};

/// Columns of one block of a summary: the piece of `[S | M]` that one work item owns, sends and signals.
pub const COLUMNS: usize = BLOCK_COLUMNS as usize;

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct HeapBytes {
    /// Slots for summaries.
    pub slots: usize,
    /// Words: signals, acknowledgements, and what a PE notes for itself.
    pub words: usize,
}

impl HeapBytes {
    /// All of it.
    pub fn total(&self) -> usize {
        self.slots + self.words
    }

    /// Of training: gradients of states have slots and words of their own, laid out like those of states.
    pub fn both_directions(&self) -> Self {
        Self { slots: 2 * self.slots, words: 2 * self.words }
    }
}

/// Symmetric heap that every PE of a group of `pes` needs, the same on all: that of [`ChannelLayout`] with a row for each
/// head of each lane. Nothing depends on the number of tokens.
///
/// # Errors
/// [`PlanError::Slots`] if a size is 0 or the slots exceed the address space.
pub fn heap_bytes(pes: usize, lanes: usize, sizes: &Sizes) -> Result<HeapBytes, PlanError> {
    if lanes == 0 {
        return Ok(HeapBytes::default());
    }
    let Sizes { hv, k, v, m_bytes } = *sizes;
    // What exceeds 32 bits exceeds the address space, too.
    let [pes, rows, k, v] = [pes, lanes.saturating_mul(hv), k, v].map(|x| u32::try_from(x).unwrap_or(u32::MAX));
    let layout = ChannelLayout::new(pes, rows, k, v, m_bytes as u32)
        .map_err(|reason| PlanError::Slots { reason: reason.to_string() })?;
    Ok(HeapBytes { slots: layout.payload_bytes(), words: layout.words() * size_of::<u64>() })
}

impl Plan {
    /// Every message of one forward call, ordered by sender, sequence and receiver; of a [mirrored](Plan::mirrored) plan, of a
    /// backward call.
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

    /// Bytes of device memory that rank `rank` keeps from a forward call to its backward call, if everything is
    /// computed again: the states that it received, and its M, with notes of which blocks are empty, where it passes gradients on
    /// with it (not in mode exact).
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn saved_bytes(&self, rank: usize, sizes: &Sizes, exchange: Exchange) -> usize {
        let received = self.ranks[rank].receiving().count();
        let passes_on = self.ranks[rank].receiving().any(|(segment, _)| segment.send.is_some());
        let blocks = [sizes.k, sizes.v].map(|columns| columns.div_ceil(COLUMNS)).iter().sum::<usize>();
        let notes = sizes.hv * blocks * size_of::<Cut>();
        let m = if passes_on && exchange == Exchange::Push { sizes.m_bytes() + notes } else { 0 };
        received * (sizes.s_bytes() + m)
    }

    /// [`heap_bytes`] for this plan.
    ///
    /// # Errors
    /// As [`heap_bytes`].
    pub fn heap_bytes(&self, sizes: &Sizes) -> Result<HeapBytes, PlanError> {
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
        let slots = |plan: &Plan, m_bytes| plan.heap_bytes(&Sizes { m_bytes, ..SIZES }).unwrap().slots;
        assert_eq!(slots(&plan, 2), 8 * 2 * (3 << 20));
        // M in f32 makes it as large as S.
        assert_eq!(slots(&plan, 4), 8 * 2 * (4 << 20));
        // A batch of 3 rows has 3 lanes.
        assert_eq!(slots(&Plan::batch(3, 8192, &Cuts::equal(8)).unwrap(), 2), 3 * slots(&plan, 2));
    }

    #[test]
    fn words_are_small_beside_slots_and_every_message_has_its_own() {
        let heap = heap_bytes(8, 1, &SIZES).unwrap();
        let signals = 8 * 32 * 4;
        assert!(heap.words >= 8 * signals && heap.words < heap.slots / 100, "{heap:?}");
        assert_eq!(heap.total(), heap.slots + heap.words);
    }

    #[test]
    fn slots_beyond_the_address_space_are_refused() {
        let error = heap_bytes(1 << 20, usize::MAX, &SIZES).unwrap_err();
        assert!(error.to_string().contains("fewer lanes or heads"), "{error}");
    }

    #[test]
    fn nothing_crosses_nothing_is_kept() {
        let plan = Plan::packed(&[0, 4, 8], &Cuts::equal(2)).unwrap();
        assert_eq!(plan.traffic(&SIZES, Exchange::Push), []);
        assert_eq!(plan.heap_bytes(&SIZES).unwrap().total(), 0);
    }
}
