//! What happens once per token before the state is touched: normalised rows, gate, step size; and its chain rule.

use super::Problem;
use crate::gradients::Gradients;
use crate::inputs::{Beta, Dims, Gate, Op};
use crate::tensor::TensorView;

/// Derivatives of the activations that a [`Problem`] was made with; absent where a tensor was taken as given.
#[derive(Clone, Debug)]
pub(super) struct Slopes {
    /// `1 / sqrt(sum(x^2) + 1e-6)` of every row of q.
    pub q_norm: Option<Vec<f64>>,
    /// The same of k.
    pub k_norm: Option<Vec<f64>>,
    /// Of the gate.
    pub gate: Option<GateSlopes>,
    /// d beta / d logit.
    pub beta: Option<Vec<f64>>,
}

/// Derivatives of the log decay, in its own shape.
#[derive(Clone, Debug)]
pub(super) struct GateSlopes {
    /// dg / d raw, which is dg / d dt_bias as well.
    pub raw: Vec<f64>,
    /// dg / d A_log, if there is one.
    pub a_log: Option<Vec<f64>>,
    /// Whether there is a `dt_bias`.
    pub has_bias: bool,
}

/// Channels of g and `dt_bias` per head.
fn width(op: Op, dims: &Dims) -> usize {
    match op {
        Op::Kda => dims.k,
        Op::Gdn => 1,
    }
}

