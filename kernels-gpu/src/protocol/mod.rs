//! How a state summary gets from the PE that computed it to the PEs that need it.
//!
//! # The algorithm
//! A *channel* has, on every PE, two slots for each (source PE, row, block), and 64-bit words. Each operation on the
//! channel has an *epoch*: 1 for the first, one more for the next, on every PE alike, whether or not any message flows.
//! Epochs are never reset, so no word is ever cleared and a late message cannot be taken for an early one.
//!
//! * **Send** block `b` of row `r` to `d` in epoch `e`: slot and signal are those of `e`'s parity. The previous content, of the
//!   epoch the sender noted in `sent`, must have been read: wait until `ack[d, r] >= sent`. Write the payload; store
//!   `signal[source, r, b, parity] = 2 e` at `d` with release; note `sent = e`. ([`before_write`], [`publish`])
//! * **Send that a block is empty**: as above without a payload, and the signal is `2 e + 1`. ([`publish_empty`])
//! * **Receive**: wait until the signal tells epoch `e`, with acquire; its lowest bit says that the message is empty;
//!   otherwise read the slot. ([`receive`])
//! * **Acknowledge**: the blocks that read row `r` count themselves; the last stores `ack[d, r] = e` with release at every
//!   source of that row. ([`finish_reading`])
//!
//! # Why it is right
//! *No torn or early read*: a signal is stored after the payload with release and loaded with acquire. *No overwrite*: a slot is
//! written again, and its signal set again, only after an ack of its last epoch, which follows every read of both. So
//! a receiver that has not acknowledged `e` finds exactly `2 e` or `2 e + 1` in the signal: the sender may be
//! in epoch `e + 1`, but that has the other parity and with it another word. (With one word for both parities it could replace what
//! `e` said about being empty before that is read, and so could an empty message that did not wait for the ack, although
//! it writes no payload: both are models that must fail.) Each word grows, since epochs do and the bit counts less than they.
//! *No deadlock*: a sender waits only for reads of an earlier operation, a receiver only for the same
//! operation of lower PEs (of higher ones, going backward), so by induction over (epoch, PE) every wait ends, provided that
//! all PEs issue the same operations in the same order, and that the kernels of one operation end before those of
//! the next start.
//!
//! # Leaving out what does not matter
//! A receiver composes what its sources send, in their order, and what an empty transition stands behind does not matter to it. So
//! its readers may stop waiting for earlier sources once a later one says so ([`receive_unless`]), and acknowledge these all the
//! same, perhaps before they have sent. This ack `e` allows the sender no more than it is owed: it precedes the write of `e`
//! itself, which has waited for ack `e - 2` only, and the write of `e + 2` comes after that of `e` in the order of the sender's
//! stream (puts of an operation are complete before it ends), so that what the receiver awaits as `e + 2` is not
//! touched again before its own ack `e + 2`. Nobody reads slot or signal of `e` any more.
//!
//! # Both directions
//! Training has two channels of one layout: states flow from lower PEs to higher ones in forward operations, gradients of
//! states from higher to lower in backward operations. Each has its own slots, words and epochs; the same algorithm runs
//! in both. Nothing of one direction can then be taken for the other's, although they overlap: the last PE of a
//! sequence has nothing to wait for in a backward operation and is in the next forward operation while lower PEs still read
//! what it sent. (A PE in the middle merges in both directions: if these shared a flag, the forward operation of the same epoch
//! would have raised it already.)
//!
//! *No deadlock*: number the operations, forward and backward alike, in the order in which all PEs issue them. In a backward
//! operation a PE waits for
//!
//! 1. a free slot: for reads of an earlier operation of this direction;
//! 2. gradients from higher PEs of the same operation, each of which is sent before its sender waits for any (the walk from a
//!    zero gradient precedes the merge), or, in exact mode, after its sender has received those of higher PEs only.
//!
//! So every wait is for an earlier operation, or for the same one of a PE that lies farther along the flow: lower for
//! forward, higher for backward. By induction over (operation, PE, counted from where the flow begins) every wait ends.
//! The two inductions do not meet, since no operation has messages of both directions.
//!
//! # One protocol, several media
//! The algorithm is written against [`Medium`]: threads, processes and GPUs supply the memory operations, and
//! `tests/protocol_loom.rs` and `tests/protocol_shuttle.rs` run this very code under model checkers.
//!
//! On a GPU one thread of a block calls [`before_write`]; after a block barrier all of its threads store their part of the
//! tile, and after another the first thread calls [`publish`]. The barriers extend the orderings given here to the whole
//! block, since acquire and release are cumulative. The same holds for [`receive`] and [`finish_reading`].

