//! `grad`: the gradients of a chunk's inputs, from the state before it, the gradient of the state after it, v_new and its
//! gradient. One block per chunk and value head; blocks need nothing of each other.
//!
//! With S the state before the chunk, D the gradient of the state after it, R = v_new and dR its gradient:
//! ```text
//! dP  = tril(do R^T)                              P_ij = scale sum_d q_id k_jd exp(G_id - G_jd)
//! dw  = - dR S^T                                  w = A' (k exp G)
//! X   = strict_tril(dR v^T + dw (k exp G)^T)      gradient of A'
//! dN  = - strict_tril(A'^T X A'^T)                N_ij = sum_d k_id k_jd exp(G_id - G_jd)
//! dv  = A'^T dR
//! dq  = scale (exp(G) (do S^T) + sum_{j<=i} dP_ij k_j exp(G_i - G_j))
//! dk  = exp(G_last - G) (R D^T) + exp(G) (A'^T dw) + r
//!       + sum_{i>=j} (dP_ij scale q_i + dN_ij k_i) exp(G_i - G_j)
//! r   = sum_{j<i} dN_ij k_j exp(G_i - G_j)
//! dbeta = (rowsum(dv v) + rowsum(k exp(G) (A'^T dw)) + rowsum(k r)) / beta
//! ```
//! A' has beta in its columns, which is why dv, dw and dN need none, and why dbeta is a quotient; A' was built with beta
//! kept away from zero for its sake. dg is summed pair by pair, see [`crate::tile::Pairs`].
//!
//! Channels go through in slabs, twice: X needs all of them before the rest can begin. Differences of tokens within a chunk
//! are treated as in `prep` for f32: products that cross a boundary of 16, 32 (or the chunk's own edges) as matrix products of
//! rows with decays up to the boundary, the rest by running products.

mod tiles;

use super::gate::{gate_gradient, store_gate_share};
use crate::gate::Gate;
use crate::math::sigmoid;
use crate::params::{GradParams, StampKind};
use crate::prep::{NORM_EPSILON, Place, floored_beta, load_beta};
use crate::tile::{Acc, BLOCK_COLUMNS, OperandElement, RESERVED_BYTES, Shared, Warpgroup, tile_bytes};
use tiles::{Tiles, ValueColumns, v_blocks};

/// Warpgroups in a block.
pub const WARPGROUPS: usize = 1;

/// Most channels of a slab: what lets all tiles of f32 operands fit.
const SLAB: usize = 32;

/// Bytes of shared memory of a block, for a gate with a decay per channel or not.
pub const fn shared_bytes(k: usize, chunk: usize, element: usize, per_channel: bool) -> usize {
    let slab = if k < SLAB { k } else { SLAB };
    RESERVED_BYTES
        + tile_bytes(chunk, chunk, element)
        + 2 * tile_bytes(chunk, chunk, 4)
        + 2 * tile_bytes(chunk, BLOCK_COLUMNS, element)
        + 3 * tile_bytes(BLOCK_COLUMNS, slab, element)
        + 8 * tile_bytes(chunk, slab, 4)
        + tile_bytes(chunk, if per_channel { slab } else { 1 }, 4)
        + 2 * tile_bytes(1, slab, 4)
        + 6 * tile_bytes(chunk, 1, 4)
}

/// The grid: one block per chunk and value head, chunk by chunk.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn grad<G: Gate, E: OperandElement>(wg: &mut Warpgroup<'_>, p: &GradParams) {
    let start = wg.clock();
    let at = Place::of_block(wg, &p.prep);
    let (c, k) = (p.prep.tables.sizes.chunk as usize, p.prep.tables.sizes.k as usize);
    let slab = k.min(SLAB);
    let tiles = Tiles::<E>::allocate::<G>(wg, c, slab);
    wg.expect_shared(shared_bytes(k, c, E::CODE.size(), G::PER_CHANNEL));
    columns(wg, p, &at, &tiles);
    let mut x = over_values(wg, p, &at, &tiles);
    let mut channel = 0;
    while channel < k {
        let width = (k - channel).min(slab);
        add_d_w::<G, E>(wg, p, &at, &tiles.narrow(width), channel, &mut x);
        channel += width;
    }
    through_the_inverse(wg, &tiles, x);
    let mut channel = 0;
    while channel < k {
        let width = (k - channel).min(slab);
        let t = tiles.narrow(width);
        around_the_chunk::<G, E>(wg, p, &at, &t, channel);
        inside_the_chunk::<E>(wg, &t);
        store_slab::<G, E>(wg, p, &at, &t, channel);
        channel += width;
    }
    finish::<G, E>(wg, p, &at, &tiles);
    let end = wg.clock();
    wg.stamp_block(&p.prep.trace, StampKind::Grad, [start, end], [at.head as u32, at.chunk as u32], 0);
}

