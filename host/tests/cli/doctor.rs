//! `deltalink doctor` on machines with GPUs: a driver library compiled here stands in for the real one.

use std::path::Path;
use std::process::Command;

use crate::{command, deltalink, stdout, succeeds};

/// The functions that the doctor asks, of two GPUs. How they reach each other is `access` and `atomics`.
fn driver(folder: &Path, init: i32, access: i32, atomics: i32) {
    let source = format!(
        r#"
        #include <string.h>
        int cuInit(unsigned flags) {{ return {init}; }}
        int cuDriverGetVersion(int *version) {{ *version = 13000; return 0; }}
        int cuDeviceGetCount(int *count) {{ *count = 2; return 0; }}
        int cuDeviceGet(int *device, int ordinal) {{ *device = ordinal; return 0; }}
        int cuDeviceGetName(char *name, int room, int device) {{ strncpy(name, device ? "Mock B" : "Mock A", room); return 0; }}
        int cuDeviceTotalMem_v2(unsigned long *bytes, int device) {{ *bytes = 1ul << 30; return 0; }}
        int cuDeviceGetAttribute(int *value, int attribute, int device) {{ *value = attribute == 75 ? 9 : 0; return 0; }}
        int cuDeviceGetP2PAttribute(int *value, int attribute, int from, int to) {{
            *value = attribute == 2 ? {access} : {atomics};
            return from == to ? 101 : 0;
        }}
        "#
    );
    let file = folder.join("mock.c");
    std::fs::write(&file, source).expect("written");
    // The program that Rust links with.
    let compiled =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(folder.join("libcuda.so.1")).arg(&file).status();
    assert!(compiled.expect("cc starts").success());
}

/// What the doctor says about the GPUs of such a machine, one line for each thing.
fn on_gpus(init: i32, access: i32, atomics: i32) -> String {
    let folder = tempfile::tempdir().expect("folder");
    driver(folder.path(), init, access, atomics);
    let mut command = command(&["doctor"]);
    command.env("LD_LIBRARY_PATH", folder.path()).env("CUDA_MPS_PIPE_DIRECTORY", folder.path());
    let text = succeeds(&command.env("CUDA_VISIBLE_DEVICES", "4,5").output().expect("starts"));
    let of_gpus = ["NVIDIA driver", "GPU", "access between", "MPS", "CUDA_VISIBLE"];
    let lines = text
        .lines()
        .map(str::trim)
        .filter(|line| of_gpus.iter().any(|item| line.strip_prefix("* ").unwrap_or(line).starts_with(item)));
    // Columns are as wide as this machine's longest entry, and the driver's own version is this machine's.
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n";
    let plain: String = lines.map(words).collect();
    let version = plain.find("version ").map(|at| plain[at..].split(',').next().unwrap_or_default().to_owned());
    version.map_or(plain.clone(), |version| plain.replacen(&version, "version VERSION", 1))
}

#[test]
fn gpus_and_their_links_are_shown() {
    insta::assert_snapshot!("doctor_nvlink", on_gpus(0, 1, 1));
    insta::assert_snapshot!("doctor_no_access", on_gpus(0, 0, 0));
    assert!(on_gpus(0, 1, 0).contains("access between GPUs note PCIe, all pairs"));
}

#[test]
fn a_driver_that_does_not_start_is_told_with_its_code() {
    let text = on_gpus(803, 1, 1);
    assert!(text.contains("cuInit fails with 803") && text.contains("different versions"), "{text}");
}

#[test]
fn pes_exchange_messages() {
    let text = succeeds(&deltalink(&["doctor", "--self-test"]));
    let verdict = text.lines().find(|line| line.contains("self-test on the CPU")).unwrap_or_else(|| panic!("{text}"));
    assert!(verdict.contains(" ok ") && verdict.contains("all arrived as they were sent"), "{verdict}");
    assert!(!stdout(&deltalink(&["doctor"])).contains("self-test"));
}
