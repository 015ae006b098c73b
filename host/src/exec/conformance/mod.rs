//! Conformance of back ends: every operation of the tile DSL on many operands, the CPU back end against plain loops in f64,
//! and a GPU against the CPU back end.
//!
//! The kernels ([`kernels_gpu::conformance`]) are the same source on both. [`cases`] says what is run, [`expected`] what
//! must come out, [`rule`] how far results may be apart. Elements that a kernel should leave alone are compared too.
//!
//! ```
//! use deltalink::exec::conformance::{Cpu, against_f64, cases};
//! use kernels_gpu::conformance::TileOp;
//!
//! # fn main() -> Result<(), deltalink::exec::ExecError> {
//! let rows = against_f64(&cases::of(TileOp::AccMma), &mut Cpu::new())?;
//! assert!(rows.iter().all(|row| row.passed()), "{rows:?}");
//! # Ok(())
//! # }
//! ```

pub mod case;
pub mod cases;
pub mod expected;
mod report;
pub mod rule;

use std::time::Instant;

use kernels_gpu::conformance::acc::acc_ops;
use kernels_gpu::conformance::block::block_ops;
use kernels_gpu::conformance::decay::decay_ops;
use kernels_gpu::conformance::elements::element_ops;
use kernels_gpu::conformance::{TileCase, TileOp};
use kernels_gpu::tile::Warpgroup;
use kernels_gpu::tile::host::{BlockRunner, Checker, LaunchContext};

pub use report::{Row, against_cpu, against_f64, table};

use super::ExecError;
use crate::tensor::Dtype;
use case::{Case, Outcome};

/// What runs cases.
pub trait Device {
    /// Runs a case.
    ///
    /// # Errors
    /// [`ExecError`] if it cannot be run, or on the CPU if the kernel broke a rule.
    fn run(&mut self, case: &Case) -> Result<Outcome, ExecError>;
}

/// Families of operations: each is one kernel, with an entry for each element type in a device module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Acc,
    Elements,
    Decay,
    Block,
}

impl Family {
    const ALL: [Family; 4] = [Family::Acc, Family::Elements, Family::Decay, Family::Block];

    fn of(op: TileOp) -> Self {
        match op as u32 {
            op if op < TileOp::Load as u32 => Family::Acc,
            op if op < TileOp::ScalePrefix as u32 => Family::Elements,
            op if op < TileOp::Place as u32 => Family::Decay,
            _ => Family::Block,
        }
    }

    fn on_cpu(self, dtype: Dtype) -> fn(&mut Warpgroup<'_>, &TileCase) {
        use half::{bf16, f16};
        match (self, dtype) {
            (Family::Acc, Dtype::F32) => acc_ops::<f32>,
            (Family::Acc, Dtype::Bf16) => acc_ops::<bf16>,
            (Family::Acc, Dtype::F16) => acc_ops::<f16>,
            (Family::Elements, Dtype::F32) => element_ops::<f32>,
            (Family::Elements, Dtype::Bf16) => element_ops::<bf16>,
            (Family::Elements, Dtype::F16) => element_ops::<f16>,
            (Family::Decay, Dtype::F32) => decay_ops::<f32>,
            (Family::Decay, Dtype::Bf16) => decay_ops::<bf16>,
            (Family::Decay, Dtype::F16) => decay_ops::<f16>,
            (Family::Block, _) => block_ops,
        }
    }

    /// Name in a device module.
    fn entry(self, dtype: Dtype) -> String {
        let family = match self {
            Family::Acc => "acc",
            Family::Elements => "elements",
            Family::Decay => "decay",
            Family::Block => "block",
        };
        format!("conformance_{family}_{dtype}")
    }
}

/// Names of the kernels of a device module that run cases.
pub fn device_entries() -> Vec<String> {
    let of = |family: Family| {
        let dtypes = if family == Family::Block { &cases::DTYPES[..1] } else { &cases::DTYPES[..] };
        dtypes.iter().map(move |&dtype| family.entry(dtype))
    };
    Family::ALL.into_iter().flat_map(of).collect()
}

/// The CPU back end, in checked mode: a kernel that breaks a rule of the DSL is an error.
#[derive(Default)]
pub struct Cpu {
    runner: BlockRunner,
}

impl Cpu {
    /// The back end, on the calling thread.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Device for Cpu {
    fn run(&mut self, case: &Case) -> Result<Outcome, ExecError> {
        let (mut image, places) = case.image();
        let params = case.params(places, image.bytes_mut().as_mut_ptr() as u64);
        let checker = Checker::new();
        let context = LaunchContext {
            kernel: "conformance",
            warpgroups: case.warpgroups,
            grid: case.grid,
            origin: Instant::now(),
            checker: Some(&checker),
            peer_failed: &|| false,
        };
        for block in 0..case.grid {
            self.runner.run(&context, block, Family::of(case.op).on_cpu(case.dtype), &params)?;
        }
        // The kernels wrote through an address: the compiler must not think that it knows the contents.
        Ok(case.outcome(std::hint::black_box(&image), places))
    }
}

#[cfg(feature = "cuda")]
pub use on_gpu::OnGpu;

#[cfg(feature = "cuda")]
mod on_gpu {
    use std::collections::HashMap;

    use kernels_gpu::tile::SHARED_BYTES;

    use super::{Case, Device, ExecError, Family, Outcome, device_entries};
    use crate::exec::cuda::{CudaError, DEVICE_MODULE, Function, Gpu, Shape, Stream};

    /// A GPU.
    #[derive(Debug)]
    pub struct OnGpu {
        gpu: Gpu,
        stream: Stream,
        kernels: HashMap<String, Function>,
    }

    /// As much as there is: the CPU back end checks that a case needs no more.
    const SHARED: u32 = SHARED_BYTES as u32;

    impl OnGpu {
        /// The kernels of this build on `gpu`.
        ///
        /// # Errors
        /// [`CudaError`] if the module does not load.
        pub fn new(gpu: &Gpu) -> Result<Self, CudaError> {
            let module = gpu.load("deltalink", DEVICE_MODULE)?;
            let kernel = |name: String| {
                let function = module.function(&name)?;
                function.allow_shared(SHARED)?;
                Ok((name, function))
            };
            let kernels = device_entries().into_iter().map(kernel).collect::<Result<_, CudaError>>()?;
            Ok(Self { gpu: gpu.clone(), stream: gpu.stream()?, kernels })
        }
    }

    impl Device for OnGpu {
        fn run(&mut self, case: &Case) -> Result<Outcome, ExecError> {
            let (mut image, places) = case.image();
            let function = &self.kernels[&Family::of(case.op).entry(case.dtype)];
            let memory = self.gpu.upload(&self.stream, image.bytes())?;
            let params = case.params(places, memory.address());
            let shape = Shape { blocks: case.grid as u32, threads: 128 * case.warpgroups as u32, shared_bytes: SHARED };
            // SAFETY: the entries of this module take these parameters by value; `memory` holds all that they name, and is
            // read back, after the kernel, before it is released.
            unsafe { function.launch(&self.stream, shape, &params)? };
            memory.download(&self.stream, 0, image.bytes_mut())?;
            Ok(case.outcome(&image, places))
        }
    }
}
