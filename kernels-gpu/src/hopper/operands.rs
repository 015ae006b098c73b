//! Registers, descriptors and barriers.

use cuda_std::{ptx, warp};

/// Repeats `$body` with the constant `$i` from `$first`, 4 times for each `.`: registers in arrays need constant indices.
macro_rules! repeat {
    ($i:ident from $first:expr, . => $body:block) => {{
        { const $i: usize = $first; $body }
        { const $i: usize = $first + 1; $body }
        { const $i: usize = $first + 2; $body }
        { const $i: usize = $first + 3; $body }
    }};
    ($i:ident in 2 => $body:block) => {{
        { const $i: usize = 0; $body }
        { const $i: usize = 1; $body }
    }};
    ($i:ident in 4 => $body:block) => { repeat!($i from 0, . => $body) };
    ($i:ident in 8 => $body:block) => {{ repeat!($i from 0, . => $body); repeat!($i from 4, . => $body) }};
    ($i:ident in 16 => $body:block) => {{
        repeat!($i from 0, . => $body);
        repeat!($i from 4, . => $body);
        repeat!($i from 8, . => $body);
        repeat!($i from 12, . => $body)
    }};
    ($i:ident in 32 => $body:block) => {{
        repeat!($i in 16 => $body);
        repeat!($i from 16, . => $body);
        repeat!($i from 20, . => $body);
        repeat!($i from 24, . => $body);
        repeat!($i from 28, . => $body)
    }};
    ($i:ident in 64 => $body:block) => {{
        repeat!($i in 32 => $body);
        repeat!($i from 32, . => $body);
        repeat!($i from 36, . => $body);
        repeat!($i from 40, . => $body);
        repeat!($i from 44, . => $body);
        repeat!($i from 48, . => $body);
        repeat!($i from 52, . => $body);
        repeat!($i from 56, . => $body);
        repeat!($i from 60, . => $body)
    }};
}
pub(crate) use repeat;

/// Descriptor of an image whose rows are M or N and whose columns are the inner extent.
#[inline(always)]
pub const fn by_rows(address: u32) -> u64 {
    ptx::wgmma_descriptor_128(address, 16, 1024)
}

/// Descriptor of an image whose columns are M or N and whose rows are the inner extent; panels `panel` bytes apart.
#[inline(always)]
pub const fn by_columns(address: u32, panel: u32) -> u64 {
    ptx::wgmma_descriptor_128(address, panel, 1024)
}

/// What descriptors grow by for step `step` of 16 inner elements, read by rows, panels `panel` bytes apart.
pub const fn row_step(step: usize, panel: u32) -> u64 {
    ((step as u32 / 4 * panel + step as u32 % 4 * 32) >> 4) as u64
}

/// What descriptors grow by for step `step` of 16 inner elements, read by columns.
pub const fn column_step(step: usize) -> u64 {
    (step as u64 * 2048) >> 4
}

/// A descriptor further on by `step`. The lower word alone changes: a sum of 64 bits would take two instructions and a carry.
#[inline(always)]
pub const fn step(descriptor: u64, step: u64) -> u64 {
    descriptor & !(u32::MAX as u64) | (descriptor as u32).wrapping_add(step as u32) as u64
}

/// Waits for the phase of parity `parity`.
///
/// # Safety
/// `barrier` is an initialised mbarrier of this block.
#[inline(always)]
pub unsafe fn wait(barrier: u32, parity: u32) {
    // SAFETY: by contract.
    while !unsafe { ptx::mbarrier_try_wait_parity(barrier, parity) } {}
}

/// The two numbers of a pair of bf16.
#[inline(always)]
pub fn unpack(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
}

/// Of 16 numbers of each lane of a warp, each combined over the lanes: lane l gets that of number l / 2.
///
/// # Safety
/// By whole warps.
#[inline(always)]
pub unsafe fn fold_lanes(mut x: [f32; 16], lane: u32, combine: impl Fn(f32, f32) -> f32) -> f32 {
    macro_rules! halve {
        ($count:literal, $mask:literal, $($i:literal)*) => {
            let upper = lane & $mask != 0;
            $(
                let (keep, give) = if upper { (x[$i + $count], x[$i]) } else { (x[$i], x[$i + $count]) };
                // SAFETY: by all lanes.
                x[$i] = combine(keep, unsafe { warp::shuffle_xor(give, $mask) });
            )*
        };
    }
    halve!(8, 16, 0 1 2 3 4 5 6 7);
    halve!(4, 8, 0 1 2 3);
    halve!(2, 4, 0 1);
    halve!(1, 2, 0);
    // SAFETY: by all lanes.
    combine(x[0], unsafe { warp::shuffle_xor(x[0], 1) })
}

/// The sums of 16 numbers over the lanes of a warp: lane l gets that of number l / 2.
///
/// # Safety
/// By whole warps.
#[inline(always)]
pub unsafe fn sums(x: [f32; 16], lane: u32) -> f32 {
    // SAFETY: by contract.
    unsafe { fold_lanes(x, lane, |a, b| a + b) }
}

/// Stores a warpgroup's accumulator of 64 x 64, rounded, negated or not, into a panel.
///
/// # Safety
/// By a whole warp, number `warp` of its warpgroup; the panel's rows are free.
#[inline(always)]
pub unsafe fn put_panel<const NEGATE: bool>(x: &[f32; 32], panel: u32, warp: u32, lane: u32) {
    let matrix = lane / 8;
    let row = 16 * warp + lane % 8 + 8 * (matrix % 2);
    let pack = |a: f32, b: f32| {
        if NEGATE { ptx::cvt_rn_bf16x2_f32(-b, -a) } else { ptx::cvt_rn_bf16x2_f32(b, a) }
    };
    repeat!(J in 4 => {
        let piece = 2 * J as u32 + matrix / 2;
        // SAFETY: by contract.
        unsafe {
            ptx::stmatrix_x4(
                panel + row * 128 + ((piece ^ (row % 8)) << 4),
                pack(x[8 * J], x[8 * J + 1]),
                pack(x[8 * J + 2], x[8 * J + 3]),
                pack(x[8 * J + 4], x[8 * J + 5]),
                pack(x[8 * J + 6], x[8 * J + 7]),
            );
        }
    });
}

/// Stores the transpose of a warpgroup's accumulator of 64 x 64, rounded, into a panel: its columns become rows.
///
/// # Safety
/// As of [`put_panel`].
#[inline(always)]
pub unsafe fn put_panel_transposed(x: &[f32; 32], panel: u32, warp: u32, lane: u32) {
    let (matrix, row) = (lane / 8, lane % 8);
    repeat!(J in 4 => {
        // Matrices 0 and 1: rows 16 warp .. + 8 and + 8 .. + 16 of columns 16 J ..; 2 and 3: of columns 16 J + 8 ..
        let to = 16 * J as u32 + 8 * (matrix / 2) + row;
        let piece = 2 * warp + matrix % 2;
        // SAFETY: by contract.
        unsafe {
            ptx::stmatrix_x4_trans(
                panel + to * 128 + ((piece ^ (to % 8)) << 4),
                ptx::cvt_rn_bf16x2_f32(x[8 * J + 1], x[8 * J]),
                ptx::cvt_rn_bf16x2_f32(x[8 * J + 3], x[8 * J + 2]),
                ptx::cvt_rn_bf16x2_f32(x[8 * J + 5], x[8 * J + 4]),
                ptx::cvt_rn_bf16x2_f32(x[8 * J + 7], x[8 * J + 6]),
            );
        }
    });
}
