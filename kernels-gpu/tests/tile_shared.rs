//! Operations that move and map shared tiles, against the obvious loops: every element type, parts, transposes
//! and strided matrices.

mod common;

use common::{Buffer, DTYPES, Kernel, assert_close, epsilon, round_to, run};
use half::{bf16, f16};
use kernels_gpu::element::{DtypeCode, Element};
use kernels_gpu::params::Tensor;
use kernels_gpu::tile::Warpgroup;

/// Tensors of a test kernel.
#[derive(Clone, Copy)]
struct Io {
    a: Tensor,
    b: Tensor,
    out: Tensor,
}

/// Runs `kernel` on one block of one warpgroup with random `a` (16 x 48) and `b`, and f32 output of `len` elements, which
/// starts as 7.
fn f32_output(a: &mut Buffer, b: &mut Buffer, len: usize, kernel: Kernel<Io>) -> Vec<f32> {
    let mut out = Buffer::filled(DtypeCode::F32, len, 7.0);
    run(1, &Io { a: a.tensor(), b: b.tensor(), out: out.tensor() }, kernel).unwrap();
    out.values()
}

fn nothing() -> Buffer {
    Buffer::filled(DtypeCode::F32, 1, 0.0)
}

/// `expected(r, c)` for all elements of a `rows` x `cols` matrix.
fn table(rows: usize, cols: usize, expected: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    (0..rows * cols).map(|i| expected(i / cols, i % cols)).collect()
}

#[test]
fn fill_covers_a_part_and_nothing_else() {
    let found = f32_output(&mut nothing(), &mut nothing(), 16 * 32, |wg, p| {
        let tile = wg.shared::<f32>(16, 32);
        wg.fill(tile, |_, _| -1.0);
        wg.sync();
        wg.fill(tile.part(2, 5, 3, 4).t(), |r, c| (10 * r + c) as f32);
        wg.sync();
        wg.store(p.out.matrix(0, 16, 32, 32, 1), tile);
    });
    let inside = |r: usize, c: usize| (2..5).contains(&r) && (5..9).contains(&c);
    assert_eq!(found, table(16, 32, |r, c| if inside(r, c) { (10 * (c - 5) + r - 2) as f32 } else { -1.0 }));
}

fn load_pads<E: Element>() {
    for dtype in DTYPES {
        let mut a = Buffer::random(dtype, 13 * 40, 3);
        let found = f32_output(&mut a, &mut nothing(), 32 * 32, |wg, p| {
            let tile = wg.shared::<E>(32, 32);
            // 12 of 13 rows from the second one on, 30 columns, from the fifth one on.
            wg.load(tile, p.a.matrix(40 + 4, 12, 30, 40, 1));
            wg.sync();
            wg.store(p.out.matrix(0, 32, 32, 32, 1), tile);
        });
        let source = |r: usize, c: usize| E::round(a.get((r + 1) * 40 + c + 4));
        assert_eq!(found, table(32, 32, |r, c| if r < 12 && c < 30 { source(r, c) } else { 0.0 }), "{dtype:?}");
    }
}

#[test]
fn load_rounds_and_pads_with_zero() {
    load_pads::<f32>();
    load_pads::<bf16>();
    load_pads::<f16>();
}

#[test]
fn load_reads_transposed_and_repeated_matrices_into_views() {
    let mut a = Buffer::random(DtypeCode::F32, 16 * 48, 4);
    let found = f32_output(&mut a, &mut nothing(), 48 * 32, |wg, p| {
        let tile = wg.shared::<f32>(48, 32);
        wg.load(tile.columns(0, 16), p.a.matrix(0, 48, 16, 1, 48));
        wg.load(tile.columns(16, 16).t(), p.a.matrix(3, 16, 48, 0, 1).columns(1, 45));
        wg.sync();
        wg.store(p.out.matrix(0, 48, 32, 32, 1), tile);
    });
    let expected = table(48, 32, |r, c| match c {
        0..16 => a.get(c * 48 + r),
        _ if r < 45 => a.get(4 + r),
        _ => 0.0,
    });
    assert_eq!(found, expected);
}

