//! Aqk and Akk.

use cuda_std::{ptx, warp};

use super::rows::{note_decay, scale_rows};
use super::*;
use crate::hopper::prep::factors::multiply;
use crate::hopper::{RECORD_AQK, RECORD_KG, RECORD_QG, by_rows, put_panel, repeat, row_step};

/// Starts the products of rows of q, or of k, with those of k.
///
/// # Safety
/// By whole warpgroups, after the barrier behind the images.
#[inline(always)]
pub(super) unsafe fn start(at: &Place, x: &mut [f32; 32]) {
    let left = by_rows(at.base + if at.group == 0 { K } else { Q });
    let right = by_rows(at.base + K);
    // SAFETY: by contract.
    unsafe {
        ptx::wgmma_fence();
        repeat!(J in 8 => {
            let step = row_step(J, PANEL);
            ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(x, left + step, right + step, (J != 0) as u32);
        });
        ptx::wgmma_commit_group();
    }
}

/// Products to scores. Above the diagonal they become zero; of k, on it as well.
///
/// # Safety
/// By whole warps, after the barrier behind the factors of rows and columns.
#[inline(always)]
pub(super) unsafe fn weigh(at: &Place, x: &mut [f32; 32]) {
    let (base, block) = (at.base, at.block);
    let (row, column) = (at.lane / 4, 2 * (at.lane % 4));
    let strict = 1 - at.group;
    // SAFETY: written before the barrier.
    unsafe {
        let g = |row: u32| ptx::ld_shared_f32(base + COLUMNS + row * 8);
        let rows = base + if at.group == 0 { ROWS_K } else { ROWS_Q } + 64 * block + 4 * row;
        let (low, high) = (ptx::ld_shared_f32(rows), ptx::ld_shared_f32(rows + 32));
        let (g_low, g_high) = (g(16 * block + row), g(16 * block + row + 8));
        // Since the last token before the block; in the first block nothing uses it.
        let since = g((16 * block).saturating_sub(1));
        let far_low = low * ptx::ex2_approx_ftz_f32(g_low - since);
        let far_high = high * ptx::ex2_approx_ftz_f32(g_high - since);
        let far = base + far_columns(block) + 4 * column;
        repeat!(B in 4 => {
            const FIRST: usize = 8 * B;
            const BLOCK: u32 = B as u32;
            if BLOCK < block {
                repeat!(J in 2 => {
                    const N: usize = FIRST + 4 * J;
                    let [a, b] = ptx::ld_shared_v2_f32(far + (16 * BLOCK + 8 * J as u32) * 4);
                    x[N] *= a * far_low;
                    x[N + 1] *= b * far_low;
                    x[N + 2] *= a * far_high;
                    x[N + 3] *= b * far_high;
                });
            } else if BLOCK == block {
                let near = base + COLUMNS + (16 * BLOCK + column) * 8;
                let inside = |x: f32, column: u32| if column + strict <= row { x } else { 0.0 };
                let [g0, n0, g1, n1] = ptx::ld_shared_v4_f32(near);
                let score = |x: f32, row: f32, g: f32, column: f32, n: f32| {
                    x * (row * n) * ptx::ex2_approx_ftz_f32(g - column)
                };
                x[FIRST] = inside(score(x[FIRST], low, g_low, g0, n0), column);
                x[FIRST + 1] = inside(score(x[FIRST + 1], low, g_low, g1, n1), column + 1);
                x[FIRST + 2] = score(x[FIRST + 2], high, g_high, g0, n0);
                x[FIRST + 3] = score(x[FIRST + 3], high, g_high, g1, n1);
                let [g0, n0, g1, n1] = ptx::ld_shared_v4_f32(near + 64);
                x[FIRST + 4] = 0.0;
                x[FIRST + 5] = 0.0;
                x[FIRST + 6] = inside(score(x[FIRST + 6], high, g_high, g0, n0), column);
                x[FIRST + 7] = inside(score(x[FIRST + 7], high, g_high, g1, n1), column + 1);
            } else {
                repeat!(I in 8 => { x[FIRST + I] = 0.0; });
            }
        });
    }
}

/// Akk to where it is inverted. Off the diagonal it is an operand of products only.
///
/// # Safety
/// By the first warpgroup.
#[inline(always)]
pub(super) unsafe fn to_solve(at: &Place, x: &[f32; 32]) {
    let to = at.base + AKK + ((16 * at.block + at.lane / 4) * PITCH + 2 * (at.lane % 4)) * 4;
    repeat!(J in 8 => {
        let (to, block) = (to + 32 * J as u32, J as u32 / 2);
        let put = |x: [f32; 4]| {
            // SAFETY: one writer for each pair.
            unsafe {
                ptx::st_shared_v2_f32(to, x[0], x[1]);
                ptx::st_shared_v2_f32(to + 8 * PITCH * 4, x[2], x[3]);
            }
        };
        if block < at.block {
            put([tf32(x[4 * J]), tf32(x[4 * J + 1]), tf32(x[4 * J + 2]), tf32(x[4 * J + 3])]);
        } else if block == at.block {
            put([x[4 * J], x[4 * J + 1], x[4 * J + 2], x[4 * J + 3]]);
        }
    });
}

/// qg, Aqk, kg, the decay of the chunk and what it does to norms at most, into the record.
///
/// # Safety
/// By the second warpgroup, after its product.
#[inline(always)]
pub(super) unsafe fn store_q(p: &PrepParams, at: &Place, x: &[f32; 32]) {
    let record = at.record(p);
    let first = at.thread.is_multiple_of(128);
    // SAFETY: whole images of this chunk and head; barriers and proxy fences between writing and reading.
    unsafe {
        scale_rows(at, at.base + Q, record.wrapping_add(RECORD_QG as usize), at.base + SCALE_Q);
        // Nobody reads q any more.
        ptx::bar_sync_id::<2, 128>();
        put_panel::<false>(x, at.base + AQK, at.block, at.lane);
        ptx::fence_proxy_async_shared();
        ptx::bar_sync_id::<2, 128>();
        if first {
            ptx::cp_async_bulk_global_shared(record.wrapping_add(RECORD_AQK as usize), at.base + AQK, PANEL);
            ptx::cp_async_bulk_commit_group();
        }
        warp::sync();
        scale_rows(at, at.base + K, record.wrapping_add(RECORD_KG as usize), at.base + SCALE_K);
        if at.block == 1 {
            note_decay(p, at);
        } else if at.block == 2 && p.records.factors.is_present() {
            let of = |row: u32| ptx::ld_shared_v2_f32(at.base + BOUNDS + row * 8);
            multiply(p, [at.chunk, at.head], at.lane, of(at.lane), of(at.lane + 32));
        }
        if first {
            // w will lie there.
            ptx::cp_async_bulk_wait_group_read::<0>();
        }
    }
}
