//! Forward calls that save and the backward calls that follow.

use super::agreement::{Agreement, Direction};
use super::backward::BackwardStep;
use super::saved::{Origin, SavedHandle, SavedMemory};
use super::{Backward, ContextParallel, Forward, OpError, Saved, step};
use crate::error::InputError;
use crate::exec::Executor;
use crate::gradients::Upstream;
use crate::inputs::{Dims, Inputs};
use crate::plan::Plan;
use crate::world::{Pe, WorldError};

/// Largest age of a saved state that a note tells from others.
const OLDEST: u64 = (1 << 22) - 1;

impl Direction {
    /// A PE's note about a call: the direction, and backward how many calls ago the forward call was.
    pub(super) fn note(self, age: u64) -> u32 {
        (age.min(OLDEST) as u32) << 2 | if self == Direction::Forward { 1 } else { 2 }
    }

    fn of_note(note: u32) -> Self {
        if note & 3 == 1 { Direction::Forward } else { Direction::Backward }
    }
}

impl<X: Executor> ContextParallel<'_, X> {
    /// [`forward`](Self::forward), and what [`backward`](Self::backward) needs of it.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_saving(&mut self, plan: &Plan, inputs: &Inputs<'_>) -> Result<(Forward, Saved<X>), OpError> {
        let (forward, memory, call) = self.checked_forward(plan, inputs, true)?;
        let memory = memory.expect("a step that saves returns what it saved");
        let origin = self.origin(plan, inputs, &inputs.dims()?, call);
        Ok((forward, Saved { origin, memory }))
    }

    fn origin(&self, plan: &Plan, inputs: &Inputs<'_>, dims: &Dims, call: u64) -> Origin {
        let agreement = Agreement::new(plan, inputs, dims, &self.config);
        Origin { operation: self.number, rank: self.pe.rank(), call, agreement }
    }

    /// Gradients of a loss L with respect to this PE's inputs, from those with respect to its outputs. All PEs call it, with
    /// what the same forward call saved; `plan` and `inputs` are those of that call (tensors are not kept, so that
    /// they hold the same values is up to the caller).
    ///
    /// # Errors
    /// [`OpError`]. If plan, inputs, `saved` or `upstream` are at fault, nothing was launched; `saved` is gone nevertheless.
    /// ([`check_backward`](Self::check_backward) tells without taking it.) After any other error the operation is of no
    /// further use.
    pub fn backward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        saved: Saved<X>,
        upstream: &Upstream<'_>,
    ) -> Result<Backward, OpError> {
        let dims = self.checked_backward(plan, inputs, &saved, upstream)?;
        let Saved { origin, mut memory } = saved;
        // The number that this call is about to get.
        let age = self.pe.latest_call(self.pe.rank()) + 1 - origin.call;
        let call = self.pe.note_call(Direction::Backward.note(age));
        let result = self.run_backward(plan, inputs, &dims, &mut memory, upstream, (call, age));
        let backward = self.settled(result, Direction::Backward, call)?;
        memory.reuse(&mut self.exec);
        Ok(backward)
    }

    /// Everything that can be said against a backward call without another PE, before it is made.
    ///
    /// # Errors
    /// [`OpError`] as [`backward`](Self::backward) would return it before anything is launched.
    pub fn check_backward(
        &self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        saved: &Saved<X>,
        upstream: &Upstream<'_>,
    ) -> Result<(), OpError> {
        self.checked_backward(plan, inputs, saved, upstream).map(|_| ())
    }

    fn checked_backward(
        &self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        saved: &Saved<X>,
        upstream: &Upstream<'_>,
    ) -> Result<Dims, OpError> {
        self.usable()?;
        let dims = self.check(plan, inputs)?;
        saved.origin.check(&self.origin(plan, inputs, &dims, saved.origin.call))?;
        let ends = plan.ranks[self.pe.rank()].ends.len();
        check_upstream(upstream, inputs, &dims, ends, self.config.allow_nonfinite)?;
        Ok(dims)
    }

    /// Keeps `saved` in the operation until [`backward_held`](Self::backward_held) takes it, for callers that cannot own it.
    pub fn hold(&mut self, saved: Saved<X>) -> SavedHandle {
        // A call saves once.
        let handle = SavedHandle(saved.origin.call);
        self.held.insert(handle, saved);
        handle
    }

    /// [`backward`](Self::backward) with a saved state that the operation holds. A refused call leaves it there.
    ///
    /// # Errors
    /// [`OpError::SpentHandle`] if it is not there, or not any more; otherwise as [`backward`](Self::backward).
    pub fn backward_held(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        handle: SavedHandle,
        upstream: &Upstream<'_>,
    ) -> Result<Backward, OpError> {
        self.usable()?;
        let spent = OpError::SpentHandle { rank: self.pe.rank(), handle: handle.0 };
        let saved = self.held.get(&handle).ok_or_else(|| spent.clone())?;
        self.check_backward(plan, inputs, saved, upstream)?;
        let saved = self.held.remove(&handle).ok_or(spent)?;
        self.backward(plan, inputs, saved, upstream)
    }

    /// Drops a saved state that no backward call will use; whether it was there.
    pub fn release(&mut self, handle: SavedHandle) -> bool {
        self.held.remove(&handle).map(|saved| saved.memory.reuse(&mut self.exec)).is_some()
    }

    fn run_backward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        dims: &Dims,
        memory: &mut SavedMemory<X>,
        upstream: &Upstream<'_>,
        (call, age): (u64, u64),
    ) -> Result<Backward, OpError> {
        let layout = self.prepare(Direction::Backward, plan, inputs, dims, age)?;
        let mirrored = plan.mirrored();
        let step = step::Step {
            pe: self.pe,
            plan: &mirrored,
            inputs,
            dims,
            config: &self.config,
            layout,
            aligned: self.aligned,
        };
        let rank = self.pe.rank();
        let step = BackwardStep { step, forward_rank: &plan.ranks[rank], upstream };
        let channel = self.channels.get_mut(&(Direction::Backward, layout)).filter(|_| plan.lanes > 0);
        let backward = step.run(&mut self.exec, channel, memory)?;
        // Whose gradients these are made of. (A PE that is far ahead has overwritten its note; then it cannot be told.)
        let sources = mirrored.ranks[rank].receiving().flat_map(|(_, receive)| receive.from.iter().copied());
        for other in sources {
            let note = self.pe.noted_call(other, call).filter(|&note| Direction::of_note(note) == Direction::Backward);
            if let Some(theirs) = note.map(|note| u64::from(note >> 2)).filter(|&theirs| theirs != age.min(OLDEST)) {
                return Err(OpError::DifferentSaved { rank, other, number: call, mine: age, theirs });
            }
        }
        Ok(backward)
    }
}

