//! What `deltalink run` says: JSON for programs, tables for eyes.

use serde::Serialize;

use super::super::judge::{Compared, Pair, allowed_between};
use super::super::output::{number, table};
use super::input::Job;
use super::{SoakReport, Verdict, World, backward};
use crate::exec::Waits;
use crate::inputs::{Dims, Op};
use crate::op::whole::Whole;
use crate::op::{Config, CutReport, Mode, Segments, Transport};
use crate::tensor::Dtype;

/// One input; the JSON is a list of these. Numbers that are not finite are `null` in JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Version of this layout: 1.
    pub schema: u32,
    /// Delta rule.
    pub op: Op,
    /// Path or name of the input.
    pub input: String,
    /// Number of PEs.
    pub pes: usize,
    /// What a PE is.
    pub world: World,
    /// How summaries travelled.
    pub mode: Mode,
    /// Element type of q, k, v and o.
    pub dtype: Dtype,
    /// Chunk length.
    pub chunk: usize,
    /// Element type of M on the wire.
    pub m_wire: Dtype,
    /// How small the norm of a transition must be for the rest of it to be left out.
    pub cut_tolerance: f32,
    /// Into how many parts PEs were to cut their segments.
    pub segments: Segments,
    /// Whether all errors are within the tolerance; `null` if the inputs are not finite.
    pub passed: Option<bool>,
    /// Largest relative RMS error allowed.
    pub tolerance: f64,
    /// The same against one PE, whose result has rounding errors of its own.
    pub tolerance_vs_one_pe: f64,
    /// Against the f64 reference.
    pub error: ErrorReport,
    /// Against one PE.
    pub error_vs_one_pe: ErrorReport,
    /// Against what the file expects, by tensor.
    pub error_vs_file: std::collections::BTreeMap<String, Compared>,
    /// Largest `|M S_in| / |S_out|`.
    pub transition_weight: f64,
    /// Largest exposed wait of any PE, in microseconds.
    pub exposed_wait_us: f64,
    /// How summaries were to be written.
    pub transport: Transport,
    /// Where PEs waited for each other.
    pub waits: Waits,
    /// Most device memory of any PE, in bytes.
    pub peak_device_bytes: usize,
    /// What came of repetitions, if there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetitions: Option<SoakReport>,
    /// By rank.
    pub pe: Vec<PeReport>,
    /// What is wrong, in words.
    pub mismatches: Vec<String>,
    #[serde(skip)]
    dims: Dims,
    #[serde(skip)]
    gradients: Option<backward::Verdict>,
}

/// Errors of results and, with `--backward`, of gradients, by tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ErrorReport {
    /// `o` and `ht`.
    #[serde(flatten)]
    pub results: Pair,
    /// `dq` and so on.
    #[serde(flatten)]
    pub gradients: backward::Errors,
}

/// Counts and times of one PE.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeReport {
    /// Rank.
    pub rank: usize,
    /// Tokens, over all rows of the batch.
    pub tokens: usize,
    /// Parts of the segment that it cut into most; 1 if it walked all of them whole.
    pub parts: usize,
    /// Payload sent to other PEs.
    pub bytes_sent: u64,
    /// What was left out of transitions.
    pub cut: CutReport,
    /// Time in kernels without waits, in microseconds.
    pub compute_us: f64,
    /// Time in which a worker only waited for other PEs, in microseconds.
    pub exposed_wait_us: f64,
    /// Most bytes of device memory held at once: inputs and results brought there, scratch, and symmetric heap.
    pub peak_device_bytes: usize,
    /// Its backward call, with `--backward`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward: Option<backward::PeBackward>,
    /// With `--backward`: errors of this PE's gradients against the f64 reference.
    #[serde(skip_serializing_if = "backward::Errors::is_empty")]
    pub error: backward::Errors,
}

