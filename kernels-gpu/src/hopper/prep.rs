//! `prep` on the tensor cores of Hopper: one block of 256 threads per chunk and value head, two blocks on a multiprocessor.
//!
//! Thread (s, c) owns tokens 16 s .. 16 s + 16 and channels 2 c, 2 c + 1: a column of the chunk's decays, so that every
//! factor is a running product in its registers. Scores of pairs of tokens in different blocks of 16 split the decay at
//! the boundary between them (both factors at most 1); inside a block of 16 at its ninth token, with the decay of a token held
//! at 2^-15 at least, so that factors stay finite: a score that this changes is below 2^-15 of its product.
//!
//! Products, each 64 rows: q and k of tokens 32 .. 64 with k of 0 .. 32; q and k of the odd blocks with k of the even ones;
//! q with k and k with k on the diagonal; w = A' (k exp G).

use cuda_std::{ptx, thread, warp};

use super::{
    CHANNELS, CHUNK, IMAGE, PANEL, RECORD, RECORD_AQK, RECORD_KG, RECORD_QG, by_columns, by_rows, column_step, repeat,
    row_step, unpack,
};
use crate::element::DtypeCode;
use crate::gate::Gate;
use crate::math::sigmoid;
use crate::params::{Chunk, GateForm, PrepParams, StampKind, Tensor};
use crate::tile::Warpgroup;

/// Tiles of operands. `[64,128]`: rows of q and k beyond the middle; of odd blocks; of q, of k, and columns of k, on the
/// diagonal. `[32,128]`: columns of k before the middle; of even blocks.
const ROWS_32: u32 = 0;
const ROWS_16: u32 = IMAGE;
const DIAGONAL_Q: u32 = 2 * IMAGE;
const DIAGONAL_K: u32 = 3 * IMAGE;
const DIAGONAL_COLUMNS: u32 = 4 * IMAGE;
const COLUMNS_32: u32 = 5 * IMAGE;
const COLUMNS_16: u32 = 5 * IMAGE + PANEL;
/// Panel of an image of 32 rows.
const HALF_PANEL: u32 = PANEL / 2;

/// After the scores the same memory holds: Akk and its inverse in f32 (rows of `PITCH`), scratch of four warps, Aqk, k exp G,
/// and w with A' behind it, as in a record.
const AKK: u32 = 0;
const INVERSE: u32 = 64 * PITCH * 4;
const SCRATCH: u32 = 2 * INVERSE;
const AQK: u32 = 5 * PANEL;
const KB: u32 = DIAGONAL_K;
const W: u32 = DIAGONAL_COLUMNS;
const A: u32 = COLUMNS_32;
/// f32 per row of Akk: rows shifted by four banks.
const PITCH: u32 = 68;
/// f32 per row of a warp's scratch, 32 x 8.
const SCRATCH_PITCH: u32 = 12;

/// Small rows behind the tiles: decays of the blocks of 16, sums of squares, 1 / norms, beta.
const TOTALS: u32 = 6 * IMAGE;
const SQUARES: u32 = TOTALS + 4 * CHANNELS as u32 * 4;
const NORMS: u32 = SQUARES + 2 * 64 * 2 * 4;
const BETA: u32 = NORMS + 2 * 64 * 4;

const _: () = assert!((BETA + 64 * 4) as usize == super::PREP_SHARED);
const _: () = assert!(SCRATCH + 4 * 32 * SCRATCH_PITCH * 4 <= AQK && AQK + PANEL <= KB);

/// Added to the sum of squares in the norm of q and k.
const NORM_EPSILON: f32 = 1e-6;
/// Floor of |beta| in A', as in [`crate::prep`].
const BETA_FLOOR: f32 = 1e-20;
/// Lowest decay of a token on the diagonal: 2^-15.
const DIAGONAL_FLOOR: f32 = 1.0 / 32768.0;

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// A thread's place.
#[derive(Clone, Copy)]
struct Place {
    chunk: usize,
    head: usize,
    token: usize,
    len: u32,
    /// Block of 16 tokens, and pair of channels.
    s: u32,
    c: u32,
    /// `c / 32`: which panel.
    half: u32,
    thread: u32,
    base: u32,
}

