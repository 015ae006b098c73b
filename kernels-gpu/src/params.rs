//! Launch parameters: the only thing that kernels and host share by value. All are `repr(C)` and Pod;
//! addresses are those of the memory that the kernel runs on.

use bytemuck::{Pod, Zeroable};

use crate::element::DtypeCode;
use crate::protocol::ChannelLayout;

/// A tensor in global memory: address, number of elements, element type.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Tensor {
    /// Address of the first element; 0 if the tensor is absent.
    pub addr: u64,
    /// Number of elements.
    pub len: u64,
    /// A [`DtypeCode`].
    pub dtype: u32,
    /// Zero.
    pub pad: u32,
}

impl Tensor {
    /// A tensor of `len` elements at `addr`.
    pub fn new(addr: u64, len: usize, dtype: DtypeCode) -> Self {
        Self { addr, len: len as u64, dtype: dtype as u32, pad: 0 }
    }

    /// No tensor.
    pub fn absent() -> Self {
        Self::zeroed()
    }

    /// Whether there is a tensor.
    #[inline(always)]
    pub fn is_present(&self) -> bool {
        self.addr != 0
    }

    /// Element type.
    #[inline(always)]
    pub fn dtype(&self) -> DtypeCode {
        DtypeCode::from_code(self.dtype)
    }

    /// The matrix `rows` x `cols` whose element (r, c) is element `offset + r*row_stride + c*col_stride`.
    #[inline(always)]
    pub fn matrix(&self, offset: usize, rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> Matrix {
        Matrix { tensor: *self, offset, rows, cols, row_stride, col_stride }
    }
}

/// A strided matrix inside a [`Tensor`]. A stride of 0 repeats a row or a column.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// The tensor it lies in.
    pub tensor: Tensor,
    /// Element of the tensor that is (0, 0).
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements between rows.
    pub row_stride: usize,
    /// Elements between columns.
    pub col_stride: usize,
}

impl Matrix {
    /// Columns `start .. start + count`.
    #[inline(always)]
    pub fn columns(mut self, start: usize, count: usize) -> Self {
        self.offset += start * self.col_stride;
        self.cols = count;
        self
    }

    /// Rows `start .. start + count`.
    #[inline(always)]
    pub fn row_range(mut self, start: usize, count: usize) -> Self {
        self.offset += start * self.row_stride;
        self.rows = count;
        self
    }
}

/// An array of plain values in global memory: tables, counters, words.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Array {
    /// Address of the first value.
    pub addr: u64,
    /// Number of values.
    pub len: u64,
}

impl Array {
    /// The values of `slice`. The slice must outlive every launch that gets the array.
    pub fn of<T: Pod>(slice: &[T]) -> Self {
        Self { addr: slice.as_ptr() as u64, len: slice.len() as u64 }
    }
}

/// Sizes of the problem on this PE.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Sizes {
    /// Query/key heads.
    pub h: u32,
    /// Value heads, a multiple of `h`.
    pub hv: u32,
    /// Key channels, a multiple of 16.
    pub k: u32,
    /// Value channels, a multiple of 16.
    pub v: u32,
    /// Chunk length: 16, 32 or 64.
    pub chunk: u32,
    /// Zero.
    pub pad: u32,
}

/// One chunk: a run of at most `chunk` tokens of one segment.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Chunk {
    /// First token, counted over this PE's tokens.
    pub token: u32,
    /// Tokens, at least 1.
    pub len: u32,
}

/// [`Segment::receive_lane`], [`Segment::initial`] and [`Segment::final_row`] where there is none.
pub const NONE: u32 = u32::MAX;

/// One segment: what this PE holds of one sequence.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Segment {
    /// Its first chunk.
    pub first_chunk: u32,
    /// Number of chunks; 0 for an empty sequence.
    pub chunks: u32,
    /// Row of the initial state, or [`NONE`].
    pub initial: u32,
    /// Row of the final state, or [`NONE`].
    pub final_row: u32,
    /// Lane in which the state before the segment arrives, or [`NONE`] if the sequence starts here.
    pub receive_lane: u32,
    /// Lane of the segment among those that this PE sends (staging rows of the bulk mode), or [`NONE`].
    pub send_lane: u32,
    /// First of its sources in the table of sources (PEs whose summaries it merges, ascending).
    pub first_source: u32,
    /// Number of sources.
    pub sources: u32,
    /// First of its targets in the table of targets.
    pub first_target: u32,
    /// Number of targets.
    pub targets: u32,
}

