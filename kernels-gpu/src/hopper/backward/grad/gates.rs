//! Log decays from what the gate was given, and the gradient back to it. Formulas: [`crate::gate`] and `backward::gate`.

use cuda_std::{ptx, warp};

use super::body::{G_GIVEN, Place};
use super::columns::scaled;
use super::rows::Rows;
use crate::gate::Gate;
use crate::hopper::gate::{LOG2_E, element, is_wide, log2_softplus};
use crate::hopper::{repeat, unpack};
use crate::params::{GateForm, GradParams, PrepParams};

/// What the gate was given for this thread's tokens and channels, without bias; 0 beyond the chunk. For gates with a decay per channel.
///
/// # Safety
/// By whole warps.
#[inline(always)]
pub(super) unsafe fn given(p: &PrepParams, at: &Place) -> [[f32; 2]; 8] {
    let wide = is_wide(p);
    // SAFETY: rows of this chunk.
    unsafe { Rows::of(at, &p.g, p.tables.sizes.hv, at.head as u32, if wide { 4 } else { 2 }).load(wide) }
}

/// exp A_log of the head.
///
/// # Safety
/// It was brought before a barrier.
#[inline(always)]
unsafe fn slope(at: &Place) -> f32 {
    // SAFETY: by contract.
    unsafe { ptx::ld_shared_f32(at.gate + 512) }
}

/// The bias of this thread's channels.
///
/// # Safety
/// It was brought before a barrier.
#[inline(always)]
unsafe fn bias<G: Gate>(at: &Place) -> [f32; 2] {
    // SAFETY: by contract.
    unsafe {
        if G::PER_CHANNEL { ptx::ld_shared_v2_f32(at.gate + at.channel * 4) } else { [ptx::ld_shared_f32(at.gate); 2] }
    }
}

/// 1 / (1 + e^-x).
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    ptx::rcp_approx_ftz_f32(1.0 + ptx::ex2_approx_ftz_f32(-x * LOG2_E))
}

/// sigmoid(x) sigmoid(-x): neither factor is a difference.
#[inline(always)]
fn sigmoid_slope(x: f32) -> f32 {
    let u = ptx::ex2_approx_ftz_f32(-x.abs() * LOG2_E);
    let r = ptx::rcp_approx_ftz_f32(1.0 + u);
    u * r * r
}

/// The same from where it was brought to.
///
/// # Safety
/// After a barrier of the block behind the copies.
#[inline(always)]
unsafe fn brought(p: &GradParams, at: &Place) -> [[f32; 2]; 8] {
    let mut x = [[0f32; 2]; 8];
    // SAFETY: by contract.
    unsafe {
        if is_wide(&p.prep) {
            let from =
                at.base + G_GIVEN[0] + (at.s / 4) * (G_GIVEN[1] - G_GIVEN[0]) + (at.s % 4) * 4096 + at.channel * 4;
            repeat!(I in 8 => { x[I] = ptx::ld_shared_v2_f32(from + I as u32 * 512); });
        } else {
            let from = at.base + G_GIVEN[0] + at.s * 2048 + at.channel * 2;
            repeat!(I in 8 => { x[I] = unpack(ptx::ld_shared_u32(from + I as u32 * 256)); });
        }
    }
    x
}

/// Decays of this thread's tokens and channels; 1 beyond the chunk.
///
/// # Safety
/// By whole warps, after a barrier of the block behind the copies.
#[inline(always)]
pub(super) unsafe fn decays<G: Gate>(p: &GradParams, at: &Place) -> [[f32; 2]; 8] {
    let mut e = [[0f32; 2]; 8];
    // SAFETY: by contract.
    unsafe {
        if G::PER_CHANNEL {
            let g = log2_decays(&p.prep, at, brought(p, at), bias::<G>(at));
            repeat!(I in 8 => { e[I] = [ptx::ex2_approx_ftz_f32(g[I][0]), ptx::ex2_approx_ftz_f32(g[I][1])]; });
        } else {
            let of_lane = ptx::ex2_approx_ftz_f32(log2_decay_of_token::<G>(&p.prep, at));
            warp::sync();
            repeat!(I in 8 => { e[I] = [warp::shuffle_idx(of_lane, I as u32); 2]; });
        }
    }
    e
}

/// log2 of the decay of this warp's token `lane % 8`; 0 beyond the chunk.
#[inline(always)]
unsafe fn log2_decay_of_token<G: Gate>(p: &PrepParams, at: &Place) -> f32 {
    let row = 8 * at.s + at.lane % 8;
    if row >= at.len {
        return 0.0;
    }
    // SAFETY: a row of this chunk.
    let x = unsafe { element(&p.g, (at.token + row as usize) * p.tables.sizes.hv as usize + at.head) };
    if p.gate_form == GateForm::Given as u32 {
        return x * LOG2_E;
    }
    // SAFETY: this head's.
    let (a, [bias, _]) = unsafe { (slope(at), bias::<G>(at)) };
    if p.gate_form == GateForm::Softplus as u32 {
        -a * log2_softplus(x + bias)
    } else {
        p.bound * LOG2_E * sigmoid(a * (x + bias))
    }
}

