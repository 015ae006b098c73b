//! Aqk, Akk, and k exp G.

use cuda_std::{ptx, thread};

use super::operands::in_row;
use super::*;

/// The scores: Aqk into its image, beta Akk into f32, and k exp G into its image.
#[inline(always)]
pub(super) unsafe fn scores(at: &Place, kb: &[u32; 16]) {
    let base = at.base;
    let second = at.thread >= 128;
    let (mut far, mut near) = ([0f32; 16], [0f32; 32]);
    let (rows, columns, diagonal) =
        if second { (ROWS_16, COLUMNS_16, DIAGONAL_K) } else { (ROWS_32, COLUMNS_32, DIAGONAL_Q) };
    let (rows, columns) = (by_rows(base + rows), by_rows(base + columns));
    let (left, right) = (by_rows(base + diagonal), by_rows(base + DIAGONAL_COLUMNS));
    // SAFETY: operands were written before the barrier; registers are carried by the wait.
    unsafe {
        ptx::wgmma_fence();
        repeat!(J in 8 => {
            let (a, b) = (rows + row_step(J, PANEL), columns + row_step(J, PANEL));
            ptx::wgmma_m64n32k16_bf16_ss::<1, 1, 0, 0>(&mut far, a, b, (J != 0) as u32);
        });
        repeat!(J in 8 => {
            let (a, b) = (left + row_step(J, PANEL), right + row_step(J, PANEL));
            ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(&mut near, a, b, (J != 0) as u32);
        });
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group::<0>((&mut far, &mut near));
    }
    thread::sync_threads();
    let (lane, warp) = (ptx::laneid(), (at.thread % 128) / 32);
    let (row, column) = (lane / 4, 2 * (lane % 4));
    // A pair of scores of token `r` and the tokens from `c`: of q into Aqk, of k times beta into Akk.
    let put_q = |r: u32, c: u32, x: [f32; 2]| {
        let piece = (c / 8) ^ (r % 8);
        let to = base + AQK + r * 128 + (piece << 4) + (c % 8) * 2;
        // SAFETY: one writer for each pair.
        unsafe { ptx::st_shared_u32(to, ptx::cvt_rn_bf16x2_f32(x[1], x[0])) };
    };
    let put_k = |r: u32, c: u32, x: [f32; 2]| {
        // SAFETY: one writer for each pair; beta was written before a barrier.
        unsafe {
            let beta = ptx::ld_shared_f32(base + BETA + 4 * r);
            ptx::st_shared_v2_f32(base + AKK + (r * PITCH + c) * 4, beta * x[0], beta * x[1]);
        }
    };
    // Off the diagonal it is an operand of products only.
    let put_k_rounded = |r: u32, c: u32, x: [f32; 2]| {
        // SAFETY: as above.
        unsafe {
            let beta = ptx::ld_shared_f32(base + BETA + 4 * r);
            let to = base + AKK + (r * PITCH + c) * 4;
            ptx::st_shared_v2_f32(to, tf32(beta * x[0]), tf32(beta * x[1]));
        }
    };
    repeat!(J in 8 => {
        let j = J as u32;
        let (r0, r1, c) = (16 * warp + row, 16 * warp + row + 8, 8 * j + column);
        let on_diagonal = j / 2 == warp;
        // Above the diagonal there may be anything, also infinity.
        let keep = |r: u32, c: u32, x: f32, strict: bool| {
            let inside = if strict { c < r } else { c <= r };
            if on_diagonal && inside { x } else { 0.0 }
        };
        if j / 2 >= warp {
            let x0 = [near[4 * J], near[4 * J + 1]];
            let x1 = [near[4 * J + 2], near[4 * J + 3]];
            if !second {
                put_q(r0, c, [keep(r0, c, x0[0], false), keep(r0, c + 1, x0[1], false)]);
                put_q(r1, c, [keep(r1, c, x1[0], false), keep(r1, c + 1, x1[1], false)]);
            } else if on_diagonal {
                put_k(r0, c, [keep(r0, c, x0[0], true), keep(r0, c + 1, x0[1], true)]);
                put_k(r1, c, [keep(r1, c, x1[0], true), keep(r1, c + 1, x1[1], true)]);
            }
        }
    });
    repeat!(J in 4 => {
        let j = J as u32;
        let x0 = [far[4 * J], far[4 * J + 1]];
        let x1 = [far[4 * J + 2], far[4 * J + 3]];
        if !second {
            // Tokens from the middle on: q in warps 0 and 1, k in warps 2 and 3.
            let (r, c) = (32 + 16 * (warp % 2) + row, 8 * j + column);
            if warp < 2 {
                put_q(r, c, x0);
                put_q(r + 8, c, x1);
            } else {
                put_k_rounded(r, c, x0);
                put_k_rounded(r + 8, c, x1);
            }
        } else if j / 2 == warp % 2 {
            // Odd block 1 or 3 with the even block before it: q in warps 0 and 1, k in warps 2 and 3.
            let (r, c) = (32 * (warp % 2) + 16 + row, 32 * (warp % 2) + 8 * (j % 2) + column);
            if warp < 2 {
                put_q(r, c, x0);
                put_q(r + 8, c, x1);
            } else {
                put_k_rounded(r, c, x0);
                put_k_rounded(r + 8, c, x1);
            }
        }
    });
    // k exp G takes the place of operands.
    let place = in_row(at);
    // SAFETY: these operands are not read any more; every word has one writer.
    unsafe {
        repeat!(I in 16 => {
            ptx::st_shared_u32(place[I % 8] + (KB + I as u32 * 128), kb[I]);
        });
        ptx::fence_proxy_async_shared();
    }
}
