//! What `deltalink bench op` says: JSON for programs, tables for eyes.

use std::fmt::Display;

use comfy_table::Cell;
use indicatif::BinaryBytes;
use serde::Serialize;

use super::super::super::output::{number, table};
use super::super::super::pes::World;
use super::super::comm::significant;
use super::super::{Envelope, Summary};
use super::inputs::gate_dtype;
use super::measure::{Group, Pass as PassSamples, Samples};
use super::work::{ByKernel, Part, Roofline, Sizes, Work};
use super::{Gates, Setup};
use crate::exec::Waits;
use crate::inputs::Op;
use crate::op::{CutReport, Device, Mode, Recompute, Segments};
use crate::tensor::Dtype;

/// What is the same for all points.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Settings {
    /// The delta rule.
    pub op: Op,
    /// Query/key heads.
    pub heads: usize,
    /// Value heads.
    pub value_heads: usize,
    /// Channels of keys.
    pub key_dim: usize,
    /// Channels of values.
    pub value_dim: usize,
    /// Element type of q, k, v, o, beta, and of KDA's gate.
    pub dtype: Dtype,
    /// Chunk length.
    pub chunk: usize,
    /// How small the norm of a transition must be for the rest of it to be left out.
    pub cut_tolerance: f32,
    /// Into how many parts PEs were to cut their segments.
    pub segments: Segments,
    /// What a backward pass computed again.
    pub recompute: Recompute,
    /// What computed.
    pub device: Device,
    /// What a PE was.
    pub world: World,
    /// Number of PEs.
    pub pes: usize,
    /// What times are: `events` on the device's stream, or `wall` on the host.
    pub clock: &'static str,
    /// Steps before the first that counted.
    pub warmup: u32,
    /// Steps that counted.
    pub repeats: u32,
    /// What the device can do, if that is known.
    pub roofline: Option<Roofline>,
}

impl Settings {
    pub(super) fn new(setup: &Setup, world: World, pes: usize) -> Self {
        Self {
            op: setup.op,
            heads: setup.h,
            value_heads: setup.hv,
            key_dim: setup.k,
            value_dim: setup.v,
            dtype: setup.dtype,
            chunk: setup.chunk,
            cut_tolerance: setup.cut_tolerance,
            segments: setup.segments,
            recompute: setup.recompute,
            device: setup.device,
            world,
            pes,
            clock: if setup.device == Device::Cuda { "events" } else { "wall" },
            warmup: setup.warmup,
            repeats: setup.repeats,
            roofline: setup.roofline,
        }
    }
}

/// What a point is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// A forward step; with `--backward` it keeps what the backward step needs.
    Forward,
    /// A backward step.
    Backward,
    /// A forward and its backward step: the sum of their times.
    Both,
}

impl Display for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::Both => "both",
        })
    }
}

/// A time beside the least that the device needs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Share {
    /// Least time in microseconds.
    pub floor_us: f64,
    /// It over the median time.
    pub share: f64,
}

/// One kernel of a step; launches of the same kernel are added up.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Kernel {
    /// Its name.
    pub kernel: String,
    /// From its begin to its end in microseconds, waits included, on the PE where it took longest.
    pub time_us: Summary,
    /// What it computes and moves, of the PE with the longest least time; nothing for merges.
    pub roofline: Option<Share>,
}

/// Tokens, gates, mode and pass.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Of each PE.
    pub tokens: usize,
    /// How fast states forget.
    pub gates: Gates,
    /// How summaries travelled.
    pub mode: Mode,
    /// What was measured.
    pub pass: Pass,
    /// Whether the forward kernels for Hopper ran.
    pub hopper: bool,
    /// Where the step waited for other PEs.
    pub waits: Waits,
    /// From the begin of the first kernel to the end of the last in microseconds, over repeats, of the PE that took longest.
    pub time_us: Summary,
    /// Of one of many steps that were enqueued without waiting for any, in microseconds, of the PE that took longest: of a step
    /// forward, or of one forward and backward together. None where steps need the host.
    pub back_to_back_us: Option<f64>,
    /// Time in which a worker only waited for other PEs, in microseconds, of the PE that waited longest.
    pub exposed_wait_us: Summary,
    /// Kernel by kernel; none where passes are added up.
    pub kernels: Vec<Kernel>,
    /// Payload bytes of the PE that sent most.
    pub bytes_sent: u64,
    /// Parts of the segment that a PE cut into most; 1 if all were walked whole.
    pub parts: usize,
    /// What all PEs left out of transitions; floating-point operations and bytes below count it.
    pub cut: CutReport,
    /// Scratch memory of the PE that has most.
    pub scratch_bytes: usize,
    /// Device memory of the PE that held most, since the operation was made.
    pub peak_device_bytes: usize,
    /// Floating-point operations of the PE that has most of them.
    pub flop: f64,
    /// Bytes that the kernels of this PE read and write.
    pub bytes: f64,
    /// 1e12 FLOP per second.
    pub tflop_s: Summary,
    /// 1e12 bytes per second.
    pub tb_s: Summary,
    /// The kernels at the roofline, one after the other.
    pub roofline: Option<Share>,
    /// The same for one kernel that reads inputs once and writes results once.
    pub fused: Option<Share>,
}

