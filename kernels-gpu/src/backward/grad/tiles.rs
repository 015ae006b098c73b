//! The shared tiles of `grad`, and where its columns of V lie.

use crate::backward::states::Columns;
use crate::gate::Gate;
use crate::params::{Chunk, GradParams, Matrix, Sizes, Tensor};
use crate::prep::Place;
use crate::tile::{BLOCK_COLUMNS, OperandElement, Pairs, Shared, Warpgroup};

/// Shared tiles.
pub(super) struct Tiles<E> {
    /// A', `[C,C]`.
    pub a: Shared<E>,
    /// dP, `[C,C]`.
    pub d_scores_q: Shared<f32>,
    /// X, then dN, `[C,C]`.
    pub d_scores_k: Shared<f32>,
    /// Columns of V, `[C,64]`, or squares.
    pub values: [Shared<E>; 2],
    /// Rows of S and D, or operands of one slab, `[64, slab]`.
    pub slabs: [Shared<E>; 3],
    /// q (with the scale in it), k, the decays and the gradients of one slab.
    pub pairs: Pairs,
    /// exp(G_last) of one slab, `[1, slab]`.
    pub total: Shared<f32>,
    /// What all tokens' decays of one slab have in common, `[1, slab]`.
    pub common: Shared<f32>,
    /// Columns of one value for each token, `[C,1]`.
    pub norms_q: Shared<f32>,
    pub norms_k: Shared<f32>,
    pub beta_floored: Shared<f32>,
    /// Sums for dbeta.
    pub d_beta: Shared<f32>,
    /// GDN: sums of dg over channels.
    pub d_decay: Shared<f32>,
    /// Sums for the gradient of A_log.
    pub d_a_log: Shared<f32>,
}

impl<E: OperandElement> Tiles<E> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn allocate<G: Gate>(wg: &mut Warpgroup<'_>, c: usize, slab: usize) -> Self {
        let (a, d_scores_q, d_scores_k) = (wg.shared(c, c), wg.shared(c, c), wg.shared(c, c));
        Self {
            a,
            d_scores_q,
            d_scores_k,
            values: [wg.shared(c, BLOCK_COLUMNS), wg.shared(c, BLOCK_COLUMNS)],
            slabs: [wg.shared(BLOCK_COLUMNS, slab), wg.shared(BLOCK_COLUMNS, slab), wg.shared(BLOCK_COLUMNS, slab)],
            pairs: Pairs {
                dq: wg.shared(c, slab),
                dk: wg.shared(c, slab),
                dg: wg.shared(c, slab),
                row_q: wg.shared(c, slab),
                row_k: wg.shared(c, slab),
                col_k: wg.shared(c, slab),
                q: wg.shared(c, slab),
                k: wg.shared(c, slab),
                decay: wg.shared(c, G::columns(slab)),
            },
            total: wg.shared(1, slab),
            common: wg.shared(1, slab),
            norms_q: wg.shared(c, 1),
            norms_k: wg.shared(c, 1),
            beta_floored: wg.shared(c, 1),
            d_beta: wg.shared(c, 1),
            d_decay: wg.shared(c, 1),
            d_a_log: wg.shared(c, 1),
        }
    }

    /// The first `width` channels of each tile that has channels.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn narrow(&self, width: usize) -> Self {
        let [s0, s1, s2] = self.slabs;
        Self {
            slabs: [s0.columns(0, width), s1.columns(0, width), s2.columns(0, width)],
            pairs: self.pairs.narrow(width),
            total: self.total.columns(0, width),
            common: self.common.columns(0, width),
            ..*self
        }
    }
}

/// Blocks of up to 64 columns of V.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn v_blocks(p: &GradParams) -> u32 {
    p.prep.tables.sizes.v.div_ceil(BLOCK_COLUMNS as u32)
}

/// A block of columns of V, of one chunk and head.
pub(super) struct ValueColumns {
    columns: Columns,
    chunk: Chunk,
    head: usize,
    /// Row of the states.
    row: usize,
    sizes: Sizes,
}

impl ValueColumns {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(p: &GradParams, at: &Place, block: u32) -> Self {
        let sizes = p.prep.tables.sizes;
        Self {
            columns: Columns::of_block(&sizes, block),
            chunk: Chunk { token: at.token as u32, len: at.len as u32 },
            head: at.head,
            row: at.chunk * sizes.hv as usize + at.head,
            sizes,
        }
    }

    /// Tiles for rows of V values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn tiles<E: OperandElement>(&self, t: &Tiles<E>) -> [Shared<E>; 2] {
        let [first, second] = t.values;
        [first.columns(0, self.columns.count), second.columns(0, self.columns.count)]
    }

    /// Rows of a tile for states.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn rows<E: OperandElement>(&self, tile: Shared<E>) -> Shared<E> {
        self.columns.rows(tile)
    }

    /// `[tokens, HV, V]`: `[len, columns]` of it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of(&self, x: &Tensor) -> Matrix {
        self.columns.values(&self.sizes, x, &self.chunk, self.head)
    }

    /// `[chunks, HV, V, K]`: `[columns, K]` of it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn state(&self, x: &Tensor) -> Matrix {
        self.columns.state(&self.sizes, x, self.row)
    }
}