/// log2 of decays; 0 beyond the chunk.
#[inline(always)]
unsafe fn log2_decays(p: &PrepParams, at: &Place, mut x: [[f32; 2]; 8], bias: [f32; 2]) -> [[f32; 2]; 8] {
    if p.gate_form == GateForm::Given as u32 {
        repeat!(I in 8 => { x[I] = [x[I][0] * LOG2_E, x[I][1] * LOG2_E]; });
        return x;
    }
    // SAFETY: this head's.
    let a = unsafe { slope(at) };
    if p.gate_form == GateForm::Softplus as u32 {
        repeat!(I in 8 => {
            x[I] = [-a * log2_softplus(x[I][0] + bias[0]), -a * log2_softplus(x[I][1] + bias[1])];
        });
    } else {
        let (slope, bound) = (-a * LOG2_E, p.bound * LOG2_E);
        let bias = scaled(bias, slope);
        let of = |x: f32, bias: f32| {
            bound * ptx::rcp_approx_ftz_f32(1.0 + ptx::ex2_approx_ftz_f32(ptx::fma_rn_f32(slope, x, bias)))
        };
        repeat!(I in 8 => { x[I] = [of(x[I][0], bias[0]), of(x[I][1], bias[1])]; });
    }
    if 8 * at.s + 8 > at.len {
        repeat!(I in 8 => { if 8 * at.s + I as u32 >= at.len { x[I] = [0.0; 2]; } });
    }
    x
}

/// The gate of one head, and of two channels, as its gradient needs it.
pub(super) struct Slopes {
    softplus: bool,
    given: bool,
    a: f32,
    bound: f32,
    bias: [f32; 2],
}

impl Slopes {
    /// # Safety
    /// By whole warps.
    #[inline(always)]
    pub unsafe fn of<G: Gate>(p: &PrepParams, at: &Place) -> Self {
        let form = p.gate_form;
        let (softplus, given) = (form == GateForm::Softplus as u32, form == GateForm::Given as u32);
        // SAFETY: by contract.
        let (a, bias) = unsafe { if given { (1.0, [0.0; 2]) } else { (slope(at), bias::<G>(at)) } };
        Self { softplus, given, a, bound: p.bound, bias }
    }

    /// Whether the gate was given g itself.
    #[inline(always)]
    pub fn given(&self) -> bool {
        self.given
    }

    /// From dg and what was given for channel `c`: its gradient. Adds to `share` what [`Self::of_a_log`] makes A_log's of.
    #[inline(always)]
    pub fn back(&self, dg: f32, x: f32, c: usize, share: &mut f32) -> f32 {
        if self.softplus { self.back_of_softplus(dg, x, c, share) } else { self.back_of_bounded(dg, x, c, share) }
    }

    #[inline(always)]
    fn back_of_softplus(&self, dg: f32, x: f32, c: usize, share: &mut f32) -> f32 {
        let z = (x + self.bias[c]) * LOG2_E;
        let u = ptx::ex2_approx_ftz_f32(z);
        // As `log2_softplus`; and sigmoid is u / (1 + u).
        let large = z > 30.0;
        let softplus = if large { z } else { ptx::lg2_approx_ftz_f32(1.0 + u) };
        let sigmoid = if large { 1.0 } else { u * ptx::rcp_approx_ftz_f32(1.0 + u) };
        *share = ptx::fma_rn_f32(dg, softplus, *share);
        -self.a * dg * sigmoid
    }

    #[inline(always)]
    fn back_of_bounded(&self, dg: f32, x: f32, c: usize, share: &mut f32) -> f32 {
        let z = x + self.bias[c];
        let d = dg * (self.bound * self.a) * sigmoid_slope(self.a * z);
        *share = ptx::fma_rn_f32(d, z, *share);
        d
    }

    /// [`Self::back`] of this thread's tokens and channels.
    #[inline(always)]
    pub fn back_all(&self, dg: &mut [[f32; 2]; 8], x: &[[f32; 2]; 8], share: &mut f32) {
        if self.softplus {
            repeat!(I in 8 => {
                let first = self.back_of_softplus(dg[I][0], x[I][0], 0, share);
                dg[I] = [first, self.back_of_softplus(dg[I][1], x[I][1], 1, share)];
            });
        } else {
            repeat!(I in 8 => {
                let first = self.back_of_bounded(dg[I][0], x[I][0], 0, share);
                dg[I] = [first, self.back_of_bounded(dg[I][1], x[I][1], 1, share)];
            });
        }
    }

    /// The share of A_log's gradient.
    #[inline(always)]
    pub fn of_a_log(&self, share: f32) -> f32 {
        if self.softplus { -self.a * core::f32::consts::LN_2 * share } else { share }
    }
}
