//! Chrome trace JSON: complete events (`ph: "X"`), a process per PE, a thread per track, times in microseconds.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::io::Write;

use serde::{Deserialize, Serialize};

use super::{Args, Event, Kind, Trace, TraceError};

const FORMAT: &str = "deltalink-trace";
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct File<'a> {
    #[serde(rename = "displayTimeUnit", default)]
    display_time_unit: Cow<'a, str>,
    /// Free for the writing tool; tells our files from others.
    #[serde(rename = "otherData")]
    header: Header<'a>,
    #[serde(rename = "traceEvents")]
    records: Vec<Record<'a>>,
}

#[derive(Serialize, Deserialize)]
struct Header<'a> {
    format: Cow<'a, str>,
    version: u32,
    title: Cow<'a, str>,
    track: Cow<'a, str>,
}

#[derive(Serialize, Deserialize)]
struct Record<'a> {
    name: Cow<'a, str>,
    ph: Cow<'a, str>,
    pid: u32,
    tid: u32,
    #[serde(rename = "cat", default, skip_serializing_if = "Option::is_none")]
    kind: Option<Kind>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    #[serde(default)]
    args: RecordArgs,
}

#[derive(Default, Serialize, Deserialize)]
struct RecordArgs {
    /// Of a metadata record: what to call the process or thread.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(flatten)]
    event: Args,
}

impl Trace {
    /// Writes the trace as Chrome trace JSON.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn to_chrome(&self, mut out: impl Write) -> std::io::Result<()> {
        let metadata = |what: &'static str, pid, tid, name| Record {
            name: what.into(),
            ph: "M".into(),
            pid,
            tid,
            kind: None,
            ts: None,
            dur: None,
            args: RecordArgs { name: Some(name), event: Args::default() },
        };
        let tracks: BTreeSet<_> = self.events.iter().map(|e| (e.pe, e.track)).collect();
        let pes: BTreeSet<_> = tracks.iter().map(|&(pe, _)| pe).collect();
        let processes = pes.iter().map(|&pe| metadata("process_name", pe, 0, format!("PE {pe}")));
        let threads = tracks
            .iter()
            .map(|&(pe, track)| metadata("thread_name", pe, track, format!("{} {track}", self.track_name)));
        let events = self.events.iter().map(|event| Record {
            name: Cow::Borrowed(&event.name),
            ph: "X".into(),
            pid: event.pe,
            tid: event.track,
            kind: Some(event.kind),
            ts: Some(event.start_ns as f64 / 1e3),
            dur: Some(event.end_ns.saturating_sub(event.start_ns) as f64 / 1e3),
            args: RecordArgs { name: None, event: event.args },
        });
        let file = File {
            display_time_unit: "ns".into(),
            header: Header {
                format: FORMAT.into(),
                version: VERSION,
                title: Cow::Borrowed(&self.title),
                track: Cow::Borrowed(&self.track_name),
            },
            records: processes.chain(threads).chain(events).collect(),
        };
        serde_json::to_writer(&mut out, &file)?;
        out.write_all(b"\n")?;
        out.flush()
    }

    /// Reads what [`Trace::to_chrome`] wrote. Times are exact up to 2^53 ns (104 days).
    ///
    /// # Errors
    /// [`TraceError::Truncated`], [`TraceError::Foreign`], [`TraceError::Version`] or [`TraceError::Event`].
    pub fn from_chrome(bytes: &[u8]) -> Result<Self, TraceError> {
        let file: File<'_> = serde_json::from_slice(bytes).map_err(|e| match e.classify() {
            serde_json::error::Category::Eof => TraceError::Truncated { line: e.line(), column: e.column() },
            _ => TraceError::Foreign { why: e.to_string() },
        })?;
        let Header { format, version, title, track } = file.header;
        if format != FORMAT {
            return Err(TraceError::Foreign { why: format!("its format is {format:?}, not {FORMAT:?}") });
        }
        if version != VERSION {
            return Err(TraceError::Version { found: version, want: VERSION });
        }
        let events = file.records.into_iter().enumerate().filter(|(_, record)| record.ph != "M").map(event);
        Ok(Self {
            title: title.into_owned(),
            track_name: track.into_owned(),
            events: events.collect::<Result<_, TraceError>>()?,
        })
    }
}

