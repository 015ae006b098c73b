//! `prep`: everything inside a chunk that does not depend on the state (one block per chunk and value head).
//!
//! ```text
//! e     = exp(g),  G = cumulative sum of g in the chunk
//! Aqk   = scale * tril(sum_d q_id k_jd exp(G_id - G_jd))
//! Akk   = beta_i * strict_tril(sum_d k_id k_jd exp(G_id - G_jd))
//! A'    = (I + Akk)^-1 diag(beta)          v enters the scan as A' v, so prep never reads v
//! w     = A' (k exp G)
//! qg    = scale * q exp G,  kg = k exp(G_last - G),  decay = exp(G_last)
//! ```
//! Cumulative sums never appear: every factor is a product of decays, all at most 1, and can only underflow. (Diagonal blocks of scores
//! in bf16 split it inside: [`crate::tile::splits_diagonal`].)
//!
//! With one decay for all channels ([`Gate::GIVEN_ROWS`]) rows of q and k are operands as they are given, which rounds nothing, and what
//! they are multiplied with is applied to products:
//! ```text
//! Aqk[r,c] = (q_r . k_c) scale |q_r|^-1 |k_c|^-1 exp(G_r - G_c),  Akk likewise
//! w        = (A' diag(|k|^-1 exp G)) k
//! ```
//! The bodies for Hopper round the same operands, so that results are the same but for the order of sums.
//! Where somebody asks, it also bounds what the chunk does to the norm of a state, see [`crate::cut`].
//!
//! Two warpgroups: the first computes what has k on the left, the second what has q. Channels go through in
//! slabs of 64, so that the shared tiles do not grow with K.

use crate::cut;
use crate::element::DtypeCode;
use crate::gate::{Gate, ScoreTiles};
use crate::math::{sigmoid, tf32};
use crate::params::{Chunk, Matrix, PrepParams, StampKind, Tensor};
use crate::tile::{Acc, BLOCK_COLUMNS, OperandElement, RESERVED_BYTES, Shared, Warpgroup, share_of, tile_bytes};

/// Warpgroups in a block of `prep`.
pub const WARPGROUPS: usize = 2;

/// Added to the sum of squares in the norm of q and k.
pub(crate) const NORM_EPSILON: f32 = 1e-6;

/// |beta|, not below a floor: a column of A' must stay invertible, so that the backward pass can take beta out again. The
/// floor of f16 is what its subnormal numbers hold to 1 %, far below the rounding of anything of ordinary size.
#[inline(always)]
pub(crate) fn floored_beta<E: OperandElement>(beta: f32) -> f32 {
    let floor = if matches!(E::CODE, DtypeCode::F16) { 7.629_395e-6 } else { 1e-20 };
    if beta.abs() < floor { floor } else { beta }
}

/// Bytes of shared memory of a block, for a gate with a decay per channel or not.
pub const fn shared_bytes(k: usize, chunk: usize, element: usize, per_channel: bool) -> usize {
    let slab = if k < BLOCK_COLUMNS { k } else { BLOCK_COLUMNS };
    RESERVED_BYTES
        + 2 * tile_bytes(chunk, slab, 4)
        + tile_bytes(chunk, if per_channel { slab } else { 1 }, 4)
        + tile_bytes(1, slab, 4)
        + 6 * tile_bytes(chunk, 1, 4)
        + tile_bytes(1, 2, 4)
        + (1 + WARPGROUPS) * tile_bytes(chunk, slab, element)
        + WARPGROUPS * tile_bytes(chunk, chunk, 4)
        + tile_bytes(chunk, chunk, element)
        + if per_channel { 0 } else { tile_bytes(chunk, chunk, element) + tile_bytes(chunk, 1, 4) }
}

/// The grid: one block per chunk and value head, chunk by chunk.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn prep<G: Gate, E: OperandElement>(wg: &mut Warpgroup<'_>, p: &PrepParams) {
    let start = wg.clock();
    let place = Place::of_block(wg, p);
    let (c, k) = (p.tables.sizes.chunk as usize, p.tables.sizes.k as usize);
    let slab = k.min(BLOCK_COLUMNS);
    let tiles = Tiles {
        k: wg.shared(c, slab),
        q: wg.shared(c, slab),
        decay: wg.shared(c, G::columns(slab)),
        total: wg.shared(1, slab),
        norms: [wg.shared(c, 1), wg.shared(c, 1)],
        beta: wg.shared(c, 1),
        beta_floored: wg.shared(c, 1),
        growth: wg.shared(c, 1),
        factor: wg.shared(c, 1),
        factors: wg.shared(1, 2),
        right: wg.shared(c, slab),
        left: wg.private(c, slab),
        scores: wg.private(c, c),
        a: wg.shared(c, c),
        given: G::GIVEN_ROWS.then(|| Given { a: wg.shared(c, c), prefix: wg.shared(c, 1) }),
    };
    wg.expect_shared(shared_bytes(k, c, E::CODE.size(), G::PER_CHANNEL));
    rows_and_steps(wg, p, &place, &tiles);
    let mut channel = 0;
    while channel < k {
        let width = (k - channel).min(slab);
        wg.sync_block();
        load_slab::<G, E>(wg, p, &place, &tiles.narrow::<G>(width), channel);
        wg.sync_block();
        scores_of_slab::<G, E>(wg, p, &place, &tiles.narrow::<G>(width), channel);
        channel += width;
    }
    solve::<G, E>(wg, p, &place, &tiles);
    wg.sync_block();
    write_w::<G, E>(wg, p, &place, &tiles, slab);
    let end = wg.clock();
    wg.stamp_block(&p.trace, StampKind::Prep, [start, end], [place.head as u32, place.chunk as u32], 0);
}

