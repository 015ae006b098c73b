//! One forward step on one PE: parameters, launches, and what the kernels left.

use std::time::{Duration, Instant};

use kernels_gpu::fixup;
use kernels_gpu::hopper;
use kernels_gpu::params::{
    self, FixParams, GateForm, PrepParams, Records, ScanParams, Sizes, Stamp, StepMode, StepStats, Tables,
    Tensor as Param, TraceBuffer,
};
use kernels_gpu::prep;
use kernels_gpu::protocol::{ChannelLayout, TrapRecord, Watch, parity};
use kernels_gpu::scan::{self, own_len};
use kernels_gpu::tile::SHARED_BYTES;
use kernels_gpu::tile::host::Checker;

use super::channel::Channel;
use super::error::ExpiredWait;
use super::tables::HostTables;
use super::{Config, Forward, KernelTime, Mode, OpError, Report};
use crate::exec::cpu::code;
use crate::exec::{Body, ExecError, Executor, Grid, Image, Kernel, Launch, Part, Scratch, Slot, Waits};
use crate::inputs::{Beta, Dims, Gate, Inputs, Op, StateLayout};
use crate::plan::{Plan, RankPlan};
use crate::tensor::{Dtype, Tensor, TensorView};
use crate::world::Pe;

/// Stamps that a traced step has room for.
const STAMPS: usize = 1 << 16;

/// What a step works on.
pub(super) struct Step<'a> {
    pub pe: &'a Pe,
    pub plan: &'a Plan,
    pub inputs: &'a Inputs<'a>,
    pub dims: &'a Dims,
    pub config: &'a Config,
    pub layout: ChannelLayout,
}

/// Elements `start ..` of a tensor.
fn part(x: &Param, start: usize, len: usize) -> Param {
    Param { addr: x.addr + (start * x.dtype().size()) as u64, len: len as u64, ..*x }
}

/// Tables that kernels read and words that they write, as parts of one image.
struct Parts {
    chunks: Part,
    segments: Part,
    sources: Part,
    targets: Part,
    scan_items: Part,
    fix_items: Part,
    payload: Part,
    words: Part,
    ways: Part,
    epoch: Part,
    scan_ticket: Part,
    fix_ticket: Part,
    stats: Part,
    trap: Part,
    cursor: Part,
    stamps: Part,
}

impl Parts {
    fn push(image: &mut Image, tables: &HostTables, channel: Option<&Channel>, trace: bool) -> Self {
        Self {
            chunks: image.push(&tables.chunks),
            segments: image.push(&tables.segments),
            sources: image.push(&tables.sources),
            targets: image.push(&tables.targets),
            scan_items: image.push(&tables.scan),
            fix_items: image.push(&tables.fix),
            payload: image.push(&channel.map_or_else(Vec::new, Channel::payload_addresses)),
            words: image.push(&channel.map_or_else(Vec::new, Channel::word_addresses)),
            ways: image.push(channel.map_or(&[][..], Channel::ways)),
            epoch: image.push(&[channel.map_or(0, Channel::epoch)]),
            scan_ticket: image.push_zeroed::<u64>(1),
            fix_ticket: image.push_zeroed::<u64>(1),
            stats: image.push_zeroed::<u64>(size_of::<StepStats>() / 8),
            trap: image.push_zeroed::<TrapRecord>(1),
            cursor: image.push_zeroed::<u64>(usize::from(trace)),
            stamps: image.push_zeroed::<Stamp>(if trace { STAMPS } else { 0 }),
        }
    }
}

/// Where the tensors of a step lie.
#[derive(Clone, Copy)]
struct Memory {
    records: Records,
    o: Param,
    finals: Param,
    o_local: Param,
    q_tilde: Param,
    own: Param,
    state_in: Param,
}

/// What is the same for a step's launches.
struct Common<'a> {
    op: Op,
    dtype: Dtype,
    checker: Option<&'a Checker>,
    peer_failed: &'a (dyn Fn() -> bool + Sync),
    launched: Vec<&'static str>,
}

