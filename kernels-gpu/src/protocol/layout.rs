//! Where a channel keeps its slots and words: pure arithmetic that every PE, kernel and host repeat alike.

use bytemuck::{Pod, Zeroable};

/// Columns of S or M that one block of a summary holds.
pub const BLOCK_COLUMNS: u32 = 64;

/// Alignment of every slot, and distance of words that different PEs write, in bytes: one L2 line pair of the GPU, and
/// enough to keep two CPU cores out of each other's lines.
pub const SLOT_ALIGN: usize = 128;

/// Slots per (source, row, block); an epoch uses the one of its parity.
pub const SLOTS: u32 = 2;

const LINE_WORDS: usize = SLOT_ALIGN / size_of::<u64>();

/// The sizes from which all addresses of a channel follow.
///
/// A *row* is one value head of one lane; its summary is the state `S` (`K x V`, f32) and the transition `M` (`K x K`).
/// Both are cut into blocks of up to [`BLOCK_COLUMNS`] columns: first the blocks of S, then those of M. A block is stored
/// column by column, `[columns, K]` row-major, so S lies V-first.
///
/// Every PE allocates [`payload_bytes`](Self::payload_bytes) bytes and [`words`](Self::words) 64-bit words, zeroed once
/// when the channel is made and never reset.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct ChannelLayout {
    /// PEs that share the channel.
    pub pes: u32,
    /// Lanes times value heads.
    pub rows: u32,
    /// Key dimension.
    pub k: u32,
    /// Value dimension.
    pub v: u32,
    /// Bytes of one element of M: 4 or 2; 0 for a channel that carries S alone.
    pub m_size: u32,
}

/// Sizes that describe no channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutError {
    /// `pes`, `rows`, `k` or `v` is 0; the field names it.
    Zero(&'static str),
    /// `m_size` is not 0, 2 or 4.
    MSize(u32),
    /// More bytes than the address space has.
    TooLarge,
}

impl core::fmt::Display for LayoutError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Zero(name) => write!(f, "{name} of a channel is 0; it must be at least 1"),
            Self::MSize(found) => {
                write!(f, "an element of M has {found} bytes; it must be 4 (f32), 2 (bf16), or 0 to send S alone")
            }
            Self::TooLarge => f.write_str("the channel's slots exceed the address space; use fewer lanes or heads"),
        }
    }
}

impl core::error::Error for LayoutError {}

/// Bytes of one block in the payload memory of the PE that receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Byte offset, a multiple of [`SLOT_ALIGN`].
    pub offset: usize,
    /// Bytes used: columns x K x element size.
    pub bytes: usize,
}

/// The slot's parity of an epoch.
pub const fn parity(epoch: u64) -> u32 {
    (epoch % SLOTS as u64) as u32
}

const fn lines(words: usize) -> usize {
    words.next_multiple_of(LINE_WORDS)
}

impl ChannelLayout {
    /// A channel of these sizes.
    ///
    /// # Errors
    /// [`LayoutError`] if a size is 0, `m_size` is not 0, 2 or 4, or the slots exceed the address space.
    pub fn new(pes: u32, rows: u32, k: u32, v: u32, m_size: u32) -> Result<Self, LayoutError> {
        for (name, size) in [("pes", pes), ("rows", rows), ("k", k), ("v", v)] {
            if size == 0 {
                return Err(LayoutError::Zero(name));
            }
        }
        if !matches!(m_size, 0 | 2 | 4) {
            return Err(LayoutError::MSize(m_size));
        }
        // An upper bound of the payload: whole blocks of at least one alignment unit each.
        let columns = u128::from(v.next_multiple_of(BLOCK_COLUMNS)) + u128::from(k.next_multiple_of(BLOCK_COLUMNS));
        let row = columns * (u128::from(k) * 4 + SLOT_ALIGN as u128);
        if row * u128::from(pes) * u128::from(rows) * u128::from(SLOTS) > isize::MAX as u128 {
            return Err(LayoutError::TooLarge);
        }
        Ok(Self { pes, rows, k, v, m_size })
    }

    /// Blocks of S in a row: `ceil(V / 64)`.
    pub const fn s_blocks(&self) -> u32 {
        self.v.div_ceil(BLOCK_COLUMNS)
    }

    /// Blocks of M in a row: `ceil(K / 64)`, none if M is not sent.
    pub const fn m_blocks(&self) -> u32 {
        if self.m_size == 0 { 0 } else { self.k.div_ceil(BLOCK_COLUMNS) }
    }

    /// Blocks of a row: those of S, then those of M.
    pub const fn blocks(&self) -> u32 {
        self.s_blocks() + self.m_blocks()
    }

    /// Whether `block` holds columns of S, not of M.
    pub const fn is_state(&self, block: u32) -> bool {
        block < self.s_blocks()
    }

    /// First column and number of columns of `block`, within S or within M.
    pub const fn columns(&self, block: u32) -> (u32, u32) {
        debug_assert!(block < self.blocks());
        let (index, of) = if self.is_state(block) { (block, self.v) } else { (block - self.s_blocks(), self.k) };
        let start = index * BLOCK_COLUMNS;
        let left = of - start;
        (start, if left < BLOCK_COLUMNS { left } else { BLOCK_COLUMNS })
    }

