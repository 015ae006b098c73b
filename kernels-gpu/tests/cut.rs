//! What `prep` says of the norm of a chunk's transition, against the transition itself in f64; and the operations that this takes.

mod common;

use common::{Buffer, launch, run};
use kernels_gpu::element::DtypeCode;
use kernels_gpu::gate::{Gate, Gdn, Kda};
use kernels_gpu::params::{Array, Beside, Chunk, GateForm, PrepParams, Records, Sizes, Tables, Tensor, TraceBuffer};
use kernels_gpu::prep::{WARPGROUPS, prep};
use kernels_gpu::tile::Within;
use kernels_gpu::tile::host::BlockRunner;

const K: usize = 32;
const CHUNK: usize = 16;

/// One head; rows of k and of g are `[tokens, K]` (g of GDN `[tokens]`).
struct Problem {
    per_channel: bool,
    k: Vec<f32>,
    g: Vec<f32>,
    beta: Vec<f32>,
    l2norm: bool,
}

impl Problem {
    /// Keys of lengths up to `length`, steps from -0.3 to `beta`, decays of which some are strong.
    fn random(per_channel: bool, tokens: usize, seed: u64, length: f32, beta: f32, l2norm: bool) -> Self {
        let numbers =
            |n: usize, seed: u64, low: f32, high: f32| Buffer::between(DtypeCode::F32, n, seed, low, high).values();
        let mut k = numbers(tokens * K, seed, -1.0, 1.0);
        let lengths = numbers(tokens, seed + 1, 0.0, length);
        for (row, want) in k.chunks_exact_mut(K).zip(&lengths) {
            let found = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            row.iter_mut().for_each(|x| *x *= want / found);
        }
        let width = if per_channel { K } else { 1 };
        let g = numbers(tokens * width, seed + 2, -1.5, 0.0).iter().map(|x| x * x * x * 0.2).collect();
        Self { per_channel, k, g, beta: numbers(tokens, seed + 3, -0.3, beta), l2norm }
    }

    fn tokens(&self) -> usize {
        self.beta.len()
    }

    /// (factor, growth) of every chunk, as `prep` has them.
    fn factors(&self) -> Vec<[f32; 2]> {
        let tokens = self.tokens();
        let chunks: Vec<Chunk> = (0..tokens)
            .step_by(CHUNK)
            .map(|token| Chunk { token: token as u32, len: CHUNK.min(tokens - token) as u32 })
            .collect();
        let of = |values: &[f32]| Buffer::of(DtypeCode::F32, values);
        let (mut k, mut g, mut beta) = (of(&self.k), of(&self.g), of(&self.beta));
        let sizes = Sizes { h: 1, hv: 1, k: K as u32, v: 16, chunk: CHUNK as u32, pad: 0 };
        let mut operands = Buffer::filled(DtypeCode::F32, chunks.len() * Records::record_len(&sizes), 0.0);
        let mut decay = Buffer::filled(DtypeCode::F32, chunks.len() * K, 0.0);
        let mut factors = Buffer::filled(DtypeCode::F32, 2 * chunks.len(), -1.0);
        let records = Records { operands: operands.tensor(), decay: decay.tensor(), factors: factors.tensor(), sizes };
        let none = Array::empty();
        let params = PrepParams {
            tables: Tables { sizes, chunks: Array::of(&chunks), segments: none, sources: none, targets: none },
            q: k.tensor(),
            k: k.tensor(),
            g: g.tensor(),
            beta: beta.tensor(),
            a_log: Tensor::absent(),
            dt_bias: Tensor::absent(),
            records,
            gate_form: GateForm::Given as u32,
            l2norm: u32::from(self.l2norm),
            bound: 0.0,
            scale: 1.0,
            beta_factor: 0.0,
            pad: 0,
            beside: Beside::none(),
            trace: TraceBuffer { stamps: none, cursor: none },
        };
        let mut runner = BlockRunner::new();
        let checker = kernels_gpu::tile::host::Checker::new();
        fn body<G: Gate>(wg: &mut kernels_gpu::tile::Warpgroup<'_>, p: &PrepParams) {
            prep::<G, f32>(wg, p);
        }
        let kernel = if self.per_channel { body::<Kda> } else { body::<Gdn> };
        launch(&mut runner, Some(&checker), WARPGROUPS, chunks.len(), &params, kernel).unwrap();
        factors.values().chunks_exact(2).map(|x| [x[0], x[1]]).collect()
    }

