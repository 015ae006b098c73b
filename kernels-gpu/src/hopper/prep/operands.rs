//! Loads, norms, and the operands of the scores.

use cuda_std::{ptx, thread};

use super::decays::log_decays;
use super::factors::note_largest;
use super::*;
use half::bf16;

use crate::hopper::gate::element;

/// Rows of a chunk in a global tensor: the address of this thread's elements in row 0, and bytes from row to row.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub from: u64,
    pub stride: u32,
    pub len: u32,
}

impl Rows {
    #[inline(always)]
    pub(super) fn row<T>(&self, row: u32) -> *const T {
        ptx::mad_wide_u32(row, self.stride, self.from) as *const T
    }

    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        self.len == CHUNK as u32
    }

    /// The pairs of bf16 of 16 rows from `first`, zeros beyond the chunk.
    ///
    /// # Safety
    /// These rows up to `len` exist.
    #[inline(always)]
    pub(super) unsafe fn pairs(&self, first: u32) -> [u32; 16] {
        let mut pairs = [0u32; 16];
        // SAFETY: by contract.
        unsafe {
            if self.is_full() {
                repeat!(I in 16 => { pairs[I] = ptx::ld_global_nc_u32(self.row(first + I as u32)); });
            } else {
                repeat!(I in 16 => {
                    let row = first + I as u32;
                    pairs[I] = ptx::ld_global_nc_u32_if(self.row(row), (row < self.len) as u32);
                });
            }
        }
        pairs
    }
}

/// Places of this thread's channels in rows 0 to 7 (mod 8) of a panel: the permuted piece of row `i` is `piece ^ i`.
#[inline(always)]
pub(super) fn in_row(at: &Place) -> [u32; 8] {
    let lane = at.c % 32;
    let mut place = [0u32; 8];
    repeat!(I in 8 => { place[I] = (((lane / 4) ^ I as u32) << 4) + (lane % 4) * 4; });
    place
}

/// Loads, norms, decays, and the operands of the scores; stores qg, kg and the decay of the chunk. Returns this thread's pairs of
/// k exp G.
#[inline(always)]
pub(super) unsafe fn operands(p: &PrepParams, at: &Place) -> [u32; 16] {
    let sizes = &p.tables.sizes;
    let (h, hv) = (sizes.h as usize, sizes.hv as usize);
    let group = (sizes.hv / sizes.h.max(1)).max(1);
    let (qk_head, lane) = ((at.head as u32 / group) as usize, ptx::laneid());
    let first = 16 * at.s;
    let channel = 2 * at.c as usize;
    let qk_at = (((at.token * h + qk_head) * CHANNELS + channel) * 2) as u64;
    let rows = |from: u64| Rows { from: from + qk_at, stride: (h * CHANNELS * 2) as u32, len: at.len };
    // SAFETY: rows of this chunk.
    let (q, k) = unsafe { (rows(p.q.addr).pairs(first), rows(p.k.addr).pairs(first)) };
    // SAFETY: as the functions say.
    let g = unsafe { log_decays(p, at, channel) };
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
        if p.records.factors.is_present() {
            note_largest(at, &e);
        }
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
        // Backward first: what it needs of q dies on the way, and k exp G takes the place of k and e in the second pass.
        let (mut suffix, mut middle) = (ones, ones);
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
        // k exp G of the chunk.
        let mut kb = [0u32; 16];
        let mut prefix = ones;
        middle = ones;
        repeat!(I in 16 => {
            let i = I as u32;
            prefix = if I == 0 { e[0] } else { times(prefix, e[I]) };
            let (qn, kn) = (scaled(q[I], norm(0, i)), scaled(k[I], norm(256, i)));
            let row = first + i;
            let to = (place[I % 8] + (RECORD_QG + at.half * PANEL + row * 128)) as usize;
            let since_start = times(before, prefix);
            ptx::st_global_u32(record.wrapping_add(to).cast(), pack(times(qn, since_start)));
            kb[I] = pack(times(kn, since_start));
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
        ptx::fence_proxy_async_shared();
        kb
    }
}
