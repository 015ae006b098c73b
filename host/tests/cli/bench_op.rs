//! `deltalink bench op`.

use std::process::Output;

use serde_json::Value;

use crate::processes::{launched, mpiexec};
use crate::{deltalink, stderr, stdout, succeeds};

const SMALL: [&str; 12] =
    ["bench", "op", "--device", "cpu", "--heads", "1", "--dim", "16", "--repeats", "2", "--tokens", "48"];

fn small(extra: &[&'static str]) -> Vec<&'static str> {
    [&SMALL[..], extra].concat()
}

fn report(output: &Output) -> Value {
    serde_json::from_str(&succeeds(output)).unwrap_or_else(|e| panic!("{e}: {}", stdout(output)))
}

/// The text from the description of the problem on; of the tables words, units and the first column, with # for other numbers.
fn without_times(text: &str) -> String {
    let (_, text) = text.split_once("\n\n").expect("a head that says what, where and when");
    let mut in_table = false;
    let lines = text.lines().map(|line| {
        in_table = !line.is_empty() && (in_table || line.trim_start().starts_with("tokens"));
        if !in_table {
            return line.to_owned();
        }
        if line.contains('─') {
            return "─".to_owned();
        }
        let cells = line.split_whitespace().enumerate();
        let cells = cells.map(|(i, cell)| if i > 0 && cell.parse::<f64>().is_ok() { "#" } else { cell });
        cells.collect::<Vec<_>>().join(" ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn help_says_how_to_read_the_result() {
    insta::assert_snapshot!("help_bench_op", succeeds(&deltalink(&["help", "bench", "op"])));
}

#[test]
fn tables_have_every_point_and_kernel() {
    let args = small(&["--pes", "2", "--mode", "overlap,bulk", "--gates", "slow", "--backward", "--peak-tbs", "0.1"]);
    insta::assert_snapshot!("bench_op", without_times(&succeeds(&deltalink(&args))));
}

/// The shape of a JSON value: names, and kinds of values. Of arrays the first element.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), shape(value))).collect(),
        Value::Array(values) => values.iter().take(1).map(shape).collect(),
        Value::Number(_) => "number".into(),
        Value::String(_) => "string".into(),
        Value::Bool(_) => "bool".into(),
        Value::Null => Value::Null,
    }
}

#[test]
fn the_json_has_a_fixed_shape() {
    let mut report = report(&deltalink(&small(&["--gates", "fast", "--peak-tflops", "1", "--json", "-"])));
    // What this machine has no GPU for may be null or not.
    let machine = report["machine"].take();
    assert!(machine["cores"].as_u64().unwrap() > 0, "{machine}");
    report.as_object_mut().unwrap().remove("commit");
    insta::assert_snapshot!("bench_op_json", serde_json::to_string_pretty(&shape(&report)).unwrap());
}

#[test]
fn threads_and_processes_measure_the_same_points() {
    let points = |report: &Value, world: &str| {
        assert_eq!((&report["settings"]["world"], &report["settings"]["pes"]), (&world.into(), &2.into()), "{report}");
        let points = report["points"].as_array().unwrap().clone();
        points.iter().map(|p| [&p["pass"], &p["gates"], &p["bytes_sent"], &p["flop"]].map(Value::to_string)).collect()
    };
    let args = |extra: &[&'static str]| small(&[&["--backward", "--json", "-"], extra].concat());
    let threads: Vec<_> = points(&report(&deltalink(&args(&["--pes", "2"]))), "threads");
    let processes = report(&deltalink(&args(&["--pes", "2", "--world", "processes"])));
    assert_eq!(threads.len(), 6);
    assert_eq!(points(&processes, "processes"), threads);
    let Some(mpiexec) = mpiexec() else { return };
    assert_eq!(points(&report(&launched(&mpiexec, "2", &args(&[]))), "processes"), threads);
}

#[test]
fn what_cannot_be_measured_is_said_once() {
    let world = ["--pes", "2", "--world", "processes"];
    for (extra, reason) in [
        (&["--dim", "24"][..], "24"),
        (&["--value-heads", "3", "--heads", "2"], "3"),
        (&["--gpus", "0"], "--gpus [0] was asked for with --device cpu"),
    ] {
        // Later values of an option stand for earlier ones nowhere: leave those of the small problem out.
        let kept = SMALL.chunks(2).filter(|pair| !extra.contains(&pair[0])).flatten().copied();
        let args: Vec<&str> = kept.chain(extra.iter().copied()).chain(world).collect();
        let output = deltalink(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stdout(&output));
        let message = stderr(&output);
        assert!(message.contains(reason), "{args:?}: {message}");
        assert_eq!(message.matches("error: ").count(), 1, "{args:?}: {message}");
    }
}
