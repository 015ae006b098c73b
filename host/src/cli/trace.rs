//! `deltalink trace`: figures and drawing of a recorded timeline.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::trace::{Figures, HeadTimes, Heads, PeFigures, Size, Trace, TraceError, by_head, svg};
use comfy_table::{CellAlignment, Table, TableComponent, presets};

/// Show what a recorded timeline says about overlap
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
How to read the table (times are those in which at least one track of the PE is doing it):
  busy          computing
  wait          waiting for another PE
  exposed wait  waiting while no track computes: what communication costs
  put           sending
  exposed put   sending while no track computes
  hidden        share of the put time that compute hides

With --heads, of each value head on each PE: when its scan ended, its first message began and its last one had been issued,
its last signal was seen, and its outputs were complete. Of a trace of several steps: the first begin and the last end.

Times of different PEs can be compared as far as their clocks agree. PEs on CPUs stamp one clock. GPUs stamp their global
timer, which the driver keeps in step on one machine to about a microsecond; nothing is added to it. The last line of the
report says what the messages say about it: how soon after it left the first one was seen. A message that seems to arrive
before it left tells how far the clocks are apart at least.

Examples:
  deltalink run --pes 4 --trace trace.json
  deltalink trace trace.json --svg timeline.svg
  deltalink bench op --pes 2 --gates slow --trace step.json
  deltalink trace step.json --heads --svg step.svg --rows heads
  deltalink trace trace.json --json - | jq '.pes[].exposed_wait_ns'

trace.json itself opens in https://ui.perfetto.dev")]
pub struct Args {
    /// Timeline that a run wrote with --trace (Chrome trace JSON)
    pub file: PathBuf,

    /// Draw the timeline: a band per PE, a row per worker or block, a colour per step
    #[arg(long, value_name = "OUT.svg")]
    pub svg: Option<PathBuf>,

    /// What a row of the drawing is
    #[arg(long, value_enum, default_value = "tracks")]
    pub rows: Rows,

    /// Also print when each value head was scanned, sent, seen and corrected
    #[arg(long)]
    pub heads: bool,

    /// Write the figures as JSON, times in nanoseconds; "-" prints them in place of the table
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

/// Value of `--rows`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Rows {
    /// A worker or block.
    #[default]
    Tracks,
    /// A value head, whoever worked on it.
    Heads,
}

/// What is written as JSON.
#[derive(serde::Serialize)]
struct Said {
    #[serde(flatten)]
    figures: Figures,
    heads: Heads,
}

/// Reads the timeline, writes the files asked for, and the table of figures to `out`.
///
/// # Errors
/// [`TraceError`] if the timeline cannot be read, or a result cannot be written.
pub fn run(args: &Args, out: &mut impl Write) -> Result<(), TraceError> {
    let trace = Trace::load(&args.file)?;
    let said = Said { figures: Figures::of(&trace), heads: Heads::of(&trace) };
    if let Some(path) = &args.svg {
        let drawing = match args.rows {
            Rows::Tracks => svg(&trace, Size::default())?,
            Rows::Heads => svg(&by_head(&trace), Size::default())?,
        };
        write_file(path, drawing.as_bytes())?;
    }
    let printed = match &args.json {
        Some(path) if path == Path::new("-") => json(&said)?,
        file => {
            if let Some(path) = file {
                write_file(path, json(&said)?.as_bytes())?;
            }
            let mut text = table(&trace, &said.figures);
            if args.heads {
                text += &heads_table(&said.heads.times);
            }
            text + &summary(&said.heads)
        }
    };
    let failed = |source| TraceError::Write { path: "standard output".into(), source };
    out.write_all(printed.as_bytes()).and_then(|()| out.flush()).map_err(failed)
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), TraceError> {
    std::fs::write(path, bytes).map_err(|source| TraceError::Write { path: path.to_path_buf(), source })
}

fn json(said: &Said) -> Result<String, TraceError> {
    let text = serde_json::to_string_pretty(said)
        .map_err(|e| TraceError::Write { path: "the figures".into(), source: e.into() })?;
    Ok(text + "\n")
}