/// The grid: one block per chunk and value head, chunk by chunk.
#[inline(always)]
pub fn prep<G: Gate>(wg: &mut Warpgroup<'_>, p: &PrepParams) {
    let start = wg.clock();
    let (hv, block) = (p.tables.sizes.hv.max(1), wg.block() as u32);
    let (chunk, head) = ((block / hv) as usize, (block % hv) as usize);
    let Chunk { token, len } = wg.read(p.tables.chunks, chunk);
    let thread = thread::thread_idx_x();
    let base = wg.base();
    // From lane 0, so that the assembler knows what depends on the warp alone to be uniform.
    // SAFETY: by all threads.
    let warp = unsafe { warp::shuffle_idx(thread / 32, 0) };
    let (s, half) = (warp / 2, warp % 2);
    let at = Place { chunk, head, token: token as usize, len, s, half, c: 32 * half + thread % 32, thread, base };
    // SAFETY: the block's shared memory; barriers separate the phases; control flow is uniform in the warps.
    unsafe {
        let (k, e) = operands::<G>(p, &at);
        thread::sync_threads();
        scores(&at, &k, &e);
        thread::sync_threads();
        if thread < 128 {
            invert(&at);
        }
        thread::sync_threads();
        finish(p, &at);
    }
    let end = wg.clock();
    wg.stamp_block(&p.trace, StampKind::Prep, [start, end], [head as u32, chunk as u32], 0);
}

/// Global pair of bf16 of row `row` (token of the chunk) of `x`, or zeros beyond the chunk.
#[inline(always)]
unsafe fn pair<const FULL: bool>(x: *const u32, stride: usize, row: u32, len: u32) -> u32 {
    let x = x.wrapping_add(row as usize * stride);
    // SAFETY: by contract a pair of row `row`.
    unsafe { if FULL { ptx::ld_global_nc_u32(x) } else { ptx::ld_global_nc_u32_if(x, (row < len) as u32) } }
}

/// The pairs of 16 rows from `first`, zeros beyond the chunk; `FULL` if there is no row beyond it.
#[inline(always)]
unsafe fn pairs<const FULL: bool>(x: *const u32, stride: usize, first: u32, len: u32) -> [u32; 16] {
    let mut pairs = [0u32; 16];
    // SAFETY: by contract.
    repeat!(I in 16 => { pairs[I] = unsafe { pair::<FULL>(x, stride, first + I as u32, len) }; });
    pairs
}

/// Sums over the lanes of a warp of 16 numbers each: lane l gets that of number l / 2.
#[inline(always)]
unsafe fn sums(mut x: [f32; 16], lane: u32) -> f32 {
    macro_rules! halve {
        ($count:literal, $mask:literal, $($i:literal)*) => {
            let upper = lane & $mask != 0;
            $(
                let (keep, give) = if upper { (x[$i + $count], x[$i]) } else { (x[$i], x[$i + $count]) };
                // SAFETY: by all lanes.
                x[$i] = keep + unsafe { warp::shuffle_xor(give, $mask) };
            )*
        };
    }
    halve!(8, 16, 0 1 2 3 4 5 6 7);
    halve!(4, 8, 0 1 2 3);
    halve!(2, 4, 0 1);
    halve!(1, 2, 0);
    // SAFETY: by all lanes.
    x[0] + unsafe { warp::shuffle_xor(x[0], 1) }
}

/// Places of this thread's channels in rows 0 to 7 (mod 8) of a panel: the permuted piece of row `i` is `piece ^ i`.
#[inline(always)]
fn in_row(at: &Place) -> [u32; 8] {
    let lane = at.c % 32;
    let mut place = [0u32; 8];
    repeat!(I in 8 => { place[I] = (((lane / 4) ^ I as u32) << 4) + (lane % 4) * 4; });
    place
}