/// Which chunk and head a block works on.
pub(crate) struct Place {
    /// Chunk.
    pub chunk: usize,
    /// Its first token.
    pub token: usize,
    /// Its tokens.
    pub len: usize,
    /// Value head.
    pub head: usize,
    /// Its q/k head.
    pub qk_head: usize,
}

impl Place {
    pub fn of_block(wg: &Warpgroup<'_>, p: &PrepParams) -> Self {
        let (h, hv) = (p.tables.sizes.h as usize, p.tables.sizes.hv as usize);
        let (chunk, head) = (wg.block() / hv, wg.block() % hv);
        let Chunk { token, len } = wg.read(p.tables.chunks, chunk);
        Self { chunk, token: token as usize, len: len as usize, head, qk_head: head / (hv / h) }
    }

    /// One value for each token, of `[tokens, HV]`.
    pub fn steps(&self, p: &PrepParams, x: &Tensor) -> Matrix {
        let hv = p.tables.sizes.hv as usize;
        x.matrix(self.token * hv + self.head, self.len, 1, hv, 1)
    }

    /// Rows of q or k, some channels.
    pub fn rows(&self, p: &PrepParams, x: &Tensor, channel: usize, channels: usize) -> Matrix {
        let (h, k) = (p.tables.sizes.h as usize, p.tables.sizes.k as usize);
        x.matrix((self.token * h + self.qk_head) * k + channel, self.len, channels, h * k, 1)
    }
}

/// Shared tiles; `left` and `scores` are each warpgroup's own.
struct Tiles<E> {
    k: Shared<f32>,
    q: Shared<f32>,
    /// exp(g).
    decay: Shared<f32>,
    /// exp(G_last).
    total: Shared<f32>,
    /// 1 / norm of the rows of k and of q.
    norms: [Shared<f32>; 2],
    beta: Shared<f32>,
    beta_floored: Shared<f32>,
    /// Of each token: what a state may grow by, and its largest decay, then what it multiplies the norm of a state by.
    growth: Shared<f32>,
    factor: Shared<f32>,
    /// The products of both over the chunk.
    factors: Shared<f32>,
    right: Shared<E>,
    left: Shared<E>,
    scores: Shared<f32>,
    a: Shared<E>,
    given: Option<Given<E>>,
}

/// For w with rows of k as they are given.
#[derive(Clone, Copy)]
struct Given<E> {
    /// A' diag(|k|^-1 exp G).
    a: Shared<E>,
    /// |k|^-1 exp G.
    prefix: Shared<f32>,
}

impl<E: OperandElement> Tiles<E> {
    /// 1 / norm of this warpgroup's own rows. (Not an index: on a GPU that would put the array into local memory.)
    #[inline(always)]
    fn norm(&self, wg: &Warpgroup<'_>) -> Shared<f32> {
        if has_k(wg) { self.norms[0] } else { self.norms[1] }
    }

    /// The first `width` channels of each tile that has channels.
    fn narrow<G: Gate>(&self, width: usize) -> Self {
        Self {
            k: self.k.columns(0, width),
            q: self.q.columns(0, width),
            decay: self.decay.columns(0, G::columns(width)),
            total: self.total.columns(0, width),
            right: self.right.columns(0, width),
            left: self.left.columns(0, width),
            ..*self
        }
    }
}

/// Whether this warpgroup has k on the left (the other one has q).
fn has_k(wg: &Warpgroup<'_>) -> bool {
    wg.index() == 0
}

/// The factor of this warpgroup's own rows beside their norms.
fn scale_of(wg: &Warpgroup<'_>, p: &PrepParams) -> f32 {
    if has_k(wg) { 1.0 } else { p.scale }
}

