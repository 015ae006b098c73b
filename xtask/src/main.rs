//! Work on the workspace that cargo alone cannot do: `cargo xtask setup` brings the tools of the device build,
//! `cargo xtask device-build` builds device modules.

mod device_build;
mod setup;
mod shell;

use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Work on the workspace that cargo alone cannot do")]
enum Task {
    /// Bring what the device build needs: compilers (Debian packages), CUDA and NVSHMEM (under the target folder).
    /// Skips what is there.
    Setup,
    /// Build the kernels for a GPU and show what each costs.
    DeviceBuild(device_build::Arguments),
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Setup => setup::setup().map_err(|error| error.to_string()),
        Task::DeviceBuild(arguments) => device_build::device_build(arguments).map_err(|error| error.to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
