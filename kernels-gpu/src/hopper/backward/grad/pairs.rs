//! Gradients of products of tokens, put behind their decays and summed by the threads that own columns.

use cuda_std::ptx;

use super::body::*;
use super::columns::{
    Columns, Gradients, Sums, begin_d_q, compact, d_q, decay_at, dot, fused, norms, own_pair, pin, plus, scaled, times,
    to_boundary,
};
use super::stage::pair_at;
use crate::gate::Gate;
use crate::hopper::repeat;

/// This thread's pair in each of 8 rows of a tile: where it were if the tile began where the block's memory does, and the tile. All tiles
/// then share permuted addresses, and differ in what an instruction adds.
#[derive(Clone, Copy)]
struct Pairs(u32, u32);

impl Pairs {
    #[inline(always)]
    fn of(at: &Place, tile: u32, first: u32) -> Self {
        Self(pair_at(at.base, first, at.channel), tile)
    }

    #[inline(always)]
    unsafe fn read<const I: usize>(&self) -> [f32; 2] {
        // SAFETY: written before a barrier. The rows begin where groups of channels are not permuted.
        unsafe { ptx::ld_shared_v2_f32((self.0 ^ ((I as u32 % 4) << 5)) + self.1 + I as u32 * 512) }
    }
}

/// Adds gradients of rows: `decay` is that of their span before the block. Returns what dg of all earlier tokens of the span gets from
/// all rows so far, `shares` with it: the dot products of rows with the sums of their gradients.
#[inline(always)]
unsafe fn add_rows<G: Gate, const FIRST: bool>(
    at: &Place,
    columns: &Columns,
    sums: &mut Sums,
    of: [Pairs; 2],
    mut decay: [f32; 2],
    mut shares: [f32; 2],
) -> [f32; 2] {
    repeat!(I in 8 => {
        decay = times(decay, columns.e[I]);
        // SAFETY: written before barriers.
        let ([of_q, of_k], k) = (unsafe { [of[0].read::<I>(), of[1].read::<I>()] }, columns.right::<I>());
        // SAFETY: begun by this thread, if this is not the first.
        unsafe {
            let [q, _] = columns.rows::<I>(at);
            let d_q = if FIRST {
                let [norm_q, norm_k] = norms::<I>(at);
                sums.rows[I] = times(of_k, scaled(decay, norm_k));
                times(of_q, scaled(decay, norm_q))
            } else {
                sums.rows[I] = fused(of_k, decay, sums.rows[I]);
                fused(of_q, decay, d_q::<I>(at))
            };
            begin_d_q::<I>(at, d_q);
            shares = dot::<G>(k, sums.rows[I], dot::<G>(q, d_q, shares));
        }
    });
    pin(&mut sums.rows);
    shares
}

/// Adds gradients of columns: `decay` is that of their span after the block. Returns what dg of all later tokens of the span gets from
/// all columns so far, and `shares` with it.
#[inline(always)]
unsafe fn add_columns<G: Gate, const FIRST: bool>(
    at: &Place,
    columns: &Columns,
    sums: &mut Sums,
    of: Pairs,
    mut decay: [f32; 2],
    mut shares: [f32; 2],
) -> [f32; 2] {
    repeat!(J in 8 => {
        const I: usize = 7 - J;
        if J > 0 {
            decay = times(decay, columns.e[(I + 1) % 8]);
        }
        // SAFETY: written before barriers.
        sums.columns[I] = unsafe {
            let of_k = of.read::<I>();
            if FIRST {
                times(of_k, scaled(decay, norms::<I>(at)[1]))
            } else {
                fused(of_k, decay, sums.columns[I])
            }
        };
        shares = dot::<G>(columns.right::<I>(), sums.columns[I], shares);
    });
    pin(&mut sums.columns);
    shares
}

/// Leaves what a block's rows, or columns, have come to, for the other blocks of its span.
#[inline(always)]
unsafe fn leave<G: Gate>(at: &Place, rows: u32, sum: [f32; 2]) {
    let to = own_pair(at, rows);
    // SAFETY: one writer for each pair.
    unsafe { if G::PER_CHANNEL { ptx::st_shared_v2_f32(to, sum[0], sum[1]) } else { ptx::st_shared_f32(to, sum[0]) } };
}

