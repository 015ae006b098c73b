//! Errors of the operation.

use kernels_gpu::protocol::Expired;

use crate::error::InputError;
use crate::exec::ExecError;
use crate::heap::HeapError;
use crate::plan::PlanError;
use crate::world::WorldError;

/// An operation could not be run, or did not complete.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum OpError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    World(#[from] WorldError),
    #[error(transparent)]
    Heap(#[from] HeapError),
    #[error(transparent)]
    Exec(ExecError),
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Virtual(#[from] crate::world::virtual_pes::VirtualError),
    #[error(
        "this build has no GPU support; build it with `cargo build --release --features cuda` (after `cargo xtask setup`), \
         or compute on the CPU"
    )]
    NoCuda,
    #[error("the plan is for {plan} PEs, the world has {world}; make the plan with as many cuts as there are PEs")]
    PlanSize { plan: usize, world: usize },
    #[error("{tokens} tokens on one PE; a PE takes up to {largest}, spread them over more PEs")]
    TooManyTokens { tokens: usize, largest: usize },
    #[error(
        "PE {second} was called with {field} = {second_value}, PE {first} with {first_value}; all PEs must be called alike"
    )]
    Disagreement { field: String, first: usize, first_value: String, second: usize, second_value: String },
    #[error("slots for {lanes} lanes of {hv} heads, K = {k}, V = {v} on {pes} PEs: {reason}")]
    Slots { lanes: usize, hv: usize, k: usize, v: usize, pes: usize, reason: String },
    #[error("{0}")]
    Expired(ExpiredWait),
    #[error(
        "{error}; PE {other} is in call {number}, {theirs}, while this PE ({rank}) is in call {number}, {mine}: all PEs must \
         make the same calls in the same order"
    )]
    DifferentCalls { rank: usize, other: usize, number: u64, mine: String, theirs: String, error: Box<OpError> },
    #[error(
        "PE {rank} and PE {other} called backward (call {number}) with what different forward calls saved, {mine} and \
         {theirs} calls before; the gradients are void: pass what the same forward call saved on all PEs"
    )]
    DifferentSaved { rank: usize, other: usize, number: u64, mine: u64, theirs: u64 },
    #[error(
        "PE {rank}: backward was called with a saved state of {what} = {saved}, the call is one with {call}; pass what the \
         forward call with the same plan, shapes and options saved on this PE"
    )]
    ForeignSaved { rank: usize, what: String, saved: String, call: String },
    #[error(
        "PE {rank}: saved state {handle} was used already, or never held; a saved state serves one backward call: call \
         forward_saving again"
    )]
    SpentHandle { rank: usize, handle: u64 },
    #[error(
        "the call cannot return before its work is done: {why}; use forward_into or backward_into, or another mode"
    )]
    CannotEnqueue { why: &'static str },
    #[error(
        "PE {rank}: the stream captures, and this call waits for its work; use one that enqueues, or end the capture first"
    )]
    Captures { rank: usize },
    #[error("PE {rank}: the call was captured, not done; wait for what replays it")]
    Captured { rank: usize },
    #[error("PE {rank}: what was enqueued by operation number {pending} was asked of number {operation}")]
    ForeignPending { rank: usize, pending: u64, operation: u64 },
    #[error("PE {rank}: this operation failed before ({first}); make a new world and a new operation")]
    FailedBefore { rank: usize, first: String },
}

impl From<ExecError> for OpError {
    fn from(error: ExecError) -> Self {
        match error {
            ExecError::Heap(error) => OpError::Heap(error),
            ExecError::World(error) => OpError::World(error),
            error => OpError::Exec(error),
        }
    }
}

/// A wait inside a kernel that ran out, in the caller's terms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpiredWait {
    /// What the kernel left.
    pub expired: Expired,
    /// Value heads, to tell a row's head from its lane.
    pub hv: u32,
}

impl std::fmt::Display for ExpiredWait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kernel = match self.expired.step {
            kernels_gpu::comm::STEP_SCAN => "scan_push",
            kernels_gpu::comm::STEP_FIX => "fix_out",
            kernels_gpu::comm::STEP_SCAN_BACK => "scan_back",
            kernels_gpu::comm::STEP_JOIN => "join_parts",
            _ => "a kernel",
        };
        let (lane, head) = (self.expired.row / self.hv, self.expired.row % self.hv);
        write!(f, "in {kernel}, head {head}, lane {lane}: {}", self.expired)
    }
}
