//! Matrix fragments of a warp and their products.

use crate::emulated::{Block, FaultKind, Half, Scope, Site, WARP, meet, settled};

/// What a lane brings, and gets.
struct Fragments<const N: usize> {
    row: u32,
    words: [u32; N],
}

const ALL: u32 = u32::MAX;

/// Place of the two elements of word of lane `lane`: row, and the first column.
fn place(lane: usize) -> (usize, usize) {
    (lane / 4, 2 * (lane % 4))
}

#[track_caller]
fn load<const N: usize>(name: &'static str, row: u32, transposed: bool) -> [u32; N] {
    let mut mine = Fragments { row, words: [0; N] };
    meet(Scope::Warp(ALL), Site::here(name), &mut mine, |block, all| {
        for matrix in 0..N {
            let mut rows = [[0u16; 8]; 8];
            for (i, row) in rows.iter_mut().enumerate() {
                let (thread, lane) = &all[8 * matrix + i];
                let bytes: [u8; 16] = block.memory.load(&block.clocks, *thread, lane.row)?;
                for (x, pair) in row.iter_mut().zip(bytes.chunks_exact(2)) {
                    *x = u16::from_le_bytes([pair[0], pair[1]]);
                }
            }
            for (lane, (_, fragments)) in all.iter_mut().enumerate() {
                let (r, c) = place(lane);
                let [low, high] = if transposed { [rows[c][r], rows[c + 1][r]] } else { [rows[r][c], rows[r][c + 1]] };
                fragments.words[matrix] = u32::from(high) << 16 | u32::from(low);
            }
        }
        Ok(())
    });
    mine.words
}

#[track_caller]
fn store<const N: usize>(name: &'static str, row: u32, words: [u32; N], transposed: bool) {
    let mut mine = Fragments { row, words };
    meet(Scope::Warp(ALL), Site::here(name), &mut mine, |block, all| {
        for matrix in 0..N {
            let mut rows = [[0u16; 8]; 8];
            for (lane, (_, fragments)) in all.iter().enumerate() {
                let (r, c) = place(lane);
                let word = fragments.words[matrix];
                for (i, half) in [word as u16, (word >> 16) as u16].into_iter().enumerate() {
                    if transposed {
                        rows[c + i][r] = half;
                    } else {
                        rows[r][c + i] = half;
                    }
                }
            }
            for (i, row) in rows.iter().enumerate() {
                let (thread, lane) = &all[8 * matrix + i];
                let mut bytes = [0; 16];
                for (pair, x) in bytes.chunks_exact_mut(2).zip(row) {
                    pair.copy_from_slice(&x.to_le_bytes());
                }
                block.memory.store(&block.clocks, *thread, lane.row, &bytes)?;
            }
        }
        Ok(())
    });
}

macro_rules! fragments {
    ($($load:ident, $store:ident, $count:tt, $transposed:literal, ($($word:ident),*);)*) => {$(
        /// Loads as many 8 x 8 matrices as the name says.
        #[track_caller]
        pub unsafe fn $load(row: u32) -> fragments!(@result $count) {
            let words: [u32; $count] = load(stringify!($load), row, $transposed);
            fragments!(@value $count, words)
        }
        /// Stores as many 8 x 8 matrices as the name says.
        #[track_caller]
        pub unsafe fn $store(row: u32, $($word: u32),*) {
            store(stringify!($store), row, [$($word),*], $transposed);
        }
    )*};
    (@result 1) => { u32 };
    (@result $count:tt) => { [u32; $count] };
    (@value 1, $words:ident) => { $words[0] };
    (@value $count:tt, $words:ident) => { $words };
}

fragments! {
    ldmatrix_x1, stmatrix_x1, 1, false, (a);
    ldmatrix_x2, stmatrix_x2, 2, false, (a, b);
    ldmatrix_x4, stmatrix_x4, 4, false, (a, b, c, d);
    ldmatrix_x1_trans, stmatrix_x1_trans, 1, true, (a);
    ldmatrix_x2_trans, stmatrix_x2_trans, 2, true, (a, b);
    ldmatrix_x4_trans, stmatrix_x4_trans, 4, true, (a, b, c, d);
}