mod expired;
mod layout;

pub use expired::{Awaited, Expired, TrapRecord, Wait, Watch};
pub use layout::{BLOCK_COLUMNS, ChannelLayout, LayoutError, SLOT_ALIGN, SLOTS, Slot, parity};

/// The memory operations that the protocol is made of, as seen by one PE of one channel.
///
/// Words are numbered by [`ChannelLayout`]. Between PEs the orderings must hold at system scope.
pub trait Medium {
    /// This PE's number.
    fn pe(&self) -> u32;

    /// Loads one of this PE's own words with acquire ordering.
    fn load_acquire(&self, word: usize) -> u64;

    /// Stores to `word` of `pe` with release ordering: whoever loads `value` with acquire sees all that this PE wrote,
    /// on `pe` or elsewhere, before.
    fn store_release(&self, pe: u32, word: usize, value: u64);

    /// Loads one of this PE's own words that no peer writes, without ordering.
    fn load_local(&self, word: usize) -> u64;

    /// Stores to one of this PE's own words that no peer writes, without ordering.
    fn store_local(&self, word: usize, value: u64);

    /// Adds 1 to one of this PE's own words, with acquire and release ordering among this PE's blocks, and returns the sum.
    fn increment(&self, word: usize) -> u64;

    /// Calls `poll`, which loads `wait.word`, until [`Wait::met_by`] its result or the medium's patience ends.
    ///
    /// # Errors
    /// [`Expired`] when it gave up; [`Wait::expired`] fills it in.
    fn wait(&self, wait: &Wait, poll: impl FnMut() -> u64) -> Result<(), Expired>;
}

/// One block of one row on its way from `source` to `dest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Sending PE.
    pub source: u32,
    /// Receiving PE.
    pub dest: u32,
    /// Row (lane and value head).
    pub row: u32,
    /// Block of the row.
    pub block: u32,
    /// Epoch of the operation, from 1.
    pub epoch: u64,
}

impl Message {
    /// Where the message lies in the payload memory of `dest`.
    pub const fn slot(&self, layout: &ChannelLayout) -> Slot {
        layout.slot(self.source, parity(self.epoch), self.row, self.block)
    }

    /// The word of `dest` that says that it has arrived.
    pub const fn signal(&self, layout: &ChannelLayout) -> usize {
        layout.signal(self.source, self.row, self.block, parity(self.epoch))
    }

    /// What that word says then: twice the epoch, and one more if the message is empty.
    pub const fn signal_value(&self, empty: bool) -> u64 {
        self.epoch << 1 | empty as u64
    }
}

/// Leave to write one message's slot; [`publish`] takes it back.
#[must_use = "a message that was written must be published"]
#[derive(Debug)]
pub struct Writable(Message);

impl Writable {
    /// Where to write, in the payload memory of the message's `dest`.
    pub const fn slot(&self, layout: &ChannelLayout) -> Slot {
        self.0.slot(layout)
    }
}

/// Waits until the slot of `message` may be written: until its last content was read. Normally it was, long ago.
///
/// # Errors
/// [`Expired`] if the receiver did not acknowledge it within the medium's patience; the slot must not be written.
pub fn before_write<M: Medium>(medium: &M, layout: &ChannelLayout, message: Message) -> Result<Writable, Expired> {
    let Message { source, dest, row, block, epoch } = message;
    debug_assert_eq!(source, medium.pe(), "only the source sends");
    // No ordering: this PE's earlier kernels wrote it, and the end of a kernel orders its writes before the next kernel.
    let sent = medium.load_local(layout.sent(dest, row, block, parity(epoch)));
    debug_assert!(sent < epoch, "epoch {epoch} is sent after epoch {sent}");
    if sent > 0 {
        let word = layout.ack(dest, row);
        let wait = Wait { awaited: Awaited::Ack, peer: dest, row, block, epoch: sent, word };
        // Acquire, with the release of the ack in `finish_reading`: the receiver's reads of the old content come before
        // the writes that follow here.
        medium.wait(&wait, || medium.load_acquire(word))?;
    }
    Ok(Writable(message))
}

