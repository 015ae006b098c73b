//! A PE under loom: its memory, the protocol's operations on it, and what it sends.

use std::collections::BTreeMap;

use kernels_gpu::protocol::{
    Arrival, Awaited, ChannelLayout, Expired, Medium, Message, SLOTS, Wait, before_write, finish_reading, is_empty,
    publish_empty, push, receive, receive_unless,
};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

/// A rule of the protocol that a model breaks.
#[derive(Clone, Copy, PartialEq)]
pub enum Fault {
    None,
    /// The sender does not wait for the ack of the slot's last content.
    SkipAckWait,
    /// Signals are stored without release.
    RelaxedSignal,
    /// Acks are stored without release.
    RelaxedAck,
    /// Readers are counted without ordering.
    RelaxedCount,
    /// Merged flags are stored without release.
    RelaxedMerged,
    /// Both parities have one signal.
    OneSignal,
}

/// Polls of one wait up to which loom tries every schedule; two threads that wait for a third could otherwise poll in turns
/// without end. Beyond, it runs one fair schedule to the end.
const EXPLORED_POLLS: u32 = 3;

/// What one PE owns of the channel.
pub struct Memory {
    words: BTreeMap<usize, AtomicU64>,
    sent: BTreeMap<usize, UnsafeCell<u64>>,
    slots: BTreeMap<usize, UnsafeCell<u64>>,
    pub merged: UnsafeCell<u64>,
}

impl Memory {
    pub fn new(layout: &ChannelLayout, pe: u32) -> Self {
        let (mut words, mut sent, mut slots) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for row in 0..layout.rows {
            words.insert(layout.read_count(row), AtomicU64::new(0));
            words.insert(layout.merged(row, 0), AtomicU64::new(0));
            for peer in (0..layout.pes).filter(|&peer| peer != pe) {
                words.insert(layout.ack(peer, row), AtomicU64::new(0));
                for block in 0..layout.blocks() {
                    for parity in 0..SLOTS {
                        words.insert(layout.signal(peer, row, block, parity), AtomicU64::new(0));
                        sent.insert(layout.sent(peer, row, block, parity), UnsafeCell::new(0));
                        slots.insert(layout.slot(peer, parity, row, block).offset, UnsafeCell::new(0));
                    }
                }
            }
        }
        Self { words, sent, slots, merged: UnsafeCell::new(0) }
    }
}

#[derive(Clone)]
pub struct Pe {
    pub pe: u32,
    pub layout: ChannelLayout,
    pub fault: Fault,
    pub all: Arc<Vec<Memory>>,
}

impl Medium for Pe {
    fn pe(&self) -> u32 {
        self.pe
    }

    fn load_acquire(&self, word: usize) -> u64 {
        self.own().words[&self.place(word)].load(Ordering::Acquire)
    }

    fn store_release(&self, pe: u32, word: usize, value: u64) {
        let first_ack = self.layout.ack(0, 0);
        let relaxed = match self.fault {
            Fault::RelaxedSignal => word < first_ack,
            Fault::RelaxedAck => (first_ack..self.layout.peer_words()).contains(&word),
            Fault::RelaxedMerged => word == self.layout.merged(0, 0),
            _ => false,
        };
        let order = if relaxed { Ordering::Relaxed } else { Ordering::Release };
        self.all[pe as usize].words[&self.place(word)].store(value, order);
    }

    fn load_local(&self, word: usize) -> u64 {
        // SAFETY: loom fails the model if this access races.
        self.own().sent[&word].with(|sent| unsafe { *sent })
    }

    fn store_local(&self, word: usize, value: u64) {
        // SAFETY: loom fails the model if this access races.
        self.own().sent[&word].with_mut(|sent| unsafe { *sent = value });
    }

    fn increment(&self, word: usize) -> u64 {
        let order = if self.fault == Fault::RelaxedCount { Ordering::Relaxed } else { Ordering::AcqRel };
        self.own().words[&word].fetch_add(1, order) + 1
    }

