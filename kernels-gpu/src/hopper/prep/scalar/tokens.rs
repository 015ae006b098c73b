//! Numbers of tokens: decays, steps, norms, and the factors made of them.

use cuda_std::{ptx, warp};
use half::bf16;

use super::rows::split;
use super::*;
use crate::cut;
use crate::gate::Gdn;
use crate::hopper::gate::{LOG2_E, bias, element, log2_softplus, slope};
use crate::hopper::repeat;
use crate::math::sigmoid;
use crate::params::GateForm;
use crate::prep::{NORM_EPSILON, floored_beta};

/// A token's decay is not below this, in log2: whatever it is a factor of is zero in f32 already, and sums stay precise.
const STRONGEST: f32 = -128.0;

/// log2 of a token's decay; 0 beyond the chunk.
#[inline(always)]
unsafe fn log2_decay(p: &PrepParams, at: &Place, token: u32) -> f32 {
    if token >= at.len {
        return 0.0;
    }
    // SAFETY: a token of this chunk, and this head's parameters.
    let g = unsafe {
        let x = element(&p.g, (at.token + token as usize) * p.tables.sizes.hv as usize + at.head);
        if p.gate_form == GateForm::Given as u32 {
            x * LOG2_E
        } else {
            let (a, x) = (slope(p, at.head), x + bias::<Gdn>(p, at.head, 0)[0]);
            if p.gate_form == GateForm::Softplus as u32 {
                -a * log2_softplus(x)
            } else {
                let e = ptx::ex2_approx_ftz_f32(-a * LOG2_E * x);
                p.bound * LOG2_E * ptx::rcp_approx_ftz_f32(1.0 + e)
            }
        }
    };
    // Not `max`: NaN stays.
    if g < STRONGEST { STRONGEST } else { g }
}

/// G in log2, and each token's own decay.
///
/// # Safety
/// By one warp, before a barrier.
#[inline(always)]
pub(super) unsafe fn decays(p: &PrepParams, at: &Place) {
    let first = 2 * at.lane;
    // SAFETY: tokens of this chunk or nothing; by a whole warp; one writer for each word.
    unsafe {
        let (a, b) = (log2_decay(p, at, first), log2_decay(p, at, first + 1));
        let mut sum = a + b;
        let mut distance = 1;
        while distance < 32 {
            let before = warp::shuffle_up(sum, distance);
            sum += if at.lane >= distance { before } else { 0.0 };
            distance *= 2;
        }
        let before = warp::shuffle_up(sum, 1);
        let before = if at.lane > 0 { before } else { 0.0 };
        ptx::st_shared_f32(at.base + COLUMNS + first * 8, before + a);
        ptx::st_shared_f32(at.base + COLUMNS + first * 8 + 8, sum);
        ptx::st_shared_f32(at.base + STEPS + first * 8 + 4, ptx::ex2_approx_ftz_f32(a));
        ptx::st_shared_f32(at.base + STEPS + first * 8 + 12, ptx::ex2_approx_ftz_f32(b));
    }
}

/// beta of all tokens; 0 beyond the chunk.
///
/// # Safety
/// By one warp, before a barrier.
#[inline(always)]
pub(super) unsafe fn steps(p: &PrepParams, at: &Place) {
    repeat!(I in 2 => {
        let token = at.lane + 32 * I as u32;
        let mut beta = 0.0;
        if token < at.len {
            // SAFETY: a token of this chunk.
            beta = unsafe { element(&p.beta, (at.token + token as usize) * p.tables.sizes.hv as usize + at.head) };
            if p.beta_factor != 0.0 {
                beta = p.beta_factor * sigmoid(beta);
            }
        }
        // SAFETY: one writer for each word.
        unsafe { ptx::st_shared_f32(at.base + STEPS + token * 8, beta) };
    });
}

