//! Matrix fragments of a warp and their products (`ldmatrix`, `stmatrix`, `mma.sync`).
//!
//! Lane `l` of a fragment of 8 x 8 elements of 16 bits holds row `l / 4`, columns `2 (l % 4)` and the next, the
//! lower one in the low half. `trans` transposes each 8 x 8 matrix on its way.

use super::{asm, table::instructions};

instructions! {
    /// Loads one 8 x 8 matrix; `row` is the address of row `lane` of 16 bytes, of lanes 0 to 7.
    read ldmatrix_x1(row: reg32 u32) -> (a: reg32 u32) = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{{a}}}, [{row}];";
    /// Loads two 8 x 8 matrices; lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
    read ldmatrix_x2(row: reg32 u32) -> [a, b: reg32 u32] =
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{{a}, {b}}}, [{row}];";
    /// Loads four 8 x 8 matrices; lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
    read ldmatrix_x4(row: reg32 u32) -> [a, b, c, d: reg32 u32] =
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{a}, {b}, {c}, {d}}}, [{row}];";
    /// As [`ldmatrix_x1`], transposed.
    read ldmatrix_x1_trans(row: reg32 u32) -> (a: reg32 u32) =
        "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {{{a}}}, [{row}];";
    /// As [`ldmatrix_x2`], transposed.
    read ldmatrix_x2_trans(row: reg32 u32) -> [a, b: reg32 u32] =
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{{a}, {b}}}, [{row}];";
    /// As [`ldmatrix_x4`], transposed.
    read ldmatrix_x4_trans(row: reg32 u32) -> [a, b, c, d: reg32 u32] =
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{a}, {b}, {c}, {d}}}, [{row}];";
    /// Stores one 8 x 8 matrix; `row` as in [`ldmatrix_x1`].
    opaque stmatrix_x1(row: reg32 u32, a: reg32 u32) = "stmatrix.sync.aligned.m8n8.x1.shared.b16 [{row}], {{{a}}};";
    /// Stores two 8 x 8 matrices; `row` as in [`ldmatrix_x2`].
    opaque stmatrix_x2(row: reg32 u32, a: reg32 u32, b: reg32 u32) =
        "stmatrix.sync.aligned.m8n8.x2.shared.b16 [{row}], {{{a}, {b}}};";
    /// Stores four 8 x 8 matrices; `row` as in [`ldmatrix_x4`].
    opaque stmatrix_x4(row: reg32 u32, a: reg32 u32, b: reg32 u32, c: reg32 u32, d: reg32 u32) =
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{row}], {{{a}, {b}, {c}, {d}}};";
    /// As [`stmatrix_x1`], transposed.
    opaque stmatrix_x1_trans(row: reg32 u32, a: reg32 u32) =
        "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [{row}], {{{a}}};";
    /// As [`stmatrix_x2`], transposed.
    opaque stmatrix_x2_trans(row: reg32 u32, a: reg32 u32, b: reg32 u32) =
        "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{row}], {{{a}, {b}}};";
    /// As [`stmatrix_x4`], transposed.
    opaque stmatrix_x4_trans(row: reg32 u32, a: reg32 u32, b: reg32 u32, c: reg32 u32, d: reg32 u32) =
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{row}], {{{a}, {b}, {c}, {d}}};";
}

macro_rules! mma {
    ($($(#[$meta:meta])* $name:ident = $instruction:literal;)*) => {$(
        $(#[$meta])*
        #[inline(always)]
        pub unsafe fn $name(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
            // SAFETY: the caller's, see the module.
            unsafe {
                asm!(
                    concat!(
                        $instruction,
                        " {{{d0}, {d1}, {d2}, {d3}}}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, ",
                        "{{{d0}, {d1}, {d2}, {d3}}};"
                    ),
                    d0 = inout(reg32) d[0], d1 = inout(reg32) d[1], d2 = inout(reg32) d[2], d3 = inout(reg32) d[3],
                    a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                    b0 = in(reg32) b[0], b1 = in(reg32) b[1],
                    options(pure, nomem, nostack),
                )
            }
        }
    )*};
}

mma! {
    /// `d += a b` of bf16, a 16 x 16, b 16 x 8, d 16 x 8 in f32. Lane l holds
    /// d: rows l/4 (0, 1) and l/4 + 8 (2, 3), columns 2 (l%4) and the next;
    /// a: rows l/4, l/4 + 8, l/4, l/4 + 8 and columns 2 (l%4) + 0, 0, 8, 8 and the next;
    /// b: rows 2 (l%4) + 0, 8 and the next, column l/4.
    mma_m16n8k16_f32_bf16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32";
    /// As [`mma_m16n8k16_f32_bf16`], of f16.
    mma_m16n8k16_f32_f16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32";
    /// `d += a b` of TF32, a 16 x 8, b 8 x 8, d as in [`mma_m16n8k16_f32_bf16`]. Lane l holds
    /// a: rows l/4, l/4 + 8, l/4, l/4 + 8, columns l%4 + 0, 0, 4, 4; b: rows l%4 + 0, 4, column l/4.
    mma_m16n8k8_f32_tf32 = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32";
}
