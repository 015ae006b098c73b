//! `deltalink trace`: figures and drawing of a recorded timeline.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::trace::{Figures, PeFigures, Size, Trace, TraceError, svg};
use comfy_table::{CellAlignment, Table, TableComponent, presets};

/// Show what a recorded timeline says about overlap
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
How to read the table (times are those in which at least one track of the PE is doing it):
  busy          computing
  wait          waiting for another PE
  exposed wait  waiting while no track computes: what communication costs
  put           sending
  exposed put   sending while no track computes
  hidden        share of the put time that compute hides

Examples:
  deltalink run --pes 4 --trace trace.json
  deltalink trace trace.json --svg timeline.svg
  deltalink trace trace.json --json - | jq '.pes[].exposed_wait_ns'

trace.json itself opens in https://ui.perfetto.dev")]
pub struct Args {
    /// Timeline that a run wrote with --trace (Chrome trace JSON)
    pub file: PathBuf,

    /// Draw the timeline: a band per PE, a row per worker or block, a colour per step
    #[arg(long, value_name = "OUT.svg")]
    pub svg: Option<PathBuf>,

    /// Write the figures as JSON, times in nanoseconds; "-" prints them in place of the table
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

/// Reads the timeline, writes the files asked for, and the table of figures to `out`.
///
/// # Errors
/// [`TraceError`] if the timeline cannot be read, or a result cannot be written.
pub fn run(args: &Args, out: &mut impl Write) -> Result<(), TraceError> {
    let trace = Trace::load(&args.file)?;
    let figures = Figures::of(&trace);
    if let Some(path) = &args.svg {
        write_file(path, svg(&trace, Size::default())?.as_bytes())?;
    }
    let printed = match &args.json {
        Some(path) if path == Path::new("-") => json(&figures)?,
        Some(path) => {
            write_file(path, json(&figures)?.as_bytes())?;
            table(&trace, &figures)
        }
        None => table(&trace, &figures),
    };
    let failed = |source| TraceError::Write { path: "standard output".into(), source };
    out.write_all(printed.as_bytes()).and_then(|()| out.flush()).map_err(failed)
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), TraceError> {
    std::fs::write(path, bytes).map_err(|source| TraceError::Write { path: path.to_path_buf(), source })
}

fn json(figures: &Figures) -> Result<String, TraceError> {
    let text = serde_json::to_string_pretty(figures)
        .map_err(|e| TraceError::Write { path: "the figures".into(), source: e.into() })?;
    Ok(text + "\n")
}

fn table(trace: &Trace, figures: &Figures) -> String {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    table.remove_style(TableComponent::HorizontalLines).remove_style(TableComponent::MiddleIntersections);
    table.set_header(["PE", "busy", "wait", "exposed wait", "put", "exposed put", "hidden", "bytes put"]);
    table.add_rows(figures.pes.iter().map(|pe| row(pe, figures.span_ns)));
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let title = if trace.title.is_empty() { "timeline" } else { &trace.title };
    format!("{title}: {}\n{table}\n", time(figures.span_ns))
}

fn row(pe: &PeFigures, span_ns: u64) -> [String; 8] {
    let of_span = |ns| format!("{} ({:.1} %)", time(ns), 100.0 * ns as f64 / span_ns.max(1) as f64);
    [
        pe.pe.to_string(),
        of_span(pe.busy_ns),
        time(pe.wait_ns),
        of_span(pe.exposed_wait_ns),
        time(pe.put_ns),
        time(pe.exposed_put_ns),
        pe.put_hidden().map_or("-".into(), |share| format!("{:.1} %", 100.0 * share)),
        pe.bytes_put.to_string(),
    ]
}

fn time(ns: u64) -> String {
    match ns {
        0..10_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Event, Kind};

    fn recorded(folder: &Path) -> PathBuf {
        let event = |pe, name: &'static str, kind, start_ns, end_ns| Event {
            name: name.into(),
            kind,
            pe,
            track: 0,
            start_ns,
            end_ns,
            args: crate::trace::Args { bytes: (kind == Kind::Put).then_some(65536), ..Default::default() },
        };
        let mut trace = Trace::new("kda forward", "worker");
        trace.events = vec![
            event(0, "scan", Kind::Compute, 0, 90_000),
            Event { track: 1, ..event(0, "put", Kind::Put, 80_000, 100_000) },
            event(1, "scan", Kind::Compute, 0, 70_000),
            event(1, "wait", Kind::Wait, 70_000, 104_000),
            event(1, "fix_out", Kind::Compute, 104_000, 12_000_000),
        ];
        let path = folder.join("trace.json");
        trace.save(&path).unwrap();
        path
    }

    fn printed(args: &Args) -> String {
        let mut out = Vec::new();
        run(args, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn prints_the_figures() {
        let folder = tempfile::tempdir().unwrap();
        let args = Args { file: recorded(folder.path()), svg: None, json: None };
        assert_eq!(
            printed(&args),
            "\
kda forward: 12.0 ms
────────────────────────────────────────────────────────────────────────────────────────────────
 PE               busy      wait      exposed wait       put   exposed put   hidden   bytes put 
════════════════════════════════════════════════════════════════════════════════════════════════
  0    90.0 us (0.8 %)    0.0 us    0.0 us (0.0 %)   20.0 us       10.0 us   50.0 %       65536 
  1   12.0 ms (99.7 %)   34.0 us   34.0 us (0.3 %)    0.0 us        0.0 us        -           0 
────────────────────────────────────────────────────────────────────────────────────────────────
"
        );
    }

    #[test]
    fn writes_what_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let drawing = folder.path().join("timeline.svg");
        let args = Args { file: recorded(folder.path()), svg: Some(drawing.clone()), json: Some("-".into()) };
        let figures: serde_json::Value = serde_json::from_str(&printed(&args)).unwrap();
        assert_eq!(figures["pes"][1]["exposed_wait_ns"], 34_000);
        assert!(std::fs::read_to_string(drawing).unwrap().starts_with("<svg"));

        let path = folder.path().join("figures.json");
        let args = Args { json: Some(path.clone()), svg: None, ..args };
        assert!(printed(&args).contains("exposed wait"));
        let same: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!(same, figures);
    }

    #[test]
    fn a_file_that_is_no_timeline_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("other.json");
        std::fs::write(&file, "[]").unwrap();
        let error = run(&Args { file, svg: None, json: None }, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("other.json: this is not a trace of deltalink"), "{error}");
    }
}
