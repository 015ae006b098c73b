//! Running a tool and keeping what it says.

use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::BuildError;

/// Lines of a failed tool's output that an error keeps: the last ones.
const KEPT_LINES: usize = 60;

/// Runs `command` and returns what it printed, standard error last.
pub fn run(what: &'static str, command: &mut Command) -> Result<String, BuildError> {
    let Output { status, stdout, stderr } =
        output(command).map_err(|source| BuildError::Start { what, command: format!("{command:?}"), source })?;
    let text = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    if status.success() {
        return Ok(text);
    }
    let lines: Vec<&str> = text.lines().collect();
    let output = lines[lines.len().saturating_sub(KEPT_LINES)..].join("\n");
    Err(BuildError::Command { what, status: status.to_string(), command: format!("{command:?}"), output })
}

/// A tool that was just written may for a moment be open for writing in a child that another thread is starting.
fn output(command: &mut Command) -> std::io::Result<Output> {
    const PATIENCE: Duration = Duration::from_secs(1);
    let start = Instant::now();
    loop {
        match command.output() {
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy && start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
}

/// Reads a text.
pub fn read(path: &Path) -> Result<String, BuildError> {
    std::fs::read_to_string(path).map_err(|source| BuildError::File { action: "reading", path: path.into(), source })
}

/// Writes a text.
pub fn write(path: &Path, text: &str) -> Result<(), BuildError> {
    std::fs::write(path, text).map_err(|source| BuildError::File { action: "writing", path: path.into(), source })
}

/// Makes a folder and those above it.
pub fn create_folder(path: &Path) -> Result<(), BuildError> {
    std::fs::create_dir_all(path).map_err(|source| BuildError::File { action: "creating", path: path.into(), source })
}