/// `x / sqrt(sum(x^2) + 1e-6)` of every row of length `width`; returns the factors.
pub(super) fn normalise_rows(x: &mut [f64], width: usize) -> Vec<f64> {
    let normalise = |row: &mut [f64]| {
        let factor = (row.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt().recip();
        row.iter_mut().for_each(|x| *x *= factor);
        factor
    };
    x.chunks_exact_mut(width).map(normalise).collect()
}

/// `[B,T,HV,K]` whatever the operation (GDN's one decay is repeated), and what the gate's backward pass needs.
pub(super) fn log_decay(op: Op, gate: &Gate<'_>, dims: &Dims) -> (Vec<f64>, Option<GateSlopes>) {
    let width = width(op, dims);
    let len = dims.b * dims.t * dims.hv * width;
    // Everything below is written for [..., HV, width].
    let strength = |a_log: &TensorView<'_>, i: usize| a_log.get(i / width % dims.hv).exp();
    let shifted = |raw: &TensorView<'_>, bias: &Option<TensorView<'_>>, i: usize| {
        raw.get(i) + bias.as_ref().map_or(0.0, |b| b.get(i % (dims.hv * width)))
    };
    let (g, slopes): (Vec<f64>, _) = match gate {
        Gate::Given(g) => (g.to_f64(), None),
        Gate::Softplus { raw, a_log, dt_bias } => {
            let z = |i| shifted(raw, dt_bias, i);
            let g: Vec<f64> = (0..len).map(|i| -strength(a_log, i) * softplus(z(i))).collect();
            let slope = (0..len).map(|i| -strength(a_log, i) * sigmoid(z(i))).collect();
            (g.clone(), Some(GateSlopes { raw: slope, a_log: Some(g), has_bias: dt_bias.is_some() }))
        }
        Gate::LowerBound { raw, a_log, dt_bias, bound } => {
            let bound = f64::from(*bound);
            let strength = |i| a_log.as_ref().map_or(1.0, |a_log| strength(a_log, i));
            let z = |i| shifted(raw, dt_bias, i);
            // bound * sigmoid'(a z): both dg/da and dg/dz have it as a factor.
            let common = |i| bound * sigmoid(strength(i) * z(i)) * sigmoid(-strength(i) * z(i));
            let g = (0..len).map(|i| bound * sigmoid(strength(i) * z(i))).collect();
            let slopes = GateSlopes {
                raw: (0..len).map(|i| common(i) * strength(i)).collect(),
                a_log: a_log.as_ref().map(|_| (0..len).map(|i| common(i) * strength(i) * z(i)).collect()),
                has_bias: dt_bias.is_some(),
            };
            (g, Some(slopes))
        }
    };
    let repeats = dims.k / width;
    (g.into_iter().flat_map(|g| std::iter::repeat_n(g, repeats)).collect(), slopes)
}

/// beta, and its derivatives where it is made from logits.
pub(super) fn step_size(beta: &Beta<'_>) -> (Vec<f64>, Option<Vec<f64>>) {
    match beta {
        Beta::Given(beta) => (beta.to_f64(), None),
        Beta::Logits { logits, factor } => {
            let (logits, factor) = (logits.to_f64(), f64::from(*factor));
            let beta = logits.iter().map(|&x| factor * sigmoid(x)).collect();
            (beta, Some(logits.iter().map(|&x| factor * sigmoid(x) * sigmoid(-x)).collect()))
        }
    }
}

/// From gradients with respect to what the recurrence reads to those with respect to what was given: `gradients` has dq and
/// dk of normalised rows, dg of the log decay of every channel (`[B,T,HV,K]`), dbeta of the step size.
pub(super) fn through_activations(p: &Problem, mut gradients: Gradients<Vec<f64>>) -> Gradients<Vec<f64>> {
    let d = &p.dims;
    if let Some(factors) = &p.slopes.q_norm {
        normalised_rows_backward(&mut gradients.dq, &p.q, factors);
    }
    if let Some(factors) = &p.slopes.k_norm {
        normalised_rows_backward(&mut gradients.dk, &p.k, factors);
    }
    if p.op == Op::Gdn {
        gradients.dg = gradients.dg.chunks_exact(d.k).map(|channels| channels.iter().sum()).collect();
    }
    if let Some(slopes) = &p.slopes.gate {
        let width = width(p.op, d);
        // The sums over tokens: element i belongs to entry `of(i)`.
        let total = |slopes: &[f64], len: usize, of: &dyn Fn(usize) -> usize| {
            let mut sums = vec![0.0; len];
            gradients.dg.iter().zip(slopes).enumerate().for_each(|(i, (dg, slope))| sums[of(i)] += dg * slope);
            sums
        };
        gradients.da_log = slopes.a_log.as_ref().map(|a_log| total(a_log, d.hv, &|i| i / width % d.hv));
        gradients.ddt_bias = slopes.has_bias.then(|| total(&slopes.raw, d.hv * width, &|i| i % (d.hv * width)));
        gradients.dg.iter_mut().zip(&slopes.raw).for_each(|(dg, slope)| *dg *= slope);
    }
    if let Some(slopes) = &p.slopes.beta {
        gradients.dbeta.iter_mut().zip(slopes).for_each(|(dbeta, slope)| *dbeta *= slope);
    }
    gradients
}

/// From dy to dx for `y = x factor`: `dx = factor (dy - y (y . dy))`.
fn normalised_rows_backward(dy: &mut [f64], y: &[f64], factors: &[f64]) {
    let Some(width) = y.len().checked_div(factors.len()) else { return };
    for ((dy, y), factor) in dy.chunks_exact_mut(width).zip(y.chunks_exact(width)).zip(factors) {
        let along = dy.iter().zip(y).map(|(dy, y)| dy * y).sum::<f64>();
        dy.iter_mut().zip(y).for_each(|(dy, y)| *dy = factor * (*dy - y * along));
    }
}

/// `ln(1 + exp(x))` without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `1 / (1 + exp(-x))` without overflow.
pub(super) fn sigmoid(x: f64) -> f64 {
    let e = (-x.abs()).exp();
    if x >= 0.0 { 1.0 / (1.0 + e) } else { e / (1.0 + e) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_keep_their_tails() {
        assert!((softplus(-800.0), sigmoid(-800.0)) == (0.0, 0.0) && softplus(800.0) == 800.0 && sigmoid(800.0) == 1.0);
        assert!((softplus(-40.0) / (-40.0f64).exp() - 1.0).abs() < 1e-15);
        assert!((sigmoid(1.5) + sigmoid(-1.5) - 1.0).abs() < 1e-15);
    }

    #[test]
    fn a_row_of_zeros_has_the_gradient_of_the_linear_part() {
        let mut y = vec![0.0; 4];
        let factors = normalise_rows(&mut y, 4);
        let mut dy = vec![1.0, -2.0, 0.5, 0.0];
        normalised_rows_backward(&mut dy, &y, &factors);
        assert_eq!(dy, [1e3, -2e3, 5e2, 0.0]);
    }
}
