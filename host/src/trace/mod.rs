//! Timeline of an operation on every PE, and what it says about overlap.
//!
//! Each PE records [`Event`]s; [`Trace::merge`] puts the PEs' traces on one time axis. A trace is kept as Chrome trace JSON
//! ([`Trace::to_chrome`], [`Trace::from_chrome`]), which <https://ui.perfetto.dev> opens too; [`Figures`] and [`Heads`] are
//! computed from it and [`svg`] draws it.

mod chrome;
mod figures;
mod heads;
mod svg;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

pub use figures::{Figures, PeFigures};
pub use heads::{HeadTimes, Heads, by_head};
pub use svg::{Size, svg};

/// What a PE does during an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Works on the operation itself.
    Compute,
    /// Sends data to another PE.
    Put,
    /// Waits for another PE.
    Wait,
}

/// What an event is about; absent where it does not apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Args {
    /// Value head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<u32>,
    /// Chunk of the sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<u32>,
    /// Bytes sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// One stretch of time on one track of one PE.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Event {
    /// Step of the operation: `prep`, `scan`, `put`, `wait`, `fix_out` and so on.
    pub name: Cow<'static, str>,
    /// What the PE does meanwhile.
    pub kind: Kind,
    /// PE.
    pub pe: u32,
    /// Track of the PE: what can do one thing at a time, such as a worker thread, a block or a head.
    pub track: u32,
    /// Start in nanoseconds, on a clock that all PEs share.
    pub start_ns: u64,
    /// End in nanoseconds, not before the start.
    pub end_ns: u64,
    /// What the event is about.
    pub args: Args,
}

/// Events of one or more PEs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// What was traced, in words, for titles.
    pub title: String,
    /// What a track is: `worker`, `block`, `head`.
    pub track_name: String,
    /// The events, in any order.
    pub events: Vec<Event>,
}

/// A trace that could not be read, written or drawn.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum TraceError {
    #[error("cannot read the trace {}: {source}; pass a file that --trace wrote", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write {}: {source}; choose a folder that exists and can be written", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{}: {why}", path.display())]
    File { path: PathBuf, why: Box<TraceError> },
    #[error("the trace ends in the middle, at line {line} column {column}; was the run that wrote it cut off?")]
    Truncated { line: usize, column: usize },
    #[error("this is not a trace of deltalink ({why}); pass a file that --trace wrote, as it was written")]
    Foreign { why: String },
    #[error("the trace has format version {found}, this build reads version {want}; record it again")]
    Version { found: u32, want: u32 },
    #[error("event {index} of the trace ({name}) {why}; record the trace again")]
    Event { index: usize, name: String, why: String },
    #[error("the timeline was not drawn: {why}")]
    Draw { why: String },
}

impl Trace {
    /// An empty trace.
    pub fn new(title: impl Into<String>, track_name: impl Into<String>) -> Self {
        Self { title: title.into(), track_name: track_name.into(), events: Vec::new() }
    }

    /// One trace of all PEs' events, by PE, track and time, whose first event starts at 0. Title and name of tracks are
    /// those of the first trace.
    pub fn merge(traces: impl IntoIterator<Item = Trace>) -> Trace {
        let mut merged = traces
            .into_iter()
            .reduce(|mut all, trace| {
                all.events.extend(trace.events);
                all
            })
            .unwrap_or_else(|| Trace::new("", ""));
        let origin = merged.events.iter().map(|e| e.start_ns).min().unwrap_or(0);
        for event in &mut merged.events {
            event.start_ns -= origin;
            event.end_ns = event.end_ns.saturating_sub(origin);
        }
        merged.events.sort_by_key(|e| (e.pe, e.track, e.start_ns, std::cmp::Reverse(e.end_ns)));
        merged
    }