    /// Bytes of one element of `block`.
    pub const fn element_bytes(&self, block: u32) -> u32 {
        if self.is_state(block) { size_of::<f32>() as u32 } else { self.m_size }
    }

    /// Bytes of the elements of `block`: columns x K x element size.
    pub const fn block_bytes(&self, block: u32) -> usize {
        self.columns(block).1 as usize * self.k as usize * self.element_bytes(block) as usize
    }

    /// Bytes of the first `count` blocks of one kind, which starts with block `first`. Blocks before the last are whole, so
    /// all of them are as large as the first.
    const fn run_bytes(&self, first: u32, count: u32) -> usize {
        if count == 0 {
            return 0;
        }
        (count as usize - 1) * self.block_bytes(first).next_multiple_of(SLOT_ALIGN)
            + self.block_bytes(first + count - 1).next_multiple_of(SLOT_ALIGN)
    }

    /// Bytes from the start of a row's slots to those of `block`; `block` may be one past the last.
    const fn block_offset(&self, block: u32) -> usize {
        let s_blocks = self.s_blocks();
        if block <= s_blocks {
            self.run_bytes(0, block)
        } else {
            self.run_bytes(0, s_blocks) + self.run_bytes(s_blocks, block - s_blocks)
        }
    }

    /// Bytes of the slots of one row, one source and one parity.
    pub const fn row_bytes(&self) -> usize {
        self.block_offset(self.blocks())
    }

    /// Slot of `block` of `row` from `source`, for epochs of this parity, in the receiver's payload memory.
    ///
    /// Slots of the receiver itself as the source exist too, so that an address needs no knowledge of who receives.
    pub const fn slot(&self, source: u32, parity: u32, row: u32, block: u32) -> Slot {
        debug_assert!(source < self.pes && parity < SLOTS && row < self.rows && block < self.blocks());
        let index = (source as usize * SLOTS as usize + parity as usize) * self.rows as usize + row as usize;
        Slot { offset: index * self.row_bytes() + self.block_offset(block), bytes: self.block_bytes(block) }
    }

    /// Bytes of payload memory on every PE.
    pub const fn payload_bytes(&self) -> usize {
        self.pes as usize * SLOTS as usize * self.rows as usize * self.row_bytes()
    }

    const fn signal_stride(&self) -> usize {
        lines(self.rows as usize * self.blocks() as usize * SLOTS as usize)
    }

    const fn acks(&self) -> usize {
        self.pes as usize * self.signal_stride()
    }

    const fn ack_stride(&self) -> usize {
        lines(self.rows as usize)
    }

    const fn read_counts(&self) -> usize {
        let sent = self.pes as usize * self.rows as usize * self.blocks() as usize * SLOTS as usize;
        self.peer_words() + lines(sent)
    }

    const fn merged_flags(&self) -> usize {
        self.read_counts() + lines(self.rows as usize)
    }

    /// Word at the receiver that `source` sets when `block` of `row` of an epoch of this parity has arrived, see
    /// [`Message::signal_value`](super::Message::signal_value). Words of different sources never share a line.
    pub const fn signal(&self, source: u32, row: u32, block: u32, parity: u32) -> usize {
        debug_assert!(source < self.pes && row < self.rows && block < self.blocks() && parity < SLOTS);
        let block = row as usize * self.blocks() as usize + block as usize;
        // Both parities beside each other, see `Wait::sibling`.
        source as usize * self.signal_stride() + block * SLOTS as usize + parity as usize
    }

    /// Word at the sender that `dest` sets to the last epoch of which it has read all of `row`. Words of different
    /// receivers never share a line.
    pub const fn ack(&self, dest: u32, row: u32) -> usize {
        debug_assert!(dest < self.pes && row < self.rows);
        self.acks() + dest as usize * self.ack_stride() + row as usize
    }

    /// Words that peers write, [`signal`](Self::signal) and [`ack`](Self::ack): the first of [`words`](Self::words).
    pub const fn peer_words(&self) -> usize {
        self.acks() + self.pes as usize * self.ack_stride()
    }

    /// Sender's own word: the last epoch it wrote into that slot at `dest`, 0 for never.
    pub const fn sent(&self, dest: u32, row: u32, block: u32, parity: u32) -> usize {
        debug_assert!(dest < self.pes && row < self.rows && block < self.blocks() && parity < SLOTS);
        let pair = (dest as usize * self.rows as usize + row as usize) * self.blocks() as usize + block as usize;
        self.peer_words() + pair * SLOTS as usize + parity as usize
    }

    /// Receiver's own word: how many readers of `row` have finished, over all epochs.
    pub const fn read_count(&self, row: u32) -> usize {
        debug_assert!(row < self.rows);
        self.read_counts() + row as usize
    }

