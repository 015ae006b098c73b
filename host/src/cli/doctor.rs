//! `deltalink doctor`: what this machine offers, and what to do about what it lacks. Changes nothing.
//!
//! Looking (`machine`, `cuda`, `nvshmem`, `launchers`) is apart from telling (here), so that a report can be made of a
//! made-up machine.

use std::io::Write;
use std::path::PathBuf;

use super::Exit;
use super::output::{JsonTarget, OutputError, emit, table};

mod cuda;
mod launchers;
mod machine;
mod nvshmem;
mod peers;
mod resident;
mod self_test;
mod tiles;

pub(super) use cuda::{Driver, driver_version};

/// Show what this machine offers: CPU, memory, GPUs and how they reach each other, driver, MPS, NVSHMEM, launchers.
///
/// The CPU back end needs none of the GPU parts. Each thing is ok, missing, or a note: something to know that stops
/// nothing. What to do about missing things follows the table. The command succeeds unless the CPU back end itself cannot
/// run here.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "Examples:
  Look at this machine:
    deltalink doctor
  Also let two PEs exchange messages for two seconds, on the CPU and on the GPUs that this build can use:
    deltalink doctor --self-test
  Keep a record beside a measurement:
    deltalink doctor --json machine.json

Exit code: 0 unless the CPU back end cannot run here (2) or the self-test fails (1).")]
pub struct Args {
    /// Let two PEs exchange messages for two seconds and compare what arrives.
    #[arg(long)]
    pub self_test: bool,
    /// Also write the findings as JSON to FILE; - writes JSON, and nothing else, to standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<JsonTarget>,
    /// Run every operation of the kernels' tile language on small operands instead: the CPU back end against plain loops in
    /// f64, and the first GPU, if this build has GPUs and there is one, against the CPU back end.
    #[arg(long)]
    pub tiles: bool,
}

/// `deltalink doctor` found no way to run, or could not say so.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum DoctorError {
    #[error("the CPU back end cannot run here: {why}")]
    CpuBackEnd { why: String },
    #[error(
        "{wrong} of {of} rows of tile operations are wrong; the report names the first element of each: please report it"
    )]
    Tiles { wrong: usize, of: usize },
    #[error(transparent)]
    Exec(#[from] crate::exec::ExecError),
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// How a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// There, and fit.
    Ok,
    /// Not there; something cannot be used without it.
    Missing,
    /// Something to know; it stops nothing.
    Note,
    /// Tried, and wrong.
    Failed,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Status::Ok => "ok",
            Status::Missing => "missing",
            Status::Note => "note",
            Status::Failed => "FAILED",
        })
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// What was looked at.
    pub item: String,
    /// How it is.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// Folders that were searched, if it is the kind of thing one searches for.
    pub searched: Vec<PathBuf>,
    /// What it means and what to do; one line.
    pub advice: Option<String>,
    /// Whether the CPU back end cannot run because of it.
    pub stops_cpu: bool,
}

impl Finding {
    fn new(item: impl Into<String>, status: Status, found: impl Into<String>) -> Self {
        let (item, found) = (item.into(), found.into());
        Self { item, status, found, searched: Vec::new(), advice: None, stops_cpu: false }
    }

    fn advice(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }
}

/// Everything that `deltalink doctor` says; the JSON it writes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// Version of this layout: 1.
    pub schema: u32,
    /// Version of deltalink.
    pub deltalink: &'static str,
    /// What was looked at, in order.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Looks at this machine: reads `/proc`, loads libcuda and libnvshmem_host if they are there, and asks the launchers
    /// on `PATH` for their versions.
    ///
    /// With `self_test` two PEs exchange messages, which takes two seconds for each device.
    pub fn of_this_machine(self_test: bool) -> Self {
        let machine = machine::Machine::this();
        let mut findings = machine.findings();
        let driver = cuda::Driver::probe("libcuda.so.1".as_ref());
        findings.extend(driver.findings(machine.read("/proc/driver/nvidia/version").as_deref()));
        findings.extend(machine.mps(driver.gpu_count() > 0));
        findings.extend(nvshmem::findings(&machine, &nvshmem::ask_library));
        findings.extend(launchers::findings(&machine, &launchers::ask_program));
        if self_test {
            findings.extend(self_test::findings(driver.gpu_count()));
        }
        Self::of(findings)
    }

    /// Whether nothing that was tried went wrong.
    pub fn passed(&self) -> bool {
        self.findings.iter().all(|finding| finding.status != Status::Failed)
    }

    fn of(findings: Vec<Finding>) -> Self {
        Self { schema: 1, deltalink: env!("CARGO_PKG_VERSION"), findings }
    }

    /// Whether the CPU back end can run.
    ///
    /// # Errors
    /// [`DoctorError::CpuBackEnd`] names what stops it.
    pub fn cpu_back_end(&self) -> Result<(), DoctorError> {
        let stops: Vec<String> = self.findings.iter().filter(|f| f.stops_cpu).map(explain).collect();
        if stops.is_empty() { Ok(()) } else { Err(DoctorError::CpuBackEnd { why: stops.join("; ") }) }
    }

    /// The findings as a table, then what to do.
    pub fn text(&self) -> String {
        let mut rows = table(["what".into(), "status".into(), "found".into()]);
        for f in &self.findings {
            rows.add_row([f.item.clone(), f.status.to_string(), f.found.clone()]);
        }
        let mut text = format!("deltalink {}\n\n{}\n", self.deltalink, rows.trim_fmt());
        let advised: Vec<String> = self.findings.iter().filter(|f| f.advice.is_some()).map(advise).collect();
        if !advised.is_empty() {
            text += &format!("\nWhat to do\n{}", advised.concat());
        }
        text += match self.cpu_back_end() {
            Ok(()) => "\nThe CPU back end can run here.\n",
            Err(_) => "\nThe CPU back end cannot run here.\n",
        };
        text
    }
}

/// The loader's own words, which name the file; the error around them only says which call failed.
fn loader_says(e: &libloading::Error) -> String {
    std::error::Error::source(e).map_or_else(|| e.to_string(), ToString::to_string)
}

fn explain(f: &Finding) -> String {
    match &f.advice {
        Some(advice) => format!("{}: {}; {advice}", f.item, f.found),
        None => format!("{}: {}", f.item, f.found),
    }
}

fn advise(f: &Finding) -> String {
    let mut text = format!("* {}: {}\n", f.item, f.advice.as_deref().unwrap_or_default());
    if !f.searched.is_empty() {
        text += "  searched:\n";
        for folder in &f.searched {
            text += &format!("    {}\n", folder.display());
        }
    }
    text
}

/// Looks at this machine and writes what it found to `out`, as a table or as JSON where `args.json` says so.
///
/// # Errors
/// [`DoctorError`] if the CPU back end cannot run here (after the report is written) or the report cannot be written. That
/// the self-test fails is [`Exit::Wrong`].
pub fn run(args: &Args, out: &mut impl Write) -> Result<Exit, DoctorError> {
    if args.tiles {
        tiles::run(args.json.as_ref(), out)?;
        return Ok(Exit::Success);
    }
    let report = Report::of_this_machine(args.self_test);
    emit(out, args.json.as_ref(), &report, || report.text())?;
    report.cpu_back_end()?;
    Ok(if report.passed() { Exit::Success } else { Exit::Wrong })
}

#[cfg(test)]
mod tests;
