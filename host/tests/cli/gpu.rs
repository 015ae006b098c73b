//! A build for GPUs where there is none: it starts, computes on the CPU, and says what is missing when asked for a GPU.

use crate::{command, stderr, stdout, succeeds};

/// The driver's library, as the program looks for it. Where it is there, GPUs are hidden from it instead.
fn driver_is_here() -> bool {
    // SAFETY: the driver library is made to be loaded this way; its initialisers have no conditions.
    unsafe { libloading::Library::new("libcuda.so.1") }.map(std::mem::forget).is_ok()
}

fn without_gpus(args: &[&str]) -> std::process::Output {
    command(args).env("CUDA_VISIBLE_DEVICES", "").output().expect("the program starts without a driver")
}

#[test]
fn what_is_missing_is_said_once() {
    let reason = if driver_is_here() { "the CUDA driver sees no GPU" } else { "there is no CUDA driver (libcuda.so.1" };
    for world in ["threads", "processes"] {
        let output = without_gpus(&["run", "--device", "cuda", "--pes", "2", "--world", world]);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{message}{}", stdout(&output));
        assert_eq!(message.matches("error: ").count(), 1, "{world}: {message}");
        assert!(message.contains(reason) && message.contains("--gpus all"), "{world}: {message}");
    }
    let doctor = succeeds(&without_gpus(&["doctor"]));
    let line = doctor.lines().find(|line| line.contains("NVIDIA driver")).expect("a line about the driver");
    assert!(driver_is_here() || (line.contains("missing") && line.contains("libcuda.so.1")), "{line}");
}

#[test]
fn the_cpu_computes_where_there_is_no_gpu() {
    let text = succeeds(&without_gpus(&["run", "--op", "kda"]));
    assert!(text.contains("4 PEs (threads)") && text.contains(": ok"), "{text}");
}
