//! What forward and backward steps share: their tables and words on the device, launches, the exchange between launches, and
//! what the kernels left.

use std::time::Duration;

use kernels_gpu::hopper;
use kernels_gpu::params::{
    self, GateForm, PrepParams, Records, Sizes, Stamp, StepMode, StepStats, Tables, Tensor as Param, TraceBuffer,
};
use kernels_gpu::prep;
use kernels_gpu::protocol::{ChannelLayout, TrapRecord, Watch, parity};
use kernels_gpu::scan;
use kernels_gpu::tile::SHARED_BYTES;
use kernels_gpu::tile::host::Checker;

use super::channel::Channel;
use super::error::ExpiredWait;
use super::tables::HostTables;
use super::{Config, KernelTime, Mode, OpError, Report};
use crate::exec::{Blocks, Body, ExecError, Executor, Grid, Image, Kernel, Launch, Part, Slot, Waits};
use crate::inputs::{Beta, Dims, Gate, Inputs, Op, StateLayout};
use crate::plan::{Plan, RankPlan};
use crate::tensor::{Dtype, TensorView};
use crate::trace::Trace;
use crate::world::Pe;

/// Stamps that a traced step has room for.
const STAMPS: usize = 1 << 16;

/// What a step works on.
pub(super) struct Step<'a> {
    pub pe: &'a Pe,
    /// Whose roles the step's messages follow: backward, the [mirror](Plan::mirrored) of the plan.
    pub plan: &'a Plan,
    pub inputs: &'a Inputs<'a>,
    pub dims: &'a Dims,
    pub config: &'a Config,
    pub layout: ChannelLayout,
    /// Whether PEs wait for each other before the first launch, see [`super::ContextParallel::align_starts`].
    pub aligned: bool,
}

/// Elements `start ..` of a tensor.
pub(super) fn part(x: &Param, start: usize, len: usize) -> Param {
    Param { addr: x.addr + (start * x.dtype().size()) as u64, len: len as u64, ..*x }
}

/// A rank's tables in a step's image.
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

    pub fn at(&self, base: u64, sizes: Sizes) -> Tables {
        Tables {
            sizes,
            chunks: self.chunks.at(base),
            segments: self.segments.at(base),
            sources: self.sources.at(base),
            targets: self.targets.at(base),
        }
    }
}

/// A list of work items and the ticket by which blocks take them.
pub(super) struct WorkParts {
    pub items: Part,
    pub ticket: Part,
}

impl WorkParts {
    pub fn push<T: bytemuck::Pod>(image: &mut Image, items: &[T]) -> Self {
        Self { items: image.push(items), ticket: image.push_zeroed::<u64>(1) }
    }
}

/// This PE's side of the channel, and the words that kernels leave: counts, time stamps, the wait that expired.
pub(super) struct WordParts {
    payload: Part,
    words: Part,
    ways: Part,
    epoch: Part,
    stats: Part,
    trap: Part,
    cursor: Part,
    stamps: Part,
}

impl WordParts {
    pub fn push(image: &mut Image, channel: Option<&Channel>, trace: bool) -> Self {
        Self {
            payload: image.push(&channel.map_or_else(Vec::new, Channel::payload_addresses)),
            words: image.push(&channel.map_or_else(Vec::new, Channel::word_addresses)),
            ways: image.push(channel.map_or(&[][..], Channel::ways)),
            epoch: image.push(&[channel.map_or(0, Channel::epoch)]),
            stats: image.push_zeroed::<u64>(size_of::<StepStats>() / 8),
            trap: image.push_zeroed::<TrapRecord>(1),
            cursor: image.push_zeroed::<u64>(usize::from(trace)),
            stamps: image.push_zeroed::<Stamp>(if trace { STAMPS } else { 0 }),
        }
    }

    pub fn trace_buffer(&self, base: u64) -> TraceBuffer {
        TraceBuffer { stamps: self.stamps.at(base), cursor: self.cursor.at(base) }
    }
}

/// What is the same for a step's launches.
pub(super) struct Common<'a> {
    op: Op,
    dtype: Dtype,
    checker: Option<&'a Checker>,
    peer_failed: &'a (dyn Fn() -> bool + Sync),
    launched: Vec<&'static str>,
}

impl<'a> Common<'a> {
    pub fn new(inputs: &Inputs<'_>, checker: Option<&'a Checker>, peer_failed: &'a (dyn Fn() -> bool + Sync)) -> Self {
        Self { op: inputs.op, dtype: inputs.dtype(), checker, peer_failed, launched: Vec::new() }
    }

    pub fn launch<X: Executor, K: Kernel>(
        &mut self,
        exec: &mut X,
        blocks: impl Into<Blocks>,
        params: &K,
    ) -> Result<(), ExecError> {
        let (op, dtype, checker, peer_failed) = (self.op, self.dtype, self.checker, self.peer_failed);
        self.launched.push(K::NAME);
        exec.launch(&Launch { op, dtype, blocks: blocks.into(), checker, peer_failed }, params)
    }