/// Loads, norms, decays, and the operands of the scores; stores qg, kg and the decay of the chunk. Returns this thread's k
/// (raw pairs) and decays.
#[inline(always)]
unsafe fn operands<G: Gate>(p: &PrepParams, at: &Place) -> ([u32; 16], [[f32; 2]; 16]) {
    let sizes = &p.tables.sizes;
    let (h, hv) = (sizes.h as usize, sizes.hv as usize);
    let group = (sizes.hv / sizes.h.max(1)).max(1);
    let (qk_head, lane) = ((at.head as u32 / group) as usize, ptx::laneid());
    let first = 16 * at.s;
    let channel = 2 * at.c as usize;
    let qk_at = ((at.token * h + qk_head) * CHANNELS + channel) / 2;
    let (q_from, k_from) = ((p.q.addr as *const u32).wrapping_add(qk_at), (p.k.addr as *const u32).wrapping_add(qk_at));
    let stride = h * CHANNELS / 2;
    let full = at.len == CHUNK as u32;
    // SAFETY: rows of this chunk.
    let (q, k) = unsafe {
        if full {
            (pairs::<true>(q_from, stride, first, at.len), pairs::<true>(k_from, stride, first, at.len))
        } else {
            (pairs::<false>(q_from, stride, first, at.len), pairs::<false>(k_from, stride, first, at.len))
        }
    };
    // SAFETY: as the functions say.
    let g = unsafe { log_decays::<G>(p, at, channel) };
    if at.thread < 64 {
        // SAFETY: a row of this chunk.
        let beta = if at.thread < at.len {
            unsafe { element(&p.beta, (at.token + at.thread as usize) * hv + at.head) }
        } else {
            f32::NAN
        };
        let beta = if p.beta_factor == 0.0 { beta } else { p.beta_factor * sigmoid(beta) };
        let beta = if at.thread < at.len { beta } else { 0.0 };
        // SAFETY: this thread's own word.
        unsafe { ptx::st_shared_f32(at.base + BETA + 4 * at.thread, beta) };
    }
    // Sums of squares, each warp over its 64 channels.
    let (mut squares_q, mut squares_k) = ([0f32; 16], [0f32; 16]);
    repeat!(I in 16 => {
        let ([a, b], [c, d]) = (unpack(q[I]), unpack(k[I]));
        squares_q[I] = a * a + b * b;
        squares_k[I] = c * c + d * d;
    });
    let mut e = g;
    repeat!(I in 16 => { e[I] = [ptx::ex2_approx_ftz_f32(g[I][0]), ptx::ex2_approx_ftz_f32(g[I][1])]; });
    let mut total = e[0];
    repeat!(I in 16 => { if I > 0 { total = [total[0] * e[I][0], total[1] * e[I][1]]; } });
    // SAFETY: whole warps; every word has one writer; barriers between writing and reading.
    unsafe {
        let (sum_q, sum_k) = (sums(squares_q, lane), sums(squares_k, lane));
        let half = (at.c / 32) * 4;
        if lane % 2 == 0 {
            let row = first + lane / 2;
            ptx::st_shared_f32(at.base + SQUARES + row * 8 + half, sum_q);
            ptx::st_shared_f32(at.base + SQUARES + 512 + row * 8 + half, sum_k);
        }
        ptx::st_shared_v2_f32(at.base + TOTALS + (at.s * 128 + 2 * at.c) * 4, total[0], total[1]);
        thread::sync_threads();
        if at.thread < 128 {
            let [a, b] = ptx::ld_shared_v2_f32(at.base + SQUARES + at.thread * 8);
            let norm = if p.l2norm != 0 { ptx::rsqrt_approx_f32(a + b + NORM_EPSILON) } else { 1.0 };
            let norm = if at.thread < 64 { norm * p.scale } else { norm };
            ptx::st_shared_f32(at.base + NORMS + at.thread * 4, norm);
        }
        thread::sync_threads();
    }
    // SAFETY: written before the barrier.
    let totals = unsafe {
        let of = |b: u32| ptx::ld_shared_v2_f32(at.base + TOTALS + (b * 128 + 2 * at.c) * 4);
        [of(0), of(1), of(2), of(3)]
    };
    let ones = [1.0f32; 2];
    let times = |a: [f32; 2], b: [f32; 2]| [a[0] * b[0], a[1] * b[1]];
    let before = match at.s {
        0 => ones,
        1 => totals[0],
        2 => times(totals[0], totals[1]),
        _ => times(times(totals[0], totals[1]), totals[2]),
    };
    let after = match at.s {
        0 => times(times(totals[1], totals[2]), totals[3]),
        1 => times(totals[2], totals[3]),
        2 => totals[3],
        _ => ones,
    };
    // Of rows beyond the middle, from the middle on; of columns before it, up to it.
    let from_middle = if at.s == 3 { totals[2] } else { ones };
    let to_middle = if at.s == 0 { totals[1] } else { ones };

    let record_row = at.chunk * hv + at.head;
    let record = (p.records.operands.addr as *mut u8).wrapping_add(record_row * RECORD as usize);
    if at.s == 0 {
        let all = times(before, times(totals[0], after));
        let to = (p.records.decay.addr as *mut f32).wrapping_add(record_row * CHANNELS + channel);
        // SAFETY: this chunk's row.
        unsafe { ptx::st_global_v2_f32(to, all[0], all[1]) };
    }

    // SAFETY: norms were written before the barrier; every word of the tiles and of the record has one writer.
    unsafe {
        let norm = |of: u32, i: u32| ptx::ld_shared_f32(at.base + NORMS + of + (first + i) * 4);
        let scaled = |pair: u32, norm: f32| {
            let [a, b] = unpack(pair);
            [a * norm, b * norm]
        };
        let pack = |a: [f32; 2]| ptx::cvt_rn_bf16x2_f32(a[1], a[0]);
        let clamp = |x: [f32; 2]| [x[0].max(DIAGONAL_FLOOR), x[1].max(DIAGONAL_FLOOR)];
        let inverse = |x: [f32; 2]| [ptx::rcp_approx_ftz_f32(x[0]), ptx::rcp_approx_ftz_f32(x[1])];
        // Row `i` of the diagonal's operands: decay since the ninth token `since`, its inverse `until`.
        let diagonal = |place: u32, i: u32, qn: [f32; 2], kn: [f32; 2], since: [f32; 2], until: [f32; 2]| {
            let place = place + at.base + at.half * PANEL + (first + i) * 128;
            ptx::st_shared_u32(place + DIAGONAL_Q, pack(times(qn, since)));
            ptx::st_shared_u32(place + DIAGONAL_K, pack(times(kn, since)));
            ptx::st_shared_u32(place + DIAGONAL_COLUMNS, pack(times(kn, until)));
        };
        let (odd, late) = (at.s % 2 == 1, at.s >= 2);
        let place = in_row(at);
        let (mut prefix, mut middle) = (ones, ones);
        repeat!(I in 16 => {
            let i = I as u32;
            prefix = if I == 0 { e[0] } else { times(prefix, e[I]) };
            let (qn, kn) = (scaled(q[I], norm(0, i)), scaled(k[I], norm(256, i)));
            let row = first + i;
            let to = (place[I % 8] + (RECORD_QG + at.half * PANEL + row * 128)) as usize;
            ptx::st_global_u32(record.wrapping_add(to).cast(), pack(times(qn, times(before, prefix))));
            if I >= 8 {
                if I > 8 {
                    middle = times(middle, clamp(e[I]));
                }
                diagonal(place[I % 8], i, qn, kn, middle, inverse(middle));
            }
            if late {
                let factor = times(from_middle, prefix);
                ptx::st_shared_u32(place[I % 8] + (at.base + ROWS_32 + at.half * PANEL + (row - 32) * 128), pack(times(qn, factor)));
                ptx::st_shared_u32(place[I % 8] + (at.base + ROWS_32 + at.half * PANEL + row * 128), pack(times(kn, factor)));
            }
            if odd {
                // q of blocks 1 and 3 in rows 0 .. 32, k in rows 32 .. 64.
                let to = 16 * (at.s / 2) + i;
                ptx::st_shared_u32(place[I % 8] + (at.base + ROWS_16 + at.half * PANEL + to * 128), pack(times(qn, prefix)));
                ptx::st_shared_u32(place[I % 8] + (at.base + ROWS_16 + at.half * PANEL + (to + 32) * 128), pack(times(kn, prefix)));
            }
        });
        let mut suffix = ones;
        middle = ones;
        repeat!(J in 16 => {
            const I: usize = 15 - J;
            let i = I as u32;
            if I < 15 {
                suffix = times(suffix, e[(I + 1) % 16]);
            }
            let kn = scaled(k[I], norm(256, i));
            let row = first + i;
            let to = (place[I % 8] + (RECORD_KG + at.half * PANEL + row * 128)) as usize;
            ptx::st_global_u32(record.wrapping_add(to).cast(), pack(times(kn, times(suffix, after))));
            if I < 8 {
                middle = times(middle, clamp(e[I + 1]));
                diagonal(place[I % 8], i, scaled(q[I], norm(0, i)), kn, inverse(middle), middle);
            }
            if !late {
                let factor = times(suffix, to_middle);
                ptx::st_shared_u32(place[I % 8] + (at.base + COLUMNS_32 + at.half * HALF_PANEL + row * 128), pack(times(kn, factor)));
            }
            if !odd {
                let to = 16 * (at.s / 2) + i;
                ptx::st_shared_u32(place[I % 8] + (at.base + COLUMNS_16 + at.half * HALF_PANEL + to * 128), pack(times(kn, suffix)));
            }
        });
        ptx::fence_proxy_async_shared();
    }
    (k, e)
}

