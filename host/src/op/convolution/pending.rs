//! Calls that only put their work behind what the device has to do, and return. See [`crate::op`].

use super::{
    Activation, ConvolutionGradientsOut, ConvolutionInput, ConvolutionOut, ConvolutionUpstream, Direction,
    SavedConvolution, ShortConvolution, ShortConvolutionError, check_trap,
};
use crate::exec::Executor;
use crate::op::launched::Launched;
use crate::op::pending::{enqueueable, reached, until};
use crate::op::{Mode, OpError, Pending, Report};
use crate::plan::Plan;

impl<X: Executor> ShortConvolution<'_, X> {
    /// [`forward_into`](Self::forward_into) that returns when its launches are made. All tensors lie where the operation computes;
    /// what holds for their memory (see [`TensorView::from_raw`](crate::tensor::TensorView::from_raw)) holds until the work has
    /// ended. On the CPU it has ended already.
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into), for what is known by then; [`OpError::CannotEnqueue`] where PEs that share a device
    /// wait for each other on the host.
    pub fn enqueue_forward(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        activation: Activation,
        out: &mut [ConvolutionOut<'_>],
    ) -> Result<Pending<X>, ShortConvolutionError> {
        Ok(self.enqueued_forward(plan, inputs, activation, out, false)?.0)
    }

    /// [`forward_saving_into`](Self::forward_saving_into) that returns when its launches are made.
    ///
    /// # Errors
    /// As [`enqueue_forward`](Self::enqueue_forward).
    pub fn enqueue_forward_saving(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        activation: Activation,
        out: &mut [ConvolutionOut<'_>],
    ) -> Result<(Pending<X>, SavedConvolution<X>), ShortConvolutionError> {
        let (pending, saved) = self.enqueued_forward(plan, inputs, activation, out, true)?;
        Ok((pending, saved.expect("a call that saves returns what it saved")))
    }

    fn enqueued_forward(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        activation: Activation,
        out: &mut [ConvolutionOut<'_>],
        save: bool,
    ) -> Result<(Pending<X>, Option<SavedConvolution<X>>), ShortConvolutionError> {
        self.check_enqueueable()?;
        let sizes = self.check_forward(plan, inputs, out, true)?;
        let result = self.launch_forward(plan, inputs, (&sizes, activation), out, save);
        let result = result.and_then(|(launched, saved)| Ok((self.pending(launched, Direction::Forward)?, saved)));
        self.settled(result)
    }

    /// [`backward_into`](Self::backward_into) that returns when its launches are made. `saved` may be
    /// [released](Self::release) at once: whoever gets its memory next uses it after this step.
    ///
    /// # Errors
    /// As [`backward_into`](Self::backward_into), for what is known by then, and as [`enqueue_forward`](Self::enqueue_forward).
    pub fn enqueue_backward(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        activation: Activation,
        saved: &SavedConvolution<X>,
        upstream: &[ConvolutionUpstream<'_>],
        out: &mut [ConvolutionGradientsOut<'_>],
    ) -> Result<Pending<X>, ShortConvolutionError> {
        self.check_enqueueable()?;
        let sizes = self.check_backward(plan, (inputs, activation), saved, upstream, out, true)?;
        let result = self.launch_backward(plan, inputs, (&sizes, activation), saved, upstream, out);
        let result = result.and_then(|launched| self.pending(launched, Direction::Backward));
        self.settled(result)
    }

    /// Whether steps can do without the host.
    pub(super) fn check_enqueueable(&self) -> Result<(), OpError> {
        enqueueable(&self.exec, self.pe, Mode::Overlap)
    }

    pub(super) fn pending(
        &mut self,
        launched: Launched,
        direction: Direction,
    ) -> Result<Pending<X>, ShortConvolutionError> {
        let end = if self.exec.captures() { None } else { Some(self.exec.mark()?) };
        // The numbers of calls are those of KDA and GDN.
        Ok(Pending { end, launched, step: self.steps, operation: self.number, direction, call: 0, made: None })
    }

    /// Refuses to go on if something is known to have failed, an enqueued step or another PE. Every call asks this first.
    ///
    /// # Errors
    /// [`ShortConvolutionError`]: the failure, and [`ShortConvolutionError::FailedBefore`] from then on.
    pub fn check_enqueued(&mut self) -> Result<(), ShortConvolutionError> {
        self.usable()?;
        let result = check_trap(&self.exec, self.pe);
        self.settled(result)
    }

    /// Whether the work of `pending` has ended, well.
    ///
    /// # Errors
    /// [`ShortConvolutionError`] if it has not ended well, or never will because it was captured ([`OpError::Captured`]). The
    /// operation is of no further use then, but after [`OpError::Captured`] and [`OpError::ForeignPending`].
    pub fn poll(&mut self, pending: &Pending<X>) -> Result<bool, ShortConvolutionError> {
        let end = pending.end((self.pe.rank(), self.number))?;
        self.usable()?;
        let result = match reached(&mut self.exec, self.pe, end) {
            Ok(false) => return Ok(false),
            Ok(true) => check_trap(&self.exec, self.pe),
            Err(error) => Err(error.into()),
        };
        self.settled(result)?;
        Ok(true)
    }

    /// Waits until the work of `pending` has ended. Waits inside kernels are bounded, so this one is.
    ///
    /// The report has no times, since events between launches would cost some; and it counts messages and waits only if no later
    /// step of the operation was enqueued meanwhile.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn wait(&mut self, pending: Pending<X>) -> Result<Report, ShortConvolutionError> {
        until(|| self.poll(&pending))?;
        if pending.step < self.steps {
            return Ok(pending.overtaken(&self.exec));
        }
        let result = self.report(&pending.launched);
        self.settled(result)
    }
}