/// Where a segment's summary goes.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Target {
    /// The consumer.
    pub pe: u32,
    /// Its lane.
    pub lane: u32,
}

/// What chunk kernels share: sizes and the tables of chunks and segments.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Tables {
    /// Sizes.
    pub sizes: Sizes,
    /// Of [`Chunk`].
    pub chunks: Array,
    /// Of [`Segment`].
    pub segments: Array,
    /// Of u32: ranks.
    pub sources: Array,
    /// Of [`Target`].
    pub targets: Array,
}

/// What `prep` computes for every chunk and value head, and the scan reads.
///
/// `operands` holds for each (chunk, head) one contiguous record
/// `w [C,K] | A' [C,C] | qg [C,K] | Aqk [C,C] | kg [C,K]`, see [`Records::w`] and its siblings.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Records {
    /// Operands in the kernels' element type.
    pub operands: Tensor,
    /// f32 `[chunks, HV, K]`: the decay over the whole chunk, exp(G_last).
    pub decay: Tensor,
    /// Sizes, again, for the arithmetic of the layout.
    pub sizes: Sizes,
}

impl Records {
    /// Elements of one record.
    pub const fn record_len(sizes: &Sizes) -> usize {
        let (c, k) = (sizes.chunk as usize, sizes.k as usize);
        3 * c * k + 2 * c * c
    }

    #[inline(always)]
    fn part(&self, chunk: usize, head: usize, before_ck: usize, before_cc: usize, cols: usize) -> Matrix {
        let (c, k) = (self.sizes.chunk as usize, self.sizes.k as usize);
        let record = (chunk * self.sizes.hv as usize + head) * Self::record_len(&self.sizes);
        self.operands.matrix(record + before_ck * c * k + before_cc * c * c, c, cols, cols, 1)
    }

    /// w = A' (k exp G), `[C,K]`.
    #[inline(always)]
    pub fn w(&self, chunk: usize, head: usize) -> Matrix {
        self.part(chunk, head, 0, 0, self.sizes.k as usize)
    }
    /// A' = (I + Akk)^-1 diag(beta), `[C,C]`.
    #[inline(always)]
    pub fn a(&self, chunk: usize, head: usize) -> Matrix {
        self.part(chunk, head, 1, 0, self.sizes.chunk as usize)
    }
    /// qg = scale q exp G, `[C,K]`.
    #[inline(always)]
    pub fn qg(&self, chunk: usize, head: usize) -> Matrix {
        self.part(chunk, head, 1, 1, self.sizes.k as usize)
    }
    /// Aqk, scaled, `[C,C]`.
    #[inline(always)]
    pub fn aqk(&self, chunk: usize, head: usize) -> Matrix {
        self.part(chunk, head, 2, 1, self.sizes.chunk as usize)
    }
    /// kg = k exp(G_last - G), `[C,K]`.
    #[inline(always)]
    pub fn kg(&self, chunk: usize, head: usize) -> Matrix {
        self.part(chunk, head, 2, 2, self.sizes.k as usize)
    }
    /// exp(G_last) as a row, `[1,K]`.
    #[inline(always)]
    pub fn decay(&self, chunk: usize, head: usize) -> Matrix {
        let k = self.sizes.k as usize;
        self.decay.matrix((chunk * self.sizes.hv as usize + head) * k, 1, k, k, 1)
    }
}

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
    /// Time stamps.
    pub trace: TraceBuffer,
}

/// How one step exchanges summaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum StepMode {
    /// Push from inside the scan, late correction.
    Overlap = 0,
    /// The scan leaves its summaries in this PE's own slots; the host exchanges them between launches.
    Bulk = 1,
    /// The scan waits for the state before the segment: no M, no correction.
    Exact = 2,
}

/// How a kernel writes into another PE's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Way {
    /// By its own stores, at the address at which it reaches that memory.
    Stores = 0,
    /// By puts with signals out of this PE's symmetric memory.
    Puts = 1,
}

