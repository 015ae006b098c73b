//! Operands of the gradients of a chunk's products between tokens: [`Warpgroup::gated_gradients`] and
//! [`Warpgroup::diagonal_gradients`].
//!
//! A product of row i (of q or k) with row j (of k) carries the decay exp(G_i - G_j) of each channel, and so does its gradient.
//! Its share of the gradient of the log decays is the same number for every token between the two, j < s <= i. It is
//! summed that way round, over the pairs around each s: as differences of sums over rows it would lose digits.
//!
//! [`Warpgroup::gated_gradients`]: super::Warpgroup::gated_gradients
//! [`Warpgroup::diagonal_gradients`]: super::Warpgroup::diagonal_gradients

use super::Shared;

/// f32 tiles `[C, channels]`; the decay may have one column for all channels.
#[derive(Clone, Copy)]
pub struct Pairs {
    /// Gradient of q, added to.
    pub dq: Shared<f32>,
    /// Gradient of k, added to.
    pub dk: Shared<f32>,
    /// Gradient of the log decays, added to.
    pub dg: Shared<f32>,
    /// Work space: gradients of rows of q, before the decay.
    pub row_q: Shared<f32>,
    /// Work space: gradients of rows of k on the left of a product, before the decay. Afterwards k times the gradient.
    pub row_k: Shared<f32>,
    /// Work space: gradients of rows of k on the right of a product, before the decay.
    pub col_k: Shared<f32>,
    /// q.
    pub q: Shared<f32>,
    /// k.
    pub k: Shared<f32>,
    /// exp(g).
    pub decay: Shared<f32>,
}

impl Pairs {
    /// The first `channels` columns of each tile.
    #[inline(always)]
    pub fn narrow(&self, channels: usize) -> Self {
        let first = |tile: &Shared<f32>| tile.columns(0, if tile.cols() < channels { tile.cols() } else { channels });
        Self {
            dq: first(&self.dq),
            dk: first(&self.dk),
            dg: first(&self.dg),
            row_q: first(&self.row_q),
            row_k: first(&self.row_k),
            col_k: first(&self.col_k),
            q: first(&self.q),
            k: first(&self.k),
            decay: first(&self.decay),
        }
    }
}
