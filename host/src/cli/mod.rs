//! The command line: [`Cli`] is its grammar, [`execute`] runs what it says.
//!
//! Each subcommand has its arguments (`Args`) and a `run` that writes to a given writer, so that tests can read it.

pub mod bench;
pub mod doctor;
mod gpus;
mod judge;
mod options;
mod output;
mod pes;
pub mod plan;
mod progress;
pub mod run;
pub mod trace;
pub mod verify;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

pub use gpus::{GpuChoice, GpusError};
pub use judge::{Compared, Pair};
pub use output::{JsonTarget, OutputError};
pub use pes::{PesError, World};

/// Context-parallel linear attention (KDA, Gated DeltaNet): each head's state summary leaves for the PEs that need it while
/// other heads still compute.
///
/// A PE (processing element) is a thread or a process; each holds one contiguous range of the tokens. Without a
/// subcommand, `run` is run: bundled activations of a trained model on 4 PEs, checked against one PE and an f64 reference.
#[derive(Debug, clap::Parser)]
#[command(
    name = "deltalink",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  deltalink                                         Compute and check the bundled inputs on 4 PEs
  deltalink run --pes 8 --world processes           The same on 8 processes
  deltalink run --input x.safetensors --output y.safetensors
  deltalink verify --quick                          Check many shapes, gates, cuts and modes
  deltalink plan --pes 8 --tokens 65536 --heads 32  Who would send what to whom
  deltalink bench comm                              How fast messages between PEs are
  deltalink bench op --pes 2                        How long a step takes, kernel by kernel
  deltalink help run                                All there is to know about a subcommand

Exit code: 0 all is well, 1 a result is wrong, 2 it could not be computed (and the message says why).
DELTALINK_LOG=debug logs to standard error; it takes a filter such as deltalink=trace."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// The subcommands.
#[derive(Debug, clap::Subcommand)]
#[allow(missing_docs)] // each has its description at its arguments
pub enum Command {
    Run(run::Args),
    Verify(verify::Args),
    Plan(plan::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
    Trace(trace::Args),
}

/// How this process was called, for subcommands that start it again.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// The executable.
    pub program: PathBuf,
    /// Its arguments, without its name.
    pub args: Vec<OsString>,
}

/// What the process should end with when nothing more is to be said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// 0.
    Success,
    /// 1: the command did its work, and found that results are wrong.
    Wrong,
    /// 2: another process of this command has said what went wrong.
    Failed,
}

impl Exit {
    /// The exit code.
    pub fn code(self) -> u8 {
        match self {
            Exit::Success => 0,
            Exit::Wrong => 1,
            Exit::Failed => 2,
        }
    }
}

/// A subcommand could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum CliError {
    #[error(transparent)]
    Run(#[from] run::RunCommandError),
    #[error(transparent)]
    Verify(#[from] verify::VerifyError),
    #[error(transparent)]
    Plan(#[from] plan::PlanCommandError),
    #[error(transparent)]
    Doctor(#[from] doctor::DoctorError),
    #[error(transparent)]
    Bench(#[from] bench::BenchCommandError),
    #[error(transparent)]
    Trace(#[from] crate::trace::TraceError),
}

/// Does what `cli` says and writes what it has to say to `out`.
///
/// # Errors
/// [`CliError`] if it could not be done. That results are wrong is no error but [`Exit::Wrong`].
pub fn execute(cli: &Cli, invocation: &Invocation, out: &mut impl Write) -> Result<Exit, CliError> {
    match &cli.command {
        None => Ok(run::run(&run::Args::default(), invocation, out)?),
        Some(Command::Run(args)) => Ok(run::run(args, invocation, out)?),
        Some(Command::Verify(args)) => Ok(verify::run(args, invocation, out)?),
        Some(Command::Plan(args)) => Ok(plan::run(args, out).map(|()| Exit::Success)?),
        Some(Command::Doctor(args)) => Ok(doctor::run(args, out)?),
        Some(Command::Bench(args)) => Ok(bench::run(args, invocation, out)?),
        Some(Command::Trace(args)) => Ok(trace::run(args, out).map(|()| Exit::Success)?),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_grammar_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
