//! Loads, norms, and the operands of the scores.

use cuda_std::{ptx, thread, warp};

use super::decays::{given_f32, log_decays, parameters};
use super::factors::note_largest;
use super::*;
use half::bf16;

use crate::hopper::gate::{element, is_wide};

/// Places in shared memory of this thread's channels in its rows 0 to 7, if an image of 64 rows lay at its start. Row `i` of an image at
/// `tile` is at `place[i % 8] + tile + 128 i`: the permuted piece of row `i` is `piece ^ (i % 8)`.
#[inline(always)]
pub(super) fn in_row(at: &Place) -> [u32; 8] {
    let lane = at.c % 32;
    let first = at.base + at.half * PANEL + 16 * at.s * 128 + (lane % 4) * 4;
    let mut place = [0u32; 8];
    repeat!(I in 8 => { place[I] = first + (((lane / 4) ^ I as u32) << 4); });
    // Otherwise LLVM takes the sums apart and adds constants elsewhere, an instruction for each address.
    ptx::computed(&mut place);
    place
}

/// Loads, norms, decays, and the operands of the scores; stores qg, kg and the decay of the chunk. Returns this thread's pairs of
/// k exp G.
#[inline(always)]
pub(super) unsafe fn operands(p: &PrepParams, at: &Place) -> [u32; 16] {
    let sizes = &p.tables.sizes;
    let hv = sizes.hv as usize;
    let group = (sizes.hv / sizes.h.max(1)).max(1);
    let (qk_head, lane) = (at.head as u32 / group, ptx::laneid());
    let first = 16 * at.s;
    let channel = 2 * at.c as usize;
    let wide = is_wide(p);
    // Everything that is read from global memory is under way before anything is waited for.
    // SAFETY: rows of this chunk; nothing lies in shared memory yet.
    let (g, gate) = unsafe {
        bring(at, &p.q, sizes.h, qk_head, GIVEN_Q);
        bring(at, &p.k, sizes.h, qk_head, GIVEN_K);
        if !wide {
            bring(at, &p.g, sizes.hv, at.head as u32, GIVEN_G);
        }
        (given_f32(p, at), parameters(p, at))
    };
    if at.thread < 64 {
        let beta = if at.thread < at.len {
            // SAFETY: a row of this chunk.
            unsafe { element(&p.beta, (at.token + at.thread as usize) * hv + at.head) }
        } else {
            f32::NAN
        };
        let beta = if p.beta_factor == 0.0 { beta } else { p.beta_factor * sigmoid(beta) };
        let beta = if at.thread < at.len { floored_beta::<bf16>(beta) } else { 0.0 };
        // SAFETY: this thread's own word.
        unsafe { ptx::st_shared_f32(at.base + BETA + 4 * at.thread, beta) };
    }
    let place = in_row(at);
    // SAFETY: this warp's copies; its lanes meet in between.
    let (q, k, g) = unsafe {
        ptx::cp_async_wait_all();
        warp::sync();
        let (q, k, mut g) = (pairs(&place, GIVEN_Q), pairs(&place, GIVEN_K), g);
        if !wide {
            let given = pairs(&place, GIVEN_G);
            repeat!(I in 16 => { g[I] = unpack(given[I]); });
        }
        (q, k, log_decays(p, at, g, gate))
    };
    // Sums of squares, each warp over its 64 channels.
    let (mut squares_q, mut squares_k) = ([0f32; 16], [0f32; 16]);
    repeat!(I in 16 => {
        let ([a, b], [c, d]) = (unpack(q[I]), unpack(k[I]));
        squares_q[I] = ptx::fma_rn_f32(a, a, b * b);
        squares_k[I] = ptx::fma_rn_f32(c, c, d * d);
    });
    let mut e = g;
    repeat!(I in 16 => { e[I] = [ptx::ex2_approx_ftz_f32(g[I][0]), ptx::ex2_approx_ftz_f32(g[I][1])]; });
    let mut total = e[0];
    repeat!(I in 16 => { if I > 0 { total = [total[0] * e[I][0], total[1] * e[I][1]]; } });
    let norms = at.base + NORMS + (2 * at.s + at.half) * 128;
    // SAFETY: whole warps; every word has one writer; barriers between writing and reading.
    unsafe {
        let (sum_q, sum_k) = (sums(squares_q, lane), sums(squares_k, lane));
        let half = at.half * 4;
        if lane % 2 == 0 {
            let row = first + lane / 2;
            ptx::st_shared_f32(at.base + SQUARES + row * 8 + half, sum_q);
            ptx::st_shared_f32(at.base + SQUARES + 512 + row * 8 + half, sum_k);
        }
        ptx::st_shared_v2_f32(at.base + TOTALS + (at.s * 128 + 2 * at.c) * 4, total[0], total[1]);
        if p.records.factors.is_present() {
            note_largest(at, &e);
        }
        thread::sync_threads();
        // Each warp for itself: lanes below 16 those of q.
        let [a, b] = ptx::ld_shared_v2_f32(at.base + SQUARES + (lane / 16) * 512 + (first + lane % 16) * 8);
        let norm = if p.l2norm != 0 { ptx::rsqrt_approx_f32(a + b + NORM_EPSILON) } else { 1.0 };
        let norm = if lane < 16 { norm * p.scale } else { norm };
        ptx::st_shared_f32(norms + lane * 4, norm);
        warp::sync();
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
        // Norms of four tokens from `i`, of q or of k.
        let four = |of: u32, i: u32| ptx::ld_shared_v4_f32(norms + of + i * 4);
        let scaled = |pair: u32, norm: f32| {
            let [a, b] = unpack(pair);
            [a * norm, b * norm]
        };
        let pack = |a: [f32; 2]| ptx::cvt_rn_bf16x2_f32(a[1], a[0]);
        let clamp = |x: [f32; 2]| [x[0].max(DIAGONAL_FLOOR), x[1].max(DIAGONAL_FLOOR)];
        let inverse = |x: [f32; 2]| [ptx::rcp_approx_ftz_f32(x[0]), ptx::rcp_approx_ftz_f32(x[1])];
        // Row `i` of the diagonal's operands: decay since the ninth token `since`, its inverse `until`.
        let diagonal = |place: u32, i: u32, qn: [f32; 2], kn: [f32; 2], since: [f32; 2], until: [f32; 2]| {
            ptx::st_shared_u32(place + (DIAGONAL_Q + i * 128), pack(times(qn, since)));
            ptx::st_shared_u32(place + (DIAGONAL_K + i * 128), pack(times(kn, since)));
            ptx::st_shared_u32(place + (DIAGONAL_COLUMNS + i * 128), pack(times(kn, until)));
        };
        let given = |image: u32, place: u32, i: u32| ptx::ld_shared_u32(place + (image + i * 128));
        // The record, from which what counts is the address in shared memory of images there.
        let record = record.wrapping_sub(at.base as usize);
        let image = |image: u32, place: u32, i: u32| {
            record.wrapping_add(place as usize).wrapping_add((image + i * 128) as usize).cast()
        };
        // Rows of the odd, or even, blocks of 16 lie behind each other.
        let packed = 128 * (16 * at.s - 16 * (at.s / 2));
        let (odd, late) = (at.s % 2 == 1, at.s >= 2);
        // Backward first; k exp G takes the place of k and e in the second pass.
        let (mut suffix, mut middle) = (ones, ones);
        let (mut norm_q, mut norm_k) = ([0f32; 4], [0f32; 4]);
        repeat!(J in 16 => {
            const I: usize = 15 - J;
            let i = I as u32;
            if I < 15 {
                suffix = times(suffix, e[(I + 1) % 16]);
            }
            if I % 4 == 3 {
                norm_k = four(64, i - 3);
                if I < 8 {
                    norm_q = four(0, i - 3);
                }
            }
            let kn = scaled(given(GIVEN_K, place[I % 8], i), norm_k[I % 4]);
            ptx::st_global_u32(image(RECORD_KG, place[I % 8], i), pack(times(kn, times(suffix, after))));
            if I < 8 {
                middle = times(middle, clamp(e[I + 1]));
                diagonal(place[I % 8], i, scaled(given(GIVEN_Q, place[I % 8], i), norm_q[I % 4]), kn, inverse(middle), middle);
            }
            if !late {
                let factor = times(suffix, to_middle);
                ptx::st_shared_u32(place[I % 8] + (COLUMNS_32 + i * 128), pack(times(kn, factor)));
            }
            if !odd {
                ptx::st_shared_u32(place[I % 8] - packed + (COLUMNS_16 + i * 128), pack(times(kn, suffix)));
            }
        });
        // Read once more: numbers that both passes use would stay unpacked in between, in more registers than there are. Rows of the
        // scores' operands take the place of what was given.
        let (q, k) = (pairs(&place, GIVEN_Q), pairs(&place, GIVEN_K));
        thread::sync_threads();
        // k exp G of the chunk.
        let mut kb = [0u32; 16];
        let mut prefix = ones;
        middle = ones;
        repeat!(I in 16 => {
            let i = I as u32;
            prefix = if I == 0 { e[0] } else { times(prefix, e[I]) };
            if I.is_multiple_of(4) {
                (norm_q, norm_k) = (four(0, i), four(64, i));
            }
            let (qn, kn) = (scaled(q[I], norm_q[I % 4]), scaled(k[I], norm_k[I % 4]));
            let since_start = times(before, prefix);
            ptx::st_global_u32(image(RECORD_QG, place[I % 8], i), pack(times(qn, since_start)));
            kb[I] = pack(times(kn, since_start));
            if I >= 8 {
                if I > 8 {
                    middle = times(middle, clamp(e[I]));
                }
                diagonal(place[I % 8], i, qn, kn, middle, inverse(middle));
            }
            if late {
                let factor = times(from_middle, prefix);
                ptx::st_shared_u32(place[I % 8] - 32 * 128 + (ROWS_32 + i * 128), pack(times(qn, factor)));
                ptx::st_shared_u32(place[I % 8] + (ROWS_32 + i * 128), pack(times(kn, factor)));
            }
            if odd {
                // q of blocks 1 and 3 in rows 0 .. 32, k in rows 32 .. 64.
                ptx::st_shared_u32(place[I % 8] - packed + (ROWS_16 + i * 128), pack(times(qn, prefix)));
                ptx::st_shared_u32(place[I % 8] - packed + (ROWS_16 + (i + 32) * 128), pack(times(kn, prefix)));
            }
        });
        ptx::fence_proxy_async_shared();
        kb
    }
}
