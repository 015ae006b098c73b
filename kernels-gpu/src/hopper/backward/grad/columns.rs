//! A thread's columns: loads, norms, decays, and the operands that are made of them.

use cuda_std::{ptx, thread, warp};

use super::body::*;
use super::bring::{Item, bring_rest};
use super::gates::decays;
use super::stage::pair_at;
use crate::gate::Gate;
use crate::hopper::{PANEL, repeat, sums, unpack};
use crate::params::GradParams;
use crate::prep::NORM_EPSILON;

/// Two channels of 8 tokens.
pub(super) struct Columns {
    /// As given, pairs of bf16; zeros beyond the chunk.
    pub q: [u32; 8],
    pub k: [u32; 8],
    /// exp g; 1 beyond the chunk.
    pub e: [[f32; 2]; 8],
}

/// Sums over products of tokens of different blocks, but for dq: of k, as given, where it is the left row and where it is the right
/// column. What dg gets from them follows from the sums alone.
pub(super) struct Sums {
    pub rows: [[f32; 2]; 8],
    pub columns: [[f32; 2]; 8],
}

/// A thread's gradients, but for dq.
pub(super) struct Gradients {
    /// Of k as given, as if the factors of rows were constants.
    pub dk: [[f32; 2]; 8],
    /// Of g; where it is one number for all channels, of both channels in the first place.
    pub dg: [[f32; 2]; 8],
    /// Of each token, over the two channels: k times its gradient as the left row of products with itself.
    pub of_k: [f32; 8],
}

/// Has these sums made here, and not where they are used at last: until then everything that they are made of would have to be
/// kept.
#[inline(always)]
pub(super) fn pin(x: &mut [[f32; 2]; 8]) {
    let mut flat = [0f32; 16];
    repeat!(I in 8 => {
        flat[2 * I] = x[I][0];
        flat[2 * I + 1] = x[I][1];
    });
    ptx::computed(&mut flat);
    repeat!(I in 8 => { x[I] = [flat[2 * I], flat[2 * I + 1]]; });
}

impl Gradients {
    /// [`pin`] of all sums.
    #[inline(always)]
    pub fn pin<G: Gate>(&mut self) {
        pin(&mut self.dk);
        if G::PER_CHANNEL {
            pin(&mut self.dg);
        } else {
            let mut flat = [0f32; 8];
            repeat!(I in 8 => { flat[I] = self.dg[I][0]; });
            ptx::computed(&mut flat);
            repeat!(I in 8 => { self.dg[I] = [flat[I], 0.0]; });
        }
        ptx::computed(&mut self.of_k);
    }
}

/// Where this thread's sum for dq of token `I` (of q as given, as if the factors of rows were constants) waits: it is needed too seldom to
/// hold registers. The gradient around the chunk lay there.
#[inline(always)]
fn waiting<const I: usize>(at: &Place) -> u32 {
    (pair_at(at.base, 8 * at.s, at.channel) ^ ((I as u32 % 4) << 5)) + AROUND_Q + I as u32 * 512
}

/// Begins dq of token `I`.
///
/// # Safety
/// This thread has read the gradient around the chunk.
#[inline(always)]
pub(super) unsafe fn begin_d_q<const I: usize>(at: &Place, x: [f32; 2]) {
    // SAFETY: this thread's own words.
    unsafe { ptx::st_shared_v2_f32(waiting::<I>(at), x[0], x[1]) };
}

/// dq of token `I`.
///
/// # Safety
/// This thread has begun it.
#[inline(always)]
pub(super) unsafe fn d_q<const I: usize>(at: &Place) -> [f32; 2] {
    // SAFETY: this thread's own words.
    unsafe { ptx::ld_shared_v2_f32(waiting::<I>(at)) }
}

#[inline(always)]
pub(super) fn times(a: [f32; 2], b: [f32; 2]) -> [f32; 2] {
    [a[0] * b[0], a[1] * b[1]]
}

#[inline(always)]
pub(super) fn plus(a: [f32; 2], b: [f32; 2]) -> [f32; 2] {
    [a[0] + b[0], a[1] + b[1]]
}

#[inline(always)]
pub(super) fn scaled(a: [f32; 2], by: f32) -> [f32; 2] {
    [a[0] * by, a[1] * by]
}

/// `a b + c`.
#[inline(always)]
pub(super) fn fused(a: [f32; 2], b: [f32; 2], c: [f32; 2]) -> [f32; 2] {
    [ptx::fma_rn_f32(a[0], b[0], c[0]), ptx::fma_rn_f32(a[1], b[1], c[1])]
}

/// `a . b + c` for what dg gets: of each channel, or where a gate is one number for all of them of both, in the first place.
#[inline(always)]
pub(super) fn dot<G: Gate>(a: [f32; 2], b: [f32; 2], c: [f32; 2]) -> [f32; 2] {
    if G::PER_CHANNEL { fused(a, b, c) } else { [ptx::fma_rn_f32(a[0], b[0], ptx::fma_rn_f32(a[1], b[1], c[0])), 0.0] }
}

