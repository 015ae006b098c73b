//! `grad` on the tensor cores of Hopper: blocks of 512 threads, one on a multiprocessor, that stay and take one chunk and value head after
//! the other. Most of the next one's operands are brought while the end of this one is computed (see `bring`).
//!
//! It computes what [`crate::backward::grad`] computes, whose formulas and names hold here, from images: the records of `prep`;
//! `states` and `d_states`, an image (64 rows = V, 128 columns = K) for each 64 columns of V; `v_new` and `d_v_new`, a panel (64 rows
//! = tokens, 64 columns = V) for each, with zeros in the rows behind a partial chunk.
//!
//! A thread owns 8 tokens and two channels, of those 64 channels whose products its warpgroup makes: from the third phase to the norms of
//! rows the two halves of the channels wait for nobody but themselves. It has a column of decays, of q and k, and of the gradients dk and
//! dg in registers from the first
//! phase to the last (what is needed seldom, q and dq, waits in shared memory, where only that thread reads it). What products of
//! matrices add comes to it through shared memory:
//!
//! 1. over V: dP, dR v^T, do S, dR S, R D;
//! 2. through the inverse, by the second warpgroup: X, then dN; meanwhile dv by the first, A'^T dw by the others, which go on to
//! 3. the gradients around the chunk, gated by decays since its start and to its end;
//! 4. levels of 32, 16 and 8 tokens: a product of tokens that part at a level has its decay split at the boundary between
//!    them, so both factors are at most 1. Rows of a level are the 32 tokens with that bit, its columns those without;
//! 5. blocks of 8 x 8 pair by pair, by running products, in f32: no anchor, no quotient of decays.
//!
//! Scores are put behind the factors of the rows of q and k (norms and the scale) when they are stored, gradients around the chunk when
//! they are read, so all that follows takes q and k as given.
//!
//! dg is summed around each token: over rows from it on and columns before it, never as a difference. What a row or a column of products of
//! different blocks adds is its dot product with the sum of its gradients, so these are summed over all levels first. Sums of whole
//! blocks of 8 tokens are exchanged once, at the end: each block leaves what its rows, or columns, have come to before the level at which
//! another block parts from it.

#[cfg(any(target_arch = "nvptx64", emulated))]
mod body;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod bring;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod columns;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod finish;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod gates;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod pairs;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod products;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod rows;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod stage;

#[cfg(any(target_arch = "nvptx64", emulated))]
pub use body::grad;

use super::super::{IMAGE, PANEL};

/// Warpgroups in a block.
pub const WARPGROUPS: usize = 4;

/// Bytes of shared memory of a block: A' and the operands of levels, eleven images and panels, and the small rows behind them.
pub const SHARED: usize = (3 * PANEL + 10 * IMAGE) as usize + 33_152;
