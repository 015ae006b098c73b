//! Which bodies a backward step's kernels have, and the blocks of their launches.

use kernels_gpu::backward::{grad, scan, states};
use kernels_gpu::hopper::backward::{SCAN_BACK_SHARED, STATES_SHARED, WALK_WARPGROUPS};
use kernels_gpu::params::{GradParams, ScanBackParams, StatesParams};
use kernels_gpu::tile::SHARED_BYTES;

use super::BackwardStep;
use crate::exec::{Blocks, Body, Executor, Grid, Kernel};
use crate::inputs::Op;
use crate::op::step::Step;

impl Step<'_> {
    /// The body of the backward step's kernels that hand images to each other: `prep`, both walks and `grad`. All have one
    /// layout, so it is one body for all of them. Records that a forward step keeps are of this body as well, and in exact
    /// mode so is its scan, whose states the walks continue bit for bit.
    pub(in crate::op) fn backward_body<X: Executor>(&self, exec: &X) -> Body {
        let all = StatesParams::has_hopper() && ScanBackParams::has_hopper() && GradParams::has_hopper();
        if all { exec.body(&self.sizes(), self.inputs.dtype()) } else { Body::Portable }
    }
}

impl BackwardStep<'_> {
    /// The reverse scan's blocks, and how many column blocks each walks.
    pub(super) fn scan_blocks(&self, body: Body) -> (Blocks, usize) {
        match body {
            Body::Portable => self.portable_walk(scan::shared_bytes, scan::WARPGROUPS),
            Body::Hopper => hopper_walk(SCAN_BACK_SHARED),
        }
    }

    /// The blocks of the forward walk, and how many column blocks each walks.
    pub(super) fn states_blocks(&self, body: Body) -> (Blocks, usize) {
        match body {
            Body::Portable => self.portable_walk(states::shared_bytes, states::WARPGROUPS),
            Body::Hopper => hopper_walk(STATES_SHARED),
        }
    }

    /// The blocks of `grad`.
    pub(super) fn grad_blocks(&self, chunks: usize) -> Blocks {
        let ((k, chunk, element), per_channel) = (self.shape(), self.step.inputs.op == Op::Kda);
        let shared = grad::shared_bytes(k, chunk, element, per_channel);
        (Grid::Blocks(chunks * self.step.dims.hv), grad::WARPGROUPS, shared).into()
    }

    fn shape(&self) -> (usize, usize, usize) {
        (self.step.dims.k, self.step.config.chunk, self.step.inputs.dtype().size())
    }

    fn portable_walk(&self, bytes: fn(usize, usize, usize, usize) -> usize, most: usize) -> (Blocks, usize) {
        let (k, chunk, element) = self.shape();
        let walkers = if bytes(k, chunk, element, most) <= SHARED_BYTES { most } else { 1 };
        ((Grid::Resident, walkers, bytes(k, chunk, element, walkers)).into(), walkers)
    }
}

/// One column block in each, which spreads the work over most multiprocessors; both blocks of a head read its operands.
fn hopper_walk(shared_bytes: usize) -> (Blocks, usize) {
    (Blocks { grid: Grid::Resident, body: Body::Hopper, warpgroups: WALK_WARPGROUPS, shared_bytes }, 1)
}