/// A PE's side of a channel: its layout and where every PE's part of it lies.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Channel {
    /// Offsets of slots and words.
    pub layout: ChannelLayout,
    /// Zero.
    pub pad: u32,
    /// Of u64: address of each PE's payload area, as this PE reaches it; 0 if it does not.
    pub payload: Array,
    /// Of u64: address of each PE's words, as this PE reaches them; 0 if it does not.
    pub words: Array,
    /// Of u32: the [`Way`] to each PE's memory.
    pub ways: Array,
    /// One [`crate::protocol::TrapRecord`]: the first wait that expired on this PE.
    pub trap: Array,
    /// One [`crate::protocol::Watch`], in memory that the host reads and writes while kernels run.
    pub watch: Array,
    /// One [`StepStats`].
    pub stats: Array,
    /// One u64: the epoch of this step.
    pub epoch: Array,
    /// Bound of every wait, in nanoseconds.
    pub timeout_ns: u64,
    /// This PE.
    pub pe: u32,
    /// A [`StepMode`].
    pub mode: u32,
}

/// What a step counts on one PE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct StepStats {
    /// Bytes written into other PEs' slots, signals not counted.
    pub bytes_sent: u64,
    /// Messages (blocks) sent.
    pub messages: u64,
    /// Nanoseconds spent in waits for signals, summed over blocks.
    pub signal_wait_ns: u64,
    /// Nanoseconds spent in waits for free slots, summed over blocks.
    pub slot_wait_ns: u64,
}

/// A recorder of what happened when, filled by kernels.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct TraceBuffer {
    /// Of [`Stamp`]; empty to record nothing.
    pub stamps: Array,
    /// One u64: stamps asked for (more than the array holds means that some were lost).
    pub cursor: Array,
}

/// One recorded span.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Stamp {
    /// Start, nanoseconds on the PE's clock.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// A [`StampKind`].
    pub kind: u32,
    /// Block of the grid.
    pub block: u32,
    /// Value head.
    pub head: u32,
    /// Column block of a message, or chunk.
    pub part: u32,
    /// Bytes moved, if any.
    pub bytes: u64,
}

/// What a [`Stamp`] records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum StampKind {
    /// `prep` of one chunk and head.
    Prep = 0,
    /// The scan of a group of column blocks of one head.
    Scan = 1,
    /// Writing a summary block into consumers' slots.
    Put = 2,
    /// Waiting for a signal.
    Wait = 3,
    /// Waiting for a free slot.
    SlotWait = 4,
    /// Merging the summaries of earlier PEs into the state before the segment.
    Merge = 5,
    /// Correcting outputs.
    FixOut = 6,
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
    /// Own summaries of receiving segments, laid out like one row of slots: for their final states.
    pub own: Tensor,
    /// Of [`ScanItem`], in the order in which consumers need them.
    pub items: Array,
    /// One u64: next item.
    pub ticket: Array,
    /// How summaries leave.
    pub channel: Channel,
    /// Time stamps.
    pub trace: TraceBuffer,
    /// 1 if states are `[V,K]` in the caller's memory.
    pub v_first: u32,
    /// Element type of M on the wire, a [`DtypeCode`].
    pub m_dtype: u32,
}

/// One work item of the correction: a run of chunks of one head and 64 columns of V.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct FixItem {
    /// Segment.
    pub segment: u32,
    /// Value head.
    pub head: u32,
    /// Column block of V.
    pub block: u32,
    /// First chunk, counted from the segment's first.
    pub first_chunk: u32,
    /// Number of chunks.
    pub chunks: u32,
    /// 1 for the item that merges the state before the segment and publishes it; it comes before the others.
    pub merges: u32,
}

/// Parameters of [`crate::fixup::fix_out`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct FixParams {
    /// Sizes and tables.
    pub tables: Tables,
    /// As in [`ScanParams`].
    pub o_local: Tensor,
    /// As in [`ScanParams`].
    pub q_tilde: Tensor,
    /// As in [`ScanParams`].
    pub own: Tensor,
    /// f32 `[lanes * HV, V, K]`: the merged states before receiving segments.
    pub state_in: Tensor,
    /// Result, `[tokens, HV, V]`.
    pub o: Tensor,
    /// f32 final states or absent.
    pub finals: Tensor,
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
    /// Element type of M on the wire, a [`DtypeCode`].
    pub m_dtype: u32,
}
