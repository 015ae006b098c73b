//! What tells one call from another, and what a forward call leaves to its backward calls.

use std::sync::Arc;

use kernels_gpu::params::Tensor as Param;

use super::inputs::Sizes;
use super::{Activation, ShortConvolutionError};
use crate::exec::cpu::{Cpu, code};
use crate::exec::{ExecError, Executor, KeptMemory};
use crate::plan::{Layout, Plan};
use crate::tensor::Dtype;

/// What must be equal on all PEs, and in a backward call and its forward call.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Call {
    channels: Vec<usize>,
    width: usize,
    dtype: Dtype,
    activation: Activation,
    cuts: Vec<usize>,
    sequences: Layout,
}

impl Call {
    pub fn new(plan: &Plan, sizes: &Sizes, activation: Activation) -> Self {
        Self {
            channels: sizes.channels.clone(),
            width: sizes.width,
            dtype: sizes.dtype,
            activation,
            cuts: plan.cuts.clone(),
            sequences: plan.layout.clone(),
        }
    }

    /// Whether a call is like this one.
    pub fn is(&self, plan: &Plan, sizes: &Sizes, activation: Activation) -> bool {
        let form = (&self.channels, self.width, self.dtype, self.activation);
        form == (&sizes.channels, sizes.width, sizes.dtype, activation)
            && self.cuts == plan.cuts
            && self.sequences == plan.layout
    }

    /// The same as names and values.
    pub fn fields(&self) -> Vec<(String, String)> {
        let field = |name: &str, value: String| (name.to_owned(), value);
        vec![
            field("the version of deltalink", env!("CARGO_PKG_VERSION").to_owned()),
            field("the channels", format!("{:?}", self.channels)),
            field("the number of taps", self.width.to_string()),
            field("the element type", self.dtype.to_string()),
            field("the activation", format!("{:?}", self.activation)),
            field("the cuts", format!("{:?}", self.cuts)),
            field("the sequences", format!("{:?}", self.sequences)),
        ]
    }
}

/// What a backward call needs of the forward call beside its inputs: the W-1 inputs before each segment that began on another
/// PE. Small, and serves any number of backward calls of the operation.
///
/// It owns memory of the executor's device. [`ShortConvolution::release`](super::ShortConvolution::release) gives that to the next
/// call; dropped, it goes back to the device.
pub struct SavedConvolution<X: Executor = Cpu> {
    /// None where there is nothing to keep.
    memory: Option<X::Memory>,
    before: Param,
    operation: u64,
    rank: usize,
    call: Arc<Call>,
}

impl<X: Executor> std::fmt::Debug for SavedConvolution<X> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SavedConvolution").field("rank", &self.rank).field("bytes", &self.bytes()).finish()
    }
}

impl<X: Executor> SavedConvolution<X> {
    /// Memory for `len` inputs.
    pub(super) fn new(
        exec: &mut X,
        len: usize,
        (operation, rank): (u64, usize),
        call: Arc<Call>,
    ) -> Result<Self, ExecError> {
        let mut memory = if len > 0 { Some(exec.keep(len * call.dtype.size())?) } else { None };
        let at = |memory: &mut X::Memory| Param::new(memory.address(), len, code(call.dtype));
        let before = memory.as_mut().map_or_else(Param::absent, at);
        Ok(Self { memory, before, operation, rank, call })
    }

    /// Bytes of device memory that it holds.
    pub fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, KeptMemory::bytes)
    }

    /// As kernels take it.
    pub(super) fn before(&self) -> Param {
        self.before
    }

    pub(super) fn into_memory(self) -> Option<X::Memory> {
        self.memory
    }

    /// Whether a backward call of operation number `operation` on PE `rank` may use it.
    pub(super) fn check(
        &self,
        (operation, rank): (u64, usize),
        plan: &Plan,
        sizes: &Sizes,
        activation: Activation,
    ) -> Result<(), ShortConvolutionError> {
        let foreign = |what: &str, saved: String, call: String| {
            Err(ShortConvolutionError::ForeignSaved { rank, what: what.to_owned(), saved, call })
        };
        if self.rank != rank {
            return foreign("PE", self.rank.to_string(), rank.to_string());
        }
        if self.operation != operation {
            return foreign("operation", format!("number {}", self.operation), format!("number {operation}"));
        }
        if self.call.is(plan, sizes, activation) {
            return Ok(());
        }
        let (saved, now) = (self.call.fields(), Call::new(plan, sizes, activation).fields());
        match saved.into_iter().zip(now).find(|(saved, now)| saved != now) {
            Some(((what, saved), (_, now))) => foreign(&what, saved, now),
            None => Ok(()),
        }
    }
}
