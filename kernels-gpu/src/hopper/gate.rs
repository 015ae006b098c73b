//! What the bodies of `prep` and `grad` share of the gate: its parameters of one head, and its function.

use cuda_std::ptx;

use super::CHANNELS;
use crate::element::DtypeCode;
use crate::gate::Gate;
use crate::params::{PrepParams, Tensor};

pub(super) const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// Whether what the gate was given is f32, not bf16.
#[inline(always)]
pub(super) fn is_wide(p: &PrepParams) -> bool {
    p.g.dtype() == DtypeCode::F32
}

/// An element of a tensor of any type.
///
/// # Safety
/// It lies inside the tensor.
#[inline(always)]
pub(super) unsafe fn element(x: &Tensor, index: usize) -> f32 {
    // SAFETY: by contract.
    unsafe { x.matrix(index, 1, 1, 1, 1).load(0, 0) }
}

/// exp A_log of a head; 1 without.
///
/// # Safety
/// There is such a head.
#[inline(always)]
pub(super) unsafe fn slope(p: &PrepParams, head: usize) -> f32 {
    // SAFETY: one for each head.
    if p.a_log.is_present() { ptx::ex2_approx_ftz_f32(unsafe { element(&p.a_log, head) } * LOG2_E) } else { 1.0 }
}

/// The bias of channels `channel` and `channel + 1` of a head; 0 without.
///
/// # Safety
/// There are such a head and such channels.
#[inline(always)]
pub(super) unsafe fn bias<G: Gate>(p: &PrepParams, head: usize, channel: usize) -> [f32; 2] {
    if !p.dt_bias.is_present() {
        return [0.0; 2];
    }
    // SAFETY: one for each head, and channel.
    unsafe {
        if G::PER_CHANNEL {
            let from = head * CHANNELS + channel;
            [element(&p.dt_bias, from), element(&p.dt_bias, from + 1)]
        } else {
            [element(&p.dt_bias, head); 2]
        }
    }
}

/// ln(1 + e^x) log2 e.
#[inline(always)]
pub(super) fn log2_softplus(x: f32) -> f32 {
    let z = x * LOG2_E;
    if z > 30.0 { z } else { ptx::lg2_approx_ftz_f32(1.0 + ptx::ex2_approx_ftz_f32(z)) }
}