    /// Norms of the transitions from the start of each chunk to each of its tokens.
    fn norms(&self) -> Vec<Vec<f64>> {
        let width = if self.per_channel { K } else { 1 };
        let mut all = Vec::new();
        for first in (0..self.tokens()).step_by(CHUNK) {
            let mut m: Vec<f64> = (0..K * K).map(|i| f64::from(u8::from(i / K == i % K))).collect();
            let mut norms = Vec::new();
            for token in first..self.tokens().min(first + CHUNK) {
                let k: Vec<f64> = self.k[token * K..][..K].iter().map(|&x| f64::from(x)).collect();
                let square: f64 = k.iter().map(|x| x * x).sum();
                let scale = if self.l2norm { 1.0 / (square + 1e-6).sqrt() } else { 1.0 };
                for (c, row) in m.chunks_exact_mut(K).enumerate() {
                    let g = f64::from(self.g[token * width + c % width]);
                    row.iter_mut().for_each(|x| *x *= g.exp());
                }
                let erased: Vec<f64> =
                    (0..K).map(|j| (0..K).map(|c| k[c] * scale * m[c * K + j]).sum::<f64>()).collect();
                for (c, row) in m.chunks_exact_mut(K).enumerate() {
                    let step = f64::from(self.beta[token]) * k[c] * scale;
                    row.iter_mut().zip(&erased).for_each(|(x, e)| *x -= step * e);
                }
                norms.push(norm(&m));
            }
            all.push(norms);
        }
        all
    }
}

/// Spectral norm by power iteration, from below.
fn norm(m: &[f64]) -> f64 {
    let mut x: Vec<f64> = (0..K).map(|i| 1.0 + 0.5 * (i as f64).cos()).collect();
    let mut size = 0.0;
    for _ in 0..200 {
        let length = x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let y: Vec<f64> = (0..K).map(|r| (0..K).map(|c| m[r * K + c] * x[c] / length).sum()).collect();
        size = y.iter().map(|y| y * y).sum::<f64>().sqrt();
        if size == 0.0 {
            return 0.0;
        }
        x = (0..K).map(|c| (0..K).map(|r| m[r * K + c] * y[r]).sum()).collect();
    }
    size
}

/// Random gates, keys up to 1.4 long, steps up to 2 and below 0.
#[test]
fn factors_bound_the_transition_and_growth_all_that_comes_before_the_chunk_ends() {
    let mut grown = 0;
    for seed in 0..40 {
        let (length, beta) = ([1.0, 1.4, 1.0, 1.1][seed % 4], [1.0, 2.0, 2.0, 0.5][seed / 4 % 4]);
        let problem = Problem::random(seed % 2 == 0, 72, 100 * seed as u64, length, beta, seed % 8 > 5);
        let factors = problem.factors();
        for (chunk, ([factor, growth], norms)) in factors.iter().zip(problem.norms()).enumerate() {
            let most = norms.iter().fold(0.0f64, |a, &b| a.max(b));
            let last = norms[norms.len() - 1];
            assert!(last <= f64::from(*factor), "seed {seed}, chunk {chunk}: {last} is not below {factor}");
            assert!(most <= f64::from(*growth), "seed {seed}, chunk {chunk}: {most} is not below {growth}");
            assert!(*growth >= 1.0);
            grown += usize::from(most > 1.05);
        }
    }
    assert!(grown > 10, "only {grown} chunks let a state grow");
}

/// Where nothing is erased and all channels decay alike, the factor is what happens.
#[test]
fn factors_are_no_larger_than_they_must_be() {
    for per_channel in [false, true] {
        let mut problem = Problem::random(per_channel, 48, 7, 1.0, 1.0, false);
        problem.beta.fill(0.0);
        problem.g.fill(-0.01);
        for ([factor, growth], norms) in problem.factors().iter().zip(problem.norms()) {
            assert_eq!(*growth, 1.0);
            assert!(f64::from(*factor) < norms[CHUNK - 1] * 1.0002, "{factor} {}", norms[CHUNK - 1]);
        }
    }
}

