//! What is measured: the arguments with the defaults of the device.

use std::time::Duration;

use kernels_gpu::params;
use kernels_gpu::protocol::ChannelLayout;

use super::measure::Group;
use super::{Args, Gates, GatesChoice, Roofline};
use crate::inputs::Op;
use crate::op::{Config, Device, MWire, Mode, OpError, Recompute, Segments, Transport};
use crate::plan::{Cuts, Plan, PlanError};
use crate::tensor::Dtype;
use crate::world::WorldOptions;

/// What an H200 was measured to reach.
const H200: Roofline = Roofline { tflop_s: 790.0, tb_s: 4.3 };
/// Room beside the slots.
const HEAP_ROOM: usize = 1 << 20;

/// What is measured, with the defaults of the device filled in.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub device: Device,
    pub op: Op,
    pub h: usize,
    pub hv: usize,
    pub k: usize,
    pub v: usize,
    pub dtype: Dtype,
    pub chunk: usize,
    pub groups: Vec<Group>,
    pub modes: Vec<Mode>,
    pub backward: bool,
    pub recompute: Recompute,
    pub m_wire: MWire,
    pub cut_tolerance: f32,
    pub segments: Segments,
    pub transport: Transport,
    pub warmup: u32,
    pub repeats: u32,
    /// Whether one more step is recorded.
    pub trace: bool,
    pub roofline: Option<Roofline>,
}

impl Setup {
    pub fn new(args: &Args, device: Device) -> Self {
        let (heads, tokens) = match device {
            Device::Cpu => (4, 256),
            Device::Cuda => (32, 8192),
        };
        let h = args.heads.unwrap_or(heads);
        let tokens = if args.tokens.is_empty() { vec![tokens] } else { args.tokens.clone() };
        let gates: &[Gates] = match args.gates {
            GatesChoice::Fast => &[Gates::Fast],
            GatesChoice::Slow => &[Gates::Slow],
            GatesChoice::Both => &[Gates::Fast, Gates::Slow],
        };
        let groups =
            gates.iter().flat_map(|&gates| tokens.iter().map(move |&tokens| Group { tokens: tokens as usize, gates }));
        let asked = args.peak_tflops.is_some() || args.peak_tbs.is_some();
        let roofline =
            Roofline { tflop_s: args.peak_tflops.unwrap_or(H200.tflop_s), tb_s: args.peak_tbs.unwrap_or(H200.tb_s) };
        Self {
            device,
            op: args.op,
            h: h as usize,
            hv: args.value_heads.unwrap_or(h) as usize,
            k: args.key_dim.unwrap_or(args.dim) as usize,
            v: args.value_dim.unwrap_or(args.dim) as usize,
            dtype: args.dtype,
            chunk: args.chunk,
            groups: groups.collect(),
            modes: args.mode.clone(),
            backward: args.backward,
            recompute: args.recompute,
            m_wire: args.m_wire,
            cut_tolerance: args.cut_tolerance,
            segments: args.segments,
            transport: args.transport,
            warmup: args.warmup,
            repeats: args.repeats,
            trace: args.trace.is_some(),
            // A GPU's numbers say nothing about a CPU.
            roofline: (device == Device::Cuda || asked).then_some(roofline),
        }
    }

    pub fn plan(&self, tokens: usize, pes: usize) -> Result<Plan, PlanError> {
        Plan::batch(1, tokens * pes, &Cuts::equal(pes))
    }

    pub fn config(&self, mode: Mode) -> Config {
        Config {
            device: self.device,
            mode,
            chunk: self.chunk,
            m_wire: self.m_wire,
            cut_tolerance: self.cut_tolerance,
            segments: self.segments,
            transport: self.transport,
            final_state: false,
            recompute: self.recompute,
            // They are made here and finite; looking for others would only take time between the steps.
            allow_nonfinite: true,
            ..Config::default()
        }
    }

    pub fn kernel_sizes(&self) -> params::Sizes {
        let Self { h, hv, k, v, chunk, .. } = *self;
        params::Sizes { h: h as u32, hv: hv as u32, k: k as u32, v: v as u32, chunk: chunk as u32, pad: 0 }
    }

    /// Symmetric memory of a PE of `pes`: the slots and words of both directions.
    pub fn heap_bytes(&self, pes: usize) -> Result<usize, OpError> {
        let Self { hv, k, v, .. } = *self;
        let m_size = self.m_wire.resolve(self.dtype).size() as u32;
        let layout = ChannelLayout::new(pes as u32, hv as u32, k as u32, v as u32, m_size)
            .map_err(|reason| OpError::Slots { lanes: 1, hv, k, v, pes, reason: reason.to_string() })?;
        Ok(2 * (layout.payload_bytes() + layout.words() * size_of::<u64>()) + HEAP_ROOM)
    }

    pub fn world_options(&self, pes: usize, timeout: u64) -> Result<WorldOptions, OpError> {
        Ok(WorldOptions { heap_bytes: self.heap_bytes(pes)?, timeout: Duration::from_secs(timeout) })
    }
}
