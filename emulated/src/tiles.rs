//! The operations of the tile DSL, as GPUs do them, for the conformance suite.

use std::time::Instant;

use cuda_std::emulated::{Emulator, Launch, Schedule};
use deltalink::exec::ExecError;
use deltalink::exec::conformance::Device;
use deltalink::exec::conformance::case::{Case, Outcome};
use kernels_gpu::conformance::TileOp;
use kernels_gpu::tile::SHARED_BYTES;
use kernels_gpu_emulated::entry::find;

use crate::executor::as_fault;

/// An emulated GPU that runs cases.
#[derive(Debug, Default)]
pub struct Tiles {
    emulator: Emulator,
    schedule: Schedule,
}

impl Tiles {
    /// With this order of events.
    pub fn new(schedule: Schedule) -> Self {
        Self { emulator: Emulator::new(), schedule }
    }
}

/// The kernel of an operation: families of operations share one.
fn kernel(case: &Case) -> String {
    let family = match case.op as u32 {
        op if op < TileOp::Load as u32 => "acc",
        op if op < TileOp::ScalePrefix as u32 => "elements",
        op if op < TileOp::Place as u32 => "decay",
        _ => return "conformance_block_f32".into(),
    };
    format!("conformance_{family}_{}", case.dtype)
}

impl Device for Tiles {
    fn run(&mut self, case: &Case) -> Result<Outcome, ExecError> {
        let (mut image, places) = case.image();
        let params = case.params(places, image.bytes_mut().as_mut_ptr() as u64);
        let name = kernel(case);
        let launch = Launch {
            kernel: &name,
            grid: case.grid as u32,
            threads: 128 * case.warpgroups as u32,
            shared_bytes: SHARED_BYTES as u32,
            schedule: self.schedule,
            origin: Instant::now(),
            idle: &|| (),
        };
        let entry = find(&name).expect("the table has every kernel of the suite");
        for block in 0..launch.grid {
            // SAFETY: these are its parameters, of the same sources; the image lives.
            let result = unsafe { entry.run(&mut self.emulator, &launch, block, &params) };
            result.map_err(|fault| as_fault(&fault))?;
        }
        // The kernels wrote through an address: the compiler must not think that it knows the contents.
        Ok(case.outcome(std::hint::black_box(&image), places))
    }
}
