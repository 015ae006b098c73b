//! Register tiles against products and sums in f64.

mod common;

use common::{Buffer, DTYPES, Kernel, assert_close, round_to, run};
use half::{bf16, f16};
use kernels_gpu::element::{DtypeCode, Element};
use kernels_gpu::params::Tensor;
use kernels_gpu::tile::Acc;

#[derive(Clone, Copy)]
struct Io {
    a: Tensor,
    b: Tensor,
    c: Tensor,
    out: Tensor,
}

const M: usize = 32;
const N: usize = 48;
const K: usize = 80;

/// `a` is `[32, 80]`, `b` `[80, 48]`, `c` `[32, 48]`.
struct Operands {
    a: Buffer,
    b: Buffer,
    c: Buffer,
}

impl Operands {
    fn new(dtype: DtypeCode) -> Self {
        Self {
            a: Buffer::random(dtype, M * K, 1),
            b: Buffer::random(dtype, K * N, 2),
            c: Buffer::random(dtype, M * N, 3),
        }
    }

    fn run(&mut self, dtype: DtypeCode, len: usize, kernel: Kernel<Io>) -> Vec<f32> {
        let mut out = Buffer::filled(dtype, len, 7.0);
        let (a, b, c) = (self.a.tensor(), self.b.tensor(), self.c.tensor());
        run(1, &Io { a, b, c, out: out.tensor() }, kernel).unwrap();
        out.values()
    }

    /// Element (i, j) of a b over the channels `first .. last`, operands rounded to `E`.
    fn product<E: Element>(&self, i: usize, j: usize, first: usize, last: usize) -> f64 {
        let term = |l: usize| f64::from(E::round(self.a.get(i * K + l))) * f64::from(E::round(self.b.get(l * N + j)));
        (first..last).map(term).sum()
    }
}

fn products_of<E: Element>() {
    let mut operands = Operands::new(DtypeCode::F32);
    let found = operands.run(DtypeCode::F32, M * N, |wg, p| {
        // `b` is kept transposed, and so is `a` in a larger tile.
        let (a, b) = (wg.shared::<E>(M + 16, K), wg.shared::<E>(N, K));
        wg.load(a.row_range(16, M), p.a.matrix(0, M, K, K, 1));
        wg.load(b, p.b.matrix(0, N, K, 1, N));
        wg.sync();
        let a = a.row_range(16, M);
        let mut acc = Acc::zeros(M, N);
        acc.mma(wg, a, b.t());
        acc.mma_sub(wg, a.columns(16, 32), b.columns(16, 32).t());
        acc.store_global(wg, p.out.matrix(0, M, N, N, 1));
    });
    let expected: Vec<f64> = (0..M * N)
        .map(|at| operands.product::<E>(at / N, at % N, 0, 16) + operands.product::<E>(at / N, at % N, 48, K))
        .collect();
    assert_close("a b", &found, &expected, 1e-6, 1e-5);
}

#[test]
fn products_add_up_in_f32() {
    products_of::<f32>();
    products_of::<bf16>();
    products_of::<f16>();
}

#[test]
fn a_product_with_a_transposed_left_operand() {
    let mut operands = Operands::new(DtypeCode::Bf16);
    let found = operands.run(DtypeCode::F32, M * N, |wg, p| {
        let (a, b) = (wg.shared::<bf16>(K, M), wg.shared::<bf16>(K, N));
        wg.load(a.t(), p.a.matrix(0, M, K, K, 1));
        wg.load(b, p.b.matrix(0, K, N, N, 1));
        wg.sync();
        let mut acc = Acc::zeros(M, N);
        acc.mma(wg, a.t(), b);
        acc.store_global(wg, p.out.matrix(0, M, N, N, 1));
    });
    let expected: Vec<f64> = (0..M * N).map(|at| operands.product::<f32>(at / N, at % N, 0, K)).collect();
    assert_close("a b", &found, &expected, 1e-6, 1e-5);
}

