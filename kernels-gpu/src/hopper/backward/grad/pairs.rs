//! Gradients of products of tokens, put behind their decays and summed by the threads that own columns.

use cuda_std::ptx;

use super::body::*;
use super::columns::{
    Columns, Gradients, begin_d_q, compact, d_q, decay_of, fused, pin, plus, scaled, times, to_boundary,
};
use super::stage::pair_at;
use crate::hopper::repeat;

/// This thread's pair in each of 8 rows of a tile.
struct Pairs(u32);

impl Pairs {
    #[inline(always)]
    fn of(at: &Place, tile: u32, first: u32) -> Self {
        Self(pair_at(at.base + tile, first, at.channel))
    }

    #[inline(always)]
    unsafe fn read<const I: usize>(&self) -> [f32; 2] {
        // SAFETY: written before a barrier. The rows begin where groups of channels are not permuted.
        unsafe { ptx::ld_shared_v2_f32((self.0 ^ ((I as u32 % 4) << 5)) + I as u32 * 512) }
    }
}

/// Adds gradients of rows: `decay` is that of their span before the block. Returns the sum of what dg of all earlier tokens of
/// the span gets.
#[inline(always)]
unsafe fn add_rows<const FIRST: bool>(
    at: &Place,
    columns: &Columns,
    g: &mut Gradients,
    of: [Pairs; 2],
    mut decay: [f32; 2],
) -> [f32; 2] {
    let mut shares = [[0f32; 2]; 8];
    repeat!(I in 8 => {
        decay = times(decay, columns.e[I]);
        // SAFETY: written before barriers.
        let ([q, k], [of_q, of_k]) = unsafe { (columns.rows::<I>(at), [of[0].read::<I>(), of[1].read::<I>()]) };
        // SAFETY: begun by this thread, if this is not the first.
        unsafe {
            let d_q = if FIRST { times(of_q, decay) } else { fused(of_q, decay, d_q::<I>(at)) };
            begin_d_q::<I>(at, d_q);
        }
        g.dk[I] = fused(of_k, decay, g.dk[I]);
        let with_k = times(k, of_k);
        let sum = ptx::fma_rn_f32(with_k[1], decay[1], g.of_k[I]);
        g.of_k[I] = ptx::fma_rn_f32(with_k[0], decay[0], sum);
        shares[I] = times(fused(q, of_q, with_k), decay);
    });
    let mut from_here = [0f32; 2];
    repeat!(J in 8 => {
        const I: usize = 7 - J;
        from_here = plus(from_here, shares[I]);
        g.dg[I] = plus(g.dg[I], from_here);
    });
    g.pin();
    from_here
}

/// Adds gradients of columns: `decay` is that of their span after the block. Returns the sum of what dg of all later tokens of
/// the span gets.
#[inline(always)]
unsafe fn add_columns(at: &Place, columns: &Columns, g: &mut Gradients, of: Pairs, mut decay: [f32; 2]) -> [f32; 2] {
    let mut shares = [[0f32; 2]; 8];
    repeat!(J in 8 => {
        const I: usize = 7 - J;
        if J > 0 {
            decay = times(decay, columns.e[(I + 1) % 8]);
        }
        // SAFETY: written before barriers.
        let (k, of_k) = unsafe { (columns.right::<I>(at), of.read::<I>()) };
        let of_k = times(of_k, decay);
        g.dk[I] = plus(g.dk[I], of_k);
        shares[I] = times(k, of_k);
    });
    let mut before = [0f32; 2];
    repeat!(I in 8 => {
        g.dg[I] = plus(g.dg[I], before);
        before = plus(before, shares[I]);
    });
    pin(&mut g.dk);
    pin(&mut g.dg);
    before
}

/// Leaves a block's sum for the other blocks of its span.
#[inline(always)]
unsafe fn carry(at: &Place, number: u32, sum: [f32; 2]) {
    let to = at.base + CARRIED + number * 4096 + (at.s * 128 + at.channel) * 4;
    // SAFETY: one writer for each pair.
    unsafe { ptx::st_shared_v2_f32(to, sum[0], sum[1]) };
}