/// A', norms, beta, empty sums.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn columns<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &GradParams, at: &Place, t: &Tiles<E>) {
    let k = p.prep.tables.sizes.k as usize;
    wg.load(t.a, p.prep.records.a(at.chunk, at.head));
    if p.prep.l2norm != 0 {
        wg.inverse_norms(t.norms_q, at.rows(&p.prep, &p.prep.q, 0, k), NORM_EPSILON);
        wg.inverse_norms(t.norms_k, at.rows(&p.prep, &p.prep.k, 0, k), NORM_EPSILON);
    } else {
        wg.fill(t.norms_q, |_, _| 1.0);
        wg.fill(t.norms_k, |_, _| 1.0);
    }
    load_beta(wg, &p.prep, at, t.beta_floored);
    wg.fill(t.d_beta, |_, _| 0.0);
    wg.fill(t.d_decay, |_, _| 0.0);
    wg.fill(t.d_a_log, |_, _| 0.0);
    wg.sync();
    wg.map(t.beta_floored, |_, _, beta| floored_beta::<E>(beta));
}

/// What needs columns of V only: dP, dv and its part of dbeta; returns dR v^T.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn over_values<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &GradParams, at: &Place, t: &Tiles<E>) -> Acc {
    let c = t.a.rows();
    let (mut d_scores, mut x) = (Acc::zeros(c, c), Acc::zeros(c, c));
    for block in 0..v_blocks(p) {
        let v = ValueColumns::new(p, at, block);
        let [first, second] = v.tiles(t);
        wg.sync();
        wg.load(first, v.of(&p.d_o));
        wg.load(second, v.of(&p.v_new));
        wg.sync();
        d_scores.mma(wg, first, second.t());
        wg.sync();
        wg.load(first, v.of(&p.d_v_new));
        wg.load(second, v.of(&p.v));
        wg.sync();
        x.mma(wg, first, second.t());
        // dv = A'^T dR, in columns for which there is a tile of f32.
        let (mut column, slab) = (0, t.pairs.row_q.cols());
        while column < first.cols() {
            let width = (first.cols() - column).min(slab);
            let tile = t.pairs.row_q.columns(0, width);
            let mut dv = Acc::zeros(c, width);
            dv.mma(wg, t.a.t(), first.columns(column, width));
            dv.store_global(wg, v.of(&p.dv).columns(column, width));
            wg.sync();
            dv.store(wg, tile);
            wg.sync();
            wg.add_row_dots(t.d_beta, tile, second.columns(column, width));
            column += width;
        }
    }
    d_scores.store(wg, t.d_scores_q);
    wg.sync();
    wg.map(t.d_scores_q, |i, j, x| if j <= i { x } else { 0.0 });
    x
}

/// X += dw (k exp G)^T, of one slab.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_d_w<G: Gate, E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &GradParams,
    at: &Place,
    t: &Tiles<E>,
    channel: usize,
    x: &mut Acc,
) {
    let c = t.a.rows();
    let mut d_w = Acc::zeros(c, t.pairs.k.cols());
    for block in 0..v_blocks(p) {
        let v = ValueColumns::new(p, at, block);
        let ([d_r, _], s) = (v.tiles(t), v.rows(t.slabs[0]));
        wg.sync();
        wg.load(d_r, v.of(&p.d_v_new));
        wg.load(s, v.state(&p.states).columns(channel, s.cols()));
        wg.sync();
        d_w.mma_sub(wg, d_r, s);
    }
    let (d_w_operand, k_operand) = (t.slabs[1].row_range(0, c), t.slabs[2].row_range(0, c));
    wg.sync();
    load_k_and_decay::<G, E>(wg, p, at, t, channel);
    d_w.store(wg, d_w_operand);
    wg.sync();
    wg.scale_prefix(k_operand, t.pairs.k, t.pairs.decay, c);
    wg.sync();
    x.mma(wg, d_w_operand, k_operand.t());
}

