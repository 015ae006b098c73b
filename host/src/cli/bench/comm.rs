//! `deltalink bench comm`: how long a message takes from kernel to kernel, and how many bytes get across.
//!
//! `measure` runs the kernel on one PE, `report` tells. Only this file knows what PEs are.

use std::io::Write;
use std::time::{Duration, Instant};

use kernels_gpu::comm_bench::{MESSAGE_BYTES, payload_bytes};
use kernels_gpu::protocol::Expired;

use super::super::gpus::{GpuChoice, GpusError};
use super::super::options::{DEVICES, TRANSPORTS, one_of};
use super::super::output::{JsonTarget, OutputError, emit};
use super::super::pes::{self, PesError, World};
use super::super::progress::Progress;
use super::super::{Exit, Invocation};
use super::{Envelope, Machine};
use crate::exec::ExecError;
use crate::exec::cpu::Cpu;
#[cfg(feature = "cuda")]
use crate::exec::cuda::CudaExecutor;
use crate::file::{FileError, check_writable};
use crate::op::{Device, Transport};
use crate::world::{Pe, RunError, WorldError, WorldOptions, run_threads};

mod measure;
mod report;

use measure::{Point, Samples, Sampling};
pub(super) use report::significant;
pub use report::{Measured, Settings};

/// Measure messages between PEs, from inside kernels: put, signal and wait, both directions at once.
///
/// PEs exchange in pairs (0 with 1, 2 with 3). In one exchange every block of both puts a message into the other's memory,
/// signals, and waits for the other's signal, as the scan does with its summaries. Samples are the mean of several
/// exchanges, those of the slowest block; the table has the median and the tenths at both ends over samples and PEs.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
How to read the result:
  bytes        of a message; every block sends one per exchange
  blocks       of the grid, 128 threads each on a GPU
  time         of one exchange: put, signal, wait for the partner's
  bandwidth    blocks x bytes / time, in one direction of one PE; as much comes in at the same time

On the CPU it measures stores between cores of this machine, which says nothing about a network or NVLink.

Examples:
  Two PEs, GPUs if there are:
    deltalink bench comm
  As processes, only the ends of the range:
    deltalink bench comm --world processes --sizes 16,1M --blocks 1,128
  On two GPUs, started by a launcher, for a program:
    mpiexec.hydra -n 2 deltalink bench comm --device cuda --json comm.json")]
pub struct Args {
    /// Number of PEs, even. [default: what the launcher says, otherwise 2]
    #[arg(long, value_name = "P")]
    pub pes: Option<usize>,
    /// What a PE is: a thread of this process, or a process of its own.
    #[arg(long, value_enum)]
    pub world: Option<World>,
    /// What computes. [default: cuda if this build and this machine have it, otherwise cpu]
    #[arg(long, value_name = "DEVICE", value_parser = one_of::<Device>(DEVICES))]
    pub device: Option<Device>,
    #[command(flatten)]
    #[allow(missing_docs)] // documented at its type
    pub choice: GpuChoice,
    /// How messages are written into the other PE's memory; auto: by stores where that works, put: by puts with signals.
    #[arg(long, value_name = "TRANSPORT", default_value = "auto", value_parser = one_of::<Transport>(TRANSPORTS))]
    pub transport: Transport,
    /// Bytes of a message: powers of two from 16 to 1M, with K or M for 1024 or 1024 x 1024.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "16,256,4K,64K,1M", value_parser = size)]
    pub sizes: Vec<usize>,
    /// Blocks, 1 to 128. [default: 1,4,16,32,64,128; on the CPU those for which each PE has a core]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=MAX_BLOCKS as i64))]
    pub blocks: Vec<u32>,
    /// Samples of each point.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub repeats: u32,
    /// Exchanges before the first sample; what they bring is compared with what was sent.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub warmup: u32,
    /// Longest time to wait for another PE.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
    /// Also write the report as JSON to FILE; - writes JSON, and nothing else, to standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<JsonTarget>,
}

const MAX_BLOCKS: usize = 128;
const BLOCKS: [u32; 6] = [1, 4, 16, 32, 64, 128];
/// Room for the words of any number of PEs beside the slots.
const WORDS_ROOM: usize = 64 << 20;