/// Gradients through the states around the chunk: every token is a row and a column.
///
/// # Safety
/// By all threads, after a barrier of the block.
#[inline(always)]
pub(super) unsafe fn around(at: &Place, columns: &Columns, g: &mut Gradients) {
    let first = 8 * at.s;
    // SAFETY: by contract.
    unsafe {
        let (before, after) = (decay_of::<7>(at, 0, at.s), decay_of::<7>(at, at.s + 1, 7 - at.s));
        let rows = [Pairs::of(at, AROUND_Q, first), Pairs::of(at, AROUND_K, first)];
        let sum = add_rows::<true>(at, columns, g, rows, before);
        carry(at, 0, sum);
        let sum = add_columns(at, columns, g, Pairs::of(at, AROUND_COLUMNS, first), after);
        carry(at, 1, sum);
    }
}

/// Gradients of products of tokens that part at the level of `BIT`.
///
/// # Safety
/// By all threads, after a barrier of the block.
#[inline(always)]
pub(super) unsafe fn level<const BIT: u32>(at: &Place, columns: &Columns, g: &mut Gradients) {
    let (first, tile) = (8 * compact(at.s, BIT), STAGED_LEVEL);
    // SAFETY: by contract.
    unsafe {
        let decay = to_boundary::<BIT>(at);
        let sum = if at.s & BIT != 0 {
            let rows = [Pairs::of(at, tile, first), Pairs::of(at, tile, 32 + first)];
            add_rows::<false>(at, columns, g, rows, decay)
        } else {
            add_columns(at, columns, g, Pairs::of(at, tile + STAGED, first), decay)
        };
        if BIT > 1 {
            carry(at, if BIT == 4 { 2 } else { 3 }, sum);
        }
    }
}

/// Gradients of products inside a block of 8 tokens, pair by pair.
///
/// # Safety
/// By all threads, after a barrier of the block.
#[inline(always)]
pub(super) unsafe fn inside(at: &Place, columns: &Columns, g: &mut Gradients) {
    let squares = at.base + SQUARES + at.s * 256;
    repeat!(I in 8 => {
        // SAFETY: written before barriers.
        let (p, n, [q, k]) = unsafe {
            let row = |x: u32| {
                let x = x + I as u32 * 32;
                let ([a, b, c, d], [e, f, g, h]) = (ptx::ld_shared_v4_f32(x), ptx::ld_shared_v4_f32(x + 16));
                [a, b, c, d, e, f, g, h]
            };
            (row(squares), row(squares + SQUARE_BYTES), columns.rows::<I>(at))
        };
        let (mut dq, mut of_k) = (scaled(k, p[I]), [0f32; 2]);
        g.dk[I] = plus(g.dk[I], scaled(q, p[I]));
        let mut shares = [[0f32; 2]; 8];
        let mut decay = columns.e[I];
        repeat!(M in 8 => {
            if M < I {
                const J: usize = if M < I { I - 1 - M } else { 0 };
                if M > 0 {
                    decay = times(decay, columns.e[J + 1]);
                }
                // SAFETY: as above.
                let k_j = unsafe { columns.right::<J>(at) };
                let right = times(k_j, decay);
                dq = fused(right, [p[J]; 2], dq);
                of_k = fused(right, [n[J]; 2], of_k);
                let left = fused(q, [p[J]; 2], scaled(k, n[J]));
                g.dk[J] = fused(left, decay, g.dk[J]);
                shares[J] = times(left, right);
            }
        });
        let mut around = [0f32; 2];
        repeat!(M in 8 => {
            if M > 0 && M <= I {
                around = plus(around, shares[(M + 7) % 8]);
                g.dg[M] = plus(g.dg[M], around);
            }
        });
        // SAFETY: begun by this thread.
        unsafe { begin_d_q::<I>(at, plus(d_q::<I>(at), dq)) };
        g.dk[I] = plus(g.dk[I], of_k);
        let with_k = times(k, of_k);
        g.of_k[I] += with_k[0] + with_k[1];
        g.pin();
    });
}