/// What all PEs' samples say, by group, mode and pass.
pub(super) fn measured(all: &[Vec<Samples>], setup: &Setup) -> Vec<Measured> {
    let places = setup.groups.iter().flat_map(|&group| setup.modes.iter().map(move |_| group));
    let mut points = Vec::new();
    for (i, group) in places.enumerate() {
        let of_point: Vec<&Samples> = all.iter().filter_map(|samples| samples.get(i)).collect();
        let Some(first) = of_point.first() else { continue };
        let forward: Vec<&PassSamples> = of_point.iter().map(|samples| &samples.forward).collect();
        let backward: Vec<&PassSamples> = of_point.iter().filter_map(|samples| samples.backward.as_ref()).collect();
        let point = Point { setup, group, mode: first.mode, hopper: first.hopper, pes: all.len() };
        points.extend(point.of(Pass::Forward, &forward));
        if !backward.is_empty() {
            points.extend(point.of(Pass::Backward, &backward));
            let sums: Vec<PassSamples> = forward.iter().zip(&backward).map(|(f, b)| sum(f, b)).collect();
            points.extend(point.of(Pass::Both, &sums.iter().collect::<Vec<_>>()));
        }
    }
    points
}

/// A forward and a backward pass as one.
fn sum(forward: &PassSamples, backward: &PassSamples) -> PassSamples {
    let add = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect();
    PassSamples {
        device_us: add(&forward.device_us, &backward.device_us),
        exposed_wait_us: add(&forward.exposed_wait_us, &backward.exposed_wait_us),
        kernels: Vec::new(),
        back_to_back_us: backward.back_to_back_us,
        bytes_sent: forward.bytes_sent + backward.bytes_sent,
        parts: forward.parts.max(backward.parts),
        cut: forward.cut.plus(backward.cut),
        scratch_bytes: forward.scratch_bytes.max(backward.scratch_bytes),
        peak_device_bytes: forward.peak_device_bytes.max(backward.peak_device_bytes),
        waits: backward.waits,
    }
}

struct Point<'a> {
    setup: &'a Setup,
    group: Group,
    mode: Mode,
    hopper: bool,
    pes: usize,
}

