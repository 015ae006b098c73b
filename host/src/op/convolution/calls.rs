//! Calls whose results go into the caller's memory: what can be said against them, and their launches.

use std::sync::Arc;

use super::inputs::{self, Sizes};
use super::saved::Call;
use super::{
    Activation, ConvolutionGradientsOut, ConvolutionInput, ConvolutionOut, ConvolutionOutput, ConvolutionUpstream,
    Direction, SavedConvolution, ShortConvolution, ShortConvolutionError, check_trap, halo, layout, memory, results,
    step,
};
use crate::exec::{ExecError, Executor, Scratch};
use crate::op::agreement::Agreement;
use crate::op::channel::Channel;
use crate::op::launched::Launched;
use crate::op::out::Places;
use crate::op::{OpError, Report};
use crate::plan::Plan;

impl<X: Executor> ShortConvolution<'_, X> {
    /// [`forward`](Self::forward) into memory of the caller, one for each input. Tensors may lie on the host or where the operation
    /// computes, mixed; those on the device are used in place, and their values are not checked. The results are complete when it
    /// returns.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and [`InputError`](crate::error::InputError) if `out` does not fit the results, a tensor
    /// lies elsewhere or is not aligned, or a result shares memory with another tensor of the call.
    pub fn forward_into(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        activation: Activation,
        out: &mut [ConvolutionOut<'_>],
    ) -> Result<Report, ShortConvolutionError> {
        Ok(self.complete_forward(plan, inputs, activation, out, false)?.0)
    }

    /// [`forward_into`](Self::forward_into), and what [`backward`](Self::backward) needs of it.
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into).
    pub fn forward_saving_into(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        activation: Activation,
        out: &mut [ConvolutionOut<'_>],
    ) -> Result<(Report, SavedConvolution<X>), ShortConvolutionError> {
        let (report, saved) = self.complete_forward(plan, inputs, activation, out, true)?;
        Ok((report, saved.expect("a call that saves returns what it saved")))
    }

    fn complete_forward(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        activation: Activation,
        out: &mut [ConvolutionOut<'_>],
        save: bool,
    ) -> Result<(Report, Option<SavedConvolution<X>>), ShortConvolutionError> {
        let sizes = self.check_forward(plan, inputs, out, false)?;
        let result = self.launch_forward(plan, inputs, (&sizes, activation), out, save);
        let result = result.and_then(|(launched, saved)| {
            self.completed(&launched)?;
            memory::fetch_outputs(&mut self.exec, out)?;
            Ok((self.report(&launched)?, saved))
        });
        self.settled(result)
    }

    /// [`backward`](Self::backward) into memory of the caller, one for each input. Otherwise as
    /// [`forward_into`](Self::forward_into).
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into).
    pub fn backward_into(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        activation: Activation,
        saved: &SavedConvolution<X>,
        upstream: &[ConvolutionUpstream<'_>],
        out: &mut [ConvolutionGradientsOut<'_>],
    ) -> Result<Report, ShortConvolutionError> {
        let sizes = self.check_backward(plan, (inputs, activation), saved, upstream, out, false)?;
        let result = self.launch_backward(plan, inputs, (&sizes, activation), saved, upstream, out);
        let result = result.and_then(|launched| {
            self.completed(&launched)?;
            memory::fetch_gradients(&mut self.exec, out)?;
            self.report(&launched)
        });
        self.settled(result)
    }

    /// Zeros for the results of a forward call whose shapes fit.
    pub(super) fn outputs(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
    ) -> Result<Vec<ConvolutionOutput>, ShortConvolutionError> {
        let sizes = self.check(plan, inputs)?;
        let (rank, final_state) = (&plan.ranks[self.pe.rank()], self.config.final_state);
        Ok(inputs.iter().map(|input| ConvolutionOutput::zeros(input, &sizes, rank, final_state)).collect())
    }

    /// Everything that can be said against a forward call without another PE. If it is `in_place`, it returns before its work is
    /// done.
    pub(super) fn check_forward(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        out: &[ConvolutionOut<'_>],
        in_place: bool,
    ) -> Result<Sizes, ShortConvolutionError> {
        self.ready(in_place)?;
        let sizes = self.check(plan, inputs)?;
        inputs::check_count(out.len(), inputs.len())?;
        results::check_outputs(out, inputs, &sizes, &plan.ranks[self.pe.rank()], self.config.final_state)?;
        let places = Places { device: self.exec.location(), in_place };
        places.check(&inputs::tensors(inputs, &[]), &results::named_outputs(out))?;
        self.check_values(inputs, &[])?;
        Ok(sizes)
    }

    /// As [`check_forward`](Self::check_forward).
    pub(super) fn check_backward(
        &mut self,
        plan: &Plan,
        (inputs, activation): (&[ConvolutionInput<'_>], Activation),
        saved: &SavedConvolution<X>,
        upstream: &[ConvolutionUpstream<'_>],
        out: &[ConvolutionGradientsOut<'_>],
        in_place: bool,
    ) -> Result<Sizes, ShortConvolutionError> {
        self.ready(in_place)?;
        let sizes = self.check(plan, inputs)?;
        saved.check((self.number, self.pe.rank()), plan, &sizes, activation)?;
        let ends = plan.ranks[self.pe.rank()].ends.len();
        inputs::check_upstream(upstream, &sizes, ends, "that end on this PE")?;
        inputs::check_count(out.len(), inputs.len())?;
        results::check_gradients(out, inputs, &sizes)?;
        let places = Places { device: self.exec.location(), in_place };
        places.check(&inputs::tensors(inputs, upstream), &results::named_gradients(out))?;
        self.check_values(inputs, upstream)?;
        Ok(sizes)
    }

    /// Makes ready for a call, which is timed if it waits for its work.
    fn ready(&mut self, in_place: bool) -> Result<(), ShortConvolutionError> {
        self.check_enqueued()?;
        self.exec.prepare(!in_place)?;
        if self.exec.captures() && !in_place {
            return Err(OpError::Captures { rank: self.pe.rank() }.into());
        }
        Ok(())
    }

    fn check_values(
        &self,
        inputs: &[ConvolutionInput<'_>],
        upstream: &[ConvolutionUpstream<'_>],
    ) -> Result<(), ShortConvolutionError> {
        match self.config.allow_nonfinite {
            true => Ok(()),
            false => Ok(inputs::check_values(inputs, upstream)?),
        }
    }

    /// Refuses calls after a failure.
    pub(super) fn usable(&self) -> Result<(), ShortConvolutionError> {
        match &self.failed {
            Some(first) => Err(ShortConvolutionError::FailedBefore { rank: self.pe.rank(), first: first.clone() }),
            None => Ok(()),
        }
    }

    /// Everything that can be said against the inputs without another PE, but for their places and values.
    pub(super) fn check(&self, plan: &Plan, inputs: &[ConvolutionInput<'_>]) -> Result<Sizes, ShortConvolutionError> {
        self.usable()?;
        if plan.pes() != self.pe.size() {
            return Err(OpError::PlanSize { plan: plan.pes(), world: self.pe.size() }.into());
        }
        let sizes = inputs::check_share(inputs, &plan.ranks[self.pe.rank()])?;
        // Positions in a segment are signed.
        let largest = i32::MAX as usize;
        if sizes.b * sizes.t > largest {
            return Err(OpError::TooManyTokens { tokens: sizes.b * sizes.t, largest }.into());
        }
        Ok(sizes)
    }

    /// Notes a failure.
    pub(super) fn settled<T>(&mut self, result: Result<T, ShortConvolutionError>) -> Result<T, ShortConvolutionError> {
        result.inspect_err(|error| {
            // What was not there before a capture was asked for before anything was launched.
            if !matches!(error, ShortConvolutionError::Op(OpError::Exec(ExecError::NotWarm { .. }))) {
                self.failed = Some(error.to_string());
            }
        })
    }

    /// Waits for the end of a step.
    fn completed(&mut self, _: &Launched) -> Result<(), ShortConvolutionError> {
        let pe = self.pe;
        self.exec.wait(&|| pe.failed_peer().is_some())?;
        check_trap(&self.exec, pe)
    }

    /// What the latest step counted and timed, after its end.
    pub(super) fn report(&mut self, launched: &Launched) -> Result<Report, ShortConvolutionError> {
        let tables = self.table_bytes();
        Ok(launched.report(&mut self.exec, self.pe, &mut self.vitals, tables)?)
    }

    /// Launches a forward step, which saves or does not.
    pub(super) fn launch_forward(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        (sizes, activation): (&Sizes, Activation),
        out: &mut [ConvolutionOut<'_>],
        save: bool,
    ) -> Result<(Launched, Option<SavedConvolution<X>>), ShortConvolutionError> {
        let (key, call) = self.prepare(Direction::Forward, plan, sizes, activation)?;
        let (pe, config, vitals) = (self.pe, &self.config, self.vitals.signs());
        let before = plan.ranks[pe.rank()].receiving().count() * sizes.reach() * sizes.columns();
        let saved = if save {
            Some(SavedConvolution::new(&mut self.exec, before, (self.number, pe.rank()), call)?)
        } else {
            None
        };
        let before = match &saved {
            Some(saved) => saved.before(),
            None => self.exec.scratch(Scratch::ConvolutionBefore, before, sizes.dtype)?,
        };
        let step = step::Step { pe, plan, sizes, config, layout: key.1, inputs, activation, vitals };
        let channel = self.channels.get(&key);
        let launched = step.forward(&mut self.exec, &mut self.forward_tables, channel, out, before)?;
        self.steps += 1;
        Ok((launched, saved))
    }

    /// Launches a backward step.
    pub(super) fn launch_backward(
        &mut self,
        plan: &Plan,
        inputs: &[ConvolutionInput<'_>],
        (sizes, activation): (&Sizes, Activation),
        saved: &SavedConvolution<X>,
        upstream: &[ConvolutionUpstream<'_>],
        out: &mut [ConvolutionGradientsOut<'_>],
    ) -> Result<Launched, ShortConvolutionError> {
        let (key, _) = self.prepare(Direction::Backward, plan, sizes, activation)?;
        let (pe, config, vitals) = (self.pe, &self.config, self.vitals.signs());
        let step = step::Step { pe, plan, sizes, config, layout: key.1, inputs, activation, vitals };
        let (exec, tables) = (&mut self.exec, &mut self.backward_tables);
        let launched = step.backward(exec, tables, self.channels.get(&key), saved.before(), (upstream, out))?;
        self.steps += 1;
        Ok(launched)
    }

    /// Reaches agreement with the other PEs where the call is not like the last one, and makes the channel if halos flow:
    /// collective then. Returns the name of the channel, which may not be there, and what was agreed on.
    fn prepare(
        &mut self,
        direction: Direction,
        plan: &Plan,
        sizes: &Sizes,
        activation: Activation,
    ) -> Result<(super::ChannelKey, Arc<Call>), ShortConvolutionError> {
        let agreed = self.agreed.get(&direction).filter(|call| call.is(plan, sizes, activation));
        let call = match agreed {
            Some(call) => Arc::clone(call),
            None => {
                if self.exec.captures() {
                    return Err(ExecError::NotWarm { what: "the agreement of all PEs on a call" }.into());
                }
                let call = Arc::new(Call::new(plan, sizes, activation));
                let kind = ("the operation".to_owned(), "short convolution".to_owned());
                let fields = std::iter::once(kind).chain(call.fields()).collect();
                // What was saved is checked on each PE; any forward call's will do.
                Agreement::of(fields).reach(self.pe, direction, 0)?;
                self.agreed.insert(direction, Arc::clone(&call));
                call
            }
        };
        let lanes = halo::lanes(plan, direction);
        let layout = layout(plan.pes(), lanes, sizes, direction)?;
        let key = (direction, layout, sizes.channels.clone());
        if lanes > 0 && !self.channels.contains_key(&key) {
            if self.exec.captures() {
                return Err(ExecError::NotWarm { what: "the memory of messages between PEs" }.into());
            }
            let channel = Channel::new(&mut self.exec, self.pe, direction, layout, self.config.transport)?;
            self.channels.insert(key.clone(), channel);
        }
        Ok((key, call))
    }
}
