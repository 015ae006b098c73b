//! Every shape of `wgmma`, from registers and from shared memory, in each orientation, against plain loops.

mod common;

use common::{PANEL, at, in_image, results, store_image};
use cuda_std::ptx;
use half::{bf16, f16};

/// Small integers, which both types hold and whose sums are exact.
fn a(m: u32, k: u32) -> f32 {
    ((3 * m + 5 * k) % 11) as f32 - 5.0
}
fn b(k: u32, n: u32) -> f32 {
    ((7 * k + 2 * n) % 13) as f32 - 6.0
}
fn d(m: u32, n: u32) -> f32 {
    ((m + 3 * n) % 17) as f32
}

/// Bytes of the image of a: 64 x 64. That of b lies behind it.
const B_AT: u32 = PANEL;
/// Products in a row: inner extent 64.
const STEPS: u32 = 4;

/// Row and column of accumulator register `i`.
fn place(t: u32, i: u32) -> (u32, u32) {
    (16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (t % 4) + i % 2)
}

/// Descriptor of an operand with `outer` rows or columns in step `step` of 16 inner elements.
fn descriptor(base: u32, outer: u32, outer_major: bool, step: u32) -> u64 {
    if outer_major {
        // Rows of the image are inner elements: panels of 64 outer elements and 64 rows.
        ptx::wgmma_descriptor_128(base + 2048 * step, PANEL, 1024)
    } else {
        let _ = outer; // one panel of as many rows
        ptx::wgmma_descriptor_128(base + 32 * step, 16, 1024)
    }
}

/// Stores a `[64, 64]` and b, each the way it is to be read.
fn store_operands(columns: u32, major: [bool; 2], bits: fn(f32) -> u16) {
    // SAFETY: by all threads; both images lie in shared memory.
    unsafe {
        if major[0] {
            store_image(at(0), 64, 64, |k, m| bits(a(m, k)));
        } else {
            store_image(at(0), 64, 64, |m, k| bits(a(m, k)));
        }
        if major[1] {
            store_image(at(B_AT), 64, columns, |k, n| bits(b(k, n)));
        } else {
            store_image(at(B_AT), columns, 64, |n, k| bits(b(k, n)));
        }
    }
}

/// The registers of a for a step.
fn left(t: u32, step: u32, bits: fn(f32) -> u16) -> [u32; 4] {
    [0, 1, 2, 3].map(|i| {
        let (m, k) = (16 * (t / 32) + t % 32 / 4 + 8 * (i % 2), 16 * step + 2 * (t % 4) + 8 * (i / 2));
        u32::from(bits(a(m, k + 1))) << 16 | u32::from(bits(a(m, k)))
    })
}

fn check<const LEN: usize>(columns: u32, signs: [i32; 2], start: bool, found: &[[f32; LEN]]) {
    let sign = (signs[0] * signs[1]) as f32;
    for (t, found) in found.iter().enumerate() {
        for (i, found) in found.iter().enumerate() {
            let (m, n) = place(t as u32, i as u32);
            let first = if start { d(m, n) } else { 0.0 };
            let expected = (0..16 * STEPS).fold(first, |sum, k| sum + sign * a(m, k) * b(k, n));
            assert_eq!(*found, expected, "n{columns}, thread {t}, register {i}");
        }
    }
}