impl Point<'_> {
    fn of(&self, pass: Pass, all: &[&PassSamples]) -> Option<Measured> {
        let Self { setup, group, mode, hopper, .. } = *self;
        let largest = |of: &dyn Fn(&PassSamples) -> &[f64]| largest(all.iter().map(|samples| of(samples)));
        let time_us = Summary::of(&largest(&|samples| &samples.device_us))?;
        // A clock's step must not make rates infinite.
        let per_us = move |amount: f64| move |us: f64| if us > 0.0 { amount / us / 1e6 } else { 0.0 };
        let per_pe: Vec<ByKernel> = (0..self.pes).map(|rank| self.work(pass, rank)).collect();
        let total = |kernels: &ByKernel| kernels.iter().map(|(_, work)| *work).sum::<Work>();
        let work = per_pe.iter().map(total).max_by(|a, b| a.flop.total_cmp(&b.flop))?;
        let share = |floor_us: f64, time: &Summary| Share {
            floor_us,
            share: if time.median > 0.0 { floor_us / time.median } else { 0.0 },
        };
        let floor = |kernels: &ByKernel, roofline: Roofline| {
            kernels.iter().map(|(_, work)| roofline.floor_us(*work)).sum::<f64>()
        };
        let most = |floors: &mut dyn Iterator<Item = f64>| floors.fold(0.0, f64::max);
        let sizes = self.sizes();
        let fused_bytes = match pass {
            Pass::Forward => sizes.fused_forward(),
            Pass::Backward => sizes.fused_backward(),
            Pass::Both => sizes.fused_forward() + sizes.fused_backward(),
        };
        let kernel = |(name, _): &(String, Vec<f64>)| {
            let time_us = Summary::of(&largest(&|samples| samples_of(samples, name)))?;
            let works: Vec<Work> = per_pe.iter().filter_map(|kernels| work_of(kernels, name)).collect();
            let roofline = setup
                .roofline
                .filter(|_| !works.is_empty())
                .map(|roofline| share(most(&mut works.iter().map(|&work| roofline.floor_us(work))), &time_us));
            Some(Kernel { kernel: name.clone(), time_us, roofline })
        };
        // Some kernels run on some PEs only: the PE with most of them has the order.
        let names = all.iter().map(|samples| &samples.kernels).max_by_key(|kernels| kernels.len())?;
        Some(Measured {
            tokens: group.tokens,
            gates: group.gates,
            mode,
            pass,
            hopper,
            waits: all.first()?.waits,
            time_us,
            back_to_back_us: match pass {
                // What was timed is the two together.
                Pass::Backward => None,
                Pass::Forward | Pass::Both => all.iter().filter_map(|samples| samples.back_to_back_us).reduce(f64::max),
            },
            exposed_wait_us: Summary::of(&largest(&|samples| &samples.exposed_wait_us))?,
            kernels: names.iter().filter_map(kernel).collect(),
            bytes_sent: all.iter().map(|samples| samples.bytes_sent).max()?,
            parts: all.iter().map(|samples| samples.parts).max()?,
            cut: all.iter().fold(CutReport::default(), |cut, samples| cut.plus(samples.cut)),
            scratch_bytes: all.iter().map(|samples| samples.scratch_bytes).max()?,
            peak_device_bytes: all.iter().map(|samples| samples.peak_device_bytes).max()?,
            flop: work.flop,
            bytes: work.bytes,
            tflop_s: time_us.inverted(per_us(work.flop)),
            tb_s: time_us.inverted(per_us(work.bytes)),
            roofline: setup
                .roofline
                .map(|roofline| share(most(&mut per_pe.iter().map(|pe| floor(pe, roofline))), &time_us)),
            fused: setup
                .roofline
                .map(|roofline| share(roofline.floor_us(Work { flop: 0.0, bytes: fused_bytes }), &time_us)),
        })
    }

    fn sizes(&self) -> Sizes {
        let Setup { op, h, hv, k, v, chunk, dtype, .. } = *self.setup;
        Sizes {
            op,
            tokens: self.group.tokens,
            h,
            hv,
            k,
            v,
            chunk,
            element: dtype.size(),
            gate_element: gate_dtype(op, dtype).size(),
            gate_parameters: op == Op::Kda,
            reduces_rows: hv != h || !self.hopper,
        }
    }

    /// What PE `rank` has to do.
    fn work(&self, pass: Pass, rank: usize) -> ByKernel {
        let (sizes, late) = (self.sizes(), self.mode != Mode::Exact);
        let (first, last) = (rank == 0, rank + 1 == self.pes);
        let forward = || sizes.forward(Part { receives: late && !first, sends: !last });
        let backward =
            || sizes.backward(Part { receives: late && !last, sends: !first }, self.setup.recompute == Recompute::All);
        match pass {
            Pass::Forward => forward(),
            Pass::Backward => backward(),
            Pass::Both => forward().into_iter().chain(backward()).collect(),
        }
    }
}

/// The work of a kernel, or of two that ran beside each other; none if this PE does not run them.
fn work_of(kernels: &ByKernel, name: &str) -> Option<Work> {
    let of = |name: &str| kernels.iter().find(|(kernel, _)| *kernel == name).map(|(_, work)| *work);
    name.split(" + ").map(of).sum()
}

fn samples_of<'a>(pass: &'a PassSamples, kernel: &str) -> &'a [f64] {
    pass.kernels.iter().find(|(name, _)| name == kernel).map_or(&[], |(_, samples)| samples)
}

