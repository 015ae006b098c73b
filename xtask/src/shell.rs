//! Running commands that say themselves what they do.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

/// Setting up failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum SetupError {
    #[error("{why}\ninstall it as root: {command}")]
    NeedsRoot { why: String, command: String },
    #[error("{command} failed ({status}); its message is above")]
    Failed { command: String, status: ExitStatus },
    #[error("{command} could not be started: {source}")]
    Start { command: String, source: io::Error },
    #[error("{action} {}: {source}", path.display())]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("there is no pip; install python3-pip, or unpack the wheels {wheels} under {}", folder.display())]
    NoPip { wheels: String, folder: PathBuf },
    #[error(transparent)]
    Build(#[from] cuda_builder::BuildError),
}

/// Runs a command, whose output goes to the terminal.
pub fn run(command: &mut Command) -> Result<(), SetupError> {
    println!("  $ {}", text(command));
    let status = command.status().map_err(|source| SetupError::Start { command: text(command), source })?;
    if status.success() { Ok(()) } else { Err(SetupError::Failed { command: text(command), status }) }
}

/// Whether a command runs and succeeds; its output is dropped.
pub fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// The command as one would type it.
pub fn text(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Names the path in errors of file operations.
pub fn at<'p>(action: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> SetupError + use<'p> {
    move |source| SetupError::File { action, path: path.into(), source }
}
