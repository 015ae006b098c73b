//! What is left after the last level: dg's sums over blocks, and all results but dv.

use cuda_std::{ptx, thread, warp};
use half::bf16;

use super::body::*;
use super::columns::{Columns, Gradients, d_q, fused, norms, plus, scaled};
use super::gates::{Slopes, given};
use super::rows::Rows;
use crate::element::DtypeCode;
use crate::gate::Gate;
use crate::hopper::gate::element;
use crate::hopper::{CHANNELS, repeat, sums};
use crate::math::sigmoid;
use crate::params::{GradParams, Tensor};
use crate::prep::floored_beta;

/// Shares of dt_bias's gradient of blocks of 8 tokens, `[8,128]`: where levels had decays.
const BIAS_SHARES: u32 = TOTALS;

/// Stores rows of `[tokens, HV, K]`.
#[inline(always)]
unsafe fn store_rows(p: &GradParams, at: &Place, to: &Tensor, x: &[[f32; 2]; 8]) {
    let wide = to.dtype() == DtypeCode::F32;
    let rows = Rows::of(at, to, p.prep.tables.sizes.hv, at.head as u32, if wide { 4 } else { 2 });
    // SAFETY: rows of this chunk; one writer for each pair.
    unsafe { rows.store(wide, x) };
}

/// Gradients of the rows of q and k as they were given, through their norms: with x such a row, r the factor that makes its norm 1, and d its
/// gradient as if r were a constant, `dx = d - x r^2 (x . d)`. Where [`crate::backward::reduce`] need not sum over heads, it need
/// not do this either.
///
/// # Safety
/// By all threads. Contains a barrier of the block.
#[inline(always)]
unsafe fn through_norms(p: &GradParams, at: &Place, columns: &Columns, [dq, dk]: [&mut [[f32; 2]; 8]; 2]) {
    let unscaled = of_scale(p) * of_scale(p);
    let first = 8 * at.s;
    // SAFETY: every word has one writer; barriers between writing and reading.
    unsafe {
        let mut dots = [0f32; 16];
        repeat!(I in 8 => {
            let [q, k] = columns.rows::<I>(at);
            dots[I] = ptx::fma_rn_f32(q[0], dq[I][0], q[1] * dq[I][1]);
            dots[I + 8] = ptx::fma_rn_f32(k[0], dk[I][0], k[1] * dk[I][1]);
        });
        let sum = sums(dots, at.lane);
        if at.lane.is_multiple_of(2) {
            let number = at.lane / 2;
            let to = at.base + SQUARE_SUMS + (number / 8) * 512 + at.half * 4;
            ptx::st_shared_f32(to + (first + number % 8) * 8, sum);
        }
        warp::sync();
        thread::sync_threads();
        repeat!(I in 8 => {
            let row = (first + I as u32) * 8;
            let [q, k] = columns.rows::<I>(at);
            let [norm_q, norm_k] = norms::<I>(at);
            let [a, b] = ptx::ld_shared_v2_f32(at.base + SQUARE_SUMS + row);
            let [c, d] = ptx::ld_shared_v2_f32(at.base + SQUARE_SUMS + 512 + row);
            let (by_q, by_k) = (-(a + b) * unscaled * (norm_q * norm_q), -(c + d) * (norm_k * norm_k));
            dq[I] = fused(q, [by_q; 2], dq[I]);
            dk[I] = fused(k, [by_k; 2], dk[I]);
        });
    }
}

/// One part of the scale; 0 without, where what it multiplies is 0.
#[inline(always)]
fn of_scale(p: &GradParams) -> f32 {
    if p.prep.scale == 0.0 { 0.0 } else { ptx::rcp_approx_ftz_f32(p.prep.scale) }
}

/// Gradients of the normalised rows (times the scale, for q), for [`crate::backward::reduce`]: without the factors.
///
/// # Safety
/// By all threads.
#[inline(always)]
unsafe fn before_norms(p: &GradParams, at: &Place, [dq, dk]: [&mut [[f32; 2]; 8]; 2]) {
    let scale = p.prep.scale;
    repeat!(I in 8 => {
        // SAFETY: written before barriers.
        let [norm_q, norm_k] = unsafe { norms::<I>(at) };
        let by_q = if scale == 0.0 { 0.0 } else { scale * ptx::rcp_approx_ftz_f32(norm_q) };
        dq[I] = scaled(dq[I], by_q);
        dk[I] = scaled(dk[I], ptx::rcp_approx_ftz_f32(norm_k));
    });
}