/// The largest over PEs in each repeat; PEs without samples do not count.
fn largest<'a>(all: impl Iterator<Item = &'a [f64]>) -> Vec<f64> {
    all.fold(Vec::new(), |mut largest, samples| {
        largest.resize(largest.len().max(samples.len()), 0.0);
        largest.iter_mut().zip(samples).for_each(|(largest, &x)| *largest = largest.max(x));
        largest
    })
}

/// The tables with their head.
pub(super) fn text(envelope: &Envelope<Settings, Measured>) -> String {
    let mut text = envelope.head();
    text += &settings(&envelope.settings);
    let known = envelope.settings.roofline.is_some();
    let words = |names: &[&str]| names.iter().map(Cell::new).collect::<Vec<_>>();
    let numbers = |names: &[&str]| names.iter().map(number).collect::<Vec<_>>();
    let percent = |share: &Share| format!("{:.1} %", 100.0 * share.share);
    let mut points = table(
        [
            numbers(&["tokens"]),
            words(&["gates", "mode", "pass"]),
            numbers(&["time us", "p10", "p90", "queued us", "TFLOP/s", "TB/s"]),
        ]
        .into_iter()
        .chain(known.then(|| numbers(&["roofline"])))
        .chain([numbers(&["wait us", "M walked", "sent", "scratch", "peak"])])
        .flatten(),
    );
    let mut kernels = table(
        [numbers(&["tokens"]), words(&["gates", "mode", "pass", "kernel"]), numbers(&["time us", "p10", "p90"])]
            .into_iter()
            .chain(known.then(|| numbers(&["roofline"])))
            .flatten(),
    );
    for point in &envelope.points {
        let what = || {
            let Measured { tokens, gates, mode, pass, .. } = point;
            [number(tokens), Cell::new(gates), Cell::new(mode), Cell::new(pass)].into_iter()
        };
        let times = |time: &Summary| [time.median, time.p10, time.p90].map(|us| number(significant(us))).into_iter();
        let rates = [&point.tflop_s, &point.tb_s].map(|rate| number(significant(rate.median)));
        let bytes = [point.bytes_sent, point.scratch_bytes as u64, point.peak_device_bytes as u64];
        points.add_row(
            what()
                .chain(times(&point.time_us))
                .chain([number(point.back_to_back_us.map(|us| significant(us).to_string()).unwrap_or_default())])
                .chain(rates)
                .chain(point.roofline.as_ref().map(|share| number(percent(share))))
                .chain([number(significant(point.exposed_wait_us.median)), number(walked(&point.cut))])
                .chain(bytes.map(|bytes| number(BinaryBytes(bytes)))),
        );
        for kernel in &point.kernels {
            let share = known.then(|| number(kernel.roofline.as_ref().map(percent).unwrap_or_default()));
            kernels.add_row(what().chain([Cell::new(&kernel.kernel)]).chain(times(&kernel.time_us)).chain(share));
        }
    }
    for table in [points, kernels] {
        text += "\n";
        text += &table.trim_fmt().lines().map(|line| format!("{}\n", line.trim_end())).collect::<String>();
    }
    if envelope.points.iter().any(|point| point.waits == Waits::Host) {
        text += "\nPEs shared a GPU and waited for each other on the host: times are no measure of two GPUs.\n";
    }
    text
}

/// The share of the chunks of M that were walked.
fn walked(cut: &CutReport) -> String {
    match cut.m_chunks {
        0 => "-".to_owned(),
        all => format!("{:.0} %", 100.0 * cut.m_chunks_walked as f64 / all as f64),
    }
}

fn settings(settings: &Settings) -> String {
    let Settings { op, heads, value_heads, key_dim, value_dim, dtype, chunk, .. } = settings;
    let Settings { device, world, pes, warmup, repeats, .. } = settings;
    let (place, clock) = match device {
        Device::Cpu => ("the CPU", "wall time of the kernels on the CPU, which says nothing about a GPU"),
        Device::Cuda => ("GPUs", "on the device's stream, from the begin of the first kernel to the end of the last"),
    };
    let mut text = format!(
        "\n{op} {dtype}, H={heads} HV={value_heads} K={key_dim} V={value_dim}, chunks of {chunk}, {pes} PEs ({world}) on \
         {place}.\n{repeats} steps after {warmup}; the PE that took longest counts. Time: {clock}.\n"
    );
    if let Some(Roofline { tflop_s, tb_s }) = &settings.roofline {
        text += &format!("Roofline: {tflop_s} TFLOP/s, {tb_s} TB/s.\n");
    }
    text
}