fn event((index, record): (usize, Record<'_>)) -> Result<Event, TraceError> {
    let bad = |why: String| TraceError::Event { index, name: record.name.to_string(), why };
    if record.ph != "X" {
        return Err(bad(format!("has phase {:?}, not \"X\"", record.ph)));
    }
    let time = |what: &str, us: Option<f64>| match us {
        Some(us) if (0.0..=u64::MAX as f64 / 1e4).contains(&us) => Ok((us * 1e3).round() as u64),
        Some(us) => Err(bad(format!("has {what} = {us} us"))),
        None => Err(bad(format!("has no {what}"))),
    };
    let start_ns = time("ts", record.ts)?;
    let end_ns = start_ns + time("dur", record.dur)?;
    let kind = record.kind.ok_or_else(|| bad("has no cat".into()))?;
    let args = record.args.event;
    let (pe, track) = (record.pid, record.tid);
    Ok(Event { name: Cow::Owned(record.name.into_owned()), kind, pe, track, start_ns, end_ns, args })
}

#[cfg(test)]
mod tests {
    use super::super::tests::event;
    use super::*;

    fn example() -> Trace {
        let mut trace = Trace::new("kda forward, 2 PEs", "worker");
        let args = Args { head: Some(3), chunk: Some(1), bytes: None };
        trace.events = vec![
            Event { args, ..event(0, 0, "scan", 0, 1_234_567) },
            Event { args: Args { bytes: Some(65536), ..args }, ..event(0, 1, "put", 1_234_567, 1_300_001) },
            event(1, 0, "wait", 7, 7),
            event(1, 4, "fix_out", 9_007_199_254_740, 9_007_199_254_741),
        ];
        trace
    }

    fn written(trace: &Trace) -> String {
        let mut bytes = Vec::new();
        trace.to_chrome(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_trace_survives_the_file() {
        let trace = example();
        assert_eq!(Trace::from_chrome(written(&trace).as_bytes()).unwrap(), trace);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        trace.save(&path).unwrap();
        assert_eq!(Trace::load(&path).unwrap(), trace);
    }

    #[test]
    fn other_tools_find_what_the_format_asks_for() {
        let json: serde_json::Value = serde_json::from_str(&written(&example())).unwrap();
        let records = json["traceEvents"].as_array().unwrap();
        let find = |name: &str| records.iter().find(|r| r["name"] == name).unwrap();
        assert_eq!(find("process_name")["args"]["name"], "PE 0");
        assert_eq!(find("thread_name")["args"]["name"], "worker 0");
        let put = find("put");
        assert_eq!((&put["ph"], &put["cat"]), (&"X".into(), &"put".into()));
        assert_eq!((&put["pid"], &put["tid"]), (&0.into(), &1.into()));
        assert_eq!((put["ts"].as_f64(), put["dur"].as_f64()), (Some(1234.567), Some(65.434)));
        assert_eq!(put["args"], serde_json::json!({"head": 3, "chunk": 1, "bytes": 65536}));
    }

    #[test]
    fn truncated_files_are_told_from_foreign_ones() {
        let text = written(&example());
        for part in [0, 1, text.len() / 2, text.len() - 3] {
            let error = Trace::from_chrome(&text.as_bytes()[..part]).unwrap_err();
            assert!(matches!(error, TraceError::Truncated { .. }), "{part}: {error}");
        }
        let foreign = [
            "[]",
            "no json",
            r#"{"traceEvents": []}"#,
            r#"{"traceEvents": [], "otherData": {"version": "v"}}"#,
            &text.replace(FORMAT, "someone-else"),
        ];
        for text in foreign {
            let error = Trace::from_chrome(text.as_bytes()).unwrap_err();
            assert!(matches!(error, TraceError::Foreign { .. }), "{text}: {error}");
        }
        let error = Trace::from_chrome(text.replace("\"version\":1", "\"version\":9").as_bytes()).unwrap_err();
        assert!(matches!(error, TraceError::Version { found: 9, want: 1 }), "{error}");
    }

    #[test]
    fn events_that_make_no_sense_are_named() {
        let text = written(&example());
        let cases = [
            (r#""dur":65.434"#, r#""dur":-1.0"#, "(put) has dur = -1 us"),
            (r#""dur":65.434,"#, "", "(put) has no dur"),
            (r#""cat":"put","#, "", "(put) has no cat"),
            (r#""name":"put","ph":"X""#, r#""name":"put","ph":"B""#, "(put) has phase \"B\""),
        ];
        for (from, to, want) in cases {
            assert!(text.contains(from), "{from} in {text}");
            let error = Trace::from_chrome(text.replace(from, to).as_bytes()).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }
}
