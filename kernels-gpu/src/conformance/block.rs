//! What warpgroups and blocks do together: barriers, votes, tickets, elected threads, words.

use core::sync::atomic::Ordering;

use super::{TileCase, dispatch};
use crate::params::{Array, Stamp, StampKind, TraceBuffer};
use crate::tile::{Acc, Warpgroup, increment_acq_rel};

/// Rounds of [`super::TileOp::Elect`] and [`super::TileOp::Exchange`].
pub const ROUNDS: usize = 4;
/// Tickets of [`super::TileOp::NextTicket`].
pub const TICKETS: usize = 37;
/// The span that [`super::TileOp::Stamp`] records.
pub const SPAN: [u64; 2] = [5, 11];
/// The head that the stamp of a whole block names; those of a warpgroup name the warpgroup.
pub const BLOCK_HEAD: u32 = 100;
/// Words of a stamp.
pub const STAMP_WORDS: usize = size_of::<Stamp>() / 8;
/// Bytes that stamps name.
pub const STAMPED_BYTES: u64 = 77;

/// One of the operations of blocks.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn block_ops(wg: &mut Warpgroup<'_>, p: &TileCase) {
    dispatch! { wg, p,
        Place => place_everywhere,
        Elect => elect,
        NextTicket => next_ticket,
        SyncAnd => sync_and,
        Exchange => exchange::<false>,
        ExchangeUnequal => exchange::<true>,
        Increment => increment,
        Clock => clock,
        Stamp => stamp,
        Read => read,
    }
}

/// The number that [`super::TileOp::Place`] makes of a place.
#[inline(always)]
pub fn place(index: usize, count: usize, block: usize, grid: usize) -> f32 {
    (index + 10 * count + 100 * block + 1000 * grid) as f32
}

/// What warpgroup `index` writes at (r, c) in round `round` of [`super::TileOp::Exchange`].
#[inline(always)]
pub fn exchanged(round: usize, index: usize, r: usize, c: usize) -> f32 {
    (1000 * round + 100 * index + r + c) as f32
}

/// The same value from every thread into the result: each thread holds some of its elements.
fn say(wg: &mut Warpgroup<'_>, p: &TileCase, value: f32) {
    let (r, c, _) = p.extents();
    let tile = p.tile::<f32>(wg, r, c);
    wg.fill(tile, |_, _| value);
    wg.sync();
    wg.store(p.own_out(wg), tile);
}

fn place_everywhere(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let value = place(wg.index(), wg.count(), wg.block(), wg.grid());
    say(wg, p, value);
}

fn elect(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let place = wg.block() * wg.count() + wg.index();
    let mut sum = 0.0;
    let mut round = 0;
    while round < ROUNDS {
        // A result of several words, with room between its fields.
        let (seen, times, factor) = wg.elect(|wg| {
            let seen = wg.word(p.words, place).fetch_add(1, Ordering::Relaxed);
            (seen, round as u32, 0.5f32)
        });
        sum += factor * (seen as f32 + 100.0 * times as f32);
        round += 1;
    }
    say(wg, p, sum);
}

fn next_ticket(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (counter, count, index) = (p.words, wg.count(), wg.index());
    loop {
        let ticket = wg.next_ticket(counter) as usize;
        if ticket >= TICKETS {
            return;
        }
        wg.elect(|wg| wg.word(p.words, 1 + ticket * count + index).fetch_add(1, Ordering::Relaxed));
    }
}

fn sync_and(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let mut unanimous = 0u32;
    let mut round = 0;
    while round < 1 << wg.count() {
        let vote = round >> wg.index() & 1 == 1;
        unanimous |= u32::from(wg.sync_and(vote)) << round;
        round += 1;
    }
    say(wg, p, unanimous as f32);
}

fn exchange<const UNEQUAL: bool>(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let (r, c, _) = p.extents();
    let (index, count) = (wg.index(), wg.count());
    let all = wg.shared::<f32>(r * count, c);
    let (own, others) = (all.row_range(r * index, r), all.row_range(r * ((index + 1) % count), r));
    let mut sum = Acc::zeros(r, c);
    let mut round = 0;
    while round < ROUNDS {
        let mut more = if UNEQUAL { index } else { count };
        while more < count {
            wg.sync();
            more += 1;
        }
        wg.fill(own, |i, j| exchanged(round, index, i, j));
        // Barriers of one warpgroup between those of the block, in some of the warpgroups only.
        if index % 2 == 1 {
            wg.sync();
        }
        wg.sync_block();
        sum.add(wg, others);
        if index % 2 == 0 {
            wg.sync();
        }
        wg.sync_block();
        round += 1;
    }
    sum.store_global(wg, p.own_out(wg));
}

fn increment(wg: &mut Warpgroup<'_>, p: &TileCase) {
    wg.elect(|wg| {
        let sum = increment_acq_rel(wg.word(p.words, 0)) as usize;
        wg.word(p.words, sum).fetch_add(1, Ordering::Relaxed);
    });
}

fn clock(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let forwards = wg.elect(|wg| {
        let first = wg.clock();
        wg.relax(0);
        wg.relax(30_000);
        wg.clock() >= first
    });
    say(wg, p, if forwards { 1.0 } else { 0.0 });
}

fn stamp(wg: &mut Warpgroup<'_>, p: &TileCase) {
    // The cursor is the first word; stamps begin at the third.
    let trace = TraceBuffer {
        cursor: Array { addr: p.words.addr, len: 1 },
        stamps: Array { addr: p.words.addr + 16, len: (p.words.len - 2) / STAMP_WORDS as u64 },
    };
    wg.stamp_block(&trace, StampKind::Scan, SPAN, [BLOCK_HEAD, 0], STAMPED_BYTES);
    let index = wg.index() as u32;
    wg.elect(|wg| wg.stamp(&trace, StampKind::Put, SPAN, [index, 1], STAMPED_BYTES));
}

fn read(wg: &mut Warpgroup<'_>, p: &TileCase) {
    let value: u64 = wg.read(p.words, p.span as usize);
    say(wg, p, value as f32);
}
