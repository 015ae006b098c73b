//! The tile DSL: shared tiles, register tiles, global matrices, and collective operations on them.
//!
//! Rules that kernels follow on both targets:
//! * A block is one or more warpgroups that run the same body. Operations are collective over the
//!   warpgroup that calls them; control flow around them is uniform within it.
//! * A tile in shared memory may be read only after a barrier that follows its writes:
//!   [`Warpgroup::sync`] suffices if the same warpgroup wrote it, [`Warpgroup::sync_block`] otherwise.
//!   The same holds for writing what was read. Register tiles ([`Acc`]) need no barrier.
//! * Every warpgroup of a block allocates the same shared tiles in the same order, before its work loop.
//! * A shared tile's element type says how values are rounded when they are stored; products accumulate in f32.

mod convolution;
mod pairs;
mod put;

pub use convolution::{CONVOLUTION_CHANNELS, ConvolutionBack, ConvolutionRun, MAX_TAPS};
pub use pairs::Pairs;
pub use put::{Place, Put};

/// What [`Warpgroup::first_within`] finds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Within {
    /// Rows until the product is within the limit; one more than there are, if it never is.
    pub rows: u32,
    /// The product there; 0 if it never is.
    pub bound: f32,
    /// The product of all growths.
    pub growth: f32,
}

#[cfg(not(any(target_arch = "nvptx64", emulated)))]
pub mod host;
#[cfg(not(any(target_arch = "nvptx64", emulated)))]
pub use host::{Acc, OperandElement, Shared, Warpgroup, increment_acq_rel};

#[cfg(any(target_arch = "nvptx64", emulated))]
pub mod device;
#[cfg(any(target_arch = "nvptx64", emulated))]
pub use device::{Acc, DeviceElement as OperandElement, Shared, Warpgroup, increment_acq_rel};

/// Largest extent of a register tile in either direction.
pub const ACC_MAX: usize = 64;
/// Columns of [V | K] that one warpgroup of the scan owns; also the width of slabs of K.
pub const BLOCK_COLUMNS: usize = 64;
/// Shared memory that a block may use, in bytes (sm_90).
pub const SHARED_BYTES: usize = 227 * 1024;
/// Most warpgroups in a block.
pub const MAX_WARPGROUPS: usize = 4;

/// Bytes at the start of shared memory that the DSL keeps for itself: tickets, votes, elected results.
pub const RESERVED_BYTES: usize = 1024;

/// The row of a diagonal block of 16 at which [`splits_diagonal`] splits decays: the ninth.
pub const DIAGONAL_SPLIT: usize = 8;

/// Lowest decay of a token where decays are split inside a diagonal block: 2^-15.
pub const DIAGONAL_FLOOR: f32 = 1.0 / 32768.0;

/// Whether `Warpgroup::diagonal_scores` rounds operands to `E`. For bf16 they are the rows times their decay since the split row, and
/// the columns times their decay until it, with the decay of a token held at [`DIAGONAL_FLOOR`] at least: what tensor cores can
/// multiply, and so what a faster body of a kernel rounds too. A factor is 2^120 at most, so that rows of numbers
/// below 2^7 stay finite, and what the floor changes is below 2^-15 of its product. f16 cannot hold such factors and f32 does not round: there decays are running products, with no
/// quotient and so no overflow however strong the decay.
#[inline(always)]
pub const fn splits_diagonal<E: crate::element::Element>() -> bool {
    matches!(E::CODE, crate::element::DtypeCode::Bf16)
}

/// A decay, not below [`DIAGONAL_FLOOR`]; NaN stays.
#[inline(always)]
pub(crate) fn floored_decay(decay: f32) -> f32 {
    if decay < DIAGONAL_FLOOR { DIAGONAL_FLOOR } else { decay }
}

/// Elements between the rows of a shared tile: 16 bytes more than a row, against bank conflicts.
pub const fn padded_columns(cols: usize, element: usize) -> usize {
    cols + 16 / element
}

/// Bytes of a shared tile on the device.
pub const fn tile_bytes(rows: usize, cols: usize, element: usize) -> usize {
    (rows * padded_columns(cols, element) * element).next_multiple_of(128)
}

/// The share of `total` (a multiple of 16) that falls to part `index` of `parts`: start and length, both
/// multiples of 16.
pub const fn share_of(total: usize, parts: usize, index: usize) -> (usize, usize) {
    let units = total / 16;
    let (start, end) = (units * index / parts, units * (index + 1) / parts);
    (start * 16, (end - start) * 16)
}

#[cfg(test)]
mod tests {
    use super::share_of;

    #[test]
    fn shares_partition() {
        for total in (0..=256).step_by(16) {
            for parts in 1..=4 {
                let mut next = 0;
                for index in 0..parts {
                    let (start, len) = share_of(total, parts, index);
                    assert_eq!(start, next);
                    assert_eq!(len % 16, 0);
                    next = start + len;
                }
                assert_eq!(next, total);
            }
        }
    }
}
