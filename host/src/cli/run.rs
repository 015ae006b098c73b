//! `deltalink run`: compute inputs on several PEs and check the results.
//!
//! The way of the data: `input` loads and cuts up, `stage` has the PEs compute and brings their parts together on the
//! PE that reports, `check` compares, `report` tells. Only `stage` knows whether PEs are threads or processes.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;

use super::gpus::GpuChoice;
use super::options::{
    CUT_TOLERANCE, DEVICES, DTYPES, M_WIRES, MODES, OPS, RECOMPUTES, TRANSPORTS, chunk, cut_tolerance, one_of,
};
use super::output::{JsonTarget, emit};
use super::pes;
use super::progress::Progress;
use super::{Exit, Invocation, World};
use crate::file::{Entry, FileError, check_writable, save};
use crate::inputs::{Op, StateLayout};
use crate::op::whole::{Whole, WholeBackward};
use crate::op::{Config, Device, MWire, Mode, Recompute, Segments, Transport, Values};
use crate::tensor::Dtype;
use crate::trace::Trace;
use crate::world::{Pe, WorldOptions};

pub mod backward;
mod check;
mod error;
mod input;
pub(super) mod parts;
mod report;
mod soak;
mod stage;

use check::Verdict;
pub use error::RunCommandError;
pub use report::{ErrorReport, PeReport, Report};
pub use soak::SoakReport;

use input::Job;
use soak::Soak;
use stage::Stage;
pub(super) use stage::machine_epoch;

/// Compute inputs on several PEs, check the results, and show what communication cost.
///
/// The tokens of each input are cut into one contiguous range per PE. The outputs `o` and final states `ht` are compared with
/// those of one PE, with an f64 reference, and with what the input file expects, if it does.
///
/// Without --input the inputs are activations of a small trained language model that come with the program.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "\
How to read the result:
  bytes sent         payload that this PE wrote to others
  compute            time in kernels, waits not counted
  exposed wait       time in which a worker only waited for other PEs
  rel. RMS, largest  |found - expected| / |expected|, and the largest single difference
  saved              bytes that a PE keeps between its forward and its backward call
  transition weight  largest |M S_in| / |S_out|: how much of a state came from an earlier PE. Near 0
                     a wrong transition M would not show in the errors.

Examples:
  All bundled inputs on 4 PEs that are threads:
    deltalink run
  Your own tensors on 8 processes, results to a file:
    deltalink run --input x.safetensors --pes 8 --world processes --output y.safetensors
  What overlap gains, as a timeline for https://ui.perfetto.dev or `deltalink trace`:
    deltalink run --op kda --trace overlap.json
    deltalink run --op kda --mode bulk --trace bulk.json
  Bitwise the result of one PE (cuts are at multiples of the chunk length):
    deltalink run --mode exact --pes 4
  Gradients as well, as a training step needs them:
    deltalink run --backward
  Started by MPICH's launcher, which says how many PEs there are:
    mpiexec.hydra -n 4 deltalink run
  Figures for a program:
    deltalink run --json - | jq '.[] | {input, error, exposed_wait_us}'

Input files are safetensors: q, k [B,T,H,K]; v [B,T,HV,V]; g (or g_raw, A_log, dt_bias); beta (or
beta_logits) [B,T,HV]; optional h0 and cu_seqlens; metadata op = kda or gdn.
With several inputs the tensors in --output are called <input>.o and <input>.ht.

Exit code: 0 all results are right, 1 one is wrong, 2 they could not be computed.")]
pub struct Args {
    /// Tensors to compute with (safetensors). [default: the bundled activations]
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// Only the bundled inputs of this delta rule; with --input, what the file must hold.
    #[arg(long, value_name = "OP", value_parser = one_of::<Op>(OPS))]
    pub op: Option<Op>,
    /// Number of PEs. [default: what the launcher or --cuts say, otherwise 4]
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
    /// How summaries travel: overlap sends from inside the scan, bulk between kernels, exact waits for the state first.
    #[arg(long, default_value = "overlap", value_parser = one_of::<Mode>(MODES))]
    pub mode: Mode,
    /// Where to cut the tokens, P - 1 offsets. [default: the file's rank_token_offsets if there are P, otherwise equal shares]
    #[arg(long, value_name = "OFFSETS", value_delimiter = ',')]
    pub cuts: Option<Vec<usize>>,
    /// Round q, k, v, the gate's input and beta to this type first. [default: as in the file]
    #[arg(long, value_name = "TYPE", value_parser = one_of::<Dtype>(DTYPES))]
    pub dtype: Option<Dtype>,
    /// Chunk length.
    #[arg(long, default_value = "64", value_parser = chunk())]
    pub chunk: usize,
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
    /// How summaries are written into other PEs' memory; auto: by stores where that works, put: by puts with signals.
    #[arg(long, value_name = "TRANSPORT", default_value = "auto", value_parser = one_of::<Transport>(TRANSPORTS))]
    pub transport: Transport,
    /// Also compute gradients, from the file's tensors do and, if there is one, dht.
    #[arg(long)]
    pub backward: bool,
    /// What --backward computes again: everything, or only the states, while what was computed inside chunks is kept.
    #[arg(long, value_name = "WHAT", default_value = "all", value_parser = one_of::<Recompute>(RECOMPUTES))]
    pub recompute: Recompute,
    /// Check barriers, bounds and unwritten outputs in the kernels. Slow.
    #[arg(long)]
    pub checked: bool,
    /// Compute with NaN and infinity in the input. The errors are then shown, not judged.
    #[arg(long)]
    pub allow_nonfinite: bool,
    /// Write o and ht, and gradients with --backward (safetensors).
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write the timeline of all PEs (Chrome trace JSON), several inputs one after the other.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Compute each input this many times, with --backward its gradients too, and compare every result with the first, bit for
    /// bit.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// Let random PEs wait up to this long before each forward and each backward call.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    pub jitter: u64,
    /// Seed of these delays.
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
    /// Longest time to wait for another PE.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
    /// Symmetric heap of each PE; memory that is never touched is not used.
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub heap_mib: u32,
    /// Also write the report as JSON to FILE; - writes JSON, and nothing else, to standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<JsonTarget>,
}