macro_rules! shape {
    ($test:ident, $columns:literal, $length:literal, $rs:ident, $ss:ident, $bits:expr) => {
        #[test]
        fn $test() {
            shape!(@ss $ss, $columns, $length, $bits, 1, 1, 0, 0);
            shape!(@ss $ss, $columns, $length, $bits, -1, 1, 0, 1);
            shape!(@ss $ss, $columns, $length, $bits, 1, 1, 1, 0);
            shape!(@ss $ss, $columns, $length, $bits, -1, -1, 1, 1);
            shape!(@rs $rs, $columns, $length, $bits, 1, 1, 0);
            shape!(@rs $rs, $columns, $length, $bits, 1, -1, 1);
        }
    };
    (@ss $ss:ident, $columns:literal, $length:literal, $bits:expr, $sa:literal, $sb:literal, $ta:literal, $tb:literal) => {
        for start in [false, true] {
            let found = results(128, |t| {
                store_operands($columns, [$ta == 1, $tb == 1], $bits);
                let mut acc = start_of::<$length>(t);
                // SAFETY: by the warpgroup; operands were stored, fenced, and a barrier lies between.
                unsafe {
                    ptx::wgmma_fence();
                    for step in 0..STEPS {
                        let (a, b) = (
                            descriptor(at(0), 64, $ta == 1, step),
                            descriptor(at(B_AT), $columns, $tb == 1, step),
                        );
                        let keep = (start || step > 0) as u32;
                        ptx::$ss::<$sa, $sb, $ta, $tb>(&mut acc, a, b, keep);
                    }
                    ptx::wgmma_commit_group();
                    ptx::wgmma_wait_group::<0>(&mut acc);
                }
                acc
            });
            check($columns, [$sa, $sb], start, &found);
        }
    };
    (@rs $rs:ident, $columns:literal, $length:literal, $bits:expr, $sa:literal, $sb:literal, $tb:literal) => {
        let found = results(128, |t| {
            store_operands($columns, [false, $tb == 1], $bits);
            let mut acc = start_of::<$length>(t);
            let mut operand = [0u32; 16];
            for step in 0..STEPS {
                operand[4 * step as usize..][..4].copy_from_slice(&left(t, step, $bits));
            }
            // SAFETY: as above.
            unsafe {
                ptx::wgmma_fence();
                for step in 0..STEPS {
                    let i = 4 * step as usize;
                    let a = [operand[i], operand[i + 1], operand[i + 2], operand[i + 3]];
                    let b = descriptor(at(B_AT), $columns, $tb == 1, step);
                    ptx::$rs::<$sa, $sb, $tb>(&mut acc, a, b, 1);
                    // Each step a group of its own.
                    ptx::wgmma_commit_group();
                }
                ptx::wgmma_wait_group::<1>((&mut acc, &mut operand));
                ptx::wgmma_wait_group::<0>((&mut acc, &mut operand));
            }
            acc
        });
        check($columns, [$sa, $sb], true, &found);
    };
}

fn start_of<const LEN: usize>(t: u32) -> [f32; LEN] {
    std::array::from_fn(|i| {
        let (m, n) = place(t, i as u32);
        d(m, n)
    })
}

fn bf16_bits(x: f32) -> u16 {
    bf16::from_f32(x).to_bits()
}
fn f16_bits(x: f32) -> u16 {
    f16::from_f32(x).to_bits()
}

shape!(m64n16k16_bf16, 16, 8, wgmma_m64n16k16_bf16_rs, wgmma_m64n16k16_bf16_ss, bf16_bits);
shape!(m64n32k16_bf16, 32, 16, wgmma_m64n32k16_bf16_rs, wgmma_m64n32k16_bf16_ss, bf16_bits);
shape!(m64n64k16_bf16, 64, 32, wgmma_m64n64k16_bf16_rs, wgmma_m64n64k16_bf16_ss, bf16_bits);
shape!(m64n128k16_bf16, 128, 64, wgmma_m64n128k16_bf16_rs, wgmma_m64n128k16_bf16_ss, bf16_bits);
shape!(m64n16k16_f16, 16, 8, wgmma_m64n16k16_f16_rs, wgmma_m64n16k16_f16_ss, f16_bits);
shape!(m64n32k16_f16, 32, 16, wgmma_m64n32k16_f16_rs, wgmma_m64n32k16_f16_ss, f16_bits);
shape!(m64n64k16_f16, 64, 32, wgmma_m64n64k16_f16_rs, wgmma_m64n64k16_f16_ss, f16_bits);
shape!(m64n128k16_f16, 128, 64, wgmma_m64n128k16_f16_rs, wgmma_m64n128k16_f16_ss, f16_bits);

#[test]
fn images_are_where_swizzled_copies_put_them() {
    // The 128-byte swizzle: address bits 4 to 6 are changed by bits 7 to 9.
    for (row, column) in [(0, 0), (1, 0), (5, 17), (7, 63), (9, 8)] {
        let plain = row * 128 + column * 2;
        assert_eq!(in_image(0, PANEL, row, column), plain ^ ((plain >> 7 & 7) << 4));
    }
}
