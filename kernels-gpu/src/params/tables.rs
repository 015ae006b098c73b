//! Sizes of a problem, and the tables of chunks and segments that chunk kernels share.

use bytemuck::{Pod, Zeroable};

use super::{Array, Matrix, Tensor};

/// Sizes of the problem on this PE.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Sizes {
    /// Query/key heads.
    pub h: u32,
    /// Value heads, a multiple of `h`.
    pub hv: u32,
    /// Key channels, a multiple of 16.
    pub k: u32,
    /// Value channels, a multiple of 16.
    pub v: u32,
    /// Chunk length: 16, 32 or 64.
    pub chunk: u32,
    /// Zero.
    pub pad: u32,
}

/// One chunk: a run of at most `chunk` tokens of one segment.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Chunk {
    /// First token, counted over this PE's tokens.
    pub token: u32,
    /// Tokens, at least 1.
    pub len: u32,
}

/// [`Segment::receive_lane`], [`Segment::initial`] and [`Segment::final_row`] where there is none.
pub const NONE: u32 = u32::MAX;

/// One segment: what this PE holds of one sequence. Or a *part* of one, a run of its chunks that is walked by itself: parts
/// have lanes of their own, behind those of segments, which are rows of this PE's tables and not of the channel; what they have
/// to do with other PEs is the whole segment's, which is an entry too.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Segment {
    /// Its first chunk.
    pub first_chunk: u32,
    /// Number of chunks; 0 for an empty sequence.
    pub chunks: u32,
    /// Row of the initial state, or [`NONE`].
    pub initial: u32,
    /// Row of the final state, or [`NONE`].
    pub final_row: u32,
    /// Lane in which the state before the segment arrives, or [`NONE`] if the sequence starts here. (Of a part: in which it is
    /// merged, or [`NONE`] if the sequence starts with it.)
    pub receive_lane: u32,
    /// Lane of the segment among those that this PE sends (staging rows of the bulk mode), or [`NONE`]. (Of a part: in which
    /// the forward step has kept its transition, for the backward step.)
    pub send_lane: u32,
    /// Lane of the row of `own` in which the summary is left for this PE itself, or [`NONE`].
    pub own_lane: u32,
    /// Lane whose flag says that the state before it has been merged, or [`NONE`] if an earlier launch has done that.
    pub await_lane: u32,
    /// The segment's parts in the table of segments, in the order of the flow: the first; itself if it is walked whole.
    pub first_part: u32,
    /// How many; 1 if it is walked whole, and of a part.
    pub parts: u32,
    /// First of its sources in the table of sources (PEs whose summaries it merges, ascending).
    pub first_source: u32,
    /// Number of sources.
    pub sources: u32,
    /// First of its targets in the table of targets.
    pub first_target: u32,
    /// Number of targets.
    pub targets: u32,
}

/// Where a segment's summary goes.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Target {
    /// The consumer.
    pub pe: u32,
    /// Its lane.
    pub lane: u32,
}

/// What chunk kernels share: sizes and the tables of chunks and segments.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Tables {
    /// Sizes.
    pub sizes: Sizes,
    /// Of [`Chunk`].
    pub chunks: Array,
    /// Of [`Segment`].
    pub segments: Array,
    /// Of u32: ranks.
    pub sources: Array,
    /// Of [`Target`].
    pub targets: Array,
}

/// What `prep` computes for every chunk and value head, and the scan reads.
///
/// `operands` holds for each (chunk, head) one contiguous record
/// `w [C,K] | A' [C,C] | qg [C,K] | Aqk [C,C] | kg [C,K]`, see [`Records::w`] and its siblings.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Records {
    /// Operands in the kernels' element type.
    pub operands: Tensor,
    /// f32 `[chunks, HV, K]`: the decay over the whole chunk, exp(G_last).
    pub decay: Tensor,
    /// f32 `[HV, chunks, 2]`: bounds on what a chunk does to a state, see [`crate::cut`]; absent if nobody asks.
    pub factors: Tensor,
    /// Sizes, again, for the arithmetic of the layout.
    pub sizes: Sizes,
}

impl Records {
    /// Elements of one record.
    pub const fn record_len(sizes: &Sizes) -> usize {
        let (c, k) = (sizes.chunk as usize, sizes.k as usize);
        3 * c * k + 2 * c * c
    }

    #[inline(always)]
    fn part(&self, chunk: usize, head: usize, before_ck: usize, before_cc: usize, cols: usize) -> Matrix {
        let (c, k) = (self.sizes.chunk as usize, self.sizes.k as usize);
        let record = (chunk * self.sizes.hv as usize + head) * Self::record_len(&self.sizes);
        self.operands.matrix(record + before_ck * c * k + before_cc * c * c, c, cols, cols, 1)
    }

    /// w = A' (k exp G), `[C,K]`.
    #[inline(always)]
    pub fn w(&self, chunk: usize, head: usize) -> Matrix {
        self.part(chunk, head, 0, 0, self.sizes.k as usize)
    }
    /// A' = (I + Akk)^-1 diag(beta), `[C,C]`.
    #[inline(always)]
    pub fn a(&self, chunk: usize, head: usize) -> Matrix {
        self.part(chunk, head, 1, 0, self.sizes.chunk as usize)
    }
    /// qg = scale q exp G, `[C,K]`.
    #[inline(always)]
    pub fn qg(&self, chunk: usize, head: usize) -> Matrix {
        self.part(chunk, head, 1, 1, self.sizes.k as usize)
    }
    /// Aqk, scaled, `[C,C]`.
    #[inline(always)]
    pub fn aqk(&self, chunk: usize, head: usize) -> Matrix {
        self.part(chunk, head, 2, 1, self.sizes.chunk as usize)
    }
    /// kg = k exp(G_last - G), `[C,K]`.
    #[inline(always)]
    pub fn kg(&self, chunk: usize, head: usize) -> Matrix {
        self.part(chunk, head, 2, 2, self.sizes.k as usize)
    }
    /// Of `count` chunks from `chunk`: the factor and the growth of each, `[count,2]`.
    #[inline(always)]
    pub fn factors(&self, chunk: usize, count: usize, head: usize) -> Matrix {
        // (Not below 1, so that no check for 0 stands in the kernels.)
        let chunks = self.factors.len as usize / (2 * self.sizes.hv.max(1) as usize);
        self.factors.matrix(2 * (head * chunks + chunk), count, 2, 2, 1)
    }
    /// exp(G_last) as a row, `[1,K]`.
    #[inline(always)]
    pub fn decay(&self, chunk: usize, head: usize) -> Matrix {
        let k = self.sizes.k as usize;
        self.decay.matrix((chunk * self.sizes.hv as usize + head) * k, 1, k, k, 1)
    }
}
