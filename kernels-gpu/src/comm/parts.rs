//! Messages that several blocks write and read in parts, each block some columns: one slot, one signal, one acknowledgement.
//!
//! Every block that writes waits for the slot by itself, which is free by then or soon for all of them, writes its part and
//! counts it; the one that counts the last part signals. Where the message cannot be stored at its destination, the parts are
//! written into this PE's own slot of the receiver as a source, out of which the last one puts all of it: in a channel in
//! which messages go one way, nothing arrives from whom something is sent to. On the other side every block waits for the signal, and the last
//! reader acknowledges, as readers of a summary do.

use core::sync::atomic::Ordering;

use super::{BYTES_SENT, Link, MESSAGES, Port};
use crate::params::Array;
use crate::protocol::{self, Message, Writable};
use crate::tile::{Warpgroup, increment_acq_rel};

/// Leave to write a part of a message.
#[must_use = "a part that was written must be finished"]
pub struct SlotPart {
    writable: Writable,
    address: u64,
    message: Message,
}

impl SlotPart {
    /// Where the whole message goes, as this PE reaches it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Port<'_> {
    /// Waits until the slot of row `row` at `dest` may be written; nothing if it did not become free in time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn begin_part(&self, wg: &mut Warpgroup<'_>, dest: u32, row: u32) -> Option<SlotPart> {
        let message = Message { source: self.channel.pe, dest, row, block: 0, epoch: self.epoch(wg) };
        // An acknowledged message has left, too: what it was put out of is free as well.
        let writable = self.free_slot(wg, message)?;
        #[cfg(any(not(target_arch = "nvptx64"), feature = "nvshmem"))]
        if self.puts_to(wg, dest) {
            let address = self.slot_address(wg, self.channel.pe, &Message { source: dest, ..message });
            return Some(SlotPart { writable, address, message });
        }
        Some(SlotPart { writable, address: self.slot_address(wg, dest, &message), message })
    }

    /// Counts a part as written in word `index` of `written`, which is zero before the launch; the one that completes the
    /// `parts` of the message signals, and counts its `bytes`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn finish_part(
        &self,
        wg: &mut Warpgroup<'_>,
        part: SlotPart,
        (written, index): (Array, usize),
        parts: u64,
        bytes: u64,
    ) {
        let SlotPart { writable, message, .. } = part;
        let layout = &self.channel.layout;
        // Every thread has stored its share of the part before one of them counts it.
        wg.sync();
        #[cfg(any(not(target_arch = "nvptx64"), feature = "nvshmem"))]
        let puts = self.puts_to(wg, message.dest);
        #[cfg(not(any(not(target_arch = "nvptx64"), feature = "nvshmem")))]
        let (puts, _) = (false, &message);
        let last = wg.elect(|wg| {
            let link = Link { wg, port: *self };
            let count = || increment_acq_rel(wg.word(written, index));
            let last = if puts {
                protocol::leave_part(&link, layout, writable, parts, count)
            } else {
                protocol::publish_part(&link, layout, writable, parts, count)
            };
            if last {
                wg.word(self.channel.stats, BYTES_SENT).fetch_add(bytes, Ordering::Relaxed);
                wg.word(self.channel.stats, MESSAGES).fetch_add(1, Ordering::Relaxed);
            }
            last
        });
        #[cfg(any(not(target_arch = "nvptx64"), feature = "nvshmem"))]
        if last && puts {
            self.put_message(wg, &message, part.address);
        }
        let _ = last; // only puts need it
    }

    /// Where the message of row `row` from `source`, which is known to have arrived, lies.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn received_address(&self, wg: &Warpgroup<'_>, source: u32, row: u32) -> u64 {
        let dest = self.channel.pe;
        self.slot_address(wg, dest, &Message { source, dest, row, block: 0, epoch: self.epoch(wg) })
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn slot_address(&self, wg: &Warpgroup<'_>, pe: u32, message: &Message) -> u64 {
        let base: u64 = wg.read(self.channel.payload, pe as usize);
        base + message.slot(&self.channel.layout).offset as u64
    }

    /// Notes that one of the `readers` of `row`, the same number in every epoch, has read its part of all messages; the
    /// sources are the `count` that `source` gives.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn finish_reading_part(
        &self,
        wg: &mut Warpgroup<'_>,
        row: u32,
        readers: u64,
        count: u32,
        source: impl Fn(&Warpgroup<'_>, u32) -> u32,
    ) {
        let epoch = self.epoch(wg);
        // Every thread has read its share before one of them counts the reader.
        wg.sync();
        wg.elect(|wg| {
            let sources = (0..count).map(|i| source(wg, i));
            let link = Link { wg, port: *self };
            protocol::finish_reading(&link, &self.channel.layout, row, epoch, readers, sources);
        });
    }
}
