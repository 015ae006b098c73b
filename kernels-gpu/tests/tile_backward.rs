//! Operations of the gradients against sums and products in f64.

mod common;

use common::{Buffer, assert_close, run};
use half::bf16;
use kernels_gpu::element::DtypeCode;
use kernels_gpu::params::Tensor;
use kernels_gpu::tile::{Pairs, Shared, Warpgroup};

const ROWS: usize = 64;
const COLS: usize = 32;
const LEN: usize = ROWS * COLS;

#[derive(Clone, Copy)]
struct Io {
    x: [Tensor; 9],
    scores: [Tensor; 2],
    out: [Tensor; 4],
    span: usize,
}

/// Nine matrices `[64, 32]`, of which the last is decays of `decay_cols` columns, and two squares.
struct Operands {
    x: Vec<Buffer>,
    scores: Vec<Buffer>,
    decay_cols: usize,
}

impl Operands {
    fn new(decay_cols: usize) -> Self {
        let mut x: Vec<_> = (0..8).map(|i| Buffer::random(DtypeCode::F32, LEN, i)).collect();
        let mut decay = Buffer::between(DtypeCode::F32, ROWS * decay_cols, 9, 0.3, 1.0).values();
        // exp(-160) is 0 in f32: everything before this row is forgotten.
        decay[20 * decay_cols..21 * decay_cols].fill(0.0);
        x.push(Buffer::of(DtypeCode::F32, &decay));
        let scores = (10..12).map(|i| Buffer::random(DtypeCode::F32, ROWS * ROWS, i)).collect();
        Self { x, scores, decay_cols }
    }

    fn run(&mut self, span: usize, kernel: common::Kernel<Io>) -> [Vec<f32>; 4] {
        let mut out: [Buffer; 4] = std::array::from_fn(|_| Buffer::filled(DtypeCode::F32, LEN, 0.0));
        let x = std::array::from_fn(|i| self.x[i].tensor());
        let scores = std::array::from_fn(|i| self.scores[i].tensor());
        let io = Io { x, scores, out: out.each_mut().map(Buffer::tensor), span };
        run(1, &io, kernel).unwrap();
        out.map(|buffer| buffer.values())
    }

    fn at(&self, which: usize, r: usize, c: usize) -> f64 {
        self.x[which].get(r * COLS + c).into()
    }

    fn score(&self, which: usize, i: usize, j: usize) -> f64 {
        self.scores[which].get(i * ROWS + j).into()
    }

    /// Product of the decays of channel `c` in rows `first .. end`.
    fn product(&self, first: usize, end: usize, c: usize) -> f64 {
        let c = c.min(self.decay_cols - 1);
        (first..end).map(|s| f64::from(self.x[8].get(s * self.decay_cols + c))).product()
    }

    /// The element-by-element sum `f(r, c)`.
    fn expect(f: impl Fn(usize, usize) -> f64) -> Vec<f64> {
        (0..LEN).map(|i| f(i / COLS, i % COLS)).collect()
    }
}

/// dq, dk, dg, row_q, row_k, col_k, q, k and the decays, in this order.
fn load_pairs(wg: &mut Warpgroup<'_>, p: &Io) -> Pairs {
    let mut tile = |i: usize| {
        let source = p.x[i];
        let tile = wg.shared(ROWS, source.len as usize / ROWS);
        wg.load(tile, source.matrix(0, ROWS, tile.cols(), tile.cols(), 1));
        tile
    };
    let [dq, dk, dg, row_q, row_k, col_k, q, k, decay] = std::array::from_fn(&mut tile);
    wg.sync();
    Pairs { dq, dk, dg, row_q, row_k, col_k, q, k, decay }
}

fn store_pairs(wg: &mut Warpgroup<'_>, p: &Io, t: &Pairs) {
    wg.sync();
    for (out, tile) in p.out.into_iter().zip([t.dq, t.dk, t.dg, t.row_k]) {
        wg.store(out.matrix(0, ROWS, COLS, COLS, 1), tile);
    }
}

