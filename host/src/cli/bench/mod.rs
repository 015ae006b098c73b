//! `deltalink bench`: measurements, each a subcommand with its arguments, its points and its table.
//!
//! What they have in common is here and in the modules beside: samples become a [`Summary`], results go into an [`Envelope`]
//! that says what was measured where. A further measurement is a module like [`comm`] and a variant of [`What`].

use std::io::Write;

use serde::Serialize;

use super::{Exit, Invocation};

pub mod comm;
mod date;
mod machine;
pub mod op;
mod summary;

pub use machine::Machine;
pub use summary::Summary;

/// Measure how fast things are here.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// What to measure.
    #[command(subcommand)]
    pub what: What,
}

/// The measurements.
#[derive(Clone, Debug, clap::Subcommand)]
#[allow(missing_docs)] // each has its description at its arguments
pub enum What {
    Comm(comm::Args),
    Op(Box<op::Args>),
}

/// A measurement could not be made, or not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum BenchCommandError {
    #[error(transparent)]
    Comm(#[from] comm::CommBenchError),
    #[error(transparent)]
    Op(#[from] op::OpBenchError),
}

/// Measures what `args` say and writes the table to `out`.
///
/// # Errors
/// [`BenchCommandError`].
pub fn run(args: &Args, invocation: &Invocation, out: &mut impl Write) -> Result<Exit, BenchCommandError> {
    match &args.what {
        What::Comm(args) => Ok(comm::run(args, invocation, out)?),
        What::Op(args) => Ok(op::run(args, invocation, out)?),
    }
}

/// What every measurement writes as JSON: the results, and what somebody needs to know to judge or repeat them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Envelope<S, P> {
    /// Version of this layout: 1.
    pub schema: u32,
    /// Name of the subcommand.
    pub benchmark: &'static str,
    /// Version of deltalink.
    pub deltalink: &'static str,
    /// Commit of which the program was built, if `DELTALINK_COMMIT` said so while it was.
    pub commit: Option<&'static str>,
    /// When it was measured, UTC, as 2026-01-31T12:00:00Z.
    pub date: String,
    /// Arguments of the program.
    pub command: Vec<String>,
    /// Where.
    pub machine: Machine,
    /// What is the same for all points.
    pub settings: S,
    /// What was measured.
    pub points: Vec<P>,
}

impl<S, P> Envelope<S, P> {
    /// An envelope of now and here.
    pub(super) fn new(
        benchmark: &'static str,
        invocation: &Invocation,
        machine: Machine,
        settings: S,
        points: Vec<P>,
    ) -> Self {
        Self {
            schema: 1,
            benchmark,
            deltalink: env!("CARGO_PKG_VERSION"),
            commit: option_env!("DELTALINK_COMMIT"),
            date: date::now(),
            command: invocation.args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect(),
            machine,
            settings,
            points,
        }
    }

    /// Lines that say what, where and when, for the head of a table.
    pub(super) fn head(&self) -> String {
        let commit = self.commit.map(|commit| format!(" ({commit})")).unwrap_or_default();
        format!("deltalink {}{commit}, {}\n{}\n", self.deltalink, self.date, self.machine)
    }
}
