//! `deltalink doctor --tiles`: the operations of the tile DSL, back end against back end.

use std::io::Write;

use super::super::output::{JsonTarget, emit};
use super::DoctorError;
use crate::exec::ExecError;
use crate::exec::conformance::{Cpu, Row, against_f64, cases, table};

/// What `deltalink doctor --tiles` says; the JSON it writes.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct TilesReport {
    /// Version of this layout: 1.
    pub schema: u32,
    /// Version of deltalink.
    pub deltalink: &'static str,
    /// The GPU that was compared, and its driver; absent where there is none, or a build without GPUs.
    pub gpu: Option<String>,
    /// Whether every element is within its bound.
    pub passed: bool,
    /// The CPU back end against plain loops, then a GPU against the CPU back end.
    pub rows: Vec<Row>,
}

impl TilesReport {
    /// Runs everything.
    fn of_this_machine() -> Result<Self, ExecError> {
        let cases = cases::all();
        let mut rows = against_f64(&cases, &mut Cpu::new())?;
        let gpu = compare_gpu(&cases, &mut rows)?;
        let passed = rows.iter().all(Row::passed);
        Ok(Self { schema: 1, deltalink: env!("CARGO_PKG_VERSION"), gpu, passed, rows })
    }

    fn text(&self) -> String {
        let compared = match &self.gpu {
            Some(gpu) => format!("GPU: {gpu}\n"),
            None if cfg!(feature = "cuda") => "No GPU here: the CPU back end alone was compared.\n".into(),
            None => "Built without the feature cuda: the CPU back end alone was compared.\n".into(),
        };
        format!("{}\n{compared}", table(&self.rows))
    }
}

/// Adds the rows of the first GPU, if there is one; which it is.
#[cfg(feature = "cuda")]
fn compare_gpu(
    cases: &[crate::exec::conformance::case::Case],
    rows: &mut Vec<Row>,
) -> Result<Option<String>, ExecError> {
    use crate::exec::conformance::{OnGpu, against_cpu};
    use crate::exec::cuda::{CudaError, Gpu};
    match Gpu::count() {
        Err(CudaError::NoDriver { .. } | CudaError::NoDevice | CudaError::Driver { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
        Ok(_) => {}
    }
    let gpu = Gpu::open(0)?;
    rows.extend(against_cpu(cases, &mut OnGpu::new(&gpu)?, &mut Cpu::new())?);
    let properties = gpu.properties();
    let driver = properties.driver.as_deref().unwrap_or("unknown");
    Ok(Some(format!("{}, driver {driver}", properties.name)))
}

/// A build without GPUs.
#[cfg(not(feature = "cuda"))]
fn compare_gpu(_: &[crate::exec::conformance::case::Case], _: &mut Vec<Row>) -> Result<Option<String>, ExecError> {
    Ok(None)
}

/// Compares, and writes what came out to `out`.
pub(super) fn run(json: Option<&JsonTarget>, out: &mut impl Write) -> Result<(), DoctorError> {
    let report = TilesReport::of_this_machine()?;
    emit(out, json, &report, || report.text())?;
    let wrong = report.rows.iter().filter(|row| !row.passed()).count();
    if wrong == 0 { Ok(()) } else { Err(DoctorError::Tiles { wrong, of: report.rows.len() }) }
}
