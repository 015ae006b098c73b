//! One forward step on one PE: parameters, launches, and what the kernels left.

use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use half::{bf16, f16};
use kernels_gpu::element::Element;
use kernels_gpu::fixup::{self, fix_out};
use kernels_gpu::gate::{Gdn, Kda};
use kernels_gpu::params::{
    self, Array, FixParams, GateForm, PrepParams, Records, ScanParams, Sizes, Stamp, StepMode, StepStats, Tables,
    Tensor as Param, TraceBuffer,
};
use kernels_gpu::prep::{self, prep};
use kernels_gpu::protocol::{ChannelLayout, TrapRecord, parity};
use kernels_gpu::scan::{self, own_len, scan_push};
use kernels_gpu::tile::host::Checker;
use kernels_gpu::tile::{SHARED_BYTES, Warpgroup};

use super::channel::Channel;
use super::error::ExpiredWait;
use super::tables::HostTables;
use super::workspace::{Workspace, code};
use super::{Config, Forward, KernelTime, Mode, OpError, Report};
use crate::exec::cpu::{Cpu, Grid, Launch};
use crate::inputs::{Beta, Dims, Gate, Inputs, Op, StateLayout};
use crate::plan::{Plan, RankPlan};
use crate::tensor::{Data, Dtype, Tensor, TensorView};
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

