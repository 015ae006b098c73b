//! What forward and backward steps share: their tables on the device, launches, and the exchange between launches.

use kernels_gpu::begin::BeginParams;
use kernels_gpu::hopper;
use kernels_gpu::params::{
    self, Beside, GateForm, PrepParams, Records, Sizes, StepMode, Tables, Tensor as Param, TraceBuffer,
};
use kernels_gpu::prep;
use kernels_gpu::protocol::{ChannelLayout, Watch, parity};
use kernels_gpu::scan;
use kernels_gpu::tile::SHARED_BYTES;
use kernels_gpu::tile::host::Checker;

use super::channel::Channel;
use super::images::Placed;
use super::launched::{self, Launched};
use super::parts::{Parts, Room, Walk};
use super::tables::HostTables;
use super::vitals::VitalSigns;
use super::{Config, Mode, OpError};
use crate::exec::{Blocks, Body, ExecError, Executor, Grid, Image, Kernel, Launch, Part, Slot, Waits};
use crate::inputs::{Beta, Dims, Gate, Inputs, Op, StateLayout};
use crate::plan::{Plan, RankPlan};
use crate::tensor::{Dtype, TensorView};
use crate::world::Pe;

/// What a step works on.
pub(super) struct Step<'a> {
    pub pe: &'a Pe,
    /// Whose roles the step's messages follow: backward, the [mirror](Plan::mirrored) of the plan.
    pub plan: &'a Plan,
    pub inputs: &'a Inputs<'a>,
    pub dims: &'a Dims,
    pub config: &'a Config,
    pub layout: ChannelLayout,
    /// How this PE cuts its segments once more; the same in both directions.
    pub parts: &'a Parts,
    /// What the step's kernels leave for the host.
    pub vitals: VitalSigns,
    /// Whether PEs wait for each other before the first launch, see [`super::ContextParallel::align_starts`].
    pub aligned: bool,
}

/// Elements `start ..` of a tensor.
pub(super) fn part(x: &Param, start: usize, len: usize) -> Param {
    Param { addr: x.addr + (start * x.dtype().size()) as u64, len: len as u64, ..*x }
}

/// A rank's tables in a step's image.
#[derive(Clone, Copy, Debug)]
pub(super) struct TableParts {
    chunks: Part,
    segments: Part,
    sources: Part,
    targets: Part,
}

impl TableParts {
    pub fn push(image: &mut Image, tables: &HostTables) -> Self {
        Self {
            chunks: image.push(&tables.chunks),
            segments: image.push(&tables.segments),
            sources: image.push(&tables.sources),
            targets: image.push(&tables.targets),
        }
    }

    pub fn at(&self, placed: Placed, sizes: Sizes) -> Tables {
        let base = placed.tables;
        Tables {
            sizes,
            chunks: self.chunks.at(base),
            segments: self.segments.at(base),
            sources: self.sources.at(base),
            targets: self.targets.at(base),
        }
    }
}

/// Where this PE reaches the channel's memory on every PE, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChannelParts {
    payload: Part,
    words: Part,
    ways: Part,
}

impl ChannelParts {
    pub fn push(image: &mut Image, channel: Option<&Channel>) -> Self {
        Self {
            payload: image.push(&channel.map_or_else(Vec::new, Channel::payload_addresses)),
            words: image.push(&channel.map_or_else(Vec::new, Channel::word_addresses)),
            ways: image.push(channel.map_or(&[][..], Channel::ways)),
        }
    }

    /// The side of `pe`, for kernels of a step that leave what the host is to know at `vitals`.
    pub fn at<X: Executor>(
        &self,
        exec: &X,
        pe: &Pe,
        (placed, layout): (Placed, ChannelLayout),
        vitals: VitalSigns,
        (channel, mode): (Option<&Channel>, StepMode),
    ) -> params::Channel {
        let watch = params::Array { addr: exec.watch(), len: (size_of::<Watch>() / size_of::<u64>()) as u64 };
        params::Channel {
            layout,
            pad: 0,
            payload: self.payload.at(placed.tables),
            words: self.words.at(placed.tables),
            ways: self.ways.at(placed.tables),
            trap: vitals.trap(),
            watch,
            stats: vitals.stats(),
            epoch: channel.map_or_else(|| vitals.no_epoch(), Channel::epoch_word),
            timeout_ns: pe.timeout().as_nanos() as u64,
            pe: pe.rank() as u32,
            mode: mode as u32,
        }
    }
}

