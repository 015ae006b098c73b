//! Parameters of the kernels of a backward step. "d" before a name means the gradient of the loss with respect to it.
//!
//! Gradients of states flow from the end of a sequence to its start, so [`ScanBackParams`] and the [`super::FixParams`] that
//! merge what arrives have tables in which every role is turned around: sources are later PEs and targets earlier ones
//! (in the order of the flow, so that the nearest source is the last and the nearest target the first),
//! [`super::Segment::initial`] is the row of the final state's gradient where the sequence ends here, and
//! [`super::Segment::final_row`] that of the initial state's where it starts here. Chunks stay in the order of tokens.

use bytemuck::{Pod, Zeroable};

use super::{Array, Beside, Channel, PrepParams, Records, Tables, Tensor, TraceBuffer};

/// Parameters of [`crate::backward::states::scan_states`]: the forward walk again, for the states that gradients need.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct StatesParams {
    /// Sizes and tables, as in the forward pass.
    pub tables: Tables,
    /// From `prep`.
    pub records: Records,
    /// `[tokens, HV, V]`.
    pub v: Tensor,
    /// f32 initial states or absent.
    pub initial: Tensor,
    /// f32 `[lanes * HV, V, K]`: the states before receiving segments, as the forward pass kept them.
    pub state_in: Tensor,
    /// Result, operand type, `[chunks, HV, V, K]`: the state before each chunk. ([`crate::hopper::backward`] says how the bodies
    /// for Hopper lay out results of both walks.)
    pub states: Tensor,
    /// Result, operand type, `[tokens, HV, V]`: v_new.
    pub v_new: Tensor,
    /// Of [`super::ScanItem`]; blocks of S only.
    pub items: Array,
    /// One u64: next item.
    pub ticket: Array,
    /// Time stamps.
    pub trace: TraceBuffer,
    /// 1 if states are `[V,K]` in the caller's memory.
    pub v_first: u32,
    /// Zero.
    pub pad: u32,
}

/// What an item of the reverse scan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum BackPass {
    /// Sends this PE's transition, kept by the forward pass, to the targets. Blocks of M only.
    Transition = 0,
    /// Walks from a zero gradient and sends the result, dS_ext, to the targets; stores nothing else. For segments with sources
    /// and targets, not in exact mode.
    External = 1,
    /// Walks from the gradient of the state after the segment, and stores what `grad` needs, and the initial state's
    /// gradient where the sequence starts here. Sends the result to the targets if it is complete without other PEs' part
    /// (no sources), or in exact mode, in which it waits for the gradient from the nearest source instead of
    /// reading [`ScanBackParams::state_out`].
    Whole = 2,
}

/// One work item of the reverse scan: up to as many column blocks of one head as the block has warpgroups.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BackItem {
    /// Segment.
    pub segment: u32,
    /// Value head.
    pub head: u32,
    /// First column block, counted over S blocks, then M blocks.
    pub first_block: u32,
    /// Column blocks.
    pub blocks: u32,
    /// A [`BackPass`].
    pub pass: u32,
}