/// Checks upstream gradients for `ends` final states against the inputs, and their values.
pub(crate) fn check_upstream(
    upstream: &Upstream<'_>,
    inputs: &Inputs<'_>,
    dims: &Dims,
    ends: usize,
    allow_nonfinite: bool,
) -> Result<(), InputError> {
    upstream.check(dims, inputs.state_layout, ends)?;
    let (found, want) = (upstream.d_o.dtype(), inputs.dtype());
    if found != want {
        return Err(InputError::Dtype { name: "do", found, want: format!("{want}, as o has") });
    }
    if allow_nonfinite { Ok(()) } else { upstream.check_values() }
}

/// If another PE's call of this number goes the other way, that is why `error` came about.
pub(super) fn name_different_calls(pe: &Pe, direction: Direction, number: u64, error: OpError) -> OpError {
    let waited = matches!(&error, OpError::Expired(_) | OpError::World(WorldError::Timeout { .. }));
    if !waited {
        return error;
    }
    let others = (0..pe.size()).filter(|&rank| rank != pe.rank());
    let noted = others.filter_map(|rank| Some((rank, Direction::of_note(pe.noted_call(rank, number)?))));
    match noted.into_iter().find(|(_, theirs)| *theirs != direction) {
        Some((other, theirs)) => OpError::DifferentCalls {
            rank: pe.rank(),
            other,
            number,
            mine: direction.to_string(),
            theirs: theirs.to_string(),
            error: Box::new(error),
        },
        None => error,
    }
}
