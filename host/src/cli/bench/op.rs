//! `deltalink bench op`: how long a step takes on the device, and what share of it is waiting.
//!
//! `setup` says what is measured, `inputs` makes a PE's tensors, `measure` runs the operation on one PE, `work` has the formulas of what it computes and
//! moves, `report` tells. Only this file knows what PEs are.

use std::io::Write;
use std::path::PathBuf;

use super::super::gpus::{GpuChoice, GpusError};
use super::super::options::{
    CUT_TOLERANCE, DEVICES, DTYPES, M_WIRES, MODES, OPS, RECOMPUTES, TRANSPORTS, chunk, cut_tolerance, one_of,
};
use super::super::output::{JsonTarget, OutputError, emit};
use super::super::pes::{self, PesError, World};
use super::super::progress::Progress;
use super::super::{Exit, Invocation};
use super::{Envelope, Machine};
use crate::exec::ExecError;
use crate::exec::cpu::Cpu;
use crate::file::{FileError, check_writable};
use crate::inputs::Op;
use crate::op::{Device, MWire, Mode, OpError, Recompute, Segments, Transport};
use crate::tensor::Dtype;
use crate::trace::{Trace, TraceError};
use crate::world::{Pe, RunError, WorldError, run_threads};

mod inputs;
mod measure;
mod plot;
mod report;
mod setup;
mod work;

pub use inputs::Gates;
use measure::{Group, Samples};
pub use report::{Kernel, Measured, Pass, Settings, Share};
use setup::Setup;
pub use work::Roofline;

/// Measure steps of the operation: time on the device, kernel by kernel, waits, bytes, and the share of what the device can do.
///
/// One sequence is cut into equal parts, --tokens for each PE. Inputs are random, made once, and lie on the device with the
/// results. A step that is timed begins on all PEs together.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
How to read the result:
  tokens     of each PE
  gates      fast: a state is forgotten within a few tokens, and M is zero
             slow: a state keeps 99.6 % per token, so that M matters
  pass       forward, backward, or both: the sum of the two in each repeat
  time       of a step on the device, from the begin of its first kernel to the end of its last, on the PE
             that took longest. On the CPU, wall time.
  queued     time of a step where many are enqueued back to back and the host waits for none; of a
             forward step, or of both passes together. Empty where steps need the host (bulk mode,
             shared GPUs)
  TFLOP/s    products that the algorithm asks for, over that time, of the PE that has most to do
  TB/s       bytes that its kernels read and write, each tensor once for each kernel
  roofline   least time of its kernels one by one, at --peak-tflops and --peak-tbs, over the time
  wait       in which a worker only waited for other PEs, on the PE that waited longest
  sent       payload bytes of the PE that sent most
  scratch    memory beside tensors, heap and what is kept for a backward pass
  peak       device memory of a PE in all

Examples:
  One PE, a few lengths:
    deltalink bench op --pes 1 --tokens 2048,8192,32768
  What overlap gains over an exchange between the kernels, on two GPUs:
    deltalink bench op --pes 2 --mode overlap,bulk --gates slow
  Forward and backward of Gated DeltaNet, two processes under a launcher:
    mpiexec.hydra -n 2 deltalink bench op --op gdn --backward
  Figures for a program, and a drawing:
    deltalink bench op --tokens 1024,4096 --json op.json --plot op.svg")]
