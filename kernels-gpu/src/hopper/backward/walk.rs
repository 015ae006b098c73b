//! What the two walks have in common, and what each needs of a chunk.
//!
//! A block is one warpgroup that walks 64 columns of V with the state, or its gradient, in registers, as the forward's scan has it,
//! and one that feeds it and takes away what it leaves for `grad`.

use crate::hopper::{CHANNELS, IMAGE, PANEL, RECORD_A, RECORD_AQK, RECORD_KG, RECORD_QG, RECORD_W};
use crate::tile::{RESERVED_BYTES, SHARED_BYTES};

/// Warpgroups in a block of either walk: one walks, one feeds it.
pub const WARPGROUPS: usize = 2;

/// Chunks under way in a block.
pub const STAGES: u32 = 3;
/// Bytes of the operands of a chunk's first product: a panel and an image, neighbours in a record, in either order.
pub const FIRST_BYTES: u32 = PANEL + IMAGE;
/// Bytes of a result: an image of the state, a panel of values.
pub const RESULT_BYTES: u32 = IMAGE + PANEL;
/// Bytes of the four barriers of a stage, and of those of a result.
pub const BARRIER_BYTES: u32 = 32;

/// What a walk needs of each chunk, and how it lies in a stage: the operands of the first product, then those of the update, then
/// a panel of the caller's values.
pub trait Walk {
    /// Whether it goes from the last chunk to the first.
    const FROM_THE_END: bool;
    /// Where the operands of the first product begin in a record.
    const FIRST: u32;
    /// Where the images of the update lie in a record.
    const UPDATE: [u32; 2];
    /// How many of them there are.
    const UPDATES: u32;
    /// Whether the update reads the caller's values, too.
    const UPDATE_READS_VALUES: bool;
    /// Chunks whose results may wait for being taken away.
    const RESULTS: u32;

    /// Place of the panel of values in a stage.
    const VALUES: u32 = FIRST_BYTES + Self::UPDATES * IMAGE;
    /// Bytes of a stage.
    const STAGE: u32 = Self::VALUES + PANEL;
    /// Bytes of shared memory of a block: stages, results, the stages' decays, barriers.
    const SHARED: usize = RESERVED_BYTES
        + (STAGES * (Self::STAGE + CHANNELS as u32 * 4 + BARRIER_BYTES)
            + Self::RESULTS * (RESULT_BYTES + BARRIER_BYTES)) as usize;
}

/// The walk of `scan_states`: w and A', then kg.
pub struct Forwards;

impl Walk for Forwards {
    const FROM_THE_END: bool = false;
    const FIRST: u32 = RECORD_W;
    const UPDATE: [u32; 2] = [RECORD_KG, RECORD_KG];
    const UPDATES: u32 = 1;
    const UPDATE_READS_VALUES: bool = false;
    const RESULTS: u32 = 2;
}

/// The walk of `scan_back`: Aqk and kg, then qg and w.
pub struct Backwards;

impl Walk for Backwards {
    const FROM_THE_END: bool = true;
    const FIRST: u32 = RECORD_AQK;
    const UPDATE: [u32; 2] = [RECORD_QG, RECORD_W];
    const UPDATES: u32 = 2;
    const UPDATE_READS_VALUES: bool = true;
    const RESULTS: u32 = 1;
}

/// Bytes of shared memory of a block of `scan_states`.
pub const STATES_SHARED: usize = Forwards::SHARED;
/// Bytes of shared memory of a block of `scan_back`.
pub const SCAN_BACK_SHARED: usize = Backwards::SHARED;

const _: () = assert!(STATES_SHARED <= SHARED_BYTES && SCAN_BACK_SHARED <= SHARED_BYTES);
const _: () = assert!(RECORD_W + IMAGE == RECORD_A && RECORD_AQK + PANEL == RECORD_KG, "neighbours in a record");
