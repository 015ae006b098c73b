//! `deltalink verify`: generated problems of many kinds, each on several PEs, against the f64 reference and one PE.
//!
//! [`matrix`] lists the cases, [`measure`] computes one, [`report`] sums up and tells.

use std::io::Write;

use super::Exit;
use super::options::{DEVICES, one_of};
use super::output::{JsonTarget, OutputError, emit};
use super::progress::Progress;

mod cuts;
mod matrix;
mod measure;
mod report;

pub use report::{Failure, Group, Report, Worst};

use crate::op::Device;
use matrix::Case;
use measure::Bench;

/// Check the operation on generated problems: shapes, gates, steps, cuts, modes, element types.
///
/// Each case computes one problem on several PEs and compares the outputs `o` and final states `ht` with an f64 reference and
/// with one PE. In mode exact with cuts at multiples of the chunk length they must be those of one PE, bit for bit.
///
/// The table has a row for each group of cases and element type. Its numbers are those of the group's worst case: the one
/// whose largest error comes closest to what is allowed there.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  A first look, less than a minute:
    deltalink verify --quick
  Everything, with other random numbers than usual:
    deltalink verify --seed 7
  Only cases on 2 or 3 PEs:
    deltalink verify --pes 2,3
  One case again, as a failure's last line says:
    deltalink verify --seed 7 --case 412

Exit code: 0 all cases are right, 1 one is wrong, 2 there was nothing to check or no way to write the report.")]
pub struct Args {
    /// About one case in four, of every group.
    #[arg(long)]
    pub quick: bool,
    /// Only cases on these numbers of PEs, from 1 to 8.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..=8))]
    pub pes: Vec<u8>,
    /// What computes. [default: cuda if this build and this machine have it, otherwise cpu]
    #[arg(long, value_name = "DEVICE", value_parser = one_of::<Device>(DEVICES))]
    pub device: Option<Device>,
    /// Seed of everything random: the tensors, and what a case does not enumerate.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Only this case.
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["quick", "pes"])]
    pub case: Option<usize>,
    /// Also write the report as JSON to FILE; - writes JSON, and nothing else, to standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<JsonTarget>,
}

/// `deltalink verify` could not check anything, or not say what came of it.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum VerifyError {
    #[error("there is no case {asked}; cases are numbered 0 to {last}")]
    NoSuchCase { asked: usize, last: usize },
    #[error("no case is on {asked:?} PEs; leave --quick out or name other numbers of PEs")]
    NoCases { asked: Vec<u8> },
    #[error(transparent)]
    File(#[from] crate::file::FileError),
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// Computes and checks the cases that `args` ask for and writes the report to `out`.
///
/// # Errors
/// [`VerifyError`]. Wrong results are [`Exit::Wrong`].
pub fn run(args: &Args, out: &mut impl Write) -> Result<Exit, VerifyError> {
    let cases = chosen(args)?;
    if let Some(path) = args.json.as_ref().and_then(JsonTarget::file) {
        crate::file::check_writable(path)?;
    }
    let progress = Progress::new(cases.len(), args.json != Some(JsonTarget::Stdout));
    let mut outcomes = Vec::with_capacity(cases.len());
    let mut bench = None;
    let device = args.device.unwrap_or_else(Device::available);
    for case in &cases {
        progress.start(format!("{}: {}", case.group, case.spec));
        let bench = Bench::reuse(&mut bench, &case.spec);
        outcomes.push(bench.measure(case, device));
        progress.done();
    }
    drop(progress);
    // A few cases need not be of the kind in which much of a state comes from earlier PEs; all of them must be.
    let whole = args.case.is_none() && args.pes.is_empty();
    let report = Report::new(args.seed, whole, &cases, &outcomes);
    emit(out, args.json.as_ref(), &report, || report.text())?;
    Ok(if report.passed { Exit::Success } else { Exit::Wrong })
}

fn chosen(args: &Args) -> Result<Vec<Case>, VerifyError> {
    let all = matrix::matrix(args.seed);
    if let Some(asked) = args.case {
        let last = all.len() - 1;
        return all.into_iter().nth(asked).map(|case| vec![case]).ok_or(VerifyError::NoSuchCase { asked, last });
    }
    let on = |case: &Case| args.pes.is_empty() || args.pes.iter().any(|&pes| usize::from(pes) == case.pes());
    let cases: Vec<Case> = all.into_iter().filter(|case| (!args.quick || case.quick) && on(case)).collect();
    if cases.is_empty() { Err(VerifyError::NoCases { asked: args.pes.clone() }) } else { Ok(cases) }
}