/// What was left for dg.
#[inline(always)]
unsafe fn left<G: Gate>(from: u32) -> [f32; 2] {
    // SAFETY: written before a barrier, or by this thread.
    unsafe { if G::PER_CHANNEL { ptx::ld_shared_v2_f32(from) } else { [ptx::ld_shared_f32(from), 0.0] } }
}

/// Gradients through the states around the chunk: every token is a row and a column. With them the sums begin. They are put behind
/// the factors of rows here; scores were when they were stored.
///
/// # Safety
/// By all threads, after a barrier of the block.
#[inline(always)]
pub(super) unsafe fn around<G: Gate>(at: &Place, columns: &Columns) -> Sums {
    let first = 8 * at.s;
    let mut sums = Sums { rows: [[0.0; 2]; 8], columns: [[0.0; 2]; 8] };
    // SAFETY: by contract.
    unsafe {
        let (before, after) = (decay_at::<G>(own_pair(at, DECAY_BEFORE)), decay_at::<G>(own_pair(at, DECAY_AFTER)));
        // All dg have the sum over V of S D in common, times the decay of the chunk. Everybody gets a sum from every other block, so
        // each block adds its share to whatever it leaves.
        let decay = times(times(before, decay_at::<G>(own_pair(at, TOTALS))), after);
        let share = dot::<G>(ptx::ld_shared_v2_f32(own_pair(at, COMMON)), decay, [0.0; 2]);
        leave::<G>(at, COMMON, share);
        let rows = [Pairs::of(at, AROUND_Q, first), Pairs::of(at, AROUND_K, first)];
        let shares = add_rows::<G, true>(at, columns, &mut sums, rows, before, share);
        leave::<G>(at, CARRIED, shares);
        let shares = add_columns::<G, true>(at, columns, &mut sums, Pairs::of(at, AROUND_COLUMNS, first), after, share);
        leave::<G>(at, CARRIED + 4096, shares);
    }
    sums
}

/// Gradients of products of tokens that part at the level of `BIT`.
///
/// # Safety
/// By all threads, after a barrier of the block.
#[inline(always)]
pub(super) unsafe fn level<G: Gate, const BIT: u32>(at: &Place, columns: &Columns, sums: &mut Sums) {
    let (first, tile) = (8 * compact(at.s, BIT), STAGED_LEVEL);
    // SAFETY: by contract.
    unsafe {
        let decay = to_boundary::<G, BIT>(at);
        let share = if BIT > 1 { left::<G>(own_pair(at, COMMON)) } else { [0.0; 2] };
        let shares = if at.s & BIT != 0 {
            let rows = [Pairs::of(at, tile, first), Pairs::of(at, tile, 32 + first)];
            add_rows::<G, false>(at, columns, sums, rows, decay, share)
        } else {
            add_columns::<G, false>(at, columns, sums, Pairs::of(at, tile + STAGED, first), decay, share)
        };
        if BIT > 1 {
            leave::<G>(at, CARRIED + if BIT == 4 { 2 * 4096 } else { 3 * 4096 }, shares);
        }
    }
}

/// What dg of this thread's tokens gets from other blocks: from a later one its rows, from an earlier one its columns, of all phases
/// before the level at which the two part. (From that level on the other block is a row to this one's columns, or the reverse.)
#[inline(always)]
unsafe fn carried<G: Gate>(at: &Place) -> [f32; 2] {
    let s = at.s;
    // What lies where: rows and columns around the chunk, and either of the first two levels.
    let rows = [0, if s & 4 != 0 { 2 } else { 0 }];
    let columns = [1, if s & 4 != 0 { 1 } else { 2 }];
    let (nearest, nearest_columns) = if s & 2 != 0 { (3, columns[1]) } else { (rows[1], 3) };
    let mut sum = [0f32; 2];
    repeat!(X in 8 => {
        const APART: u32 = X as u32;
        if APART > 0 {
            // The highest bit in which the numbers of the blocks differ says which is the later one.
            const BIT: u32 = if APART >= 4 { 4 } else if APART >= 2 { 2 } else { 1 };
            let (of_rows, of_columns) = match BIT {
                4 => (rows[0], columns[0]),
                2 => (rows[1], columns[1]),
                _ => (nearest, nearest_columns),
            };
            let number = if s & BIT == 0 { of_rows } else { of_columns };
            let from = at.base + CARRIED + number * 4096 + ((s ^ APART) * 128 + at.channel) * 4;
            // SAFETY: written before a barrier.
            sum = plus(sum, unsafe { left::<G>(from) });
        }
    });
    sum
}