/// An element of a tensor of any type.
#[inline(always)]
unsafe fn element(x: &Tensor, index: usize) -> f32 {
    // SAFETY: by contract inside the tensor.
    unsafe { x.matrix(index, 1, 1, 1, 1).load(0, 0) }
}

/// log2 of the decays of this thread's tokens and channels; 0 beyond the chunk.
#[inline(always)]
unsafe fn log_decays<G: Gate>(p: &PrepParams, at: &Place, channel: usize) -> [[f32; 2]; 16] {
    let hv = p.tables.sizes.hv as usize;
    let first = 16 * at.s;
    let mut g = [[0f32; 2]; 16];
    let wide = p.g.dtype() == DtypeCode::F32;
    // SAFETY: rows of this chunk.
    unsafe {
        if G::PER_CHANNEL {
            let from = (at.token * hv + at.head) * CHANNELS + channel;
            if wide {
                let from = (p.g.addr as *const f32).wrapping_add(from);
                repeat!(I in 16 => {
                    let row = first + I as u32;
                    let from = from.wrapping_add(row as usize * hv * CHANNELS);
                    let bits = ptx::ld_global_nc_v2_u32_if(from.cast(), (row < at.len) as u32);
                    g[I] = [f32::from_bits(bits[0]), f32::from_bits(bits[1])];
                });
            } else {
                let from = (p.g.addr as *const u32).wrapping_add(from / 2);
                let (stride, full) = (hv * CHANNELS / 2, at.len == CHUNK as u32);
                let g_pairs = if full {
                    pairs::<true>(from, stride, first, at.len)
                } else {
                    pairs::<false>(from, stride, first, at.len)
                };
                repeat!(I in 16 => { g[I] = unpack(g_pairs[I]); });
            }
        } else {
            repeat!(I in 16 => {
                let row = first + I as u32;
                if row < at.len {
                    let x = element(&p.g, (at.token + row as usize) * hv + at.head);
                    g[I] = [x, x];
                }
            });
        }
        if p.gate_form == GateForm::Given as u32 {
            repeat!(I in 16 => { g[I] = [g[I][0] * LOG2_E, g[I][1] * LOG2_E]; });
            return g;
        }
        let a = if p.a_log.is_present() { ptx::ex2_approx_ftz_f32(element(&p.a_log, at.head) * LOG2_E) } else { 1.0 };
        let bias = if !p.dt_bias.is_present() {
            [0.0; 2]
        } else if G::PER_CHANNEL {
            let from = at.head * CHANNELS + channel;
            [element(&p.dt_bias, from), element(&p.dt_bias, from + 1)]
        } else {
            [element(&p.dt_bias, at.head); 2]
        };
        if p.gate_form == GateForm::Softplus as u32 {
            let of = |x: f32| {
                let z = x * LOG2_E;
                let y = if z > 30.0 { z } else { ptx::lg2_approx_f32(1.0 + ptx::ex2_approx_ftz_f32(z)) };
                -a * y
            };
            repeat!(I in 16 => { g[I] = [of(g[I][0] + bias[0]), of(g[I][1] + bias[1])]; });
        } else {
            let (slope, bound) = (-a * LOG2_E, p.bound * LOG2_E);
            let of = |x: f32| bound * ptx::rcp_approx_ftz_f32(1.0 + ptx::ex2_approx_ftz_f32(slope * x));
            repeat!(I in 16 => { g[I] = [of(g[I][0] + bias[0]), of(g[I][1] + bias[1])]; });
        }
        repeat!(I in 16 => { if first + I as u32 >= at.len { g[I] = [0.0; 2]; } });
    }
    g
}

