//! Parameters of the kernels of a forward step.

use bytemuck::{Pod, Zeroable};

use super::{Array, Beside, Channel, NONE, Records, Segment, StepMode, Tables, Tensor, TraceBuffer};

/// How the log decay is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum GateForm {
    /// g itself.
    Given = 0,
    /// `-exp(A_log) softplus(raw + dt_bias)`.
    Softplus = 1,
    /// `bound * sigmoid(exp(A_log) (raw + dt_bias))`.
    LowerBound = 2,
}

/// Parameters of [`crate::prep::prep`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct PrepParams {
    /// Sizes and tables.
    pub tables: Tables,
    /// `[tokens, H, K]`.
    pub q: Tensor,
    /// `[tokens, H, K]`.
    pub k: Tensor,
    /// KDA `[tokens, HV, K]`, GDN `[tokens, HV]`.
    pub g: Tensor,
    /// `[tokens, HV]`.
    pub beta: Tensor,
    /// f32 `[HV]` or absent.
    pub a_log: Tensor,
    /// f32 `[HV, K]` (GDN `[HV]`) or absent.
    pub dt_bias: Tensor,
    /// Results.
    pub records: Records,
    /// A [`GateForm`].
    pub gate_form: u32,
    /// 1 to normalise the rows of q and k.
    pub l2norm: u32,
    /// Lower bound of the gate.
    pub bound: f32,
    /// Factor of q.
    pub scale: f32,
    /// 0 if beta is given, else the factor of sigmoid(beta).
    pub beta_factor: f32,
    /// Zero.
    pub pad: u32,
    /// Whether a walk starts before all chunks are prepared. The bodies for Hopper only.
    pub beside: Beside,
    /// Time stamps.
    pub trace: TraceBuffer,
}

/// One work item of the scan: up to as many column blocks of one head as the block has warpgroups.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ScanItem {
    /// Segment.
    pub segment: u32,
    /// Value head.
    pub head: u32,
    /// First column block, counted over S blocks, then M blocks.
    pub first_block: u32,
    /// Column blocks.
    pub blocks: u32,
}

/// What the cut of the transition (see [`crate::cut`]) did to one column block of one receiving row. All zero: nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Cut {
    /// Of the segment's last chunks: S, how many need no correction, so that their outputs are complete; M, how many were
    /// not walked, so that rows of q-tilde are missing, which are zero.
    pub dropped: u32,
    /// 1 if the block of M is so small at the segment's end that it is left out.
    pub empty: u32,
    /// What bounds the norm of M there: all of it, of a block of M if the others are no larger.
    pub bound: f32,
    /// Zero.
    pub pad: u32,
}

/// Parameters of [`crate::scan::scan_push`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ScanParams {
    /// Sizes and tables.
    pub tables: Tables,
    /// From `prep`.
    pub records: Records,
    /// `[tokens, HV, V]`.
    pub v: Tensor,
    /// Result of segments that need no correction, `[tokens, HV, V]`.
    pub o: Tensor,
    /// f32 `[tokens, HV, V]`: outputs of receiving segments as if nothing came before them.
    pub o_local: Tensor,
    /// Operand type, `[tokens, HV, K]`: q-tilde, by which the state before the segment enters the output.
    pub q_tilde: Tensor,
    /// f32 initial states or absent.
    pub initial: Tensor,
    /// f32 final states or absent.
    pub finals: Tensor,
    /// Own summaries, by [`Segment::own_lane`], laid out like one row of slots: for final states, and of parts for the states after
    /// them.
    pub own: Tensor,
    /// f32 `[lanes * HV, V, K]`: where exact mode keeps the states that arrive, for a backward pass; absent if none follows.
    /// (In other modes [`FixParams::state_in`] holds them.)
    pub state_in: Tensor,
    /// `[lanes * HV, K, K]`, in the element type of M on the wire, f32 if there are parts: where M^T of receiving segments is kept for a backward
    /// pass; absent if none follows, and in exact mode.
    pub transitions: Tensor,
    /// Result: of [`Cut`], `[lanes * HV, blocks]`, zero before.
    pub cuts: Array,
    /// Of [`ScanItem`], in the order in which consumers need them.
    pub items: Array,
    /// One u64: next item.
    pub ticket: Array,
    /// How summaries leave.
    pub channel: Channel,
    /// Which records it waits for. The bodies for Hopper only, and where no M is walked.
    pub beside: Beside,
    /// Time stamps.
    pub trace: TraceBuffer,
    /// 1 if states are `[V,K]` in the caller's memory.
    pub v_first: u32,
    /// Element type of M on the wire, a [`crate::element::DtypeCode`].
    pub m_dtype: u32,
    /// Where M is cut off: as soon as its norm is known to stay below. 0: never.
    pub tolerance: f32,
    /// Zero.
    pub pad: u32,
}