/// A number of bytes such as 64K.
fn size(text: &str) -> Result<usize, String> {
    let (digits, factor) = match text.strip_suffix(['K', 'k']) {
        Some(digits) => (digits, 1 << 10),
        None => text.strip_suffix(['M', 'm']).map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    let bytes = digits.parse::<usize>().ok().and_then(|number| number.checked_mul(factor));
    match bytes.filter(|bytes| bytes.is_power_of_two() && MESSAGE_BYTES.contains(bytes)) {
        Some(bytes) => Ok(bytes),
        None => Err("a message has a power of two of bytes, from 16 to 1M".to_owned()),
    }
}

/// Messages could not be measured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum CommBenchError {
    #[error("{pes} PEs cannot be paired; ask for an even number of at least 2 (--pes, or the launcher's -n)")]
    Odd { pes: usize },
    #[error("with {blocks} blocks of {bytes} bytes: {expired}")]
    Expired { bytes: usize, blocks: usize, expired: Expired },
    #[error(
        "with {blocks} blocks of {bytes} bytes {wrong} elements did not arrive as PE {partner} had sent them when its signal \
         came; this machine does not keep the order of stores and signals that deltalink relies on: please report it with \
         the output of `deltalink doctor`"
    )]
    Wrong { bytes: usize, blocks: usize, wrong: u64, partner: usize },
    #[error("the samples that PE {rank} sent cannot be read; start all PEs with one program")]
    Unreadable { rank: usize },
    #[error(
        "this build has no GPU support; build it with `cargo build --release --features cuda` (after `cargo xtask setup`), \
         or measure on the CPU (--device cpu)"
    )]
    NoCuda,
    #[error(transparent)]
    Gpus(#[from] GpusError),
    #[error(transparent)]
    Pes(#[from] PesError),
    #[error(transparent)]
    World(#[from] WorldError),
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Virtual(#[from] crate::world::virtual_pes::VirtualError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Output(#[from] OutputError),
}

impl From<RunError<CommBenchError>> for CommBenchError {
    fn from(error: RunError<CommBenchError>) -> Self {
        match error {
            RunError::World(error) => error.into(),
            RunError::Pe { error, .. } => error,
            RunError::Panic { rank, message } => WorldError::PeFailed { rank, message }.into(),
        }
    }
}

impl Args {
    fn options(&self) -> WorldOptions {
        let blocks = self.blocks.iter().max().map_or(MAX_BLOCKS, |&blocks| blocks as usize);
        let heap_bytes = payload_bytes(self.largest(), blocks) + WORDS_ROOM;
        WorldOptions { heap_bytes, timeout: Duration::from_secs(self.timeout) }
    }

    fn largest(&self) -> usize {
        self.sizes.iter().copied().max().unwrap_or(*MESSAGE_BYTES.end())
    }

    /// What to measure on `pes` PEs.
    fn points(&self, device: Device, pes: usize) -> Vec<Point> {
        let at_once = match device {
            Device::Cpu => cores_each(pes),
            Device::Cuda => MAX_BLOCKS,
        };
        let usual = || BLOCKS.into_iter().filter(|&blocks| blocks as usize <= at_once).collect();
        let blocks: Vec<u32> = if self.blocks.is_empty() { usual() } else { self.blocks.clone() };
        let of = |&bytes: &usize| blocks.iter().map(move |&blocks| Point { bytes, blocks: blocks as usize });
        self.sizes.iter().flat_map(of).collect()
    }

    fn sampling(&self) -> Sampling {
        Sampling { warmup: self.warmup, samples: self.repeats, transport: self.transport }
    }
}

/// Cores for each PE's blocks.
fn cores_each(pes: usize) -> usize {
    (std::thread::available_parallelism().map_or(1, usize::from) / pes).max(1)
}

/// Threads of a PE's executor on the CPU: one for each block, since blocks wait for each other's partners.
fn workers(points: &[Point]) -> usize {
    points.iter().map(|point| point.blocks).max().unwrap_or(1)
}

/// Measures as `args` say and writes the table to `out`; as one PE of many if a launcher started this process, otherwise with
/// PEs of its own. Of several processes only PE 0 writes.
///
/// # Errors
/// [`CommBenchError`].
pub fn run(args: &Args, invocation: &Invocation, out: &mut impl Write) -> Result<Exit, CommBenchError> {
    let options = args.options();
    let launched = pes::if_launched(&options, |pe| {
        let refusable = ready(args, pe.size()).and_then(|()| Ok(pes::fits_launcher(pe, args.world, args.pes)?));
        match pes::agree(pe, "options of the measurement", refusable.and_then(|()| device(args)))? {
            Ok(device) => run_as(args, invocation, pe, device, out).map(Ok),
            Err(error) => Ok(Err(error)),
        }
    });
    if let Some(outcome) = launched {
        return outcome;
    }
    let pes = args.pes.unwrap_or(2);
    ready(args, pes)?;
    if args.world == Some(World::Processes) {
        return Ok(pes::launch(pes, &options, invocation)?);
    }
    let device = device(args)?;
    let points = args.points(device, pes);
    let progress = progress(args, &points);
    let all = match device {
        Device::Cpu => run_threads(pes, &options, |pe| {
            let mut cpu = Cpu::new(workers(&points)).map_err(ExecError::from)?;
            measure::all(pe, &mut cpu, &points, args.sampling(), progress.of(pe))
        })?,
        #[cfg(feature = "cuda")]
        Device::Cuda if args.transport == Transport::Put => return Err(ExecError::PutsOfThreads.into()),
        #[cfg(feature = "cuda")]
        Device::Cuda => on_gpus(pes, &options, pool_bytes(&points, pes), |pe, exec| {
            measure::all(pe, exec, &points, args.sampling(), progress.of(pe))
        })?,
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => return Err(CommBenchError::NoCuda),
    };
    drop(progress);
    tell(args, invocation, (device, World::Threads, None), &all, &points, out)
}

/// What came of [`exchange_for`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Exchanged {
    /// Messages of both PEs, whose contents were compared.
    pub messages: u64,
}

/// Lets two PEs, threads of this process, exchange messages of several sizes for `duration` and compares what arrives.
pub(in crate::cli) fn exchange_for(device: Device, duration: Duration) -> Result<Exchanged, CommBenchError> {
    const SIZES: [usize; 3] = [16, 4096, 64 << 10];
    const COMPARED: u32 = 100;
    let points = SIZES.map(|bytes| Point { bytes, blocks: 1 });
    let sampling = Sampling { warmup: COMPARED, samples: 1, transport: Transport::Auto };
    let options = WorldOptions { heap_bytes: WORDS_ROOM, timeout: Duration::from_secs(10) };
    let begin = Instant::now();
    let body = |pe: &Pe, measure: &mut dyn FnMut() -> Result<Samples, CommBenchError>| {
        let mut messages = 0;
        loop {
            measure()?;
            messages += u64::from(COMPARED) * points.len() as u64;
            // PE 0 says for both when it is enough.
            let enough = pe.all_gather("end of the self-test", &[u8::from(begin.elapsed() >= duration)])?;
            if enough[0] == [1] {
                return Ok(messages);
            }
        }
    };
    let all: Vec<u64> = match device {
        Device::Cpu => run_threads(2, &options, |pe| {
            let mut cpu = Cpu::new(1).map_err(ExecError::from)?;
            body(pe, &mut || measure::all(pe, &mut cpu, &points, sampling, None))
        })?,
        #[cfg(feature = "cuda")]
        Device::Cuda => on_gpus(2, &options, pool_bytes(&points, 2), |pe, exec| {
            body(pe, &mut || measure::all(pe, exec, &points, sampling, None))
        })?,
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => return Err(CommBenchError::NoCuda),
    };
    Ok(Exchanged { messages: all.iter().sum() })
}

/// What can be refused before PEs are started.
fn ready(args: &Args, pes: usize) -> Result<(), CommBenchError> {
    if pes == 0 || !pes.is_multiple_of(2) {
        return Err(CommBenchError::Odd { pes });
    }
    Ok(args.json.as_ref().and_then(JsonTarget::file).map_or(Ok(()), check_writable)?)
}

fn device(args: &Args) -> Result<Device, CommBenchError> {
    args.choice.apply(args.device == Some(Device::Cpu))?;
    match args.device.unwrap_or_else(Device::available) {
        Device::Cuda if cfg!(not(feature = "cuda")) => Err(CommBenchError::NoCuda),
        device => Ok(device),
    }
}

/// The bar of PE 0.
struct Bar(Progress);

impl Bar {
    fn of(&self, pe: &Pe) -> Option<&Progress> {
        (pe.rank() == 0).then_some(&self.0)
    }
}

fn progress(args: &Args, points: &[Point]) -> Bar {
    Bar(Progress::new(points.len(), args.json != Some(JsonTarget::Stdout)))
}

/// This process is `pe`.
fn run_as(
    args: &Args,
    invocation: &Invocation,
    pe: &Pe,
    device: Device,
    out: &mut impl Write,
) -> Result<Exit, CommBenchError> {
    let points = args.points(device, pe.size());
    let progress = progress(args, &points);
    let (mine, nvshmem) = match device {
        Device::Cpu => {
            let mut cpu = Cpu::new(workers(&points)).map_err(ExecError::from)?;
            (measure::all(pe, &mut cpu, &points, args.sampling(), progress.of(pe))?, None)
        }
        #[cfg(feature = "cuda")]
        Device::Cuda => {
            use super::super::gpus::GpuOfPe;
            let on_gpu = GpuOfPe::start(pe, args.transport, pool_bytes(&points, pe.size()))?;
            let mine = on_gpu
                .executor()
                .map_err(CommBenchError::from)
                .and_then(|mut exec| measure::all(pe, &mut exec, &points, args.sampling(), progress.of(pe)));
            let version = on_gpu.nvshmem.version().to_string();
            match mine {
                Ok(mine) => {
                    on_gpu.close()?;
                    (mine, Some(version))
                }
                Err(error) => {
                    on_gpu.abandon();
                    return Err(error);
                }
            }
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda => return Err(CommBenchError::NoCuda),
    };
    drop(progress);
    let Some(all) = pe.gather("samples", 0, &mine.to_bytes())? else { return Ok(Exit::Success) };
    let read = |(rank, bytes): (usize, &Vec<u8>)| {
        Samples::from_bytes(bytes, points.len()).ok_or(CommBenchError::Unreadable { rank })
    };
    let all = all.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
    tell(args, invocation, (device, World::Processes, nvshmem), &all, &points, out)
}

/// Symmetric memory on a GPU.
#[cfg(feature = "cuda")]
fn pool_bytes(points: &[Point], pes: usize) -> usize {
    measure::heap_bytes(points, pes)
}

/// Runs `body` on PEs that are threads, dealt out to all GPUs of this process.
#[cfg(feature = "cuda")]
fn on_gpus<T: Send>(
    pes: usize,
    options: &WorldOptions,
    pool_bytes: usize,
    body: impl Fn(&Pe, &mut CudaExecutor) -> Result<T, CommBenchError> + Sync,
) -> Result<Vec<T>, CommBenchError> {
    use crate::exec::cuda::{Gpu, Kernels, Sharing};
    use crate::world::virtual_pes::run_virtual_pes;
    let gpus = || (0..Gpu::count()?).map(Gpu::open).collect::<Result<Vec<_>, _>>();
    let gpus = gpus().map_err(ExecError::from)?;
    let sharing = Sharing { pes: pes.div_ceil(gpus.len()), concurrent: false };
    let all = run_virtual_pes(pes, &gpus, options, pool_bytes, |virtual_pe| {
        let kernels = Kernels::direct(virtual_pe.gpu).map_err(ExecError::from)?;
        let exec = CudaExecutor::new(virtual_pe.gpu, kernels, virtual_pe.heap.clone(), sharing);
        body(virtual_pe.pe, &mut exec.map_err(ExecError::from)?)
    })?;
    Ok(all)
}

fn tell(
    args: &Args,
    invocation: &Invocation,
    (device, world, nvshmem): (Device, World, Option<String>),
    all: &[Samples],
    points: &[Point],
    out: &mut impl Write,
) -> Result<Exit, CommBenchError> {
    let pes = all.len();
    let settings = Settings::new(device, world, all, args.sampling());
    let measured = points.iter().enumerate().filter_map(|(i, &point)| report::measured(all, i, point, device, pes));
    let envelope =
        Envelope::new("comm", invocation, Machine::this(nvshmem), settings, measured.collect::<Vec<Measured>>());
    emit(out, args.json.as_ref(), &envelope, || report::text(&envelope))?;
    Ok(Exit::Success)
}

#[cfg(test)]
mod tests;
