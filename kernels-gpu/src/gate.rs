//! What differs between KDA (a decay per key channel) and GDN (a decay per head): a type parameter of the
//! kernels. Formulas: the scores of a chunk are `sum_d x_id k_jd exp(G_id - G_jd)` for j <= i.

use crate::params::{GateForm, Matrix, PrepParams, Sizes, Tensor};
use crate::tile::{Acc, OperandElement, Shared, Warpgroup, share_of};

/// Tiles that the scores of one slab of key channels need.
pub struct ScoreTiles<E> {
    /// Accumulated scores of this warpgroup's rows against k, f32 `[C,C]`.
    pub scores: Shared<f32>,
    /// q or k of this slab, f32 `[C, slab]`: as given if [`Gate::GIVEN_ROWS`], else normalised and scaled.
    pub left: Shared<f32>,
    /// k of this slab, likewise.
    pub right: Shared<f32>,
    /// exp(g), f32 `[C, slab]` or `[C, 1]`.
    pub decay: Shared<f32>,
    /// Space for the left operand, this warpgroup's own, `[C, slab]`.
    pub left_operand: Shared<E>,
    /// Space for the right operand, the block's, `[C, slab]`.
    pub right_operand: Shared<E>,
}

/// A delta rule's kind of decay.
pub trait Gate: 'static {
    /// Whether every key channel has its own decay.
    const PER_CHANNEL: bool;

    /// Columns of a decay tile for `channels` key channels.
    #[inline(always)]
    fn columns(channels: usize) -> usize {
        if Self::PER_CHANNEL { channels } else { 1 }
    }

    /// Of a tensor shaped like the log decays: `rows` tokens from `token`, value head `head` and the key channels from `channel`.
    fn of_tokens(
        x: &Tensor,
        sizes: &Sizes,
        token: usize,
        rows: usize,
        head: usize,
        channel: usize,
        channels: usize,
    ) -> Matrix;

    /// Of a tensor with a bias for each `row` (a head, or a chunk and head): its key channels from `channel`, as a row.
    fn of_head(x: &Tensor, sizes: &Sizes, row: usize, channel: usize, channels: usize) -> Matrix;

    /// The log decay of `rows` tokens from `token`, of value head `head` and the key channels from `channel`.
    #[inline(always)]
    fn log_decay(p: &PrepParams, token: usize, rows: usize, head: usize, channel: usize, channels: usize) -> Matrix {
        Self::of_tokens(&p.g, &p.tables.sizes, token, rows, head, channel, channels)
    }

    /// The gate's bias for the same head and channels, as a row.
    #[inline(always)]
    fn bias(p: &PrepParams, head: usize, channel: usize, channels: usize) -> Option<Matrix> {
        p.dt_bias.is_present().then(|| Self::of_head(&p.dt_bias, &p.tables.sizes, head, channel, channels))
    }

    /// Whether the rows of q and k go into products as they are given, so that norms are factors of the scores, not of rows.
    const GIVEN_ROWS: bool = !Self::PER_CHANNEL;

    /// Adds this slab's share to the scores. Collective over the block: contains block barriers.
    fn add_scores<E: OperandElement>(wg: &mut Warpgroup<'_>, tiles: &ScoreTiles<E>);

    /// What remains to be done with the scores after the last slab: if rows are as given, `norms` of the left and of the right ones
    /// and `scale` too. Above the diagonal scores are zero afterwards.
    fn finish_scores(
        wg: &mut Warpgroup<'_>,
        scores: Shared<f32>,
        decay: Shared<f32>,
        norms: [Shared<f32>; 2],
        scale: f32,
    );

    /// Loads exp(g) of the tokens and channels of `source`, a matrix of [`Gate::log_decay`], into `decay`; rows
    /// of `decay` beyond the source become 1.
    fn load_decay(
        wg: &mut Warpgroup<'_>,
        p: &PrepParams,
        decay: Shared<f32>,
        source: Matrix,
        head: usize,
        channel: usize,
    ) {
        let bias = Self::bias(p, head, channel, decay.cols());
        let valid = source.rows;
        if p.gate_form == GateForm::Given as u32 {
            wg.load_map(decay, source, 1.0, crate::math::exp);
            return;
        }
        wg.load_map(decay, source, 1.0, |raw| raw);
        wg.sync();
        let a = if p.a_log.is_present() { crate::math::exp(wg.scalar(p.a_log.matrix(head, 1, 1, 1, 1))) } else { 1.0 };
        if p.gate_form == GateForm::Softplus as u32 {
            wg.map_with_row(decay, valid, bias, |raw, bias| crate::math::exp(-a * crate::math::softplus(raw + bias)));
        } else {
            let bound = p.bound;
            wg.map_with_row(decay, valid, bias, |raw, bias| {
                crate::math::exp(bound * crate::math::sigmoid(a * (raw + bias)))
            });
        }
    }
}

