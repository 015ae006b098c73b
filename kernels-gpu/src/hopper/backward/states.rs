//! [`crate::backward::states`] with the state in registers:
//! ```text
//! R^T  = v^T A'^T - S^T w^T                 (4 + 8 products of 64 x 64 x 16)
//! S^T <- S^T diag(decay) + R^T kg           (4 of 64 x 128 x 16)
//! ```
//! These are the instructions of the forward's scan, in the same order: the states that it hands over in exact mode are those
//! of this walk, bit for bit.

use cuda_std::{ptx, thread, warp};

use super::feed::{Item, feed};
use super::pipeline::*;
use super::results::{put_image, put_panel};
use super::walk::{FIRST_BYTES, Forwards, WARPGROUPS, Walk};
use crate::backward::states::{Columns, initial_state};
use crate::hopper::scan::{COLUMNS, release};
use crate::hopper::{CHANNELS, IMAGE, PANEL, by_columns, by_rows, column_step, repeat, row_step, step, wait};
use crate::params::{ScanItem, Segment, StampKind, StatesParams};
use crate::tile::{Shared, Warpgroup};

/// Persistent grid: blocks take items of one column block by ticket until there are no more. Blocks of
/// [`WARPGROUPS`](super::walk::WARPGROUPS).
#[inline(always)]
pub fn scan_states(wg: &mut Warpgroup<'_>, p: &StatesParams) {
    let pipeline = Pipeline::<Forwards>::new(wg.base());
    if thread::thread_idx_x() == 0 {
        // SAFETY: the first thing that happens to this memory; `next_ticket` has a barrier before anybody waits.
        unsafe { pipeline.init() };
    }
    // The state lies where stages are, before the walk.
    let state: Shared<f32> = wg.tile_at(pipeline.base, COLUMNS as usize, CHANNELS);
    let mut number = 0;
    loop {
        let ticket = wg.next_ticket(p.ticket);
        // SAFETY: by all threads: a vote tells the assembler that the branch is uniform.
        if unsafe { warp::any(ticket >= p.items.len) } {
            return;
        }
        let start = wg.clock();
        let item: ScanItem = wg.read(p.items, ticket as usize);
        let segment: Segment = wg.read(p.tables.segments, item.segment as usize);
        // From lane 0, so that the assembler knows it to be uniform.
        // SAFETY: by all threads.
        let chunks = unsafe { warp::shuffle_idx(segment.chunks, 0) };
        if wg.index() == 0 {
            let columns = Columns::of_block(&p.tables.sizes, item.first_block);
            initial_state(wg, p, &item, &segment, columns, state);
            wg.sync();
            let mut s = [0f32; 64];
            wg.load_fragment(&mut s, state);
            // SAFETY: orders this thread's accesses. The state's tile: read by ordinary loads, written next by bulk copies.
            unsafe { ptx::fence_proxy_async_shared() };
            wg.give(WARPGROUPS);
            walk(&pipeline, &mut s, number, chunks);
        } else {
            let results = [&p.states, &p.v_new];
            let place = [item.head, item.first_block];
            let item = Item::new(wg, &p.tables, &p.records, &p.v, results, &segment, place, true);
            wg.sync_given(WARPGROUPS);
            feed(&pipeline, &item, None, number, number);
        }
        number += segment.chunks;
        let end = wg.clock();
        wg.stamp_block(&p.trace, StampKind::States, [start, end], [item.head, item.first_block], 0);
    }
}

/// The chunks of an item, on the walking warpgroup.
#[inline(always)]
fn walk(pipeline: &Pipeline<Forwards>, s: &mut [f32; 64], first_number: u32, chunks: u32) {
    let lane = ptx::laneid();
    let mut r = [0f32; 32];
    let (mut s_half, mut r_half) = ([0u32; 32], [0u32; 16]);
    let mut index = 0;
    while index < chunks {
        let (at, result) = (pipeline.place(first_number + index), pipeline.result(first_number + index));
        // SAFETY: barriers and stages are the block's; control flow is uniform in the warpgroup; every product's
        // registers are carried by the waits that follow.
        unsafe {
            let (v, w) = (by_columns(at.stage + Forwards::VALUES, PANEL), by_rows(at.stage));
            let a = by_rows(at.stage + IMAGE);
            wait(at.barriers + FULL_FIRST, at.parity);
            ptx::wgmma_fence();
            repeat!(J in 4 => {
                let (v, a) = (step(v, column_step(J)), step(a, row_step(J, PANEL)));
                ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 1, 0>(&mut r, v, a, (J != 0) as u32);
            });
            ptx::wgmma_commit_group();
            // A wait for nothing: without it the assembler inserts one of its own before it lets accumulators be read.
            ptx::wgmma_wait_group::<1>((&mut r, &mut *s));
            repeat!(I in 32 => { s_half[I] = ptx::cvt_rn_bf16x2_f32(s[2 * I + 1], s[2 * I]); });
            ptx::wgmma_fence();
            repeat!(J in 8 => {
                let s_step = [s_half[4 * J], s_half[4 * J + 1], s_half[4 * J + 2], s_half[4 * J + 3]];
                ptx::wgmma_m64n64k16_bf16_rs::<1, -1, 0>(&mut r, s_step, step(w, row_step(J, PANEL)), 1);
            });
            ptx::wgmma_commit_group();
            // Also for what is written while products are under way.
            ptx::wgmma_wait_group::<1>((&mut r, &mut s_half, &mut *s));
            scale_columns(s, at.decay, lane);
            put_image(&s_half, result);
            ptx::wgmma_wait_group::<0>((&mut r, &mut s_half));
            release(lane, at.barriers + EMPTY_FIRST);
            repeat!(I in 16 => { r_half[I] = ptx::cvt_rn_bf16x2_f32(r[2 * I + 1], r[2 * I]); });
            wait(at.barriers + FULL_UPDATE, at.parity);
            let kg = by_columns(at.stage + FIRST_BYTES, PANEL);
            ptx::wgmma_fence();
            repeat!(J in 4 => {
                let r_step = [r_half[4 * J], r_half[4 * J + 1], r_half[4 * J + 2], r_half[4 * J + 3]];
                ptx::wgmma_m64n128k16_bf16_rs::<1, 1, 1>(s, r_step, step(kg, column_step(J)), 1);
            });
            ptx::wgmma_commit_group();
            put_panel(&r_half, result);
            ptx::wgmma_wait_group::<0>((&mut *s, &mut r_half));
            release(lane, at.barriers + EMPTY_UPDATE);
        }
        index += 1;
    }
}

/// Multiplies the columns of this thread's part of a 64 x 128 accumulator by the row of 128 factors at shared address `factors`.
///
/// # Safety
/// The factors lie there, and no product that reads or writes `x` is under way.
#[inline(always)]
pub(super) unsafe fn scale_columns(x: &mut [f32; 64], factors: u32, lane: u32) {
    let column = 2 * (lane % 4);
    repeat!(J in 16 => {
        // SAFETY: by contract.
        let [d0, d1] = unsafe { ptx::ld_shared_v2_f32(factors + (8 * J as u32 + column) * 4) };
        x[4 * J] *= d0;
        x[4 * J + 1] *= d1;
        x[4 * J + 2] *= d0;
        x[4 * J + 3] *= d1;
    });
}
