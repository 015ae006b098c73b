//! The operations of a world on its device, and what they keep for backward calls.

use std::collections::BTreeMap;

use deltalink::exec::Executor;
use deltalink::gradients::Upstream;
use deltalink::inputs::Inputs;
use deltalink::op::convolution::{
    Activation, ConvolutionGradientsOut, ConvolutionInput, ConvolutionOut, ConvolutionUpstream, SavedConvolution,
    ShortConvolution, ShortConvolutionError,
};
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

/// Names what a forward call of an operation saved: the number of the call.
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
        if complete
            || self.operation.config().mode == deltalink::op::Mode::Bulk
            || !enqueues(self.pe, self.operation.executor())
        {
            self.operation.backward_into(plan, inputs, saved, upstream, out)?;
        } else {
            drop(self.operation.enqueue_backward(plan, inputs, saved, upstream, out)?);
        }
        Ok(())
    }

    /// Drops what call number `call` saved; it may be gone.
    pub fn release(&mut self, call: u64) {
        if let Some(saved) = self.saved.remove(&call) {
            let handle = self.operation.hold(saved);
            self.operation.release(handle);
        }
    }
}

/// Whether steps do without the host.
fn enqueues<X: Executor>(pe: &Pe, executor: &X) -> bool {
    pe.size() == 1 || executor.waits() == deltalink::exec::Waits::Kernels
}

/// The short convolution on a device.
pub struct Convolution<'pe, X: Executor> {
    pe: &'pe Pe,
    pub operation: ShortConvolution<'pe, X>,
    /// By the number of the call that left it. It serves any number of backward calls.
    saved: BTreeMap<u64, SavedConvolution<X>>,
    calls: u64,
}

impl<'pe, X: Executor> Convolution<'pe, X> {
    pub fn new(pe: &'pe Pe, operation: ShortConvolution<'pe, X>) -> Self {
        Self { pe, operation, saved: BTreeMap::new(), calls: 0 }
    }

    /// As [`Attention::forward`].
    ///
    /// # Errors
    /// As the operation's.
    pub fn forward(
        &mut self,
        plan: &Plan,
        (inputs, activation): (&[ConvolutionInput<'_>], Activation),
        out: &mut [ConvolutionOut<'_>],
        save: bool,
    ) -> Result<Option<SavedCall>, ShortConvolutionError> {
        let enqueues = enqueues(self.pe, self.operation.executor());
        let operation = &mut self.operation;
        let saved = match (save, enqueues) {
            (true, true) => operation.enqueue_forward_saving(plan, inputs, activation, out)?.1,
            (true, false) => operation.forward_saving_into(plan, inputs, activation, out)?.1,
            (false, true) => {
                drop(operation.enqueue_forward(plan, inputs, activation, out)?);
                return Ok(None);
            }
            (false, false) => {
                operation.forward_into(plan, inputs, activation, out)?;
                return Ok(None);
            }
        };
        self.calls += 1;
        let found = SavedCall { call: self.calls, bytes: saved.bytes() };
        self.saved.insert(found.call, saved);
        Ok(Some(found))
    }

    /// A backward call with what call number `call` saved. `complete`: the results are there when it returns.
    ///
    /// # Errors
    /// [`OpError::SpentHandle`] if there is nothing of that call, otherwise as the operation's.
    pub fn backward(
        &mut self,
        plan: &Plan,
        (inputs, activation): (&[ConvolutionInput<'_>], Activation),
        call: u64,
        (upstream, out): (&[ConvolutionUpstream<'_>], &mut [ConvolutionGradientsOut<'_>]),
        complete: bool,
    ) -> Result<(), ShortConvolutionError> {
        let saved = self.saved.get(&call).ok_or(OpError::SpentHandle { rank: self.pe.rank(), handle: call })?;
        if complete || !enqueues(self.pe, self.operation.executor()) {
            self.operation.backward_into(plan, inputs, activation, saved, upstream, out)?;
        } else {
            drop(self.operation.enqueue_backward(plan, inputs, activation, saved, upstream, out)?);
        }
        Ok(())
    }

    /// Drops what call number `call` saved; it may be gone.
    pub fn release(&mut self, call: u64) {
        if let Some(saved) = self.saved.remove(&call) {
            self.operation.release(saved);
        }
    }
}
