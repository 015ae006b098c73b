//! The inverse of I + Akk.

use cuda_std::{ptx, warp};

use super::*;

/// The inverse of I + Akk, unit lower triangular: of each 16 x 16 block by substitution, then of 32 x 32 and of all,
/// `[[A00, 0], [-A11 L10 A00, A11]]`. Products in TF32, to which what they read was rounded when it was stored. By the first
/// warpgroup.
#[inline(always)]
pub(super) unsafe fn invert(base: u32, thread: u32) {
    let (lane, warp) = (ptx::laneid(), thread / 32);
    let (l, a) = (base + AKK, base + INVERSE);
    let word = |m: u32, r: u32, c: u32| m + (r * PITCH + c) * 4;
    // SAFETY: scores were written before the barrier; every word has one writer; barriers in between.
    unsafe {
        // A thread for each column of the four blocks.
        if thread < 64 {
            let (first, column) = (16 * (thread / 16), thread % 16);
            let mut x = [0f32; 16];
            repeat!(I in 16 => {
                let mut sums = [if column == I as u32 { 1.0f32 } else { 0.0 }, 0.0, 0.0, 0.0];
                repeat!(M in 4 => {
                    if 4 * M < I {
                        let row = ptx::ld_shared_v4_f32(word(l, first + I as u32, first + 4 * M as u32));
                        // Entries from the diagonal on are not read as numbers.
                        if 4 * M < I { sums[0] = ptx::fma_rn_f32(row[0], -x[4 * M], sums[0]); }
                        if 4 * M + 1 < I { sums[1] = ptx::fma_rn_f32(row[1], -x[4 * M + 1], sums[1]); }
                        if 4 * M + 2 < I { sums[2] = ptx::fma_rn_f32(row[2], -x[4 * M + 2], sums[2]); }
                        if 4 * M + 3 < I { sums[3] = ptx::fma_rn_f32(row[3], -x[4 * M + 3], sums[3]); }
                    }
                });
                x[I] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            });
            repeat!(I in 16 => { ptx::st_shared_f32(word(a, first + I as u32, first + column), tf32(x[I])); });
        }
        ptx::bar_sync_id::<1, 128>();
        let scratch = base + SCRATCH + warp * 32 * SCRATCH_PITCH * 4;
        // 16 -> 32: warps 0 and 1 the first pair, 2 and 3 the second; each 8 columns.
        let (top, left) = (32 * (warp / 2), 32 * (warp / 2) + 8 * (warp % 2));
        let t = product::<2>(lane, word(l, top + 16, top), word(a, top, left), PITCH);
        put::<1>(lane, scratch, SCRATCH_PITCH, [t, t], false);
        warp::sync();
        let t = product::<2>(lane, word(a, top + 16, top + 16), scratch, SCRATCH_PITCH);
        put::<1>(lane, word(a, top + 16, left), PITCH, [t, t], true);
        ptx::bar_sync_id::<1, 128>();
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

/// A number as TF32.
#[inline(always)]
pub(super) fn tf32(x: f32) -> f32 {
    f32::from_bits(ptx::cvt_rn_tf32_f32(x))
}

/// 16 x 8 product of a (rows of `PITCH`) and b (rows of `pitch`), over 8 `STEPS` inner elements.
#[inline(always)]
unsafe fn product<const STEPS: usize>(lane: u32, a: u32, b: u32, pitch: u32) -> [f32; 4] {
    let mut d = [0f32; 4];
    let (row, column) = (lane / 4, lane % 4);
    // SAFETY: by contract inside the matrices.
    unsafe {
        repeat!(J in 4 => {
            if J < STEPS {
                let k = 8 * J as u32;
                let a = |r: u32, c: u32| ptx::ld_shared_u32(a + ((row + r) * PITCH + k + column + c) * 4);
                let fragment = [a(0, 0), a(8, 0), a(0, 4), a(8, 4)];
                let b = |r: u32| ptx::ld_shared_u32(b + ((k + column + r) * pitch + row) * 4);
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
            ptx::st_shared_v2_f32(at(0), tf32(sign * t[0]), tf32(sign * t[1]));
            ptx::st_shared_v2_f32(at(8), tf32(sign * t[2]), tf32(sign * t[3]));
        }
    };
    store(tiles[0], 0);
    if TILES > 1 {
        store(tiles[1], 16);
    }
}
