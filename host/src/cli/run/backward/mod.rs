//! `deltalink run --backward`: gradients as well, and what they are compared with.

pub(in crate::cli) mod parts;

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::judge::{Compared, allowance, allowed_between, on_one, on_one_pe};
use super::super::output::{number, table};
use super::super::progress::Progress;
use super::RunCommandError;
use super::input::Job;
use super::report::{indented, time};
use crate::compare::{Allowance, Checked, Error, gradients_against_file, gradients_within};
use crate::gradients::{Gradients, Upstream};
use crate::op::whole::{self, WholeBackward, gradients_of_rank};
use crate::op::{Config, OpError};
use crate::reference::{Problem, backward};
use crate::world::WorldOptions;

/// Errors by gradient: `dq`, `dk`, `dv`, `dg` or `dg_raw`, `dbeta` or `dbeta_logits`, `dA_log`, `ddt_bias`, `dh0`.
pub type Errors = BTreeMap<String, Compared>;

/// Counts and times of one PE's backward call.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PeBackward {
    /// Device memory kept between the calls, in bytes.
    pub saved_bytes: usize,
    /// Payload sent to other PEs.
    pub bytes_sent: u64,
    /// Time in kernels without waits, in microseconds.
    pub compute_us: f64,
    /// Time in which a worker only waited for other PEs, in microseconds.
    pub exposed_wait_us: f64,
}

/// What came of the gradients of one input.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Verdict {
    pub reference: Errors,
    pub one_pe: Errors,
    /// None if the tensors were rounded after they were made.
    pub file: Errors,
    /// Of each PE's part, against the reference.
    pub by_pe: Vec<Errors>,
    pub pe: Vec<PeBackward>,
    /// What is off by more than allowed. To be judged only if the inputs are finite.
    pub mismatches: Vec<String>,
}

/// The upstream gradients in the job's file.
pub(super) fn upstream(job: &Job) -> Result<Upstream<'_>, RunCommandError> {
    job.file.upstream().ok_or_else(|| RunCommandError::NoUpstream { input: job.name.clone() })
}

/// Computes `job` on one PE and in f64, and compares.
pub(super) fn check(
    job: &Job,
    computed: &WholeBackward,
    config: &Config,
    progress: &Progress,
) -> Result<Verdict, RunCommandError> {
    let (inputs, upstream) = (job.file.inputs(), upstream(job)?);
    let found = computed.gradients.to_f64();

    progress.start(format!("{}: gradients on one PE", job.name));
    let config = on_one(Config { trace: false, ..config.clone() });
    let one = whole::backward(&on_one_pe(&job.plan), &inputs, &upstream, &config, &WorldOptions::default())
        .map_err(|source: OpError| RunCommandError::compute(&format!("{} on one PE", job.name), source))?;
    let one = one.gradients.to_f64();
    progress.done();

    progress.start(format!("{}: gradients of the f64 reference", job.name));
    let problem = Problem::new(&inputs, job.file.cu_seqlens().as_deref())
        .map_err(|source| RunCommandError::Problem { input: job.name.clone(), source })?;
    let reference =
        backward(&problem, &upstream).map_err(|source| RunCommandError::Input { input: job.name.clone(), source })?;
    progress.done();

    progress.start(format!("{}: comparing gradients", job.name));
    let allowed = allowance(inputs.dtype(), &config, &job.plan);
    let between = Allowance { factor: allowed_between(1.0), ..allowed };
    let mut mismatches = Vec::new();
    let mut errors = |what: &str, checked: Vec<Checked>| -> Errors {
        let wrong = checked.iter().filter_map(|checked| checked.mismatch.as_ref());
        mismatches.extend(wrong.map(|text| format!("against {what}: {text}")));
        checked.into_iter().map(|checked| (checked.name, checked.error.into())).collect()
    };
    let one_pe = errors("one PE", gradients_within(&inputs, &problem, &found, &one, between));
    let against_reference =
        errors("the f64 reference", gradients_within(&inputs, &problem, &found, &reference, allowed));
    let file = match job.unrounded {
        true => errors("the file", gradients_against_file(&job.file, &problem, &found)),
        false => Errors::new(),
    };
    let pe = computed.reports.iter().zip(&computed.saved_bytes).map(|(report, &saved_bytes)| PeBackward {
        saved_bytes,
        bytes_sent: report.bytes_sent,
        compute_us: report.compute.as_secs_f64() * 1e6,
        exposed_wait_us: report.exposed_wait.as_secs_f64() * 1e6,
    });
    let pe: Vec<_> = pe.collect();
    let by_pe = (0..pe.len()).map(|rank| errors_of_rank(job, rank, &found, &reference)).collect();
    progress.done();
    Ok(Verdict { reference: against_reference, one_pe, file, by_pe, pe, mismatches })
}

fn errors_of_rank(job: &Job, rank: usize, found: &Gradients<Vec<f64>>, expected: &Gradients<Vec<f64>>) -> Errors {
    let inputs = job.file.inputs();
    let part = |all| gradients_of_rank(&job.plan, rank, &inputs, all);
    let pairs = part(found).into_iter().zip(part(expected));
    pairs.map(|((name, found), (_, expected))| (name.to_owned(), Error::of(&found, &expected).into())).collect()
}

/// The tables of a verdict: each PE's backward call, and errors, a column for each gradient.
pub(super) fn text(verdict: &Verdict) -> String {
    let mut pes = table(["PE", "saved", "bytes sent", "compute", "exposed wait"].map(number));
    for (rank, pe) in verdict.pe.iter().enumerate() {
        let counts = [rank.to_string(), pe.saved_bytes.to_string(), pe.bytes_sent.to_string()];
        pes.add_row(counts.into_iter().chain([time(pe.compute_us), time(pe.exposed_wait_us)]).map(number));
    }
    let names: Vec<&String> = verdict.reference.keys().collect();
    let mut errors =
        table(std::iter::once("rel. RMS against").chain(names.iter().map(|name| name.as_str())).map(number));
    if let Some(first) = errors.column_mut(0) {
        first.set_cell_alignment(comfy_table::CellAlignment::Left);
    }
    let mut row = |what: String, of: &Errors| {
        let cells = names.iter().map(|name| of.get(*name).map_or("-".to_owned(), |e| format!("{:.1e}", e.rel_rms)));
        errors.add_row(std::iter::once(what.into()).chain(cells.map(number)));
    };
    row("one PE".into(), &verdict.one_pe);
    row("f64 reference".into(), &verdict.reference);
    for (rank, of_pe) in verdict.by_pe.iter().enumerate().filter(|_| verdict.by_pe.len() > 1) {
        row(format!("  its part on PE {rank}"), of_pe);
    }
    if !verdict.file.is_empty() {
        row("the file".into(), &verdict.file);
    }
    format!("\n  backward:\n{}\n{}", indented(&pes.trim_fmt()), indented(&errors.trim_fmt()))
}