/// What needs no slab: norms of whole rows, beta, empty scores.
fn rows_and_steps<E: OperandElement>(wg: &mut Warpgroup<'_>, p: &PrepParams, at: &Place, t: &Tiles<E>) {
    let k = p.tables.sizes.k as usize;
    let norm = t.norm(wg);
    if p.l2norm != 0 {
        let source = if has_k(wg) { &p.k } else { &p.q };
        wg.inverse_norms(norm, at.rows(p, source, 0, k), NORM_EPSILON);
    } else {
        wg.fill(norm, |_, _| 1.0);
    }
    wg.fill(t.scores, |_, _| 0.0);
    if has_k(wg) {
        load_beta(wg, p, at, t.beta);
        wg.sync();
        wg.convert(t.beta_floored, t.beta, floored_beta::<E>);
        if p.records.factors.is_present() {
            if p.l2norm != 0 {
                wg.fill(t.growth, |_, _| 1.0);
            } else {
                wg.inverse_norms(t.growth, at.rows(p, &p.k, 0, k), 0.0);
                wg.sync();
                wg.map(t.growth, |_, _, x| cut::square_from_inverse(x));
            }
            wg.fill(t.factor, |_, _| 0.0);
            wg.sync();
            wg.combine(t.growth, t.beta, |square, beta| cut::growth(beta * square));
        }
    }
}

/// beta of the chunk's tokens, activated.
pub(crate) fn load_beta(wg: &mut Warpgroup<'_>, p: &PrepParams, at: &Place, column: Shared<f32>) {
    let factor = p.beta_factor;
    wg.load_map(column, at.steps(p, &p.beta), 0.0, |x| if factor == 0.0 { x } else { factor * sigmoid(x) });
}

/// Rows of k (first warpgroup) and of q (second), normalised and scaled unless products take them as given; both share the decays.
fn load_slab<G: Gate, E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &PrepParams,
    at: &Place,
    t: &Tiles<E>,
    channel: usize,
) {
    let (tile, source) = if has_k(wg) { (t.k, &p.k) } else { (t.q, &p.q) };
    wg.load(tile, at.rows(p, source, channel, tile.cols()));
    if !G::GIVEN_ROWS {
        wg.sync();
        wg.scale_rows(tile, t.norm(wg), scale_of(wg, p));
    }
    if G::PER_CHANNEL || channel == 0 {
        let (first, rows) = share_of(t.decay.rows(), wg.count(), wg.index());
        if rows > 0 {
            let valid = at.len.saturating_sub(first).min(rows);
            let source = G::log_decay(p, at.token + first.min(at.len), valid, at.head, channel, t.decay.cols());
            G::load_decay(wg, p, t.decay.row_range(first, rows), source, at.head, channel);
        }
    }
}

/// This slab's share of the scores, and its columns of qg, kg and decay.
fn scores_of_slab<G: Gate, E: OperandElement>(
    wg: &mut Warpgroup<'_>,
    p: &PrepParams,
    at: &Place,
    t: &Tiles<E>,
    channel: usize,
) {
    let (c, width) = (t.k.rows(), t.k.cols());
    let left_rows = if has_k(wg) { t.k } else { t.q };
    G::add_scores(
        wg,
        &ScoreTiles {
            scores: t.scores,
            left: left_rows,
            right: t.k,
            decay: t.decay,
            left_operand: t.left,
            right_operand: t.right,
        },
    );
    if G::GIVEN_ROWS {
        // Operands of the products were copied before a barrier; qg and kg are rounded once.
        wg.scale_rows(left_rows, t.norm(wg), scale_of(wg, p));
        wg.sync();
    }
    if has_k(wg) {
        if p.records.factors.is_present() && (G::PER_CHANNEL || channel == 0) {
            wg.raise_to_row_maxima(t.factor, t.decay);
        }
        wg.scale_suffix(t.left, t.k, t.decay, c);
        wg.total_decay(t.total, t.decay);
        wg.sync();
        wg.store(p.records.kg(at.chunk, at.head).columns(channel, width), t.left);
        wg.store(p.records.decay(at.chunk, at.head).columns(channel, width), t.total);
    } else {
        wg.scale_prefix(t.left, t.q, t.decay, c);
        wg.sync();
        wg.store(p.records.qg(at.chunk, at.head).columns(channel, width), t.left);
    }
}