#[test]
fn gradients_across_the_edges_of_spans() {
    for decay_cols in [1, COLS] {
        for span in [16, 32, 64] {
            let mut x = Operands::new(decay_cols);
            let [dq, dk, dg, row_k] = x.run(span, |wg, p| {
                let pairs = load_pairs(wg, p);
                wg.gated_gradients(&pairs, p.span);
                store_pairs(wg, p, &pairs);
            });
            let first = |r: usize| r / span * span;
            // Gradients of the three rows, with their decays.
            let of_q = |r: usize, c: usize| x.at(3, r, c) * x.product(first(r), r + 1, c);
            let of_row_k = |r: usize, c: usize| x.at(4, r, c) * x.product(first(r), r + 1, c);
            let of_col_k = |r: usize, c: usize| x.at(5, r, c) * x.product(r + 1, first(r) + span, c);
            let left = |r, c| x.at(6, r, c) * of_q(r, c) + x.at(7, r, c) * of_row_k(r, c);
            let right = |r, c| x.at(7, r, c) * of_col_k(r, c);
            let what = |name| format!("{name}, span {span}, {decay_cols} decays");
            assert_close(&what("dq"), &dq, &Operands::expect(|r, c| x.at(0, r, c) + of_q(r, c)), 1e-5, 1e-6);
            let expected = Operands::expect(|r, c| x.at(1, r, c) + of_row_k(r, c) + of_col_k(r, c));
            assert_close(&what("dk"), &dk, &expected, 1e-5, 1e-6);
            let expected = Operands::expect(|s, c| {
                let after: f64 = (s..first(s) + span).map(|i| left(i, c)).sum();
                let before: f64 = (first(s)..s).map(|j| right(j, c)).sum();
                x.at(2, s, c) + after + before
            });
            assert_close(&what("dg"), &dg, &expected, 1e-5, 1e-5);
            let expected = Operands::expect(|r, c| x.at(7, r, c) * of_row_k(r, c));
            assert_close(&what("row_k"), &row_k, &expected, 1e-5, 1e-6);
        }
    }
}

#[test]
fn gradients_inside_diagonal_blocks() {
    for decay_cols in [1, COLS] {
        let mut x = Operands::new(decay_cols);
        let [dq, dk, dg, row_k] = x.run(16, |wg, p| {
            let pairs = load_pairs(wg, p);
            let scores = p.scores.map(|source| {
                let tile: Shared<f32> = wg.shared(ROWS, ROWS);
                wg.load(tile, source.matrix(0, ROWS, ROWS, ROWS, 1));
                tile
            });
            wg.sync();
            wg.diagonal_gradients(&pairs, scores[0], scores[1]);
            store_pairs(wg, p, &pairs);
        });
        let block = |r: usize| r / 16 * 16;
        let sum = |range: std::ops::Range<usize>, f: &dyn Fn(usize) -> f64| range.map(f).sum::<f64>();
        // The share of rows j <= i in the gradients, and that of a pair in the gradient of the decays between them.
        let gated = |i, j, c| x.product(j + 1, i + 1, c);
        let row_of_k = |i, c| sum(block(i)..i, &|j| x.score(1, i, j) * x.at(7, j, c) * gated(i, j, c));
        let of_pair = |i, j, c| {
            let (q, k) = (x.score(0, i, j) * x.at(6, i, c), x.score(1, i, j) * x.at(7, i, c));
            (if i == j { q } else { q + k }) * gated(i, j, c)
        };
        let expected = Operands::expect(|i, c| {
            x.at(0, i, c) + sum(block(i)..i + 1, &|j| x.score(0, i, j) * x.at(7, j, c) * gated(i, j, c))
        });
        assert_close("dq", &dq, &expected, 1e-5, 1e-5);
        let expected =
            Operands::expect(|r, c| x.at(1, r, c) + row_of_k(r, c) + sum(r..block(r) + 16, &|i| of_pair(i, r, c)));
        assert_close("dk", &dk, &expected, 1e-5, 1e-5);
        let expected = Operands::expect(|s, c| {
            let pairs = |i| sum(block(s)..s, &|j| of_pair(i, j, c) * x.at(7, j, c));
            x.at(2, s, c) + sum(s..block(s) + 16, &pairs)
        });
        assert_close("dg", &dg, &expected, 1e-5, 1e-5);
        let expected = Operands::expect(|r, c| x.at(7, r, c) * row_of_k(r, c));
        assert_close("row_k", &row_k, &expected, 1e-5, 1e-5);
    }
}

