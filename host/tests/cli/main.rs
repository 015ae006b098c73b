//! The `deltalink` binary as a user meets it.

mod bad_input;
mod bench;
mod bench_op;
mod doctor;
mod files;
#[cfg(feature = "cuda")]
mod gpu;
mod help;
mod processes;
mod run;
mod verify;

use std::process::{Command, Output};

/// The binary with `args`, in an environment that says nothing about terminals or launchers.
fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltalink"));
    command.args(args);
    for name in [
        "COLUMNS",
        "DELTALINK_LOG",
        "DELTALINK_RANK",
        "DELTALINK_SIZE",
        "DELTALINK_HEAP",
        "PMI_RANK",
        "PMI_SIZE",
        "PMI_FD",
    ] {
        command.env_remove(name);
    }
    command
}

fn deltalink(args: &[&str]) -> Output {
    command(args).output().expect("the binary starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

/// Standard output of a command that must succeed.
fn succeeds(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(output), stderr(output));
    stdout(output)
}