impl Default for Args {
    /// What the command line `deltalink run` means.
    fn default() -> Self {
        #[derive(clap::Parser)]
        struct Alone {
            #[command(flatten)]
            args: Args,
        }
        Alone::parse_from([OsStr::new("run")]).args
    }
}

impl Args {
    fn config(&self) -> Config {
        Config {
            device: self.device.unwrap_or_else(Device::available),
            mode: self.mode,
            chunk: self.chunk,
            m_wire: self.m_wire,
            cut_tolerance: self.cut_tolerance,
            segments: self.segments,
            transport: self.transport,
            final_state: true,
            recompute: self.recompute,
            checked: self.checked,
            allow_nonfinite: self.allow_nonfinite,
            values: Values::Check,
            workers: None,
            trace: self.trace.is_some(),
        }
    }

    fn world_options(&self) -> WorldOptions {
        WorldOptions { heap_bytes: (self.heap_mib as usize) << 20, timeout: Duration::from_secs(self.timeout) }
    }

    fn soak(&self) -> Soak {
        Soak { repeat: self.repeat as usize, jitter: Duration::from_micros(self.jitter), seed: self.seed }
    }

    /// Number of PEs where no launcher says it.
    fn pes(&self) -> usize {
        self.pes.or(self.cuts.as_ref().map(|cuts| cuts.len() + 1)).unwrap_or(4)
    }
}

/// Computes and checks what `args` say and writes the report to `out`; as one PE of many if a launcher started this
/// process, otherwise with PEs of its own. Of several processes only PE 0 writes.
///
/// # Errors
/// [`RunCommandError`] if the results could not be computed or written. Wrong results are [`Exit::Wrong`].
pub fn run(args: &Args, invocation: &Invocation, out: &mut impl Write) -> Result<Exit, RunCommandError> {
    let options = args.world_options();
    if let Some(outcome) = pes::if_launched(&options, |pe| run_as(args, pe, out)) {
        return outcome;
    }
    let jobs = load(args, args.pes())?;
    match args.world {
        Some(World::Processes) => Ok(pes::launch(args.pes(), &options, invocation)?),
        Some(World::Threads) | None => {
            args.choice.apply(args.device == Some(Device::Cpu))?;
            compute(args, &jobs, Stage::Threads(options), out)
        }
    }
}

/// This process is `pe`. What can be refused is found out together and is the inner error: all PEs then end in good order,
/// where the outer one makes the world fail.
fn run_as(args: &Args, pe: &Pe, out: &mut impl Write) -> Result<Result<Exit, RunCommandError>, RunCommandError> {
    let jobs = match pes::agree(pe, "loading of the inputs", load_as(args, pe))? {
        Ok(jobs) => jobs,
        Err(error) => return Ok(Err(error)),
    };
    compute(args, &jobs, Stage::joined(pe, args.config(), args.world_options().heap_bytes)?, out).map(Ok)
}

fn load_as(args: &Args, pe: &Pe) -> Result<Vec<Job>, RunCommandError> {
    pes::fits_launcher(pe, args.world, args.pes)?;
    args.choice.apply(args.device == Some(Device::Cpu))?;
    load(args, pe.size())
}

/// Everything that can be refused before anything is computed.
fn load(args: &Args, pes: usize) -> Result<Vec<Job>, RunCommandError> {
    let jobs = input::load(args, pes)?;
    if let Some(path) = &args.output {
        check_writable(path)?;
    }
    for path in [args.trace.as_deref(), args.json.as_ref().and_then(JsonTarget::file)].into_iter().flatten() {
        check_writable(path)?;
    }
    Ok(jobs)
}

/// What was computed of one input, where it arrives.
struct Computed {
    whole: Whole,
    /// If they were asked for.
    gradients: Option<WholeBackward>,
    /// What came of the repetitions, by PE.
    outcomes: Vec<soak::Outcome>,
}

