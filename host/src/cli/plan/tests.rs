//! What the command prints, and what it refuses.

use clap::Parser;

use super::*;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: Args,
}

fn parse(line: &str) -> Args {
    Command::try_parse_from(std::iter::once("plan").chain(line.split_whitespace())).unwrap().args
}

fn print(line: &str) -> String {
    let mut out = Vec::new();
    run(&parse(line), &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn refused(line: &str) -> String {
    run(&parse(line), &mut Vec::new()).unwrap_err().to_string()
}

#[test]
fn packed_sequences_over_three_pes() {
    insta::assert_snapshot!(print("--pes 3 --tokens 4096 --heads 16 --value-heads 32 --cu-seqlens 0,1000,3500,4096"));
}

#[test]
fn a_batch_with_an_empty_pe_on_pcie() {
    insta::assert_snapshot!(print("--pes 3 --tokens 100 --batch 2 --heads 4 --cuts 50,50 --link pcie --m-wire f32"));
}

#[test]
fn cuts_between_sequences() {
    insta::assert_snapshot!(print("--pes 2 --tokens 4096 --heads 16 --cu-seqlens 0,1000,4096 --cuts 1000"));
}

#[test]
fn training_takes_both_directions() {
    let line = "--pes 3 --tokens 4096 --heads 16";
    let text = print(&format!("{line} --backward"));
    // S of 16 heads is 1 MiB, M in bf16 half as much: two PEs send S to the first, one of them M as well.
    assert!(text.contains("Backward the same ways the other way round: 3 messages, 3.50 MiB in all"), "{text}");
    assert!(text.contains("Kept between forward and backward: up to 1.50 MiB on a PE."), "{text}");
    let json = |line: &str| serde_json::from_str::<serde_json::Value>(&print(line)).unwrap();
    let (one, both) = (json(&format!("{line} --json -")), json(&format!("{line} --backward --json -")));
    let slots = |report: &serde_json::Value| report["heap"]["slots"].as_u64().unwrap();
    assert_eq!(2 * slots(&one), slots(&both));
    assert_eq!((one.get("back"), both["back"].as_array().unwrap().len()), (None, 3));
    assert_eq!((&both["back"][0]["from"], &both["back"][0]["bytes_m"]), (&1.into(), &(16 * 128 * 128 * 2).into()));
    assert_eq!(both["saved"], serde_json::json!([0, (3 << 19) + 16 * 4 * 16, 1 << 20]));
}

#[test]
fn eight_nodes_of_eight_are_cut_short_for_eyes() {
    let text = print("--pes 64 --tokens 65536 --heads 32 --topology 8x8");
    assert!(text.contains("and 24 more PEs; --json lists all"), "{text}");
    assert!(text.contains("and 1976 more messages; --json lists all"), "{text}");
    let cheapest = text.lines().find(|line| line.ends_with("cheapest")).unwrap();
    assert!(cheapest.trim_start().starts_with("hierarchical"), "{text}");
    assert!(text.contains("between nodes ib 8 us, 45 GB/s (assumed)"), "{text}");
}

#[test]
fn json_has_everything() {
    let json: serde_json::Value =
        serde_json::from_str(&print("--pes 64 --tokens 65536 --heads 32 --topology 8x8 --json -")).unwrap();
    assert_eq!(json["schema"], 1);
    assert_eq!(json["plan"]["ranks"].as_array().unwrap().len(), 64);
    assert_eq!(json["push"].as_array().unwrap().len(), 64 * 63 / 2);
    assert_eq!(json["push"][0]["bytes_s"], 2 << 20);
    assert_eq!(json["chain"].as_array().unwrap().len(), 63);
    assert_eq!(json["cost"]["schemes"][3]["scheme"], "hierarchical");
    assert_eq!(json["heap"]["slots"], 64 * 2 * (3 << 20));
}

#[test]
fn json_goes_to_a_file_beside_the_tables() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    let text = print(&format!("--pes 2 --tokens 8 --heads 1 --json {}", file.display()));
    assert!(text.starts_with("8 tokens on 2 PEs"), "{text}");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(json["plan"]["cuts"], serde_json::json!([0, 4, 8]));
}

#[test]
fn what_cannot_be_planned_is_refused_with_advice() {
    let lines = [
        "--pes 4 --tokens 3 --heads 1",
        "--pes 0 --tokens 3 --heads 1",
        "--pes 3 --tokens 100 --heads 1 --cuts 50",
        "--pes 2 --tokens 100 --heads 1 --cuts 150",
        "--pes 2 --tokens 100 --heads 1 --cu-seqlens 0,60,90",
        "--pes 2 --tokens 100 --heads 3 --value-heads 4",
        "--pes 2 --tokens 100 --heads 1 --key-dim 100",
        "--pes 8 --tokens 100 --heads 1 --topology 2x2",
        "--pes 2 --tokens 100 --heads 1 --json /does/not/exist/plan.json",
    ];
    insta::assert_snapshot!(lines.map(refused).join("\n"));
}

#[test]
fn the_command_line_names_its_choices() {
    let parse = |line: &str| Command::try_parse_from(line.split_whitespace()).err().unwrap().to_string();
    let base = "plan --pes 2 --tokens 4 --heads 1";
    assert!(parse(&format!("{base} --link sli")).contains("[possible values: nvlink, ib, pcie]"));
    assert!(parse(&format!("{base} --m-wire f16")).contains("[possible values: bf16, f32]"));
    assert!(parse(&format!("{base} --topology 8")).contains("write 8x8 for 8 nodes of 8 GPUs each"));
    assert!(parse(&format!("{base} --batch 2 --cu-seqlens 0,4")).contains("cannot be used with"));
}