/// Tells the receiver that the slot is written.
pub fn publish<M: Medium>(medium: &M, layout: &ChannelLayout, written: Writable) {
    tell(medium, layout, written, false);
}

/// Tells the receiver that the block is empty: nothing was written into the slot.
pub fn publish_empty<M: Medium>(medium: &M, layout: &ChannelLayout, writable: Writable) {
    tell(medium, layout, writable, true);
}

fn tell<M: Medium>(medium: &M, layout: &ChannelLayout, writable: Writable, empty: bool) {
    let message = writable.0;
    let Message { dest, row, block, epoch, .. } = message;
    // Release, with the acquire in `receive`: the payload is visible to whoever sees the signal.
    medium.store_release(dest, message.signal(layout), message.signal_value(empty));
    // No ordering: read by this PE's later kernels only, see `before_write`. Also of an empty message: it took the signal,
    // which the next one may replace only when it was read.
    medium.store_local(layout.sent(dest, row, block, parity(epoch)), epoch);
}

/// Notes that one of the `parts` of a message is written, each by a block that called [`before_write`] itself; the last one
/// tells the receiver. Returns whether this was it.
///
/// `count` adds 1 to a counter of this message alone, zero before the first part, with acquire and release ordering among
/// this PE's blocks, and returns the sum.
pub fn publish_part<M: Medium>(
    medium: &M,
    layout: &ChannelLayout,
    written: Writable,
    parts: u64,
    count: impl FnOnce() -> u64,
) -> bool {
    // Release: this part's writes, and its look at `sent`, come before the count. Acquire: the last one sees all counts, so
    // that all of them come before its signal and before what it notes in `sent`.
    if count() != parts {
        return false;
    }
    publish(medium, layout, written);
    true
}

/// Notes that something other than this PE's store fills the slot in this epoch (a put that brings its own signal, or a
/// collective that the host issues with its own synchronisation), so that the next push into it awaits the receiver's ack.
pub fn leave_to_exchange<M: Medium>(medium: &M, layout: &ChannelLayout, writable: Writable) {
    let Message { dest, row, block, epoch, .. } = writable.0;
    // No ordering: read by this PE's later kernels only, see `before_write`.
    medium.store_local(layout.sent(dest, row, block, parity(epoch)), epoch);
}

/// As [`publish_part`] for a message that is put with its own signal: the last one notes that it is about to be, as
/// [`leave_to_exchange`] does, and puts it.
pub fn leave_part<M: Medium>(
    medium: &M,
    layout: &ChannelLayout,
    written: Writable,
    parts: u64,
    count: impl FnOnce() -> u64,
) -> bool {
    // As in `publish_part`, with the put in place of the signal.
    if count() != parts {
        return false;
    }
    leave_to_exchange(medium, layout, written);
    true
}

/// Sends one message where a single thread does everything: waits for the slot, lets `write` fill it, publishes it.
///
/// # Errors
/// [`Expired`] as for [`before_write`]; `write` was not called.
pub fn push<M: Medium>(
    medium: &M,
    layout: &ChannelLayout,
    message: Message,
    write: impl FnOnce(Slot),
) -> Result<(), Expired> {
    let writable = before_write(medium, layout, message)?;
    write(writable.slot(layout));
    publish(medium, layout, writable);
    Ok(())
}

/// Waits for `message` and returns where it lies in this PE's payload memory, or nothing if it is empty. Slot and signal may be
/// read until [`finish_reading`].
///
/// # Errors
/// [`Expired`] if it did not arrive within the medium's patience; the slot must not be read.
pub fn receive<M: Medium>(medium: &M, layout: &ChannelLayout, message: Message) -> Result<Option<Slot>, Expired> {
    match receive_unless(medium, layout, message, || false)? {
        Arrival::Slot(slot) => Ok(Some(slot)),
        Arrival::Empty | Arrival::NotNeeded => Ok(None),
    }
}

