//! What the bodies of `prep` for Hopper leave for a chunk, against its formulas in f64. A gate with the same decay in every channel is
//! a problem for both of them.

use std::time::Instant;

use cuda_std::emulated::{Emulator, Launch, Schedule};
use deltalink::compare::Error;
use deltalink::inputs::Op;
use deltalink_emulated::images;
use half::{bf16, f16};
use kernels_gpu::element::DtypeCode;
use kernels_gpu::hopper::{self, RECORD_A, RECORD_AQK, RECORD_KG, RECORD_QG, RECORD_W};
use kernels_gpu::params::{Array, Beside, Chunk, GateForm, PrepParams, Records, Sizes, Tables, Tensor, TraceBuffer};
use kernels_gpu::prep;

/// Key channels.
const K: usize = 128;
/// Tokens of a whole chunk.
const C: usize = 64;

/// Numbers in the element type that a kernel reads them in.
struct Numbers {
    bytes: Vec<u32>,
    len: usize,
    dtype: DtypeCode,
    /// What was rounded to the type.
    values: Vec<f64>,
}

impl Numbers {
    fn new(dtype: DtypeCode, x: impl Iterator<Item = f64>) -> Self {
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for x in x {
            match dtype {
                DtypeCode::F32 => {
                    bytes.extend((x as f32).to_le_bytes());
                    values.push(f64::from(x as f32));
                }
                DtypeCode::Bf16 => {
                    bytes.extend(bf16::from_f64(x).to_le_bytes());
                    values.push(bf16::from_f64(x).to_f64());
                }
                DtypeCode::F16 => {
                    bytes.extend(f16::from_f64(x).to_le_bytes());
                    values.push(f16::from_f64(x).to_f64());
                }
            }
        }
        // (Aligned as a tensor is: to 16 bytes or more by the allocator, for vectors of this size.)
        bytes.resize(bytes.len().next_multiple_of(4) + 64, 0);
        let bytes = bytes.chunks_exact(4).map(|x| u32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
        Self { bytes, len: values.len(), dtype, values }
    }

    fn tensor(&self) -> Tensor {
        assert!((self.bytes.as_ptr() as u64).is_multiple_of(16), "tensors are aligned");
        Tensor::new(self.bytes.as_ptr() as u64, self.len, self.dtype)
    }
}

/// What a problem is like.
#[derive(Clone, Copy, Debug)]
struct Case {
    h: usize,
    hv: usize,
    /// First token and tokens of each chunk.
    chunks: &'static [(u32, u32)],
    form: GateForm,
    /// Of what the gate is given, and of beta.
    dtypes: [DtypeCode; 2],
    /// What the gate is given, for some draw in -1 .. 1, token and head.
    gate: fn(f64, usize) -> f64,
    /// beta, or its logit, for some draw.
    beta: fn(f64) -> f64,
    /// 0 if beta is given.
    beta_factor: f32,
    /// Length of the rows of q and k.
    length: f64,
    l2norm: bool,
}

const CASE: Case = Case {
    h: 1,
    hv: 1,
    chunks: &[(0, 64)],
    form: GateForm::Given,
    dtypes: [DtypeCode::F32, DtypeCode::Bf16],
    gate: |x, _| -0.05 * (1.0 + x),
    beta: |x| 0.5 + 0.5 * x,
    beta_factor: 0.0,
    length: 1.0,
    l2norm: false,
};

/// A draw in -1 .. 1.
fn draw(stream: u64, index: usize) -> f64 {
    let mut x = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream.wrapping_mul(0xd1b5_4a32_d192_ed03);
    for _ in 0..2 {
        x = (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    }
    (x >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// What a chunk and head leaves.
struct Left {
    /// w, A', qg, Aqk, kg: rows of the record.
    parts: [Vec<f64>; 5],
    decay: Vec<f64>,
    factors: [f64; 2],
}

const NAMES: [&str; 5] = ["w", "A'", "qg", "Aqk", "kg"];
const PLACES: [(u32, u32); 5] = [
    (RECORD_W, RECORD_A),
    (RECORD_A, RECORD_QG),
    (RECORD_QG, RECORD_AQK),
    (RECORD_AQK, RECORD_KG),
    (RECORD_KG, hopper::RECORD),
];

struct Problem {
    case: Case,
    q: Numbers,
    k: Numbers,
    gate: Numbers,
    beta: Numbers,
    a_log: Numbers,
    bias: Numbers,
}

const SCALE: f32 = 0.25;
const BOUND: f32 = -5.0;

impl Problem {
    fn new(case: Case) -> Self {
        let tokens = case.chunks.iter().map(|&(token, len)| (token + len) as usize).max().expect("a chunk");
        let rows = |stream: u64| {
            let mut x: Vec<f64> = (0..tokens * case.h * K).map(|i| draw(stream, i)).collect();
            for row in x.chunks_exact_mut(K) {
                let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
                row.iter_mut().for_each(|x| *x *= case.length / norm);
            }
            Numbers::new(DtypeCode::Bf16, x.into_iter())
        };
        let steps = |stream: u64, dtype, of: &dyn Fn(f64, usize) -> f64| {
            Numbers::new(dtype, (0..tokens * case.hv).map(|i| of(draw(stream, i), i / case.hv)))
        };
        Self {
            case,
            q: rows(1),
            k: rows(2),
            gate: steps(3, case.dtypes[0], &case.gate),
            beta: steps(4, case.dtypes[1], &|x, _| (case.beta)(x)),
            a_log: Numbers::new(DtypeCode::F32, (0..case.hv).map(|i| 0.3 * draw(5, i))),
            bias: Numbers::new(DtypeCode::F32, (0..case.hv).map(|i| 0.5 * draw(6, i))),
        }
    }

    /// The log decay of a token, and its step.
    fn step(&self, token: usize, head: usize) -> [f64; 2] {
        let at = token * self.case.hv + head;
        let (a, x) = (self.a_log.values[head].exp(), self.gate.values[at]);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let g = match self.case.form {
            GateForm::Given => x,
            GateForm::Softplus => -a * (x + self.bias.values[head]).exp().ln_1p(),
            GateForm::LowerBound => f64::from(BOUND) * sigmoid(a * (x + self.bias.values[head])),
        };
        let (beta, factor) = (self.beta.values[at], f64::from(self.case.beta_factor));
        [g, if factor == 0.0 { beta } else { factor * sigmoid(beta) }]
    }

    /// The formulas of [`kernels_gpu::prep`].
    fn expected(&self, (token, len): (u32, u32), head: usize) -> Left {
        let (token, len) = (token as usize, len as usize);
        let qk_head = head / (self.case.hv / self.case.h);
        let row = |x: &Numbers, r: usize, scale: f64| -> Vec<f64> {
            let x = &x.values[((token + r) * self.case.h + qk_head) * K..][..K];
            let square: f64 = x.iter().map(|x| x * x).sum();
            let factor = if self.case.l2norm { scale / (square + 1e-6).sqrt() } else { scale };
            x.iter().map(|x| x * factor).collect()
        };
        let q: Vec<_> = (0..len).map(|r| row(&self.q, r, SCALE.into())).collect();
        let k: Vec<_> = (0..len).map(|r| row(&self.k, r, 1.0)).collect();
        let steps: Vec<_> = (0..len).map(|r| self.step(token + r, head)).collect();
        let since = |c: usize, r: usize| steps[c + 1..=r].iter().map(|step| step[0]).sum::<f64>().exp();
        let from_start: Vec<_> = (0..len).map(|r| steps[0][0].exp() * since(0, r)).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (mut inverse, mut aqk) = (vec![0.0; C * C], vec![0.0; C * C]);
        for r in 0..len {
            for c in 0..=r {
                aqk[r * C + c] = dot(&q[r], &k[c]) * since(c, r);
            }
            let akk: Vec<_> = (0..r).map(|c| steps[r][1] * dot(&k[r], &k[c]) * since(c, r)).collect();
            for c in 0..=r {
                let known: f64 = (c..r).map(|m| akk[m] * inverse[m * C + c]).sum();
                inverse[r * C + c] = if r == c { 1.0 } else { 0.0 } - known;
            }
        }
        let mut a = vec![0.0; C * C];
        let (mut w, mut qg, mut kg) = (vec![0.0; C * K], vec![0.0; C * K], vec![0.0; C * K]);
        for r in 0..len {
            (0..=r).for_each(|c| a[r * C + c] = inverse[r * C + c] * steps[c][1]);
            for d in 0..K {
                w[r * K + d] = (0..=r).map(|c| a[r * C + c] * k[c][d] * from_start[c]).sum();
                qg[r * K + d] = q[r][d] * from_start[r];
                kg[r * K + d] = k[r][d] * since(r, len - 1);
            }
        }
        let mut factors = [1.0, 1.0];
        for (k, [g, beta]) in k.iter().zip(&steps) {
            let square = if self.case.l2norm { 1.0 } else { dot(k, k) };
            let growth = (1.0 - beta * square).abs().max(1.0);
            factors = [factors[0] * growth * g.exp(), factors[1] * growth];
        }
        Left { parts: [w, a, qg, aqk, kg], decay: vec![from_start[len - 1]; K], factors }
    }

    /// What the body for this kind of gate leaves, chunk by chunk and head by head.
    fn found(&self, op: Op, schedule: Schedule) -> Vec<Left> {
        self.found_by(true, op, schedule)
    }

    /// The same of the portable body, or of that for Hopper.
    fn found_by(&self, hopper: bool, op: Op, schedule: Schedule) -> Vec<Left> {
        let case = &self.case;
        let (count, hv) = (case.chunks.len(), case.hv);
        let chunks: Vec<Chunk> = case.chunks.iter().map(|&(token, len)| Chunk { token, len }).collect();
        let (v, c) = (128, C as u32);
        let sizes = Sizes { h: case.h as u32, hv: hv as u32, k: K as u32, v, chunk: c, pad: 0 };
        let none = Array::empty();
        let tables = Tables { sizes, chunks: Array::of(&chunks), segments: none, sources: none, targets: none };
        // With a decay per channel, the same in each.
        let channels = if op == Op::Kda { K } else { 1 };
        let spread =
            |x: &Numbers| Numbers::new(x.dtype, x.values.iter().flat_map(|&x| std::iter::repeat_n(x, channels)));
        let (gate, bias) = (spread(&self.gate), spread(&self.bias));
        let mut records = vec![bf16::NAN; count * hv * hopper::RECORD as usize / 2];
        let mut decay = vec![f32::NAN; count * hv * K];
        let mut factors = vec![f32::NAN; count * hv * 2];
        let f32s = |x: &mut [f32]| Tensor::new(x.as_mut_ptr() as u64, x.len(), DtypeCode::F32);
        let params = PrepParams {
            tables,
            q: self.q.tensor(),
            k: self.k.tensor(),
            g: gate.tensor(),
            beta: self.beta.tensor(),
            a_log: self.a_log.tensor(),
            dt_bias: bias.tensor(),
            records: Records {
                operands: Tensor::new(records.as_mut_ptr() as u64, records.len(), DtypeCode::Bf16),
                decay: f32s(&mut decay),
                factors: f32s(&mut factors),
                sizes,
            },
            gate_form: case.form as u32,
            l2norm: case.l2norm.into(),
            bound: BOUND,
            scale: SCALE,
            beta_factor: case.beta_factor,
            pad: 0,
            beside: Beside::none(),
            trace: TraceBuffer { stamps: none, cursor: none },
        };
        let kernel = &format!("prep_{op}_bf16{}", if hopper { "_hopper" } else { "" });
        let (shared_bytes, warpgroups) = match op {
            _ if !hopper => (prep::shared_bytes(K, C, 2, op == Op::Kda), prep::WARPGROUPS),
            Op::Kda => (hopper::PREP_SHARED, hopper::PREP_WARPGROUPS),
            Op::Gdn => (hopper::PREP_SCALAR_SHARED, hopper::PREP_WARPGROUPS),
        };
        let launch = Launch {
            kernel,
            grid: (count * hv) as u32,
            threads: 128 * warpgroups as u32,
            shared_bytes: shared_bytes as u32,
            schedule,
            origin: Instant::now(),
            idle: &|| (),
        };
        let (entry, mut emulator) = (deltalink_emulated::kernel(kernel).expect("the entry"), Emulator::new());
        for block in 0..launch.grid {
            // SAFETY: parameters of this kernel, of memory that lives as long as the call.
            unsafe { entry.run(&mut emulator, &launch, block, &params) }
                .unwrap_or_else(|fault| panic!("{case:?} {schedule:?}: {fault}"));
        }
        let of = |row: usize| {
            let record = &records[row * hopper::RECORD as usize / 2..][..hopper::RECORD as usize / 2];
            let part = |(from, to): (u32, u32)| {
                let image = &record[from as usize / 2..to as usize / 2];
                let rows = if hopper { images::get(image) } else { image.to_vec() };
                rows.into_iter().map(bf16::to_f64).collect::<Vec<_>>()
            };
            let decay = decay[row * K..][..K].iter().map(|&x| x.into()).collect();
            let at = 2 * (row % hv * count + row / hv);
            Left { parts: PLACES.map(part), decay, factors: [factors[at].into(), factors[at + 1].into()] }
        };
        (0..count * hv).map(of).collect()
    }
}

/// Runs both bodies in these orders of events, and compares every chunk.
fn check(case: Case, schedules: &[Schedule]) {
    let problem = Problem::new(case);
    for op in [Op::Gdn, Op::Kda] {
        for &schedule in schedules {
            for (row, found) in problem.found(op, schedule).iter().enumerate() {
                let chunk = case.chunks[row / case.hv];
                let what = format!("{op} {case:?} chunk {chunk:?} head {} {schedule:?}", row % case.hv);
                let longest = f64::from(SCALE) * if case.l2norm { 1.0 } else { case.length * case.length };
                compare(&what, chunk.1 as usize, longest, found, &problem.expected(chunk, row % case.hv));
            }
        }
    }
}

/// `longest`: the product of the lengths of a row of q and one of k.
fn compare(what: &str, len: usize, longest: f64, found: &Left, expected: &Left) {
    for ((name, found), expected) in NAMES.into_iter().zip(&found.parts).zip(&expected.parts) {
        let columns = found.len() / C;
        assert!(found.iter().all(|x| x.is_finite()), "{what}: {name}");
        let beyond = &found[len * columns..];
        assert!(beyond.iter().all(|x| x.abs() <= 1e-19), "{what}: {name} beyond the chunk");
        let error = Error::of(&found[..len * columns], &expected[..len * columns]);
        // Operands of 8 bits, rounded twice at most. (A score by itself may be far smaller than what it is a sum of.)
        let of_scores = if name == "Aqk" { 1e-3 * longest } else { 0.0 };
        assert!(error.within(5e-3) || error.max_abs <= of_scores, "{what}: {name}: {error}");
    }
    let error = Error::of(&found.decay, &expected.decay);
    // (What is below the smallest ordinary number is 0.)
    assert!(error.within(1e-4) || expected.decay[0] < 1.2e-38, "{what}: decay: {error}");
    let floor = f64::powi(2.0, -100);
    for (found, expected) in found.factors.into_iter().zip(expected.factors) {
        // Bounds: not below the exact numbers, and not far above them.
        let least = expected.max(floor);
        assert!(found >= least * (1.0 - 1e-6), "{what}: factors {found} for {expected}");
        let slack = if expected < floor { 1e3 } else { 1.01 };
        let overflows = least > f64::from(f32::MAX);
        assert!(found <= least * slack || overflows, "{what}: factors {found} for {expected}");
    }
}

#[test]
fn a_whole_chunk_in_every_order_of_events() {
    check(CASE, &Schedule::ALL);
}

/// Chunks of every kind of length, that begin anywhere; heads that share rows of q and k.
#[test]
fn short_chunks_and_shared_heads() {
    let chunks = &[(0, 64), (64, 1), (65, 17), (82, 63), (145, 64), (209, 40)];
    check(Case { h: 2, hv: 4, chunks, l2norm: true, length: 3.0, ..CASE }, &Schedule::ALL[3..]);
}

#[test]
fn every_form_of_gate_and_step() {
    let [f32, bf16] = [DtypeCode::F32, DtypeCode::Bf16];
    let raw = Case { gate: |x, _| 2.0 * x - 2.0, beta: |x| 3.0 * x, beta_factor: 1.0, chunks: &[(3, 50)], ..CASE };
    for form in [GateForm::Softplus, GateForm::LowerBound] {
        for dtypes in [[f32, f32], [bf16, bf16]] {
            check(Case { form, dtypes, hv: 2, l2norm: true, ..raw }, &Schedule::ALL[..1]);
        }
    }
    check(Case { dtypes: [bf16, f32], beta_factor: 2.0, ..CASE }, &Schedule::ALL[1..2]);
}

/// -50 for each token, -160 for each third, none at all, and minus infinity: whatever is far below f32 is 0, and the rest is exact.
#[test]
fn decays_of_every_strength() {
    let first = &Schedule::ALL[..1];
    let gates: [fn(f64, usize) -> f64; 5] = [
        |_, _| -50.0,
        |x, token| if token % 3 == 1 { -160.0 } else { -0.1 * (1.0 + x) },
        |_, _| 0.0,
        |x, token| if token % 20 == 7 { f64::NEG_INFINITY } else { -0.02 * (1.0 + x) },
        |x, _| -2.5 * (1.0 + x),
    ];
    for gate in gates {
        check(Case { gate, l2norm: true, ..CASE }, first);
        check(Case { gate, chunks: &[(0, 37)], ..CASE }, first);
    }
}

/// Rows of norm 10 that nobody normalises: with strong decays and steps of one, and with steps that erase them.
#[test]
fn long_rows() {
    let first = &Schedule::ALL[..1];
    check(Case { length: 10.0, gate: |_, _| -50.0, ..CASE }, first);
    check(Case { length: 10.0, beta: |x| 0.01 * (1.0 + 0.9 * x), ..CASE }, first);
}

/// Both bodies round the same operands: what they leave differs only where a number lies at the edge between two others.
#[test]
fn the_portable_bodies_leave_the_same() {
    let chunks = &[(0, 64), (64, 64), (128, 40)];
    let gates: [fn(f64, usize) -> f64; 3] = [|x, _| -2.5 * (1.0 + x), |x, _| -0.005 * (1.0 + x), |_, _| -11.0];
    for gate in gates {
        let problem = Problem::new(Case { gate, length: 11.0, l2norm: true, chunks, ..CASE });
        for op in [Op::Gdn, Op::Kda] {
            let [found, expected] = [true, false].map(|hopper| problem.found_by(hopper, op, Schedule::default()));
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                for ((name, found), expected) in NAMES.into_iter().zip(&found.parts).zip(&expected.parts) {
                    let error = Error::of(found, expected);
                    assert!(error.within(1.5e-3), "{op} chunk {i} {name}: {error}");
                }
            }
        }
    }
}