    /// Receiver's own word: the last epoch whose initial state of block `s_block` of `row` has been merged.
    pub const fn merged(&self, row: u32, s_block: u32) -> usize {
        debug_assert!(row < self.rows && s_block < self.s_blocks());
        self.merged_flags() + row as usize * self.s_blocks() as usize + s_block as usize
    }

    /// 64-bit words on every PE: those that peers write and its own.
    pub const fn words(&self) -> usize {
        self.merged_flags() + lines(self.rows as usize * self.s_blocks() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::{String, ToString};
    use std::vec::Vec;
    use std::{format, vec};

    fn layouts() -> impl Iterator<Item = ChannelLayout> {
        let sizes =
            [(1, 1, 16, 16, 4), (2, 3, 128, 128, 2), (4, 5, 80, 208, 4), (3, 17, 48, 64, 0), (2, 2, 256, 16, 2)];
        sizes.into_iter().map(|(pes, rows, k, v, m)| ChannelLayout::new(pes, rows, k, v, m).unwrap())
    }

    #[test]
    fn blocks_cover_the_columns_of_s_and_m() {
        for l in layouts() {
            let covered = |state: bool| -> u32 {
                (0..l.blocks()).filter(|&b| l.is_state(b) == state).map(|b| l.columns(b).1).sum()
            };
            assert_eq!(covered(true), l.v);
            assert_eq!(covered(false), if l.m_size == 0 { 0 } else { l.k });
        }
    }

    #[test]
    fn slots_are_aligned_disjoint_and_inside() {
        for l in layouts() {
            let mut end = 0;
            for source in 0..l.pes {
                for parity in 0..SLOTS {
                    for row in 0..l.rows {
                        for block in 0..l.blocks() {
                            let slot = l.slot(source, parity, row, block);
                            assert_eq!(slot.offset % SLOT_ALIGN, 0);
                            assert!(slot.offset >= end && slot.offset < end + SLOT_ALIGN, "{l:?} {slot:?} after {end}");
                            let (_, columns) = l.columns(block);
                            assert_eq!(slot.bytes, (columns * l.k * l.element_bytes(block)) as usize);
                            end = slot.offset + slot.bytes;
                        }
                    }
                }
            }
            assert_eq!(end.next_multiple_of(SLOT_ALIGN), l.payload_bytes());
        }
    }

    #[test]
    fn every_word_has_one_meaning_and_writers_do_not_share_lines() {
        for l in layouts() {
            let mut owner = vec![None; l.words()];
            let mut claim = |word: usize, who: String| {
                assert!(owner[word].is_none(), "{l:?}: word {word} is {who} and {:?}", owner[word]);
                owner[word] = Some(who);
            };
            for pe in 0..l.pes {
                for row in 0..l.rows {
                    claim(l.ack(pe, row), format!("ack {pe}"));
                    for block in 0..l.blocks() {
                        (0..SLOTS).for_each(|p| claim(l.signal(pe, row, block, p), format!("signal {pe}")));
                        assert_eq!(l.signal(pe, row, block, 0) ^ 1, l.signal(pe, row, block, 1));
                        (0..SLOTS).for_each(|p| claim(l.sent(pe, row, block, p), "own".into()));
                    }
                }
            }
            for row in 0..l.rows {
                claim(l.read_count(row), "own count".into());
                (0..l.s_blocks()).for_each(|b| claim(l.merged(row, b), "own flag".into()));
            }
            for line in owner.chunks(LINE_WORDS) {
                let mut names: Vec<_> = line.iter().flatten().collect();
                names.dedup();
                assert!(names.len() <= 1, "{l:?}: {names:?} share a line");
            }
            let first_own = owner.iter().position(|o| o.as_deref() == Some("own")).unwrap();
            assert_eq!(first_own, l.peer_words());
        }
    }

    #[test]
    fn a_known_layout_stays_where_it_is() {
        // H = 32, K = V = 128, bf16 M: 2 blocks of 32 KiB and 2 of 16 KiB a row.
        let l = ChannelLayout::new(8, 32, 128, 128, 2).unwrap();
        assert_eq!((l.s_blocks(), l.m_blocks(), l.row_bytes()), (2, 2, 96 << 10));
        assert_eq!(l.payload_bytes(), 48 << 20);
        assert_eq!(l.slot(1, 1, 2, 3), Slot { offset: ((3 * 32 + 2) * 96 + 80) << 10, bytes: 16 << 10 });
        assert_eq!((l.signal(1, 0, 0, 1), l.ack(0, 0), l.peer_words()), (257, 2048, 2304));
    }

    #[test]
    fn sizes_that_make_no_channel_are_named() {
        assert_eq!(ChannelLayout::new(0, 1, 64, 64, 4), Err(LayoutError::Zero("pes")));
        assert_eq!(ChannelLayout::new(1, 1, 64, 0, 4), Err(LayoutError::Zero("v")));
        assert_eq!(ChannelLayout::new(1, 1, 64, 64, 3), Err(LayoutError::MSize(3)));
        assert_eq!(ChannelLayout::new(u32::MAX, u32::MAX, 256, 256, 4), Err(LayoutError::TooLarge));
        assert!(LayoutError::MSize(3).to_string().contains("3 bytes"));
    }
}
