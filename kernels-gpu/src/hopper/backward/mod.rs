//! The backward's kernels for Hopper: `states` and `scan`, walks over a segment's chunks, and [`grad`].
//!
//! They hand images to each other:
//!
//! * `states`, `d_states`: of each chunk, head and block of 64 columns of V an image (64 rows = V, 128 columns = K), so that the
//!   images of a tensor lie where the elements of `[chunks, HV, V, K]` would;
//! * `v_new`, `d_v_new`: of each chunk, head and block of 64 columns of V a panel (64 rows = tokens, 64 columns = V), with zeros in
//!   the rows behind a partial chunk. [`value_panels_len`] says how many elements that makes.

#[cfg(any(target_arch = "nvptx64", emulated))]
mod feed;
pub mod grad;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod pipeline;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod results;
#[cfg(any(target_arch = "nvptx64", emulated))]
pub mod scan;
#[cfg(any(target_arch = "nvptx64", emulated))]
pub mod states;
pub mod walk;

use super::{CHANNELS, CHUNK};

/// Elements of `v_new` and of `d_v_new` for `chunks` chunks and `hv` heads of V = 128 channels.
pub const fn value_panels_len(chunks: usize, hv: usize) -> usize {
    chunks * hv * CHANNELS * CHUNK
}