fn load_map_maps<E: Element>() {
    let mut a = Buffer::random(DtypeCode::Bf16, 16 * 48, 5);
    let found = f32_output(&mut a, &mut nothing(), 16 * 48, |wg, p| {
        let tile = wg.shared::<E>(16, 48);
        wg.load_map(tile, p.a.matrix(0, 16, 48, 48, 1).row_range(2, 9), 1.0 / 3.0, |x| x * x + 0.25);
        wg.sync();
        wg.store(p.out.matrix(0, 16, 48, 48, 1), tile);
    });
    let source = |r: usize, c: usize| a.get((r + 2) * 48 + c);
    let expected = |r, c| if r < 9 { source(r, c).powi(2) + 0.25 } else { 1.0 / 3.0 };
    assert_eq!(found, table(16, 48, |r, c| E::round(expected(r, c))));
}

#[test]
fn load_map_maps_what_is_there_and_fills_the_rest() {
    load_map_maps::<f32>();
    load_map_maps::<bf16>();
    load_map_maps::<f16>();
}

#[test]
fn map_with_row_uses_one_parameter_per_column() {
    for dtype in DTYPES {
        let mut a = Buffer::random(DtypeCode::F32, 16 * 48, 6);
        let mut b = Buffer::random(dtype, 3 * 48, 7);
        let found = f32_output(&mut a, &mut b, 16 * 48, |wg, p| {
            let tile = wg.shared::<f32>(16, 48);
            wg.load(tile, p.a.matrix(0, 16, 48, 48, 1));
            wg.sync();
            // Every third element, first 10 rows; then the rows of a part without parameters.
            wg.map_with_row(tile, 10, Some(p.b.matrix(1, 1, 48, 1, 3).columns(0, 48)), |x, row| x + 2.0 * row);
            wg.sync();
            wg.map_with_row(tile.row_range(12, 4), 2, None, |x, row| 3.0 * x + row);
            wg.sync();
            wg.store(p.out.matrix(0, 16, 48, 48, 1), tile);
        });
        let expected = table(16, 48, |r, c| match (r, a.get(r * 48 + c)) {
            (0..10, x) => x + 2.0 * b.get(1 + 3 * c.min(47)),
            (12..14, x) => 3.0 * x,
            (_, x) => x,
        });
        assert_eq!(found, expected, "{dtype:?}");
    }
}

#[test]
fn scale_rows_takes_a_column_or_a_transposed_row() {
    let (mut a, mut b) = (Buffer::random(DtypeCode::F32, 16 * 48, 8), Buffer::random(DtypeCode::F32, 16, 9));
    let kernel = |wg: &mut Warpgroup<'_>, p: &Io| {
        let (tile, column, row) = (wg.shared::<f32>(16, 48), wg.shared::<f32>(16, 1), wg.shared::<f32>(1, 16));
        wg.load(tile, p.a.matrix(0, 16, 48, 48, 1));
        wg.load(column, p.b.matrix(0, 16, 1, 1, 1));
        wg.load(row, p.b.matrix(0, 1, 16, 16, 1));
        wg.sync();
        wg.scale_rows(tile, column, 0.5);
        wg.sync();
        wg.scale_rows(tile.columns(16, 32), row.t(), 1.0);
        wg.sync();
        wg.store(p.out.matrix(0, 16, 48, 48, 1), tile);
    };
    let found = f32_output(&mut a, &mut b, 16 * 48, kernel);
    let once = |r: usize, c: usize| a.get(r * 48 + c) * (b.get(r) * 0.5);
    assert_eq!(found, table(16, 48, |r, c| if c < 16 { once(r, c) } else { once(r, c) * b.get(r) }));
}

