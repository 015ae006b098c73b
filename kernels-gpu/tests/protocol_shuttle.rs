//! The protocol under shuttle: four PEs, random traffic, random schedules.
//!
//! A payload is four words written and read one by one, so an overwritten or half-written slot shows as a wrong word.

use std::collections::BTreeMap;
use std::sync::Arc;

use kernels_gpu::protocol::{
    Arrival, Awaited, ChannelLayout, Expired, Medium, Message, Slot, Wait, before_write, finish_reading, is_empty,
    publish, publish_empty, push, receive, receive_unless,
};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;

const PES: u32 = 4;
const ROWS: u32 = 2;
const EPOCHS: u64 = 6;
const ITERATIONS: usize = 1000;
const PAYLOAD_WORDS: usize = 4;

struct Memory {
    words: Vec<AtomicU64>,
    slots: BTreeMap<usize, [AtomicU64; PAYLOAD_WORDS]>,
}

/// One PE's side of one channel.
#[derive(Clone)]
struct Pe {
    pe: u32,
    layout: ChannelLayout,
    waits_for_acks: bool,
    all: Arc<Vec<Memory>>,
}

impl Medium for Pe {
    fn pe(&self) -> u32 {
        self.pe
    }

    fn load_acquire(&self, word: usize) -> u64 {
        self.own().words[word].load(Ordering::Acquire)
    }

    fn store_release(&self, pe: u32, word: usize, value: u64) {
        // An ack or a signal that went back would deadlock or let a slot be overwritten later.
        let old = self.all[pe as usize].words[word].swap(value, Ordering::AcqRel);
        assert!(old < value, "word {word} of PE {pe} went from {old} to {value}");
    }

    fn load_local(&self, word: usize) -> u64 {
        self.own().words[word].load(Ordering::Relaxed)
    }

    fn store_local(&self, word: usize, value: u64) {
        self.own().words[word].store(value, Ordering::Relaxed);
    }

    fn increment(&self, word: usize) -> u64 {
        self.own().words[word].fetch_add(1, Ordering::AcqRel) + 1
    }

    fn wait(&self, wait: &Wait, mut poll: impl FnMut() -> u64) -> Result<(), Expired> {
        if wait.awaited == Awaited::Ack && !self.waits_for_acks {
            return Ok(());
        }
        for _ in 0..100_000 {
            if wait.met_by(poll()) {
                return Ok(());
            }
            thread::yield_now();
        }
        Err(wait.expired(self.pe, 0, poll(), 0))
    }
}

impl Pe {
    fn own(&self) -> &Memory {
        &self.all[self.pe as usize]
    }

    fn write(&self, dest: u32, slot: Slot, value: u64) {
        for (i, word) in self.all[dest as usize].slots[&slot.offset].iter().enumerate() {
            word.store(value + i as u64, Ordering::Relaxed);
        }
    }

    fn read(&self, slot: Slot) -> [u64; PAYLOAD_WORDS] {
        std::array::from_fn(|i| self.own().slots[&slot.offset][i].load(Ordering::Relaxed) - i as u64)
    }

    /// One of the readers of `row`: reads its block of S and all blocks of M of every source, in their order, and stops waiting
    /// for one as soon as a later one's M is empty; `empty` says which blocks are.
    fn read_row(&self, row: u32, s_block: u32, epoch: u64, sources: &[u32], empty: impl Fn(&Message) -> bool) {
        let layout = &self.layout;
        for (i, &source) in sources.iter().enumerate() {
            let message = |source, block| Message { source, dest: self.pe, row, block, epoch };
            let m_blocks = layout.s_blocks()..layout.blocks();
            let ends_here = |later: &u32| m_blocks.clone().all(|block| is_empty(self, layout, message(*later, block)));
            for block in (0..layout.blocks()).filter(|&b| b == s_block || !layout.is_state(b)) {
                let message = message(source, block);
                let not_needed = || !m_blocks.is_empty() && sources[i + 1..].iter().any(ends_here);
                match receive_unless(self, layout, message, not_needed).unwrap() {
                    Arrival::Slot(slot) => {
                        assert!(!empty(&message), "{message:?} should be empty");
                        assert_eq!(self.read(slot), [content(&message); PAYLOAD_WORDS], "content of {message:?}");
                    }
                    Arrival::Empty => assert!(empty(&message), "content of {message:?}, which is said to be empty"),
                    Arrival::NotNeeded => break,
                }
            }
        }
        finish_reading(self, &self.layout, row, epoch, u64::from(self.layout.s_blocks()), sources.iter().copied());
    }
}

