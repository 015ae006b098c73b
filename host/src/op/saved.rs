//! What a forward call leaves to its backward call.

use kernels_gpu::params::{Array, Cut, Records, Sizes, Tensor as Param};
use kernels_gpu::protocol::ChannelLayout;

use std::sync::Arc;

use super::agreement::{Agreement, Call};
use super::cuts::{self, CUT_WORDS};
use super::{Config, OpError};
use crate::exec::cpu::{Cpu, code};
use crate::exec::{ExecError, Executor, KeptMemory};
use crate::inputs::{Dims, Inputs};
use crate::plan::Plan;
use crate::tensor::Dtype;

/// What a forward call on one PE keeps for its backward call, which takes it: made by
/// [`forward_saving`](super::ContextParallel::forward_saving), and of no use to any other call, plan, operation or PE.
///
/// It owns memory of the executor's device, which goes back to the executor after the backward call. Inputs are
/// not kept: the backward call gets them again.
pub struct Saved<X: Executor = Cpu> {
    pub(super) origin: Origin,
    pub(super) memory: SavedMemory<X>,
}

impl<X: Executor> std::fmt::Debug for Saved<X> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Origin { rank, call, .. } = &self.origin;
        f.debug_struct("Saved").field("rank", rank).field("call", call).field("bytes", &self.bytes()).finish()
    }
}

impl<X: Executor> Saved<X> {
    /// Bytes of device memory that it holds.
    pub fn bytes(&self) -> usize {
        let SavedMemory { state_in, transitions, cuts, records } = &self.memory;
        let records = records.as_ref().map_or(0, |(operands, decay)| operands.bytes() + decay.bytes());
        state_in.bytes() + transitions.bytes() + cuts.bytes() + records
    }

    /// Number of the forward call on this PE, counted over all calls from 1.
    pub fn call(&self) -> u64 {
        self.origin.call
    }
}

/// Names a [`Saved`] that an operation [holds](super::ContextParallel::hold), for callers that cannot own it, such as
/// those in other languages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SavedHandle(pub u64);

/// Which call left it.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    /// The operation: unique in this process.
    pub operation: u64,
    pub rank: usize,
    pub call: u64,
    /// What was called for.
    pub what: Call,
    /// The same, to name differences.
    pub agreement: Arc<Agreement>,
}

impl Origin {
    /// Whether a backward call of operation number `operation` on PE `rank` may use it.
    pub fn check(
        &self,
        (operation, rank): (u64, usize),
        plan: &Plan,
        (inputs, dims): (&Inputs<'_>, &Dims),
        config: &Config,
    ) -> Result<(), OpError> {
        let mismatch = |what: &str, saved: String, call: String| {
            Err(OpError::ForeignSaved { rank, what: what.to_owned(), saved, call })
        };
        if self.rank != rank {
            return mismatch("the PE", self.rank.to_string(), rank.to_string());
        }
        if self.operation != operation {
            return mismatch("the operation", format!("number {}", self.operation), format!("number {operation}"));
        }
        if self.what.is(plan, inputs, dims) {
            return Ok(());
        }
        match self.agreement.first_difference(&Agreement::new(plan, inputs, dims, config)) {
            Some((what, saved, call)) => mismatch(&what, saved, call),
            None => Ok(()),
        }
    }
}

/// The memory of a [`Saved`].
pub(super) struct SavedMemory<X: Executor> {
    /// f32 `[lanes * HV, V, K]`: the states before receiving segments.
    pub state_in: Kept<X>,
    /// `[lanes * HV, K, K]` in the type of the wire, f32 if there are parts: M^T of receiving segments and parts; empty where no
    /// gradient is passed on with it.
    pub transitions: Kept<X>,
    /// What the forward step noted of the cut of transitions: which blocks of M are empty and not kept. Of
    /// [`kernels_gpu::params::Cut`].
    pub cuts: Kept<X>,
    /// Operands and decays of all chunks, unless they are computed again.
    pub records: Option<(Kept<X>, Kept<X>)>,
}

impl<X: Executor> SavedMemory<X> {
    /// The records that were kept.
    pub fn records(&mut self, sizes: Sizes) -> Option<Records> {
        let (operands, decay) = self.records.as_mut()?;
        Some(Records { operands: operands.param(), decay: decay.param(), factors: Param::absent(), sizes })
    }

    /// The forward step's notes of the cut, for kernels.
    pub fn cuts(&mut self) -> Array {
        let Param { addr, len, .. } = self.cuts.param();
        Array { addr, len: len / CUT_WORDS as u64 }
    }

    /// Takes the notes over from the table of the latest step, in the order of launches.
    pub fn keep_cuts(&mut self, exec: &mut X, table: Array) -> Result<(), ExecError> {
        if self.cuts.len > 0 {
            let to = self.cuts();
            // SAFETY: both are tables of this many notes on the device of the executor; the copy comes after the kernel that
            // writes the one, and before any that reads the other.
            unsafe { exec.copy(to.addr, table.addr, table.len as usize * size_of::<Cut>())? };
        }
        Ok(())
    }

    /// Which blocks of M are empty, by receiving row of the forward step, after all launches so far: bit i for the i-th.
    pub fn empty(&mut self, exec: &mut X, layout: &ChannelLayout) -> Result<Vec<u32>, ExecError> {
        let cuts = cuts::read(exec, &mut self.cuts.memory, 0, self.cuts.len / CUT_WORDS)?;
        Ok(cuts::empty(&cuts, layout))
    }

    /// Gives the memory back to the executor.
    pub fn reuse(self, exec: &mut X) {
        let (operands, decay) = self.records.unzip();
        for kept in
            [Some(self.state_in), Some(self.transitions), Some(self.cuts), operands, decay].into_iter().flatten()
        {
            exec.reuse(kept.memory);
        }
    }
}

/// A tensor in kept memory.
pub(super) struct Kept<X: Executor> {
    memory: X::Memory,
    len: usize,
    dtype: Dtype,
}

impl<X: Executor> Kept<X> {
    pub fn new(exec: &mut X, len: usize, dtype: Dtype) -> Result<Self, ExecError> {
        Ok(Self { memory: exec.keep(len * dtype.size())?, len, dtype })
    }

    fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// As kernels take it; absent if it is empty.
    pub fn param(&mut self) -> Param {
        if self.len == 0 { Param::absent() } else { Param::new(self.memory.address(), self.len, code(self.dtype)) }
    }
}
