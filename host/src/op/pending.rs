//! Calls that only put their work behind what the device has to do, and return.
//!
//! Kernels find tensors where they lie, so nothing is copied and the host waits for nothing: in a program that keeps its tensors
//! on a GPU the calls of a whole training step can be made while the GPU is still busy with the first. What went wrong shows when
//! a [`Pending`] is asked, and at the next call of the operation at latest: kernels leave a record where the host can look at
//! any time, and after one has given up no later one of the operation waits.

use std::time::Duration;

use super::agreement::Direction;
use super::launched::{Launched, check_trap};
use super::training::Made;
use super::{BackwardOut, ContextParallel, ForwardOut, Mode, OpError, Report, Saved};
use crate::exec::cpu::Cpu;
use crate::exec::{ExecError, Executor, Waits};
use crate::gradients::Upstream;
use crate::inputs::Inputs;
use crate::plan::Plan;
use crate::world::{Pe, WorldError};

/// Polls without a pause before the host sleeps between two.
const SPINS: u32 = 1000;
/// How long it sleeps then.
const PAUSE: Duration = Duration::from_micros(50);

/// A call whose work was enqueued. It may be dropped: the work goes on, and a failure shows at a later call.
#[must_use = "a failure shows when it is asked, or at the operation's next call"]
pub struct Pending<X: Executor = Cpu> {
    /// Behind the call's work; none if it was captured instead of being done.
    pub(super) end: Option<X::Mark>,
    pub(super) launched: Launched,
    /// Number of the step and of the operation.
    pub(super) step: u64,
    pub(super) operation: u64,
    pub(super) direction: Direction,
    pub(super) call: u64,
    pub(super) made: Option<Made>,
}

impl<X: Executor> std::fmt::Debug for Pending<X> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("call", &self.call).field("direction", &self.direction).finish()
    }
}

impl<X: Executor> Pending<X> {
    /// Behind its work, which an operation is asked for; not if that is another operation's, or was captured.
    pub(super) fn end(&self, (rank, operation): (usize, u64)) -> Result<&X::Mark, OpError> {
        if self.operation != operation {
            return Err(OpError::ForeignPending { rank, pending: self.operation, operation });
        }
        self.end.as_ref().ok_or(OpError::Captured { rank })
    }

    /// What is known of its step after a later one: messages and waits that were counted are not its own any more.
    pub(super) fn overtaken(&self, exec: &X) -> Report {
        Report { tokens: self.launched.tokens, waits: exec.waits(), ..Report::default() }
    }
}

/// Whether the device has done all before `end`. Once a PE failed waits inside kernels are given up: what they wait for may never
/// come.
pub(super) fn reached<X: Executor>(exec: &mut X, pe: &Pe, end: &X::Mark) -> Result<bool, ExecError> {
    if pe.failed_peer().is_some() {
        exec.give_up();
    }
    exec.reached(end)
}

/// Whether steps in `mode` can do without the host.
pub(super) fn enqueueable<X: Executor>(exec: &X, pe: &Pe, mode: Mode) -> Result<(), OpError> {
    let why = match (mode, exec.waits()) {
        (Mode::Bulk, _) => "in bulk mode the host exchanges summaries between the kernels",
        (_, Waits::Host) if pe.size() > 1 => {
            "PEs that share a device wait for each other on the host between the kernels"
        }
        _ => {
            // Its messages would be waited for in vain.
            return match pe.failed_peer() {
                Some((rank, message)) => Err(WorldError::PeFailed { rank, message }.into()),
                None => Ok(()),
            };
        }
    };
    Err(OpError::CannotEnqueue { why })
}

/// Asks until `ended` says yes, without a pause at first.
pub(super) fn until<E>(mut ended: impl FnMut() -> Result<bool, E>) -> Result<(), E> {
    let mut polls = 0;
    while !ended()? {
        match polls {
            SPINS => std::thread::sleep(PAUSE),
            _ => {
                polls += 1;
                std::thread::yield_now();
            }
        }
    }
    Ok(())
}

