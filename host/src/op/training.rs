//! Forward calls that save and the backward calls that follow.

use super::agreement::Direction;
use super::backward::{self, BackwardStep};
use super::launched::Launched;
use super::out::{Places, check_gradients};
use super::parts::Parts;
use super::saved::{Origin, SavedHandle, SavedMemory};
use super::{Backward, BackwardOut, ContextParallel, Done, Forward, ForwardOut, OpError, Saved, Values, step};
use crate::error::InputError;
use crate::exec::Executor;
use crate::gradients::{Gradients, Upstream};
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

    pub(super) fn of_note(note: u32) -> Self {
        if note & 3 == 1 { Direction::Forward } else { Direction::Backward }
    }
}

impl<X: Executor> ContextParallel<'_, X> {
    /// [`forward`](Self::forward), and what [`backward`](Self::backward) needs of it.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_saving(&mut self, plan: &Plan, inputs: &Inputs<'_>) -> Result<(Forward, Saved<X>), OpError> {
        let mut results = self.results(plan, inputs)?;
        let (Done { report, trace }, saved) = self.forward_saving_into(plan, inputs, &mut results.out())?;
        Ok((Forward { report, trace, ..results }, saved))
    }

    /// [`forward_saving`](Self::forward_saving) into memory of the caller.
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into).
    pub fn forward_saving_into(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        out: &mut ForwardOut<'_>,
    ) -> Result<(Done, Saved<X>), OpError> {
        let (done, memory, call) = self.checked_forward(plan, inputs, out, true)?;
        Ok((done, self.saved(memory, call)))
    }

    /// What the forward call of number `call`, the latest one, leaves.
    pub(super) fn saved(&self, memory: Option<SavedMemory<X>>, call: u64) -> Saved<X> {
        let memory = memory.expect("a step that saves returns what it saved");
        let (what, agreement) = self.agreed[&Direction::Forward].clone();
        Saved { origin: Origin { operation: self.number, rank: self.pe.rank(), call, what, agreement }, memory }
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
        self.check_backward(plan, inputs, &saved, upstream)?;
        let mut gradients = Gradients::zeros(inputs);
        let Done { report, trace } = self.backward_into(plan, inputs, saved, upstream, &mut gradients.views_mut())?;
        Ok(Backward { gradients, report, trace })
    }

    /// [`backward`](Self::backward) into memory of the caller, which has room for each gradient that there is. Tensors may lie on
    /// the host or where the operation computes, mixed. The gradients are complete when it returns.
    ///
    /// # Errors
    /// As [`backward`](Self::backward), and as [`forward_into`](Self::forward_into) for `out`.
    pub fn backward_into(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        saved: Saved<X>,
        upstream: &Upstream<'_>,
        out: &mut BackwardOut<'_>,
    ) -> Result<Done, OpError> {
        let dims = self.check_backward_into(plan, inputs, &saved, upstream, out, false)?;
        let Saved { origin, mut memory } = saved;
        let mut made = self.note_backward(&origin);
        let launched = self.launch_backward(plan, inputs, &dims, &mut memory, upstream, out, &mut made);
        let result = launched.and_then(|launched| {
            launched.complete(&mut self.exec, self.pe)?;
            made.check_sources(self.pe)?;
            backward::fetch(&mut self.exec, out)?;
            self.done(&launched)
        });
        let done = self.settled(result, Direction::Backward, made.call)?;
        memory.reuse(&mut self.exec);
        Ok(done)
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
        self.check_values(inputs)?;
        saved.origin.check((self.number, self.pe.rank()), plan, (inputs, &dims), &self.config)?;
        let ends = plan.ranks[self.pe.rank()].ends.len();
        let unchecked = self.config.allow_nonfinite || self.config.values == Values::Trust;
        check_upstream(upstream, inputs, &dims, ends, unchecked)?;
        Ok(dims)
    }

    /// As [`check_backward`](Self::check_backward), and whether the gradients can go to `out`.
    pub(super) fn check_backward_into(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        saved: &Saved<X>,
        upstream: &Upstream<'_>,
        out: &BackwardOut<'_>,
        in_place: bool,
    ) -> Result<Dims, OpError> {
        self.ready(in_place)?;
        let dims = self.checked_backward(plan, inputs, saved, upstream)?;
        check_gradients(out, inputs)?;
        let mut read = inputs.tensors();
        read.push(("do", &upstream.d_o));
        read.extend(upstream.d_final_state.as_ref().map(|dht| ("dht", dht)));
        Places { device: self.exec.location(), in_place }.check(&read, &out.named(inputs))?;
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

    /// Notes a backward call for other PEs to see.
    pub(super) fn note_backward(&self, origin: &Origin) -> Made {
        // The number that this call is about to get.
        let age = self.pe.latest_call(self.pe.rank()) + 1 - origin.call;
        Made { call: self.pe.note_call(Direction::Backward.note(age)), age, sources: Vec::new() }
    }

    /// Launches the backward step of a call that was noted.
    #[allow(clippy::too_many_arguments)] // the call's own, and two of this module
    pub(super) fn launch_backward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        dims: &Dims,
        memory: &mut SavedMemory<X>,
        upstream: &Upstream<'_>,
        out: &mut BackwardOut<'_>,
        made: &mut Made,
    ) -> Result<Launched, OpError> {
        let layout = self.prepare(Direction::Backward, plan, inputs, dims, made.age)?;
        let mirrored = plan.mirrored();
        let rank = self.pe.rank();
        made.sources = mirrored.ranks[rank].receiving().flat_map(|(_, receive)| receive.from.iter().copied()).collect();
        let step = step::Step {
            parts: &Parts::default(),
            pe: self.pe,
            plan: &mirrored,
            inputs,
            dims,
            config: &self.config,
            layout,
            vitals: self.vitals.signs(),
            aligned: self.aligned,
        };
        let step = step::Step { parts: &step.cut(&self.exec, &plan.ranks[rank]), ..step };
        let step = BackwardStep { step, forward_rank: &plan.ranks[rank], upstream };
        let channel = self.channels.get_mut(&(Direction::Backward, layout)).filter(|_| plan.lanes > 0);
        let launched = step.launch(&mut self.exec, &mut self.backward_tables, channel, memory, out)?;
        self.steps += 1;
        Ok(launched)
    }
}

/// A backward call that was made.
#[derive(Clone, Debug)]
pub(super) struct Made {
    pub call: u64,
    /// How many calls ago the forward call was.
    pub age: u64,
    /// Whose gradients this PE's are made of.
    pub sources: Vec<usize>,
}

impl Made {
    /// Whether those PEs went backward with what the same forward call saved, once the step has ended. (A PE that is far ahead
    /// has overwritten its note; then it cannot be told.)
    pub fn check_sources(&self, pe: &Pe) -> Result<(), OpError> {
        let (rank, number, mine) = (pe.rank(), self.call, self.age);
        for &other in &self.sources {
            let note = pe.noted_call(other, number).filter(|&note| Direction::of_note(note) == Direction::Backward);
            if let Some(theirs) = note.map(|note| u64::from(note >> 2)).filter(|&theirs| theirs != mine.min(OLDEST)) {
                return Err(OpError::DifferentSaved { rank, other, number, mine, theirs });
            }
        }
        Ok(())
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