impl ScanParams {
    /// Whether what a segment computes is corrected later by the state before it, which arrives from other PEs meanwhile. (In
    /// exact mode it has arrived before.)
    #[inline(always)]
    pub fn corrects(&self, segment: &Segment) -> bool {
        segment.receive_lane != NONE && self.channel.mode != StepMode::Exact as u32
    }
}

/// What an item of the correction is for, besides its chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum FixPass {
    /// Nothing: the state before the segment is merged by another.
    Corrects = 0,
    /// Merges the state before the segment, or those before its parts, and publishes them; it comes before the others. In
    /// [`crate::fixup::join_parts`], for sequences that start here: those before its parts, and sends the state after the segment.
    Merges = 1,
    /// In [`crate::fixup::join_parts`]: composes a column block of [S | M] of the segment from those of its parts, and sends it.
    Composes = 2,
}

/// One work item of the correction: a run of chunks of one head and 64 columns of V.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct FixItem {
    /// Segment.
    pub segment: u32,
    /// Value head.
    pub head: u32,
    /// Column block of V; of [S | M], where it composes.
    pub block: u32,
    /// First chunk, counted from the segment's first.
    pub first_chunk: u32,
    /// Number of chunks.
    pub chunks: u32,
    /// A [`FixPass`].
    pub pass: u32,
}

/// Parameters of [`crate::fixup::fix_out`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct FixParams {
    /// Sizes and tables.
    pub tables: Tables,
    /// As in [`ScanParams`]; absent in a backward pass, like `q_tilde`, `o` and `finals`.
    pub o_local: Tensor,
    /// As in [`ScanParams`].
    pub q_tilde: Tensor,
    /// As in [`ScanParams`].
    pub own: Tensor,
    /// f32 `[lanes * HV, V, K]`: the merged states before receiving segments.
    pub state_in: Tensor,
    /// As in [`ScanParams`]: where M of whole segments is kept that is composed of their parts'. In a backward pass, by
    /// [`Segment::send_lane`], as the forward pass kept it: M of parts.
    pub transitions: Tensor,
    /// Result, `[tokens, HV, V]`.
    pub o: Tensor,
    /// f32 final states or absent.
    pub finals: Tensor,
    /// As in [`ScanParams`]; in a backward pass as in [`super::ScanBackParams`], and absent where there are no parts.
    pub cuts: Array,
    /// Of [`FixItem`].
    pub items: Array,
    /// One u64: next item.
    pub ticket: Array,
    /// How summaries arrive.
    pub channel: Channel,
    /// Time stamps.
    pub trace: TraceBuffer,
    /// 1 if states are `[V,K]` in the caller's memory.
    pub v_first: u32,
    /// Element type of M on the wire, a [`crate::element::DtypeCode`].
    pub m_dtype: u32,
    /// 1 in a backward pass: `S_in <- S + M^T S_in`, for gradients of states.
    pub m_transposed: u32,
    /// Zero.
    pub pad: u32,
}

/// Parameters of [`crate::fixup::join_parts`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct JoinParams {
    /// Those of the correction that follows, with other items.
    pub fix: FixParams,
}