#[inline(always)]
fn pack(a: [f32; 2]) -> u32 {
    ptx::cvt_rn_bf16x2_f32(a[1], a[0])
}

impl Columns {
    /// q and k of token `I`, as given.
    ///
    /// # Safety
    /// q was [parked](Self::park) by this thread.
    #[inline(always)]
    pub unsafe fn rows<const I: usize>(&self, at: &Place) -> [[f32; 2]; 2] {
        // SAFETY: by contract.
        let q = unsafe { ptx::ld_shared_u32(parked(at) + I as u32 * 128) };
        [unpack(q), self.right::<I>()]
    }

    /// k of token `I`, as given.
    #[inline(always)]
    pub fn right<const I: usize>(&self) -> [f32; 2] {
        unpack(self.k[I])
    }

    /// Puts q where only this thread reads it: it is not needed often enough to hold registers.
    ///
    /// # Safety
    /// Nobody reads dw any more.
    #[inline(always)]
    pub unsafe fn park(&self, at: &Place) {
        // SAFETY: this thread's own words.
        repeat!(I in 8 => { unsafe { ptx::st_shared_u32(parked(at) + I as u32 * 128, self.q[I]) }; });
    }
}

/// Where this thread's q of its first token is parked.
#[inline(always)]
fn parked(at: &Place) -> u32 {
    at.base + PARKED + at.half * PANEL + at.s * 1024 + at.lane * 4
}

/// Factors of the rows of q (its norm's, and the scale) and of k of token `I` of this thread.
///
/// # Safety
/// They were written before a barrier.
#[inline(always)]
pub(super) unsafe fn norms<const I: usize>(at: &Place) -> [f32; 2] {
    // SAFETY: by contract.
    unsafe { ptx::ld_shared_v2_f32(at.base + NORMS + (8 * at.s + I as u32) * 8) }
}

/// This thread's place in small rows `[8,128]` of blocks.
#[inline(always)]
pub(super) fn own_pair(at: &Place, rows: u32) -> u32 {
    at.base + rows + (at.s * 128 + at.channel) * 4
}

/// A pair of decays. Where they are equal the compiler shall know it: it makes one product of two.
///
/// # Safety
/// Written before a barrier.
#[inline(always)]
pub(super) unsafe fn decay_at<G: Gate>(from: u32) -> [f32; 2] {
    // SAFETY: by contract.
    unsafe { if G::PER_CHANNEL { ptx::ld_shared_v2_f32(from) } else { [ptx::ld_shared_f32(from); 2] } }
}

/// What two warps do while others make the factors of rows: decays between blocks and where spans begin and end, from those of
/// the blocks.
#[inline(always)]
unsafe fn decays_between_blocks<G: Gate>(at: &Place) {
    let pair = at.base + (at.thread % 64) * 8;
    let mut of = [[0f32; 2]; 8];
    // SAFETY: written before a barrier; one writer for each pair.
    unsafe {
        let store = |rows: u32, s: usize, x: [f32; 2]| ptx::st_shared_v2_f32(pair + rows + s as u32 * 512, x[0], x[1]);
        repeat!(I in 8 => { of[I] = decay_at::<G>(pair + TOTALS + I as u32 * 512); });
        let (mut before, mut after) = ([1f32; 2], [1f32; 2]);
        repeat!(I in 8 => {
            store(DECAY_BEFORE, I, before);
            before = times(before, of[I]);
            store(DECAY_AFTER, 7 - I, after);
            after = times(after, of[7 - I]);
        });
        let (mut before, mut after) = ([1f32; 2], [1f32; 2]);
        repeat!(I in 4 => {
            store(DECAY_TO_MIDDLE, 4 + I, after);
            after = times(after, of[4 + I]);
            store(DECAY_TO_MIDDLE, 3 - I, before);
            before = times(before, of[3 - I]);
        });
    }
}

/// This thread's channels in row `i` of 8 rows of a panel that begin at `rows`, a multiple of 1024: the permuted piece is `piece ^ i`.
/// `rows` is with the thread's place in row 0, see [`own`].
#[inline(always)]
pub(super) fn in_row(rows: u32, i: u32) -> u32 {
    (rows ^ (i << 4)) + i * 128
}

/// This thread's place in row 0 of a panel.
#[inline(always)]
pub(super) fn own(at: &Place) -> u32 {
    (at.lane / 4) * 16 + (at.lane % 4) * 4
}

