//! One operation of a world on its device, and what it keeps for backward calls.

use std::collections::BTreeMap;

use deltalink::exec::Executor;
use deltalink::gradients::Upstream;
use deltalink::inputs::Inputs;
use deltalink::op::{BackwardOut, ContextParallel, ForwardOut, OpError, Saved};
use deltalink::plan::Plan;
use deltalink::world::Pe;

/// Attention on a device.
pub struct Attention<'pe, X: Executor> {
    pe: &'pe Pe,
    pub operation: ContextParallel<'pe, X>,
    /// By the number of the call that left it.
    saved: BTreeMap<u64, Saved<X>>,
}

/// Names what a forward call saved: the number of the call.
#[derive(Clone, Copy, Debug)]
pub struct SavedCall {
    pub call: u64,
    /// Device memory that it takes.
    pub bytes: usize,
}

impl<'pe, X: Executor> Attention<'pe, X> {
    pub fn new(pe: &'pe Pe, operation: ContextParallel<'pe, X>) -> Self {
        Self { pe, operation, saved: BTreeMap::new() }
    }

    /// A forward call, which saves if asked to. Its work is only enqueued where that can be; what goes wrong there shows at a later
    /// call.
    ///
    /// # Errors
    /// As the operation's.
    pub fn forward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        out: &mut ForwardOut<'_>,
        save: bool,
    ) -> Result<Option<SavedCall>, OpError> {
        let operation = &mut self.operation;
        let saved = if save {
            Some(match operation.enqueue_forward_saving(plan, inputs, out) {
                Err(OpError::CannotEnqueue { .. }) => operation.forward_saving_into(plan, inputs, out)?.1,
                enqueued => enqueued?.1,
            })
        } else {
            match operation.enqueue_forward(plan, inputs, out) {
                Err(OpError::CannotEnqueue { .. }) => drop(operation.forward_into(plan, inputs, out)?),
                enqueued => drop(enqueued?),
            }
            None
        };
        Ok(saved.map(|saved| {
            let found = SavedCall { call: saved.call(), bytes: saved.bytes() };
            self.saved.insert(found.call, saved);
            found
        }))
    }

    /// A backward call with what call number `call` saved, which is used up unless the call is refused. `complete`: the results
    /// are there when it returns.
    ///
    /// # Errors
    /// [`OpError::SpentHandle`] if there is nothing of that call, otherwise as the operation's.
    pub fn backward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        call: u64,
        upstream: &Upstream<'_>,
        out: &mut BackwardOut<'_>,
        complete: bool,
    ) -> Result<(), OpError> {
        let spent = OpError::SpentHandle { rank: self.pe.rank(), handle: call };
        let saved = self.saved.remove(&call).ok_or(spent)?;
        if let Err(refused) = self.operation.check_backward(plan, inputs, &saved, upstream) {
            self.saved.insert(call, saved);
            return Err(refused);
        }
        // Whether a call can be enqueued does not change, and its forward call has told.
        if complete || self.operation.config().mode == deltalink::op::Mode::Bulk || !self.enqueues() {
            self.operation.backward_into(plan, inputs, saved, upstream, out)?;
        } else {
            drop(self.operation.enqueue_backward(plan, inputs, saved, upstream, out)?);
        }
        Ok(())
    }

    /// Whether steps do without the host.
    fn enqueues(&self) -> bool {
        self.pe.size() == 1 || self.operation.executor().waits() == deltalink::exec::Waits::Kernels
    }

    /// Drops what call number `call` saved; it may be gone.
    pub fn release(&mut self, call: u64) {
        if let Some(saved) = self.saved.remove(&call) {
            let handle = self.operation.hold(saved);
            self.operation.release(handle);
        }
    }
}
