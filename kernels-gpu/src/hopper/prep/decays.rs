//! The decays of the tokens, from g itself or from the gate's raw input.

use cuda_std::ptx;

use super::operands::Rows;
use super::*;
use crate::gate::Kda;
use crate::hopper::gate::{bias, log2_softplus, slope};

/// log2 of the decays of this thread's tokens and channels; 0 beyond the chunk.
#[inline(always)]
pub(super) unsafe fn log_decays(p: &PrepParams, at: &Place, channel: usize) -> [[f32; 2]; 16] {
    let hv = p.tables.sizes.hv as usize;
    let first = 16 * at.s;
    let mut g = [[0f32; 2]; 16];
    let wide = p.g.dtype() == DtypeCode::F32;
    // SAFETY: rows of this chunk.
    unsafe {
        let from = (at.token * hv + at.head) * CHANNELS + channel;
        let rows = |bytes: usize| {
            let stride = (hv * CHANNELS * bytes) as u32;
            Rows { from: p.g.addr + (from * bytes) as u64, stride, len: at.len }
        };
        if wide {
            let rows = rows(4);
            repeat!(I in 16 => {
                let row = first + I as u32;
                let bits = ptx::ld_global_nc_v2_u32_if(rows.row(row), (row < at.len) as u32);
                g[I] = [f32::from_bits(bits[0]), f32::from_bits(bits[1])];
            });
        } else {
            let g_pairs = rows(2).pairs(first);
            repeat!(I in 16 => { g[I] = unpack(g_pairs[I]); });
        }
        if p.gate_form == GateForm::Given as u32 {
            repeat!(I in 16 => { g[I] = [g[I][0] * LOG2_E, g[I][1] * LOG2_E]; });
            return g;
        }
        let (a, bias) = (slope(p, at.head), bias::<Kda>(p, at.head, channel));
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
            repeat!(I in 16 => { if first + I as u32 >= at.len { g[I] = [0.0; 2]; } });
        }
    }
    g
}
