//! Calls that are captured once and replayed with one launch, as those of KDA and GDN are: see [`CapturedSteps`].

use super::{Direction, ShortConvolution, ShortConvolutionError};
use crate::exec::cuda::CudaExecutor;
use crate::exec::{ExecError, Executor};
use crate::op::{CapturedSteps, Pending};

impl ShortConvolution<'_, CudaExecutor> {
    /// Captures the calls that `body` enqueues, in place of making them. Their tensors must be there whenever they are replayed.
    /// Each of them must have been made before, with the same plan, sizes and options (but for the tensors); what a forward call
    /// among them saves needs memory that an earlier one has [released](Self::release).
    ///
    /// # Errors
    /// [`ShortConvolutionError`]; [`ExecError::NotWarm`] if something is missing that only a first call makes. The operation stays
    /// usable then.
    pub fn capture(
        &mut self,
        body: impl FnOnce(&mut Self) -> Result<(), ShortConvolutionError>,
    ) -> Result<CapturedSteps, ShortConvolutionError> {
        self.check_enqueued()?;
        let before = self.steps;
        self.exec.begin_capture().map_err(ExecError::from)?;
        let made = body(self);
        // Also after a failure, or the stream would go on capturing.
        let graph = self.exec.end_capture().map_err(|error| ShortConvolutionError::from(ExecError::from(error)));
        let steps = self.steps - before;
        // Nothing was done.
        self.steps = before;
        made?;
        Ok(CapturedSteps { graph: graph?, operation: self.number, steps, hv: 1 })
    }

    /// Puts captured calls behind what the GPU has to do. Collective as they are.
    ///
    /// # Errors
    /// As [`enqueue_forward`](Self::enqueue_forward); [`OpError::ForeignPending`](crate::op::OpError::ForeignPending) if another
    /// operation captured them.
    ///
    /// # Safety
    /// The tensors of the captured calls are where they were, with the promises of
    /// [`TensorView::from_raw`](crate::tensor::TensorView::from_raw), until the work has ended.
    pub unsafe fn replay(&mut self, captured: &CapturedSteps) -> Result<Pending<CudaExecutor>, ShortConvolutionError> {
        captured.check((self.pe.rank(), self.number))?;
        self.check_enqueueable()?;
        self.check_enqueued()?;
        self.exec.prepare(false)?;
        // SAFETY: the caller's promise.
        let result = unsafe { self.exec.replay(&captured.graph) }.map_err(|error| ExecError::from(error).into());
        self.settled(result)?;
        self.steps += captured.steps;
        self.pending(captured.launched(), Direction::Forward)
    }
}
