//! The measurement on PEs that are threads, and what is made of samples.

use super::*;
use crate::reference::{Problem, transition_weight};
use inputs::Tensors;
use measure::Pass as PassSamples;

fn args(extra: &[&str]) -> Args {
    #[derive(clap::Parser)]
    struct Alone {
        #[command(flatten)]
        args: Args,
    }
    let small = [("--device", "cpu"), ("--heads", "1"), ("--dim", "16"), ("--chunk", "16"), ("--warmup", "0")];
    let left = small.iter().filter(|(name, _)| !extra.contains(name)).flat_map(|&(name, value)| [name, value]);
    <Alone as clap::Parser>::parse_from(std::iter::once("op").chain(left).chain(extra.iter().copied())).args
}

fn ran(extra: &[&str]) -> String {
    let invocation = Invocation { program: "deltalink".into(), args: vec!["bench".into(), "op".into()] };
    let mut out = Vec::new();
    assert_eq!(run(&args(extra), &invocation, &mut out).expect("measured"), Exit::Success);
    String::from_utf8(out).expect("UTF-8")
}

fn json(extra: &[&str]) -> serde_json::Value {
    serde_json::from_str(&ran(&[extra, &["--json", "-"]].concat())).expect("JSON")
}

#[test]
fn every_point_is_measured() {
    let report = json(&[
        "--op",
        "gdn",
        "--pes",
        "2",
        "--tokens",
        "20,33",
        "--mode",
        "overlap,bulk,exact",
        "--value-heads",
        "2",
        "--backward",
        "--repeats",
        "3",
    ]);
    assert_eq!((&report["schema"], &report["benchmark"]), (&1.into(), &"op".into()));
    assert_eq!((&report["settings"]["clock"], &report["settings"]["pes"]), (&"wall".into(), &2.into()));
    assert!(report["settings"]["roofline"].is_null(), "a CPU has none unless it is told");
    let points = report["points"].as_array().expect("points");
    let said = |name: &str| points.iter().map(|p| p[name].as_str().expect("a word")).collect::<Vec<_>>();
    assert_eq!(points.len(), 2 * 2 * 3 * 3);
    assert_eq!(said("pass")[..4], ["forward", "backward", "both", "forward"]);
    assert_eq!(said("mode")[..9], [["overlap"; 3], ["bulk"; 3], ["exact"; 3]].concat());
    assert_eq!((said("gates")[17], said("gates")[18]), ("fast", "slow"));
    for point in points {
        let [p10, median, p90] = ["p10", "median", "p90"].map(|name| point["time_us"][name].as_f64().expect("a time"));
        assert!(0.0 < p10 && p10 <= median && median <= p90, "{point}");
        assert_eq!(point["time_us"]["samples"], 3, "one of each repeat: {point}");
        assert!(point["bytes_sent"].as_u64().expect("bytes") > 0, "{point}");
        assert!(point["peak_device_bytes"].as_u64() >= point["scratch_bytes"].as_u64(), "{point}");
        let rate = point["tflop_s"]["median"].as_f64().expect("a rate");
        assert!((rate * median * 1e6 / point["flop"].as_f64().expect("FLOP") - 1.0).abs() < 1e-9, "{point}");
    }
}

#[test]
fn a_span_holds_its_kernels() {
    let report = json(&["--tokens", "40", "--gates", "slow", "--repeats", "1", "--peak-tflops", "0.5", "--backward"]);
    let points = report["points"].as_array().expect("points");
    let names = |i: usize| {
        let kernels = points[i]["kernels"].as_array().expect("kernels");
        kernels.iter().map(|kernel| kernel["kernel"].as_str().expect("a name")).collect::<Vec<_>>()
    };
    assert_eq!(names(0), ["prep", "scan_push"]);
    assert_eq!(names(1), ["prep", "scan_back", "scan_states", "grad", "reduce"]);
    assert!(names(2).is_empty());
    for point in &points[..2] {
        let time = |value: &serde_json::Value| value["time_us"]["median"].as_f64().expect("a time");
        let kernels: f64 = point["kernels"].as_array().expect("kernels").iter().map(time).sum();
        assert!(0.0 < kernels && kernels <= time(point) + 1.0, "one after the other: {point}");
        // 4.3 TB/s is the other default.
        let floors = point["kernels"].as_array().expect("kernels").iter();
        let floors: f64 = floors.map(|kernel| kernel["roofline"]["floor_us"].as_f64().expect("a floor")).sum();
        assert!((floors - point["roofline"]["floor_us"].as_f64().expect("a floor")).abs() < 1e-9, "{point}");
        assert!(point["fused"]["floor_us"].as_f64() < Some(floors), "{point}");
    }
    let sum = |i: usize| points[i]["time_us"]["median"].as_f64().expect("a time");
    assert!((sum(0) + sum(1) - sum(2)).abs() < 1e-6, "of one repeat");
}

