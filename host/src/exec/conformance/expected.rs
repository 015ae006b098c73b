//! What each operation must give: plain loops in f64, written from the operations' documentation.

use kernels_gpu::conformance::{B_ABSENT, TileOp, block};
use kernels_gpu::math::TINY;
use kernels_gpu::params::StampKind;
use kernels_gpu::tile::DIAGONAL_FLOOR;

use super::case::{Case, rounded};
use crate::tensor::Dtype;

/// One element as it must be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Element {
    /// Its value before it is rounded to the types through which it goes.
    pub value: f64,
    /// What rounding errors are relative to: the value itself, or the sum of the sizes of its terms.
    pub magnitude: f64,
}

impl Element {
    fn of(value: f64) -> Self {
        Self { value, magnitude: value.abs() }
    }

    /// A sum with these terms.
    fn sum(terms: impl IntoIterator<Item = f64>) -> Self {
        terms
            .into_iter()
            .fold(Self::of(0.0), |sum, term| Self { value: sum.value + term, magnitude: sum.magnitude + term.abs() })
    }
}

/// Zero where the kernels set a running product to zero.
fn flushed(x: f64) -> f64 {
    if x.abs() < f64::from(TINY) { 0.0 } else { x }
}

/// Product of decays in the order in which they are multiplied.
fn running(decays: impl IntoIterator<Item = f64>) -> f64 {
    decays.into_iter().fold(1.0, |product, decay| flushed(product * decay))
}

/// The result of warpgroup `index` of block `block`, row by row.
pub fn expected(case: &Case, block: usize, index: usize) -> Vec<Element> {
    let (rows, cols) = (case.out.rows, case.out.cols);
    if case.op == TileOp::InvertUnitLower {
        return inverse(case);
    }
    (0..rows * cols).map(|i| element(case, block, index, i / cols, i % cols)).collect()
}

fn element(case: &Case, block: usize, index: usize, i: usize, j: usize) -> Element {
    let Case { a, b, c, d, inner, span, .. } = case;
    let factor = f64::from(case.factor);
    // Operands of products are rounded to the tiles' type when they are loaded.
    let ra = |r, c| f64::from(rounded(case.dtype, a.at(r, c) as f32));
    let rb = |r, c| f64::from(rounded(case.dtype, b.at(r, c) as f32));
    let decay = |r, c| b.at(r, if b.cols == 1 { 0 } else { c });
    let inside = i < a.rows && j < a.cols;
    match case.op {
        TileOp::AccZeros => Element::of(0.0),
        TileOp::AccLoad => Element::of(ra(i, j)),
        TileOp::AccMma => Element::sum((0..*inner).map(|l| ra(i, l) * rb(l, j)).chain([c.at(i, j)])),
        TileOp::AccMmaSub => Element::sum((0..*inner).map(|l| -ra(i, l) * rb(l, j)).chain([c.at(i, j)])),
        TileOp::AccAdd => Element::sum([c.at(i, j), ra(i, j)]),
        TileOp::AccScaleColumns => Element::of(flushed(c.at(i, j) * b.at(0, j))),
        TileOp::AccStore | TileOp::AccStoreGlobal => Element::of(c.at(i, j)),
        TileOp::AccAddGlobal => Element::sum([c.at(i, j), a.at(i, j)]),
        TileOp::Load | TileOp::Store | TileOp::ToOperand => Element::of(a.at(i, j)),
        TileOp::LoadMap if inside => Element::sum([1.5 * a.at(i, j), -0.25]),
        TileOp::LoadMap => Element::of(factor),
        TileOp::LoadFunction if inside => function(*span, a.at(i, j)),
        TileOp::LoadFunction => Element::of(0.0),
        TileOp::Fill => Element::of(factor * (case.cols * i + j) as f64),
        TileOp::Convert => Element::of(1.25 * a.at(i, j)),
        TileOp::ConvertRest => Element::of(a.at(i, j) - ra(i, j)),
        TileOp::ConvertUp => Element::of(1.25 * ra(i, j)),
        TileOp::MapWithRow if i < *inner => {
            let parameter = if case.flags & B_ABSENT == 0 { b.at(0, j) } else { 0.0 };
            Element::sum([0.5 * a.at(i, j), parameter])
        }
        TileOp::MapWithRow => Element::of(a.at(i, j)),
        TileOp::ScaleRows => Element::of(a.at(i, j) * b.at(i, 0) * factor),
        TileOp::InverseNorms if i < a.rows => {
            let squares: f64 = (0..a.cols).map(|l| a.at(i, l) * a.at(i, l)).sum();
            Element::of(1.0 / (squares + factor).sqrt())
        }
        TileOp::InverseNorms => Element::of(0.0),
        TileOp::Scalar => Element::of(a.at(0, 0)),
        TileOp::ScalePrefix => Element::of(a.at(i, j) * running((i - i % span..=i).map(|s| decay(s, j)))),
        TileOp::ScaleSuffix => {
            let end = i - i % span + span;
            Element::of(a.at(i, j) * running((i + 1..end).rev().map(|s| decay(s, j))))
        }
        TileOp::TotalDecay => Element::of(running((0..case.rows).map(|s| decay(s, j)))),
        TileOp::ScalePairwise if j <= i => Element::of(c.at(i, j) * running((j + 1..=i).map(|s| b.at(s, 0)))),
        TileOp::ScalePairwise => Element::of(0.0),
        TileOp::DiagonalScores if j <= i && i / 16 == j / 16 => {
            // Split decays are held above a floor; without, the running product begins with the element of b.
            let split = case.dtype == Dtype::Bf16;
            let decay = |product: f64, decay: f64| {
                if split { product * decay.max(DIAGONAL_FLOOR.into()) } else { flushed(product * decay) }
            };
            let product = |l| (j + 1..=i).fold(b.at(j, l), |product, s| decay(product, d.at(s, l)));
            Element::sum((0..*inner).map(|l| a.at(i, l) * product(l)).chain([c.at(i, j)]))
        }
        TileOp::DiagonalScores => Element::of(c.at(i, j)),
        TileOp::InvertUnitLower => unreachable!("a whole matrix at a time"),
        TileOp::Place => Element::of(block::place(index, case.warpgroups, block, case.grid).into()),
        TileOp::Elect => Element::of((0..block::ROUNDS).map(|round| 0.5 * (round as f64 + 100.0 * round as f64)).sum()),
        TileOp::SyncAnd => Element::of(f64::from(1u32 << ((1 << case.warpgroups) - 1))),
        TileOp::Exchange | TileOp::ExchangeUnequal => {
            let neighbour = (index + 1) % case.warpgroups;
            Element::sum((0..block::ROUNDS).map(|round| f64::from(block::exchanged(round, neighbour, i, j))))
        }
        TileOp::Clock => Element::of(1.0),
        TileOp::Read => Element::of(case.words[*span] as f64),
        TileOp::NextTicket | TileOp::Increment | TileOp::Stamp => unreachable!("{:?} has no result", case.op),
    }
}

