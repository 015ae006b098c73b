//! The gradient of a gate's raw input, from that of the log decay g.
//!
//! ```text
//! given        d raw = dg
//! softplus     g = -a softplus(z):     d raw = -a dg sigmoid(z)                d A_log = sum dg g
//! lower bound  g = bound sigmoid(a z): d raw = dg bound s (1 - s) a, s = sigmoid(a z)    d A_log = sum d raw z
//! ```
//! with a = exp(A_log), z = raw + dt_bias; the gradient of dt_bias is the sum of d raw over tokens. Sums over tokens are
//! the chunk's own here, and `reduce` adds those of all chunks.

use crate::gate::Gate;
use crate::math::{exp, sigmoid, softplus};
use crate::params::{GateForm, GradParams};
use crate::prep::Place;
use crate::tile::{Shared, Warpgroup};

/// Turns `dg` into the gradient of what the gate was given, and stores it and this chunk's share of dt_bias's gradient.
/// `z` and `share` are work space of the same shape, `sums` a row of it; `d_a_log` gets each token's share of
/// A_log's gradient. Between two barriers of the caller's.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn gate_gradient<G: Gate>(
    wg: &mut Warpgroup<'_>,
    p: &GradParams,
    at: &Place,
    [dg, z, share]: [Shared<f32>; 3],
    [sums, d_a_log]: [Shared<f32>; 2],
    channel: usize,
) {
    let (gate, sizes) = (&p.prep, &p.prep.tables.sizes);
    if gate.gate_form != GateForm::Given as u32 {
        let a = if gate.a_log.is_present() { exp(wg.scalar(gate.a_log.matrix(at.head, 1, 1, 1, 1))) } else { 1.0 };
        wg.sync();
        wg.load(z, G::log_decay(gate, at.token, at.len, at.head, channel, z.cols()));
        wg.sync();
        let bias = G::bias(gate, at.head, channel, z.cols());
        wg.map_with_row(z, at.len, bias, |raw, bias| raw + bias);
        wg.sync();
        if gate.gate_form == GateForm::Softplus as u32 {
            wg.convert(share, z, |z| -a * softplus(z));
            wg.sync();
            wg.combine(share, dg, |g, dg| g * dg);
            wg.sync();
            wg.combine(dg, z, |dg, z| -a * dg * sigmoid(z));
        } else {
            let factor = gate.bound * a;
            wg.combine(dg, z, |dg, z| dg * factor * sigmoid(a * z) * sigmoid(-a * z));
            wg.convert(share, z, |z| z);
            wg.sync();
            wg.combine(share, dg, |z, d_raw| z * d_raw);
        }
        wg.sync();
        // Rows beyond the chunk's tokens hold what later tokens would get.
        wg.add_row_sums(d_a_log.row_range(0, at.len), share.row_range(0, at.len));
        if p.ddt_bias.is_present() {
            wg.column_sums(sums, dg.row_range(0, at.len));
            wg.sync();
            wg.store(
                G::of_head(&p.ddt_bias, sizes, at.chunk * sizes.hv as usize + at.head, channel, sums.cols()),
                sums,
            );
        }
    }
    wg.store(G::of_tokens(&p.dg, sizes, at.token, at.len, at.head, channel, dg.cols()), dg);
}

/// The chunk's share of A_log's gradient, if there is one, from that of its tokens.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn store_gate_share(
    wg: &mut Warpgroup<'_>,
    p: &GradParams,
    at: &Place,
    d_a_log: Shared<f32>,
    sum: Shared<f32>,
) {
    if p.da_log.is_present() {
        let hv = p.prep.tables.sizes.hv as usize;
        wg.sync();
        wg.column_sums(sum, d_a_log.row_range(0, at.len));
        wg.sync();
        wg.store(p.da_log.matrix(at.chunk * hv + at.head, 1, 1, 1, 1), sum);
    }
}