/// What a step's first kernel sets: tickets and counts to zero, and the epoch of the channel to the next one.
pub(super) fn beginning(placed: Placed, vitals: VitalSigns, channel: Option<&Channel>) -> BeginParams {
    let epoch = channel.map_or_else(params::Array::empty, Channel::epoch_word);
    BeginParams { tickets: placed.tickets, counts: vitals.counts(), epoch }
}

/// What is the same for a step's launches.
pub(super) struct Common<'a> {
    op: Op,
    dtype: Dtype,
    checker: Option<&'a Checker>,
    peer_failed: &'a (dyn Fn() -> bool + Sync),
    /// The kernels so far, in order.
    pub launched: Vec<&'static str>,
}

impl<'a> Common<'a> {
    pub fn new(inputs: &Inputs<'_>, checker: Option<&'a Checker>, peer_failed: &'a (dyn Fn() -> bool + Sync)) -> Self {
        Self::of((inputs.op, inputs.dtype()), checker, peer_failed)
    }

    /// For kernels of this operation and element type.
    pub fn of(
        (op, dtype): (Op, Dtype),
        checker: Option<&'a Checker>,
        peer_failed: &'a (dyn Fn() -> bool + Sync),
    ) -> Self {
        Self { op, dtype, checker, peer_failed, launched: Vec::new() }
    }

    pub fn launch<X: Executor, K: Kernel>(
        &mut self,
        exec: &mut X,
        blocks: impl Into<Blocks>,
        params: &K,
    ) -> Result<(), ExecError> {
        let launch = self.one(blocks.into());
        self.launched.push(K::NAME);
        exec.launch(&launch, params)
    }

    /// A launch of these blocks.
    pub fn one(&self, blocks: Blocks) -> Launch<'a> {
        let Self { op, dtype, checker, peer_failed, .. } = *self;
        Launch { op, dtype, blocks, checker, peer_failed }
    }

    /// Checked mode, in which launches end before they return: whether all that had to be written was.
    pub fn finish<X: Executor>(&self, exec: &X, step: &Step<'_>) -> Result<(), OpError> {
        if self.checker.is_some() {
            step.check_trap(exec)?;
        }
        Ok(self.check_written()?)
    }

    /// [`finish`](Self::finish) of a step in which no wait has expired.
    pub fn check_written(&self) -> Result<(), ExecError> {
        match self.checker {
            Some(checker) => Ok(checker.finish(&self.launched.join(", "))?),
            None => Ok(()),
        }
    }
}

