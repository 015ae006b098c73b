//! The stages of a block, their barriers, and which tokens a chunk has.

use cuda_std::ptx;

use crate::hopper::{CHANNELS, CHUNK, PANEL, SCAN_OUTPUT_BARRIERS, SCAN_STAGE_BARRIERS, scan_stage_bytes, scan_stages};
use crate::params::{Chunk, Segment, Tables};
use crate::tile::Warpgroup;

/// Columns of the state of one warpgroup.
pub(in crate::hopper) const COLUMNS: u32 = 64;
/// Threads of a warpgroup.
pub(in crate::hopper) const THREADS: u32 = 128;
/// Threads that take outputs away: the feeding warpgroup's last.
pub(super) const TAKERS: u32 = 64;

/// Shared addresses of the pipeline.
#[derive(Clone, Copy)]
pub(super) struct Pipeline<const N: usize> {
    /// Stages, each [`scan_stage_bytes`].
    pub(super) base: u32,
    /// A panel of each walking warpgroup.
    outputs: u32,
    /// Decay rows of the stages.
    decay: u32,
    /// Barriers of the stages, then of the outputs.
    barriers: u32,
}

/// Of a stage: w, A' and v have arrived.
pub(super) const FULL_FIRST: u32 = 0;
/// Of a stage: qg and Aqk have arrived.
pub(super) const FULL_OUTPUT: u32 = 8;
/// Of a stage: kg and decay have arrived.
pub(super) const FULL_UPDATE: u32 = 16;
/// Of a stage: w, A' and v are not needed any more.
pub(super) const EMPTY_FIRST: u32 = 24;
/// Of a stage: qg and Aqk are not needed any more.
pub(super) const EMPTY_OUTPUT: u32 = 32;
/// Of a stage: kg and decay are not needed any more.
pub(super) const EMPTY_UPDATE: u32 = 40;

/// Of a panel of outputs: they lie there.
pub(super) const DONE: u32 = 0;
/// Of a panel of outputs: they have been read.
pub(super) const TAKEN: u32 = 8;

/// A chunk's place in the pipeline.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) stage: u32,
    pub(super) barriers: u32,
    pub(super) decay: u32,
    /// Of the phase in which the stage is full. A wait for the phase before it passes at once the first time.
    pub(super) parity: u32,
}

/// Where a walking warpgroup's outputs of a chunk lie until they are taken away.
#[derive(Clone, Copy)]
pub(super) struct Output {
    pub(super) panel: u32,
    pub(super) barriers: u32,
    /// Of the phase in which the outputs lie there. A wait for the phase before it passes at once the first time.
    pub(super) parity: u32,
}

impl<const N: usize> Pipeline<N> {
    #[inline(always)]
    pub(super) fn new(base: u32) -> Self {
        let stages = scan_stages(N);
        let outputs = base + stages * scan_stage_bytes(N);
        let decay = outputs + N as u32 * PANEL;
        Self { base, outputs, decay, barriers: decay + stages * CHANNELS as u32 * 4 }
    }

    /// Makes the barriers; by one thread.
    ///
    /// # Safety
    /// The pipeline's memory is the block's and nobody uses it yet.
    #[inline(always)]
    pub(super) unsafe fn init(&self) {
        let walkers = 4 * N as u32;
        let mut stage = 0;
        while stage < scan_stages(N) {
            let at = self.barriers + SCAN_STAGE_BARRIERS * stage;
            // SAFETY: by contract.
            unsafe {
                // The thread that brings records, and the warp that brings v.
                ptx::mbarrier_init(at + FULL_FIRST, 2);
                ptx::mbarrier_init(at + FULL_OUTPUT, 1);
                ptx::mbarrier_init(at + FULL_UPDATE, 1);
                ptx::mbarrier_init(at + EMPTY_FIRST, walkers);
                ptx::mbarrier_init(at + EMPTY_OUTPUT, walkers);
                ptx::mbarrier_init(at + EMPTY_UPDATE, walkers);
            }
            stage += 1;
        }
        let mut walker = 0;
        while walker < N as u32 {
            let output = self.output(walker, 0);
            // SAFETY: by contract.
            unsafe {
                ptx::mbarrier_init(output.barriers + DONE, 4);
                ptx::mbarrier_init(output.barriers + TAKEN, TAKERS / 32);
            }
            walker += 1;
        }
        // SAFETY: orders this thread's writes.
        unsafe { ptx::fence_mbarrier_init() };
    }

    /// Chunk number `number`, counted over all items of the block.
    #[inline(always)]
    pub(super) fn place(&self, number: u32) -> Place {
        let (stage, turn) = (number % scan_stages(N), number / scan_stages(N));
        Place {
            stage: self.base + stage * scan_stage_bytes(N),
            barriers: self.barriers + SCAN_STAGE_BARRIERS * stage,
            decay: self.decay + stage * CHANNELS as u32 * 4,
            parity: turn & 1,
        }
    }

    /// Where walking warpgroup `walker` leaves its outputs of chunk number `number`.
    #[inline(always)]
    pub(super) fn output(&self, walker: u32, number: u32) -> Output {
        let barriers = self.barriers + SCAN_STAGE_BARRIERS * scan_stages(N) + SCAN_OUTPUT_BARRIERS * walker;
        Output { panel: self.outputs + walker * PANEL, barriers, parity: number & 1 }
    }
}

/// Chunks of an item that are walked in one go.
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// Number of the item's first chunk, counted over all items of the block.
    pub(super) number: u32,
    /// First chunk, counted from the segment's first, and the one behind the last.
    pub(super) first: u32,
    pub(super) end: u32,
    /// The one behind the item's last.
    pub(super) last: u32,
    /// Whether the columns are of M.
    pub(super) is_m: bool,
    /// Chunks of the segment whose outputs are corrected later and go to f32 scratch.
    pub(super) corrected: u32,
}

/// The tokens of a segment's chunks: they follow each other, and only the last chunk may be short.
#[derive(Clone, Copy)]
pub(in crate::hopper) struct Tokens {
    first: usize,
    chunks: u32,
    last_len: u32,
}

impl Tokens {
    #[inline(always)]
    pub(in crate::hopper) fn of(wg: &Warpgroup<'_>, tables: &Tables, segment: &Segment) -> Self {
        if segment.chunks == 0 {
            return Self { first: 0, chunks: 0, last_len: 0 };
        }
        let first: Chunk = wg.read(tables.chunks, segment.first_chunk as usize);
        let last: Chunk = wg.read(tables.chunks, (segment.first_chunk + segment.chunks - 1) as usize);
        Self { first: first.token as usize, chunks: segment.chunks, last_len: last.len }
    }

    /// First token and number of tokens of chunk `index`.
    #[inline(always)]
    pub(in crate::hopper) fn chunk(&self, index: u32) -> (usize, u32) {
        let len = if index + 1 == self.chunks { self.last_len } else { CHUNK as u32 };
        (self.first + index as usize * CHUNK, len)
    }
}
