//! [`crate::backward::scan`] with the state's gradient in registers:
//! ```text
//! dR^T = do^T Aqk + D^T kg^T                         (4 + 8 products of 64 x 64 x 16)
//! D^T <- D^T diag(decay) + do^T qg - dR^T w          (4 + 4 of 64 x 128 x 16)
//! ```
//! The product of do and qg waits for nothing, so it runs while dR is rounded. Transitions are sent by the portable code.

use cuda_std::{ptx, thread, warp};

use super::feed::{Item, feed};
use super::pipeline::*;
use super::results::{put_image, put_panel};
use super::states::scale_columns;
use super::walk::{Backwards, FIRST_BYTES, WARPGROUPS, Walk};
use crate::backward::scan::{Place as ItemPlace, first_gradient, hand_over, send_transition};
use crate::backward::states::Columns;
use crate::comm::{Port, STEP_SCAN_BACK};
use crate::element::DtypeCode;
use crate::hopper::records::Records;
use crate::hopper::scan::{COLUMNS, release};
use crate::hopper::{CHANNELS, IMAGE, PANEL, by_columns, by_rows, column_step, repeat, row_step, step, wait};
use crate::params::{BackItem, BackPass, ScanBackParams, Segment, StampKind};
use crate::tile::{Shared, Warpgroup};

/// Persistent grid: blocks take items of one column block by ticket until there are no more. Blocks of
/// [`WARPGROUPS`](super::walk::WARPGROUPS).
#[inline(always)]
pub fn scan_back(wg: &mut Warpgroup<'_>, p: &ScanBackParams) {
    // SAFETY: what is launched behind this one as dependent may start when all blocks run.
    unsafe { ptx::griddepcontrol_launch_dependents() };
    let pipeline = Pipeline::<Backwards>::new(wg.base());
    if thread::thread_idx_x() == 0 {
        // SAFETY: the first thing that happens to this memory; `next_ticket` has a barrier before anybody waits.
        unsafe { pipeline.init() };
    }
    // The gradient lies where stages are, before and after the walk.
    let state: Shared<f32> = wg.tile_at(pipeline.base, COLUMNS as usize, CHANNELS);
    let m_dtype = DtypeCode::from_code(p.m_dtype);
    let port = Port { channel: &p.channel, trace: &p.trace, step: STEP_SCAN_BACK, m_dtype };
    let walks = wg.index() == 0;
    let mut healthy = true;
    let (mut number, mut result) = (0, 0);
    loop {
        let ticket = wg.next_ticket(p.ticket);
        // A wait that expired anywhere on this PE ends the step: its outputs are void.
        let go_on = healthy && !port.trapped(wg);
        let go_on = wg.sync_and(go_on);
        // SAFETY: by all threads, as the votes below: a vote tells the assembler that the branch is uniform.
        if unsafe { warp::any(ticket >= p.items.len || !go_on) } {
            return;
        }
        let start = wg.clock();
        let item: BackItem = wg.read(p.items, ticket as usize);
        let segment: Segment = wg.read(p.tables.segments, item.segment as usize);
        let at = ItemPlace { item, segment, stores: item.pass == BackPass::Whole as u32 };
        let block = item.first_block;
        // SAFETY: as above.
        if unsafe { warp::all(item.pass == BackPass::Transition as u32) } {
            if walks {
                healthy = send_transition(wg, p, &port, &at, block, state);
            }
            // SAFETY: orders this thread's accesses of the tile and the bulk copies of the next item.
            unsafe { ptx::fence_proxy_async_shared() };
            continue;
        }
        let columns = Columns::of_block(&p.tables.sizes, block);
        let ready = !walks || first_gradient(wg, p, &port, &at, block, columns, state);
        let ready = wg.sync_and(ready);
        // SAFETY: as above.
        if !unsafe { warp::all(ready) } {
            return;
        }
        // SAFETY: as above.
        let (chunks, stores) = unsafe { (warp::shuffle_idx(segment.chunks, 0), warp::all(at.stores)) };
        if walks {
            let mut d = [0f32; 64];
            wg.load_fragment(&mut d, state);
            // SAFETY: orders this thread's accesses. The gradient's tile: read by ordinary loads, written next by bulk copies.
            unsafe { ptx::fence_proxy_async_shared() };
            wg.give(WARPGROUPS);
            if stores {
                walk::<true>(&pipeline, &mut d, number, result, chunks);
            } else {
                walk::<false>(&pipeline, &mut d, number, result, chunks);
            }
            // All copies to where it lies have come, since their chunks were walked.
            wg.store_fragment(state, &d);
        } else {
            let results = [&p.d_states, &p.d_v_new];
            let item = Item::new(wg, &p.tables, &p.records, &p.d_o, results, &segment, [item.head, block], stores);
            wg.sync_given(WARPGROUPS);
            let heads = [at.item.head, p.tables.sizes.hv];
            let awaited = Records::new(wg, &p.channel, &p.trace, STEP_SCAN_BACK, &p.beside, heads);
            feed(&pipeline, &item, Some(awaited), number, result);
        }
        number += segment.chunks;
        result += if stores { segment.chunks } else { 0 };
        let end = wg.clock();
        wg.stamp_block(&p.trace, StampKind::ScanBack, [start, end], [item.head, block], 0);
        // Nobody gets a gradient of records that were not there.
        // SAFETY: as above.
        if p.beside.ready.len > 0 && !unsafe { warp::all(wg.sync_and(!port.trapped(wg))) } {
            return;
        }
        if walks {
            wg.sync();
            healthy = hand_over(wg, p, &port, &at, block, columns, state);
        }
        // SAFETY: orders this thread's accesses of the tile and the bulk copies of the next item.
        unsafe { ptx::fence_proxy_async_shared() };
    }
}

