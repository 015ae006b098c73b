//! Messages that two blocks write in parts, under loom: every schedule and every value that a load may return.
//!
//! The parts, and the sender's own words, are loom `UnsafeCell`s, so an access that the protocol's orderings do not order fails
//! the model. The last models break a rule each and must fail.

use kernels_gpu::protocol::{
    ChannelLayout, Expired, Medium, Message, SLOTS, Wait, before_write, finish_reading, parity, publish_part, receive,
};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

/// Blocks that write a message.
const PARTS: usize = 2;

/// Polls of one wait up to which loom tries every schedule; beyond, it runs one fair schedule to the end.
const EXPLORED_POLLS: u32 = 3;

/// The words of both PEs, and the slots at PE 1.
struct Memory {
    signals: [AtomicU64; SLOTS as usize],
    ack: AtomicU64,
    reads: AtomicU64,
    sent: [UnsafeCell<u64>; SLOTS as usize],
    slots: [[UnsafeCell<u64>; PARTS]; SLOTS as usize],
    /// Of each operation's message: parts that are written.
    written: [AtomicU64; 4],
}

#[derive(Clone)]
struct Pe {
    pe: u32,
    layout: ChannelLayout,
    memory: Arc<Memory>,
    /// How parts are counted.
    count: Ordering,
    /// How many are awaited before the signal.
    parts: u64,
}

impl Pe {
    fn word(&self, word: usize) -> &AtomicU64 {
        match word {
            word if word == self.layout.signal(0, 0, 0, 0) => &self.memory.signals[0],
            word if word == self.layout.signal(0, 0, 0, 1) => &self.memory.signals[1],
            word if word == self.layout.ack(1, 0) => &self.memory.ack,
            _ => &self.memory.reads,
        }
    }

    fn sent(&self, word: usize) -> &UnsafeCell<u64> {
        &self.memory.sent[word - self.layout.sent(1, 0, 0, 0)]
    }

    fn message(&self, epoch: u64) -> Message {
        Message { source: 0, dest: 1, row: 0, block: 0, epoch }
    }

    /// Writes part `part`; whether it was the last one.
    fn write(&self, part: usize, epoch: u64) -> bool {
        let writable = before_write(self, &self.layout, self.message(epoch)).unwrap();
        // SAFETY: loom fails the model if this access races.
        self.memory.slots[parity(epoch) as usize][part].with_mut(|x| unsafe { *x = 10 * epoch + part as u64 });
        let count = || self.memory.written[epoch as usize].fetch_add(1, self.count) + 1;
        publish_part(self, &self.layout, writable, self.parts, count)
    }

    fn read(&self, epoch: u64) {
        receive(self, &self.layout, self.message(epoch)).unwrap();
        for part in 0..PARTS {
            // SAFETY: loom fails the model if this access races.
            let found = self.memory.slots[parity(epoch) as usize][part].with(|x| unsafe { *x });
            assert_eq!(found, 10 * epoch + part as u64, "part {part} of epoch {epoch}");
        }
        assert!(finish_reading(self, &self.layout, 0, epoch, 1, [0]));
    }
}

impl Medium for Pe {
    fn pe(&self) -> u32 {
        self.pe
    }
    fn load_acquire(&self, word: usize) -> u64 {
        self.word(word).load(Ordering::Acquire)
    }
    fn store_release(&self, _: u32, word: usize, value: u64) {
        self.word(word).store(value, Ordering::Release);
    }
    fn load_local(&self, word: usize) -> u64 {
        // SAFETY: loom fails the model if this access races.
        self.sent(word).with(|sent| unsafe { *sent })
    }
    fn store_local(&self, word: usize, value: u64) {
        // SAFETY: loom fails the model if this access races.
        self.sent(word).with_mut(|sent| unsafe { *sent = value });
    }
    fn increment(&self, word: usize) -> u64 {
        self.word(word).fetch_add(1, Ordering::AcqRel) + 1
    }
    fn wait(&self, wait: &Wait, mut poll: impl FnMut() -> u64) -> Result<(), Expired> {
        for polls in 1.. {
            if wait.met_by(poll()) {
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

/// PE 0 sends in `epochs`, two blocks a message, and PE 1 reads.
fn model(epochs: &'static [u64], count: Ordering, parts: u64) {
    let layout = ChannelLayout::new(2, 1, 16, 16, 0).unwrap();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let cell = || UnsafeCell::new(0);
        let memory = Arc::new(Memory {
            signals: [AtomicU64::new(0), AtomicU64::new(0)],
            ack: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            sent: [cell(), cell()],
            slots: [[cell(), cell()], [cell(), cell()]],
            written: [(); 4].map(|()| AtomicU64::new(0)),
        });
        let pe = |pe| Pe { pe, layout, memory: Arc::clone(&memory), count, parts };
        let (sender, receiver) = (pe(0), pe(1));
        let sending = thread::spawn(move || {
            for &epoch in epochs {
                let other = sender.clone();
                let other = thread::spawn(move || other.write(1, epoch));
                let last = sender.write(0, epoch);
                // The end of a kernel: all its blocks are done before the next one starts.
                assert!(last ^ other.join().unwrap(), "exactly one part of epoch {epoch} is the last");
            }
        });
        epochs.iter().for_each(|&epoch| receiver.read(epoch));
        sending.join().unwrap();
    });
}

#[test]
fn the_signal_brings_all_parts() {
    model(&[1], Ordering::AcqRel, 2);
}

#[test]
fn all_parts_wait_until_the_slot_was_read() {
    model(&[1, 3], Ordering::AcqRel, 2);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_count_loses_the_other_part() {
    model(&[1], Ordering::Relaxed, 2);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_signal_after_the_first_part_is_too_early() {
    model(&[1], Ordering::AcqRel, 1);
}
