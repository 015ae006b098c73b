//! A step of the short convolution on one PE: its tables on the device, parameters and launches.

use bytemuck::Zeroable;
use kernels_gpu::convolution::{
    ConvolutionItem, ConvolutionTables, ConvolutionTensors, ConvolveBackParams, ConvolveBeginParams, ConvolveParams,
    MAX_CONVOLUTIONS, SHARED_BYTES, SumParams, WARPGROUPS,
};
use kernels_gpu::params::{Array, StepMode, Tensor as Param, TraceBuffer};
use kernels_gpu::protocol::ChannelLayout;
use kernels_gpu::tile::host::Checker;

use super::inputs::Sizes;
use super::tables::HostTables;
use super::{
    Activation, ConvolutionConfig, ConvolutionGradientsOut, ConvolutionInput, ConvolutionOut, ConvolutionUpstream,
    Direction, ShortConvolutionError, check_trap, memory,
};
use crate::exec::{Executor, Grid, Kernel, Part, Scratch, Waits};
use crate::inputs::Op;
use crate::op::channel::Channel;
use crate::op::images::{Draft, Images, Placed, Words, Work};
use crate::op::launched::Launched;
use crate::op::step::{ChannelParts, Common, beginning};
use crate::op::vitals::VitalSigns;
use crate::plan::{Layout, Plan, RankPlan};
use crate::tensor::Dtype;
use crate::world::Pe;

/// What a step works on.
pub(super) struct Step<'a> {
    pub pe: &'a Pe,
    pub plan: &'a Plan,
    pub sizes: &'a Sizes,
    pub config: &'a ConvolutionConfig,
    pub layout: ChannelLayout,
    pub inputs: &'a [ConvolutionInput<'a>],
    pub activation: Activation,
    /// What the step's kernels leave for the host.
    pub vitals: VitalSigns,
}

/// What a step's tables follow from, apart from what never changes in an operation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Form {
    /// With the cuts, the whole plan.
    sequences: Layout,
    cuts: Vec<usize>,
    channel: ChannelLayout,
    channels: Vec<usize>,
    width: usize,
    biases: Vec<bool>,
}

/// A step's tables, and what the host must know of them.
#[derive(Clone, Copy)]
pub(super) struct Tables {
    /// Written by the step's first kernel.
    tensors: Part,
    segments: Part,
    sources: Part,
    messages: Part,
    sums: Part,
    channel: ChannelParts,
    /// With the ticket of the items that do not wait.
    items: Work,
    /// The ticket of those that do, where these are a launch of their own.
    waiting: Words,
    written: Words,
    /// Items that do not wait.
    independent: usize,
    parts: usize,
    runs: usize,
    sum_blocks: usize,
}

impl Tables {
    fn push(draft: &mut Draft, tables: &HostTables, convolutions: usize, channel: Option<&Channel>) -> Self {
        Self {
            tensors: draft.image.push_zeroed::<ConvolutionTensors>(convolutions),
            segments: draft.image.push(&tables.segments),
            sources: draft.image.push(&tables.sources),
            messages: draft.image.push(&tables.messages),
            sums: draft.image.push(&tables.sums),
            channel: ChannelParts::push(&mut draft.image, channel),
            items: draft.push_work(&tables.items),
            waiting: draft.push_words(1),
            written: draft.push_words(tables.messages.len()),
            independent: tables.independent,
            parts: tables.parts,
            runs: tables.runs,
            sum_blocks: tables.sums.len(),
        }
    }
}

/// Where a step's tables are.
pub(super) type TablesOf<X> = Images<X, Tables, Form>;