/// The scores: Aqk into its image, beta Akk into f32, and k exp G into its image.
#[inline(always)]
unsafe fn scores(at: &Place, k: &[u32; 16], e: &[[f32; 2]; 16]) {
    let base = at.base;
    let second = at.thread >= 128;
    let (mut far, mut near) = ([0f32; 16], [0f32; 32]);
    let (rows, columns, diagonal) =
        if second { (ROWS_16, COLUMNS_16, DIAGONAL_K) } else { (ROWS_32, COLUMNS_32, DIAGONAL_Q) };
    let (rows, columns) = (by_rows(base + rows), by_rows(base + columns));
    let (left, right) = (by_rows(base + diagonal), by_rows(base + DIAGONAL_COLUMNS));
    // SAFETY: operands were written before the barrier; registers are carried by the wait.
    unsafe {
        ptx::wgmma_fence();
        repeat!(J in 8 => {
            let (a, b) = (rows + row_step(J, PANEL), columns + row_step(J, HALF_PANEL));
            ptx::wgmma_m64n32k16_bf16_ss::<1, 1, 0, 0>(&mut far, a, b, (J != 0) as u32);
        });
        repeat!(J in 8 => {
            let (a, b) = (left + row_step(J, PANEL), right + row_step(J, PANEL));
            ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(&mut near, a, b, (J != 0) as u32);
        });
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group::<0>((&mut far, &mut near));
    }
    thread::sync_threads();
    let (lane, warp) = (ptx::laneid(), (at.thread % 128) / 32);
    let (row, column) = (lane / 4, 2 * (lane % 4));
    // A pair of scores of token `r` and the tokens from `c`: of q into Aqk, of k times beta into Akk.
    let put_q = |r: u32, c: u32, x: [f32; 2]| {
        let piece = (c / 8) ^ (r % 8);
        let to = base + AQK + r * 128 + (piece << 4) + (c % 8) * 2;
        // SAFETY: one writer for each pair.
        unsafe { ptx::st_shared_u32(to, ptx::cvt_rn_bf16x2_f32(x[1], x[0])) };
    };
    let put_k = |r: u32, c: u32, x: [f32; 2]| {
        // SAFETY: one writer for each pair; beta was written before a barrier.
        unsafe {
            let beta = ptx::ld_shared_f32(base + BETA + 4 * r);
            ptx::st_shared_v2_f32(base + AKK + (r * PITCH + c) * 4, beta * x[0], beta * x[1]);
        }
    };
    repeat!(J in 8 => {
        let j = J as u32;
        let (r0, r1, c) = (16 * warp + row, 16 * warp + row + 8, 8 * j + column);
        let on_diagonal = j / 2 == warp;
        // Above the diagonal there may be anything, also infinity.
        let keep = |r: u32, c: u32, x: f32, strict: bool| {
            let inside = if strict { c < r } else { c <= r };
            if on_diagonal && inside { x } else { 0.0 }
        };
        if j / 2 >= warp {
            let x0 = [near[4 * J], near[4 * J + 1]];
            let x1 = [near[4 * J + 2], near[4 * J + 3]];
            if !second {
                put_q(r0, c, [keep(r0, c, x0[0], false), keep(r0, c + 1, x0[1], false)]);
                put_q(r1, c, [keep(r1, c, x1[0], false), keep(r1, c + 1, x1[1], false)]);
            } else if on_diagonal {
                put_k(r0, c, [keep(r0, c, x0[0], true), keep(r0, c + 1, x0[1], true)]);
                put_k(r1, c, [keep(r1, c, x1[0], true), keep(r1, c + 1, x1[1], true)]);
            }
        }
    });
    repeat!(J in 4 => {
        let j = J as u32;
        let x0 = [far[4 * J], far[4 * J + 1]];
        let x1 = [far[4 * J + 2], far[4 * J + 3]];
        if !second {
            // Tokens from the middle on: q in warps 0 and 1, k in warps 2 and 3.
            let (r, c) = (32 + 16 * (warp % 2) + row, 8 * j + column);
            if warp < 2 {
                put_q(r, c, x0);
                put_q(r + 8, c, x1);
            } else {
                put_k(r, c, x0);
                put_k(r + 8, c, x1);
            }
        } else if j / 2 == warp % 2 {
            // Odd block 1 or 3 with the even block before it: q in warps 0 and 1, k in warps 2 and 3.
            let (r, c) = (32 * (warp % 2) + 16 + row, 32 * (warp % 2) + 8 * (j % 2) + column);
            if warp < 2 {
                put_q(r, c, x0);
                put_q(r + 8, c, x1);
            } else {
                put_k(r, c, x0);
                put_k(r + 8, c, x1);
            }
        }
    });
    // k exp G, from this thread's registers.
    let (first, place) = (16 * at.s, in_row(at));
    let mut prefix = [1.0f32; 2];
    // SAFETY: written before barriers; every word has one writer.
    unsafe {
        repeat!(B in 4 => {
            if B < 3 && (B as u32) < at.s {
                let t = ptx::ld_shared_v2_f32(base + TOTALS + (B as u32 * 128 + 2 * at.c) * 4);
                prefix = [prefix[0] * t[0], prefix[1] * t[1]];
            }
        });
        repeat!(I in 16 => {
            let i = I as u32;
            prefix = [prefix[0] * e[I][0], prefix[1] * e[I][1]];
            let norm = ptx::ld_shared_f32(base + NORMS + 256 + (first + i) * 4);
            let [a, b] = unpack(k[I]);
            let to = place[I % 8] + (base + KB + at.half * PANEL + (first + i) * 128);
            ptx::st_shared_u32(to, ptx::cvt_rn_bf16x2_f32(b * norm * prefix[1], a * norm * prefix[0]));
        });
        ptx::fence_proxy_async_shared();
    }
}

