//! Steps that are captured once and replayed with one launch.
//!
//! A captured step is a list of launches with their parameters: addresses of tensors, of tables, of the heap. What differs from one
//! run of a step to the next is set on the device by its first kernel ([`kernels_gpu::begin`]), the epoch above all, so the
//! same launches are right every time. Replays and ordinary calls may follow each other in any order. All PEs must replay alike:
//! a replay is to the others what the calls in it are.
//!
//! Memory of the operation that captured steps use stays as long as the operation, whatever sizes come later. Tensors are the
//! caller's to keep.

use cust::graph::NodeKind;

use super::agreement::Direction;
use super::launched::Launched;
use super::{ContextParallel, OpError, Pending};
use crate::exec::cuda::{CudaExecutor, Graph};
use crate::exec::{ExecError, Executor};

/// Calls of one operation that were captured together.
#[derive(Debug)]
pub struct CapturedSteps {
    pub(super) graph: Graph,
    pub(super) operation: u64,
    pub(super) steps: u64,
    pub(super) hv: usize,
}

impl CapturedSteps {
    /// Calls.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Launches of kernels, and everything else: copies and fills.
    pub fn counts(&self) -> (usize, usize) {
        let kernels = self.graph.nodes().iter().filter(|&&node| node == NodeKind::Kernel).count();
        (kernels, self.graph.nodes().len() - kernels)
    }

    /// What is known of a replay.
    pub(super) fn launched(&self) -> Launched {
        Launched {
            title: "replay",
            kernels: Vec::new(),
            exchange: std::time::Duration::ZERO,
            tokens: 0,
            hv: self.hv,
            parts: 1,
            on_host: false,
            cuts: None,
        }
    }

    /// Whether the operation of this number on PE `rank` captured them.
    pub(super) fn check(&self, (rank, operation): (usize, u64)) -> Result<(), OpError> {
        match self.operation == operation {
            true => Ok(()),
            false => Err(OpError::ForeignPending { rank, pending: self.operation, operation }),
        }
    }
}

impl ContextParallel<'_, CudaExecutor> {
    /// Captures the calls that `body` enqueues, in place of making them. Their tensors must be there whenever they are replayed.
    /// Each of them must have been made before, with the same plan, sizes and options (but for the tensors), and a backward call
    /// among them with the forward call that it belongs to.
    ///
    /// # Errors
    /// [`OpError`]; [`ExecError::NotWarm`] if something is missing that only a first call makes. The operation stays usable then.
    pub fn capture(&mut self, body: impl FnOnce(&mut Self) -> Result<(), OpError>) -> Result<CapturedSteps, OpError> {
        self.check_enqueued()?;
        let (before, heads) = (self.steps, self.enqueued_heads);
        self.exec.begin_capture().map_err(ExecError::from)?;
        let made = body(self);
        // Also after a failure, or the stream would go on capturing.
        let graph = self.exec.end_capture().map_err(|error| OpError::from(ExecError::from(error)));
        let (steps, hv) = (self.steps - before, self.enqueued_heads);
        // Nothing was done.
        (self.steps, self.enqueued_heads) = (before, heads);
        made?;
        Ok(CapturedSteps { graph: graph?, operation: self.number, steps, hv: hv.unwrap_or(1) })
    }

    /// Puts captured calls behind what the GPU has to do. Collective as they are.
    ///
    /// # Errors
    /// As [`enqueue_forward`](Self::enqueue_forward); [`OpError::ForeignPending`] if another operation captured them.
    ///
    /// # Safety
    /// The tensors of the captured calls are where they were, with the promises of
    /// [`TensorView::from_raw`](crate::tensor::TensorView::from_raw), until the work has ended.
    pub unsafe fn replay(&mut self, captured: &CapturedSteps) -> Result<Pending<CudaExecutor>, OpError> {
        let rank = self.pe.rank();
        captured.check((rank, self.number))?;
        self.check_enqueueable()?;
        self.check_enqueued()?;
        let (direction, call) = (Direction::Forward, self.pe.latest_call(rank));
        self.exec.prepare(false)?;
        // SAFETY: the caller's promise.
        let result = unsafe { self.exec.replay(&captured.graph) }.map_err(|error| ExecError::from(error).into());
        self.settled(result, direction, call)?;
        self.steps += captured.steps;
        self.pending(captured.launched(), (direction, call), None)
    }
}
