//! Operations with running products of decays, and the triangular inverse, against sums and products in f64.

mod common;

use common::{Buffer, Kernel, assert_close, epsilon, run};
use half::{bf16, f16};
use kernels_gpu::element::{DtypeCode, Element};
use kernels_gpu::params::Tensor;
use kernels_gpu::tile::{Shared, Warpgroup, splits_diagonal};

const ROWS: usize = 64;
const COLS: usize = 48;

#[derive(Clone, Copy)]
struct Io {
    x: Tensor,
    y: Tensor,
    decay: Tensor,
    out: Tensor,
    span: usize,
}

/// A problem: two matrices `[64, 48]` and decays, of which two are as strong as they come.
struct Operands {
    x: Buffer,
    y: Buffer,
    decay: Buffer,
    decay_cols: usize,
}

impl Operands {
    fn new(decay_cols: usize) -> Self {
        let mut decay = Buffer::between(DtypeCode::F32, ROWS * decay_cols, 3, 0.3, 1.0).values();
        // exp(-160) is 0 in f32: everything before this row is forgotten.
        decay[20 * decay_cols..21 * decay_cols].fill(0.0);
        decay[41 * decay_cols] = 1e-20;
        decay[42 * decay_cols] = 1e-20;
        Self {
            x: Buffer::random(DtypeCode::F32, ROWS * COLS, 1),
            y: Buffer::random(DtypeCode::F32, ROWS * COLS, 2),
            decay: Buffer::of(DtypeCode::F32, &decay),
            decay_cols,
        }
    }

    fn run(&mut self, span: usize, len: usize, kernel: Kernel<Io>) -> Vec<f32> {
        let mut out = Buffer::filled(DtypeCode::F32, len, 7.0);
        let (x, y, decay) = (self.x.tensor(), self.y.tensor(), self.decay.tensor());
        run(1, &Io { x, y, decay, out: out.tensor(), span }, kernel).unwrap();
        out.values()
    }

    /// Product of the decays of channel `c` in rows `first ..= last`.
    fn product(&self, first: usize, last: usize, c: usize) -> f64 {
        let c = c.min(self.decay_cols - 1);
        (first..=last).map(|s| f64::from(self.decay.get(s * self.decay_cols + c))).product()
    }
}

fn loaded(wg: &mut Warpgroup<'_>, p: &Io) -> [Shared<f32>; 3] {
    let decay_cols = p.decay.len as usize / ROWS;
    let tiles = [wg.shared(ROWS, COLS), wg.shared(ROWS, COLS), wg.shared(ROWS, decay_cols)];
    for (tile, source) in tiles.into_iter().zip([p.x, p.y, p.decay]) {
        wg.load(tile, source.matrix(0, ROWS, tile.cols(), tile.cols(), 1));
    }
    wg.sync();
    tiles
}

fn running<E: Element>(suffix: bool) {
    for decay_cols in [1, COLS] {
        for span in [16, 32, 64] {
            let mut operands = Operands::new(decay_cols);
            let kernel = if suffix {
                |wg: &mut Warpgroup<'_>, p: &Io| {
                    let [x, _, decay] = loaded(wg, p);
                    let to = wg.shared::<E>(ROWS, COLS);
                    wg.scale_suffix(to, x, decay, p.span);
                    wg.sync();
                    wg.store(p.out.matrix(0, ROWS, COLS, COLS, 1), to);
                }
            } else {
                |wg: &mut Warpgroup<'_>, p: &Io| {
                    let [x, _, decay] = loaded(wg, p);
                    let to = wg.shared::<E>(ROWS, COLS);
                    wg.scale_prefix(to, x, decay, p.span);
                    wg.sync();
                    wg.store(p.out.matrix(0, ROWS, COLS, COLS, 1), to);
                }
            };
            let found = operands.run(span, ROWS * COLS, kernel);
            let expected: Vec<f64> = (0..ROWS * COLS)
                .map(|i| {
                    let (r, c) = (i / COLS, i % COLS);
                    let start = r / span * span;
                    let product = match suffix {
                        true => operands.product(r + 1, start + span - 1, c),
                        false => operands.product(start, r, c),
                    };
                    f64::from(operands.x.get(i)) * product
                })
                .collect();
            let what = format!("suffix {suffix}, span {span}, {decay_cols} decays");
            // f16 has fewer exponents: below 6e-5 it rounds to multiples of 6e-8.
            assert_close(&what, &found, &expected, epsilon::<E>() + 1e-5, 1e-7);
        }
    }
}

#[test]
fn prefixes_multiply_from_the_start_of_each_span() {
    running::<f32>(false);
    running::<bf16>(false);
    running::<f16>(false);
}

#[test]
fn suffixes_multiply_to_the_end_of_each_span() {
    running::<f32>(true);
    running::<bf16>(true);
    running::<f16>(true);
}