fn convert_rounds<E: Element, F: Element>() {
    let mut a = Buffer::random(DtypeCode::F32, 16 * 48, 10);
    let found = f32_output(&mut a, &mut nothing(), 48 * 16, |wg, p| {
        let (from, to) = (wg.shared::<F>(16, 48), wg.shared::<E>(48, 16));
        wg.load(from, p.a.matrix(0, 16, 48, 48, 1));
        wg.sync();
        wg.convert(to, from.t(), |x| 3.0 * x);
        wg.sync();
        wg.store(p.out.matrix(0, 48, 16, 16, 1), to);
    });
    assert_eq!(found, table(48, 16, |r, c| E::round(3.0 * F::round(a.get(c * 48 + r)))));
}

#[test]
fn convert_rounds_from_every_type_to_every_type() {
    fn to<E: Element>() {
        convert_rounds::<E, f32>();
        convert_rounds::<E, bf16>();
        convert_rounds::<E, f16>();
    }
    to::<f32>();
    to::<bf16>();
    to::<f16>();
}

fn operand_is_rounded<E: Element>() {
    let mut a = Buffer::random(DtypeCode::F32, 16 * 48, 11);
    let found = f32_output(&mut a, &mut nothing(), 2 * 16 * 48, |wg, p| {
        let wide = wg.private::<f32>(16, 48);
        let operand = wg.private_operand::<E>(wide);
        wg.load(wide, p.a.matrix(0, 16, 48, 48, 1));
        wg.sync();
        wg.to_operand(operand, wide);
        wg.sync();
        wg.store(p.out.matrix(0, 16, 48, 48, 1), operand);
        wg.store(p.out.matrix(16 * 48, 16, 48, 48, 1), wide);
    });
    let wide = a.values();
    let operand: Vec<f32> = wide.iter().map(|&x| E::round(x)).collect();
    assert_eq!(found, [operand, wide].concat());
}

#[test]
fn an_operand_copy_is_rounded_and_leaves_the_accumulated_values() {
    operand_is_rounded::<f32>();
    operand_is_rounded::<bf16>();
    operand_is_rounded::<f16>();
}

fn store_narrows<E: Element>() {
    for dtype in DTYPES {
        let mut a = Buffer::random(DtypeCode::F32, 16 * 48, 12);
        let mut out = Buffer::filled(dtype, 50 * 20, 7.0);
        let io = Io { a: a.tensor(), b: Tensor::absent(), out: out.tensor() };
        run(1, &io, |wg, p| {
            let tile = wg.shared::<E>(16, 48);
            wg.load(tile, p.a.matrix(0, 16, 48, 48, 1));
            wg.sync();
            // Transposed into [50, 20] from (1, 2) on; of the tile's 16 rows and 48 columns 11 and 40.
            wg.store(p.out.matrix(20 + 2, 11, 40, 1, 20), tile);
        })
        .unwrap();
        let expected = table(50, 20, |r, c| match (r.checked_sub(1), c.checked_sub(2)) {
            (Some(col @ 0..40), Some(row @ 0..11)) => round_to(dtype, E::round(a.get(row * 48 + col))),
            _ => 7.0,
        });
        assert_eq!(out.values(), expected, "{dtype:?}");
    }
}

#[test]
fn store_writes_what_the_matrix_covers() {
    store_narrows::<f32>();
    store_narrows::<bf16>();
    store_narrows::<f16>();
}

#[test]
fn inverse_norms_of_strided_rows() {
    for dtype in DTYPES {
        let mut a = Buffer::random(dtype, 13 * 96, 13);
        let found = f32_output(&mut a, &mut nothing(), 16, |wg, p| {
            let column = wg.shared::<f32>(16, 1);
            wg.inverse_norms(column, p.a.matrix(1, 13, 40, 96, 2), 1e-3);
            wg.sync();
            wg.store(p.out.matrix(0, 16, 1, 1, 1), column);
        });
        let squares = |r: usize| (0..40).map(|c| f64::from(a.get(1 + r * 96 + 2 * c)).powi(2)).sum::<f64>();
        let expected: Vec<f64> = (0..16).map(|r| if r < 13 { (squares(r) + 1e-3).powf(-0.5) } else { 0.0 }).collect();
        assert_close("inverse norms", &found, &expected, 4.0 * epsilon::<f32>(), 0.0);
    }
}
