//! Products of matrices. Each warpgroup makes 64 x 64 at a time: two work at one kind of product, two at the other, each for half
//! of the channels.

use cuda_std::{ptx, warp};

use super::body::*;
use super::columns::{fused, in_row, own, own_pair};
use super::stage::{corner, scatter, scores_at, stage};
use crate::hopper::{
    CHANNELS, IMAGE, PANEL, by_columns, by_rows, column_step, put_panel, repeat, row_step, unpack, wait,
};
use crate::params::GradParams;
use crate::tile::Warpgroup;

/// Sums over V. Of the first two warpgroups: dw, stored; dP and dR v^T, returned second. Of the others do S, and R D.
///
/// # Safety
/// By all threads, after the copies of this thread's were awaited and announced to products, and a barrier of the block.
#[inline(always)]
pub(super) unsafe fn over_values(at: &Place, barriers: [u32; 2], parity: u32) -> [[f32; 32]; 2] {
    let base = at.base;
    let (group, half) = at.group();
    let (mut first, mut second) = ([0f32; 32], [0f32; 32]);
    // SAFETY: operands are complete; registers are carried by the wait.
    unsafe {
        wait(barriers[0], parity);
        let a = by_rows(base + if group == 0 { D_R } else { D_O });
        let b = by_columns(base + S + half * PANEL, PANEL);
        ptx::wgmma_fence();
        repeat!(J in 8 => {
            // An image for each 64 rows of V.
            let b = b + (J / 4) as u64 * (IMAGE >> 4) as u64 + column_step(J % 4);
            ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 1>(&mut first, a + row_step(J, PANEL), b, (J != 0) as u32);
        });
        ptx::wgmma_commit_group();
        wait(barriers[1], parity);
        // While the first product is under way.
        dots_of_states(at);
        if group == 0 {
            let (a, b) = if half == 0 { (D_O, R) } else { (D_R, V) };
            let (a, b) = (by_rows(base + a), by_rows(base + b));
            ptx::wgmma_fence();
            repeat!(J in 8 => {
                let (a, b) = (a + row_step(J, PANEL), b + row_step(J, PANEL));
                ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(&mut second, a, b, (J != 0) as u32);
            });
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group::<0>((&mut first, &mut second));
            put_panel::<true>(&first, base + D_W + half * PANEL, at.warp % 4, at.lane);
            ptx::fence_proxy_async_shared();
        } else {
            let (a, b) = (by_rows(base + R), by_columns(base + D + half * PANEL, PANEL));
            ptx::wgmma_fence();
            repeat!(J in 8 => {
                let b = b + (J / 4) as u64 * (IMAGE >> 4) as u64 + column_step(J % 4);
                ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 1>(&mut second, a + row_step(J, PANEL), b, (J != 0) as u32);
            });
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group::<0>((&mut first, &mut second));
        }
    }
    [first, second]
}

/// Sums of S D over this thread's 16 rows of V, for its channels.
#[inline(always)]
unsafe fn dots_of_states(at: &Place) {
    let rows = at.base + S + (at.s / 4) * IMAGE + at.half * PANEL + 16 * (at.s % 4) * 128 + own(at);
    let mut sum = [0f32; 2];
    // SAFETY: the images are complete.
    unsafe {
        repeat!(I in 16 => {
            let from = in_row(rows + (I as u32 / 8) * 1024, I as u32 % 8);
            let (s, d) = (unpack(ptx::ld_shared_u32(from)), unpack(ptx::ld_shared_u32(from + (D - S))));
            sum = fused(s, d, sum);
        });
        ptx::st_shared_v2_f32(own_pair(at, COMMON), sum[0], sum[1]);
    }
}

/// do S, R D and A'^T dw, for the threads that own columns.
///
/// # Safety
/// By the third and fourth warpgroups, after a barrier of the block behind [`over_values`].
#[inline(always)]
pub(super) unsafe fn stage_around(at: &Place, first: &[f32; 32], second: &[f32; 32]) {
    // SAFETY: nobody reads states, R and do any more.
    unsafe {
        stage(at, first, at.base + AROUND_Q, at.half);
        stage(at, second, at.base + AROUND_COLUMNS, at.half);
        let x = behind_the_inverse(at, D_W, at.half);
        stage(at, &x, at.base + AROUND_K, at.half);
    }
}