#[test]
fn the_total_is_the_product_of_a_column() {
    for decay_cols in [1, COLS] {
        let mut operands = Operands::new(decay_cols);
        let kernel = |wg: &mut Warpgroup<'_>, p: &Io| {
            let [_, _, decay] = loaded(wg, p);
            let row = wg.shared::<f32>(1, COLS);
            wg.total_decay(row, decay.row_range(21, 20));
            wg.sync();
            wg.store(p.out.matrix(0, 1, COLS, COLS, 1), row);
        };
        let found = operands.run(0, COLS, kernel);
        let expected: Vec<f64> = (0..COLS).map(|c| operands.product(21, 40, c)).collect();
        assert_close("total", &found, &expected, 1e-5, 0.0);
    }
}

#[test]
fn pairwise_scaling_decays_from_column_to_row() {
    let mut operands = Operands::new(1);
    let found = operands.run(0, 48 * 48, |wg, p| {
        let [x, _, decay] = loaded(wg, p);
        let scores = x.row_range(0, 48);
        wg.scale_pairwise(scores, decay.row_range(0, 48));
        wg.sync();
        wg.store(p.out.matrix(0, 48, 48, 48, 1), scores);
    });
    let expected: Vec<f64> = (0..48 * 48)
        .map(|at| match (at / 48, at % 48) {
            (i, j) if j > i => 0.0,
            (i, j) => f64::from(operands.x.get(i * COLS + j)) * operands.product(j + 1, i, 0),
        })
        .collect();
    // Products below 1e-30 become zero.
    assert_close("pairwise", &found, &expected, 1e-5, 1e-30);
}

fn diagonal_scores<E: Element>() {
    let mut operands = Operands::new(COLS);
    let found = operands.run(0, ROWS * ROWS, |wg, p| {
        let [left, right, decay] = loaded(wg, p);
        let scores = wg.shared::<f32>(ROWS, ROWS);
        wg.fill(scores, |i, j| if i == j { 0.5 } else { 0.0 });
        wg.sync();
        // Two slabs of channels, added up.
        for (first, count) in [(0, 32), (32, 16)] {
            let part = |tile: &Shared<f32>| tile.columns(first, count);
            wg.diagonal_scores::<E>(scores, part(&left), part(&right), part(&decay));
            wg.sync();
        }
        wg.store(p.out.matrix(0, ROWS, ROWS, ROWS, 1), scores);
    });
    let expected: Vec<f64> = (0..ROWS * ROWS)
        .map(|at| {
            let (i, j) = (at / ROWS, at % ROWS);
            if i / 16 != j / 16 || j > i {
                return 0.0;
            }
            let term = |c: usize| {
                f64::from(operands.x.get(i * COLS + c))
                    * f64::from(operands.y.get(j * COLS + c))
                    * operands.product(j + 1, i, c)
            };
            (0..COLS).map(term).sum::<f64>() + if i == j { 0.5 } else { 0.0 }
        })
        .collect();
    // Where decays are split, the floor adds up to 2^-15 of a product, and both factors are rounded.
    let split = splits_diagonal::<E>();
    let (relative, absolute) = if split { (1e-2, 2e-2) } else { (1e-5, 1e-6) };
    assert_close("diagonal scores", &found, &expected, relative, absolute);
    let exact = found.iter().zip(&expected).all(|(&x, &y)| (f64::from(x) - y).abs() <= 1e-5 * y.abs() + 1e-6);
    assert_eq!(exact, !split, "operands are rounded where decays are split");
}

#[test]
fn diagonal_scores_are_sums_over_channels_in_each_block_of_16() {
    diagonal_scores::<f32>();
    diagonal_scores::<f16>();
}

#[test]
fn diagonal_scores_of_bf16_split_decays_at_the_ninth_token() {
    diagonal_scores::<bf16>();
}

fn inverse(n: usize) {
    let mut a = Buffer::between(DtypeCode::F32, 64 * 64, 5, -0.3, 0.3);
    let mut out = Buffer::filled(DtypeCode::F32, n * n, 7.0);
    let io = Io { x: a.tensor(), y: Tensor::absent(), decay: Tensor::absent(), out: out.tensor(), span: n };
    run(1, &io, |wg, p| {
        let tile = wg.shared::<f32>(64, 64).part(0, 0, p.span, p.span);
        wg.load(tile, p.x.matrix(0, p.span, p.span, 64, 1));
        wg.sync();
        wg.invert_unit_lower(tile);
        wg.sync();
        wg.store(p.out.matrix(0, p.span, p.span, p.span, 1), tile);
    })
    .unwrap();
    // (I + L) times the inverse is the identity, whatever stood on and above the diagonal.
    let lower = |i: usize, j: usize| if j < i { f64::from(a.get(i * 64 + j)) } else { f64::from(u8::from(i == j)) };
    for i in 0..n {
        for j in 0..n {
            let product: f64 = (0..=i).map(|l| lower(i, l) * f64::from(out.get(l * n + j))).sum();
            let identity = f64::from(u8::from(i == j));
            assert!((product - identity).abs() < 1e-5, "n = {n}, ({i}, {j}): {product}");
            assert!(j <= i || out.get(i * n + j) == 0.0, "n = {n}, ({i}, {j}) is above the diagonal");
        }
    }
}

#[test]
fn the_inverse_of_a_unit_lower_triangle() {
    for n in [16, 32, 64] {
        inverse(n);
    }
}