/// Operands of a product, one lane's part.
struct Product<'a> {
    d: &'a mut [f32; 4],
    a: [u32; 4],
    b: [u32; 2],
}

/// `d += a b`, over `K` inner elements; `a` and `b` give place and value of each of a lane's elements.
fn multiply<const K: usize>(
    _: &mut Block,
    all: &mut [(usize, &mut Product<'_>)],
    a: impl Fn(usize, [u32; 4], &mut dyn FnMut(usize, usize, f32)),
    b: impl Fn(usize, [u32; 2], &mut dyn FnMut(usize, usize, f32)),
) -> Result<(), FaultKind> {
    let (mut left, mut right) = ([[0f32; K]; 16], [[0f32; 8]; K]);
    for (lane, (_, product)) in all.iter().enumerate() {
        a(lane, product.a, &mut |r, c, x| left[r][c] = x);
        b(lane, product.b, &mut |r, c, x| right[r][c] = x);
    }
    for (lane, (_, product)) in all.iter_mut().enumerate() {
        for (i, d) in product.d.iter_mut().enumerate() {
            let (r, c) = (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2);
            *d += left[r].iter().zip(&right).map(|(x, row)| x * row[c]).sum::<f32>();
        }
    }
    Ok(())
}

#[track_caller]
fn product_16(name: &'static str, half: Half, d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    d.iter().for_each(|&x| _ = settled(name, x));
    meet(Scope::Warp(ALL), Site::here(name), &mut Product { d, a, b }, |block, all| {
        debug_assert_eq!(all.len(), WARP);
        let both = |word: u32| [half.widen(word as u16), half.widen((word >> 16) as u16)];
        multiply::<16>(
            block,
            all,
            |lane, a, put| {
                for (i, word) in a.into_iter().enumerate() {
                    let (r, c) = (lane / 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i / 2));
                    both(word).into_iter().enumerate().for_each(|(j, x)| put(r, c + j, x));
                }
            },
            |lane, b, put| {
                for (i, word) in b.into_iter().enumerate() {
                    let (r, c) = (2 * (lane % 4) + 8 * i, lane / 4);
                    both(word).into_iter().enumerate().for_each(|(j, x)| put(r + j, c, x));
                }
            },
        )
    });
}

/// `d += a b` of bf16, a 16 x 16, b 16 x 8, d 16 x 8 in f32.
#[track_caller]
pub unsafe fn mma_m16n8k16_f32_bf16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    product_16("mma.m16n8k16.bf16", Half::Bf16, d, a, b);
}

/// As [`mma_m16n8k16_f32_bf16`], of f16.
#[track_caller]
pub unsafe fn mma_m16n8k16_f32_f16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    product_16("mma.m16n8k16.f16", Half::F16, d, a, b);
}

/// `d += a b` of TF32, a 16 x 8, b 8 x 8.
#[track_caller]
pub unsafe fn mma_m16n8k8_f32_tf32(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    const NAME: &str = "mma.m16n8k8.tf32";
    d.iter().for_each(|&x| _ = settled(NAME, x));
    meet(Scope::Warp(ALL), Site::here(NAME), &mut Product { d, a, b }, |block, all| {
        // The tensor cores read 10 bits of fraction.
        let tf32 = |word: u32| f32::from_bits(word & !0x1fff);
        multiply::<8>(
            block,
            all,
            |lane, a, put| {
                for (i, word) in a.into_iter().enumerate() {
                    put(lane / 4 + 8 * (i % 2), lane % 4 + 4 * (i / 2), tf32(word));
                }
            },
            |lane, b, put| {
                for (i, word) in b.into_iter().enumerate() {
                    put(lane % 4 + 4 * i, lane / 4, tf32(word));
                }
            },
        )
    });
}