pub struct Args {
    /// The delta rule.
    #[arg(long, value_name = "OP", default_value = "kda", value_parser = one_of::<Op>(OPS))]
    pub op: Op,
    /// Query/key heads. [default: 32, on the CPU 4]
    #[arg(long, value_name = "H", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub heads: Option<u32>,
    /// Value heads, a multiple of --heads. [default: as --heads]
    #[arg(long, value_name = "HV", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub value_heads: Option<u32>,
    /// Tokens of each PE. [default: 8192, on the CPU 256]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub tokens: Vec<u32>,
    /// Channels of keys and of values: multiples of 16 up to 256.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub dim: u32,
    /// Channels of keys. [default: as --dim]
    #[arg(long, value_name = "K")]
    pub key_dim: Option<u32>,
    /// Channels of values. [default: as --dim]
    #[arg(long, value_name = "V")]
    pub value_dim: Option<u32>,
    /// Element type of q, k, v, the gate's raw input and beta.
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = one_of::<Dtype>(DTYPES))]
    pub dtype: Dtype,
    /// Chunk length.
    #[arg(long, default_value = "64", value_parser = chunk())]
    pub chunk: usize,
    /// Number of PEs. [default: what the launcher says, otherwise 1]
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub pes: Option<u32>,
    /// What a PE is: a thread of this process, or a process of its own.
    #[arg(long, value_enum)]
    pub world: Option<World>,
    /// What computes. [default: cuda if this build and this machine have it, otherwise cpu]
    #[arg(long, value_name = "DEVICE", value_parser = one_of::<Device>(DEVICES))]
    pub device: Option<Device>,
    #[command(flatten)]
    #[allow(missing_docs)] // documented at its type
    pub choice: GpuChoice,
    /// How summaries travel, one measurement after the other.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "overlap", value_parser = one_of::<Mode>(MODES))]
    pub mode: Vec<Mode>,
    /// How fast states forget.
    #[arg(long, value_enum, default_value = "both")]
    pub gates: GatesChoice,
    /// Also measure the backward pass.
    #[arg(long)]
    pub backward: bool,
    /// What the backward pass computes again: everything, or only the states.
    #[arg(long, value_name = "WHAT", default_value = "all", value_parser = one_of::<Recompute>(RECOMPUTES))]
    pub recompute: Recompute,
    /// Element type of the transition M on the wire; auto: f32 for f32 tensors, otherwise bf16.
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = one_of::<MWire>(M_WIRES))]
    pub m_wire: MWire,
    /// Leave out what a transition M would still do once its norm is below this; 0 leaves out nothing.
    #[arg(long, value_name = "TOLERANCE", default_value = CUT_TOLERANCE, value_parser = cut_tolerance)]
    pub cut_tolerance: f32,
    /// Into how many parts a PE cuts each of its segments, to walk them side by side: auto, which does where it gains on a
    /// GPU, or a number (1: never). Mode exact never does.
    #[arg(long, value_name = "N", default_value = "auto")]
    pub segments: Segments,
    /// How summaries are written into other PEs' memory: stores where kernels reach it, otherwise puts; or puts always.
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = one_of::<Transport>(TRANSPORTS))]
    pub transport: Transport,
    /// Steps before the first that counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub warmup: u32,
    /// Steps that count.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub repeats: u32,
    /// Matrix products of the device, 1e12 FLOP/s. [default: 790 on GPUs, measured on an H200 with bf16]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub peak_tflops: Option<f64>,
    /// Memory bandwidth of the device, 1e12 bytes/s. [default: 4.3 on GPUs, measured on an H200]
    #[arg(long, value_name = "X", value_parser = positive)]
    pub peak_tbs: Option<f64>,
    /// Longest time to wait for another PE.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
    /// Also write the report as JSON to FILE; - writes JSON, and nothing else, to standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<JsonTarget>,
    /// Draw times over tokens (SVG).
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Write the timeline of one more step (Chrome trace JSON); of one number of tokens, with one kind of gates, in one mode.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

/// Value of `--gates`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum GatesChoice {
    /// A state is forgotten within a few tokens.
    Fast,
    /// A state lasts, so that the transition matters.
    Slow,
    /// One after the other.
    Both,
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|x| x.is_finite() && *x > 0.0).ok_or_else(|| "give a number above 0".to_owned())
}

/// PEs that the heap has room for where a launcher says how many there are.
const LAUNCHED_PES: usize = 16;