impl Report {
    pub(super) fn new(
        job: &Job,
        whole: &Whole,
        config: &Config,
        world: World,
        verdict: Verdict,
        repetitions: Option<SoakReport>,
        gradients: Option<backward::Verdict>,
    ) -> Self {
        let inputs = job.file.inputs();
        let (q, v) = (inputs.q.shape(), inputs.v.shape());
        let dims = Dims { b: q[0], t: q[1], h: q[2], hv: v[2], k: q[3], v: v[3] };
        let us = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let pe = whole.reports.iter().enumerate().map(|(rank, r)| PeReport {
            rank,
            tokens: r.tokens,
            parts: r.parts,
            bytes_sent: r.bytes_sent,
            cut: r.cut,
            compute_us: us(r.compute),
            exposed_wait_us: us(r.exposed_wait),
            peak_device_bytes: r.peak_device_bytes,
            backward: gradients.as_ref().map(|gradients| gradients.pe[rank]),
            error: gradients.as_ref().map_or_else(Default::default, |gradients| gradients.by_pe[rank].clone()),
        });
        let pe: Vec<PeReport> = pe.collect();
        let of_gradients = |of: fn(&backward::Verdict) -> &backward::Errors| {
            gradients.as_ref().map_or_else(backward::Errors::new, |gradients| of(gradients).clone())
        };
        let error = ErrorReport { results: verdict.reference, gradients: of_gradients(|verdict| &verdict.reference) };
        let error_vs_one_pe =
            ErrorReport { results: verdict.one_pe, gradients: of_gradients(|verdict| &verdict.one_pe) };
        let mut error_vs_file = of_gradients(|verdict| &verdict.file);
        error_vs_file.extend(verdict.file);
        // Judged if the inputs are.
        let mut mismatches = verdict.mismatches;
        if let (Some(mismatches), Some(gradients)) = (&mut mismatches, &gradients) {
            mismatches.extend(gradients.mismatches.iter().cloned());
        }
        Self {
            schema: 1,
            op: inputs.op,
            input: job.name.clone(),
            pes: job.plan.pes(),
            world,
            mode: config.mode,
            dtype: inputs.dtype(),
            chunk: config.chunk,
            m_wire: config.m_wire.resolve(inputs.dtype()),
            cut_tolerance: config.cut_tolerance,
            segments: config.segments,
            passed: mismatches.as_ref().map(Vec::is_empty),
            tolerance: verdict.tolerance,
            tolerance_vs_one_pe: allowed_between(verdict.tolerance),
            error,
            error_vs_one_pe,
            error_vs_file,
            transition_weight: verdict.transition_weight,
            exposed_wait_us: pe.iter().map(|pe| pe.exposed_wait_us).fold(0.0, f64::max),
            transport: config.transport,
            waits: whole.reports.first().map_or_else(Waits::default, |report| report.waits),
            peak_device_bytes: pe.iter().map(|pe| pe.peak_device_bytes).max().unwrap_or(0),
            repetitions,
            pe,
            mismatches: mismatches.unwrap_or_default(),
            dims,
            gradients,
        }
    }