/// The chunks of an item, from the last to the first, on the walking warpgroup. `STORES`: `grad` needs the results.
#[inline(always)]
fn walk<const STORES: bool>(
    pipeline: &Pipeline<Backwards>,
    d: &mut [f32; 64],
    first_number: u32,
    first_result: u32,
    chunks: u32,
) {
    let lane = ptx::laneid();
    let mut r = [0f32; 32];
    let (mut d_half, mut r_half) = ([0u32; 32], [0u32; 16]);
    let mut index = 0;
    while index < chunks {
        let (at, result) = (pipeline.place(first_number + index), pipeline.result(first_result + index));
        // SAFETY: barriers and stages are the block's; control flow is uniform in the warpgroup; every product's
        // registers are carried by the waits that follow.
        unsafe {
            let d_o = by_columns(at.stage + Backwards::VALUES, PANEL);
            let (aqk, kg) = (by_columns(at.stage, PANEL), by_rows(at.stage + PANEL));
            let (qg, w) =
                (by_columns(at.stage + FIRST_BYTES, PANEL), by_columns(at.stage + FIRST_BYTES + IMAGE, PANEL));
            wait(at.barriers + FULL_FIRST, at.parity);
            ptx::wgmma_fence();
            repeat!(J in 4 => {
                let (d_o, aqk) = (step(d_o, column_step(J)), step(aqk, column_step(J)));
                ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 1, 1>(&mut r, d_o, aqk, (J != 0) as u32);
            });
            ptx::wgmma_commit_group();
            // A wait for nothing: without it the assembler inserts one of its own before it lets accumulators be read.
            ptx::wgmma_wait_group::<1>((&mut r, &mut *d));
            repeat!(I in 32 => { d_half[I] = ptx::cvt_rn_bf16x2_f32(d[2 * I + 1], d[2 * I]); });
            ptx::wgmma_fence();
            repeat!(J in 8 => {
                let d_step = [d_half[4 * J], d_half[4 * J + 1], d_half[4 * J + 2], d_half[4 * J + 3]];
                ptx::wgmma_m64n64k16_bf16_rs::<1, 1, 0>(&mut r, d_step, step(kg, row_step(J, PANEL)), 1);
            });
            ptx::wgmma_commit_group();
            // Also for what is written while products are under way.
            ptx::wgmma_wait_group::<1>((&mut r, &mut d_half, &mut *d));
            scale_columns(d, at.decay, lane);
            wait(at.barriers + FULL_UPDATE, at.parity);
            ptx::wgmma_fence();
            repeat!(J in 4 => {
                let (d_o, qg) = (step(d_o, column_step(J)), step(qg, column_step(J)));
                ptx::wgmma_m64n128k16_bf16_ss::<1, 1, 1, 1>(d, d_o, qg, 1);
            });
            ptx::wgmma_commit_group();
            if STORES {
                put_image(&d_half, result);
            }
            ptx::wgmma_wait_group::<1>((&mut r, &mut d_half, &mut *d));
            release(lane, at.barriers + EMPTY_FIRST);
            repeat!(I in 16 => { r_half[I] = ptx::cvt_rn_bf16x2_f32(r[2 * I + 1], r[2 * I]); });
            ptx::wgmma_fence();
            repeat!(J in 4 => {
                let r_step = [r_half[4 * J], r_half[4 * J + 1], r_half[4 * J + 2], r_half[4 * J + 3]];
                ptx::wgmma_m64n128k16_bf16_rs::<1, -1, 1>(d, r_step, step(w, column_step(J)), 1);
            });
            ptx::wgmma_commit_group();
            if STORES {
                put_panel(&r_half, result);
            }
            ptx::wgmma_wait_group::<0>((&mut *d, &mut r_half));
            release(lane, at.barriers + EMPTY_UPDATE);
        }
        index += 1;
    }
}
