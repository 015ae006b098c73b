//! A' and w.

use cuda_std::{ptx, thread, warp};

use super::*;
use crate::hopper::{RECORD_A, RECORD_W, by_columns, by_rows, column_step, put_panel, repeat, row_step};

/// A' and w from the inverse, into the record. Contains barriers of the block.
///
/// # Safety
/// By all threads, after the barrier behind the inverse.
#[inline(always)]
pub(super) unsafe fn finish(p: &PrepParams, at: &Place) {
    let (base, record) = (at.base, at.record(p));
    // SAFETY: one writer for each word; barriers and proxy fences before others read.
    unsafe {
        columns(at);
        ptx::fence_proxy_async_shared();
        thread::sync_threads();
        if at.thread == 0 {
            ptx::cp_async_bulk_global_shared(record.wrapping_add(RECORD_A as usize), base + A, PANEL);
            ptx::cp_async_bulk_commit_group();
        }
        // The first warp's lanes meet again before the product, which whole warps start.
        warp::sync();
        // w, each warpgroup 64 channels.
        let panel = at.group * PANEL;
        let (a, k) = (by_rows(base + A_DECAYED), by_columns(base + K + panel, PANEL));
        let mut w = [0f32; 32];
        ptx::wgmma_fence();
        repeat!(J in 4 => {
            let (a, k) = (a + row_step(J, PANEL), k + column_step(J));
            ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 1>(&mut w, a, k, (J != 0) as u32);
        });
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group::<0>(&mut w);
        put_panel::<false>(&w, base + W + panel, at.block, at.lane);
        ptx::fence_proxy_async_shared();
        if at.group == 0 {
            ptx::bar_sync_id::<1, 128>();
        } else {
            ptx::bar_sync_id::<2, 128>();
        }
        if at.thread.is_multiple_of(128) {
            let to = record.wrapping_add((RECORD_W + panel) as usize);
            ptx::cp_async_bulk_global_shared(to, base + W + panel, PANEL);
            ptx::cp_async_bulk_commit_group();
            // (That what was read is written, the end of the grid sees to.)
            ptx::cp_async_bulk_wait_group_read::<0>();
        }
        warp::sync();
    }
}

/// The inverse with its columns times beta, and times beta |k|^-1 exp G, as images: 16 columns of a row for each thread.
#[inline(always)]
unsafe fn columns(at: &Place) {
    let base = at.base;
    let (row, first) = (at.thread / 4, 16 * (at.thread % 4));
    // Blocks of 16 on the diagonal are whole. Above them nothing was written; the end of the first row is 0.
    let (from, step) = if first <= row { (INVERSE + (row * PITCH + first) * 4, 16) } else { (INVERSE + 12 * 4, 0) };
    let from = base + from;
    repeat!(J in 2 => {
        let column = first + 8 * J as u32;
        let factors = base + STEPS + column * 8;
        let to = base + row * 128 + (((column / 8) ^ (row % 8)) << 4);
        // SAFETY: the inverse and the factors were written before the barrier; one writer for each piece.
        unsafe {
            let (x, y) = (ptx::ld_shared_v4_f32(from + 2 * J as u32 * step), ptx::ld_shared_v4_f32(from + (2 * J as u32 + 1) * step));
            let pairs = |x0: f32, x1: f32, c: u32| {
                let [b0, d0, b1, d1] = ptx::ld_shared_v4_f32(factors + c * 8);
                [ptx::cvt_rn_bf16x2_f32(x1 * b1, x0 * b0), ptx::cvt_rn_bf16x2_f32(x1 * d1, x0 * d0)]
            };
            let (a, b) = (pairs(x[0], x[1], 0), pairs(x[2], x[3], 2));
            let (c, d) = (pairs(y[0], y[1], 4), pairs(y[2], y[3], 6));
            ptx::st_shared_v4_u32(to + A, a[0], b[0], c[0], d[0]);
            ptx::st_shared_v4_u32(to + A_DECAYED, a[1], b[1], c[1], d[1]);
        }
    });
}