impl<X: Executor> ContextParallel<'_, X> {
    /// [`forward_into`](Self::forward_into) that returns when its launches are made. All tensors lie where the operation computes;
    /// what holds for their memory (see [`TensorView::from_raw`](crate::tensor::TensorView::from_raw)) holds until the work has
    /// ended. On the CPU it has ended already.
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into), for what is known by then; [`OpError::CannotEnqueue`] in bulk mode and where PEs
    /// that share a device wait for each other on the host.
    pub fn enqueue_forward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        out: &mut ForwardOut<'_>,
    ) -> Result<Pending<X>, OpError> {
        Ok(self.enqueued_forward(plan, inputs, out, false)?.0)
    }

    /// [`forward_saving_into`](Self::forward_saving_into) that returns when its launches are made.
    ///
    /// # Errors
    /// As [`enqueue_forward`](Self::enqueue_forward).
    pub fn enqueue_forward_saving(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        out: &mut ForwardOut<'_>,
    ) -> Result<(Pending<X>, Saved<X>), OpError> {
        let (pending, saved) = self.enqueued_forward(plan, inputs, out, true)?;
        Ok((pending, saved.expect("a call that saves returns what it saved")))
    }

    fn enqueued_forward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        out: &mut ForwardOut<'_>,
        save: bool,
    ) -> Result<(Pending<X>, Option<Saved<X>>), OpError> {
        self.check_enqueueable()?;
        let dims = self.check_forward(plan, inputs, out, true)?;
        let (direction, call) = (Direction::Forward, self.pe.note_call(Direction::Forward.note(0)));
        let result = self.launch_forward(plan, inputs, &dims, out, save);
        let result =
            result.and_then(|(launched, memory)| Ok((self.pending(launched, (direction, call), None)?, memory)));
        let (pending, memory) = self.settled(result, direction, call)?;
        Ok((pending, save.then(|| self.saved(memory, call))))
    }

    /// [`backward_into`](Self::backward_into) that returns when its launches are made.
    ///
    /// # Errors
    /// As [`backward_into`](Self::backward_into), for what is known by then, and as [`enqueue_forward`](Self::enqueue_forward).
    pub fn enqueue_backward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        saved: Saved<X>,
        upstream: &Upstream<'_>,
        out: &mut BackwardOut<'_>,
    ) -> Result<Pending<X>, OpError> {
        self.check_enqueueable()?;
        let dims = self.check_backward_into(plan, inputs, &saved, upstream, out, true)?;
        let Saved { origin, mut memory } = saved;
        let mut made = self.note_backward(&origin);
        let (direction, call) = (Direction::Backward, made.call);
        let result = self.launch_backward(plan, inputs, &dims, &mut memory, upstream, out, &mut made);
        let result = result.and_then(|launched| self.pending(launched, (direction, call), Some(made)));
        let pending = self.settled(result, direction, call)?;
        // Whoever gets the memory next uses it after this step, in the order of the device's work.
        memory.reuse(&mut self.exec);
        Ok(pending)
    }

    /// Whether steps can do without the host.
    pub(super) fn check_enqueueable(&self) -> Result<(), OpError> {
        enqueueable(&self.exec, self.pe, self.config.mode)
    }

    pub(super) fn pending(
        &mut self,
        launched: Launched,
        (direction, call): (Direction, u64),
        made: Option<Made>,
    ) -> Result<Pending<X>, OpError> {
        let end = if self.exec.captures() { None } else { Some(self.exec.mark()?) };
        self.enqueued_heads = Some(launched.hv);
        Ok(Pending { end, launched, step: self.steps, operation: self.number, direction, call, made })
    }

    /// Refuses to go on if something is known to have failed, an enqueued step or another PE. Every call asks this first.
    ///
    /// # Errors
    /// [`OpError`]: the failure, and [`OpError::FailedBefore`] from then on.
    pub fn check_enqueued(&mut self) -> Result<(), OpError> {
        self.usable()?;
        let Some(hv) = self.enqueued_heads else { return Ok(()) };
        let call = self.pe.latest_call(self.pe.rank());
        let result = check_trap(&self.exec, self.pe, hv);
        // Which way the failed step went is not known any more; the names of calls are those of the latest.
        let note = self.pe.noted_call(self.pe.rank(), call);
        let direction = note.map_or(Direction::Forward, Direction::of_note);
        self.settled(result, direction, call)
    }

    /// Whether the work of `pending` has ended, well.
    ///
    /// # Errors
    /// [`OpError`] if it has not ended well, or never will because it was captured ([`OpError::Captured`]). The operation is of
    /// no further use then, but after [`OpError::Captured`] and [`OpError::ForeignPending`].
    pub fn poll(&mut self, pending: &Pending<X>) -> Result<bool, OpError> {
        let end = pending.end((self.pe.rank(), self.number))?;
        self.usable()?;
        let result = match reached(&mut self.exec, self.pe, end) {
            Ok(false) => return Ok(false),
            Ok(true) => check_trap(&self.exec, self.pe, pending.launched.hv),
            Err(error) => Err(error.into()),
        };
        let result = result.and_then(|()| pending.made.as_ref().map_or(Ok(()), |made| made.check_sources(self.pe)));
        self.settled(result, pending.direction, pending.call)?;
        Ok(true)
    }

    /// Waits until the work of `pending` has ended. Waits inside kernels are bounded, so this one is.
    ///
    /// The report has no times, since events between launches would cost some; and it counts messages and waits only if no later
    /// step of the operation was enqueued meanwhile.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn wait(&mut self, pending: Pending<X>) -> Result<Report, OpError> {
        until(|| self.poll(&pending))?;
        if pending.step < self.steps {
            return Ok(pending.overtaken(&self.exec));
        }
        let tables = self.table_bytes();
        let result = pending.launched.report(&mut self.exec, self.pe, &mut self.vitals, tables);
        self.settled(result, pending.direction, pending.call)
    }
}