/// dN, from dR v^T: `X = strict_tril(dR v^T + dw (k exp G)^T)`, `dN = - strict_tril(A'^T X A'^T)`.
///
/// # Safety
/// By the second warpgroup, after a barrier of the block behind [`over_values`].
#[inline(always)]
pub(super) unsafe fn through_the_inverse(wg: &mut Warpgroup<'_>, at: &Place, x: &mut [f32; 32]) {
    let base = at.base;
    // SAFETY: operands were written before barriers; registers are carried by the waits.
    unsafe {
        let (d_w, kb) = (by_rows(base + D_W), by_rows(base + KB));
        ptx::wgmma_fence();
        repeat!(J in 8 => {
            let (a, b) = (d_w + row_step(J, PANEL), kb + row_step(J, PANEL));
            ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(x, a, b, 1);
        });
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group::<0>(&mut *x);
        ptx::bar_arrive_id::<D_W_READ, 384>();
        let (row, column) = corner(at);
        let mut operand = [0u32; 16];
        repeat!(I in 16 => {
            let (r, c) = (row + 8 * (I as u32 % 2), 8 * (I as u32 / 2) + column);
            let keep = |x: f32, c: u32| if c < r { x } else { 0.0 };
            operand[I] = ptx::cvt_rn_bf16x2_f32(keep(x[2 * I + 1], c + 1), keep(x[2 * I], c));
        });
        let (rows, columns) = (by_rows(base + A), by_columns(base + A, PANEL));
        let mut y = [0f32; 32];
        ptx::wgmma_fence();
        repeat!(J in 4 => {
            let a = [operand[4 * J], operand[4 * J + 1], operand[4 * J + 2], operand[4 * J + 3]];
            ptx::wgmma_m64n64k16_bf16_rs::<1, 1, 0>(&mut y, a, rows + row_step(J, PANEL), (J != 0) as u32);
        });
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group::<0>((&mut y, &mut operand));
        // All warps have read k exp G.
        wg.sync();
        put_panel::<false>(&y, base + KB, at.warp % 4, at.lane);
        ptx::fence_proxy_async_shared();
        wg.sync();
        let product = by_columns(base + KB, PANEL);
        ptx::wgmma_fence();
        repeat!(J in 4 => {
            let (a, b) = (columns + column_step(J), product + column_step(J));
            ptx::wgmma_m64n64k16_bf16_ss::<-1, 1, 1, 1>(&mut y, a, b, (J != 0) as u32);
        });
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group::<0>(&mut y);
        scatter::<true>(at, &y);
        ptx::fence_proxy_async_shared();
    }
}

/// A'^T times 64 columns of an image.
///
/// # Safety
/// By a whole warpgroup; operands were written before barriers.
#[inline(always)]
unsafe fn behind_the_inverse(at: &Place, image: u32, half: u32) -> [f32; 32] {
    let mut x = [0f32; 32];
    let (a, b) = (by_columns(at.base + A, PANEL), by_columns(at.base + image + half * PANEL, PANEL));
    // SAFETY: by contract; registers are carried by the wait.
    unsafe {
        ptx::wgmma_fence();
        repeat!(J in 4 => {
            let (a, b) = (a + column_step(J), b + column_step(J));
            ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 1, 1>(&mut x, a, b, (J != 0) as u32);
        });
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group::<0>(&mut x);
    }
    x
}

/// dv, stored, and its row sums with v.
///
/// # Safety
/// By the first warpgroup, after a barrier of the block behind [`over_values`].
#[inline(always)]
pub(super) unsafe fn d_v(wg: &mut Warpgroup<'_>, p: &GradParams, at: &Place) {
    let mut half = 0;
    while half < 2 {
        // SAFETY: by contract.
        unsafe {
            let x = behind_the_inverse(at, D_R, half);
            store_d_v(wg, p, at, &x, half);
        }
        half += 1;
    }
}

