//! Where a command's report goes: tables for eyes, JSON for programs.

use std::convert::Infallible;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use comfy_table::{Cell, CellAlignment, Table, TableComponent, presets};

/// Value of `--json`: a file, or `-` for standard output, which then carries nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JsonTarget {
    /// Standard output.
    Stdout,
    /// A file, created or replaced.
    File(PathBuf),
}

impl JsonTarget {
    /// The file, if it is one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            JsonTarget::Stdout => None,
            JsonTarget::File(path) => Some(path),
        }
    }
}

impl FromStr for JsonTarget {
    type Err = Infallible;
    fn from_str(s: &str) -> Result<Self, Infallible> {
        Ok(if s == "-" { JsonTarget::Stdout } else { JsonTarget::File(s.into()) })
    }
}

/// A report could not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum OutputError {
    #[error("cannot write the report to standard output")]
    Stdout(#[from] io::Error),
    #[error("cannot write {path}; choose a path for --json that can be created, or - for standard output")]
    File { path: PathBuf, source: io::Error },
    #[error("cannot put the report into JSON")]
    Json(#[from] serde_json::Error),
}

/// Writes `text` to `out` and, if asked, `report` to a file; with `--json -` only the JSON, to `out`.
pub(super) fn emit(
    out: &mut impl Write,
    json: Option<&JsonTarget>,
    report: &impl serde::Serialize,
    text: impl FnOnce() -> String,
) -> Result<(), OutputError> {
    if let Some(target) = json {
        let rendered = serde_json::to_string_pretty(report)? + "\n";
        match target {
            JsonTarget::Stdout => return Ok(out.write_all(rendered.as_bytes())?),
            JsonTarget::File(path) => {
                std::fs::write(path, rendered).map_err(|source| OutputError::File { path: path.clone(), source })?
            }
        }
    }
    Ok(out.write_all(text().as_bytes())?)
}

/// A table with a line under its head and no frame. Show it with [`Table::trim_fmt`].
pub(super) fn table(head: impl IntoIterator<Item = Cell>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_style(TableComponent::HeaderLines, '─');
    table.set_style(TableComponent::MiddleHeaderIntersections, '─');
    table.set_header(head);
    table
}

/// A number, aligned as numbers are.
pub(super) fn number(x: impl ToString) -> Cell {
    Cell::new(x.to_string()).set_alignment(CellAlignment::Right)
}