impl Step<'_> {
    /// This PE's part of the plan.
    pub fn rank(&self) -> &RankPlan {
        &self.plan.ranks[self.pe.rank()]
    }

    /// How this PE cuts its segments, those of `rank`, the plan's own and not its mirror's.
    pub fn cut<X: Executor>(&self, exec: &X, rank: &RankPlan) -> Parts {
        let (_, walkers) = self.scan_blocks(self.body(exec), true);
        let blocks = self.dims.hv * (self.layout.blocks() as usize).div_ceil(walkers);
        Parts::of(rank, self.config, Room { multiprocessors: exec.multiprocessors(), blocks })
    }

    /// What of this PE's segments is walked by itself.
    pub fn walks(&self) -> Vec<Walk> {
        self.parts.walks(self.rank(), self.config.chunk)
    }

    /// Rows of this PE's tables: lanes in which it receives and those of parts, and value heads. None in exact mode, in which
    /// nothing is corrected.
    pub fn rows(&self) -> usize {
        let lanes = self.rank().receiving().count() + self.parts.lanes();
        if self.config.mode == Mode::Exact { 0 } else { lanes * self.dims.hv }
    }

    /// Sizes as kernels take them.
    pub fn sizes(&self) -> Sizes {
        let Dims { h, hv, k, v, .. } = *self.dims;
        Sizes { h: h as u32, hv: hv as u32, k: k as u32, v: v as u32, chunk: self.config.chunk as u32, pad: 0 }
    }

    /// 1 if states are `[V,K]` in the caller's memory.
    pub fn v_first(&self) -> u32 {
        u32::from(self.inputs.state_layout == StateLayout::VFirst)
    }

    /// Element type of M on the wire, and where it is kept.
    pub fn m_dtype(&self) -> Dtype {
        self.config.m_wire.resolve(self.inputs.dtype())
    }

    /// The forward scan's blocks, with or without columns of M, and how many column blocks each walks.
    pub fn scan_blocks(&self, body: Body, with_m: bool) -> (Blocks, usize) {
        let (element, grid) = (self.inputs.dtype().size(), Grid::Resident);
        let bytes = |n| scan::shared_bytes(self.dims.k, self.config.chunk, element, n);
        match body {
            Body::Portable => {
                let walkers = if bytes(scan::WARPGROUPS) <= SHARED_BYTES { scan::WARPGROUPS } else { 1 };
                ((grid, walkers, bytes(walkers)).into(), walkers)
            }
            Body::Hopper => {
                // Blocks of one column block spread over more multiprocessors, but each reads all operands of its head:
                // with the columns of M there are enough blocks without. The body of one has nothing for M.
                let walkers = if with_m { 2 } else { 1 };
                let shared_bytes = hopper::scan_shared(walkers);
                (Blocks { grid, body, warpgroups: walkers + 1, shared_bytes }, walkers)
            }
        }
    }

    /// The blocks of `prep`.
    pub fn prep_blocks(&self, body: Body, chunks: usize) -> Blocks {
        let grid = Grid::Blocks(chunks * self.dims.hv);
        match body {
            Body::Portable => {
                let (element, per_channel) = (self.inputs.dtype().size(), self.inputs.op == Op::Kda);
                let shared_bytes = prep::shared_bytes(self.dims.k, self.config.chunk, element, per_channel);
                (grid, prep::WARPGROUPS, shared_bytes).into()
            }
            Body::Hopper => {
                let shared_bytes = match self.inputs.op {
                    Op::Kda => hopper::PREP_SHARED,
                    Op::Gdn => hopper::PREP_SCALAR_SHARED,
                };
                Blocks { grid, body, warpgroups: hopper::PREP_WARPGROUPS, shared_bytes }
            }
        }
    }

    /// Elements of the records of `chunks` chunks, and of their decays.
    pub fn record_lens(&self, chunks: usize) -> (usize, usize) {
        let rows = chunks * self.dims.hv;
        (rows * Records::record_len(&self.sizes()), rows * self.dims.k)
    }

    /// This PE's side of the channel, for kernels.
    pub fn channel_params<X: Executor>(
        &self,
        exec: &X,
        parts: &ChannelParts,
        placed: Placed,
        channel: Option<&Channel>,
    ) -> params::Channel {
        let mode = match self.config.mode {
            Mode::Overlap => StepMode::Overlap,
            Mode::Bulk => StepMode::Bulk,
            Mode::Exact => StepMode::Exact,
        };
        parts.at(exec, self.pe, (placed, self.layout), self.vitals, (channel, mode))
    }

    /// The first launch: tickets and counts from zero, and the next epoch of the channel.
    pub fn begin<X: Executor>(&self, exec: &mut X, placed: Placed, channel: Option<&Channel>) -> Result<(), ExecError> {
        exec.begin(&beginning(placed, self.vitals, channel))
    }

    pub fn prep_params<X: Executor>(
        &self,
        exec: &mut X,
        tables: Tables,
        records: Records,
        trace: TraceBuffer,
    ) -> Result<PrepParams, ExecError> {
        let x = self.inputs;
        let (g, a_log, dt_bias, form, bound) = match &x.gate {
            Gate::Given(g) => (g, None, None, GateForm::Given, 0.0),
            Gate::Softplus { raw, a_log, dt_bias } => (raw, Some(a_log), dt_bias.as_ref(), GateForm::Softplus, 0.0),
            Gate::LowerBound { raw, a_log, dt_bias, bound } => {
                (raw, a_log.as_ref(), dt_bias.as_ref(), GateForm::LowerBound, *bound)
            }
        };
        let (beta, beta_factor) = match &x.beta {
            Beta::Given(beta) => (beta, 0.0),
            Beta::Logits { logits, factor } => (logits, *factor),
        };
        Ok(PrepParams {
            tables,
            q: exec.input(Slot::Q, &x.q)?,
            k: exec.input(Slot::K, &x.k)?,
            g: exec.input(Slot::Gate, g)?,
            beta: exec.input(Slot::Beta, beta)?,
            a_log: optional(exec, Slot::ALog, a_log)?,
            dt_bias: optional(exec, Slot::DtBias, dt_bias)?,
            records,
            gate_form: form as u32,
            l2norm: u32::from(x.l2norm),
            bound,
            scale: x.scale_or_default(self.dims),
            beta_factor,
            pad: 0,
            beside: Beside::none(),
            trace,
        })
    }

    /// Bulk mode: all scans have left their summaries; takes those that this PE needs. Collective. `empty`: of each row that this
    /// PE sends, which blocks of M are not there (bit i for the i-th).
    pub fn exchange<X: Executor>(&self, exec: &mut X, channel: &Channel, empty: &[u32]) -> Result<(), OpError> {
        let all_empty = if self.config.cut_tolerance > 0.0 {
            self.pe.all_gather("exchange of summaries", bytemuck::cast_slice(empty))?
        } else {
            self.pe.barrier("exchange of summaries")?;
            Vec::new()
        };
        let is_empty = |source: usize, row: usize, block: u32| {
            let Some(i) = block.checked_sub(self.layout.s_blocks()) else { return false };
            let rows = all_empty.get(source).map_or(&[][..], Vec::as_slice).chunks_exact(4);
            let mask = rows.skip(row).map(|mask| u32::from_ne_bytes([mask[0], mask[1], mask[2], mask[3]])).next();
            mask.is_some_and(|mask| mask >> i & 1 == 1)
        };
        let (layout, hv, parity) = (&self.layout, self.dims.hv as u32, parity(channel.epoch()));
        let own = self.pe.rank();
        for (segment, receive) in self.rank().receiving() {
            for (i, &source) in receive.from.iter().enumerate() {
                let sending = self.plan.ranks[source].sending().find(|(s, _)| s.seq == segment.seq);
                let (_, send) = sending.expect("a plan's sends mirror its receives");
                let rank = source;
                let theirs = channel.payload_of(rank).ok_or(ExecError::NotReached { rank })?;
                let mine = channel.payload_of(own).ok_or(ExecError::NotReached { rank: own })?;
                let blocks = if i == 0 { layout.s_blocks() } else { layout.blocks() };
                for head in 0..hv {
                    for block in 0..blocks {
                        if is_empty(source, send.lane * hv as usize + head as usize, block) {
                            continue;
                        }
                        let from = layout.slot(source as u32, parity, send.lane as u32 * hv + head, block);
                        let to = layout.slot(source as u32, parity, receive.lane as u32 * hv + head, block);
                        let (to, from, bytes) = (mine + to.offset as u64, theirs + from.offset as u64, from.bytes);
                        // SAFETY: both slots lie inside the payload, which every PE has allocated with this layout. The
                        // barrier came after the scan that wrote the source, which is not written again before this
                        // PE's ack; nothing else touches the destination until then.
                        unsafe { exec.copy(to, from, bytes)? };
                    }
                }
            }
        }
        Ok(())
    }

    /// The error of a wait that expired in a kernel; another PE's failure, if that was the reason.
    pub fn check_trap<X: Executor>(&self, exec: &X) -> Result<(), OpError> {
        launched::check_trap(exec, self.pe, self.dims.hv)
    }

    /// The step, all of whose launches `common` has made.
    pub fn launched<X: Executor>(&self, exec: &X, title: &'static str, common: Common<'_>) -> Launched {
        Launched {
            title,
            kernels: common.launched,
            exchange: std::time::Duration::ZERO,
            tokens: self.dims.b * self.dims.t,
            hv: self.dims.hv,
            parts: self.parts.most(),
            on_host: self.waits_on_host(exec),
            cuts: None,
        }
    }

    /// Whether PEs must wait for each other on the host in this step.
    pub fn waits_on_host<X: Executor>(&self, exec: &X) -> bool {
        exec.waits() == Waits::Host && self.pe.size() > 1
    }
}

/// A tensor of the caller's that need not be there.
pub(super) fn optional<X: Executor>(exec: &mut X, slot: Slot, x: Option<&TensorView<'_>>) -> Result<Param, ExecError> {
    x.map_or_else(|| Ok(Param::absent()), |x| exec.input(slot, x))
}