/// Parameters of [`crate::backward::scan::scan_back`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ScanBackParams {
    /// Sizes and tables, turned around.
    pub tables: Tables,
    /// From `prep`.
    pub records: Records,
    /// `[tokens, HV, V]`: gradient of the outputs.
    pub d_o: Tensor,
    /// f32 gradients of final states (rows [`super::Segment::initial`] of the turned tables) or absent.
    pub initial: Tensor,
    /// f32 gradients of initial states (rows [`super::Segment::final_row`] of the turned tables) or absent.
    pub finals: Tensor,
    /// f32 `[lanes * HV, V, K]` (lanes are [`super::Segment::receive_lane`]): gradients of the states after receiving segments,
    /// as `fix_out` merged them. Unused in exact mode.
    pub state_out: Tensor,
    /// `[lanes * HV, K, K]` (lanes are [`super::Segment::send_lane`], which are those in which the forward pass received):
    /// M^T of segments with sources and targets, as the forward pass kept it; see [`super::ScanParams::transitions`].
    pub transitions: Tensor,
    /// Of [`super::Cut`], `[lanes * HV, blocks]`, in the same order: which blocks of these M are empty and not kept, as the forward
    /// pass noted it. Absent if none can be.
    pub cuts: Array,
    /// As in [`super::ScanParams`], S only: what parts leave for the gradients before them; absent where there are none.
    pub own: Tensor,
    /// Result, operand type, `[chunks, HV, V, K]`: the gradient of the state after each chunk.
    pub d_states: Tensor,
    /// Result, operand type, `[tokens, HV, V]`: the gradient of v_new.
    pub d_v_new: Tensor,
    /// Of [`BackItem`], in the order in which targets need them.
    pub items: Array,
    /// One u64: next item.
    pub ticket: Array,
    /// How gradients of states leave (and, in exact mode, arrive).
    pub channel: Channel,
    /// As in [`super::ScanParams`].
    pub beside: Beside,
    /// Time stamps.
    pub trace: TraceBuffer,
    /// 1 if states are `[V,K]` in the caller's memory.
    pub v_first: u32,
    /// Element type of M on the wire, a [`crate::element::DtypeCode`].
    pub m_dtype: u32,
}

/// Parameters of [`crate::backward::grad::grad`]: one block per chunk and value head, chunk by chunk, like `prep`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct GradParams {
    /// Inputs, options and records of the chunks: what `prep` got and computed.
    pub prep: PrepParams,
    /// `[tokens, HV, V]`.
    pub v: Tensor,
    /// `[tokens, HV, V]`: gradient of the outputs.
    pub d_o: Tensor,
    /// From `scan_states`.
    pub states: Tensor,
    /// From `scan_states`.
    pub v_new: Tensor,
    /// From `scan_back`.
    pub d_states: Tensor,
    /// From `scan_back`.
    pub d_v_new: Tensor,
    /// Result, any type, `[tokens, HV, K]`: gradient of q after normalisation, of each value head. The gradient of q itself
    /// where there is one value head for each q head and no normalisation; else f32, for `reduce`. (The body for Hopper goes through
    /// the normalisation itself if this is not f32.)
    pub dq: Tensor,
    /// Result, of k, like `dq`.
    pub dk: Tensor,
    /// Result, `[tokens, HV, V]`.
    pub dv: Tensor,
    /// Result, f32, KDA `[tokens, HV, K]`, GDN `[tokens, HV]`: of g or of the gate's raw input.
    pub dg: Tensor,
    /// Result, f32 `[tokens, HV]`: of beta or of its logits.
    pub dbeta: Tensor,
    /// Result, f32 `[chunks, HV]`: each chunk's share of the gradient of A_log; absent if there is no A_log.
    pub da_log: Tensor,
    /// Result, f32 `[chunks, HV, K]` (GDN `[chunks, HV]`): each chunk's share of that of dt_bias; absent if there is none.
    pub ddt_bias: Tensor,
}

/// Parameters of [`crate::backward::reduce::reduce`]: sums in a fixed order,
/// `target(r, c) = sum over t < terms of source[r * row_stride + t * term_stride + c]`, with `x` the gradient of the rows
/// before they were normalised. [`crate::backward::reduce::launch`] says how many blocks.
///
/// * q and k: rows are (token, head), `cols` = K, the terms a group's value heads: `row_stride` = HV/H * K, `term_stride` = K.
/// * A_log and dt_bias: one row, the terms are chunks: `row_stride` = 0, `term_stride` = `cols` = HV, or HV * K (GDN: HV).
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ReduceParams {
    /// f32.
    pub source: Tensor,
    /// `[rows, cols]`, any type.
    pub target: Tensor,
    /// `[rows, cols]`: the rows before normalisation; absent if nothing was normalised. At most 256 columns then.
    pub x: Tensor,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
    /// Terms of each sum; 0 gives zeros.
    pub terms: u64,
    /// Elements between the first terms of two rows.
    pub row_stride: u64,
    /// Elements between two terms.
    pub term_stride: u64,
    /// Time stamps.
    pub trace: TraceBuffer,
}