/// Steps could not be measured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum OpBenchError {
    #[error("the samples that PE {rank} sent cannot be read ({reason}); start all PEs with one program")]
    Unreadable { rank: usize, reason: String },
    #[error(
        "--trace records one step, and {points} are to be measured: give one number of --tokens, --gates fast or slow, and one --mode"
    )]
    Steps { points: usize },
    #[error("cannot draw the times: {why}")]
    Draw { why: String },
    #[error("cannot write {path}; choose a path for --plot that can be created")]
    Plot { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Compute(#[from] OpError),
    #[error(transparent)]
    Gpus(#[from] GpusError),
    #[error(transparent)]
    Pes(#[from] PesError),
    #[error(transparent)]
    World(#[from] WorldError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Virtual(#[from] crate::world::virtual_pes::VirtualError),
}

impl From<RunError<OpBenchError>> for OpBenchError {
    fn from(error: RunError<OpBenchError>) -> Self {
        match error {
            RunError::World(error) => error.into(),
            RunError::Pe { error, .. } => error,
            RunError::Panic { rank, message } => WorldError::PeFailed { rank, message }.into(),
        }
    }
}

/// Measures as `args` say and writes the table to `out`; as one PE of many if a launcher started this process, otherwise with
/// PEs of its own. Of several processes only PE 0 writes.
///
/// # Errors
/// [`OpBenchError`].
pub fn run(args: &Args, invocation: &Invocation, out: &mut impl Write) -> Result<Exit, OpBenchError> {
    let asked = args.pes.map(|pes| pes as usize);
    // Memory that is never touched is not used; with 32 heads it is enough for either device.
    let largest = Setup::new(args, Device::Cuda);
    let options = largest.world_options(asked.unwrap_or(LAUNCHED_PES), args.timeout)?;
    let launched = pes::if_launched(&options, |pe| {
        let refusable = ready(args).and_then(|()| Ok(pes::fits_launcher(pe, args.world, asked)?));
        match pes::agree(pe, "options of the measurement", refusable.and_then(|()| device(args)))? {
            Ok(device) => run_as(args, invocation, pe, &Setup::new(args, device), out).map(Ok),
            Err(error) => Ok(Err(error)),
        }
    });
    if let Some(outcome) = launched {
        return outcome;
    }
    let pes = asked.unwrap_or(1);
    ready(args)?;
    if args.world == Some(World::Processes) {
        return Ok(pes::launch(pes, &options, invocation)?);
    }
    let setup = Setup::new(args, device(args)?);
    let progress = progress(args, &setup);
    let options = setup.world_options(pes, args.timeout)?;
    let mut all: Vec<Vec<Samples>> = vec![Vec::new(); pes];
    // A world for each group: GPU memory of a world goes back at its end.
    for &group in &setup.groups {
        let samples = match setup.device {
            Device::Cpu => run_threads(pes, &options, |pe| {
                Ok::<_, OpBenchError>(measure::group(pe, || cpu(pe), &setup, group, of_pe_0(pe, &progress))?)
            })?,
            #[cfg(feature = "cuda")]
            Device::Cuda => on_gpus(&setup, group, &options, pes, &progress)?,
            #[cfg(not(feature = "cuda"))]
            Device::Cuda => return Err(OpError::NoCuda.into()),
        };
        all.iter_mut().zip(samples).for_each(|(all, samples)| all.extend(samples));
    }
    drop(progress);
    tell(args, invocation, (&setup, World::Threads, None), &all, out)
}

/// What can be refused before PEs are started.
fn ready(args: &Args) -> Result<(), OpBenchError> {
    let files = [args.json.as_ref().and_then(JsonTarget::file), args.plot.as_deref(), args.trace.as_deref()];
    for path in files.into_iter().flatten() {
        check_writable(path)?;
    }
    let setup = Setup::new(args, Device::Cpu);
    match setup.groups.len() * setup.modes.len() {
        points if points > 1 && setup.trace => Err(OpBenchError::Steps { points }),
        _ => Ok(()),
    }
}

fn device(args: &Args) -> Result<Device, OpBenchError> {
    args.choice.apply(args.device == Some(Device::Cpu))?;
    match args.device.unwrap_or_else(Device::available) {
        Device::Cuda if cfg!(not(feature = "cuda")) => Err(OpError::NoCuda.into()),
        device => Ok(device),
    }
}

fn progress(args: &Args, setup: &Setup) -> Progress {
    Progress::new(setup.groups.len() * setup.modes.len(), args.json != Some(JsonTarget::Stdout))
}

fn of_pe_0<'a>(pe: &Pe, progress: &'a Progress) -> Option<&'a Progress> {
    (pe.rank() == 0).then_some(progress)
}

/// An executor with a PE's share of the cores.
fn cpu(pe: &Pe) -> Result<Cpu, OpError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Cpu::new((cores / pe.size()).max(1)).map_err(ExecError::from)?)
}