/// The inverse of I + Akk, unit lower triangular: of each 16 x 16 block by substitution, then of 32 x 32 and of all,
/// `[[A00, 0], [-A11 L10 A00, A11]]`. Products in TF32. By the first warpgroup.
#[inline(always)]
unsafe fn invert(at: &Place) {
    let (lane, warp) = (ptx::laneid(), at.thread / 32);
    let (l, a) = (at.base + AKK, at.base + INVERSE);
    let word = |m: u32, r: u32, c: u32| m + (r * PITCH + c) * 4;
    // SAFETY: scores were written before the barrier; every word has one writer; barriers in between.
    unsafe {
        if lane < 16 {
            let first = 16 * warp;
            let mut x = [0f32; 16];
            repeat!(I in 16 => {
                let mut sums = [if lane == I as u32 { 1.0f32 } else { 0.0 }, 0.0, 0.0, 0.0];
                repeat!(M in 4 => {
                    if 4 * M < I {
                        let row = ptx::ld_shared_v4_f32(word(l, first + I as u32, first + 4 * M as u32));
                        // Entries from the diagonal on are not read as numbers.
                        if 4 * M < I { sums[0] -= row[0] * x[4 * M]; }
                        if 4 * M + 1 < I { sums[1] -= row[1] * x[4 * M + 1]; }
                        if 4 * M + 2 < I { sums[2] -= row[2] * x[4 * M + 2]; }
                        if 4 * M + 3 < I { sums[3] -= row[3] * x[4 * M + 3]; }
                    }
                });
                x[I] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            });
            repeat!(I in 16 => { ptx::st_shared_f32(word(a, first + I as u32, first + lane), x[I]); });
        }
        ptx::bar_sync(1, 128);
        let scratch = at.base + SCRATCH + warp * 32 * SCRATCH_PITCH * 4;
        // 16 -> 32: warps 0 and 1 the first pair, 2 and 3 the second; each 8 columns.
        let (top, left) = (32 * (warp / 2), 32 * (warp / 2) + 8 * (warp % 2));
        let t = product::<2>(lane, word(l, top + 16, top), word(a, top, left), PITCH);
        put::<1>(lane, scratch, SCRATCH_PITCH, [t, t], false);
        warp::sync();
        let t = product::<2>(lane, word(a, top + 16, top + 16), scratch, SCRATCH_PITCH);
        put::<1>(lane, word(a, top + 16, left), PITCH, [t, t], true);
        ptx::bar_sync(1, 128);
        // 32 -> 64: each warp 8 columns.
        let left = 8 * warp;
        // A00 is block triangular, and its upper right block was never written: columns from 16 on start at row 16.
        let (low, high) = if warp < 2 {
            (
                product::<4>(lane, word(l, 32, 0), word(a, 0, left), PITCH),
                product::<4>(lane, word(l, 48, 0), word(a, 0, left), PITCH),
            )
        } else {
            (
                product::<2>(lane, word(l, 32, 16), word(a, 16, left), PITCH),
                product::<2>(lane, word(l, 48, 16), word(a, 16, left), PITCH),
            )
        };
        put::<2>(lane, scratch, SCRATCH_PITCH, [low, high], false);
        warp::sync();
        let low = product::<2>(lane, word(a, 32, 32), scratch, SCRATCH_PITCH);
        let high = product::<4>(lane, word(a, 48, 32), scratch, SCRATCH_PITCH);
        put::<2>(lane, word(a, 32, left), PITCH, [low, high], true);
    }
}