impl Common<'_> {
    fn launch<X: Executor, K: Kernel>(
        &mut self,
        exec: &mut X,
        (grid, body, warpgroups, shared_bytes): (Grid, Body, usize, usize),
        params: &K,
    ) -> Result<(), ExecError> {
        let (op, dtype, checker, peer_failed) = (self.op, self.dtype, self.checker, self.peer_failed);
        self.launched.push(K::NAME);
        exec.launch(&Launch { op, dtype, grid, body, warpgroups, shared_bytes, checker, peer_failed }, params)
    }
}

impl Step<'_> {
    fn rank(&self) -> &RankPlan {
        &self.plan.ranks[self.pe.rank()]
    }

    /// Runs the step.
    pub fn run<X: Executor>(&self, exec: &mut X, channel: Option<&mut Channel>) -> Result<Forward, OpError> {
        let (config, rank) = (self.config, self.rank());
        let Dims { b, t, h, hv, k, v } = *self.dims;
        let dtype = self.inputs.dtype();
        let element = dtype.size();
        let sizes = Sizes { h: h as u32, hv: hv as u32, k: k as u32, v: v as u32, chunk: config.chunk as u32, pad: 0 };
        let body = exec.body(&sizes, dtype);
        let shape = scan_shape(body, &sizes, dtype, rank.receiving().next().is_some());
        let tables = HostTables::new(rank, config.mode, config.chunk, hv as u32, &self.layout, shape.walkers as u32);
        let mut o = Tensor::zeros(dtype, &[b, t, hv, v]);
        let state_shape = match self.inputs.state_layout {
            StateLayout::KFirst => [rank.ends.len(), hv, k, v],
            StateLayout::VFirst => [rank.ends.len(), hv, v, k],
        };
        let mut finals = config.final_state.then(|| Tensor::zeros(Dtype::F32, &state_shape));
        let memory = self.memory(exec, &tables, sizes, &mut o, finals.as_mut())?;

        let channel = channel.map(|channel| {
            channel.advance();
            &*channel
        });
        let mut image = Image::default();
        let parts = Parts::push(&mut image, &tables, channel, config.trace);
        let base = exec.put_image(&image)?;
        let device_tables = Tables {
            sizes,
            chunks: parts.chunks.at(base),
            segments: parts.segments.at(base),
            sources: parts.sources.at(base),
            targets: parts.targets.at(base),
        };
        let watch = params::Array { addr: exec.watch()?, len: (size_of::<Watch>() / size_of::<u64>()) as u64 };
        let device_channel = self.channel_params(&parts, base, watch);
        let trace = TraceBuffer { stamps: parts.stamps.at(base), cursor: parts.cursor.at(base) };

        let v_first = u32::from(self.inputs.state_layout == StateLayout::VFirst);
        let m_dtype = code(config.m_wire.resolve(dtype)) as u32;
        let prep_params = self.prep_params(exec, device_tables, memory.records, trace)?;
        let Memory { records, o: o_param, finals: finals_param, o_local, q_tilde, own, state_in } = memory;
        let scan_params = ScanParams {
            tables: device_tables,
            records,
            v: exec.input(Slot::V, &self.inputs.v)?,
            o: o_param,
            o_local,
            q_tilde,
            initial: optional(exec, Slot::InitialState, self.inputs.initial_state.as_ref())?,
            finals: finals_param,
            own,
            items: parts.scan_items.at(base),
            ticket: parts.scan_ticket.at(base),
            channel: device_channel,
            trace,
            v_first,
            m_dtype,
        };
        let fix_params = FixParams {
            tables: device_tables,
            o_local,
            q_tilde,
            own,
            state_in,
            o: o_param,
            finals: finals_param,
            items: parts.fix_items.at(base),
            ticket: parts.fix_ticket.at(base),
            channel: device_channel,
            trace,
            v_first,
            m_dtype,
        };
        let mut checker = Checker::new();
        let checked = config.checked && exec.checks();
        if checked {
            self.expect_outputs(&mut checker, &memory);
        }
        let checker = checked.then_some(&checker);
        let peer_failed = || self.pe.failed_peer().is_some();
        let op = self.inputs.op;
        let mut common = Common { op, dtype, checker, peer_failed: &peer_failed, launched: Vec::new() };

        let waits = exec.waits();
        let on_host = waits == Waits::Host && self.pe.size() > 1;
        if on_host {
            // Allocating may wait for what runs on the device.
            self.pe.barrier("memory for the step")?;
        }
        let (warpgroups, shared) = match body {
            Body::Portable => (prep::WARPGROUPS, prep::shared_bytes(k, config.chunk, element, op == Op::Kda)),
            Body::Hopper => (hopper::PREP_WARPGROUPS, hopper::PREP_SHARED),
        };
        common.launch(exec, (Grid::Blocks(tables.chunks.len() * hv), body, warpgroups, shared), &prep_params)?;
        let scan = (Grid::Resident, body, shape.warpgroups, shape.shared_bytes);
        if on_host && config.mode == Mode::Exact {
            // Each scan waits for that of the PE before it.
            for turn in 0..self.pe.size() {
                if turn == self.pe.rank() {
                    common.launch(exec, scan, &scan_params)?;
                    exec.get_image(&mut image, &peer_failed)?;
                }
                self.pe.barrier("scans in turn")?;
            }
        } else {
            common.launch(exec, scan, &scan_params)?;
        }
        if on_host && config.mode == Mode::Overlap {
            exec.get_image(&mut image, &peer_failed)?;
            self.pe.barrier("scans of the step")?;
        }

        let mut exchange = Duration::ZERO;
        if let (Mode::Bulk, Some(channel)) = (config.mode, channel) {
            exec.get_image(&mut image, &peer_failed)?;
            self.check_trap(exec)?;
            let start = Instant::now();
            self.exchange(exec, channel, &sizes)?;
            exchange = start.elapsed();
        }
        if !tables.fix.is_empty() {
            let shared = fixup::shared_bytes(k, config.chunk, element);
            common.launch(exec, (Grid::Resident, Body::Portable, fixup::WARPGROUPS, shared), &fix_params)?;
        }
        exec.get_image(&mut image, &peer_failed)?;
        self.check_trap(exec)?;
        if let Some(checker) = checker {
            checker.finish(&common.launched.join(", ")).map_err(ExecError::from)?;
        }
        exec.fetch(Slot::Output, &mut o)?;
        if let Some(finals) = &mut finals {
            exec.fetch(Slot::FinalState, finals)?;
        }
        let stats: StepStats = bytemuck::cast_slice(&image.get::<u64>(parts.stats))[0];
        let mut report = Report { tokens: b * t, exposed_wait: exchange, ..Report::default() };
        let times = exec.take_times()?;
        report.kernels = common.launched.iter().zip(times).map(|(&kernel, time)| KernelTime { kernel, time }).collect();
        report.count(&stats, exec.concurrency());
        let total: Duration = report.kernels.iter().map(|k| k.time).sum();
        report.compute = (total + exchange).saturating_sub(report.exposed_wait + report.slot_wait);
        report.scratch_bytes = exec.scratch_bytes();
        report.heap_bytes = exec.heap_bytes(self.pe);
        report.peak_device_bytes = exec.peak_device_bytes(self.pe);
        report.waits = waits;
        let trace = config.trace.then(|| {
            let asked = image.get::<u64>(parts.cursor)[0];
            super::report::timeline(self.pe.rank(), &image.get::<Stamp>(parts.stamps), asked, hv, waits)
        });
        Ok(Forward { o, final_state: finals, report, trace })
    }

    /// Results and scratch memory.
    fn memory<X: Executor>(
        &self,
        exec: &mut X,
        tables: &HostTables,
        sizes: Sizes,
        o: &mut Tensor,
        finals: Option<&mut Tensor>,
    ) -> Result<Memory, ExecError> {
        let Dims { hv, k, v, .. } = *self.dims;
        let (rank, dtype, chunks) = (self.rank(), self.inputs.dtype(), tables.chunks.len());
        // In exact mode nothing is corrected.
        let corrects = self.config.mode != Mode::Exact;
        let corrected = rank.receiving().filter(|_| corrects).map(|(s, _)| s.start + s.len).max().unwrap_or(0);
        let receiving = rank.receiving().filter(|_| corrects).count() * hv;
        let operands = chunks * hv * Records::record_len(&sizes);
        Ok(Memory {
            records: Records {
                operands: exec.scratch(Scratch::Operands, operands, dtype)?,
                decay: exec.scratch(Scratch::Decay, chunks * hv * k, Dtype::F32)?,
                sizes,
            },
            o: exec.output(Slot::Output, o)?,
            finals: match finals {
                Some(finals) => exec.output(Slot::FinalState, finals)?,
                None => Param::absent(),
            },
            o_local: exec.scratch(Scratch::OLocal, corrected * hv * v, Dtype::F32)?,
            q_tilde: exec.scratch(Scratch::QTilde, corrected * hv * k, dtype)?,
            own: exec.scratch(Scratch::Own, receiving * own_len(&self.layout), Dtype::F32)?,
            state_in: exec.scratch(Scratch::StateIn, receiving * v * k, Dtype::F32)?,
        })
    }

    fn channel_params(&self, parts: &Parts, base: u64, watch: params::Array) -> params::Channel {
        params::Channel {
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
        }
    }

    fn prep_params<X: Executor>(
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

    /// Tells the checker what the step must write.
    fn expect_outputs(&self, checker: &mut Checker, memory: &Memory) {
        let Dims { hv, k, v, .. } = *self.dims;
        let outputs = [
            ("records", &memory.records.operands),
            ("decay", &memory.records.decay),
            ("o", &memory.o),
            ("final_state", &memory.finals),
        ];
        for (name, tensor) in outputs.into_iter().filter(|(_, tensor)| tensor.is_present()) {
            checker.expect_written(name, *tensor);
        }
        for (segment, _) in self.rank().receiving().filter(|_| self.config.mode != Mode::Exact) {
            let (start, len) = (segment.start * hv, segment.len * hv);
            checker.expect_written("o_local", part(&memory.o_local, start * v, len * v));
            checker.expect_written("q_tilde", part(&memory.q_tilde, start * k, len * k));
        }
    }

    /// Bulk mode: all scans have left their summaries; takes those that this PE needs. Collective.
    fn exchange<X: Executor>(&self, exec: &mut X, channel: &Channel, sizes: &Sizes) -> Result<(), OpError> {
        self.pe.barrier("exchange of summaries")?;
        let (layout, hv, parity) = (&self.layout, sizes.hv, parity(channel.epoch()));
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
    fn check_trap<X: Executor>(&self, exec: &X) -> Result<(), OpError> {
        let trap = exec.trap();
        if trap.state == TrapRecord::CLEAR {
            return Ok(());
        }
        if let Some((rank, message)) = self.pe.failed_peer() {
            return Err(crate::world::WorldError::PeFailed { rank, message }.into());
        }
        Err(OpError::Expired(ExpiredWait { expired: trap.expired, hv: self.dims.hv as u32 }))
    }
}

/// Shape of the scan's blocks.
struct ScanShape {
    /// Warpgroups that walk a column block each.
    walkers: usize,
    /// All warpgroups.
    warpgroups: usize,
    shared_bytes: usize,
}

fn scan_shape(body: Body, sizes: &Sizes, dtype: Dtype, with_m: bool) -> ScanShape {
    let (k, chunk) = (sizes.k as usize, sizes.chunk as usize);
    match body {
        Body::Portable => {
            let shared_bytes = |n| scan::shared_bytes(k, chunk, dtype.size(), n);
            let walkers = if shared_bytes(scan::WARPGROUPS) <= SHARED_BYTES { scan::WARPGROUPS } else { 1 };
            ScanShape { walkers, warpgroups: walkers, shared_bytes: shared_bytes(walkers) }
        }
        Body::Hopper => {
            // Blocks of one column block spread over more multiprocessors, but each reads all operands of its head: with the
            // columns of M there are enough of them without.
            let walkers = if with_m { 2 } else { 1 };
            ScanShape { walkers, warpgroups: walkers + 1, shared_bytes: hopper::scan_shared(walkers) }
        }
    }
}

fn optional<X: Executor>(exec: &mut X, slot: Slot, x: Option<&TensorView<'_>>) -> Result<Param, ExecError> {
    x.map_or_else(|| Ok(Param::absent()), |x| exec.input(slot, x))
}