/// This process is `pe`.
fn run_as(
    args: &Args,
    invocation: &Invocation,
    pe: &Pe,
    setup: &Setup,
    out: &mut impl Write,
) -> Result<Exit, OpBenchError> {
    let progress = progress(args, setup);
    let shown = of_pe_0(pe, &progress);
    let (mine, nvshmem) = match setup.device {
        Device::Cpu => (all_groups(setup, |group| measure::group(pe, || cpu(pe), setup, group, shown))?, None),
        #[cfg(feature = "cuda")]
        Device::Cuda => {
            use super::super::gpus::GpuOfPe;
            let on = GpuOfPe::start(pe, setup.transport, setup.heap_bytes(pe.size())?).map_err(OpError::from)?;
            let mine = all_groups(setup, |group| {
                measure::group(pe, || on.executor().map_err(OpError::from), setup, group, shown)
            });
            let version = on.nvshmem.version().to_string();
            match &mine {
                Ok(_) => on.close().map_err(OpError::from)?,
                Err(_) => on.abandon(),
            }
            (mine?, Some(version))
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => return Err(OpError::NoCuda.into()),
    };
    drop(progress);
    let bytes = serde_json::to_vec(&mine).map_err(OutputError::from)?;
    let Some(all) = pe.gather("samples", 0, &bytes)? else { return Ok(Exit::Success) };
    let read = |(rank, bytes): (usize, &Vec<u8>)| {
        serde_json::from_slice(bytes).map_err(|error| OpBenchError::Unreadable { rank, reason: error.to_string() })
    };
    let all = all.iter().enumerate().map(read).collect::<Result<Vec<Vec<Samples>>, _>>()?;
    tell(args, invocation, (setup, World::Processes, nvshmem), &all, out)
}

fn all_groups(
    setup: &Setup,
    mut measure: impl FnMut(Group) -> Result<Vec<Samples>, OpError>,
) -> Result<Vec<Samples>, OpError> {
    let mut all = Vec::new();
    for &group in &setup.groups {
        all.extend(measure(group)?);
    }
    Ok(all)
}

/// PEs as threads, dealt out to all GPUs of this process.
#[cfg(feature = "cuda")]
fn on_gpus(
    setup: &Setup,
    group: Group,
    options: &crate::world::WorldOptions,
    pes: usize,
    progress: &Progress,
) -> Result<Vec<Vec<Samples>>, OpBenchError> {
    use crate::exec::cuda::{CudaError, CudaExecutor, Gpu, Kernels, Sharing};
    use crate::world::virtual_pes::run_virtual_pes;
    if setup.transport == Transport::Put && pes > 1 {
        return Err(OpError::from(ExecError::PutsOfThreads).into());
    }
    let gpus = || -> Result<Vec<Gpu>, CudaError> { (0..Gpu::count()?).map(Gpu::open).collect() };
    let gpus = gpus().map_err(|error| OpError::from(ExecError::from(error)))?;
    let sharing = Sharing { pes: pes.div_ceil(gpus.len()), concurrent: false };
    let samples = run_virtual_pes(pes, &gpus, options, setup.heap_bytes(pes)?, |on| {
        let executor = || {
            let kernels = Kernels::direct(on.gpu).map_err(ExecError::from)?;
            Ok(CudaExecutor::new(on.gpu, kernels, on.heap.clone(), sharing).map_err(ExecError::from)?)
        };
        Ok::<_, OpBenchError>(measure::group(on.pe, executor, setup, group, of_pe_0(on.pe, progress))?)
    })?;
    Ok(samples)
}

fn tell(
    args: &Args,
    invocation: &Invocation,
    (setup, world, nvshmem): (&Setup, World, Option<String>),
    all: &[Vec<Samples>],
    out: &mut impl Write,
) -> Result<Exit, OpBenchError> {
    let settings = Settings::new(setup, world, all.len());
    let points: Vec<Measured> = report::measured(all, setup);
    let envelope = Envelope::new("op", invocation, Machine::this(nvshmem), settings, points);
    if let Some(path) = &args.plot {
        let drawing = plot::svg(&envelope).map_err(|why| OpBenchError::Draw { why })?;
        std::fs::write(path, drawing).map_err(|source| OpBenchError::Plot { path: path.clone(), source })?;
    }
    if let Some(path) = &args.trace {
        timeline(setup, all)?.save(path)?;
    }
    emit(out, args.json.as_ref(), &envelope, || report::text(&envelope))?;
    Ok(Exit::Success)
}

/// The recorded step of all PEs: the forward call, then the backward call if there is one.
fn timeline(setup: &Setup, all: &[Vec<Samples>]) -> Result<Trace, TraceError> {
    let of_pe = |samples: &Vec<Samples>| {
        let timelines = samples.iter().flat_map(|samples| &samples.timelines);
        timelines.map(|text| Trace::from_chrome(text.as_bytes())).collect::<Result<Vec<_>, _>>()
    };
    let by_pe = all.iter().map(of_pe).collect::<Result<Vec<_>, _>>()?;
    let calls = by_pe.first().map_or(0, Vec::len);
    let merged: Vec<Trace> = (0..calls).map(|i| Trace::merge(by_pe.iter().map(|calls| calls[i].clone()))).collect();
    let what = if setup.backward { "forward and backward" } else { "forward" };
    let Setup { op, h, k, v, dtype, groups, modes, .. } = setup;
    let tokens = groups.first().map_or(0, |group| group.tokens);
    let mode = modes.first().map_or(String::new(), ToString::to_string);
    let title = format!(
        "{op} {dtype} {what}: {tokens} tokens on each of {} PEs, {h} heads, K={k} V={v}, mode {mode}",
        all.len()
    );
    Ok(Trace::in_turn(title, &merged))
}

#[cfg(test)]
mod tests;
