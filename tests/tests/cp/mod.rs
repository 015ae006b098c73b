//! What the tests of context parallelism share: running a problem on PEs that are threads, and holding every rank's
//! results against the f64 reference.
#![allow(dead_code)] // every test file uses its own part

pub mod failing;
pub mod gradients;

use std::time::Duration;

use deltalink::compare::{Error, mismatch};
use deltalink::generate::{Case, Spec};
use deltalink::inputs::{Dims, Inputs, StateLayout};
use deltalink::op::whole::Share;
use deltalink::op::{Config, ContextParallel, Forward, Mode, OpError, Report};
use deltalink::plan::{COLUMNS, Cuts, Exchange, Layout, Plan, Sizes};
use deltalink::reference::{Outputs, Problem, recurrent, transition_weight};
use deltalink::tensor::Tensor;
use deltalink::world::{RunError, WorldOptions, run_threads};

/// All modes.
pub const MODES: [Mode; 3] = [Mode::Overlap, Mode::Bulk, Mode::Exact];

/// A generated problem and its solution in f64.
pub struct Solved {
    pub case: Case,
    pub expected: Outputs,
    pub problem: Problem,
}

impl Solved {
    pub fn new(spec: &Spec) -> Self {
        let case = spec.generate();
        let problem = Problem::new(&case.inputs(), case.cu_seqlens()).unwrap();
        Self { expected: recurrent(&problem), problem, case }
    }

    pub fn inputs(&self) -> Inputs<'_> {
        self.case.inputs()
    }

    pub fn plan(&self, cuts: &Cuts) -> Plan {
        plan_of(self.case.cu_seqlens(), self.case.spec.b, self.case.spec.t, cuts)
    }

    /// How much of what a rank forwards came from earlier ranks.
    pub fn forwarded_weight(&self, plan: &Plan) -> f64 {
        transition_weight(&self.problem, &plan.cuts).max_forwarded
    }
}

/// The plan of a problem with or without packed sequences.
pub fn plan_of(cu_seqlens: Option<&[usize]>, b: usize, t: usize, cuts: &Cuts) -> Plan {
    match cu_seqlens {
        Some(cu_seqlens) => Plan::packed(cu_seqlens, cuts).unwrap(),
        None => Plan::batch(b, t, cuts).unwrap(),
    }
}

/// A world whose waits end soon enough for a test.
pub fn options(timeout: Duration) -> WorldOptions {
    WorldOptions { timeout, ..WorldOptions::default() }
}

/// One call on every PE; each rank's results.
pub fn run(plan: &Plan, whole: &Inputs<'_>, config: &Config) -> Result<Vec<Forward>, RunError<OpError>> {
    run_threads(plan.pes(), &WorldOptions::default(), |pe| {
        let share = Share::new(plan, pe.rank(), whole);
        ContextParallel::new(pe, config.clone())?.forward(plan, &share.inputs(whole))
    })
}

/// Tokens of rank `rank` of a row-major `[B,T,..]` tensor.
pub fn tokens_of(plan: &Plan, rank: usize, b: usize, values: &[f64]) -> Vec<f64> {
    let t = plan.layout.tokens();
    let width = if t == 0 { 0 } else { values.len() / (b * t) };
    let row = |row: usize| (row * t + plan.cuts[rank]) * width..(row * t + plan.cuts[rank + 1]) * width;
    (0..b).flat_map(|i| values[row(i)].to_vec()).collect()
}

/// States in K-first order.
pub fn k_first(state: &Tensor, layout: StateLayout, dims: &Dims) -> Vec<f64> {
    let data = state.data.to_f64();
    match layout {
        StateLayout::KFirst => data,
        StateLayout::VFirst => {
            let Dims { k, v, .. } = *dims;
            let transposed = |s: &[f64]| (0..k * v).map(|i| s[i % v * k + i / v]).collect::<Vec<_>>();
            data.chunks_exact(k * v).flat_map(transposed).collect()
        }
    }
}

