//! A step of the short convolution on one PE: parameters, launches, and what the kernels left.

use std::time::Duration;

use bytemuck::Zeroable;
use kernels_gpu::convolution::{
    ConvolutionItem, ConvolutionTables, ConvolutionTensors, ConvolveBackParams, ConvolveParams, SHARED_BYTES,
    SumParams, WARPGROUPS,
};
use kernels_gpu::params::{self, Array, StepMode, StepStats, Tensor as Param, TraceBuffer};
use kernels_gpu::protocol::{ChannelLayout, TrapRecord, Watch};
use kernels_gpu::tile::host::Checker;

use super::inputs::Sizes;
use super::tables::HostTables;
use super::{
    Activation, ConvolutionConfig, ConvolutionGradients, ConvolutionInput, ConvolutionOutput, ConvolutionUpstream,
    Direction, ExpiredHalo, ShortConvolutionError, memory,
};
use crate::exec::{ConvolutionSlot, ExecError, Executor, Grid, Image, Kernel, Launch, Part, Scratch, Slot, Waits};
use crate::inputs::Op;
use crate::op::channel::Channel;
use crate::op::{KernelTime, Report};
use crate::plan::{Plan, RankPlan};
use crate::tensor::{Dtype, Tensor};
use crate::world::{Pe, WorldError};

/// Where the inputs before segments that began elsewhere are kept, for all convolutions of the call.
const BEFORE: Slot = Slot::Convolution(0, ConvolutionSlot::Before);

/// What a step works on.
pub(super) struct Step<'a> {
    pub pe: &'a Pe,
    pub plan: &'a Plan,
    pub sizes: &'a Sizes,
    pub config: &'a ConvolutionConfig,
    pub layout: ChannelLayout,
    pub inputs: &'a [ConvolutionInput<'a>],
    pub activation: Activation,
}

/// Tables that kernels read and words that they write, as parts of one image.
struct Parts {
    tensors: Part,
    segments: Part,
    sources: Part,
    messages: Part,
    items: Part,
    sums: Part,
    written: Part,
    /// Of the items that do not wait, and of those that do, where these are launches of their own.
    tickets: [Part; 2],
    payload: Part,
    words: Part,
    ways: Part,
    epoch: Part,
    stats: Part,
    trap: Part,
}

impl Parts {
    fn push(image: &mut Image, tensors: &[ConvolutionTensors], tables: &HostTables, channel: Option<&Channel>) -> Self {
        Self {
            tensors: image.push(tensors),
            segments: image.push(&tables.segments),
            sources: image.push(&tables.sources),
            messages: image.push(&tables.messages),
            items: image.push(&tables.items),
            sums: image.push(&tables.sums),
            written: image.push_zeroed::<u64>(tables.messages.len()),
            tickets: [image.push_zeroed::<u64>(1), image.push_zeroed::<u64>(1)],
            payload: image.push(&channel.map_or_else(Vec::new, Channel::payload_addresses)),
            words: image.push(&channel.map_or_else(Vec::new, Channel::word_addresses)),
            ways: image.push(channel.map_or(&[][..], Channel::ways)),
            epoch: image.push(&[channel.map_or(0, Channel::epoch)]),
            stats: image.push_zeroed::<u64>(size_of::<StepStats>() / 8),
            trap: image.push_zeroed::<TrapRecord>(1),
        }
    }
}

/// What is the same for a step's launches.
struct Launcher<'a> {
    dtype: Dtype,
    checker: Option<&'a Checker>,
    peer_failed: &'a (dyn Fn() -> bool + Sync),
    launched: Vec<&'static str>,
}

impl Launcher<'_> {
    fn launch<X: Executor, K: Kernel>(&mut self, exec: &mut X, grid: Grid, params: &K) -> Result<(), ExecError> {
        self.launched.push(K::NAME);
        let launch = Launch {
            // Names no kernel of the convolution.
            op: Op::Kda,
            dtype: self.dtype,
            blocks: (grid, WARPGROUPS, SHARED_BYTES).into(),
            checker: self.checker,
            peer_failed: self.peer_failed,
        };
        exec.launch(&launch, params)
    }
}