/// Function `which` of `elements::FUNCTIONS`.
fn function(which: usize, x: f64) -> Element {
    match which {
        0 => Element::of(x.exp()),
        1 => Element::of(x.ln_1p()),
        2 => Element::of(1.0 / x.sqrt()),
        3 => Element::of(1.0 / (1.0 + (-x).exp())),
        _ => Element::of(x.max(0.0) + (-x.abs()).exp().ln_1p()),
    }
}

/// X = (I + strictly lower part of c)^-1 by forward substitution, column by column. Errors of substitution are relative to
/// |X| |L| |X| (Higham, Accuracy and Stability of Numerical Algorithms, 14.2).
fn inverse(case: &Case) -> Vec<Element> {
    let n = case.rows;
    let lower = |i: usize, j: usize| if i == j { 1.0 } else { case.c.at(i, j) };
    let mut x = vec![0.0f64; n * n];
    for j in 0..n {
        for i in j..n {
            let unit = if i == j { 1.0 } else { 0.0 };
            x[i * n + j] = unit - (j..i).map(|l| lower(i, l) * x[l * n + j]).sum::<f64>();
        }
    }
    // |L| |X|, then |X| times that.
    let mut right = vec![0.0f64; n * n];
    for (i, j) in (0..n * n).map(|e| (e / n, e % n)).filter(|(i, j)| j <= i) {
        right[i * n + j] = (j..=i).map(|l| lower(i, l).abs() * x[l * n + j].abs()).sum();
    }
    let magnitude = |i: usize, j: usize| (j..=i).map(|l| x[i * n + l].abs() * right[l * n + j]).sum::<f64>();
    (0..n * n)
        .map(|e| Element { value: x[e], magnitude: if e % n <= e / n { magnitude(e / n, e % n) } else { 0.0 } })
        .collect()
}

/// The words after the launch, in the order of [`comparable`].
pub fn expected_words(case: &Case) -> Vec<u64> {
    let copies = case.copies();
    let mut words = case.words.clone();
    match case.op {
        TileOp::Elect => words[..copies].fill(block::ROUNDS as u64),
        TileOp::NextTicket => {
            // Each block takes one ticket too many.
            words[0] = (block::TICKETS + case.grid) as u64;
            words[1..=block::TICKETS * case.warpgroups].fill(1);
        }
        TileOp::Increment => {
            words[0] = copies as u64;
            words[1..=copies].fill(1);
        }
        TileOp::Stamp => {
            words[0] = (case.grid * (case.warpgroups + 1)) as u64;
            let [start, end] = block::SPAN;
            let stamps = (0..case.grid).flat_map(|block_index| {
                let kind = move |kind: StampKind| kind as u64 | (block_index as u64) << 32;
                let own =
                    (0..case.warpgroups as u64).map(move |index| [start, end, kind(StampKind::Put), index | 1 << 32]);
                own.chain([[start, end, kind(StampKind::Scan), u64::from(block::BLOCK_HEAD)]])
            });
            for (place, [start, end, kind, head]) in words[2..].chunks_exact_mut(block::STAMP_WORDS).zip(stamps) {
                place.copy_from_slice(&[start, end, kind, head, block::STAMPED_BYTES]);
            }
        }
        _ => {}
    }
    words
}

/// Words in an order that does not depend on which thread came first.
pub fn comparable(case: &Case, words: &[u64]) -> Vec<u64> {
    let mut words = words.to_vec();
    if case.op == TileOp::Stamp {
        let mut stamps = words[2..].as_chunks::<{ block::STAMP_WORDS }>().0.to_vec();
        // By block, then by head; places that were not used come last.
        stamps.sort_by_key(|stamp| (stamp[4] == 0, stamp[2] >> 32, stamp[3] & 0xffff_ffff));
        words.splice(2..2 + block::STAMP_WORDS * stamps.len(), stamps.into_iter().flatten());
    }
    words
}