/// A table of numbers.
fn ruled<const N: usize>(header: [&str; N], rows: impl Iterator<Item = [String; N]>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    table.remove_style(TableComponent::HorizontalLines).remove_style(TableComponent::MiddleIntersections);
    table.set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn heads_table(heads: &[HeadTimes]) -> String {
    let at = |ns: Option<u64>| ns.map_or("-".to_owned(), |ns| format!("{:.1}", ns as f64 / 1e3));
    let row = |head: &HeadTimes| {
        let HeadTimes { scan_end_ns, put_begin_ns, put_end_ns, seen_ns, corrected_ns, .. } = *head;
        let times = [scan_end_ns, put_begin_ns, put_end_ns, seen_ns, corrected_ns].map(at);
        let [scan, begin, issued, seen, corrected] = times;
        [head.pe.to_string(), head.head.to_string(), scan, begin, issued, seen, corrected]
    };
    let header = ["PE", "head", "scan end us", "put begin", "put issued", "signal seen", "corrected"];
    format!("{}\n", ruled(header, heads.iter().map(row)))
}

/// What the heads say about overlap and clocks; nothing where nothing was sent.
fn summary(heads: &Heads) -> String {
    let Some(soonest) = heads.soonest_ns else { return String::new() };
    let arrival = match soonest {
        0.. => format!("the soonest was seen {} after it began to leave", time(soonest.unsigned_abs())),
        _ => format!(
            "one seems to be seen {0} before it began to leave: the PEs' clocks are apart by {0} at least",
            time(soonest.unsigned_abs())
        ),
    };
    let Heads { sent_while_scanning, sent, .. } = heads;
    format!("{sent_while_scanning} of {sent} heads had left before the last scan of their PE ended; {arrival}\n")
}

fn table(trace: &Trace, figures: &Figures) -> String {
    let header = ["PE", "busy", "wait", "exposed wait", "put", "exposed put", "hidden", "bytes put"];
    let table = ruled(header, figures.pes.iter().map(|pe| row(pe, figures.span_ns)));
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
            args: crate::trace::Args {
                head: Some(3),
                bytes: (kind == Kind::Put).then_some(65536),
                ..Default::default()
            },
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

    fn args(file: PathBuf) -> Args {
        Args { file, svg: None, rows: Rows::Tracks, heads: false, json: None }
    }

    fn printed(args: &Args) -> String {
        let mut out = Vec::new();
        run(args, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn prints_the_figures() {
        let folder = tempfile::tempdir().unwrap();
        let args = args(recorded(folder.path()));
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
0 of 1 heads had left before the last scan of their PE ended; the soonest was seen 24.0 us after it began to leave
"
        );
    }

    #[test]
    fn prints_the_way_of_each_head() {
        let folder = tempfile::tempdir().unwrap();
        let text = printed(&Args { heads: true, ..args(recorded(folder.path())) });
        let rows: Vec<String> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        for row in ["0 3 90.0 80.0 100.0 - -", "1 3 70.0 - - 104.0 12000.0"] {
            assert!(rows.iter().any(|found| found == row), "{row}: {text}");
        }
    }

    #[test]
    fn clocks_that_disagree_are_told() {
        let heads = |soonest_ns| Heads { times: Vec::new(), sent_while_scanning: 3, sent: 4, soonest_ns };
        assert_eq!(summary(&heads(None)), "");
        let said = summary(&heads(Some(-2500)));
        assert!(
            said.starts_with("3 of 4 heads had left") && said.contains("clocks are apart by 2.5 us at least"),
            "{said}"
        );
    }

    #[test]
    fn writes_what_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let drawing = folder.path().join("timeline.svg");
        let args = Args { svg: Some(drawing.clone()), json: Some("-".into()), ..args(recorded(folder.path())) };
        let figures: serde_json::Value = serde_json::from_str(&printed(&args)).unwrap();
        assert_eq!(figures["pes"][1]["exposed_wait_ns"], 34_000);
        assert_eq!(figures["heads"]["times"][1]["seen_ns"], 104_000);
        assert!(std::fs::read_to_string(&drawing).unwrap().contains("worker 0"));
        printed(&Args { rows: Rows::Heads, ..args.clone() });
        assert!(std::fs::read_to_string(drawing).unwrap().contains("head 3"));

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
        let error = run(&args(file), &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("other.json: this is not a trace of deltalink"), "{error}");
    }
}