impl Step<'_> {
    fn rank(&self) -> &RankPlan {
        &self.plan.ranks[self.pe.rank()]
    }

    /// Launches the step: results go to `out`, and the inputs before segments that began elsewhere to `before`.
    pub fn forward<X: Executor>(
        &self,
        exec: &mut X,
        images: &mut TablesOf<X>,
        channel: Option<&Channel>,
        out: &mut [ConvolutionOut<'_>],
        before: Param,
    ) -> Result<Launched, ShortConvolutionError> {
        let placed = self.place(exec, images, channel, Direction::Forward)?;
        let mut tensors = memory::inputs(exec, self.inputs)?;
        memory::place_outputs(exec, &mut tensors, out)?;
        let mut checker = Checker::new();
        memory::expect_written(&mut checker, &tensors);
        if before.is_present() {
            checker.expect_written("inputs from other PEs", before);
        }
        let tables = self.device_tables(exec, &placed, channel, before);
        self.launch(exec, "forward", (&placed, &tensors), channel, &checker, |items, ticket| ConvolveParams {
            tables: ConvolutionTables { items, ticket, ..tables },
        })
    }

    /// Launches the step: gradients go to `out`; `before` is what the forward step kept.
    pub fn backward<X: Executor>(
        &self,
        exec: &mut X,
        images: &mut TablesOf<X>,
        channel: Option<&Channel>,
        before: Param,
        (upstream, out): (&[ConvolutionUpstream<'_>], &mut [ConvolutionGradientsOut<'_>]),
    ) -> Result<Launched, ShortConvolutionError> {
        let (rank, sizes) = (self.rank(), self.sizes);
        let placed = self.place(exec, images, channel, Direction::Backward)?;
        let mut tensors = memory::inputs(exec, self.inputs)?;
        memory::place_gradients(exec, &mut tensors, upstream, out, (sizes, placed.1.runs))?;
        let after = rank.sending().count() * sizes.reach() * sizes.columns();
        let after = exec.scratch(Scratch::ConvolutionAfter, after, Dtype::F32)?;
        let mut checker = Checker::new();
        memory::expect_written(&mut checker, &tensors);
        let tables = self.device_tables(exec, &placed, channel, before);
        self.launch(exec, "backward", (&placed, &tensors), channel, &checker, |items, ticket| ConvolveBackParams {
            tables: ConvolutionTables { items, ticket, ..tables },
            after,
        })
    }

    /// The step's tables on the device.
    fn place<X: Executor>(
        &self,
        exec: &mut X,
        images: &mut TablesOf<X>,
        channel: Option<&Channel>,
        direction: Direction,
    ) -> Result<(Placed, Tables), ShortConvolutionError> {
        let form = Form {
            sequences: self.plan.layout.clone(),
            cuts: self.plan.cuts.clone(),
            channel: self.layout,
            channels: self.sizes.channels.clone(),
            width: self.sizes.width,
            biases: self.inputs.iter().map(|input| input.bias.is_some()).collect(),
        };
        Ok(images.place(exec, &form, |draft| {
            let tables = HostTables::new(self.plan, self.pe.rank(), self.sizes, direction, &form.biases);
            Tables::push(draft, &tables, self.inputs.len(), channel)
        })?)
    }

    /// Launches the kernel that `params` makes parameters for, out of items and their ticket, with what comes before and after it.
    fn launch<X: Executor, K: Kernel>(
        &self,
        exec: &mut X,
        title: &'static str,
        ((placed, tables), tensors): (&(Placed, Tables), &[ConvolutionTensors]),
        channel: Option<&Channel>,
        checker: &Checker,
        params: impl Fn(Array, Array) -> K,
    ) -> Result<Launched, ShortConvolutionError> {
        let checker = (self.config.checked && exec.checks()).then_some(checker);
        let peer_failed = || self.pe.failed_peer().is_some();
        // No kernel of the convolution is named after an operation.
        let mut common = Common::of((Op::Kda, self.sizes.dtype), checker, &peer_failed);
        let on_host = exec.waits() == Waits::Host && self.pe.size() > 1;
        if on_host {
            // Allocating may wait for what runs on the device.
            self.pe.barrier("memory for the step")?;
        }
        let table = tables.tensors.at(placed.tables);
        let mut described = [ConvolutionTensors::zeroed(); MAX_CONVOLUTIONS];
        described[..tensors.len()].copy_from_slice(tensors);
        exec.begin(&ConvolveBeginParams {
            begin: beginning(*placed, self.vitals, channel),
            table,
            tensors: described,
        })?;
        let (items, ticket) = placed.work(tables.items);
        let blocks = (Grid::Resident, WARPGROUPS, SHARED_BYTES);
        if on_host {
            let independent = Array { len: tables.independent as u64, ..items };
            common.launch(exec, blocks, &params(independent, ticket))?;
            exec.wait(&peer_failed)?;
            self.pe.barrier("halos of the step")?;
            let rest = items.addr + (tables.independent * size_of::<ConvolutionItem>()) as u64;
            let waiting = Array { addr: rest, len: items.len - independent.len };
            common.launch(exec, blocks, &params(waiting, placed.words(tables.waiting)))?;
        } else if items.len > 0 {
            common.launch(exec, blocks, &params(items, ticket))?;
        }
        if tables.sum_blocks > 0 {
            let items = tables.sums.at(placed.tables);
            let sums = SumParams { tensors: table, items, width: self.sizes.width as u32, pad: 0 };
            common.launch(exec, (Grid::Blocks(tables.sum_blocks), WARPGROUPS, SHARED_BYTES), &sums)?;
        }
        if checker.is_some() {
            check_trap(exec, self.pe)?;
            common.check_written()?;
        }
        Ok(Launched {
            title,
            kernels: common.launched,
            exchange: std::time::Duration::ZERO,
            tokens: self.sizes.b * self.sizes.t,
            hv: 1,
            parts: 1,
            on_host,
            cuts: None,
        })
    }

    /// Without items.
    fn device_tables<X: Executor>(
        &self,
        exec: &X,
        (placed, tables): &(Placed, Tables),
        channel: Option<&Channel>,
        before: Param,
    ) -> ConvolutionTables {
        let (base, mode) = (placed.tables, StepMode::Overlap);
        ConvolutionTables {
            tensors: tables.tensors.at(base),
            segments: tables.segments.at(base),
            sources: tables.sources.at(base),
            messages: tables.messages.at(base),
            written: placed.words(tables.written),
            items: Array::empty(),
            ticket: Array::empty(),
            before,
            channel: tables.channel.at(exec, self.pe, (*placed, self.layout), self.vitals, (channel, mode)),
            trace: TraceBuffer::zeroed(),
            width: self.sizes.width as u32,
            columns: self.sizes.columns() as u32,
            parts: tables.parts as u32,
            silu: u32::from(self.activation == Activation::Silu),
        }
    }
}