/// How a wait for a message ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It lies there.
    Slot(Slot),
    /// It arrived and is empty.
    Empty,
    /// It was found not to be needed before it arrived.
    NotNeeded,
}

/// As [`receive`], but ends as soon as `not_needed` says so, which is asked after each look at the signal that did not find it.
///
/// # Errors
/// As [`receive`].
pub fn receive_unless<M: Medium>(
    medium: &M,
    layout: &ChannelLayout,
    message: Message,
    mut not_needed: impl FnMut() -> bool,
) -> Result<Arrival, Expired> {
    let Message { source, dest, row, block, epoch } = message;
    debug_assert_eq!(dest, medium.pe(), "only the destination receives");
    let word = message.signal(layout);
    let wait = Wait { awaited: Awaited::Signal, peer: source, row, block, epoch, word };
    let (mut found, mut skip) = (0, false);
    medium.wait(&wait, || {
        // Acquire, with the release in `publish`: the payload's writes come before the reads that follow here.
        found = medium.load_acquire(word);
        skip = !wait.met_by(found) && not_needed();
        if skip { message.signal_value(false) } else { found }
    })?;
    if skip {
        return Ok(Arrival::NotNeeded);
    }
    debug_assert_eq!(Awaited::Signal.epoch_of(found), epoch, "the signal stays until this PE's ack");
    Ok(if found == message.signal_value(true) { Arrival::Empty } else { Arrival::Slot(message.slot(layout)) })
}

/// Whether `message` has arrived and is empty; does not wait. What an arrived message says stays until [`finish_reading`].
pub fn is_empty<M: Medium>(medium: &M, layout: &ChannelLayout, message: Message) -> bool {
    // Acquire: whoever acts on it has seen what the sender did before.
    medium.load_acquire(message.signal(layout)) == message.signal_value(true)
}

/// Notes that one of the `readers` of `row` has read all it needs in this epoch. The last one lets every source write the
/// row's slots again; returns whether this was it.
///
/// `readers` must be the same in all epochs in which the row is read (its count goes on over epochs), and `sources` are
/// the PEs whose messages of this row and epoch were received, or are not needed any more.
pub fn finish_reading<M: Medium>(
    medium: &M,
    layout: &ChannelLayout,
    row: u32,
    epoch: u64,
    readers: u64,
    sources: impl IntoIterator<Item = u32>,
) -> bool {
    // Release: this reader's reads come before the count. Acquire: the last one sees all counts, so that all readers'
    // reads come before its acks.
    if !medium.increment(layout.read_count(row)).is_multiple_of(readers) {
        return false;
    }
    for source in sources {
        // Release, with the acquire in `before_write`: all reads come before the sender's next writes.
        medium.store_release(source, layout.ack(medium.pe(), row), epoch);
    }
    true
}

/// Tells this PE's other blocks that the initial state of `s_block` of `row` is merged and written.
pub fn publish_merged<M: Medium>(medium: &M, layout: &ChannelLayout, row: u32, s_block: u32, epoch: u64) {
    // Release, with the acquire in `await_merged`: the merged state is visible to whoever sees the flag.
    medium.store_release(medium.pe(), layout.merged(row, s_block), epoch);
}

/// Waits for the block of this PE that merges the initial state of `s_block` of `row`.
///
/// # Errors
/// [`Expired`] if that block did not finish within the medium's patience.
pub fn await_merged<M: Medium>(
    medium: &M,
    layout: &ChannelLayout,
    row: u32,
    s_block: u32,
    epoch: u64,
) -> Result<(), Expired> {
    let word = layout.merged(row, s_block);
    let wait = Wait { awaited: Awaited::Merged, peer: medium.pe(), row, block: s_block, epoch, word };
    // Acquire, with the release in `publish_merged`: the merged state's writes come before the reads that follow here.
    medium.wait(&wait, || medium.load_acquire(word))
}