/// Kimi Delta Attention.
pub struct Kda;

impl Gate for Kda {
    const PER_CHANNEL: bool = true;

    #[inline(always)]
    fn of_tokens(
        x: &Tensor,
        sizes: &Sizes,
        token: usize,
        rows: usize,
        head: usize,
        channel: usize,
        channels: usize,
    ) -> Matrix {
        let (hv, k) = (sizes.hv as usize, sizes.k as usize);
        x.matrix((token * hv + head) * k + channel, rows, channels, hv * k, 1)
    }

    #[inline(always)]
    fn of_head(x: &Tensor, sizes: &Sizes, row: usize, channel: usize, channels: usize) -> Matrix {
        let k = sizes.k as usize;
        x.matrix(row * k + channel, 1, channels, k, 1)
    }

    /// Exponents must never be positive. Blocks off the diagonal split at the boundary between their rows and
    /// columns, so that both factors are products of decays; the 16 x 16 diagonal blocks are summed in f32.
    fn add_scores<E: OperandElement>(wg: &mut Warpgroup<'_>, t: &ScoreTiles<E>) {
        let c = t.left.rows();
        wg.diagonal_scores::<E>(t.scores, t.left, t.right, t.decay);
        let mut span = 16;
        while span < c {
            // Between the last reading of the operands and writing them anew.
            wg.sync_block();
            wg.scale_prefix(t.left_operand, t.left, t.decay, span);
            let (first, own) = share_of(t.right.cols(), wg.count(), wg.index());
            if own > 0 {
                let (to, from) = (t.right_operand.columns(first, own), t.right.columns(first, own));
                wg.scale_suffix(to, from, t.decay.columns(first, own), span);
            }
            wg.sync_block();
            let mut first = 0;
            while first < c {
                let scores = t.scores.part(first + span, first, span, span);
                let mut acc = Acc::load(wg, scores);
                acc.mma(wg, t.left_operand.row_range(first + span, span), t.right_operand.row_range(first, span).t());
                wg.sync();
                acc.store(wg, scores);
                first += 2 * span;
            }
            span *= 2;
        }
    }

    fn finish_scores(_: &mut Warpgroup<'_>, _: Shared<f32>, _: Shared<f32>, _: [Shared<f32>; 2], _: f32) {}
}

/// Gated DeltaNet.
pub struct Gdn;

impl Gate for Gdn {
    const PER_CHANNEL: bool = false;

    #[inline(always)]
    fn of_tokens(x: &Tensor, sizes: &Sizes, token: usize, rows: usize, head: usize, _: usize, _: usize) -> Matrix {
        let hv = sizes.hv as usize;
        x.matrix(token * hv + head, rows, 1, hv, 1)
    }

    #[inline(always)]
    fn of_head(x: &Tensor, _: &Sizes, row: usize, _: usize, _: usize) -> Matrix {
        x.matrix(row, 1, 1, 1, 1)
    }

    /// The decay does not depend on the channel: plain products of the given rows now, which a type of theirs holds exactly, and
    /// norms and decays once at the end.
    fn add_scores<E: OperandElement>(wg: &mut Warpgroup<'_>, t: &ScoreTiles<E>) {
        wg.convert(t.left_operand, t.left, |x| x);
        let (first, own) = share_of(t.right.cols(), wg.count(), wg.index());
        if own > 0 {
            wg.convert(t.right_operand.columns(first, own), t.right.columns(first, own), |x| x);
        }
        wg.sync_block();
        let mut acc = Acc::load(wg, t.scores);
        acc.mma(wg, t.left_operand, t.right_operand.t());
        wg.sync();
        acc.store(wg, t.scores);
    }

    fn finish_scores(
        wg: &mut Warpgroup<'_>,
        scores: Shared<f32>,
        decay: Shared<f32>,
        [left, right]: [Shared<f32>; 2],
        scale: f32,
    ) {
        wg.scale_pairwise(scores, decay);
        wg.sync();
        wg.scale_rows(scores, left, scale);
        wg.sync();
        let mut acc = Acc::load(wg, scores);
        acc.scale_columns(wg, right.t());
        wg.sync();
        acc.store(wg, scores);
    }
}
