//! The decays of the tokens, from g itself or from the gate's raw input.

use cuda_std::ptx;

use super::*;
use crate::gate::Kda;
use crate::hopper::gate::{bias, is_wide, log2_softplus, slope};

/// What the gate was given in f32 for this thread's tokens and channels, 0 beyond the chunk; zeros if it is bf16, which is brought with
/// q and k.
///
/// # Safety
/// By whole warps.
#[inline(always)]
pub(super) unsafe fn given_f32(p: &PrepParams, at: &Place) -> [[f32; 2]; 16] {
    let mut g = [[0f32; 2]; 16];
    if is_wide(p) {
        let hv = p.tables.sizes.hv;
        let from = p.g.addr + (((at.token * hv as usize + at.head) * CHANNELS + 2 * at.c as usize) * 4) as u64;
        repeat!(I in 16 => {
            let row = 16 * at.s + I as u32;
            let from = ptx::mad_wide_u32(row, hv * CHANNELS as u32 * 4, from) as *const u32;
            // SAFETY: a row of this chunk, or nothing.
            let bits = unsafe { ptx::ld_global_nc_v2_u32_if(from, (row < at.len) as u32) };
            g[I] = [f32::from_bits(bits[0]), f32::from_bits(bits[1])];
        });
    }
    g
}

/// The gate's slope and bias, where it has a form: exp A_log of the head, and the bias of this thread's channels.
///
/// # Safety
/// By whole warps.
#[inline(always)]
pub(super) unsafe fn parameters(p: &PrepParams, at: &Place) -> (f32, [f32; 2]) {
    if p.gate_form == GateForm::Given as u32 {
        return (1.0, [0.0; 2]);
    }
    // SAFETY: this head's parameters.
    unsafe { (slope(p, at.head), bias::<Kda>(p, at.head, 2 * at.c as usize)) }
}

/// log2 of the decays of this thread's tokens and channels, from what the gate was given; 0 beyond the chunk, where 0 was given.
#[inline(always)]
pub(super) fn log_decays(
    p: &PrepParams,
    at: &Place,
    mut g: [[f32; 2]; 16],
    (a, bias): (f32, [f32; 2]),
) -> [[f32; 2]; 16] {
    if p.gate_form == GateForm::Given as u32 {
        repeat!(I in 16 => { g[I] = [g[I][0] * LOG2_E, g[I][1] * LOG2_E]; });
        return g;
    }
    if p.gate_form == GateForm::Softplus as u32 {
        let of = |x: f32| -a * log2_softplus(x);
        repeat!(I in 16 => { g[I] = [of(g[I][0] + bias[0]), of(g[I][1] + bias[1])]; });
    } else {
        let (slope, bound) = (-a * LOG2_E, p.bound * LOG2_E);
        let bias = [slope * bias[0], slope * bias[1]];
        let of = |x: f32, bias: f32| {
            bound * ptx::rcp_approx_ftz_f32(1.0 + ptx::ex2_approx_ftz_f32(ptx::fma_rn_f32(slope, x, bias)))
        };
        repeat!(I in 16 => { g[I] = [of(g[I][0], bias[0]), of(g[I][1], bias[1])]; });
    }
    if at.len < CHUNK as u32 {
        repeat!(I in 16 => { if 16 * at.s + I as u32 >= at.len { g[I] = [0.0; 2]; } });
    }
    g
}
