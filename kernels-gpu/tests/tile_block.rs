//! What a block's warpgroups do together: shared and private tiles, votes, tickets, elections, time stamps, words.

mod common;

use std::sync::atomic::Ordering;

use bytemuck::Zeroable;
use common::{Buffer, Kernel, launch, run};
use kernels_gpu::element::DtypeCode;
use kernels_gpu::params::{Array, Stamp, StampKind, Tensor, TraceBuffer};
use kernels_gpu::tile::host::BlockRunner;

#[derive(Clone, Copy)]
struct Io {
    out: Tensor,
    words: Array,
}

/// Runs `kernel` on `grid` blocks; returns the f32 output (of 64 elements) and the 16 words.
fn outcome(warpgroups: usize, grid: usize, kernel: Kernel<Io>) -> (Vec<f32>, [u64; 16]) {
    let (mut out, mut words) = (Buffer::filled(DtypeCode::F32, 64, 7.0), [0u64; 16]);
    let array = Array { addr: words.as_mut_ptr() as u64, len: 16 };
    let io = Io { out: out.tensor(), words: array };
    launch(&mut BlockRunner::new(), None, warpgroups, grid, &io, kernel).unwrap();
    (out.values(), words)
}

#[test]
fn shared_tiles_are_the_blocks_and_private_ones_each_warpgroups() {
    for warpgroups in 1..=4 {
        let mut out = Buffer::filled(DtypeCode::F32, 64, 7.0);
        let io = Io { out: out.tensor(), words: Array::zeroed() };
        run(warpgroups, &io, |wg, p| {
            let (private, shared) = (wg.private::<f32>(1, 1), wg.shared::<f32>(1, 4));
            let (index, next) = (wg.index(), (wg.index() + 1) % wg.count());
            wg.fill(private, |_, _| index as f32);
            wg.fill(shared.columns(index, 1), |_, _| 10.0 + index as f32);
            wg.sync_block();
            wg.store(p.out.matrix(2 * index, 1, 1, 1, 1), private);
            wg.store(p.out.matrix(2 * index + 1, 1, 1, 1, 1), shared.columns(next, 1));
        })
        .unwrap();
        for index in 0..warpgroups {
            assert_eq!(out.get(2 * index), index as f32);
            assert_eq!(out.get(2 * index + 1), 10.0 + ((index + 1) % warpgroups) as f32);
        }
    }
}

#[test]
fn a_vote_is_true_if_every_warpgroup_says_so() {
    let (_, words) = outcome(3, 1, |wg, p| {
        // Vote n: every warpgroup but number n is for it; number 3 there is not.
        for n in 0..4 {
            let passed = wg.sync_and(wg.index() != n);
            wg.word(p.words, n).fetch_add(u64::from(passed), Ordering::Relaxed);
        }
        let passed = wg.sync_and(true);
        wg.word(p.words, 4).fetch_add(u64::from(passed), Ordering::Relaxed);
    });
    assert_eq!(words[..5], [0, 0, 0, 3, 3]);
}

#[test]
fn tickets_are_the_blocks_and_go_on_from_block_to_block() {
    let (_, words) = outcome(2, 3, |wg, p| {
        for _ in 0..2 {
            let ticket = wg.next_ticket(Array { len: 1, ..p.words });
            // Both warpgroups of a block note the same ticket.
            wg.word(p.words, 1 + ticket as usize).fetch_add(1, Ordering::Relaxed);
        }
    });
    assert_eq!(words[..8], [6, 2, 2, 2, 2, 2, 2, 0]);
}

#[test]
fn an_election_runs_once_and_tells_its_warpgroup() {
    let (out, words) = outcome(2, 1, |wg, p| {
        let tile = wg.private::<f32>(1, 1);
        let before = wg.elect(|wg| wg.word(p.words, 0).fetch_add(1, Ordering::Relaxed));
        wg.fill(tile, |_, _| before as f32);
        wg.sync();
        wg.store(p.out.matrix(wg.index(), 1, 1, 1, 1), tile);
    });
    assert_eq!((words[0], &out[..3]), (2, &[0.0, 1.0, 7.0][..]));
}

#[test]
fn every_block_and_warpgroup_knows_its_place() {
    let (_, words) = outcome(4, 3, |wg, p| {
        assert_eq!((wg.count(), wg.grid()), (4, 3));
        wg.word(p.words, 4 * wg.block() + wg.index()).store(1, Ordering::Relaxed);
    });
    assert_eq!(words[..13], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]);
}

#[test]
fn values_are_read_by_type() {
    let (table, words) = ([[1u32, 2], [3, 4]], [5u64, 6]);
    let mut scalars = Buffer::of(DtypeCode::Bf16, &[0.5, -2.0]);
    let io = (Array::of(&table), Array::of(&words), scalars.tensor());
    run(1, &io, |wg, p| {
        assert_eq!(wg.read::<[u32; 2]>(p.0, 1), [3, 4]);
        assert_eq!(wg.read::<u64>(p.1, 1), 6);
        assert_eq!(wg.scalar(p.2.matrix(1, 1, 1, 1, 1)), -2.0);
    })
    .unwrap();
}

#[test]
fn stamps_beyond_the_buffer_are_counted_and_dropped() {
    let (mut stamps, mut cursor) = ([Stamp::zeroed(); 3], [0u64]);
    let trace = TraceBuffer {
        stamps: Array { addr: stamps.as_mut_ptr() as u64, len: 3 },
        cursor: Array { addr: cursor.as_mut_ptr() as u64, len: 1 },
    };
    run(2, &trace, |wg, trace| {
        wg.stamp_block(trace, StampKind::Scan, [1, 2], [3, 4], 5);
        wg.sync_block();
        for head in 0..2 {
            wg.stamp(trace, StampKind::Put, [6, 7], [head, wg.index() as u32], 8);
        }
        // Without a buffer nothing happens.
        wg.stamp(&TraceBuffer::zeroed(), StampKind::Put, [0, 0], [0, 0], 0);
    })
    .unwrap();
    let [first, second, third] = stamps;
    assert_eq!((first.kind, first.start_ns, first.end_ns), (StampKind::Scan as u32, 1, 2));
    assert_eq!((first.head, first.part, first.bytes, first.block), (3, 4, 5, 0));
    assert_eq!((second.head, third.head, third.kind), (0, 1, StampKind::Put as u32));
    assert_eq!(cursor, [5]);
}