/// What an operation gets and gives.
struct Case {
    tile: Tensor,
    column: Tensor,
    factors: Tensor,
    limit: f32,
    found: Array,
}

#[test]
fn maxima_and_squares() {
    fn body(wg: &mut kernels_gpu::tile::Warpgroup<'_>, p: &Case) {
        let (tile, column) = (wg.shared::<f32>(33, 40), wg.shared::<f32>(33, 1));
        wg.load(tile, p.tile.matrix(0, 33, 40, 40, 1));
        wg.load(column, p.column.matrix(0, 33, 1, 1, 1));
        wg.sync();
        wg.raise_to_row_maxima(column, tile);
        wg.sync();
        wg.store(p.column.matrix(0, 33, 1, 1, 1), column);
        let squares = wg.sum_of_squares(tile);
        wg.word(p.found, 0).store(squares.to_bits().into(), std::sync::atomic::Ordering::Relaxed);
    }
    let mut tile = Buffer::random(DtypeCode::F32, 33 * 40, 3);
    let mut column = Buffer::filled(DtypeCode::F32, 33, 0.98);
    let found = [0u64];
    let (values, factors) = (tile.values(), Tensor::absent());
    let case = Case { tile: tile.tensor(), column: column.tensor(), factors, limit: 0.0, found: Array::of(&found) };
    run(1, &case, body).unwrap();
    for (row, most) in values.chunks_exact(40).zip(column.values()) {
        assert_eq!(most, row.iter().fold(0.98f32, |a, &b| a.max(b)));
    }
    // SAFETY: the word was written by the kernel, which has ended.
    let bits = unsafe { std::ptr::read_volatile(&raw const found[0]) };
    let squares = f64::from(f32::from_bits(bits as u32));
    let expected: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    assert!((squares / expected - 1.0).abs() < 1e-5, "{squares} {expected}");
}

#[test]
fn the_first_row_within_a_limit() {
    fn body(wg: &mut kernels_gpu::tile::Warpgroup<'_>, p: &Case) {
        let rows = p.factors.len as usize / 2;
        let Within { rows, bound, growth } = wg.first_within(p.factors.matrix(0, rows, 2, 2, 1), p.limit, 1e-30);
        for (i, x) in [rows, bound.to_bits(), growth.to_bits()].into_iter().enumerate() {
            wg.word(p.found, i).store(x.into(), std::sync::atomic::Ordering::Relaxed);
        }
    }
    let within = |factors: &[f32], limit: f32| {
        let mut factors = Buffer::of(DtypeCode::F32, factors);
        let found = [0u64; 3];
        let absent = Tensor::absent();
        let case = Case { tile: absent, column: absent, factors: factors.tensor(), limit, found: Array::of(&found) };
        run(1, &case, body).unwrap();
        // SAFETY: the words were written by the kernel, which has ended.
        let [rows, bound, growth] = unsafe { std::ptr::read_volatile(&raw const found) }.map(|x| x as u32);
        Within { rows, bound: f32::from_bits(bound), growth: f32::from_bits(growth) }
    };
    let factors = [0.5, 1.0, 0.5, 2.0, 1.0, 1.0, 0.25, 1.0];
    assert_eq!(within(&factors, 0.5), Within { rows: 2, bound: 0.5, growth: 2.0 });
    assert_eq!(within(&factors, 0.49), Within { rows: 4, bound: 0.125, growth: 2.0 });
    assert_eq!(within(&factors, 0.125), Within { rows: 4, bound: 0.125, growth: 2.0 });
    assert_eq!(within(&factors, 0.124), Within { rows: 5, bound: 0.0, growth: 2.0 });
    // What has grown without end, or is no number, is never within anything.
    assert_eq!(within(&[0.5, f32::INFINITY, 1e-38, 1.0], 0.9).rows, 3);
    assert_eq!(within(&[0.5, f32::NAN, 1e-38, 1.0], 0.9).rows, 3);
}