/// Computes all inputs. With gradients it is the step of both calls that is repeated.
fn compute_all(
    args: &Args,
    jobs: &[Job],
    stage: &mut Stage<'_>,
    soak: &Soak,
    progress: &Progress,
) -> Result<Vec<Option<Computed>>, RunCommandError> {
    let config = args.config();
    let mut all = Vec::new();
    for job in jobs {
        progress.start(format!("{}: computing on {} PEs", job.name, job.plan.pes()));
        let forward = stage.forward(job, &config, if args.backward { &Soak::ONCE } else { soak })?;
        let mut computed = forward.map(|(whole, outcomes)| Computed { whole, gradients: None, outcomes });
        progress.done();
        if args.backward {
            progress.start(format!("{}: gradients on {} PEs", job.name, job.plan.pes()));
            let backward = stage.backward(job, &config, soak)?;
            if let (Some(computed), Some((gradients, outcomes))) = (&mut computed, backward) {
                (computed.gradients, computed.outcomes) = (Some(gradients), outcomes);
            }
            progress.done();
        }
        all.push(computed);
    }
    Ok(all)
}

/// Computes all inputs; then the PE that has the results checks and reports them.
fn compute(args: &Args, jobs: &[Job], mut stage: Stage<'_>, out: &mut impl Write) -> Result<Exit, RunCommandError> {
    let (config, soak) = (args.config(), args.soak());
    let (world, visible) = (stage.world(), stage.reports() && args.json != Some(JsonTarget::Stdout));
    // One step to compute an input and three to check it; as many for gradients.
    let progress = Progress::new(jobs.len() * if args.backward { 8 } else { 4 }, visible);
    let computed = compute_all(args, jobs, &mut stage, &soak, &progress);
    let computed = match computed {
        Ok(computed) => computed,
        Err(error) => {
            stage.abandon();
            return Err(error);
        }
    };
    // Now, since checking takes long and other PEs do not wait for it.
    stage.close()?;
    let Some(all) = computed.into_iter().collect::<Option<Vec<_>>>() else {
        return Ok(Exit::Success); // PE 0 has them
    };

    let mut reports = Vec::new();
    for (job, Computed { whole, gradients, outcomes }) in jobs.iter().zip(&all) {
        let mut verdict = check::check(job, whole, &config, &progress)?;
        let (soaked, differences) = soak.report(outcomes, args.backward);
        if !differences.is_empty() {
            // Equal inputs give equal results also where values are not finite.
            verdict.mismatches.get_or_insert_default().extend(differences);
        }
        let soaked = (soak.repeat > 1).then_some(soaked);
        let of_gradients =
            gradients.as_ref().map(|found| backward::check(job, found, &config, &progress)).transpose()?;
        reports.push(Report::new(job, whole, &config, world, verdict, soaked, of_gradients));
    }
    drop(progress);
    if let Some(path) = &args.output {
        write_results(path, jobs, &all)?;
    }
    if let Some(path) = &args.trace {
        in_turn(jobs, &all).save(path)?;
    }
    emit(out, args.json.as_ref(), &reports, || report::text(&reports))?;
    let wrong = reports.iter().any(|report| report.passed == Some(false));
    Ok(if wrong { Exit::Wrong } else { Exit::Success })
}

fn write_results(path: &Path, jobs: &[Job], all: &[Computed]) -> Result<(), FileError> {
    let name = |job: &Job, tensor: &str| match jobs {
        [_] => tensor.to_owned(),
        _ => format!("{}.{tensor}", job.name),
    };
    let mut tensors = Vec::new();
    for (job, Computed { whole, gradients, .. }) in jobs.iter().zip(all) {
        tensors.push((name(job, "o"), &whole.o));
        tensors.extend(whole.final_state.as_ref().map(|state| (name(job, "ht"), state)));
        let named = gradients.as_ref().map_or_else(Vec::new, |found| found.gradients.named(&job.file.inputs()));
        tensors.extend(named.into_iter().map(|(tensor, x)| (name(job, tensor), x)));
    }
    let entries: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), Entry::Tensor(tensor))).collect();
    let mut metadata = vec![("deltalink", env!("CARGO_PKG_VERSION").to_owned())];
    if let [job] = jobs {
        let settings = job.file.settings();
        let layout = match settings.layout {
            StateLayout::KFirst => "K-first",
            StateLayout::VFirst => "V-first",
        };
        metadata.push(("op", settings.op.to_string()));
        metadata.push(("layout", layout.to_owned()));
    }
    save(path, &entries, &metadata)
}

/// The timelines of all inputs on one axis, one after the other; those of backward calls after their forward calls.
fn in_turn(jobs: &[Job], computed: &[Computed]) -> Trace {
    let names: Vec<&str> = jobs.iter().map(|job| job.name.as_str()).collect();
    let trains = computed.iter().any(|computed| computed.gradients.is_some());
    let what = if trains { "forward and backward" } else { "forward" };
    let of_input = |computed: &'_ Computed| {
        let backward = computed.gradients.as_ref().and_then(|found| found.trace.as_ref());
        computed.whole.trace.iter().chain(backward).cloned().collect::<Vec<_>>()
    };
    let traces: Vec<Trace> = computed.iter().flat_map(of_input).collect();
    Trace::in_turn(format!("{what} of {}", names.join(", ")), &traces)
}
