//! Launch parameters of the short convolution and the tables that they name.

use bytemuck::{Pod, Zeroable};

use crate::params::{Array, Channel, Tensor, TraceBuffer};

/// One convolution of a call (of q, of k or of v), and where its results go. Tensors that a launch does not need are
/// absent; tokens are counted over this PE's tokens.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ConvolutionTensors {
    /// `[tokens, D]`.
    pub x: Tensor,
    /// `[D, W]`.
    pub weight: Tensor,
    /// `[D]`.
    pub bias: Tensor,
    /// `[sequences that start here, D, W-1]`.
    pub initial: Tensor,
    /// Forward: `[tokens, D]`.
    pub y: Tensor,
    /// Forward: `[sequences that end here, D, W-1]`.
    pub finals: Tensor,
    /// Backward: gradient of y.
    pub dy: Tensor,
    /// Backward: gradient of the final states.
    pub d_finals: Tensor,
    /// Backward: gradient of x.
    pub dx: Tensor,
    /// Backward: gradient of the initial states, f32.
    pub d_initial: Tensor,
    /// Backward: f32 `[runs, W + 1, D]`, each run's shares of the gradients of the weights and of the bias.
    pub shares: Tensor,
    /// Backward: f32 `[D, W]`.
    pub d_weight: Tensor,
    /// Backward: f32 `[D]`.
    pub d_bias: Tensor,
    /// D.
    pub channels: u32,
    /// First of its columns in a row of a halo, in which all convolutions of the call lie side by side.
    pub first_column: u32,
    /// Backward: runs.
    pub runs: u32,
    /// Zero.
    pub pad: u32,
}

/// What this PE holds of one sequence.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ConvolutionSegment {
    /// First token.
    pub token: u32,
    /// Tokens.
    pub len: u32,
    /// Row of the initial state, if the sequence starts here; or `NONE`.
    pub initial: u32,
    /// Row of the final state, if the sequence ends here; or `NONE`.
    pub final_row: u32,
    /// Lane of the W-1 tokens before the segment, if it began elsewhere; or `NONE`.
    pub before_lane: u32,
    /// Lane of the W-1 rows after the segment, if it goes on elsewhere; or `NONE`.
    pub after_lane: u32,
    /// How many of those are tokens: the sequence may end before.
    pub real: u32,
    /// First of its sources in this launch.
    pub first_source: u32,
    /// Number of its sources.
    pub sources: u32,
    /// Zero.
    pub pad: u32,
}

/// A PE that sends rows of a halo.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ConvolutionSource {
    /// The PE.
    pub pe: u32,
    /// The first of its rows among the W-1.
    pub first_row: u32,
    /// Rows.
    pub rows: u32,
}

/// Rows that this PE sends to one other.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ConvolutionMessage {
    /// The PE that needs them.
    pub dest: u32,
    /// Its lane.
    pub lane: u32,
    /// The segment that they are of.
    pub segment: u32,
    /// The first one, counted from the segment's first token; negative for what lies before the sequence.
    pub position: i32,
    /// The first of them among the receiver's W-1.
    pub first_row: u32,
    /// Rows.
    pub rows: u32,
}

/// What an item does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ItemKind {
    /// Writes its channels of a message.
    Send = 0,
    /// Computes a run of tokens that needs nothing from other PEs.
    Local = 1,
    /// Receives its channels of a halo, and computes the run of tokens that needs it.
    Halo = 2,
}

/// One item of work: a block of channels of one convolution, and which tokens.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ConvolutionItem {
    /// An [`ItemKind`].
    pub kind: u32,
    /// Which convolution of the call.
    pub tensor: u32,
    /// First channel.
    pub first: u32,
    /// Channels.
    pub count: u32,
    /// Segment; of an item that sends, the message.
    pub index: u32,
    /// First token of the run, counted from the segment's first.
    pub offset: u32,
    /// Tokens of the run.
    pub len: u32,
    /// 1 if the item also writes the final state (backward: the gradient of the initial state).
    pub state: u32,
    /// Backward: number of the run.
    pub run: u32,
}

/// What the kernels of both directions get.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ConvolutionTables {
    /// Of [`ConvolutionTensors`]: those of the call, as the step's first kernel has written them.
    pub tensors: Array,
    /// Of [`ConvolutionSegment`].
    pub segments: Array,
    /// Of [`ConvolutionSource`].
    pub sources: Array,
    /// Of [`ConvolutionMessage`].
    pub messages: Array,
    /// Of u64, one for each message: parts that have been written.
    pub written: Array,
    /// Of [`ConvolutionItem`]: those that send, those that need nothing, those that wait.
    pub items: Array,
    /// One u64: next item.
    pub ticket: Array,
    /// `[lanes, W-1, columns]` in the tensors' type: inputs before segments that began elsewhere. Forward they are stored
    /// here, backward they are read.
    pub before: Tensor,
    /// How halos travel.
    pub channel: Channel,
    /// Time stamps.
    pub trace: TraceBuffer,
    /// W.
    pub width: u32,
    /// Channels of all convolutions of the call together.
    pub columns: u32,
    /// Items that send, or receive, one message.
    pub parts: u32,
    /// 1 if SiLU follows.
    pub silu: u32,
}

/// Parameters of [`super::convolve`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ConvolveParams {
    /// Tables.
    pub tables: ConvolutionTables,
}

/// Parameters of [`super::convolve_back`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ConvolveBackParams {
    /// Tables.
    pub tables: ConvolutionTables,
    /// f32 `[lanes, W-1, columns]`: what came from PEs that hold the tokens after.
    pub after: Tensor,
}

/// A block of channels whose shares are added up.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SumItem {
    /// Which convolution of the call.
    pub tensor: u32,
    /// First channel.
    pub first: u32,
    /// Channels.
    pub count: u32,
    /// Tap, or W for the bias.
    pub tap: u32,
}

/// Parameters of [`super::sum_shares`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SumParams {
    /// Of [`ConvolutionTensors`].
    pub tensors: Array,
    /// Of [`SumItem`], one for each block of the grid.
    pub items: Array,
    /// W.
    pub width: u32,
    /// Zero.
    pub pad: u32,
}
