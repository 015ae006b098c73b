//! Errors of gradients, and how large they may be.

use super::{Checked, Error, mismatch};
use crate::file::InputFile;
use crate::gradients::Gradients;
use crate::inputs::{Beta, Inputs, Op};
use crate::reference::Problem;
use crate::tensor::Dtype;

/// Largest median of the relative RMS errors of many gradients that were computed in f32; single ones may reach
/// [`gradient_tolerance`].
pub const GRADIENT_MEDIAN_F32: f64 = 1e-5;

/// Largest relative RMS error of gradient `name` against the f64 reference fed with the same (rounded) inputs.
///
/// | | f32 | bf16, f16 |
/// |---|---|---|
/// | `dq`, `dk`, `dv`, `dh0` | 1e-4 | 8e-3 |
/// | `dg`, `dg_raw`, `dA_log`, `ddt_bias`, `dbeta`, `dbeta_logits` | 1e-4 | 2e-2 |
///
/// What is summed over channels or tokens of products that cancel keeps fewer digits in 16 bits.
pub fn gradient_tolerance(dtype: Dtype, name: &str) -> f64 {
    let wide = ["dq", "dk", "dv", "dh0"].contains(&name);
    match dtype {
        Dtype::F32 => 1e-4,
        Dtype::Bf16 | Dtype::F16 if wide => 8e-3,
        Dtype::Bf16 | Dtype::F16 => 2e-2,
    }
}

/// dg is a difference of sums of products q dq and k dk, so its rounding errors are relative to the largest of these: by so
/// much it may be off whatever its own size. 16-bit types: their unit roundoff.
fn dg_floor(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 2e-5,
        Dtype::Bf16 => 1.0 / 256.0,
        Dtype::F16 => 1.0 / 2048.0,
    }
}

/// Gradients so much smaller than the largest one count as zero: kernels cut products of decays off at 2^-100, and an operand
/// in f16 below 2^-24 is zero.
fn negligible(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 | Dtype::Bf16 => 1e-24,
        Dtype::F16 => 1.0 / (1 << 24) as f64,
    }
}

/// Compares `found` with the reference's `expected`, both with respect to `inputs`, of which `p` was made.
///
/// A tensor is right if its relative RMS error is within [`gradient_tolerance`], or if every element is off by at most the
/// tolerance times its size plus what is allowed whatever its size: of gradients of the gate, 2e-5 (f32) or a unit roundoff
/// (16-bit types) times `max(max|q dq|, max|k dk|)`, the sum over all channels for the one decay of a GDN head, or what the
/// decay of a first token scales, the products of h0 and dh0; of steps in 16 bits, a unit roundoff of each of the products of
/// v and dv that make it up; of the others, next to nothing. So a gradient that is exactly zero, as
/// that of the decay of a single token is, may be found as rounding errors.
///
/// # Panics
/// If a gradient has a wrong size, or there is one too many or too few.
pub fn gradients(
    inputs: &Inputs<'_>,
    p: &Problem,
    found: &Gradients<Vec<f64>>,
    expected: &Gradients<Vec<f64>>,
) -> Vec<Checked> {
    gradients_within(inputs, p, found, expected, Allowance::default())
}

/// [`gradients`] where more or less is allowed.
///
/// # Panics
/// As [`gradients`].
pub fn gradients_within(
    inputs: &Inputs<'_>,
    p: &Problem,
    found: &Gradients<Vec<f64>>,
    expected: &Gradients<Vec<f64>>,
    allowance: Allowance,
) -> Vec<Checked> {
    let expected = expected.named(inputs).into_iter().map(|(name, x)| (name, x.clone())).collect();
    check(inputs, p, found, expected, allowance)
}

/// What is allowed beyond [`gradient_tolerance`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Allowance {
    /// Relative errors of another source, which add up with the others in squares.
    pub rounding: f64,
    /// Factor of all of it.
    pub factor: f64,
}

impl Default for Allowance {
    /// Nothing.
    fn default() -> Self {
        Self { rounding: 0.0, factor: 1.0 }
    }
}

/// Compares every gradient in `found`, with respect to the inputs of `file`, of which `p` was made, with the one that the
/// file expects, if it does; rules and panics are those of [`gradients`].
pub fn gradients_against_file(file: &InputFile, p: &Problem, found: &Gradients<Vec<f64>>) -> Vec<Checked> {
    let inputs = file.inputs();
    let in_file = |(name, _)| Some((name, file.expected(name)?.data.to_f64()));
    let expected = found.named(&inputs).into_iter().filter_map(in_file).collect();
    check(&inputs, p, found, expected, Allowance::default())
}

