//! The `deltalink` command.

use std::error::Error;
use std::fmt;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::process::ExitCode;

use clap::Parser;
use deltalink::cli::{Cli, CliError, Exit, Invocation, execute};
use miette::ReportHandler;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    // Fails only if a handler is set already.
    let _ = miette::set_hook(Box::new(|_| Box::new(Chain)));
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_env("DELTALINK_LOG").unwrap_or_else(|_| EnvFilter::new("warn")))
        .with_writer(io::stderr)
        .init();
    let cli = Cli::parse();
    match run(&cli) {
        Ok(exit) => ExitCode::from(exit.code()),
        Err(error) if reader_left(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Where even standard error is gone, the exit code has to do.
            let _ = writeln!(io::stderr(), "{:?}", miette::Report::new(Failure(error)));
            ExitCode::from(Exit::Failed.code())
        }
    }
}

fn run(cli: &Cli) -> Result<Exit, CliError> {
    let program = std::env::current_exe().unwrap_or_else(|_| "deltalink".into());
    let invocation = Invocation { program, args: std::env::args_os().skip(1).collect() };
    let mut out = BufWriter::new(io::stdout().lock());
    let exit = execute(cli, &invocation, &mut out)?;
    out.flush().map_err(|error| CliError::Run(deltalink::cli::OutputError::from(error).into()))?;
    Ok(exit)
}

/// Whether whoever read our output has had enough of it (`deltalink run | head`), which is no failure.
fn reader_left(error: &CliError) -> bool {
    causes(error).any(|e| e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe))
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&e| e.source())
}

/// A failure as miette sees it.
#[derive(Debug)]
struct Failure(CliError);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

impl miette::Diagnostic for Failure {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        match &self.0 {
            CliError::Run(error) => error.help().map(|help| Box::new(help) as Box<dyn fmt::Display>),
            _ => None,
        }
    }
}

/// Prints `error: ...`, the causes that say something new, and help.
struct Chain;

impl ReportHandler for Chain {
    fn debug(&self, error: &dyn miette::Diagnostic, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = error.to_string();
        write!(f, "error: {said}")?;
        for cause in std::iter::successors(error.source(), |&e| e.source()).map(ToString::to_string) {
            if !said.contains(&cause) {
                write!(f, "\n  because: {cause}")?;
                said = cause;
            }
        }
        match error.help() {
            Some(help) => write!(f, "\n  help: {help}"),
            None => Ok(()),
        }
    }
}
