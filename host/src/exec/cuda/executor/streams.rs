//! The stream of an executor: one that somebody else made, and captures.

use super::CudaExecutor;
use crate::exec::cuda::graph::Graph;
use crate::exec::cuda::{CudaError, Stream};

impl CudaExecutor {
    /// Puts work into the stream `raw` from here on (a `CUstream` or `cudaStream_t`; 0 is the default stream): after what was put
    /// elsewhere before. Costs nothing if it is that stream already. Set it before the stream begins to capture.
    ///
    /// # Errors
    /// [`CudaError::Call`] if the streams cannot be put in order.
    ///
    /// # Safety
    /// A stream of this GPU's primary context, which lives until the executor gets another one or is dropped. What others capture
    /// on it is not launched after the executor was dropped, nor on another stream than the operation's calls.
    pub unsafe fn use_stream(&mut self, raw: u64) -> Result<(), CudaError> {
        if self.stream.raw() as u64 == raw {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrowed(&self.gpu, raw) };
        let before = self.event()?;
        before.record(&self.stream)?;
        stream.wait(&before)?;
        self.spare.push(before);
        self.stream = stream;
        Ok(())
    }

    /// Captures what is launched from here on, in place of launching it.
    pub(crate) fn begin_capture(&mut self) -> Result<(), CudaError> {
        self.stream.begin_capture()
    }

    /// Ends the capture.
    pub(crate) fn end_capture(&mut self) -> Result<Graph, CudaError> {
        self.captures = false;
        self.stream.end_capture()
    }

    /// Puts what was captured into the stream.
    ///
    /// # Safety
    /// Tensors that the captured steps use are where they were, until the stream has done them.
    pub(crate) unsafe fn replay(&mut self, graph: &Graph) -> Result<(), CudaError> {
        self.unfinished = true;
        // SAFETY: the caller's promise for tensors; everything else was pinned while it was captured.
        unsafe { graph.launch(&self.stream) }
    }
}