fn loads_and_stores<E: Element>() {
    let mut operands = Operands::new(DtypeCode::F32);
    let found = operands.run(DtypeCode::F32, N * M, |wg, p| {
        let (from, to) = (wg.shared::<f32>(M, N), wg.shared::<E>(N, M + 16));
        wg.load(from, p.c.matrix(0, M, N, N, 1));
        wg.sync();
        let mut acc = Acc::load(wg, from);
        acc.add(wg, from);
        // Transposed, and into the right part of a wider tile.
        acc.store(wg, to.columns(16, M).t());
        wg.sync();
        wg.store(p.out.matrix(0, N, M, M, 1), to.columns(16, M));
    });
    let expected: Vec<f32> = (0..N * M).map(|at| E::round(2.0 * operands.c.get(at % M * N + at / M))).collect();
    assert_eq!(found, expected);
}

#[test]
fn loading_adding_and_storing_round_once() {
    loads_and_stores::<f32>();
    loads_and_stores::<bf16>();
    loads_and_stores::<f16>();
}

#[test]
fn columns_are_scaled_and_tiny_values_vanish() {
    let mut operands = Operands::new(DtypeCode::F32);
    operands.a = {
        let mut factors = Buffer::between(DtypeCode::F32, M * K, 4, 0.0, 1.0).values();
        (factors[3], factors[7]) = (0.0, 1e-38);
        Buffer::of(DtypeCode::F32, &factors)
    };
    let found = operands.run(DtypeCode::F32, M * N, |wg, p| {
        let (tile, row, column) = (wg.shared::<f32>(M, N), wg.shared::<f32>(1, N), wg.shared::<f32>(N, 1));
        wg.load(tile, p.c.matrix(0, M, N, N, 1));
        wg.load(row, p.a.matrix(0, 1, N, N, 1));
        wg.load(column, p.a.matrix(0, N, 1, 1, 1));
        wg.sync();
        let mut acc = Acc::load(wg, tile);
        acc.scale_columns(wg, row);
        acc.scale_columns(wg, column.t());
        acc.store_global(wg, p.out.matrix(0, M, N, N, 1));
    });
    let expected: Vec<f32> = (0..M * N)
        .map(|at| match (at % N, operands.a.get(at % N)) {
            (7, _) => 0.0,
            (_, factor) => operands.c.get(at) * factor * factor,
        })
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn global_matrices_may_be_smaller_strided_and_of_any_type() {
    for dtype in DTYPES {
        let mut operands = Operands::new(dtype);
        // c is [32, 48]; 20 x 30 of it along the rows, then 30 x 20 of its transpose.
        let found = operands.run(dtype, 2 * M * N, |wg, p| {
            let mut acc = Acc::zeros(M, N);
            acc.add_global(wg, p.c.matrix(N + 1, 20, 30, N, 1));
            acc.add_global(wg, p.c.matrix(N + 1, 20, 30, N, 1));
            acc.store_global(wg, p.out.matrix(0, 25, N, N, 1));
            let mut acc = Acc::zeros(N, M);
            acc.add_global(wg, p.c.matrix(0, 30, 20, 1, N));
            acc.store_global(wg, p.out.matrix(M * N, 40, 20, 1, N));
        });
        let (first, second) = found.split_at(M * N);
        for at in 0..M * N {
            let (r, c) = (at / N, at % N);
            let covered = |rows: usize, cols: usize| r < rows && c < cols;
            let want = match () {
                () if covered(20, 30) => round_to(dtype, 2.0 * operands.c.get((r + 1) * N + c + 1)),
                () if covered(25, N) => 0.0,
                () => 7.0,
            };
            assert_eq!(first[at], want, "{dtype:?} ({r}, {c})");
            let want = match () {
                () if covered(20, 30) => operands.c.get(at),
                () if covered(20, 40) => 0.0,
                () => 7.0,
            };
            assert_eq!(second[at], want, "{dtype:?} transposed ({r}, {c})");
        }
    }
}