/// dN from X.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn through_the_inverse<E: OperandElement>(wg: &mut Warpgroup<'_>, t: &Tiles<E>, x: Acc) {
    let c = t.a.rows();
    let (left, right) = (t.values[0].columns(0, c), t.values[1].columns(0, c));
    wg.sync();
    x.store(wg, t.d_scores_k);
    wg.sync();
    wg.select(left, t.d_scores_k, |i, j| j < i);
    wg.sync();
    let mut product = Acc::zeros(c, c);
    product.mma(wg, left, t.a.t());
    product.store(wg, right);
    wg.sync();
    let mut d_scores = Acc::zeros(c, c);
    d_scores.mma_sub(wg, t.a.t(), right);
    d_scores.store(wg, t.d_scores_k);
    wg.sync();
    wg.map(t.d_scores_k, |i, j, x| if j < i { x } else { 0.0 });
}

/// One slab's gradients through the states before and after the chunk. Starts the sums of dq, dk and dg.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn around_the_chunk<G: Gate, E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &GradParams,
    at: &Place,
    t: &Tiles<E>,
    channel: usize,
) {
    let (c, width) = (t.a.rows(), t.pairs.k.cols());
    wg.sync();
    load_k_and_decay::<G, E>(wg, p, at, t, channel);
    wg.load(t.pairs.q, at.rows(&p.prep, &p.prep.q, channel, width));
    wg.fill(t.common, |_, _| 0.0);
    wg.sync();
    wg.scale_rows(t.pairs.q, t.norms_q, p.prep.scale);
    wg.total_decay(t.total, t.pairs.decay);
    let (mut d_q, mut d_k, mut d_w) = (Acc::zeros(c, width), Acc::zeros(c, width), Acc::zeros(c, width));
    for block in 0..v_blocks(p) {
        let v = ValueColumns::new(p, at, block);
        let ([first, second], s, d) = (v.tiles(t), v.rows(t.slabs[0]), v.rows(t.slabs[1]));
        wg.sync();
        wg.load(first, v.of(&p.d_o));
        wg.load(second, v.of(&p.d_v_new));
        wg.load(s, v.state(&p.states).columns(channel, width));
        wg.load(d, v.state(&p.d_states).columns(channel, width));
        wg.sync();
        d_q.mma(wg, first, s);
        d_w.mma_sub(wg, second, s);
        wg.add_column_dots(t.common, s, d);
        wg.sync();
        wg.load(first, v.of(&p.v_new));
        wg.sync();
        d_k.mma(wg, first, d);
    }
    let d_w_operand = t.slabs[2].row_range(0, c);
    d_w.store(wg, d_w_operand);
    d_q.store(wg, t.pairs.row_q);
    d_k.store(wg, t.pairs.col_k);
    // The decay of the state itself: the same for all tokens.
    wg.sync();
    wg.combine(t.common, t.total, |x, total| x * total);
    let mut rows = Acc::zeros(c, width);
    rows.mma(wg, t.a.t(), d_w_operand);
    rows.store(wg, t.pairs.row_k);
    wg.sync();
    wg.fill_rows(t.pairs.dg, t.common);
    wg.fill(t.pairs.dq, |_, _| 0.0);
    wg.fill(t.pairs.dk, |_, _| 0.0);
    wg.sync();
    wg.gated_gradients(&t.pairs, c);
    wg.sync();
    wg.add_row_sums(t.d_beta, t.pairs.row_k);
}

