//! Steps that were captured, to be put into a stream again and again with one call.

use cust::graph::{self, GraphExec, NodeKind};

use super::driver::checked;
use super::{CudaError, Gpu, Stream};

/// Captured work, ready to be launched.
#[derive(Debug)]
pub(crate) struct Graph {
    /// Taken by the drop.
    exec: Option<GraphExec>,
    nodes: Vec<NodeKind>,
    gpu: Gpu,
}

impl Graph {
    pub(super) fn new(gpu: &Gpu, captured: graph::Graph) -> Result<Self, CudaError> {
        let nodes = checked("cuGraphGetNodes", captured.nodes())?;
        let exec = checked("cuGraphInstantiate", captured.instantiate())?;
        Ok(Self { exec: Some(exec), nodes, gpu: gpu.clone() })
    }

    /// What its nodes do.
    pub fn nodes(&self) -> &[NodeKind] {
        &self.nodes
    }

    /// Puts the work into `stream`.
    ///
    /// # Safety
    /// All memory that it uses is there until the stream has done it.
    pub(super) unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        self.gpu.make_current()?;
        let Some(exec) = &self.exec else { return Ok(()) };
        // SAFETY: a stream of the current context; the rest is the caller's promise.
        checked("cuGraphLaunch", unsafe { exec.launch(stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // If this fails the context is gone, and the graph with it.
        let _ = self.gpu.make_current();
        drop(self.exec.take());
    }
}