fn content(message: &Message) -> u64 {
    let Message { source, dest, row, block, epoch } = *message;
    (((epoch * 16 + u64::from(source)) * 16 + u64::from(dest)) * 16 + u64::from(row)) * 160 + u64::from(block) * 16
}

/// Memory of one channel on every PE.
fn channel(layout: &ChannelLayout) -> Arc<Vec<Memory>> {
    let memory = || Memory {
        words: (0..layout.words()).map(|_| AtomicU64::new(0)).collect(),
        slots: (0..layout.pes)
            .flat_map(|source| (0..2).map(move |parity| (source, parity)))
            .flat_map(|(source, parity)| (0..layout.rows).map(move |row| (source, parity, row)))
            .flat_map(|(source, parity, row)| {
                (0..layout.blocks()).map(move |block| layout.slot(source, parity, row, block).offset)
            })
            .map(|offset| (offset, std::array::from_fn(|_| AtomicU64::new(0))))
            .collect(),
    };
    Arc::new((0..layout.pes).map(|_| memory()).collect::<Vec<_>>())
}

/// Runs `body` once per PE, each on its own thread, to the end.
fn on_every_pe(layout: ChannelLayout, waits_for_acks: bool, body: impl Fn(Pe) + Send + Sync + 'static) {
    let all = channel(&layout);
    let body = Arc::new(body);
    let threads: Vec<_> = (0..layout.pes)
        .map(|pe| {
            let (pe, body) = (Pe { pe, layout, waits_for_acks, all: Arc::clone(&all) }, Arc::clone(&body));
            thread::spawn(move || body(pe))
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
}

/// Each epoch goes one way, from lower PEs to higher or back; any pair may send any row, or not.
fn push_to_successors(waits_for_acks: bool) {
    // Two blocks of S, so two readers of a row, and one of M.
    let layout = ChannelLayout::new(PES, ROWS, 64, 128, 2).unwrap();
    let mut rng = thread_rng();
    let mut traffic = BTreeMap::new();
    for epoch in 1..=EPOCHS {
        let forward = rng.r#gen::<bool>();
        for (source, dest) in (0..PES).flat_map(|s| (0..PES).map(move |d| (s, d))) {
            let right_way = if forward { source < dest } else { source > dest };
            for row in 0..ROWS {
                traffic.insert((epoch, source, dest, row), right_way && rng.gen_bool(0.6));
            }
        }
    }
    // Whether the M that a PE sends of a row in an epoch is empty.
    let dead: Vec<bool> = (0..(EPOCHS as u32 + 1) * PES * ROWS).map(|_| rng.gen_bool(0.4)).collect();
    let empty = move |message: &Message| {
        let at = (message.epoch as u32 * PES + message.source) * ROWS + message.row;
        !layout.is_state(message.block) && dead[at as usize]
    };
    on_every_pe(layout, waits_for_acks, move |pe| {
        for epoch in 1..=EPOCHS {
            for row in 0..ROWS {
                for block in 0..layout.blocks() {
                    for dest in (0..PES).filter(|&dest| traffic[&(epoch, pe.pe, dest, row)]) {
                        let message = Message { source: pe.pe, dest, row, block, epoch };
                        let writable = before_write(&pe, &layout, message).unwrap();
                        if empty(&message) {
                            publish_empty(&pe, &layout, writable);
                            continue;
                        }
                        pe.write(dest, writable.slot(&layout), content(&message));
                        publish(&pe, &layout, writable);
                    }
                }
            }
            let readers: Vec<_> = (0..ROWS)
                .flat_map(|row| (0..layout.s_blocks()).map(move |s_block| (row, s_block)))
                .filter_map(|(row, s_block)| {
                    let sources: Vec<_> = (0..PES).filter(|&s| traffic[&(epoch, s, pe.pe, row)]).collect();
                    let (pe, empty) = (pe.clone(), empty.clone());
                    (!sources.is_empty())
                        .then(|| thread::spawn(move || pe.read_row(row, s_block, epoch, &sources, empty)))
                })
                .collect();
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        }
    });
}

/// Each PE adds its part to what its predecessor sent, if it sent, and sends the sum on.
fn chain() {
    let layout = ChannelLayout::new(PES, ROWS, 16, 16, 0).unwrap();
    let mut rng = thread_rng();
    let linked: Vec<Vec<bool>> = (0..=EPOCHS).map(|_| (1..PES).map(|_| rng.gen_bool(0.7)).collect()).collect();
    on_every_pe(layout, true, move |pe| {
        for epoch in 1..=EPOCHS {
            let links = &linked[epoch as usize];
            for row in 0..ROWS {
                let own = |pe: u32| epoch * 1000 + u64::from(row) * 100 + u64::from(pe) * 10;
                let first = (0..pe.pe).rev().take_while(|&p| links[p as usize]).last().unwrap_or(pe.pe);
                let mut sum = own(pe.pe);
                if first < pe.pe {
                    let source = pe.pe - 1;
                    let message = Message { source, dest: pe.pe, row, block: 0, epoch };
                    let slot = receive(&pe, &layout, message).unwrap().expect("a sum");
                    let before = (first..pe.pe).map(own).sum();
                    assert_eq!(pe.read(slot), [before; PAYLOAD_WORDS], "sum up to {source} in epoch {epoch}");
                    sum += before;
                    assert!(finish_reading(&pe, &layout, row, epoch, 1, [source]));
                }
                if pe.pe + 1 < PES && links[pe.pe as usize] {
                    let message = Message { source: pe.pe, dest: pe.pe + 1, row, block: 0, epoch };
                    push(&pe, &layout, message, |slot| pe.write(message.dest, slot, sum)).unwrap();
                }
            }
        }
    });
}

/// Training: states go to later PEs in forward calls, gradients to earlier ones in backward calls, each direction in a channel
/// of its own. Calls come in any order, with more of one kind than of the other, and a call may have nothing to send.
fn train() {
    let layout = ChannelLayout::new(PES, ROWS, 16, 16, 0).unwrap();
    let mut rng = thread_rng();
    let mut epochs = [0; 2];
    // (direction, epoch in its channel, whether this pair sends), the same list on all PEs.
    let calls: Vec<_> = (0..2 * EPOCHS)
        .map(|_| {
            let backward = rng.r#gen::<bool>();
            epochs[usize::from(backward)] += 1;
            let pairs: Vec<bool> = (0..PES * PES * ROWS).map(|_| rng.gen_bool(0.5)).collect();
            (backward, epochs[usize::from(backward)], pairs)
        })
        .collect();
    let channels = [channel(&layout), channel(&layout)];
    let calls = Arc::new(calls);
    let threads: Vec<_> = (0..PES)
        .map(|me| {
            let sides = channels.clone().map(|all| Pe { pe: me, layout, waits_for_acks: true, all });
            let calls = Arc::clone(&calls);
            thread::spawn(move || {
                for (backward, epoch, pairs) in calls.iter() {
                    let pe = &sides[usize::from(*backward)];
                    let sends = |source: u32, dest: u32, row: u32| {
                        let right_way = if *backward { source > dest } else { source < dest };
                        right_way && pairs[((source * PES + dest) * ROWS + row) as usize]
                    };
                    for row in 0..ROWS {
                        for dest in (0..PES).filter(|&dest| sends(me, dest, row)) {
                            let message = Message { source: me, dest, row, block: 0, epoch: *epoch };
                            push(pe, &layout, message, |slot| pe.write(dest, slot, content(&message))).unwrap();
                        }
                    }
                    for row in 0..ROWS {
                        let sources: Vec<_> = (0..PES).filter(|&source| sends(source, me, row)).collect();
                        if !sources.is_empty() {
                            pe.read_row(row, 0, *epoch, &sources, |_| false);
                        }
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
}

#[test]
fn forward_and_backward_calls_in_any_order_do_not_mix() {
    shuttle::check_random(train, ITERATIONS);
}

#[test]
fn random_pushes_arrive_whole() {
    shuttle::check_random(|| push_to_successors(true), ITERATIONS);
}

#[test]
fn random_chains_sum_up() {
    shuttle::check_random(chain, ITERATIONS);
}

#[test]
#[should_panic(expected = "content of")]
fn without_ack_waits_payloads_are_torn() {
    shuttle::check_random(|| push_to_successors(false), ITERATIONS);
}