/// One slab's gradients through products of the chunk's tokens with each other.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn inside_the_chunk<E: OperandElement>(wg: &mut Warpgroup<'_>, t: &Tiles<E>) {
    let c = t.a.rows();
    let pairs = &t.pairs;
    let scores = [t.values[0].columns(0, c), t.values[1].columns(0, c)];
    let [q_rows, k_rows, k_cols] = t.slabs;
    let (q_rows, k_rows, k_cols) = (q_rows.row_range(0, c), k_rows.row_range(0, c), k_cols.row_range(0, c));
    let mut span = 16;
    while span < c {
        // Rows of every second span with columns of the span before it.
        let crosses = |i: usize, j: usize| (i / span) % 2 == 1 && j / span + 1 == i / span;
        wg.sync();
        wg.select(scores[0], t.d_scores_q, crosses);
        wg.select(scores[1], t.d_scores_k, crosses);
        wg.scale_prefix(q_rows, pairs.q, pairs.decay, span);
        wg.scale_prefix(k_rows, pairs.k, pairs.decay, span);
        wg.scale_suffix(k_cols, pairs.k, pairs.decay, span);
        wg.sync();
        let width = pairs.k.cols();
        let (mut row_q, mut row_k, mut col_k) = (Acc::zeros(c, width), Acc::zeros(c, width), Acc::zeros(c, width));
        row_q.mma(wg, scores[0], k_cols);
        row_k.mma(wg, scores[1], k_cols);
        col_k.mma(wg, scores[0].t(), q_rows);
        col_k.mma(wg, scores[1].t(), k_rows);
        row_q.store(wg, pairs.row_q);
        row_k.store(wg, pairs.row_k);
        col_k.store(wg, pairs.col_k);
        wg.sync();
        wg.gated_gradients(pairs, span);
        wg.sync();
        wg.add_row_sums(t.d_beta, pairs.row_k);
        span *= 2;
    }
    wg.sync();
    wg.diagonal_gradients(pairs, t.d_scores_q, t.d_scores_k);
    wg.sync();
    wg.add_row_sums(t.d_beta, pairs.row_k);
}

/// One slab's results.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store_slab<G: Gate, E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &GradParams,
    at: &Place,
    t: &Tiles<E>,
    channel: usize,
) {
    let (hv, k) = (p.prep.tables.sizes.hv as usize, p.prep.tables.sizes.k as usize);
    let (pairs, scale) = (&t.pairs, p.prep.scale);
    let first = (at.token * hv + at.head) * k + channel;
    // The tile is the gradient of scale q.
    wg.map(pairs.dq, |_, _, x| x * scale);
    wg.sync();
    wg.store(p.dq.matrix(first, at.len, pairs.dq.cols(), hv * k, 1), pairs.dq);
    wg.store(p.dk.matrix(first, at.len, pairs.dk.cols(), hv * k, 1), pairs.dk);
    if G::PER_CHANNEL {
        gate_gradient::<G>(wg, p, at, [pairs.dg, pairs.row_q, pairs.row_k], [t.common, t.d_a_log], channel);
    } else {
        wg.add_row_sums(t.d_decay, pairs.dg);
    }
}

/// What is left after the last slab: dbeta, GDN's dg, the gradient of A_log.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn finish<G: Gate, E: OperandElement>(wg: &mut Warpgroup<'_>, p: &GradParams, at: &Place, t: &Tiles<E>) {
    wg.sync();
    if !G::PER_CHANNEL {
        let column = |tile: Shared<f32>| tile.columns(0, 1);
        let tiles = [t.d_decay, column(t.pairs.row_q), column(t.pairs.row_k)];
        gate_gradient::<G>(wg, p, at, tiles, [column(t.common), t.d_a_log], 0);
    }
    store_gate_share(wg, p, at, t.d_a_log, t.total.columns(0, 1));
    wg.combine(t.d_beta, t.beta_floored, |x, beta| x / beta);
    let factor = p.prep.beta_factor;
    if factor != 0.0 {
        // The norms are no longer needed.
        let logits = t.norms_q;
        wg.load(logits, at.steps(&p.prep, &p.prep.beta));
        wg.sync();
        wg.combine(t.d_beta, logits, |x, logit| x * factor * sigmoid(logit) * sigmoid(-logit));
    }
    wg.sync();
    wg.store(at.steps(&p.prep, &p.dbeta), t.d_beta);
}

/// Normalised rows of k and the decays, of one slab.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn load_k_and_decay<G: Gate, E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &GradParams,
    at: &Place,
    t: &Tiles<E>,
    channel: usize,
) {
    let tile = t.pairs.k;
    wg.load(tile, at.rows(&p.prep, &p.prep.k, channel, tile.cols()));
    wg.sync();
    wg.scale_rows(tile, t.norms_k, 1.0);
    if G::PER_CHANNEL || channel == 0 {
        let source = G::log_decay(&p.prep, at.token, at.len, at.head, channel, t.pairs.decay.cols());
        G::load_decay(wg, &p.prep, t.pairs.decay, source, at.head, channel);
    }
}
