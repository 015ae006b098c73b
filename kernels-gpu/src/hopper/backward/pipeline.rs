//! The stages and results of a block and their barriers.

use core::marker::PhantomData;

use cuda_std::ptx;

use super::walk::{BARRIER_BYTES, RESULT_BYTES, STAGES, Walk};
use crate::hopper::CHANNELS;
use crate::tile::RESERVED_BYTES;

/// Warps of the feeding warpgroup that bring values.
pub(super) const CARRIERS: u32 = 2;
/// Warps of the walking warpgroup.
const WALKERS: u32 = 4;

/// Of a stage: the first product's operands, the decay and the values have arrived.
pub(super) const FULL_FIRST: u32 = 0;
/// Of a stage: the update's operands have arrived.
pub(super) const FULL_UPDATE: u32 = 8;
/// Of a stage: the first product is done with its operands and the decay.
pub(super) const EMPTY_FIRST: u32 = 16;
/// Of a stage: the update is done with its operands.
pub(super) const EMPTY_UPDATE: u32 = 24;

/// Of a result: the image of the state lies there.
pub(super) const IMAGE_DONE: u32 = 0;
/// Of a result: the panel of values lies there.
pub(super) const PANEL_DONE: u32 = 8;
/// Of a result: the image has been read.
pub(super) const IMAGE_TAKEN: u32 = 16;
/// Of a result: the panel has been read.
pub(super) const PANEL_TAKEN: u32 = 24;

/// Shared addresses of a block.
pub(super) struct Pipeline<W> {
    /// Stages, each `W::STAGE` bytes.
    pub base: u32,
    /// Results, an image and a panel each.
    results: u32,
    /// Decay rows of the stages.
    decay: u32,
    /// Barriers of the stages, then of the results.
    barriers: u32,
    walk: PhantomData<W>,
}

/// A chunk's place.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub stage: u32,
    pub decay: u32,
    pub barriers: u32,
    /// Of the phase in which the stage is full. A wait for the phase before it passes at once the first time.
    pub parity: u32,
}

/// Where the results of a chunk lie until they are taken away.
#[derive(Clone, Copy)]
pub(super) struct Result {
    /// Of the image; the panel lies behind it.
    pub image: u32,
    pub barriers: u32,
    /// Of the phase in which the result lies there. A wait for the phase before it passes at once the first time.
    pub parity: u32,
}

impl<W: Walk> Pipeline<W> {
    /// Of the block whose dynamic shared memory begins at `base`.
    #[inline(always)]
    pub fn new(base: u32) -> Self {
        let base = base + RESERVED_BYTES as u32;
        let results = base + STAGES * W::STAGE;
        let decay = results + W::RESULTS * RESULT_BYTES;
        Self { base, results, decay, barriers: decay + STAGES * CHANNELS as u32 * 4, walk: PhantomData }
    }

    /// Makes the barriers; by one thread.
    ///
    /// # Safety
    /// The pipeline's memory is the block's and nobody uses it yet.
    #[inline(always)]
    pub unsafe fn init(&self) {
        let mut stage = 0;
        while stage < STAGES {
            let at = self.barriers + BARRIER_BYTES * stage;
            // SAFETY: by contract.
            unsafe {
                ptx::mbarrier_init(at + FULL_FIRST, 1 + CARRIERS);
                ptx::mbarrier_init(at + FULL_UPDATE, 1);
                ptx::mbarrier_init(at + EMPTY_FIRST, WALKERS);
                ptx::mbarrier_init(at + EMPTY_UPDATE, WALKERS);
            }
            stage += 1;
        }
        let mut result = 0;
        while result < W::RESULTS {
            let at = self.result_barriers(result);
            // SAFETY: by contract.
            unsafe {
                ptx::mbarrier_init(at + IMAGE_DONE, WALKERS);
                ptx::mbarrier_init(at + PANEL_DONE, WALKERS);
                ptx::mbarrier_init(at + IMAGE_TAKEN, 1);
                ptx::mbarrier_init(at + PANEL_TAKEN, 1);
            }
            result += 1;
        }
        // SAFETY: orders this thread's writes.
        unsafe { ptx::fence_mbarrier_init() };
    }

    #[inline(always)]
    fn result_barriers(&self, result: u32) -> u32 {
        self.barriers + BARRIER_BYTES * (STAGES + result)
    }

    /// Chunk number `number`, counted over all items of the block.
    #[inline(always)]
    pub fn place(&self, number: u32) -> Place {
        let (stage, turn) = (number % STAGES, number / STAGES);
        Place {
            stage: self.base + stage * W::STAGE,
            decay: self.decay + stage * CHANNELS as u32 * 4,
            barriers: self.barriers + BARRIER_BYTES * stage,
            parity: turn & 1,
        }
    }

    /// Results number `number`, counted over all items of the block that leave results.
    #[inline(always)]
    pub fn result(&self, number: u32) -> Result {
        let (result, turn) = (number % W::RESULTS, number / W::RESULTS);
        Result { image: self.results + result * RESULT_BYTES, barriers: self.result_barriers(result), parity: turn & 1 }
    }
}