impl Step<'_> {
    fn rank(&self) -> &RankPlan {
        &self.plan.ranks[self.pe.rank()]
    }

    /// Outputs, and the inputs before segments that began elsewhere.
    pub fn forward<X: Executor>(
        &self,
        exec: &mut X,
        channel: Option<&mut Channel>,
    ) -> Result<(Vec<ConvolutionOutput>, Tensor, Report), ShortConvolutionError> {
        let (rank, sizes) = (self.rank(), self.sizes);
        let tables = self.tables(Direction::Forward);
        let mut outputs = memory::new_outputs(self.inputs, sizes, rank, self.config.final_state);
        let mut before = Tensor::zeros(sizes.dtype, &[rank.receiving().count(), sizes.reach(), sizes.columns()]);
        let mut tensors = memory::inputs(exec, self.inputs)?;
        memory::place_outputs(exec, &mut tensors, &mut outputs)?;
        let before_param = exec.output(BEFORE, &mut before.view_mut())?;
        let mut checker = Checker::new();
        memory::expect_written(&mut checker, &tensors);
        if before_param.is_present() {
            checker.expect_written("inputs from other PEs", before_param);
        }
        let report =
            self.run(exec, channel, (&tables, &tensors), before_param, &checker, |tables| ConvolveParams { tables })?;
        memory::fetch_outputs(exec, &mut outputs)?;
        exec.fetch(BEFORE, &mut before.view_mut())?;
        Ok((outputs, before, report))
    }

    /// Gradients; `before` is what the forward step kept.
    pub fn backward<X: Executor>(
        &self,
        exec: &mut X,
        channel: Option<&mut Channel>,
        before: &Tensor,
        upstream: &[ConvolutionUpstream<'_>],
    ) -> Result<(Vec<ConvolutionGradients>, Report), ShortConvolutionError> {
        let (rank, sizes) = (self.rank(), self.sizes);
        let tables = self.tables(Direction::Backward);
        let mut gradients = memory::new_gradients(self.inputs, sizes);
        let mut tensors = memory::inputs(exec, self.inputs)?;
        memory::place_gradients(exec, &mut tensors, upstream, &mut gradients, (sizes, tables.runs))?;
        let before = exec.input(BEFORE, &before.view())?;
        let after = rank.sending().count() * sizes.reach() * sizes.columns();
        let after = exec.scratch(Scratch::ConvolutionAfter, after, Dtype::F32)?;
        let mut checker = Checker::new();
        memory::expect_written(&mut checker, &tensors);
        let report = self
            .run(exec, channel, (&tables, &tensors), before, &checker, |tables| ConvolveBackParams { tables, after })?;
        memory::fetch_gradients(exec, &mut gradients)?;
        Ok((gradients, report))
    }

    fn tables(&self, direction: Direction) -> HostTables {
        let biases: Vec<bool> = self.inputs.iter().map(|input| input.bias.is_some()).collect();
        HostTables::new(self.plan, self.pe.rank(), self.sizes, direction, &biases)
    }

    /// Launches the kernel that `params` makes parameters for, and the sums after it; reads what they left.
    fn run<X: Executor, K: Kernel>(
        &self,
        exec: &mut X,
        channel: Option<&mut Channel>,
        (tables, tensors): (&HostTables, &[ConvolutionTensors]),
        before: Param,
        checker: &Checker,
        params: impl Fn(ConvolutionTables) -> K,
    ) -> Result<Report, ShortConvolutionError> {
        let channel = channel.map(|channel| {
            channel.advance();
            &*channel
        });
        let mut image = Image::default();
        let parts = Parts::push(&mut image, tensors, tables, channel);
        let base = exec.put_image(&image)?;
        let watch = Array { addr: exec.watch(), len: (size_of::<Watch>() / size_of::<u64>()) as u64 };
        let device_tables = self.device_tables(tables, &parts, (base, watch), before);
        let checker = (self.config.checked && exec.checks()).then_some(checker);
        let peer_failed = || self.pe.failed_peer().is_some();
        let dtype = self.sizes.dtype;
        let mut launcher = Launcher { dtype, checker, peer_failed: &peer_failed, launched: Vec::new() };
        if exec.waits() == Waits::Host && self.pe.size() > 1 {
            // Allocating may wait for what runs on the device.
            self.pe.barrier("memory for the step")?;
            let items = device_tables.items;
            let rest = items.addr + (tables.independent * size_of::<ConvolutionItem>()) as u64;
            let independent = Array { len: tables.independent as u64, ..items };
            launcher.launch(
                exec,
                Grid::Resident,
                &params(ConvolutionTables { items: independent, ..device_tables }),
            )?;
            exec.get_image(&mut image, &peer_failed)?;
            self.pe.barrier("halos of the step")?;
            let items = Array { addr: rest, len: items.len - independent.len };
            let ticket = parts.tickets[1].at(base);
            launcher.launch(exec, Grid::Resident, &params(ConvolutionTables { items, ticket, ..device_tables }))?;
        } else if !tables.items.is_empty() {
            launcher.launch(exec, Grid::Resident, &params(device_tables))?;
        }
        if !tables.sums.is_empty() {
            let (tensors, items) = (device_tables.tensors, parts.sums.at(base));
            let sums = SumParams { tensors, items, width: self.sizes.width as u32, pad: 0 };
            launcher.launch(exec, Grid::Blocks(tables.sums.len()), &sums)?;
        }
        exec.get_image(&mut image, &peer_failed)?;
        self.check_trap(exec)?;
        if let Some(checker) = checker {
            checker.finish(&launcher.launched.join(", ")).map_err(ExecError::from)?;
        }
        self.report(exec, &image, &parts, &launcher.launched)
    }

    fn device_tables(
        &self,
        tables: &HostTables,
        parts: &Parts,
        (base, watch): (u64, Array),
        before: Param,
    ) -> ConvolutionTables {
        ConvolutionTables {
            tensors: parts.tensors.at(base),
            segments: parts.segments.at(base),
            sources: parts.sources.at(base),
            messages: parts.messages.at(base),
            written: parts.written.at(base),
            items: parts.items.at(base),
            ticket: parts.tickets[0].at(base),
            before,
            channel: params::Channel {
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
                mode: StepMode::Overlap as u32,
            },
            trace: TraceBuffer::zeroed(),
            width: self.sizes.width as u32,
            columns: self.sizes.columns() as u32,
            parts: tables.parts as u32,
            silu: u32::from(self.activation == Activation::Silu),
        }
    }

    /// The error of a wait that expired in a kernel; another PE's failure, if that was the reason.
    fn check_trap<X: Executor>(&self, exec: &X) -> Result<(), ShortConvolutionError> {
        let trap = exec.trap();
        if trap.state == TrapRecord::CLEAR {
            return Ok(());
        }
        if let Some((rank, message)) = self.pe.failed_peer() {
            return Err(WorldError::PeFailed { rank, message }.into());
        }
        Err(ShortConvolutionError::Expired(ExpiredHalo { expired: trap.expired }))
    }

    fn report<X: Executor>(
        &self,
        exec: &mut X,
        image: &Image,
        parts: &Parts,
        launched: &[&'static str],
    ) -> Result<Report, ShortConvolutionError> {
        let stats: StepStats = bytemuck::cast_slice(&image.get::<u64>(parts.stats))[0];
        let mut report = Report { tokens: self.sizes.b * self.sizes.t, ..Report::default() };
        let times = exec.take_times()?;
        report.kernels =
            launched.iter().zip(times.launches).map(|(&kernel, time)| KernelTime { kernel, time }).collect();
        report.device_time = times.span;
        report.count(&stats, exec.concurrency());
        let total: Duration = report.kernels.iter().map(|kernel| kernel.time).sum();
        report.compute = total.saturating_sub(report.exposed_wait + report.slot_wait);
        report.scratch_bytes = exec.scratch_bytes();
        report.heap_bytes = exec.heap_bytes(self.pe);
        report.peak_device_bytes = exec.peak_device_bytes(self.pe);
        report.waits = exec.waits();
        Ok(report)
    }
}