#[test]
fn sums_over_rows_and_columns() {
    let mut x = Operands::new(COLS);
    let [column, row, dots, masked] = x.run(16, |wg, p| {
        let pairs = load_pairs(wg, p);
        let (a, b) = (pairs.dq, pairs.dk);
        let [column, dots] = [wg.shared::<f32>(ROWS, 1), wg.shared::<f32>(ROWS, 1)];
        let [row, row_dots] = [wg.shared::<f32>(1, COLS), wg.shared::<f32>(1, COLS)];
        let narrow = wg.shared::<bf16>(ROWS, COLS);
        wg.fill(column, |_, _| 1.0);
        wg.fill(dots, |_, _| 2.0);
        wg.fill(row_dots, |_, _| 3.0);
        wg.select(narrow, b, |r, c| c < r);
        wg.sync();
        wg.add_row_sums(column, a);
        wg.add_row_dots(dots, a, narrow);
        wg.column_sums(row, a);
        wg.add_column_dots(row_dots, a, b);
        wg.sync();
        // Everything beside each other: the column, the row on all rows, the dots, the masked tile.
        wg.store(p.out[0].matrix(0, ROWS, 1, COLS, 1), column);
        wg.fill_rows(pairs.dg, row);
        wg.fill_rows(pairs.q, row_dots);
        wg.sync();
        wg.combine(pairs.dg, pairs.q, |sum, dot| 100.0 * sum + dot);
        wg.map(pairs.k, |r, c, x| if r == c { 1.0 } else { 2.0 * x });
        wg.sync();
        wg.store(p.out[1].matrix(0, ROWS, COLS, COLS, 1), pairs.dg);
        wg.store(p.out[2].matrix(0, ROWS, 1, COLS, 1), dots);
        wg.store(p.out[2].matrix(1, ROWS, COLS - 1, COLS, 1), pairs.k.columns(1, COLS - 1));
        wg.store(p.out[3].matrix(0, ROWS, COLS, COLS, 1), narrow);
    });
    let rounded = |r, c| if c < r { f64::from(bf16::from_f64(x.at(1, r, c)).to_f32()) } else { 0.0 };
    let sum = |n: usize, f: &dyn Fn(usize) -> f64| (0..n).map(f).sum::<f64>();
    let expected = Operands::expect(|r, c| if c == 0 { 1.0 + sum(COLS, &|c| x.at(0, r, c)) } else { 0.0 });
    assert_close("row sums", &column, &expected, 1e-5, 1e-5);
    let expected = Operands::expect(|_, c| {
        100.0 * sum(ROWS, &|r| x.at(0, r, c)) + 3.0 + sum(ROWS, &|r| x.at(0, r, c) * x.at(1, r, c))
    });
    assert_close("column sums", &row, &expected, 1e-5, 1e-3);
    let expected = Operands::expect(|r, c| match c {
        0 => 2.0 + sum(COLS, &|c| x.at(0, r, c) * rounded(r, c)),
        c if c == r => 1.0,
        c => 2.0 * x.at(7, r, c),
    });
    assert_close("row dots and mapped elements", &dots, &expected, 1e-5, 1e-5);
    assert_close("selected elements", &masked, &Operands::expect(rounded), 0.0, 0.0);
}

#[test]
fn sums_of_terms_are_in_order_and_of_any_number() {
    for (dtype, terms) in [(DtypeCode::F32, 0usize), (DtypeCode::F32, 1), (DtypeCode::F32, 5), (DtypeCode::Bf16, 3)] {
        #[derive(Clone, Copy)]
        struct Sum {
            x: Tensor,
            out: Tensor,
            terms: usize,
        }
        // Rows are 6 apart and have 4 columns; terms follow each other at a distance of 40.
        let mut x = Buffer::random(dtype, 40 * terms.max(1), 5);
        let mut out = Buffer::filled(DtypeCode::F32, 12, 9.0);
        run(1, &Sum { x: x.tensor(), out: out.tensor(), terms }, |wg, p| {
            let tile = wg.shared(3, 4);
            wg.load_sum(tile, p.x.matrix(2, 3, 4, 6, 1), p.terms, 40);
            wg.sync();
            wg.store(p.out.matrix(0, 3, 4, 4, 1), tile);
        })
        .unwrap();
        let term = |i: usize, t: usize| x.get(2 + i / 4 * 6 + i % 4 + 40 * t);
        let expected: Vec<f64> = (0..12).map(|i| (0..terms).fold(0.0f32, |sum, t| sum + term(i, t)).into()).collect();
        assert_close(&format!("{terms} terms"), &out.values(), &expected, 0.0, 0.0);
    }
}

#[test]
fn blocks_of_all_kernels_fit_into_shared_memory() {
    use bytemuck::Zeroable;
    use kernels_gpu::backward::{grad, reduce, scan, states};
    use kernels_gpu::params::ReduceParams;
    use kernels_gpu::tile::SHARED_BYTES;
    for element in [2, 4] {
        for chunk in [16, 32, 64] {
            for k in (16..=256).step_by(16) {
                for per_channel in [false, true] {
                    assert!(
                        grad::shared_bytes(k, chunk, element, per_channel) <= SHARED_BYTES,
                        "{k} {chunk} {element}"
                    );
                }
                assert!(scan::shared_bytes(k, chunk, element, 1) <= SHARED_BYTES);
                assert!(states::shared_bytes(k, chunk, element, 1) <= SHARED_BYTES);
                // 64 heads' rows of K columns, and a sum over chunks of as many columns.
                for (rows, cols) in [(64, k), (1, 64 * k)] {
                    let mut params = ReduceParams::zeroed();
                    (params.rows, params.cols) = (rows, cols as u64);
                    assert!(reduce::launch(&params).shared_bytes <= SHARED_BYTES);
                }
            }
        }
    }
}