    fn wait(&self, wait: &Wait, mut poll: impl FnMut() -> u64) -> Result<(), Expired> {
        if self.fault == Fault::SkipAckWait && wait.awaited == Awaited::Ack {
            return Ok(());
        }
        for polls in 1.. {
            let found = poll();
            if wait.met_by(found) {
                return Ok(());
            }
            if polls == EXPLORED_POLLS {
                loom::skip_branch();
            }
            thread::yield_now();
        }
        unreachable!("a wait ends by its word")
    }
}

impl Pe {
    pub fn own(&self) -> &Memory {
        &self.all[self.pe as usize]
    }

    /// Where a word lies; also where it would lie if the parities shared their signals.
    pub fn place(&self, word: usize) -> usize {
        let shared = self.fault == Fault::OneSignal && word < self.layout.ack(0, 0);
        if shared { word - word % SLOTS as usize } else { word }
    }

    pub fn message(&self, source: u32, dest: u32, block: u32, epoch: u64) -> Message {
        Message { source, dest, row: 0, block, epoch }
    }

    /// Sends every block of row 0.
    pub fn send(&self, dest: u32, epoch: u64) {
        for block in 0..self.layout.blocks() {
            let message = self.message(self.pe, dest, block, epoch);
            if empty(&message) {
                publish_empty(self, &self.layout, before_write(self, &self.layout, message).unwrap());
                continue;
            }
            push(self, &self.layout, message, |slot| {
                // SAFETY: loom fails the model if this access races.
                self.all[dest as usize].slots[&slot.offset].with_mut(|x| unsafe { *x = content(&message) });
            })
            .unwrap();
        }
    }

    /// Receives every block of row 0 and checks what is in it.
    pub fn read(&self, source: u32, epoch: u64) {
        for block in 0..self.layout.blocks() {
            let message = self.message(source, self.pe, block, epoch);
            let slot = receive(self, &self.layout, message).unwrap();
            assert_eq!(slot.is_none(), empty(&message), "whether {message:?} is empty");
            let Some(slot) = slot else { continue };
            // SAFETY: loom fails the model if this access races.
            let found = self.own().slots[&slot.offset].with(|x| unsafe { *x });
            assert_eq!(found, content(&message), "content of {message:?}");
        }
    }

    /// As [`read_alone`](Self::read_alone), for a receiver that does not need the message if it has not come yet.
    pub fn read_or_skip(&self, source: u32, epoch: u64) {
        let message = self.message(source, self.pe, 0, epoch);
        match receive_unless(self, &self.layout, message, || true).unwrap() {
            Arrival::Slot(slot) => {
                // SAFETY: loom fails the model if this access races.
                let found = self.own().slots[&slot.offset].with(|x| unsafe { *x });
                assert_eq!(found, content(&message), "content of {message:?}");
            }
            Arrival::Empty => assert!(empty(&message) && is_empty(self, &self.layout, message)),
            Arrival::NotNeeded => {}
        }
        assert!(self.finish(source, epoch, 1));
    }

    pub fn finish(&self, source: u32, epoch: u64, readers: u64) -> bool {
        finish_reading(self, &self.layout, 0, epoch, readers, [source])
    }

    pub fn read_alone(&self, source: u32, epoch: u64) {
        self.read(source, epoch);
        assert!(self.finish(source, epoch, 1));
    }
}

pub fn content(message: &Message) -> u64 {
    message.epoch * 100 + u64::from(message.block) * 10 + u64::from(message.source) + 1
}

/// Which epochs' messages are empty.
pub fn empty(message: &Message) -> bool {
    matches!(message.epoch, 11 | 12 | 13 | 15)
}

/// S alone: one block a row.
pub fn one_block() -> ChannelLayout {
    ChannelLayout::new(2, 1, 16, 16, 0).unwrap()
}

/// Runs `body` for every schedule with at most two preemptions, with both PEs.
pub fn model(layout: ChannelLayout, fault: Fault, body: impl Fn(Pe, Pe) + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let all = Arc::new((0..2).map(|pe| Memory::new(&layout, pe)).collect());
        let pe = |pe| Pe { pe, layout, fault, all: Arc::clone(&all) };
        body(pe(0), pe(1));
    });
}
