//! The protocol under loom: every schedule and every value that a load may return, for two PEs.
//!
//! Payloads and the sender's own words are loom `UnsafeCell`s, so an access that the protocol's orderings do not order
//! fails the model, also where the value read happens to be right. The models at the end break one rule each and must fail.

mod loom_pe;

use kernels_gpu::protocol::{ChannelLayout, await_merged, publish_merged};
use loom::sync::Arc;
use loom::thread;
use loom_pe::{Fault, Memory, Pe, model, one_block};

/// One PE's side of both directions: a channel each, with slots, words and epochs of its own.
struct Training {
    forward: Pe,
    backward: Pe,
}

/// An operation of training: states flow from PE 0 to PE 1, gradients back.
#[derive(Clone, Copy)]
enum Call {
    /// Forward, of this epoch of the forward channel.
    Forward(u64),
    /// Backward, of this epoch of the backward channel.
    Backward(u64),
}

impl Training {
    /// Operations in the order of a PE's stream: each ends before the next one starts.
    fn run(&self, calls: &[Call]) {
        let first = self.forward.pe == 0;
        for &call in calls {
            match (call, first) {
                (Call::Forward(epoch), true) => self.forward.send(1, epoch),
                (Call::Forward(epoch), false) => self.forward.read_alone(0, epoch),
                (Call::Backward(epoch), true) => self.backward.read_alone(1, epoch),
                (Call::Backward(epoch), false) => self.backward.send(0, epoch),
            }
        }
    }
}

/// Both PEs run `calls`.
fn training(fault: Fault, calls: &'static [Call]) {
    let layout = one_block();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let memory = || Arc::new((0..2).map(|pe| Memory::new(&layout, pe)).collect::<Vec<_>>());
        let (forward, backward) = (memory(), memory());
        let pe = |pe, all: &Arc<Vec<Memory>>| Pe { pe, layout, fault, all: Arc::clone(all) };
        let side = |i| Training { forward: pe(i, &forward), backward: pe(i, &backward) };
        let (left, right) = (side(0), side(1));
        let other = thread::spawn(move || right.run(calls));
        left.run(calls);
        other.join().unwrap();
    });
}

/// PE 0 sends in `epochs`, PE 1 reads alone in the same.
fn stream(layout: ChannelLayout, fault: Fault, epochs: &'static [u64]) {
    model(layout, fault, move |sender, receiver| {
        let sending = thread::spawn(move || epochs.iter().for_each(|&epoch| sender.send(1, epoch)));
        epochs.iter().for_each(|&epoch| receiver.read_alone(0, epoch));
        sending.join().unwrap();
    });
}

/// PE 0 sends in epochs 1 and 3, which share a slot; two blocks of PE 1 read. They count to `readers`.
fn two_readers(fault: Fault, readers: u64) {
    model(one_block(), fault, move |sender, receiver| {
        let sending = thread::spawn(move || [1, 3].into_iter().for_each(|epoch| sender.send(1, epoch)));
        for epoch in [1, 3] {
            let other = receiver.clone();
            let other = thread::spawn(move || {
                other.read(0, epoch);
                other.finish(0, epoch, readers)
            });
            receiver.read(0, epoch);
            let last = receiver.finish(0, epoch, readers);
            assert!(last ^ other.join().unwrap(), "exactly one reader of epoch {epoch} is the last");
        }
        sending.join().unwrap();
    });
}

/// One block of PE 1 merges what PE 0 sent, another uses it.
fn merge(fault: Fault) {
    model(one_block(), fault, |sender, receiver| {
        let sending = thread::spawn(move || sender.send(1, 1));
        let other = receiver.clone();
        let merging = thread::spawn(move || {
            other.read_alone(0, 1);
            // SAFETY: loom fails the model if this access races.
            other.own().merged.with_mut(|merged| unsafe { *merged = 7 });
            publish_merged(&other, &other.layout, 0, 0, 1);
        });
        await_merged(&receiver, &receiver.layout, 0, 0, 1).unwrap();
        // SAFETY: loom fails the model if this access races.
        assert_eq!(receiver.own().merged.with(|merged| unsafe { *merged }), 7);
        merging.join().unwrap();
        sending.join().unwrap();
    });
}

#[test]
fn a_signal_brings_its_payload() {
    // Two blocks: S and M.
    stream(ChannelLayout::new(2, 1, 16, 16, 4).unwrap(), Fault::None, &[1]);
}

#[test]
fn a_slot_is_written_again_only_after_its_ack() {
    stream(one_block(), Fault::None, &[1, 2, 3]);
}

/// The sender of an empty message is an epoch ahead of the one that has content, and the other way round.
#[test]
fn a_sender_may_be_an_epoch_ahead() {
    stream(one_block(), Fault::None, &[1, 2]);
    stream(one_block(), Fault::None, &[10, 11]);
    stream(one_block(), Fault::None, &[13, 14]);
}

