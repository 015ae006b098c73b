//! Exercises every piece of the GPU back end below the operation, in one run: `cargo run --release -p deltalink --features
//! cuda --example gpu_probe`. One line for each check, ok or FAILED; exit status 1 if one failed.
//!
//! With an argument `single` it leaves out what needs a second process (NVSHMEM). Processes that a launcher has started
//! (`mpiexec.hydra -n 2 gpu_probe`) only do the NVSHMEM part; without a launcher it starts two itself.

#[path = "gpu_probe/kernels.rs"]
mod kernels;
#[path = "gpu_probe/nvshmem.rs"]
mod nvshmem;
#[path = "gpu_probe/ring.rs"]
mod ring;
#[path = "gpu_probe/single.rs"]
mod single;
#[path = "gpu_probe/virtual_pes.rs"]
mod virtual_pes;

use std::process::ExitCode;
use std::time::Duration;

use deltalink::exec::cuda::Gpu;
use deltalink::world::{Launch, Pe, WorldOptions};

/// What a check found, or why it failed.
pub type Outcome = Result<String, Box<dyn std::error::Error + Send + Sync>>;

/// The checks so far.
#[derive(Default)]
pub struct Checks {
    failed: usize,
}

impl Checks {
    /// Prints what came of a check.
    pub fn note(&mut self, name: &str, outcome: Outcome) {
        match outcome {
            Ok(found) => println!("ok      {name}: {found}"),
            Err(error) => {
                self.failed += 1;
                println!("FAILED  {name}: {error}");
            }
        }
    }

    fn code(&self) -> ExitCode {
        if self.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Fails with a message unless `holds`.
pub fn ensure(holds: bool, otherwise: impl std::fmt::Display) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    if holds { Ok(()) } else { Err(otherwise.to_string().into()) }
}

fn options() -> WorldOptions {
    WorldOptions { heap_bytes: 1 << 20, timeout: Duration::from_secs(60) }
}

fn main() -> ExitCode {
    let mut checks = Checks::default();
    let word = std::env::args().nth(1);
    if word.as_deref() == Some(single::WILD) {
        checks.note("wild", single::wild());
        return checks.code();
    }
    match Pe::from_environment(&options()) {
        Ok(Some(pe)) => {
            nvshmem::check(pe, &mut checks);
            return checks.code();
        }
        Ok(None) => {}
        Err(error) => {
            checks.note("world of this process", Err(error.into()));
            return checks.code();
        }
    }
    match Gpu::open(0) {
        Ok(gpu) => {
            single::check(&gpu, &mut checks);
            virtual_pes::check(&mut checks);
        }
        Err(error) => checks.note("open GPU 0", Err(error.into())),
    }
    if word.as_deref() != Some("single") {
        checks.note("NVSHMEM on two processes", two_processes());
    }
    checks.code()
}

fn two_processes() -> Outcome {
    let report = Launch::new(2, &options(), std::env::current_exe()?).run()?;
    ensure(report.success(), &report)?;
    Ok(report.to_string())
}
