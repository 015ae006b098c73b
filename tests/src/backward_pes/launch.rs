//! How the kernels of a step are run.

use deltalink::exec::cpu::Cpu;
use deltalink::exec::{Executor, Grid, Kernel, Launch};
use deltalink::inputs::Op;
use deltalink::tensor::Dtype;
use kernels_gpu::params::Tensor;
use kernels_gpu::tile::host::Checker;

/// Runs kernels.
pub trait Launcher {
    /// Column blocks that an item of a walk over chunks has at most, where blocks have room for `room`.
    fn walkers(&self, room: usize) -> usize {
        room
    }

    /// Runs a kernel for operands of one type in blocks of (how many, warpgroups, bytes of shared memory), and sees that it writes
    /// all elements of what is `written`.
    ///
    /// # Panics
    /// If the kernel breaks a rule.
    fn launch<K: Kernel>(
        &mut self,
        kind: (Op, Dtype),
        params: &K,
        blocks: (Grid, usize, usize),
        written: &[(&str, Tensor)],
    );
}

/// The portable kernels on the CPU, in checked mode.
pub struct Portable(Cpu);

impl Portable {
    /// On one thread.
    ///
    /// # Panics
    /// If it cannot be started.
    #[allow(clippy::new_without_default)] // it may panic
    pub fn new() -> Self {
        Self(Cpu::new(1).unwrap())
    }
}

impl Launcher for Portable {
    fn launch<K: Kernel>(
        &mut self,
        (op, dtype): (Op, Dtype),
        params: &K,
        blocks: (Grid, usize, usize),
        written: &[(&str, Tensor)],
    ) {
        let mut checker = Checker::new();
        written.iter().for_each(|&(name, tensor)| checker.expect_written(name, tensor));
        let launch = Launch { op, dtype, blocks: blocks.into(), checker: Some(&checker), peer_failed: &|| false };
        self.0.launch(&launch, params).unwrap_or_else(|error| panic!("{error}"));
        checker.finish(K::NAME).unwrap_or_else(|fault| panic!("{fault}"));
    }
}
