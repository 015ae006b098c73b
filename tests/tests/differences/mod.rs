//! Gradients against central differences of the loss that upstream gradients stand for.

use deltalink::gradients::Upstream;
use deltalink::inputs::{Beta, Gate, Inputs, StateLayout};
use deltalink::reference::{Problem, backward, recurrent};
use deltalink::tensor::{Buffer, Dtype, Tensor, TensorView};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Length of a step per element.
const STEP: f64 = 1e-3;

/// Checks the gradient of every input of a problem in f32: along a random direction that moves all elements of a tensor, and
/// along three single elements. Returns the names of what was checked.
///
/// # Panics
/// If a gradient is wrong.
pub fn check(
    inputs: &Inputs<'_>,
    cu_seqlens: Option<&[usize]>,
    upstream: &Upstream<'_>,
    seed: u64,
) -> Vec<&'static str> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let problem = Problem::new(inputs, cu_seqlens).unwrap();
    let gradients = backward(&problem, upstream).unwrap();
    let value = loss(inputs, cu_seqlens, upstream);
    let mut checked = Vec::new();
    for (name, gradient) in gradients.named(inputs) {
        let mut moved = inputs.clone();
        let x = slot(&mut moved, name).to_f64();
        assert_eq!(x.len(), gradient.len(), "{name} has the size of what it is the gradient of");
        let everywhere = (0..x.len()).map(|_| rng.random_range(-1.0..1.0)).collect();
        let single = |at: usize| (0..x.len()).map(|i| if i == at { 1.0 } else { 0.0 }).collect();
        let mut directions: Vec<Vec<f64>> = vec![everywhere];
        directions.extend((0..3).map(|_| single(rng.random_range(0..x.len()))));
        for direction in directions {
            let (found, expected) = along(inputs, cu_seqlens, upstream, name, &x, &direction, gradient);
            let size = gradient.iter().map(|x| x * x).sum::<f64>().sqrt();
            let allowed = 1e-6 * size + 1e-11 * value.abs();
            assert!(
                (found - expected).abs() <= allowed,
                "{name}: the gradient says {expected:.9e}, differences say {found:.9e}; allowed {allowed:.1e}"
            );
        }
        checked.push(name);
    }
    checked
}

/// Derivative of the loss along `direction`, by differences of fourth order and by the gradient. The steps are those that f32
/// can hold, so rounding them is no error.
fn along(
    inputs: &Inputs<'_>,
    cu_seqlens: Option<&[usize]>,
    upstream: &Upstream<'_>,
    name: &'static str,
    x: &[f64],
    direction: &[f64],
    gradient: &[f64],
) -> (f64, f64) {
    let difference = |step: f64| {
        let mut inputs = inputs.clone();
        let shape = slot(&mut inputs, name).shape().to_vec();
        let ends = [step, -step].map(|step| {
            let values = x.iter().zip(direction).map(|(x, d)| x + step * d);
            Tensor { shape: shape.clone(), data: Buffer::from_f64(Dtype::F32, values) }
        });
        let [above, below] = ends.each_ref().map(|x| {
            let mut inputs = inputs.clone();
            *slot(&mut inputs, name) = x.view();
            loss(&inputs, cu_seqlens, upstream)
        });
        let [high, low] = ends.each_ref().map(|x| x.data.to_f64());
        let predicted: f64 = gradient.iter().zip(high.iter().zip(&low)).map(|(g, (high, low))| g * (high - low)).sum();
        (above - below, predicted)
    };
    let (near, far) = (difference(STEP), difference(2.0 * STEP));
    let weigh = |near: f64, far: f64| (8.0 * near - far) / (12.0 * STEP);
    (weigh(near.0, far.0), weigh(near.1, far.1))
}

/// The input that gradient `name` belongs to.
fn slot<'x, 'a>(inputs: &'x mut Inputs<'a>, name: &str) -> &'x mut TensorView<'a> {
    match name {
        "dq" => &mut inputs.q,
        "dk" => &mut inputs.k,
        "dv" => &mut inputs.v,
        "dh0" => inputs.initial_state.as_mut().expect("dh0 has an h0"),
        "dbeta" | "dbeta_logits" => match &mut inputs.beta {
            Beta::Given(beta) | Beta::Logits { logits: beta, .. } => beta,
        },
        "dg" | "dg_raw" => match &mut inputs.gate {
            Gate::Given(g) | Gate::Softplus { raw: g, .. } | Gate::LowerBound { raw: g, .. } => g,
        },
        "dA_log" => match &mut inputs.gate {
            Gate::Softplus { a_log, .. } | Gate::LowerBound { a_log: Some(a_log), .. } => a_log,
            _ => panic!("dA_log has an A_log"),
        },
        "ddt_bias" => match &mut inputs.gate {
            Gate::Softplus { dt_bias: Some(bias), .. } | Gate::LowerBound { dt_bias: Some(bias), .. } => bias,
            _ => panic!("ddt_bias has a dt_bias"),
        },
        _ => panic!("{name} is the gradient of no input"),
    }
}

/// `sum(o * do) + sum(ht * dht)`.
fn loss(inputs: &Inputs<'_>, cu_seqlens: Option<&[usize]>, upstream: &Upstream<'_>) -> f64 {
    let problem = Problem::new(inputs, cu_seqlens).unwrap();
    let found = recurrent(&problem);
    let (k, v) = (problem.dims.k, problem.dims.v);
    // The reference returns states K-first.
    let place = |i: usize| match inputs.state_layout {
        StateLayout::KFirst => i,
        StateLayout::VFirst => i - i % (k * v) + i % v * k + i % (k * v) / v,
    };
    let outputs: f64 = found.o.iter().enumerate().map(|(i, o)| o * upstream.d_o.get(i)).sum();
    let states = upstream
        .d_final_state
        .as_ref()
        .map_or(0.0, |dht| found.ht.iter().enumerate().map(|(i, ht)| ht * dht.get(place(i))).sum::<f64>());
    outputs + states
}