/// 64 columns of dv: row sums with v; rounded over the panel of dR that it was made of, and from there to the caller.
#[inline(always)]
unsafe fn store_d_v(wg: &mut Warpgroup<'_>, p: &GradParams, at: &Place, x: &[f32; 32], half: u32) {
    let (row, _) = corner(at);
    let (v, panel) = (at.base + V + half * PANEL, at.base + D_R + half * PANEL);
    let mut dots = [0f32; 2];
    // SAFETY: v was complete before a barrier; dR is this warpgroup's own; barriers as the comments say.
    unsafe {
        repeat!(J in 8 => {
            repeat!(H in 2 => {
                let r = row + 8 * H as u32;
                let from = v + r * 128 + ((J as u32 ^ (r % 8)) << 4) + (at.lane % 4) * 4;
                let [a, b] = unpack(ptx::ld_shared_u32(from));
                dots[H] = ptx::fma_rn_f32(x[4 * J + 2 * H], a, dots[H]);
                dots[H] = ptx::fma_rn_f32(x[4 * J + 2 * H + 1], b, dots[H]);
            });
        });
        repeat!(H in 2 => {
            dots[H] += warp::shuffle_xor(dots[H], 1);
            dots[H] += warp::shuffle_xor(dots[H], 2);
        });
        if at.lane.is_multiple_of(4) {
            let to = at.base + D_BETA + half * 256 + row * 4;
            ptx::st_shared_f32(to, dots[0]);
            ptx::st_shared_f32(to + 32, dots[1]);
        }
        warp::sync();
        // The products of all warps are done.
        wg.sync();
        put_panel::<false>(x, panel, at.warp % 4, at.lane);
        wg.sync();
        let rows = p.prep.tables.sizes.hv as usize * CHANNELS;
        let to = (at.token * p.prep.tables.sizes.hv as usize + at.head) * CHANNELS + 64 * half as usize;
        let to = (p.dv.addr as *mut u32).wrapping_add(to / 2);
        repeat!(I in 4 => {
            let number = at.thread % 128 + 128 * I as u32;
            let (r, piece) = (number / 8, number % 8);
            if r < at.len {
                let [a, b, c, d] = ptx::ld_shared_v4_u32(panel + r * 128 + ((piece ^ (r % 8)) << 4));
                ptx::st_global_v4_u32(to.wrapping_add(r as usize * (rows / 2) + piece as usize * 4), a, b, c, d);
            }
        });
        warp::sync();
    }
}

/// A level's gradients before their decays: of rows by the first two warpgroups, of columns by the others.
///
/// # Safety
/// By all threads; operands were written and announced before a barrier of the block.
#[inline(always)]
pub(super) unsafe fn level_product<const BIT: u32>(at: &Place) -> [f32; 32] {
    let base = at.base;
    let (group, half) = at.group();
    let (panel, piece) = const { scores_at(BIT) };
    let mut x = [0f32; 32];
    // SAFETY: by contract; registers are carried by the waits.
    unsafe {
        if group == 0 {
            let scores = by_rows(base + panel) + piece as u64;
            let columns = by_columns(base + columns_at(BIT) + half * (PANEL / 2), PANEL);
            ptx::wgmma_fence();
            repeat!(J in 2 => {
                let (a, b) = (scores + row_step(J, PANEL), columns + column_step(J));
                ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 1>(&mut x, a, b, (J != 0) as u32);
            });
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group::<0>(&mut x);
        } else {
            let scores = by_columns(base + panel, PANEL);
            let rows = by_columns(base + rows_at(BIT) + half * PANEL, PANEL);
            ptx::wgmma_fence();
            repeat!(J in 4 => {
                let (a, b) = (scores + column_step(J), rows + column_step(J));
                ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 1, 1>(&mut x, a, b, (J != 0) as u32);
            });
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group::<0>(&mut x);
        }
    }
    x
}

/// Stages what [`level_product`] returned.
///
/// # Safety
/// By all threads; nobody reads what lies where it goes.
#[inline(always)]
pub(super) unsafe fn stage_level<const BIT: u32>(at: &Place, x: &[f32; 32]) {
    let (group, half) = at.group();
    // The level's columns are half of the panel's; the other half of the product means nothing.
    let upper = const { scores_at(BIT).1 / 4 };
    let tile = at.base + STAGED_LEVEL;
    // SAFETY: by contract.
    unsafe {
        if group == 0 {
            stage(at, x, tile, half);
        } else if at.warp % 4 / 2 == upper {
            stage(at, x, tile + STAGED - upper * 32 * 512, half);
        }
    }
}