    fn text(&self) -> String {
        let Dims { b, t, h, hv, k, v } = self.dims;
        let world = match self.world {
            World::Threads => "threads",
            World::Processes => "processes",
        };
        let Self { op, input, pes, mode, chunk, dtype, m_wire, .. } = self;
        let parts = match self.pe.iter().map(|pe| pe.parts).max() {
            Some(parts) if parts > 1 => format!(", segments in up to {parts} parts"),
            _ => String::new(),
        };
        let mut text = format!(
            "{op} {dtype} {input}: B={b} T={t} H={h} HV={hv} K={k} V={v}\n\
             {pes} {} ({world}), mode {mode}, chunks of {chunk} tokens, M travels in {m_wire}{parts}\n\n",
            if *pes == 1 { "PE" } else { "PEs" }
        );

        let mut pes = table(["PE", "tokens", "bytes sent", "compute", "exposed wait", "peak memory"].map(number));
        for pe in &self.pe {
            let numbers = [pe.rank.to_string(), pe.tokens.to_string(), pe.bytes_sent.to_string()];
            let times = [time(pe.compute_us), time(pe.exposed_wait_us)];
            let memory = indicatif::BinaryBytes(pe.peak_device_bytes as u64).to_string();
            pes.add_row(numbers.into_iter().chain(times).chain([memory]).map(number));
        }
        text += &indented(&pes.trim_fmt());
        let cut = self.pe.iter().fold(CutReport::default(), |cut, pe| cut.plus(pe.cut));
        text += &cut_text(&cut);
        if self.waits == Waits::Host {
            text += "  PEs share a GPU and wait for each other on the host, between kernels.\n";
        }
        if let Some(soak) = &self.repetitions {
            text += &format!("  {}\n", soak.text());
        }

        let head = ["compared with", "o: rel. RMS", "largest", "ht: rel. RMS", "largest"];
        let mut errors = table(head.map(number));
        if let Some(names) = errors.column_mut(0) {
            names.set_cell_alignment(comfy_table::CellAlignment::Left);
        }
        let mut row = |name: &str, o: Option<&Compared>, ht: Option<&Compared>| {
            let cells = [o, ht].into_iter().flat_map(|error| match error {
                Some(error) => [format!("{:.1e}", error.rel_rms), format!("{:.1e}", error.max_abs)],
                None => ["-".to_owned(), "-".to_owned()],
            });
            errors.add_row(std::iter::once(name.into()).chain(cells.map(number)));
        };
        let (one_pe, reference) = (&self.error_vs_one_pe.results, &self.error.results);
        row("one PE", Some(&one_pe.o), Some(&one_pe.ht));
        row("f64 reference", Some(&reference.o), Some(&reference.ht));
        if !self.error_vs_file.is_empty() {
            row("the file", self.error_vs_file.get("o"), self.error_vs_file.get("ht"));
        }
        text += "\n";
        text += &indented(&errors.trim_fmt());
        text += &self.gradients.as_ref().map_or_else(String::new, backward::text);

        // So little of a state came from earlier PEs that M could be wrong.
        let unused = if self.pes > 1 && self.transition_weight < 0.01 { " (a wrong M would not show)" } else { "" };
        text += &format!("\n  transition weight {:.3}{unused}; ", self.transition_weight);
        text += &match self.passed {
            Some(true) => format!("relative errors are within {:.0e}: ok\n", self.tolerance),
            Some(false) => {
                let wrong: String = self.mismatches.iter().map(|text| format!("    {text}\n")).collect();
                format!("WRONG, a relative error may be {:.0e}:\n{wrong}", self.tolerance)
            }
            None => "the input is not finite, so the errors are not judged\n".to_owned(),
        };
        text
    }
}

/// What was left out of transitions, of all PEs.
fn cut_text(cut: &CutReport) -> String {
    let CutReport { m_chunks, m_chunks_walked, empty_messages, largest_bound } = cut;
    match m_chunks {
        0 => String::new(),
        _ if *largest_bound == 0.0 => format!("  M walked in all {m_chunks} chunks of its blocks\n"),
        _ => format!(
            "  M walked in {m_chunks_walked} of {m_chunks} chunks of its blocks, {empty_messages} messages without it; \
             norm of what was left out at most {largest_bound:.1e}\n"
        ),
    }
}

/// All inputs for eyes.
pub(super) fn text(reports: &[Report]) -> String {
    let texts: Vec<String> = reports.iter().map(Report::text).collect();
    let mut text = texts.join("\n\n");
    if reports.len() > 1 {
        let wrong = reports.iter().filter(|report| report.passed == Some(false)).count();
        text += &match wrong {
            0 => format!("\nAll {} inputs are right.\n", reports.len()),
            _ => format!("\n{wrong} of {} inputs are WRONG.\n", reports.len()),
        };
    }
    text
}

pub(super) fn indented(table: &str) -> String {
    table.lines().map(|line| format!("  {}\n", line.trim_end())).collect()
}

pub(super) fn time(us: f64) -> String {
    match us {
        0.0..1e4 => format!("{us:.1} us"),
        1e4..1e7 => format!("{:.1} ms", us / 1e3),
        _ => format!("{:.2} s", us / 1e6),
    }
}