/// Holds one rank's results against the whole solution and returns the relative errors of `o` and of the final states.
///
/// # Panics
/// With the rank's name and the place, if something is off by more than `tolerance`.
#[track_caller]
pub fn check_rank(
    label: &str,
    plan: &Plan,
    rank: usize,
    inputs: &Inputs<'_>,
    found: &Forward,
    expected: &Outputs,
    tolerance: f64,
) -> Vec<Error> {
    let dims = inputs.dims().unwrap();
    let mut errors = Vec::new();
    let mut check = |what: String, shape: &[usize], found: &[f64], expected: &[f64]| {
        if let Some(account) = mismatch(&what, shape, found, expected, tolerance) {
            panic!("{label}, rank {rank} of {} (cuts {:?}): {account}", plan.pes(), plan.cuts);
        }
        if !expected.is_empty() {
            errors.push(Error::of(found, expected));
        }
    };
    let want = tokens_of(plan, rank, dims.b, &expected.o);
    check("o".into(), &found.o.shape, &found.o.data.to_f64(), &want);
    if let Some(states) = &found.final_state {
        let size = dims.hv * dims.k * dims.v;
        let states = k_first(states, inputs.state_layout, &dims);
        let ends = &plan.ranks[rank].ends;
        assert_eq!(states.len(), ends.len() * size, "{label}, rank {rank}");
        for (i, &seq) in ends.iter().enumerate() {
            let what = format!("the final state of sequence {seq}");
            let shape = [dims.hv, dims.k, dims.v];
            check(what, &shape, &states[i * size..][..size], &expected.ht[seq * size..][..size]);
        }
    }
    errors
}

/// Bytes and messages (blocks of all heads) that `rank` has to send.
pub fn traffic_of(plan: &Plan, rank: usize, inputs: &Inputs<'_>, config: &Config) -> (u64, u64) {
    let dims = inputs.dims().unwrap();
    let m_bytes = config.m_wire.resolve(inputs.dtype()).size();
    let sizes = Sizes { hv: dims.hv, k: dims.k, v: dims.v, m_bytes };
    let exchange = if config.mode == Mode::Exact { Exchange::Chain } else { Exchange::Push };
    let messages = plan.traffic(&sizes, exchange);
    messages.iter().filter(|m| m.from == rank).fold((0, 0), |(bytes, count), m| {
        let blocks = sizes.v.div_ceil(COLUMNS) + if m.bytes_m > 0 { sizes.k.div_ceil(COLUMNS) } else { 0 };
        (bytes + (m.bytes_s + m.bytes_m) as u64, count + (blocks * dims.hv) as u64)
    })
}

/// Runs one configuration and checks every rank: results, and what it sent.
///
/// # Panics
/// With everything that names the case, if something is wrong.
#[track_caller]
pub fn check_run(label: &str, solved: &Solved, plan: &Plan, config: &Config, tolerance: f64) -> Vec<Error> {
    let inputs = solved.inputs();
    let Config { mode, chunk, m_wire, checked, .. } = config;
    let label = format!("{label}: {}, {mode}, chunk {chunk}, M {m_wire:?}, checked {checked}", solved.case.spec);
    let parts = run(plan, &inputs, config).unwrap_or_else(|e| panic!("{label}, cuts {:?}: {e}", plan.cuts));
    let mut errors = Vec::new();
    for (rank, part) in parts.iter().enumerate() {
        assert_eq!(part.final_state.is_some(), config.final_state, "{label}");
        errors.extend(check_rank(&label, plan, rank, &inputs, part, &solved.expected, tolerance));
        check_traffic(
            &format!("{label}, rank {rank}"),
            traffic_of(plan, rank, &inputs, config),
            &part.report,
            &inputs,
            config,
        );
    }
    errors
}

/// Holds what a rank sent against the bytes and messages that the plan wants: of blocks of M that are too small to matter
/// nothing is sent but that.
///
/// # Panics
/// If they differ.
#[track_caller]
pub fn check_traffic(
    label: &str,
    (bytes, messages): (u64, u64),
    report: &Report,
    inputs: &Inputs<'_>,
    config: &Config,
) {
    assert_eq!(report.messages, messages, "{label}: messages sent");
    let k = inputs.dims().unwrap().k;
    let m_bytes = config.m_wire.resolve(inputs.dtype()).size();
    let blocks = |columns: usize| (k * columns * m_bytes) as u64 * report.cut.empty_messages;
    // Only the last block of columns may be narrower.
    let narrow = if k.is_multiple_of(COLUMNS) { COLUMNS } else { k % COLUMNS };
    let left_out = blocks(narrow)..=blocks(k.min(COLUMNS));
    let found = bytes - report.bytes_sent;
    assert!(left_out.contains(&found), "{label}: {found} of {bytes} bytes were not sent, expected {left_out:?}");
}

/// Whether `layout` has sequences that lie on several ranks.
pub fn crosses(plan: &Plan) -> bool {
    matches!(plan.layout, Layout::Packed { .. } | Layout::Batch { .. }) && plan.span() > 1
}