/// The kernels for one element type.
struct Kernels {
    prep: fn(&mut Warpgroup<'_>, &PrepParams),
    scan: fn(&mut Warpgroup<'_>, &ScanParams),
    fix: fn(&mut Warpgroup<'_>, &FixParams),
}

impl Kernels {
    fn new(op: Op, dtype: Dtype) -> Self {
        fn of<E: Element>(op: Op) -> Kernels {
            let prep = match op {
                Op::Kda => prep::<Kda, E>,
                Op::Gdn => prep::<Gdn, E>,
            };
            Kernels { prep, scan: scan_push::<E>, fix: fix_out::<E> }
        }
        match dtype {
            Dtype::F32 => of::<f32>(op),
            Dtype::Bf16 => of::<bf16>(op),
            Dtype::F16 => of::<f16>(op),
        }
    }
}

/// A caller's tensor, read-only.
fn input(x: &TensorView<'_>) -> Param {
    let (addr, len) = match x.data() {
        Data::F32(x) => (x.as_ptr() as u64, x.len()),
        Data::Bf16(x) => (x.as_ptr() as u64, x.len()),
        Data::F16(x) => (x.as_ptr() as u64, x.len()),
    };
    if len == 0 { Param::absent() } else { Param::new(addr, len, code(x.dtype())) }
}

fn optional(x: Option<&TensorView<'_>>) -> Param {
    x.map_or_else(Param::absent, input)
}

/// A result, to be written by kernels.
fn output(x: &mut Tensor) -> Param {
    let dtype = code(x.data.dtype());
    let bytes = x.data.bytes_mut();
    if bytes.is_empty() {
        return Param::absent();
    }
    Param::new(bytes.as_mut_ptr() as u64, bytes.len() / dtype.size(), dtype)
}

/// Elements `start ..` of a tensor.
fn part(x: &Param, start: usize, len: usize) -> Param {
    Param { addr: x.addr + (start * x.dtype().size()) as u64, len: len as u64, ..*x }
}

/// Words that a step's kernels write, in one place so that their addresses stay.
struct Words {
    scan_ticket: [u64; 1],
    fix_ticket: [u64; 1],
    stats: StepStats,
    trap: TrapRecord,
    cursor: [u64; 1],
    stamps: Vec<Stamp>,
}

impl Step<'_> {
    fn rank(&self) -> &RankPlan {
        &self.plan.ranks[self.pe.rank()]
    }

    /// Runs the step.
    pub fn run(&self, cpu: &Cpu, workspace: &mut Workspace, channel: Option<&mut Channel>) -> Result<Forward, OpError> {
        let (config, rank) = (self.config, self.rank());
        let Dims { b, t, h, hv, k, v } = *self.dims;
        let dtype = self.inputs.dtype();
        let element = dtype.size();
        let fits = scan::shared_bytes(k, config.chunk, element, scan::WARPGROUPS) <= SHARED_BYTES;
        let scan_warpgroups = if fits { scan::WARPGROUPS } else { 1 };
        let tables = HostTables::new(rank, config.mode, config.chunk, hv as u32, &self.layout, scan_warpgroups as u32);
        let sizes = Sizes { h: h as u32, hv: hv as u32, k: k as u32, v: v as u32, chunk: config.chunk as u32, pad: 0 };
        let device_tables = Tables {
            sizes,
            chunks: Array::of(&tables.chunks),
            segments: Array::of(&tables.segments),
            sources: Array::of(&tables.sources),
            targets: Array::of(&tables.targets),
        };
        let mut o = Tensor::zeros(dtype, &[b, t, hv, v]);
        let state_shape = match self.inputs.state_layout {
            StateLayout::KFirst => [rank.ends.len(), hv, k, v],
            StateLayout::VFirst => [rank.ends.len(), hv, v, k],
        };
        let mut finals = config.final_state.then(|| Tensor::zeros(Dtype::F32, &state_shape));

        let corrected = if config.mode == Mode::Exact { 0 } else { self.corrected_tokens() };
        let receiving = if config.mode == Mode::Exact { 0 } else { rank.receiving().count() * hv };
        let records = Records {
            operands: workspace.operands.tensor(tables.chunks.len() * hv * Records::record_len(&sizes), dtype),
            decay: workspace.decay.tensor(tables.chunks.len() * hv * k, Dtype::F32),
            sizes,
        };
        let o_local = workspace.o_local.tensor(corrected * hv * v, Dtype::F32);
        let q_tilde = workspace.q_tilde.tensor(corrected * hv * k, dtype);
        let own = workspace.own.tensor(receiving * own_len(&self.layout), Dtype::F32);
        let state_in = workspace.state_in.tensor(receiving * v * k, Dtype::F32);
        let o_param = output(&mut o);
        let finals_param = finals.as_mut().map_or_else(Param::absent, output);

        let mut words = Words {
            scan_ticket: [0],
            fix_ticket: [0],
            stats: StepStats::default(),
            trap: TrapRecord::zeroed(),
            cursor: [0],
            stamps: if config.trace { vec![Stamp::zeroed(); STAMPS] } else { Vec::new() },
        };
        let channel = channel.map(|channel| {
            channel.advance();
            &*channel
        });
        let device_channel = self.channel_params(channel, &mut words);
        let trace = if config.trace {
            TraceBuffer { stamps: mutable(&mut words.stamps), cursor: mutable(&mut words.cursor) }
        } else {
            TraceBuffer::zeroed()
        };
        let mut checker = Checker::new();
        if config.checked {
            self.expect_outputs(&mut checker, &records, &o_param, &finals_param, &o_local, &q_tilde);
        }
        let checker = config.checked.then_some(&checker);
        let peer_failed = || self.pe.failed_peer().is_some();
        let launch = |kernel, grid, warpgroups| Launch { kernel, grid, warpgroups, checker, peer_failed: &peer_failed };
        let kernels = Kernels::new(self.inputs.op, dtype);
        let mut report = Report { tokens: b * t, ..Report::default() };
        let note = |report: &mut Report, kernel, time| report.kernels.push(KernelTime { kernel, time });

        let prep_params = self.prep_params(device_tables, records, trace);
        let grid = Grid::Blocks(tables.chunks.len() * hv);
        let time = cpu.launch(&launch("prep", grid, prep::WARPGROUPS), kernels.prep, &prep_params)?;
        note(&mut report, "prep", time);

        let (v_first, m_dtype) = (u32::from(self.inputs.state_layout == StateLayout::VFirst), self.m_dtype());
        let scan_params = ScanParams {
            tables: device_tables,
            records,
            v: input(&self.inputs.v),
            o: o_param,
            o_local,
            q_tilde,
            initial: optional(self.inputs.initial_state.as_ref()),
            finals: finals_param,
            own,
            items: Array::of(&tables.scan),
            ticket: mutable(&mut words.scan_ticket),
            channel: device_channel,
            trace,
            v_first,
            m_dtype,
        };
        let time = cpu.launch(&launch("scan_push", Grid::Resident, scan_warpgroups), kernels.scan, &scan_params)?;
        note(&mut report, "scan_push", time);
        self.check_trap(&words)?;

        if let (Mode::Bulk, Some(channel)) = (config.mode, channel) {
            let start = Instant::now();
            self.exchange(channel, &sizes)?;
            note(&mut report, "exchange", start.elapsed());
            report.exposed_wait += start.elapsed();
        }
        if !tables.fix.is_empty() {
            let fix_params = FixParams {
                tables: device_tables,
                o_local,
                q_tilde,
                own,
                state_in,
                o: o_param,
                finals: finals_param,
                items: Array::of(&tables.fix),
                ticket: mutable(&mut words.fix_ticket),
                channel: device_channel,
                trace,
                v_first,
                m_dtype,
            };
            let time = cpu.launch(&launch("fix_out", Grid::Resident, fixup::WARPGROUPS), kernels.fix, &fix_params)?;
            note(&mut report, "fix_out", time);
            self.check_trap(&words)?;
        }
        if let Some(checker) = checker {
            checker.finish("prep, scan_push and fix_out")?;
        }
        report.count(&words.stats, cpu.workers());
        let total: Duration = report.kernels.iter().map(|k| k.time).sum();
        report.compute = total.saturating_sub(report.exposed_wait + report.slot_wait);
        report.scratch_bytes = workspace.bytes();
        report.heap_bytes = self.pe.heap().stats().in_use;
        let trace = config.trace.then(|| super::report::timeline(self.pe.rank(), &words.stamps, words.cursor[0], hv));
        Ok(Forward { o, final_state: finals, report, trace })
    }

    /// Tokens up to the end of the last segment whose outputs are corrected.
    fn corrected_tokens(&self) -> usize {
        self.rank().receiving().map(|(segment, _)| segment.start + segment.len).max().unwrap_or(0)
    }

    fn m_dtype(&self) -> u32 {
        code(self.config.m_wire.resolve(self.inputs.dtype())) as u32
    }

    fn channel_params(&self, channel: Option<&Channel>, words: &mut Words) -> params::Channel {
        params::Channel {
            layout: self.layout,
            pad: 0,
            payload: channel.map_or_else(Array::zeroed, Channel::payload_array),
            words: channel.map_or_else(Array::zeroed, Channel::words_array),
            trap: mutable(std::slice::from_mut(&mut words.trap)),
            // The kernels count in words.
            stats: Array {
                len: (size_of::<StepStats>() / 8) as u64,
                ..mutable(std::slice::from_mut(&mut words.stats))
            },
            epoch: channel.map_or_else(Array::zeroed, Channel::epoch_array),
            timeout_ns: self.pe.timeout().as_nanos() as u64,
            pe: self.pe.rank() as u32,
            mode: match self.config.mode {
                Mode::Overlap => StepMode::Overlap,
                Mode::Bulk => StepMode::Bulk,
                Mode::Exact => StepMode::Exact,
            } as u32,
        }
    }

    fn prep_params(&self, tables: Tables, records: Records, trace: TraceBuffer) -> PrepParams {
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
        PrepParams {
            tables,
            q: input(&x.q),
            k: input(&x.k),
            g: input(g),
            beta: input(beta),
            a_log: optional(a_log),
            dt_bias: optional(dt_bias),
            records,
            gate_form: form as u32,
            l2norm: u32::from(x.l2norm),
            bound,
            scale: x.scale_or_default(self.dims),
            beta_factor,
            pad: 0,
            trace,
        }
    }

    /// Tells the checker what the step must write.
    fn expect_outputs(
        &self,
        checker: &mut Checker,
        records: &Records,
        o: &Param,
        finals: &Param,
        o_local: &Param,
        q_tilde: &Param,
    ) {
        let Dims { hv, k, v, .. } = *self.dims;
        for (name, tensor) in
            [("records", &records.operands), ("decay", &records.decay), ("o", o), ("final_state", finals)]
        {
            if tensor.is_present() {
                checker.expect_written(name, *tensor);
            }
        }
        for (segment, _) in self.rank().receiving().filter(|_| self.config.mode != Mode::Exact) {
            let (start, len) = (segment.start * hv, segment.len * hv);
            checker.expect_written("o_local", part(o_local, start * v, len * v));
            checker.expect_written("q_tilde", part(q_tilde, start * k, len * k));
        }
    }

    /// Bulk mode: all scans have left their summaries; takes those that this PE needs. Collective.
    fn exchange(&self, channel: &Channel, sizes: &Sizes) -> Result<(), OpError> {
        self.pe.barrier("exchange of summaries")?;
        let (layout, hv, parity) = (&self.layout, sizes.hv, parity(channel.epoch()));
        for (segment, receive) in self.rank().receiving() {
            for (i, &source) in receive.from.iter().enumerate() {
                let sending = self.plan.ranks[source].sending().find(|(s, _)| s.seq == segment.seq);
                let (_, send) = sending.expect("a plan's sends mirror its receives");
                let blocks = if i == 0 { layout.s_blocks() } else { layout.blocks() };
                for head in 0..hv {
                    for block in 0..blocks {
                        let from = layout.slot(source as u32, parity, send.lane as u32 * hv + head, block);
                        let to = layout.slot(source as u32, parity, receive.lane as u32 * hv + head, block);
                        channel.copy_from_peer(source, from.offset, to.offset, from.bytes);
                    }
                }
            }
        }
        Ok(())
    }

    /// The error of a wait that expired in a kernel; another PE's failure, if that was the reason.
    fn check_trap(&self, words: &Words) -> Result<(), OpError> {
        // The launch was joined: its writes are visible.
        if words.trap.state == TrapRecord::CLEAR {
            return Ok(());
        }
        if let Some((rank, message)) = self.pe.failed_peer() {
            return Err(crate::world::WorldError::PeFailed { rank, message }.into());
        }
        Err(OpError::Expired(ExpiredWait { expired: words.trap.expired, hv: self.dims.hv as u32 }))
    }
}

/// An array that kernels write.
fn mutable<T: bytemuck::Pod>(slice: &mut [T]) -> Array {
    Array { addr: slice.as_mut_ptr() as u64, len: slice.len() as u64 }
}