fn check(
    inputs: &Inputs<'_>,
    p: &Problem,
    found: &Gradients<Vec<f64>>,
    expected: Vec<(&'static str, Vec<f64>)>,
    allowance: Allowance,
) -> Vec<Checked> {
    let floors = Floors::new(inputs, p, &expected);
    let (shapes, found) = (Gradients::shapes(inputs), found.named(inputs));
    let (shapes, dtype) = (shapes.named(inputs), inputs.dtype());
    assert_eq!(shapes.len(), found.len(), "every input has a gradient: found {:?}", found.iter().map(|x| x.0));
    let of_name = |name: &str| found.iter().zip(&shapes).find(|((found, _), _)| *found == name);
    let judged = |(name, expected): (&'static str, Vec<f64>)| {
        let (&(_, found), &(_, shape)) = of_name(name).unwrap_or_else(|| panic!("no {name} was found"));
        let Allowance { rounding, factor } = allowance;
        let (tolerance, floor) = (factor * gradient_tolerance(dtype, name).hypot(rounding), factor * floors.of(name));
        let close =
            |(found, expected): (&f64, &f64)| super::distance(*found, *expected) <= tolerance * expected.abs() + floor;
        let every_element = found.iter().zip(&expected).all(close);
        let mismatch = mismatch(name, shape, found, &expected, tolerance).filter(|_| !every_element);
        Checked { name: name.to_owned(), error: Error::of(found, &expected), mismatch }
    };
    expected.into_iter().map(judged).collect()
}

/// By how much an element may be off whatever its size.
struct Floors {
    dg: f64,
    raw: f64,
    dt_bias: f64,
    a_log: f64,
    beta: f64,
    others: f64,
}

impl Floors {
    fn new(inputs: &Inputs<'_>, p: &Problem, expected: &[(&'static str, Vec<f64>)]) -> Self {
        let largest = |x: &mut dyn Iterator<Item = f64>| x.map(f64::abs).filter(|x| x.is_finite()).fold(0.0, f64::max);
        let get = |name: &str| expected.iter().find(|(found, _)| *found == name).map(|(_, x)| x);
        let product = |x: &crate::tensor::TensorView<'_>, name: &str| {
            get(name).map_or(0.0, |dx| largest(&mut dx.iter().enumerate().map(|(i, dx)| dx * x.get(i))))
        };
        // Rounding errors of a sum's terms are independent, so they add up in squares.
        let tokens = (p.dims.b * p.dims.t) as f64;
        let (k, channels) = (p.dims.k as f64, if p.op == Op::Kda { p.dims.k as f64 } else { 1.0 });
        // The one decay of a head has the terms of all channels.
        let terms = (k / channels).sqrt() * product(&inputs.q, "dq").max(product(&inputs.k, "dk"));
        // What the decays of a sequence's first tokens scale, for each of `channels`. A sum of many terms, unlike a largest
        // term, has no room in it: four standard deviations.
        let size = p.dims.k * p.dims.v;
        let state = inputs.initial_state.as_ref().zip(get("dh0")).map_or(0.0, |(h0, dh0)| {
            let products: Vec<f64> = dh0.iter().enumerate().map(|(i, x)| x * h0.get(i)).collect();
            4.0 * largest(
                &mut products.chunks(size).map(|head| (head.iter().map(|x| x * x).sum::<f64>() / channels).sqrt()),
            )
        });
        let dg = dg_floor(inputs.dtype()) * terms.max(state);
        let (raw, a_log) = p.gate_steepness();
        let beta = match inputs.dtype() {
            Dtype::F32 => 0.0,
            dtype => 4.0 * dg_floor(dtype) * get("dv").map_or(0.0, |dv| largest(&mut step_terms(inputs, p.dims.v, dv))),
        };
        let others = negligible(inputs.dtype()) * largest(&mut expected.iter().flat_map(|(_, x)| x.iter().copied()));
        Self {
            dg,
            raw: dg * raw,
            dt_bias: dg * raw * tokens.sqrt(),
            a_log: dg * a_log * (tokens * channels).sqrt(),
            beta,
            others,
        }
    }

    fn of(&self, name: &str) -> f64 {
        let gate = match name {
            "dg" => self.dg,
            "dg_raw" => self.raw,
            "ddt_bias" => self.dt_bias,
            "dA_log" => self.a_log,
            "dbeta" | "dbeta_logits" => self.beta,
            _ => 0.0,
        };
        gate.max(self.others)
    }
}

