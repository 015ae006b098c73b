//! Sending to PEs whose memory this kernel does not store to: by puts with signals, out of this PE's symmetric memory.
//!
//! On GPUs these need NVSHMEM's device library, so they are in a module of their own (feature `nvshmem`); on the CPU they
//! are there to be tested.

use super::{Link, Port, Targets};
use crate::params::{Array, Way};
use crate::protocol::{self, Message};
use crate::tile::{OperandElement, Place, Put, Shared, Warpgroup};

impl Port<'_> {
    /// Whether `pe` is sent to by puts: the one place that decides. The host has looked at who reaches whom.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) fn puts_to(&self, wg: &Warpgroup<'_>, pe: u32) -> bool {
        wg.read::<u32>(self.channel.ways, pe as usize) == Way::Puts as u32
    }

    /// Word `word` of `pe`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) fn word_place(&self, wg: &Warpgroup<'_>, pe: u32, word: usize) -> Place {
        self.place(wg, self.channel.words, pe, word * size_of::<u64>())
    }

    /// Byte `offset` of an object of which `addresses` has each PE's copy.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) fn place(&self, wg: &Warpgroup<'_>, addresses: Array, pe: u32, offset: usize) -> Place {
        let address = |pe: u32| match wg.read::<u64>(addresses, pe as usize) {
            0 => 0,
            base => base + offset as u64,
        };
        Place { own: address(self.channel.pe), reached: address(pe) }
    }

    /// The part of [`Port::push`] for targets that are put to.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn put_where_needed<E: OperandElement>(
        &self,
        wg: &mut Warpgroup<'_>,
        targets: Targets,
        send_row: u32,
        block: u32,
        tile: Shared<E>,
    ) -> bool {
        let layout = &self.channel.layout;
        let any = (0..targets.count).any(|i| {
            let dest = targets.message(wg, self, i, block).dest;
            self.puts_to(wg, dest)
        });
        if !any {
            return true;
        }
        // The staging slot was last read for messages of its parity, by puts that have left or, in bulk mode, by the
        // receivers themselves: it is free when all of them have acknowledged.
        for i in 0..targets.count {
            let message = targets.message(wg, self, i, block);
            if self.free_slot(wg, message).is_none() {
                return false;
            }
        }
        let staged = self.staged(wg, send_row, block);
        let start = wg.clock();
        wg.store(self.slot(wg, self.channel.pe, &staged), tile);
        let from = self.place(wg, self.channel.payload, self.channel.pe, staged.slot(layout).offset).own;
        for i in 0..targets.count {
            let message = targets.message(wg, self, i, block);
            if !self.puts_to(wg, message.dest) {
                continue;
            }
            let Some(writable) = self.free_slot(wg, message) else { return false };
            let slot = message.slot(layout);
            wg.put_signal(&Put {
                pe: message.dest,
                from,
                to: self.place(wg, self.channel.payload, message.dest, slot.offset),
                bytes: slot.bytes,
                signal: self.word_place(wg, message.dest, message.signal(layout)),
                value: message.signal_value(false),
            });
            wg.elect(|wg| {
                protocol::leave_to_exchange(&Link { wg, port: *self }, layout, writable);
                self.count_message(wg, &message, start);
            });
        }
        wg.finish_puts();
        true
    }

    /// Puts the message that lies complete at `from` in this PE's own symmetric memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn put_message(&self, wg: &mut Warpgroup<'_>, message: &Message, from: u64) {
        let layout = &self.channel.layout;
        let slot = message.slot(layout);
        wg.put_signal(&Put {
            pe: message.dest,
            from,
            to: self.place(wg, self.channel.payload, message.dest, slot.offset),
            bytes: slot.bytes,
            signal: self.word_place(wg, message.dest, message.signal(layout)),
            value: message.signal_value(false),
        });
        wg.finish_puts();
    }
}