/// Takes q, k and decays to registers, leaves norms and decays of blocks, and the image of k exp G. Contains barriers of the block.
///
/// # Safety
/// By all threads, after a barrier of the block behind the copies.
#[inline(always)]
pub(super) unsafe fn load<G: Gate>(p: &GradParams, at: &Place, item: &Item) -> Columns {
    let first = 8 * at.s;
    let given = at.base + first * 256 + at.channel * 2;
    let (mut q, mut k) = ([0u32; 8], [0u32; 8]);
    // SAFETY: rows were brought before a barrier.
    repeat!(I in 8 => { unsafe {
        q[I] = ptx::ld_shared_u32(given + Q_GIVEN + I as u32 * 256);
        k[I] = ptx::ld_shared_u32(given + K_GIVEN + I as u32 * 256);
    } });
    // SAFETY: as the function says.
    let e = unsafe { decays::<G>(p, at) };
    // Sums of squares over this warp's 64 channels: of q, then of k.
    let mut squares = [0f32; 16];
    let mut total = [1.0f32; 2];
    repeat!(I in 8 => {
        let ([a, b], [c, d]) = (unpack(q[I]), unpack(k[I]));
        squares[I] = ptx::fma_rn_f32(a, a, b * b);
        squares[I + 8] = ptx::fma_rn_f32(c, c, d * d);
        total = times(total, e[I]);
    });
    let columns = Columns { q, k, e };
    // SAFETY: whole warps; every word has one writer; barriers between writing and reading.
    unsafe {
        let sum = sums(squares, at.lane);
        if at.lane.is_multiple_of(2) {
            let number = at.lane / 2;
            let row = first + number % 8;
            ptx::st_shared_f32(at.base + SQUARE_SUMS + (number / 8) * 512 + row * 8 + at.half * 4, sum);
        }
        warp::sync();
        ptx::st_shared_v2_f32(own_pair(at, TOTALS), total[0], total[1]);
        thread::sync_threads();
        bring_rest::<G>(p, at, item);
        if at.thread < 128 {
            let [a, b] = ptx::ld_shared_v2_f32(at.base + SQUARE_SUMS + at.thread * 8);
            let norm = if p.prep.l2norm != 0 { ptx::rsqrt_approx_f32(a + b + NORM_EPSILON) } else { 1.0 };
            let norm = if at.thread < 64 { norm * p.prep.scale } else { norm };
            ptx::st_shared_f32(at.base + NORMS + (at.thread % 64) * 8 + (at.thread / 64) * 4, norm);
        } else if at.thread < 192 {
            decays_between_blocks::<G>(at);
        }
        warp::sync();
        thread::sync_threads();
        let mut decay = decay_at::<G>(own_pair(at, DECAY_BEFORE));
        let to = at.base + KB + at.half * PANEL + first * 128 + own(at);
        repeat!(I in 8 => {
            decay = times(decay, e[I]);
            let k = scaled(columns.right::<I>(), norms::<I>(at)[1]);
            ptx::st_shared_u32(in_row(to, I as u32), pack(times(k, decay)));
        });
    }
    columns
}

/// The number of block `s` of 8 tokens among the rows, or the columns, of the level of `bit`.
pub(super) const fn compact(s: u32, bit: u32) -> u32 {
    (s & (bit - 1)) | ((s >> 1) & !(bit - 1))
}

/// Decay of this thread's channels between its block and the boundary in the middle of its span, at the level of `BIT`: since it for rows,
/// up to it for columns.
///
/// # Safety
/// Decays of and between blocks were written before a barrier, and nothing is carried from the first level yet where that is asked for.
#[inline(always)]
pub(super) unsafe fn to_boundary<G: Gate, const BIT: u32>(at: &Place) -> [f32; 2] {
    // SAFETY: by contract.
    unsafe {
        match BIT {
            4 => decay_at::<G>(own_pair(at, DECAY_TO_MIDDLE)),
            // The block between, where there is one, is the other of its pair.
            2 if (at.s & 1 != 0) == (at.s & 2 != 0) => decay_at::<G>(own_pair(at, TOTALS) ^ 512),
            _ => [1.0; 2],
        }
    }
}

/// The operands of the three levels.
///
/// # Safety
/// By all threads; nobody reads what lay there before.
#[inline(always)]
pub(super) unsafe fn operands<G: Gate>(at: &Place, columns: &Columns) {
    // SAFETY: by contract.
    unsafe {
        operands_of::<G, 4>(at, columns);
        operands_of::<G, 2>(at, columns);
        operands_of::<G, 1>(at, columns);
    }
}

#[inline(always)]
unsafe fn operands_of<G: Gate, const BIT: u32>(at: &Place, columns: &Columns) {
    let first = 8 * compact(at.s, BIT);
    // SAFETY: one writer for each word; decays were written before a barrier.
    unsafe {
        let mut decay = to_boundary::<G, BIT>(at);
        if at.s & BIT != 0 {
            let to = at.base + rows_at(BIT) + at.half * PANEL + first * 128 + own(at);
            repeat!(I in 8 => {
                decay = times(decay, columns.e[I]);
                let [q, k] = columns.rows::<I>(at);
                let to = in_row(to, I as u32);
                ptx::st_shared_u32(to, pack(times(q, decay)));
                ptx::st_shared_u32(to + 32 * 128, pack(times(k, decay)));
            });
        } else {
            let to = at.base + columns_at(BIT) + at.half * (PANEL / 2) + first * 128 + own(at);
            repeat!(J in 8 => {
                const I: usize = 7 - J;
                if J > 0 {
                    decay = times(decay, columns.e[(I + 1) % 8]);
                }
                let k = columns.right::<I>();
                ptx::st_shared_u32(in_row(to, I as u32), pack(times(k, decay)));
            });
        }
    }
}
