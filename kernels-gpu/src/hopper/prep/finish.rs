//! A' and w.

use cuda_std::{ptx, thread, warp};

use super::*;

/// A' and w, and the bulk stores of all images but qg and kg.
#[inline(always)]
pub(super) unsafe fn finish(p: &PrepParams, at: &Place) {
    let base = at.base;
    let record_row = at.chunk * p.tables.sizes.hv as usize + at.head;
    let record = (p.records.operands.addr as *mut u8).wrapping_add(record_row * RECORD as usize);
    // SAFETY: one writer for each word; barriers and proxy fences before others read.
    unsafe {
        // A' = A diag(beta): 16 columns of a row each.
        let (row, first) = (at.thread / 4, 16 * (at.thread % 4));
        repeat!(J in 2 => {
            let column = first + 8 * J as u32;
            let x = ptx::ld_shared_v4_f32(base + INVERSE + (row * PITCH + column) * 4);
            let y = ptx::ld_shared_v4_f32(base + INVERSE + (row * PITCH + column + 4) * 4);
            let b = ptx::ld_shared_v4_f32(base + BETA + column * 4);
            let d = ptx::ld_shared_v4_f32(base + BETA + (column + 4) * 4);
            // Above the diagonal nothing was written.
            let entry = |x: f32, beta: f32, c: u32| {
                if c <= row { x * beta } else { 0.0 }
            };
            let pair = |x0: f32, b0: f32, x1: f32, b1: f32, c: u32| {
                ptx::cvt_rn_bf16x2_f32(entry(x1, b1, c + 1), entry(x0, b0, c))
            };
            ptx::st_shared_v4_u32(
                base + A + row * 128 + (((column / 8) ^ (row % 8)) << 4),
                pair(x[0], b[0], x[1], b[1], column),
                pair(x[2], b[2], x[3], b[3], column + 2),
                pair(y[0], d[0], y[1], d[1], column + 4),
                pair(y[2], d[2], y[3], d[3], column + 6),
            );
        });
        ptx::fence_proxy_async_shared();
        thread::sync_threads();
        if at.thread == 0 {
            ptx::cp_async_bulk_global_shared(record.wrapping_add(RECORD_AQK as usize), base + AQK, PANEL);
            ptx::cp_async_bulk_commit_group();
        }
        // The first warp's lanes meet again before the product, which whole warps start.
        warp::sync();
        // w, each warpgroup 64 channels.
        let (half, warp, lane) = (at.thread / 128, (at.thread % 128) / 32, ptx::laneid());
        let (a, kb) = (by_rows(base + A), by_columns(base + KB + half * PANEL, PANEL));
        let mut w = [0f32; 32];
        ptx::wgmma_fence();
        repeat!(J in 4 => {
            let (a, b) = (a + row_step(J, PANEL), kb + column_step(J));
            ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 1>(&mut w, a, b, (J != 0) as u32);
        });
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group::<0>(&mut w);
        put_panel::<false>(&w, base + W + half * PANEL, warp, lane);
        ptx::fence_proxy_async_shared();
        thread::sync_threads();
        if at.thread == 0 {
            // w and A' lie behind each other, here as in the record.
            ptx::cp_async_bulk_global_shared(record, base + W, IMAGE + PANEL);
            ptx::cp_async_bulk_commit_group();
            // (That what was read is written, the end of the grid sees to.)
            ptx::cp_async_bulk_wait_group_read::<0>();
        }
    }
}