/// The sum of squares of row `lane % 16` of this warp's 16 rows, of k or of q: the diagonal of their product with themselves.
#[inline(always)]
unsafe fn squares(at: &Place) -> f32 {
    let (row, half) = (16 * at.block + at.lane % 16, at.lane / 16);
    let image = at.base + if at.group == 0 { K } else { Q };
    let first = image + row * 128 + ((half ^ (row % 8)) << 4);
    let (mut low, mut high) = ([0f32; 4], [0f32; 4]);
    // SAFETY: rows of the image, which was brought before a barrier; by whole warps.
    unsafe {
        repeat!(J in 8 => {
            const STEP: u32 = J as u32;
            let a = ptx::ldmatrix_x4((first ^ ((STEP % 4) << 5)) + STEP / 4 * PANEL);
            // The same registers are 16 rows on the left, and twice 8 columns on the right.
            ptx::mma_m16n8k16_f32_bf16(&mut low, a, [a[0], a[2]]);
            ptx::mma_m16n8k16_f32_bf16(&mut high, a, [a[1], a[3]]);
        });
        let odd = (at.lane / 4) % 2 == 1;
        let (x, y) = if odd { (low[1], high[3]) } else { (low[0], high[2]) };
        let r = at.lane % 8;
        let (x, y) = (warp::shuffle_idx(x, 4 * r + r / 2), warp::shuffle_idx(y, 4 * r + r / 2));
        if at.lane % 16 < 8 { x } else { y }
    }
}

/// Norms, and the factors of rows and columns that they are part of.
///
/// # Safety
/// By all warps, between two barriers.
#[inline(always)]
pub(super) unsafe fn of_rows(p: &PrepParams, at: &Place) {
    // SAFETY: one writer for each word, which others read after the barrier; what is read was written before the first one.
    unsafe {
        let square = squares(at);
        let norm = if p.l2norm != 0 { ptx::rsqrt_approx_f32(square + NORM_EPSILON) } else { 1.0 };
        if at.lane < 16 {
            let row = 16 * at.block + at.lane;
            let of_row = |table: u32| at.base + table + row * 4;
            let g = ptx::ld_shared_f32(at.base + COLUMNS + row * 8);
            if at.group == 1 {
                let norm = norm * p.scale;
                ptx::st_shared_f32(of_row(ROWS_Q), norm);
                ptx::st_shared_u32(of_row(SCALE_Q), split(norm * ptx::ex2_approx_ftz_f32(g)));
            } else {
                let [beta, decay] = ptx::ld_shared_v2_f32(at.base + STEPS + row * 8);
                let last = ptx::ld_shared_f32(at.base + COLUMNS + 63 * 8);
                let floored = floored_beta::<bf16>(beta);
                ptx::st_shared_f32(at.base + COLUMNS + row * 8 + 4, norm);
                ptx::st_shared_f32(of_row(ROWS_K), norm * beta);
                ptx::st_shared_u32(of_row(SCALE_K), split(norm * ptx::ex2_approx_ftz_f32(last - g)));
                let decayed = floored * norm * ptx::ex2_approx_ftz_f32(g);
                ptx::st_shared_v2_f32(at.base + STEPS + row * 8, floored, decayed);
                repeat!(I in 4 => {
                    const ROWS: u32 = I as u32 + 1;
                    if ROWS < 4 && at.block < ROWS {
                        let until = ptx::ld_shared_f32(at.base + COLUMNS + (16 * ROWS - 1) * 8);
                        ptx::st_shared_f32(of_row(far_columns(ROWS)), norm * ptx::ex2_approx_ftz_f32(until - g));
                    }
                });
                if p.records.factors.is_present() {
                    let growth = cut::growth(beta * if p.l2norm != 0 { 1.0 } else { square });
                    ptx::st_shared_v2_f32(at.base + BOUNDS + row * 8, cut::token_factor(decay, growth), growth);
                }
            }
        }
        warp::sync();
    }
}
