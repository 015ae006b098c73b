//! The first kernel of a step.

mod common;

use common::run;
use kernels_gpu::begin::{BeginParams, WARPGROUPS, begin};
use kernels_gpu::params::Array;

fn array(words: &mut [u64]) -> Array {
    Array { addr: words.as_mut_ptr() as u64, len: words.len() as u64 }
}

#[test]
fn a_step_counts_from_zero_and_is_the_next_one() {
    let (mut words, mut epoch) = (vec![9_u64; 8], vec![41_u64, 7]);
    let (tickets, rest) = words.split_at_mut(3);
    let counts = &mut rest[..4];
    let params = BeginParams { tickets: array(tickets), counts: array(counts), epoch: array(&mut epoch[..1]) };
    for step in 1..=3 {
        run(WARPGROUPS, &params, begin).unwrap();
        // The kernel wrote by address.
        let (words, epoch) = (std::hint::black_box(&words), std::hint::black_box(&epoch));
        assert_eq!((&words[..], &epoch[..]), (&[0, 0, 0, 0, 0, 0, 0, 9][..], &[41 + step, 7][..]));
    }
}

#[test]
fn a_step_without_a_channel_has_no_epoch() {
    let (mut tickets, none) = (vec![5_u64], Array { addr: 0, len: 0 });
    let params = BeginParams { tickets: array(&mut tickets), counts: none, epoch: none };
    run(WARPGROUPS, &params, begin).unwrap();
    assert_eq!(std::hint::black_box(&tickets)[..], [0]);
}
