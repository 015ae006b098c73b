//! A thread's columns: loads, norms, decays, and the operands that are made of them.

use cuda_std::{ptx, thread, warp};

use super::body::*;
use super::gates::{given, log2_decays};
use crate::gate::Gate;
use crate::hopper::{CHANNELS, PANEL, repeat, sums, unpack};
use crate::params::GradParams;
use crate::prep::NORM_EPSILON;

/// Two channels of 8 tokens: one panel's share of a thread's columns.
pub(super) struct Columns {
    /// As given, pairs of bf16; zeros beyond the chunk.
    pub q: [u32; 8],
    pub k: [u32; 8],
    /// exp g; 1 beyond the chunk.
    pub e: [[f32; 2]; 8],
}

/// Sums of the gradients of two channels.
pub(super) struct Gradients {
    /// Of scale q, normalised.
    pub dq: [[f32; 2]; 8],
    /// Of k, normalised.
    pub dk: [[f32; 2]; 8],
    /// Of g.
    pub dg: [[f32; 2]; 8],
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
    pub fn pin(&mut self, of_k: &mut [f32; 8]) {
        pin(&mut self.dq);
        pin(&mut self.dk);
        pin(&mut self.dg);
        ptx::computed(of_k);
    }
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

#[inline(always)]
fn pack(a: [f32; 2]) -> u32 {
    ptx::cvt_rn_bf16x2_f32(a[1], a[0])
}

impl Columns {
    /// q (normalised, with the scale) and k (normalised) of token `I`.
    ///
    /// # Safety
    /// The norms were written before a barrier.
    #[inline(always)]
    pub unsafe fn rows<const I: usize>(&self, at: &Place) -> [[f32; 2]; 2] {
        // SAFETY: by contract.
        let [q, k] = unsafe { ptx::ld_shared_v2_f32(at.base + NORMS + (8 * at.warp + I as u32) * 8) };
        [scaled(unpack(self.q[I]), q), scaled(unpack(self.k[I]), k)]
    }
}

/// Decays of this thread's channels in panel `HALF` over the blocks of 8 tokens from `first` to before `end`.
///
/// # Safety
/// The blocks' decays were written before a barrier.
#[inline(always)]
pub(super) unsafe fn decay_of<const HALF: u32>(at: &Place, first: u32, end: u32) -> [f32; 2] {
    let mut product = [1.0f32; 2];
    let from = at.base + TOTALS + at.channel(HALF) * 4;
    let mut block = first;
    while block < end {
        // SAFETY: by contract.
        product = times(product, unsafe { ptx::ld_shared_v2_f32(from + block * 512) });
        block += 1;
    }
    product
}

/// Place of this thread's channels in row `i` of its block of a panel: the permuted piece is `piece ^ i`.
#[inline(always)]
fn in_row(at: &Place, i: u32) -> u32 {
    (((at.lane / 4) ^ i) << 4) + (at.lane % 4) * 4
}

/// Loads q, k and decays of both panels' channels; leaves norms and decays of blocks, and the image of k exp G. Contains a
/// barrier of the block.
///
/// # Safety
/// By all threads.
#[inline(always)]
pub(super) unsafe fn load<G: Gate>(p: &GradParams, at: &Place) -> [Columns; 2] {
    // SAFETY: whole warps; every word has one writer; barriers between writing and reading.
    unsafe {
        let (mut low, mut high) = (rows_of::<0>(p, at), rows_of::<1>(p, at));
        decays::<G, 0>(p, at, &mut low);
        decays::<G, 1>(p, at, &mut high);
        // Of q, then of k.
        let mut squares = [0f32; 16];
        repeat!(I in 8 => {
            let ([a, b], [c, d]) = (unpack(low.q[I]), unpack(high.q[I]));
            squares[I] = a * a + b * b + c * c + d * d;
            let ([a, b], [c, d]) = (unpack(low.k[I]), unpack(high.k[I]));
            squares[I + 8] = a * a + b * b + c * c + d * d;
        });
        let sum = sums(squares, at.lane);
        let norm = if p.prep.l2norm != 0 { ptx::rsqrt_approx_f32(sum + NORM_EPSILON) } else { 1.0 };
        if at.lane % 2 == 0 {
            let number = at.lane / 2;
            let norm = if number < 8 { norm * p.prep.scale } else { norm };
            ptx::st_shared_f32(at.base + NORMS + (8 * at.warp + number % 8) * 8 + (number / 8) * 4, norm);
        }
        warp::sync();
        thread::sync_threads();
        k_exp_g::<0>(at, &low);
        k_exp_g::<1>(at, &high);
        [low, high]
    }
}

/// q and k.
#[inline(always)]
unsafe fn rows_of<const HALF: u32>(p: &GradParams, at: &Place) -> Columns {
    let sizes = &p.prep.tables.sizes;
    let h = sizes.h.max(1);
    let qk_head = at.head as u32 / (sizes.hv / h).max(1);
    let first = 8 * at.warp;
    let from = ((at.token * h as usize + qk_head as usize) * CHANNELS + at.channel(HALF) as usize) / 2;
    let stride = h as usize * CHANNELS / 2;
    let pair = |x: u64, i: u32| {
        let x = (x as *const u32).wrapping_add(from + (first + i) as usize * stride);
        // SAFETY: a row of this chunk, or nothing.
        unsafe { ptx::ld_global_nc_u32_if(x, (first + i < at.len) as u32) }
    };
    let mut columns = Columns { q: [0; 8], k: [0; 8], e: [[1.0; 2]; 8] };
    repeat!(I in 8 => { columns.q[I] = pair(p.prep.q.addr, I as u32); });
    repeat!(I in 8 => { columns.k[I] = pair(p.prep.k.addr, I as u32); });
    columns
}

/// Decays of tokens, and of the block.
#[inline(always)]
unsafe fn decays<G: Gate, const HALF: u32>(p: &GradParams, at: &Place, columns: &mut Columns) {
    // SAFETY: one writer for each pair.
    unsafe {
        let g = log2_decays::<G, HALF>(&p.prep, at, given::<G, HALF>(&p.prep, at));
        let mut total = [1.0f32; 2];
        repeat!(I in 8 => {
            columns.e[I] = [ptx::ex2_approx_ftz_f32(g[I][0]), ptx::ex2_approx_ftz_f32(g[I][1])];
            total = times(total, columns.e[I]);
        });
        ptx::st_shared_v2_f32(at.base + TOTALS + at.warp * 512 + at.channel(HALF) * 4, total[0], total[1]);
    }
}

/// The image of k exp G.
#[inline(always)]
unsafe fn k_exp_g<const HALF: u32>(at: &Place, columns: &Columns) {
    // SAFETY: one writer for each pair; norms and decays were written before a barrier.
    unsafe {
        let mut decay = decay_of::<HALF>(at, 0, at.warp);
        let to = at.base + KB + HALF * PANEL + 8 * at.warp * 128;
        repeat!(I in 8 => {
            decay = times(decay, columns.e[I]);
            let [_, k] = columns.rows::<I>(at);
            ptx::st_shared_u32(to + I as u32 * 128 + in_row(at, I as u32), pack(times(k, decay)));
        });
    }
}

/// The number of block `s` of 8 tokens among the rows, or the columns, of the level of `bit`.
pub(super) const fn compact(s: u32, bit: u32) -> u32 {
    (s & (bit - 1)) | ((s >> 1) & !(bit - 1))
}

/// Decay of this thread's channels between its block and the boundary in the middle of its span, at the level of `BIT`: since
/// it for rows, up to it for columns.
///
/// # Safety
/// As [`decay_of`].
#[inline(always)]
pub(super) unsafe fn to_boundary<const BIT: u32, const HALF: u32>(at: &Place) -> [f32; 2] {
    let s = at.warp;
    let (start, end) = if s & BIT != 0 { (s & !(BIT - 1), s) } else { (s + 1, (s | (BIT - 1)) + 1) };
    // SAFETY: by contract.
    unsafe { decay_of::<HALF>(at, start, end) }
}

/// The operands of the level of `BIT`.
///
/// # Safety
/// By all threads; nobody reads what lay there before.
#[inline(always)]
pub(super) unsafe fn operands<const BIT: u32>(at: &Place, columns: &[Columns; 2]) {
    // SAFETY: by contract.
    unsafe {
        operands_of::<BIT, 0>(at, &columns[0]);
        operands_of::<BIT, 1>(at, &columns[1]);
    }
}

#[inline(always)]
unsafe fn operands_of<const BIT: u32, const HALF: u32>(at: &Place, columns: &Columns) {
    let first = 8 * compact(at.warp, BIT);
    // SAFETY: one writer for each word; norms and decays were written before a barrier.
    unsafe {
        let mut decay = to_boundary::<BIT, HALF>(at);
        if at.warp & BIT != 0 {
            let to = at.base + rows_at(BIT) + HALF * PANEL + first * 128;
            repeat!(I in 8 => {
                decay = times(decay, columns.e[I]);
                let [q, k] = columns.rows::<I>(at);
                let to = to + I as u32 * 128 + in_row(at, I as u32);
                ptx::st_shared_u32(to, pack(times(q, decay)));
                ptx::st_shared_u32(to + 32 * 128, pack(times(k, decay)));
            });
        } else {
            let to = at.base + columns_at(BIT) + HALF * (PANEL / 2) + first * 128;
            repeat!(J in 8 => {
                const I: usize = 7 - J;
                let [_, k] = columns.rows::<I>(at);
                ptx::st_shared_u32(to + I as u32 * 128 + in_row(at, I as u32), pack(times(k, decay)));
                decay = times(decay, columns.e[I]);
            });
        }
    }
}

/// Empty sums, but for what dg of all tokens has in common, from the states around the chunk: the sum over V of S D, times the
/// decay of the chunk.
///
/// # Safety
/// The sums over rows of S D were written before a barrier.
#[inline(always)]
pub(super) unsafe fn start<const HALF: u32>(at: &Place) -> Gradients {
    let mut sum = [0f32; 2];
    // SAFETY: by contract.
    let common = unsafe {
        repeat!(B in 8 => {
            sum = plus(sum, ptx::ld_shared_v2_f32(at.base + COMMON + B as u32 * 512 + at.channel(HALF) * 4));
        });
        times(sum, decay_of::<HALF>(at, 0, 8))
    };
    Gradients { dq: [[0.0; 2]; 8], dk: [[0.0; 2]; 8], dg: [common; 8] }
}