/// 16 x 8 product of a (rows of `PITCH`) and b (rows of `pitch`), over 8 `STEPS` inner elements.
#[inline(always)]
unsafe fn product<const STEPS: usize>(lane: u32, a: u32, b: u32, pitch: u32) -> [f32; 4] {
    let mut d = [0f32; 4];
    let (row, column) = (lane / 4, lane % 4);
    // SAFETY: by contract inside the matrices.
    unsafe {
        let tf32 = |x: u32| ptx::cvt_rna_tf32_f32(ptx::ld_shared_f32(x));
        repeat!(J in 4 => {
            if J < STEPS {
                let k = 8 * J as u32;
                let a = |r: u32, c: u32| tf32(a + ((row + r) * PITCH + k + column + c) * 4);
                let fragment = [a(0, 0), a(8, 0), a(0, 4), a(8, 4)];
                let b = |r: u32| tf32(b + ((k + column + r) * pitch + row) * 4);
                ptx::mma_m16n8k8_f32_tf32(&mut d, fragment, [b(0), b(4)]);
            }
        });
    }
    d
}

/// Stores `TILES` 16 x 8 tiles, one below the other, negated or not.
#[inline(always)]
unsafe fn put<const TILES: usize>(lane: u32, to: u32, pitch: u32, tiles: [[f32; 4]; 2], negate: bool) {
    let sign = if negate { -1.0 } else { 1.0 };
    let (row, column) = (lane / 4, 2 * (lane % 4));
    let store = |t: [f32; 4], first: u32| {
        let at = |r: u32| to + ((first + row + r) * pitch + column) * 4;
        // SAFETY: by contract inside the matrix, one writer for each word.
        unsafe {
            ptx::st_shared_v2_f32(at(0), sign * t[0], sign * t[1]);
            ptx::st_shared_v2_f32(at(8), sign * t[2], sign * t[3]);
        }
    };
    store(tiles[0], 0);
    if TILES > 1 {
        store(tiles[1], 16);
    }
}