    /// `traces` on one axis, one after the other with a gap between. The name of tracks is that of the last.
    pub fn in_turn<'a>(title: impl Into<String>, traces: impl IntoIterator<Item = &'a Trace>) -> Trace {
        let mut all = Trace::new(title, "");
        let mut begin = 0;
        for trace in traces {
            all.track_name.clone_from(&trace.track_name);
            all.events.extend(trace.events.iter().cloned().map(|mut event| {
                event.start_ns += begin;
                event.end_ns += begin;
                event
            }));
            // A gap of a twentieth shows where the next one begins.
            let (_, end) = trace.span_ns().unwrap_or_default();
            begin += end + end / 20;
        }
        all
    }

    /// First start and last end of all events, in nanoseconds; `None` without events.
    pub fn span_ns(&self) -> Option<(u64, u64)> {
        let start = self.events.iter().map(|e| e.start_ns).min()?;
        let end = self.events.iter().map(|e| e.end_ns).max()?;
        Some((start, end))
    }

    /// Writes the trace to the file `path`, as Chrome trace JSON.
    ///
    /// # Errors
    /// [`TraceError::Write`].
    pub fn save(&self, path: &Path) -> Result<(), TraceError> {
        let failed = |source| TraceError::Write { path: path.to_path_buf(), source };
        let mut file = std::io::BufWriter::new(std::fs::File::create(path).map_err(failed)?);
        self.to_chrome(&mut file).map_err(failed)?;
        file.into_inner().map_err(|e| failed(e.into_error()))?;
        Ok(())
    }

    /// Reads the trace in the file `path`.
    ///
    /// # Errors
    /// [`TraceError::Read`], or [`TraceError::File`] with the reason why its content is no trace.
    pub fn load(path: &Path) -> Result<Self, TraceError> {
        let bytes = std::fs::read(path).map_err(|source| TraceError::Read { path: path.to_path_buf(), source })?;
        Self::from_chrome(&bytes).map_err(|why| TraceError::File { path: path.to_path_buf(), why: Box::new(why) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn event(pe: u32, track: u32, name: &'static str, start_ns: u64, end_ns: u64) -> Event {
        let kind = match name {
            "put" => Kind::Put,
            "wait" => Kind::Wait,
            _ => Kind::Compute,
        };
        Event { name: name.into(), kind, pe, track, start_ns, end_ns, args: Args::default() }
    }

    #[test]
    fn merging_sorts_and_starts_at_zero() {
        let mut a = Trace::new("both", "worker");
        a.events = vec![event(1, 0, "scan", 1500, 1700), event(1, 0, "prep", 1200, 1500)];
        let mut b = Trace::new("other", "worker");
        b.events = vec![event(0, 2, "scan", 1010, 1100)];
        let merged = Trace::merge([a, b]);
        assert_eq!(merged.title, "both");
        assert_eq!(
            merged.events,
            [event(0, 2, "scan", 0, 90), event(1, 0, "prep", 190, 490), event(1, 0, "scan", 490, 690)]
        );
        assert_eq!(merged.span_ns(), Some((0, 690)));
        assert_eq!(Trace::merge([]).span_ns(), None);
    }

    #[test]
    fn one_after_the_other_leaves_a_gap() {
        let mut a = Trace::new("a", "worker");
        a.events = vec![event(0, 0, "prep", 0, 100)];
        let mut b = Trace::new("b", "block");
        b.events = vec![event(1, 0, "scan", 7, 20)];
        let all = Trace::in_turn("both", [&a, &b]);
        assert_eq!((&*all.title, &*all.track_name), ("both", "block"));
        assert_eq!(all.events, [event(0, 0, "prep", 0, 100), event(1, 0, "scan", 112, 125)]);
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = Trace::load(Path::new("no/such/trace.json")).unwrap_err().to_string();
        assert!(error.contains("no/such/trace.json"), "{error}");
        let error = Trace::new("", "").save(Path::new("no/such/trace.json")).unwrap_err().to_string();
        assert!(error.contains("cannot write no/such/trace.json"), "{error}");
    }
}
