//! Which bodies a step's kernels have, and the blocks of a backward step's launches.

use kernels_gpu::backward::{grad, scan, states};
use kernels_gpu::hopper::backward::{grad as hopper_grad, walk as hopper_walk};
use kernels_gpu::tile::SHARED_BYTES;

use super::BackwardStep;
use crate::exec::{Blocks, Body, Executor, Grid};
use crate::inputs::Op;
use crate::op::step::Step;

impl Step<'_> {
    /// The body of the step's kernels that hand operands to each other: forward `prep`, the scan and the correction, backward
    /// `prep`, both walks and `grad`. It is the same in both directions: the backward step reads records that the forward step kept,
    /// and in exact mode its walks continue, bit for bit, the states that the forward step received.
    pub(in crate::op) fn body<X: Executor>(&self, exec: &X) -> Body {
        exec.body(&self.sizes(), self.inputs.dtype())
    }
}

impl BackwardStep<'_> {
    /// The reverse scan's blocks, and how many column blocks each walks.
    pub(super) fn scan_blocks(&self, body: Body) -> (Blocks, usize) {
        match body {
            Body::Portable => self.portable_walk(scan::shared_bytes, scan::WARPGROUPS),
            Body::Hopper => on_hopper(hopper_walk::SCAN_BACK_SHARED),
        }
    }

    /// The blocks of the forward walk, and how many column blocks each walks.
    pub(super) fn states_blocks(&self, body: Body) -> (Blocks, usize) {
        match body {
            Body::Portable => self.portable_walk(states::shared_bytes, states::WARPGROUPS),
            Body::Hopper => on_hopper(hopper_walk::STATES_SHARED),
        }
    }

    /// The blocks of `grad`. Those for Hopper bring the next chunk while they compute one.
    pub(super) fn grad_blocks(&self, body: Body, chunks: usize) -> Blocks {
        match body {
            Body::Portable => {
                let grid = Grid::Blocks(chunks * self.step.dims.hv);
                let ((k, chunk, element), per_channel) = (self.shape(), self.step.inputs.op == Op::Kda);
                (grid, grad::WARPGROUPS, grad::shared_bytes(k, chunk, element, per_channel)).into()
            }
            Body::Hopper => {
                let (warpgroups, shared_bytes) = (hopper_grad::WARPGROUPS, hopper_grad::SHARED);
                Blocks { grid: Grid::Resident, body, warpgroups, shared_bytes }
            }
        }
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
fn on_hopper(shared_bytes: usize) -> (Blocks, usize) {
    (Blocks { grid: Grid::Resident, body: Body::Hopper, warpgroups: hopper_walk::WARPGROUPS, shared_bytes }, 1)
}