#[test]
fn the_longest_pe_of_each_repeat_counts() {
    let pe = |us: [f64; 3], kernels: &[&str]| Samples {
        mode: Mode::Overlap,
        hopper: false,
        timelines: Vec::new(),
        forward: PassSamples {
            device_us: us.to_vec(),
            exposed_wait_us: vec![0.0; 3],
            kernels: kernels.iter().map(|&name| (name.to_owned(), us.to_vec())).collect(),
            ..PassSamples::default()
        },
        backward: None,
    };
    let setup = Setup::new(&args(&["--tokens", "40", "--gates", "fast"]), Device::Cpu);
    let (first, second) = (pe([1.0, 9.0, 2.0], &["prep"]), pe([3.0, 4.0, 5.0], &["prep", "fix_out"]));
    let points = report::measured(&[vec![first], vec![second]], &setup);
    let [point] = &points[..] else { panic!("one point: {points:?}") };
    assert_eq!((point.time_us.samples, point.time_us.median), (3, 5.0), "of 3, 9 and 5");
    let kernels: Vec<_> = point.kernels.iter().map(|kernel| (&*kernel.kernel, kernel.time_us.median)).collect();
    assert_eq!(kernels, [("prep", 5.0), ("fix_out", 4.0)], "a PE without a kernel does not count");
}

#[test]
fn slow_gates_make_the_transition_matter_and_fast_ones_do_not() {
    for op in ["kda", "gdn"] {
        let setup = Setup::new(&args(&["--op", op, "--heads", "2", "--dtype", "f32"]), Device::Cpu);
        let weight = |gates| {
            let tensors = Tensors::draw(&setup, gates, 192, 0);
            let problem = Problem::new(&tensors.inputs(), None).expect("a problem");
            transition_weight(&problem, &[0, 64, 128, 192]).max
        };
        let (fast, slow) = (weight(Gates::Fast), weight(Gates::Slow));
        assert!(fast < 1e-6 && slow > 0.1, "{op}: {fast}, {slow}");
    }
}

#[test]
fn pes_have_inputs_of_their_own_and_the_same_every_time() {
    let setup = Setup::new(&args(&[]), Device::Cpu);
    let q = |rank| Tensors::draw(&setup, Gates::Slow, 8, rank).inputs().q.to_f64();
    assert_eq!(q(0), q(0));
    assert_ne!(q(0), q(1));
}

#[test]
fn times_are_drawn() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("op.svg");
    ran(&["--tokens", "16,32", "--repeats", "2", "--plot", path.to_str().expect("UTF-8")]);
    let drawing = std::fs::read_to_string(&path).expect("a drawing");
    assert!(drawing.starts_with("<svg") && drawing.contains("forward, overlap, slow gates"), "{drawing}");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let refused = |extra: &[&str]| {
        let invocation = Invocation { program: "deltalink".into(), args: Vec::new() };
        run(&args(extra), &invocation, &mut Vec::new()).expect_err("refused").to_string()
    };
    assert!(refused(&["--heads", "2", "--value-heads", "3"]).contains('3'));
    assert!(refused(&["--dim", "40"]).contains("40"));
    assert!(refused(&["--plot", "/absent/op.svg"]).contains("/absent/op.svg"));
    assert!(positive("0").is_err() && positive("inf").is_err() && positive("x").is_err());
    assert_eq!(positive("4.3"), Ok(4.3));
}

/// Both PEs, both directions, in steps that were begun together; and one step only.
#[test]
fn a_step_is_recorded() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("step.json");
    let file = path.to_str().expect("UTF-8");
    let one = ["--pes", "2", "--tokens", "40", "--gates", "slow", "--repeats", "1", "--heads", "3", "--trace", file];
    ran(&[&one[..], &["--backward"]].concat());
    let trace = Trace::load(&path).expect("a trace");
    assert!(trace.title.starts_with("kda bf16 forward and backward: 40 tokens on each of 2 PEs"), "{}", trace.title);
    let heads = crate::trace::Heads::of(&trace);
    let sends = |pe: u32| heads.times.iter().filter(|head| head.pe == pe && head.put_end_ns.is_some()).count();
    // Forward PE 0 sends, backward PE 1.
    assert_eq!([sends(0), sends(1)], [3, 3]);
    assert!(heads.times.iter().all(|head| head.scan_end_ns.is_some() && head.seen_ns.is_some()), "{heads:?}");
    // PEs that are threads stamp one clock: nothing arrives before it leaves.
    assert!(heads.soonest_ns.expect("messages") >= 0, "{heads:?}");

    let both = ["--gates", "both", "--trace", file];
    let invocation = Invocation { program: "deltalink".into(), args: Vec::new() };
    let error = run(&args(&both), &invocation, &mut Vec::new()).expect_err("two steps").to_string();
    assert!(error.contains("records one step, and 2 are to be measured"), "{error}");
}