/// `beta dbeta` of a token is the sum over channels of `v dv`, less what the step erases, which is about as large: the sums of
/// squares of these terms, for dbeta over beta, for logits as they are (their slope is at most beta).
fn step_terms(inputs: &Inputs<'_>, v: usize, dv: &[f64]) -> impl Iterator<Item = f64> {
    dv.chunks(v).enumerate().map(move |(row, dv)| {
        let squares = dv.iter().enumerate().map(|(i, dv)| (dv * inputs.v.get(row * v + i)).powi(2));
        let beta = match &inputs.beta {
            Beta::Given(beta) => beta.get(row).abs(),
            Beta::Logits { .. } => 1.0,
        };
        let terms = squares.sum::<f64>().sqrt();
        if beta == 0.0 { 0.0 } else { terms / beta }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{BetaKind, Decay, GateKind, Spec};
    use crate::reference::backward;

    fn solve(spec: &Spec, test: impl FnOnce(&Inputs<'_>, &Problem, Gradients<Vec<f64>>)) {
        let (case, upstream) = (spec.generate(), spec.generate_upstream(true));
        let inputs = case.inputs();
        let p = Problem::new(&inputs, case.cu_seqlens()).unwrap();
        let expected = backward(&p, &upstream.view()).unwrap();
        test(&inputs, &p, expected);
    }

    fn wrong(
        inputs: &Inputs<'_>,
        p: &Problem,
        found: &Gradients<Vec<f64>>,
        expected: &Gradients<Vec<f64>>,
    ) -> Vec<String> {
        let checked = gradients(inputs, p, found, expected);
        checked.into_iter().filter(|checked| checked.mismatch.is_some()).map(|checked| checked.name).collect()
    }

    #[test]
    fn each_gradient_is_judged_by_itself() {
        let spec = Spec { t: 20, k: 16, v: 16, gate: GateKind::Softplus, initial_state: true, ..Spec::default() };
        solve(&spec, |inputs, p, expected| {
            assert!(wrong(inputs, p, &expected, &expected).is_empty());
            assert_eq!(gradients(inputs, p, &expected, &expected).len(), 8);
            let scaled = expected.map(|x| x.iter().map(|x| 1.01 * x).collect::<Vec<_>>());
            let all = ["dq", "dk", "dv", "dg_raw", "dbeta", "dA_log", "ddt_bias", "dh0"];
            assert_eq!(wrong(inputs, p, &scaled, &expected), all);
            let one = Gradients { dk: scaled.dk.clone(), ..expected.clone() };
            assert_eq!(wrong(inputs, p, &one, &expected), ["dk"]);
            let mut nan = expected.clone();
            nan.dg[3] = f64::NAN;
            assert_eq!(wrong(inputs, p, &nan, &expected), ["dg_raw"]);
        });
    }

    #[test]
    fn a_zero_gradient_of_the_decay_may_be_found_as_rounding_errors() {
        let spec = Spec { t: 1, k: 16, v: 16, ..Spec::default() };
        solve(&spec, |inputs, p, expected| {
            assert!(expected.dg.iter().all(|dg| *dg == 0.0), "the decay of one token meets no state");
            let noise = |size: f64| Gradients { dg: vec![size; expected.dg.len()], ..expected.clone() };
            assert!(wrong(inputs, p, &noise(1e-8), &expected).is_empty());
            assert_eq!(wrong(inputs, p, &noise(1e-3), &expected), ["dg"]);
        });
    }

    #[test]
    fn what_underflows_in_f32_may_be_zero() {
        let spec = Spec { t: 5, k: 16, v: 16, decay: Decay::AllStrong, initial_state: true, ..Spec::default() };
        solve(&spec, |inputs, p, expected| {
            assert!(expected.d_initial_state.as_ref().unwrap().iter().any(|x| *x != 0.0));
            let zero = expected.d_initial_state.as_ref().map(|x| vec![0.0; x.len()]);
            assert!(wrong(inputs, p, &Gradients { d_initial_state: zero, ..expected.clone() }, &expected).is_empty());
            let zero = vec![0.0; expected.dk.len()];
            assert_eq!(wrong(inputs, p, &Gradients { dk: zero, ..expected.clone() }, &expected), ["dk"]);
        });
    }

    #[test]
    fn allowances_in_16_bits_hide_no_wrong_factor() {
        for beta in [BetaKind::Standard, BetaKind::Logits] {
            let spec = Spec { t: 20, k: 16, v: 16, beta, dtype: Dtype::Bf16, initial_state: true, ..Spec::default() };
            solve(&spec, |inputs, p, expected| {
                let scaled = expected.map(|x| x.iter().map(|x| 1.1 * x).collect::<Vec<_>>());
                let names: Vec<&str> = expected.named(inputs).iter().map(|(name, _)| *name).collect();
                assert_eq!(wrong(inputs, p, &scaled, &expected), names);
            });
        }
    }

    #[test]
    fn gradients_of_gates_and_steps_may_err_more_in_16_bits() {
        assert_eq!(gradient_tolerance(Dtype::F32, "dg"), gradient_tolerance(Dtype::F32, "dq"));
        assert_eq!(["dh0", "dbeta_logits"].map(|name| gradient_tolerance(Dtype::Bf16, name)), [8e-3, 2e-2]);
    }
}
