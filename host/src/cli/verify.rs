//! `deltalink verify`: generated problems of many kinds, each on several PEs, against the f64 reference and one PE.
//!
//! `matrix` lists the cases, `measure` computes one on threads and judges, `crew` computes one on processes, `report` sums up
//! and tells.

use std::io::Write;
use std::time::Duration;

use super::gpus::{GpuChoice, GpusError};
use super::options::{DEVICES, one_of};
use super::output::{JsonTarget, OutputError, emit};
use super::pes::{self, PesError, World};
use super::progress::Progress;
use super::{Exit, Invocation};

mod crew;
mod cuts;
mod gradients;
mod matrix;
mod measure;
mod report;

pub use report::{Failure, Group, Report, Worst};

use crate::file::{FileError, check_writable};
use crate::op::{Device, OpError, Segments};
use crate::world::{Pe, WorldError, WorldOptions};
use crew::Crew;
use matrix::Case;
use measure::{Bench, How, Outcome};
use report::Extent;

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
  Gradients as well:
    deltalink verify --quick --backward
  Only cases on 2 or 3 PEs:
    deltalink verify --pes 2,3
  On PEs that are processes; under a launcher, on as many as it starts and on fewer:
    deltalink verify --quick --world processes
    mpiexec.hydra -n 4 deltalink verify --quick
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
    /// What a PE is: a thread of this process, or a process of its own. All cases use the same processes.
    #[arg(long, value_enum)]
    pub world: Option<World>,
    /// What computes. [default: cuda if this build and this machine have it, otherwise cpu]
    #[arg(long, value_name = "DEVICE", value_parser = one_of::<Device>(DEVICES))]
    pub device: Option<Device>,
    #[command(flatten)]
    #[allow(missing_docs)] // documented at its type
    pub choice: GpuChoice,
    /// Gradients as well, for random gradients of the outputs.
    #[arg(long)]
    pub backward: bool,
    /// Into how many parts a PE cuts each of its segments, to walk them side by side: auto, which does where it gains on a
    /// GPU, or a number (1: never). Mode exact never does.
    #[arg(long, value_name = "N", default_value = "auto")]
    pub segments: Segments,
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
    #[error(
        "{what} is on {asked} PEs, the launcher started {launched}; start as many processes (-n {asked}), or ask for cases on \
         fewer PEs (--pes)"
    )]
    Launched { what: String, asked: usize, launched: usize },
    #[error("the result that PE {rank} sent cannot be read ({reason}); start all PEs with one program")]
    Part { rank: usize, reason: String },
    #[error(transparent)]
    Gpus(#[from] GpusError),
    #[error(transparent)]
    Pes(#[from] PesError),
    #[error(transparent)]
    World(#[from] WorldError),
    #[error(transparent)]
    Op(#[from] OpError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// Of the world of all processes, in which some wait while PE 0 judges.
const PATIENCE: Duration = Duration::from_secs(600);

/// Computes and checks the cases that `args` ask for and writes the report to `out`; as one PE of many if a launcher started
/// this process, otherwise with PEs of its own. Of several processes only PE 0 writes.
///
/// # Errors
/// [`VerifyError`]. Wrong results are [`Exit::Wrong`].
pub fn run(args: &Args, invocation: &Invocation, out: &mut impl Write) -> Result<Exit, VerifyError> {
    let options = WorldOptions { heap_bytes: 1 << 20, timeout: PATIENCE };
    if let Some(outcome) = pes::if_launched(&options, |pe| run_as(args, pe, out)) {
        return outcome;
    }
    let cases = chosen(args)?;
    check_json(args)?;
    if args.world == Some(World::Processes) {
        let most = cases.iter().map(Case::pes).max().unwrap_or(1);
        return Ok(pes::launch(most, &options, invocation)?);
    }
    let device = device(args)?;
    let how = How { device, backward: args.backward, segments: args.segments };
    let progress = progress(args, &cases, true);
    let mut outcomes = Vec::with_capacity(cases.len());
    let mut bench = None;
    for case in &cases {
        progress.start(format!("{}: {}", case.group, case.spec));
        outcomes.push(Bench::reuse(&mut bench, &case.spec).measure(case, how));
        progress.done();
    }
    drop(progress);
    tell(
        args,
        Extent {
            world: World::Threads,
            device,
            backward: args.backward,
            segments: args.segments,
            processes: None,
            left_out: 0,
        },
        &cases,
        &outcomes,
        out,
    )
}

/// This process is `pe`.
fn run_as(args: &Args, pe: &Pe, out: &mut impl Write) -> Result<Result<Exit, VerifyError>, VerifyError> {
    let ready = || -> Result<(Device, Vec<Case>), VerifyError> {
        pes::fits_launcher(pe, args.world, None)?;
        let cases = chosen(args)?;
        fits_world(args, pe.size(), &cases)?;
        check_json(args)?;
        Ok((device(args)?, cases))
    };
    let (device, mut cases) = match pes::agree(pe, "choice of the cases", ready())? {
        Ok(ready) => ready,
        Err(error) => return Ok(Err(error)),
    };
    let all = cases.len();
    cases.retain(|case| case.pes() <= pe.size());
    let how = How { device, backward: args.backward, segments: args.segments };
    let crew = Crew::new(pe, device)?;
    let computed = compute_on(&crew, &cases, how, progress(args, &cases, pe.rank() == 0));
    let outcomes = match computed {
        Ok(outcomes) => outcomes,
        Err(error) => {
            crew.abandon();
            return Err(error);
        }
    };
    crew.close()?;
    if pe.rank() > 0 {
        return Ok(Ok(Exit::Success)); // PE 0 has the outcomes
    }
    let left_out = all - cases.len();
    let extent = Extent {
        world: World::Processes,
        device,
        backward: args.backward,
        segments: args.segments,
        processes: Some(pe.size()),
        left_out,
    };
    Ok(tell(args, extent, &cases, &outcomes, out))
}

/// Computes all cases; on PE 0 what came of them.
fn compute_on(crew: &Crew<'_>, cases: &[Case], how: How, progress: Progress) -> Result<Vec<Outcome>, VerifyError> {
    let mut outcomes = Vec::with_capacity(cases.len());
    let mut bench = None;
    for case in cases {
        progress.start(format!("{}: {}", case.group, case.spec));
        let bench = Bench::reuse(&mut bench, &case.spec);
        if let Some(many) = crew.compute(case, how, bench)? {
            outcomes.push(bench.judge(case, how, many));
        }
        progress.done();
    }
    Ok(outcomes)
}

/// Refuses cases that were asked for by number, or by their number of PEs, and do not fit.
fn fits_world(args: &Args, launched: usize, cases: &[Case]) -> Result<(), VerifyError> {
    let larger = |asked: &usize| *asked > launched;
    if let Some(asked) = args.pes.iter().map(|&pes| usize::from(pes)).find(larger) {
        return Err(VerifyError::Launched { what: format!("what --pes {asked} asks for"), asked, launched });
    }
    match (args.case, cases.iter().map(Case::pes).find(larger)) {
        (Some(number), Some(asked)) => Err(VerifyError::Launched { what: format!("case {number}"), asked, launched }),
        _ => Ok(()),
    }
}

fn check_json(args: &Args) -> Result<(), FileError> {
    args.json.as_ref().and_then(JsonTarget::file).map_or(Ok(()), check_writable)
}

fn device(args: &Args) -> Result<Device, GpusError> {
    args.choice.apply(args.device == Some(Device::Cpu))?;
    Ok(args.device.unwrap_or_else(Device::available))
}

fn progress(args: &Args, cases: &[Case], here: bool) -> Progress {
    Progress::new(cases.len(), here && args.json != Some(JsonTarget::Stdout))
}

fn tell(
    args: &Args,
    extent: Extent,
    cases: &[Case],
    outcomes: &[Outcome],
    out: &mut impl Write,
) -> Result<Exit, VerifyError> {
    // A few cases need not be of the kind in which much of a state comes from earlier PEs; all of them must be.
    let whole = args.case.is_none() && args.pes.is_empty() && extent.left_out == 0;
    let report = Report::new(args.seed, whole, extent, cases, outcomes);
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