/// Sum over the lanes of a warp.
#[inline(always)]
unsafe fn warp_sum(mut x: f32) -> f32 {
    // SAFETY: by all lanes.
    unsafe {
        x += warp::shuffle_xor(x, 16);
        x += warp::shuffle_xor(x, 8);
        x += warp::shuffle_xor(x, 4);
        x += warp::shuffle_xor(x, 2);
        x + warp::shuffle_xor(x, 1)
    }
}

/// dq, dk, dg, dbeta, and the chunk's shares of the gradients of A_log and dt_bias.
///
/// # Safety
/// By all threads, after a barrier of the block behind the last product of a level.
#[inline(always)]
pub(super) unsafe fn finish<G: Gate>(p: &GradParams, at: &Place, columns: &Columns, g: &mut Gradients) {
    // SAFETY: every word has one writer; barriers between writing and reading; rows of this chunk.
    unsafe {
        // What is read from the caller's tensors at the end is asked for now.
        let slopes = Slopes::of::<G>(&p.prep, at);
        let token = Token::of::<G>(p, at, &slopes);
        let mut dq = [[0f32; 2]; 8];
        repeat!(I in 8 => { dq[I] = d_q::<I>(at); });
        if p.prep.l2norm != 0 {
            if p.dq.dtype() == DtypeCode::F32 {
                before_norms(p, at, [&mut dq, &mut g.dk]);
            } else {
                through_norms(p, at, columns, [&mut dq, &mut g.dk]);
            }
        }
        store_rows(p, at, &p.dq, &dq);
        store_rows(p, at, &p.dk, &g.dk);
        let mut rows = [0f32; 16];
        repeat!(I in 8 => {
            rows[I] = g.of_k[I];
            if !G::PER_CHANNEL {
                rows[I + 8] = g.dg[I][0];
            }
        });
        let sum = sums(rows, at.lane);
        if at.lane.is_multiple_of(2) {
            let number = at.lane / 2;
            let to = at.base + ROW_SUMS + at.half * 512 + (number / 8) * 256;
            ptx::st_shared_f32(to + (8 * at.s + number % 8) * 4, sum);
        }
        if G::PER_CHANNEL {
            through_channel_gates(p, at, g, &slopes);
        }
        warp::sync();
        thread::sync_threads();
        if at.warp < 2 {
            of_token::<G>(p, at, &slopes, token);
        }
        warp::sync();
        if G::PER_CHANNEL {
            if at.warp < 2 && p.ddt_bias.is_present() {
                let mut sum = [0f32; 2];
                repeat!(B in 8 => {
                    let from = at.base + BIAS_SHARES + (B as u32 * 128 + 2 * at.thread) * 4;
                    sum = plus(sum, ptx::ld_shared_v2_f32(from));
                });
                let to = (p.ddt_bias.addr as *mut f32).wrapping_add(at.row * CHANNELS + 2 * at.thread as usize);
                ptx::st_global_v2_f32(to, sum[0], sum[1]);
            }
        } else {
            thread::sync_threads();
        }
        if at.thread == 0 {
            let of_warps = |first: u32, count: u32| {
                let (mut sum, mut w) = (0f32, 0);
                while w < count {
                    sum += ptx::ld_shared_f32(at.base + WARP_SUMS + (first + w) * 4);
                    w += 1;
                }
                sum
            };
            if p.da_log.is_present() {
                let sum = of_warps(0, if G::PER_CHANNEL { 4 * super::WARPGROUPS as u32 } else { 2 });
                ptx::st_global_f32((p.da_log.addr as *mut f32).wrapping_add(at.row), sum);
            }
            if !G::PER_CHANNEL && p.ddt_bias.is_present() {
                ptx::st_global_f32((p.ddt_bias.addr as *mut f32).wrapping_add(at.row), of_warps(2, 2));
            }
        }
        warp::sync();
    }
}