/// From the sums over all levels: dk, dg and [`Gradients::of_k`] of everything but products inside a block.
///
/// # Safety
/// By all threads, after a barrier of the block behind the last sums that are carried.
#[inline(always)]
pub(super) unsafe fn gather<G: Gate>(at: &Place, columns: &Columns, sums: &Sums) -> Gradients {
    let mut g = Gradients { dk: [[0.0; 2]; 8], dg: [[0.0; 2]; 8], of_k: [0.0; 8] };
    // SAFETY: by contract.
    let mut from_here = unsafe { plus(left::<G>(own_pair(at, COMMON)), carried::<G>(at)) };
    repeat!(J in 8 => {
        const I: usize = 7 - J;
        // SAFETY: written before barriers.
        let ([q, k], d_q) = unsafe { (columns.rows::<I>(at), d_q::<I>(at)) };
        let with_k = times(k, sums.rows[I]);
        g.of_k[I] = with_k[0] + with_k[1];
        let with_k = if G::PER_CHANNEL { with_k } else { [g.of_k[I], 0.0] };
        from_here = plus(dot::<G>(q, d_q, from_here), with_k);
        g.dg[I] = from_here;
        g.dk[I] = plus(sums.rows[I], sums.columns[I]);
    });
    let mut before = [0f32; 2];
    repeat!(I in 8 => {
        g.dg[I] = plus(g.dg[I], before);
        before = dot::<G>(columns.right::<I>(), sums.columns[I], before);
    });
    g.pin::<G>();
    g
}

/// Gradients of products inside a block of 8 tokens, pair by pair.
///
/// # Safety
/// By all threads, after a barrier of the block.
#[inline(always)]
pub(super) unsafe fn inside<G: Gate>(at: &Place, columns: &Columns, g: &mut Gradients) {
    let squares = at.base + SQUARES + at.s * 256;
    // Of each column before the row, up to it.
    let mut decays = [[0f32; 2]; 8];
    repeat!(I in 8 => {
        // SAFETY: written before barriers.
        let (p, n, [q, k]) = unsafe {
            let row = |x: u32| {
                let x = x + I as u32 * 32;
                let [a, b, c, d] = ptx::ld_shared_v4_f32(x);
                let [e, f, g, h] = if I < 4 { [0.0; 4] } else { ptx::ld_shared_v4_f32(x + 16) };
                [a, b, c, d, e, f, g, h]
            };
            (row(squares), row(squares + SQUARE_BYTES), columns.rows::<I>(at))
        };
        let (mut dq, mut of_k) = (scaled(k, p[I]), [0f32; 2]);
        g.dk[I] = fused(q, [p[I]; 2], g.dk[I]);
        let mut around = [0f32; 2];
        repeat!(J in 8 => {
            if J < I {
                decays[J] = if J + 1 == I { columns.e[I] } else { times(decays[J], columns.e[I]) };
                let decay = decays[J];
                let right = times(columns.right::<J>(), decay);
                dq = fused(right, [p[J]; 2], dq);
                of_k = fused(right, [n[J]; 2], of_k);
                let left = fused(q, [p[J]; 2], scaled(k, n[J]));
                g.dk[J] = fused(left, decay, g.dk[J]);
                around = dot::<G>(left, right, around);
                g.dg[(J + 1) % 8] = plus(g.dg[(J + 1) % 8], around);
            }
        });
        // SAFETY: begun by this thread.
        unsafe { begin_d_q::<I>(at, plus(d_q::<I>(at), dq)) };
        g.dk[I] = plus(g.dk[I], of_k);
        g.of_k[I] = ptx::fma_rn_f32(k[0], of_k[0], ptx::fma_rn_f32(k[1], of_k[1], g.of_k[I]));
        g.pin::<G>();
    });
}
