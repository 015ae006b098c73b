//! The measurement on PEs that are threads, and what can be refused.

use super::*;
use crate::exec::Executor;

fn args(extra: &[&str]) -> Args {
    #[derive(clap::Parser)]
    struct Alone {
        #[command(flatten)]
        args: Args,
    }
    <Alone as clap::Parser>::parse_from(["comm", "--device", "cpu"].iter().chain(extra)).args
}

fn invocation() -> Invocation {
    Invocation { program: "deltalink".into(), args: vec!["bench".into(), "comm".into()] }
}

#[test]
fn sizes_are_powers_of_two_in_range() {
    assert_eq!(["16", "4K", "1M", "64k"].map(size), [Ok(16), Ok(4096), Ok(1 << 20), Ok(64 << 10)]);
    for bad in ["8", "2M", "48", "x", "", "K", "99999999999999999999M"] {
        assert!(size(bad).is_err(), "{bad}");
    }
}

#[test]
fn every_point_is_measured_and_its_contents_arrive() {
    let args = args(&["--pes", "4", "--sizes", "16,1K,4K,64K", "--blocks", "1,3", "--repeats", "3", "--json", "-"]);
    let mut out = Vec::new();
    assert_eq!(run(&args, &invocation(), &mut out).expect("measured"), Exit::Success);
    let json: serde_json::Value = serde_json::from_slice(&out).expect("JSON");
    assert_eq!((&json["schema"], &json["benchmark"]), (&1.into(), &"comm".into()));
    assert_eq!(json["command"], serde_json::json!(["bench", "comm"]));
    assert_eq!(json["settings"]["pes"], 4);
    assert_eq!(json["settings"]["path"], "stores");
    let points = json["points"].as_array().expect("points");
    let sizes: Vec<_> = points.iter().map(|p| (p["bytes"].as_u64(), p["blocks"].as_u64())).collect();
    let want = [16, 1024, 4096, 65536].into_iter().flat_map(|bytes| [1, 3].map(|blocks| (Some(bytes), Some(blocks))));
    assert_eq!(sizes, want.collect::<Vec<_>>());
    for point in points {
        let [p10, median, p90] = ["p10", "median", "p90"].map(|name| point["time_us"][name].as_f64().expect("a time"));
        assert!(0.0 < p10 && p10 <= median && median <= p90, "{point}");
        assert_eq!(point["time_us"]["samples"], 12, "3 samples of 4 PEs");
        let rate = point["bandwidth_gb_s"]["median"].as_f64().expect("a rate");
        let moved = (point["bytes"].as_f64().unwrap() * point["blocks"].as_f64().unwrap()) / median / 1e3;
        assert!((rate - moved).abs() <= 1e-9 * moved, "{point}");
    }
}

#[test]
fn puts_arrive_as_stores_do() {
    let args = args(&["--transport", "put", "--sizes", "16,64K", "--blocks", "2", "--repeats", "3", "--json", "-"]);
    let mut out = Vec::new();
    assert_eq!(run(&args, &invocation(), &mut out).expect("measured"), Exit::Success);
    let json: serde_json::Value = serde_json::from_slice(&out).expect("JSON");
    assert_eq!(json["settings"]["path"], "puts");
    assert_eq!(json["points"].as_array().expect("points").len(), 2);
}

#[test]
fn the_table_says_that_it_is_the_cpu() {
    let args = args(&["--sizes", "16", "--blocks", "1", "--repeats", "2"]);
    let mut out = Vec::new();
    run(&args, &invocation(), &mut out).expect("measured");
    let text = String::from_utf8(out).expect("UTF-8");
    assert!(text.contains("2 PEs (threads) on the CPU: stores between cores, no network and no NVLink"), "{text}");
    assert!(text.contains("16 B"), "{text}");
}

#[test]
fn an_odd_number_of_pes_is_refused() {
    for pes in ["0", "1", "3"] {
        let error = run(&args(&["--pes", pes]), &invocation(), &mut Vec::new()).expect_err("odd").to_string();
        assert!(error.starts_with(&format!("{pes} PEs cannot be paired")), "{error}");
    }
}

#[test]
fn a_partner_that_stays_away_ends_the_wait() {
    let options = WorldOptions { timeout: Duration::from_secs(3), ..args(&["--sizes", "16"]).options() };
    let points = [Point { bytes: 16, blocks: 1 }];
    let outcome = run_threads(2, &options, |pe| -> Result<(), CommBenchError> {
        let mut cpu = Cpu::new(1).map_err(ExecError::from)?;
        // PE 1 takes the memory and comes to the barrier, but launches nothing.
        if pe.rank() == 1 {
            let bytes = payload_bytes(16, 1).next_multiple_of(crate::heap::ALIGN);
            let _slots = cpu.symmetric(pe, "slots to measure", bytes)?;
            let _words = cpu.symmetric(pe, "signals to measure", measure::words_bytes(&points, 2))?;
            pe.barrier("the next point")?;
            let start = Instant::now();
            while pe.failed_peer().is_none() {
                assert!(start.elapsed() < Duration::from_secs(60), "PE 0 does not miss it");
                std::thread::sleep(Duration::from_millis(1));
            }
            return Ok(());
        }
        measure::all(pe, &mut cpu, &points, Sampling { warmup: 1, samples: 1, transport: Transport::Auto }, None)
            .map(drop)
    });
    let error = CommBenchError::from(outcome.expect_err("PE 1 sent nothing")).to_string();
    assert!(error.contains("with 1 blocks of 16 bytes: PE 0, step 4, waited"), "{error}");
    assert!(error.contains("from PE 1 and found epoch 0"), "{error}");
}