    /// Checked mode: whether all that had to be written was.
    pub fn finish(&self) -> Result<(), ExecError> {
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

    /// Sizes as kernels take them.
    pub fn sizes(&self) -> Sizes {
        let Dims { h, hv, k, v, .. } = *self.dims;
        Sizes { h: h as u32, hv: hv as u32, k: k as u32, v: v as u32, chunk: self.config.chunk as u32, pad: 0 }
    }

    /// Shape of `rows` states in the caller's layout.
    pub fn state_shape(&self, rows: usize) -> [usize; 4] {
        let Dims { hv, k, v, .. } = *self.dims;
        match self.inputs.state_layout {
            StateLayout::KFirst => [rows, hv, k, v],
            StateLayout::VFirst => [rows, hv, v, k],
        }
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
        match body {
            Body::Portable => {
                let bytes = |n| scan::shared_bytes(self.dims.k, self.config.chunk, element, n);
                let walkers = if bytes(scan::WARPGROUPS) <= SHARED_BYTES { scan::WARPGROUPS } else { 1 };
                ((grid, walkers, bytes(walkers)).into(), walkers)
            }
            Body::Hopper => {
                // Blocks of one column block spread over more multiprocessors, but each reads all operands of its head:
                // with the columns of M there are enough blocks without.
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
                Blocks { grid, body, warpgroups: hopper::PREP_WARPGROUPS, shared_bytes: hopper::PREP_SHARED }
            }
        }
    }

    /// Elements of the records of `chunks` chunks, and of their decays.
    pub fn record_lens(&self, chunks: usize) -> (usize, usize) {
        let rows = chunks * self.dims.hv;
        (rows * Records::record_len(&self.sizes()), rows * self.dims.k)
    }

    /// This PE's side of the channel, for kernels; clears the page that they share with the host.
    pub fn channel_params<X: Executor>(
        &self,
        exec: &mut X,
        parts: &WordParts,
        base: u64,
    ) -> Result<params::Channel, ExecError> {
        let watch = params::Array { addr: exec.watch()?, len: (size_of::<Watch>() / size_of::<u64>()) as u64 };
        Ok(params::Channel {
            layout: self.layout,
            pad: 0,
            payload: parts.payload.at(base),
            words: parts.words.at(base),
            ways: parts.ways.at(base),
            trap: parts.trap.at(base),
            watch,
            stats: parts.stats.at(base),
            epoch: parts.epoch.at(base),
            timeout_ns: self.pe.timeout().as_nanos() as u64,
            pe: self.pe.rank() as u32,
            mode: match self.config.mode {
                Mode::Overlap => StepMode::Overlap,
                Mode::Bulk => StepMode::Bulk,
                Mode::Exact => StepMode::Exact,
            } as u32,
        })
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
        let trap = exec.trap();
        if trap.state == TrapRecord::CLEAR {
            return Ok(());
        }
        if let Some((rank, message)) = self.pe.failed_peer() {
            return Err(crate::world::WorldError::PeFailed { rank, message }.into());
        }
        Err(OpError::Expired(ExpiredWait { expired: trap.expired, hv: self.dims.hv as u32 }))
    }

    /// Counts and times of the step, after its last launch.
    pub fn report<X: Executor>(
        &self,
        exec: &mut X,
        image: &Image,
        parts: &WordParts,
        common: &Common<'_>,
        exchange: Duration,
    ) -> Result<Report, OpError> {
        let stats: StepStats = bytemuck::cast_slice(&image.get::<u64>(parts.stats))[0];
        let mut report = Report { tokens: self.dims.b * self.dims.t, exposed_wait: exchange, ..Report::default() };
        let times = exec.take_times()?;
        let kernels = common.launched.iter().zip(times.launches).map(|(&kernel, time)| KernelTime { kernel, time });
        report.kernels = kernels.collect();
        report.device_time = times.span;
        report.count(&stats, exec.concurrency());
        let total: Duration = report.kernels.iter().map(|k| k.time).sum();
        report.compute = (total + exchange).saturating_sub(report.exposed_wait + report.slot_wait);
        report.scratch_bytes = exec.scratch_bytes();
        report.heap_bytes = exec.heap_bytes(self.pe);
        report.peak_device_bytes = exec.peak_device_bytes(self.pe);
        report.waits = exec.waits();
        Ok(report)
    }

    /// Whether PEs must wait for each other on the host in this step.
    pub fn waits_on_host<X: Executor>(&self, exec: &X) -> bool {
        exec.waits() == Waits::Host && self.pe.size() > 1
    }

    /// The timeline of the step, if it was asked for.
    pub fn timeline<X: Executor>(&self, exec: &X, title: &str, image: &Image, parts: &WordParts) -> Option<Trace> {
        self.config.trace.then(|| {
            let asked = image.get::<u64>(parts.cursor)[0];
            let stamps = image.get::<Stamp>(parts.stamps);
            let on_host = if self.waits_on_host(exec) { ", PEs that share a device wait on the host" } else { "" };
            super::report::timeline(&format!("{title}{on_host}"), self.pe.rank(), &stamps, asked, self.dims.hv)
        })
    }
}

/// A tensor of the caller's that need not be there.
pub(super) fn optional<X: Executor>(exec: &mut X, slot: Slot, x: Option<&TensorView<'_>>) -> Result<Param, ExecError> {
    x.map_or_else(|| Ok(Param::absent()), |x| exec.input(slot, x))
}