/// Gradient of what a gate with a decay per channel was given, and the shares of its parameters.
#[inline(always)]
unsafe fn through_channel_gates(p: &GradParams, at: &Place, g: &mut Gradients, slopes: &Slopes) {
    // SAFETY: as in `finish`.
    unsafe {
        if !slopes.given() {
            let x = given(&p.prep, at);
            // Rows beyond the chunk hold what later tokens would get.
            if 8 * at.s + 8 > at.len {
                repeat!(I in 8 => { if 8 * at.s + I as u32 >= at.len { g.dg[I] = [0.0; 2]; } });
            }
            let (mut d_bias, mut share) = ([0f32; 2], 0f32);
            slopes.back_all(&mut g.dg, &x, &mut share);
            repeat!(I in 8 => { d_bias = plus(d_bias, g.dg[I]); });
            ptx::st_shared_v2_f32(at.base + BIAS_SHARES + (at.s * 128 + at.channel) * 4, d_bias[0], d_bias[1]);
            let sum = warp_sum(slopes.of_a_log(share));
            if at.lane == 0 {
                ptx::st_shared_f32(at.base + WARP_SUMS + at.warp * 4, sum);
            }
        }
        store_rows(p, at, &p.dg, &g.dg);
    }
}

/// What [`of_token`] needs of the caller's tensors, for the first two warps.
#[derive(Clone, Copy)]
struct Token {
    beta: f32,
    /// What a gate of one number was given.
    g: f32,
}

/// Where a thread's token is in `[tokens, HV]`.
#[inline(always)]
fn token_place(p: &GradParams, at: &Place) -> usize {
    (at.token + at.thread as usize) * p.prep.tables.sizes.hv as usize + at.head
}

impl Token {
    /// # Safety
    /// By whole warps.
    #[inline(always)]
    unsafe fn of<G: Gate>(p: &GradParams, at: &Place, slopes: &Slopes) -> Self {
        let mut token = Self { beta: 0.0, g: 0.0 };
        // SAFETY: a row of this chunk; lanes meet again.
        unsafe {
            if at.thread < at.len {
                token.beta = element(&p.prep.beta, token_place(p, at));
                if !G::PER_CHANNEL && !slopes.given() {
                    token.g = element(&p.prep.g, token_place(p, at));
                }
            }
            warp::sync();
        }
        token
    }
}

/// dbeta of a token, and GDN's dg; its gate's shares of two warps' tokens.
#[inline(always)]
unsafe fn of_token<G: Gate>(p: &GradParams, at: &Place, slopes: &Slopes, token: Token) {
    let (valid, place) = (at.thread < at.len, token_place(p, at));
    // SAFETY: as in `finish`.
    unsafe {
        let sum = |from: u32, to: u32| {
            let at = at.base + 4 * at.thread;
            ptx::ld_shared_f32(at + from) + ptx::ld_shared_f32(at + to)
        };
        if valid {
            let d_beta = sum(D_BETA, D_BETA + 256) + sum(ROW_SUMS, ROW_SUMS + 512);
            let (given, factor) = (token.beta, p.prep.beta_factor);
            let d_beta = if factor == 0.0 {
                d_beta / floored_beta::<bf16>(given)
            } else {
                let beta = floored_beta::<bf16>(factor * sigmoid(given));
                d_beta / beta * factor * sigmoid(given) * sigmoid(-given)
            };
            ptx::st_global_f32((p.dbeta.addr as *mut f32).wrapping_add(place), d_beta);
        }
        if !G::PER_CHANNEL {
            let mut dg = sum(ROW_SUMS + 256, ROW_SUMS + 768);
            let mut share = 0.0;
            if !slopes.given() {
                dg = slopes.back(dg, token.g, 0, &mut share);
                share = slopes.of_a_log(share);
            }
            if valid {
                ptx::st_global_f32((p.dg.addr as *mut f32).wrapping_add(place), dg);
            }
            warp::sync();
            let (d_a_log, d_bias) = (warp_sum(if valid { share } else { 0.0 }), warp_sum(if valid { dg } else { 0.0 }));
            if at.lane == 0 {
                ptx::st_shared_f32(at.base + WARP_SUMS + at.warp * 4, d_a_log);
                ptx::st_shared_f32(at.base + WARP_SUMS + (2 + at.warp) * 4, d_bias);
            }
        }
    }
}
