//! Running a problem forward and backward, and holding every rank's gradients against the f64 reference.

use deltalink::compare::{Checked, gradient_tolerance, gradients, mismatch};
use deltalink::generate::{RandomUpstream, Spec};
use deltalink::gradients::Gradients;
use deltalink::inputs::Inputs;
use deltalink::op::whole::{Share, UpstreamShare, join_gradients};
use deltalink::op::{Backward, Config, ContextParallel, Forward, OpError};
use deltalink::plan::{Cuts, Plan};
use deltalink::reference::backward;
use deltalink::world::{RunError, WorldOptions, run_threads};

use super::{Solved, tokens_of};

/// A generated problem with upstream gradients, and its gradients in f64.
pub struct Derived {
    pub solved: Solved,
    pub upstream: RandomUpstream,
    pub expected: Gradients<Vec<f64>>,
}

impl Derived {
    /// With gradients of the final states, or without.
    pub fn new(spec: &Spec, final_state: bool) -> Self {
        let (solved, upstream) = (Solved::new(spec), spec.generate_upstream(final_state));
        let expected = backward(&solved.problem, &upstream.view()).unwrap();
        Self { solved, upstream, expected }
    }

    pub fn plan(&self, cuts: &Cuts) -> Plan {
        self.solved.plan(cuts)
    }
}

/// What one PE returns.
pub struct Trained {
    pub forward: Forward,
    pub saved_bytes: usize,
    pub backward: Backward,
}

/// A forward and a backward call on every PE.
pub fn train(derived: &Derived, plan: &Plan, config: &Config) -> Result<Vec<Trained>, RunError<OpError>> {
    let whole = derived.solved.inputs();
    run_threads(plan.pes(), &WorldOptions::default(), |pe| {
        let (share, upstream) = shares(derived, plan, pe.rank(), &whole);
        let inputs = share.inputs(&whole);
        let mut op = ContextParallel::new(pe, config.clone())?;
        let (forward, saved) = op.forward_saving(plan, &inputs)?;
        let saved_bytes = saved.bytes();
        let backward = op.backward(plan, &inputs, saved, &upstream.view())?;
        Ok(Trained { forward, saved_bytes, backward })
    })
}

/// What rank `rank` gets.
pub fn shares(derived: &Derived, plan: &Plan, rank: usize, whole: &Inputs<'_>) -> (Share, UpstreamShare) {
    (Share::new(plan, rank, whole), UpstreamShare::new(plan, rank, &derived.upstream.view()))
}

/// Every gradient of `rank` in `all`, by name. (Gate parameters have no part of their own.)
fn part_of(plan: &Plan, rank: usize, whole: &Inputs<'_>, all: &Gradients<Vec<f64>>) -> Vec<(&'static str, Vec<f64>)> {
    let dims = whole.dims().unwrap();
    let size = dims.hv * dims.k * dims.v;
    let part = |(name, x): (&'static str, &Vec<f64>)| match name {
        "dA_log" | "ddt_bias" => None,
        "dh0" => {
            let rows = plan.ranks[rank].starts.iter();
            Some((name, rows.flat_map(|&seq| x[seq * size..][..size].to_vec()).collect()))
        }
        _ => Some((name, tokens_of(plan, rank, dims.b, x))),
    };
    all.named(whole).into_iter().filter_map(part).collect()
}

/// Holds each rank's gradients against its part of the whole solution, and the sums over ranks of those of the gate's
/// parameters. Gradients of gates, whose allowance depends on the whole problem, are judged for all ranks together.
///
/// # Panics
/// With the place, if something is wrong.
#[track_caller]
pub fn check_gradients(label: &str, derived: &Derived, plan: &Plan, parts: &[Gradients]) -> Vec<Checked> {
    let whole = derived.solved.inputs();
    let joined = join_gradients(plan, &whole, parts).to_f64();
    let all = gradients(&whole, &derived.solved.problem, &joined, &derived.expected);
    for checked in &all {
        if let Some(mismatch) = &checked.mismatch {
            panic!("{label}, all of {} ranks (cuts {:?}): {mismatch}", plan.pes(), plan.cuts);
        }
    }
    for (rank, part) in parts.iter().enumerate() {
        assert_eq!(part.dq.shape, Share::new(plan, rank, &whole).inputs(&whole).q.shape(), "{label}, rank {rank}");
        let found = part_of(plan, rank, &whole, &joined);
        for ((name, found), (_, expected)) in found.iter().zip(part_of(plan, rank, &whole, &derived.expected)) {
            let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64).sqrt();
            let of_all = derived.expected.named(&whole).into_iter().find(|(all, _)| all == name).unwrap().1;
            // What has decayed to nothing was judged above.
            if !name.starts_with("dg") && rms(&expected) > 1e-9 * rms(of_all) {
                // A rank of a few tokens may have small gradients by chance, and roundings of what meets the others'.
                let limit = gradient_tolerance(whole.dtype(), name) * (rms(of_all) / rms(&expected)).clamp(1.0, 4.0);
                if let Some(mismatch) = mismatch(name, &[expected.len()], found, &expected, limit) {
                    panic!("{label}, rank {rank} of {} (cuts {:?}): {mismatch}", plan.pes(), plan.cuts);
                }
            }
        }
    }
    all
}

/// Runs one configuration forward and backward and checks every rank: gradients, and what it sent.
///
/// # Panics
/// With everything that names the case, if something is wrong.
#[track_caller]
pub fn check_training(label: &str, derived: &Derived, plan: &Plan, config: &Config) -> Vec<Checked> {
    let Config { mode, chunk, m_wire, checked, recompute, .. } = config;
    let label = format!(
        "{label}: {}, {mode}, chunk {chunk}, M {m_wire:?}, checked {checked}, recompute {recompute}",
        derived.solved.case.spec
    );
    let parts = train(derived, plan, config).unwrap_or_else(|e| panic!("{label}, cuts {:?}: {e}", plan.cuts));
    let inputs = derived.solved.inputs();
    for (rank, part) in parts.iter().enumerate() {
        let want = super::traffic_of(&plan.mirrored(), rank, &inputs, config);
        super::check_traffic(&format!("{label}, rank {rank}, backward"), want, &part.backward.report, &inputs, config);
    }
    let gradients: Vec<Gradients> = parts.into_iter().map(|part| part.backward.gradients).collect();
    check_gradients(&label, derived, plan, &gradients)
}

/// The largest share of M in what a rank passes on backward, as forward: 0 where nothing crosses two cuts.
pub fn assert_transition_matters(label: &str, derived: &Derived, plan: &Plan) {
    if plan.span() > 2 {
        let weight = derived.solved.forwarded_weight(plan);
        assert!(weight > 0.1, "{label}: {}: the transition's weight is {weight}", derived.solved.case.spec);
    }
}
