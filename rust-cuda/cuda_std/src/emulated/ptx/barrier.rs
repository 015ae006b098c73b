//! Barriers, votes and shuffles.

use crate::emulated::{At, Scope, Site, WARP, barrier, is_under_way, meet, raise};

/// Barrier 0 of the whole block.
#[track_caller]
pub unsafe fn barrier0() {
    barrier(Site::here("bar.sync 0"), 0, None, At::Sync);
}

/// Barrier `id` of `threads` threads.
#[track_caller]
pub unsafe fn bar_sync(id: u32, threads: u32) {
    barrier(Site::here("bar.sync"), id, Some(threads), At::Sync);
}

/// Arrives at barrier `id` without waiting.
#[track_caller]
pub unsafe fn bar_arrive(id: u32, threads: u32) {
    barrier(Site::here("bar.arrive"), id, Some(threads), At::Arrive);
}

/// Barrier `id`, and whether `condition` was not 0 in all of its threads.
#[track_caller]
pub unsafe fn bar_red_and(id: u32, threads: u32, condition: u32) -> bool {
    barrier(Site::here("bar.red.and"), id, Some(threads), At::All(condition != 0))
}

/// Barrier `id`, and whether `condition` was not 0 in some of its threads.
#[track_caller]
pub unsafe fn bar_red_or(id: u32, threads: u32, condition: u32) -> bool {
    barrier(Site::here("bar.red.or"), id, Some(threads), At::Any(condition != 0))
}

/// Barrier `ID` of `THREADS` threads, both written into the instruction.
#[track_caller]
pub unsafe fn bar_sync_id<const ID: u32, const THREADS: u32>() {
    const { assert!(ID < 16 && THREADS > 0 && THREADS.is_multiple_of(32)) };
    let site = Site::here("bar.sync").with([ID as i32, THREADS as i32, 0, 0, 0]);
    barrier(site, ID, Some(THREADS), At::Sync);
}

/// Arrives at barrier `ID`, as [`bar_sync_id`] does, without waiting.
#[track_caller]
pub unsafe fn bar_arrive_id<const ID: u32, const THREADS: u32>() {
    const { assert!(ID < 16 && THREADS > 0 && THREADS.is_multiple_of(32)) };
    let site = Site::here("bar.arrive").with([ID as i32, THREADS as i32, 0, 0, 0]);
    barrier(site, ID, Some(THREADS), At::Arrive);
}

/// Waits for the threads of `mask` in this warp and orders their memory accesses.
#[track_caller]
pub unsafe fn bar_warp_sync(mask: u32) {
    meet(Scope::Warp(mask), Site::here("bar.warp.sync"), &mut (), |block, all| {
        block.clocks.meet(all.iter().map(|lane| lane.0));
        Ok(())
    });
}

/// What a lane brings to an exchange, and takes from it.
struct Exchange {
    value: u32,
    operand: u32,
    result: u32,
}

#[track_caller]
fn vote(name: &'static str, condition: u32, mask: u32) -> u32 {
    let mut mine = Exchange { value: u32::from(condition != 0), operand: 0, result: 0 };
    meet(Scope::Warp(mask), Site::here(name), &mut mine, |_, all| {
        let ballot = all.iter().fold(0, |ballot, (thread, lane)| ballot | lane.value << (thread % WARP));
        all.iter_mut().for_each(|(_, lane)| lane.result = ballot);
        Ok(())
    });
    mine.result
}

/// Whether `condition` is not 0 in all threads of `mask`.
#[track_caller]
pub unsafe fn vote_sync_all(condition: u32, mask: u32) -> bool {
    vote("vote.sync.all", condition, mask) == mask
}

/// Whether `condition` is not 0 in some thread of `mask`.
#[track_caller]
pub unsafe fn vote_sync_any(condition: u32, mask: u32) -> bool {
    vote("vote.sync.any", condition, mask) != 0
}

/// The threads of `mask` in which `condition` is not 0.
#[track_caller]
pub unsafe fn vote_sync_ballot(condition: u32, mask: u32) -> u32 {
    vote("vote.sync.ballot", condition, mask)
}

/// `source` gives the lane that a lane wants, from its own, its operand and the clamp.
#[track_caller]
fn shuffle(name: &'static str, value: u32, operand: u32, mask: u32, source: impl Fn(u32, u32) -> Option<u32>) -> u32 {
    let site = Site::here(name);
    if is_under_way(f32::from_bits(value)) {
        raise(site, crate::emulated::FaultKind::AccumulatorUnderWay { register: "operand".into() });
    }
    let mut mine = Exchange { value, operand, result: value };
    meet(Scope::Warp(mask), site, &mut mine, |_, all| {
        let mut values = [None; WARP];
        for (thread, lane) in all.iter() {
            values[thread % WARP] = Some(lane.value);
        }
        for (thread, lane) in all.iter_mut() {
            let own = (*thread % WARP) as u32;
            let from = source(own, lane.operand).unwrap_or(own);
            // A lane that takes no part has no value to give: what arrives is undefined.
            lane.result = values[from as usize].unwrap_or(0xffff_ffff);
        }
        Ok(())
    });
    mine.result
}

/// The segment of a lane: its bits above those that the clamp's upper part leaves free.
fn bounds(lane: u32, clamp: u32) -> (u32, u32) {
    let segment = clamp >> 8 & 0x1f;
    let low = lane & segment;
    (low, low | clamp & 0x1f & !segment)
}

/// The value of lane `lane`.
#[track_caller]
pub unsafe fn shfl_sync_idx_b32(value: u32, lane: u32, clamp: u32, mask: u32) -> u32 {
    shuffle("shfl.sync.idx", value, lane, mask, |own, lane| {
        let (low, high) = bounds(own, clamp);
        let from = low | lane & 0x1f & !(clamp >> 8);
        (from <= high).then_some(from)
    })
}

/// The value of the lane whose index differs by xor with `bits`.
#[track_caller]
pub unsafe fn shfl_sync_bfly_b32(value: u32, bits: u32, clamp: u32, mask: u32) -> u32 {
    shuffle("shfl.sync.bfly", value, bits, mask, |own, bits| {
        let from = own ^ (bits & 0x1f);
        (from <= bounds(own, clamp).1).then_some(from)
    })
}

/// The value of the lane `delta` further.
#[track_caller]
pub unsafe fn shfl_sync_down_b32(value: u32, delta: u32, clamp: u32, mask: u32) -> u32 {
    shuffle("shfl.sync.down", value, delta, mask, |own, delta| {
        let from = own + (delta & 0x1f);
        (from <= bounds(own, clamp).1).then_some(from)
    })
}

/// The value of the lane `delta` before.
#[track_caller]
pub unsafe fn shfl_sync_up_b32(value: u32, delta: u32, clamp: u32, mask: u32) -> u32 {
    shuffle("shfl.sync.up", value, delta, mask, |own, delta| {
        let from = own.checked_sub(delta & 0x1f)?;
        (from >= bounds(own, clamp).1).then_some(from)
    })
}
