//! The first kernel of a step.

mod common;

use common::run;
use kernels_gpu::begin::{BeginParams, WARPGROUPS, begin};
use kernels_gpu::convolution::{ConvolutionTensors, ConvolveBeginParams, MAX_CONVOLUTIONS, convolve_begin};
use kernels_gpu::params::Array;

/// Words of what the table says of a convolution.
const ROW: usize = size_of::<ConvolutionTensors>() / size_of::<u64>();

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

#[test]
fn a_step_of_the_convolution_finds_its_tensors_in_the_table() {
    let tensors = std::array::from_fn(|i| {
        let mut words = [0_u64; ROW];
        for (at, word) in words.iter_mut().enumerate() {
            // No two halves of words are alike, in any of the tensors.
            let at = (1000 * i + 2 * at) as u64;
            *word = (at + 1) | ((at + 2) << 32);
        }
        bytemuck::cast::<_, ConvolutionTensors>(words)
    });
    for convolutions in 1..=MAX_CONVOLUTIONS {
        let (mut epoch, mut table) = (vec![7_u64], vec![u64::MAX; (MAX_CONVOLUTIONS + 1) * ROW]);
        let none = Array { addr: 0, len: 0 };
        let params = ConvolveBeginParams {
            begin: BeginParams { tickets: none, counts: none, epoch: array(&mut epoch) },
            table: Array { addr: table.as_mut_ptr() as u64, len: convolutions as u64 },
            tensors,
        };
        run(WARPGROUPS, &params, convolve_begin).unwrap();
        let (table, epoch) = (std::hint::black_box(&table), std::hint::black_box(&epoch));
        assert_eq!(epoch[..], [8]);
        let (written, rest) = table.split_at(convolutions * ROW);
        assert_eq!(written, bytemuck::cast_slice::<_, u64>(&tensors[..convolutions]));
        assert!(rest.iter().all(|&word| word == u64::MAX), "{rest:?}");
    }
}