/// First warpgroup: A' from its scores. Second: its scores are Aqk.
fn solve<G: Gate, E: OperandElement>(wg: &mut Warpgroup<'_>, p: &PrepParams, at: &Place, t: &Tiles<E>) {
    G::finish_scores(wg, t.scores, t.decay, [t.norm(wg), t.norms[0]], scale_of(wg, p));
    wg.sync();
    if has_k(wg) {
        if let Some(given) = &t.given {
            wg.scale_prefix(given.prefix, t.norms[0], t.decay, t.scores.rows());
        }
        wg.scale_rows(t.scores, t.beta, 1.0);
        wg.sync();
        invert::<E>(wg, t.scores);
        let mut a = Acc::load(wg, t.scores);
        a.scale_columns(wg, t.beta_floored.t());
        a.store(wg, t.a);
        if let Some(given) = &t.given {
            a.scale_columns(wg, given.prefix.t());
            a.store(wg, given.a);
        }
        wg.sync();
        wg.store(p.records.a(at.chunk, at.head), t.a);
        if p.records.factors.is_present() {
            wg.combine(t.factor, t.growth, cut::token_factor);
            wg.sync();
            wg.total_decay(t.factors.columns(0, 1), t.factor);
            wg.total_decay(t.factors.columns(1, 1), t.growth);
            wg.sync();
            wg.map(t.factors, |_, _, x| if x < cut::LEAST { cut::LEAST } else { x });
            wg.sync();
            wg.store(p.records.factors(at.chunk, 1, at.head), t.factors);
        }
    } else {
        wg.store(p.records.aqk(at.chunk, at.head), t.scores);
    }
}

/// The inverse of I + Akk, in place, with barriers behind it. For operands of bf16 only blocks of 16 on the diagonal are inverted by
/// substitution, and those below them by products, `[[A00, 0], [-A11 L10 A00, A11]]`, whose operands are rounded to TF32 as tensor cores
/// would read them: in proportion to the rounding of A' that is little, but not so little that it could be left to one body.
fn invert<E: OperandElement>(wg: &mut Warpgroup<'_>, a: Shared<f32>) {
    let c = a.rows();
    if !matches!(E::CODE, DtypeCode::Bf16) {
        wg.invert_unit_lower(a);
        wg.sync();
        return;
    }
    let mut first = 0;
    while first < c {
        wg.invert_unit_lower(a.part(first, first, 16, 16));
        first += 16;
    }
    wg.sync();
    wg.map(a, |_, _, x| tf32(x));
    wg.sync();
    let mut span = 16;
    while span < c {
        let mut first = 0;
        while first < c {
            let below = a.part(first + span, first, span, span);
            let mut product = Acc::zeros(span, span);
            product.mma(wg, below, a.part(first, first, span, span));
            replace(wg, below, product);
            let mut product = Acc::zeros(span, span);
            product.mma_sub(wg, a.part(first + span, first + span, span, span), below);
            replace(wg, below, product);
            first += 2 * span;
        }
        span *= 2;
    }
}

/// Stores what a tile was an operand of in its place, in TF32. Barriers around it.
fn replace(wg: &mut Warpgroup<'_>, tile: Shared<f32>, product: Acc) {
    wg.sync();
    product.store(wg, tile);
    wg.sync();
    wg.map(tile, |_, _, x| tf32(x));
    wg.sync();
}

/// w = A' (k exp G), or (A' diag(|k|^-1 exp G)) k of rows as given, each warpgroup for its own columns of every slab.
fn write_w<G: Gate, E: OperandElement>(wg: &mut Warpgroup<'_>, p: &PrepParams, at: &Place, t: &Tiles<E>, slab: usize) {
    let (c, k) = (t.k.rows(), p.tables.sizes.k as usize);
    let mut channel = 0;
    while channel < k {
        let width = (k - channel).min(slab);
        let (first, own) = share_of(width, wg.count(), wg.index());
        let from = channel + first;
        let kt = t.k.columns(first, own);
        let decay = if G::PER_CHANNEL { t.decay.columns(first, own) } else { t.decay };
        // With one slab, k and the decays are still there.
        if own > 0 && k > slab && !G::GIVEN_ROWS {
            wg.load(kt, at.rows(p, &p.k, from, own));
            if G::PER_CHANNEL {
                let source = G::log_decay(p, at.token, at.len, at.head, from, own);
                G::load_decay(wg, p, decay, source, at.head, from);
            }
            wg.sync();
            wg.scale_rows(kt, t.norms[0], 1.0);
            wg.sync();
        }
        if own > 0 {
            let (a, operand) = if let Some(given) = &t.given {
                let operand = t.right.columns(first, own);
                if k > slab {
                    wg.load(operand, at.rows(p, &p.k, from, own));
                    wg.sync();
                }
                (given.a, operand)
            } else {
                let operand = t.left.columns(0, own);
                wg.scale_prefix(operand, kt, decay, c);
                wg.sync();
                (t.a, operand)
            };
            let mut w = Acc::zeros(c, own);
            w.mma(wg, a, operand);
            w.store_global(wg, p.records.w(at.chunk, at.head).columns(from, own));
        }
        // The last slab may be narrower, and then its columns fall to other warpgroups.
        wg.sync_block();
        channel += width;
    }
}