#[test]
fn an_empty_message_leaves_its_slot_to_a_later_one() {
    stream(one_block(), Fault::None, &[9, 11, 17]);
    stream(one_block(), Fault::None, &[11, 13, 17]);
}

/// The next message but one has the same slot and signal; it may have content or none.
#[test]
fn what_is_not_needed_may_be_acknowledged_before_it_comes() {
    for epochs in [[9, 17], [9, 11], [11, 17]] {
        model(one_block(), Fault::None, move |sender, receiver| {
            let sending = thread::spawn(move || epochs.iter().for_each(|&epoch| sender.send(1, epoch)));
            receiver.read_or_skip(0, epochs[0]);
            receiver.read_alone(0, epochs[1]);
            sending.join().unwrap();
        });
    }
}

/// An empty message writes no payload and has to wait all the same: nobody could tell that the one before it was empty, too.
#[test]
#[should_panic(expected = "whether Message")]
fn without_the_ack_wait_an_empty_message_hides_the_one_before() {
    stream(one_block(), Fault::SkipAckWait, &[11, 13]);
}

#[test]
#[should_panic(expected = "whether Message")]
fn one_signal_for_both_parities_loses_what_a_message_said_about_itself() {
    stream(one_block(), Fault::OneSignal, &[13, 14]);
}

#[test]
fn epochs_without_a_message_need_none() {
    // 3 reuses the slot of 1 although 2 was silent; 6 uses the other one for the first time, 8 again.
    stream(one_block(), Fault::None, &[1, 3, 6, 8]);
}

#[test]
fn the_last_of_two_readers_acknowledges() {
    two_readers(Fault::None, 2);
}

#[test]
fn both_directions_at_once() {
    model(one_block(), Fault::None, |a, b| {
        let other = thread::spawn(move || {
            for epoch in 1..=2 {
                b.send(0, epoch);
                b.read_alone(0, epoch);
            }
        });
        for epoch in 1..=2 {
            a.send(1, epoch);
            a.read_alone(1, epoch);
        }
        other.join().unwrap();
    });
}

/// PE 1 is done with a backward step as soon as its gradients are sent, and waits in the next forward step while PE 0 still
/// reads them.
#[test]
fn a_forward_step_may_overtake_the_backward_step_before_it() {
    use Call::{Backward, Forward};
    training(Fault::None, &[Forward(1), Backward(1), Forward(2), Backward(2)]);
}

/// Several steps forward, then back in any order; the channels' epochs do not keep step, and slots are used again.
#[test]
fn the_directions_count_epochs_of_their_own() {
    use Call::{Backward, Forward};
    training(Fault::None, &[Forward(1), Forward(2), Backward(1), Forward(3)]);
    training(Fault::None, &[Forward(1), Backward(1), Backward(2), Backward(3)]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_ack_wait_a_gradient_is_overwritten() {
    use Call::{Backward, Forward};
    training(Fault::SkipAckWait, &[Forward(1), Backward(1), Backward(2), Backward(3)]);
}

/// Why the directions share no words: a PE in the middle merges in both, and the flag of the forward step would let a block
/// of the backward step pass that counts from 1 as well.
#[test]
#[should_panic(expected = "Causality violation")]
fn a_merged_flag_that_both_directions_share_lets_a_reader_pass_too_early() {
    model(one_block(), Fault::None, |_, middle| {
        let (layout, epoch) = (middle.layout, 1);
        // The forward step, complete.
        publish_merged(&middle, &layout, 0, 0, epoch);
        let other = middle.clone();
        let merging = thread::spawn(move || {
            // SAFETY: loom fails the model if this access races.
            other.own().merged.with_mut(|merged| unsafe { *merged = 7 });
            publish_merged(&other, &layout, 0, 0, epoch);
        });
        await_merged(&middle, &layout, 0, 0, epoch).unwrap();
        // SAFETY: loom fails the model if this access races.
        middle.own().merged.with(|merged| unsafe { *merged });
        merging.join().unwrap();
    });
}

#[test]
fn a_merged_flag_brings_the_merged_state() {
    merge(Fault::None);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_ack_wait_a_slot_is_overwritten() {
    stream(one_block(), Fault::SkipAckWait, &[1, 3]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_signal_does_not_bring_its_payload() {
    stream(one_block(), Fault::RelaxedSignal, &[1]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_ack_does_not_order_reads_before_writes() {
    stream(one_block(), Fault::RelaxedAck, &[1, 3]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_count_loses_the_other_readers_reads() {
    two_readers(Fault::RelaxedCount, 2);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn an_ack_by_the_first_reader_lets_the_second_be_overwritten() {
    two_readers(Fault::None, 1);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_merged_flag_does_not_bring_the_state() {
    merge(Fault::RelaxedMerged);
}