/// A' and w, and the bulk stores of all images but qg and kg.
#[inline(always)]
unsafe fn finish(p: &PrepParams, at: &Place) {
    let base = at.base;
    let record_row = at.chunk * p.tables.sizes.hv as usize + at.head;
    let record = (p.records.operands.addr as *mut u8).wrapping_add(record_row * RECORD as usize);
    // SAFETY: one writer for each word; barriers and proxy fences before others read.
    unsafe {
        // A' = A diag(beta): 16 columns of a row each.
        let (row, first) = (at.thread / 4, 16 * (at.thread % 4));
        repeat!(J in 2 => {
            let column = first + 8 * J as u32;
            let x = ptx::ld_shared_v4_f32(base + INVERSE + (row * PITCH + column) * 4);
            let y = ptx::ld_shared_v4_f32(base + INVERSE + (row * PITCH + column + 4) * 4);
            let b = ptx::ld_shared_v4_f32(base + BETA + column * 4);
            let d = ptx::ld_shared_v4_f32(base + BETA + (column + 4) * 4);
            // Above the diagonal nothing was written.
            let entry = |x: f32, beta: f32, c: u32| {
                let beta = if beta.abs() < BETA_FLOOR { BETA_FLOOR } else { beta };
                if c <= row { x * beta } else { 0.0 }
            };
            let pair = |x0: f32, b0: f32, x1: f32, b1: f32, c: u32| {
                ptx::cvt_rn_bf16x2_f32(entry(x1, b1, c + 1), entry(x0, b0, c))
            };
            ptx::st_shared_v4_u32(
                base + A + row * 128 + (((column / 8) ^ (row % 8)) << 4),
                pair(x[0], b[0], x[1], b[1], column),
                pair(x[2], b[2], x[3], b[3], column + 2),
                pair(y[0], d[0], y[1], d[1], column + 4),
                pair(y[2], d[2], y[3], d[3], column + 6),
            );
        });
        ptx::fence_proxy_async_shared();
        thread::sync_threads();
        if at.thread == 0 {
            ptx::cp_async_bulk_global_shared(record.wrapping_add(RECORD_AQK as usize), base + AQK, PANEL);
            ptx::cp_async_bulk_commit_group();
        }
        // The first warp's lanes meet again before the product, which whole warps start.
        warp::sync();
        // w, each warpgroup 64 channels.
        let (half, warp, lane) = (at.thread / 128, (at.thread % 128) / 32, ptx::laneid());
        let (a, kb) = (by_rows(base + A), by_columns(base + KB + half * PANEL, PANEL));
        let mut w = [0f32; 32];
        ptx::wgmma_fence();
        repeat!(J in 4 => {
            let (a, b) = (a + row_step(J, PANEL), kb + column_step(J));
            ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 1>(&mut w, a, b, (J != 0) as u32);
        });
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group::<0>(&mut w);
        let matrix = lane / 8;
        let row = 16 * warp + lane % 8 + 8 * (matrix % 2);
        repeat!(J in 4 => {
            let piece = 2 * J as u32 + matrix / 2;
            ptx::stmatrix_x4(
                base + W + half * PANEL + row * 128 + ((piece ^ (row % 8)) << 4),
                ptx::cvt_rn_bf16x2_f32(w[8 * J + 1], w[8 * J]),
                ptx::cvt_rn_bf16x2_f32(w[8 * J + 3], w[8 * J + 2]),
                ptx::cvt_rn_bf16x2_f32(w[8 * J + 5], w[8 * J + 4]),
                ptx::cvt_rn_bf16x2_f32(w[8 * J + 7], w[8 * J + 6]),
            );
        });
        ptx::fence_proxy_async_shared();
        thread::sync_threads();
        if at.thread == 0 {
            // w and A' lie behind each other, here as in the record.
            ptx::cp_async_bulk_global_shared(record, base + W, IMAGE + PANEL);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group::<0>();
        }
    }
}
