//! Log decays from what the gate was given, and the gradient back to it. Formulas: [`crate::gate`] and `backward::gate`.

use cuda_std::ptx;

use super::body::Place;
use crate::element::DtypeCode;
use crate::gate::Gate;
use crate::hopper::gate::{LOG2_E, bias, element, log2_softplus, slope};
use crate::hopper::{CHANNELS, repeat, unpack};
use crate::params::{GateForm, PrepParams};

/// What the gate was given for this thread's tokens and channels, without bias; 0 beyond the chunk. GDN's is the same for all
/// channels.
///
/// # Safety
/// By whole warps.
#[inline(always)]
pub(super) unsafe fn given<G: Gate>(p: &PrepParams, at: &Place) -> [[f32; 2]; 8] {
    let hv = p.tables.sizes.hv as usize;
    let first = 8 * at.s;
    let mut x = [[0f32; 2]; 8];
    // SAFETY: rows of this chunk, or nothing.
    unsafe {
        if !G::PER_CHANNEL {
            repeat!(I in 8 => {
                let row = first + I as u32;
                if row < at.len {
                    let of_token = element(&p.g, (at.token + row as usize) * hv + at.head);
                    x[I] = [of_token; 2];
                }
            });
            return x;
        }
        let from = (at.token * hv + at.head) * CHANNELS + at.channel as usize;
        if p.g.dtype() == DtypeCode::F32 {
            let from = (p.g.addr as *const f32).wrapping_add(from);
            repeat!(I in 8 => {
                let row = first + I as u32;
                let from = from.wrapping_add(row as usize * hv * CHANNELS);
                let bits = ptx::ld_global_nc_v2_u32_if(from.cast(), (row < at.len) as u32);
                x[I] = [f32::from_bits(bits[0]), f32::from_bits(bits[1])];
            });
        } else {
            let from = (p.g.addr as *const u32).wrapping_add(from / 2);
            repeat!(I in 8 => {
                let row = first + I as u32;
                let from = from.wrapping_add(row as usize * hv * CHANNELS / 2);
                x[I] = unpack(ptx::ld_global_nc_u32_if(from, (row < at.len) as u32));
            });
        }
    }
    x
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

/// log2 of the decays of this thread's tokens and channels; 0 beyond the chunk.
///
/// # Safety
/// By whole warps.
#[inline(always)]
pub(super) unsafe fn log2_decays<G: Gate>(p: &PrepParams, at: &Place, mut x: [[f32; 2]; 8]) -> [[f32; 2]; 8] {
    if p.gate_form == GateForm::Given as u32 {
        repeat!(I in 8 => { x[I] = [x[I][0] * LOG2_E, x[I][1] * LOG2_E]; });
        return x;
    }
    // SAFETY: this head's.
    let (a, bias) = unsafe { (slope(p, at.head), bias::<G>(p, at.head, at.channel as usize)) };
    if p.gate_form == GateForm::Softplus as u32 {
        repeat!(I in 8 => {
            x[I] = [-a * log2_softplus(x[I][0] + bias[0]), -a * log2_softplus(x[I][1] + bias[1])];
        });
    } else {
        let bound = p.bound * LOG2_E;
        repeat!(I in 8 => {
            x[I] = [bound * sigmoid(a * (x[I][0] + bias[0])), bound * sigmoid(a * (x[I][1] + bias[1]))];
        });
    }
    repeat!(I in 8 => { if 8 * at.s + I as u32 >= at.len { x[I] = [0.0; 2]; } });
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
        let (a, bias) = unsafe {
            if given { (1.0, [0.0; 2]) } else { (slope(p, at.head), bias::<G>(p, at.head, at.channel as usize)) }
        };
        Self { softplus, given, a, bound: p.bound, bias }
    }

    /// Whether the gate was given g itself.
    #[inline(always)]
    pub fn given(&self) -> bool {
        self.given
    }

    /// From dg and what was given for channel `c`: its gradient, and the share of A_log's.
    #[inline(always)]
    pub fn back(&self, dg: f32, x: f32, c: usize) -> [f32; 2] {
        let z = x + self.bias[c];
        if self.softplus {
            let g = -self.a * (log2_softplus(z) * core::f32::consts::LN_2);
            [-self.a * dg * sigmoid(z), dg * g]
        } else {
            let d = dg * self.bound * self.a * sigmoid_slope(self.a * z);
            [d, d * z]
        }
    }
}
