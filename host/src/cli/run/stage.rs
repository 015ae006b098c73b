//! Where the PEs are: threads, or processes that started themselves or were started by a launcher.

use std::time::{Duration, Instant};

#[cfg(feature = "cuda")]
use super::super::gpus::GpuOfPe;
use super::input::Job;
use super::soak::{Outcome, Soak};
use super::{RunCommandError, World, parts};
#[cfg(feature = "cuda")]
use crate::exec::{ExecError, cuda::CudaExecutor};
use crate::gradients::Upstream;
use crate::inputs::Inputs;
use crate::op::whole::{self, PartBackward, Share, Whole, join, one_backward};
use crate::op::{Config, ContextParallel, Device, Forward, OpError};
use crate::plan::Plan;
#[cfg(feature = "cuda")]
use crate::world::nvshmem::Nvshmem;
use crate::world::{Pe, WorldOptions};

/// The PEs that compute, as this process sees them.
pub(super) enum Stage<'pe> {
    /// All are threads of this process.
    Threads(WorldOptions),
    /// This process is one of them.
    Joined { pe: &'pe Pe, op: Box<Operation<'pe>> },
}

/// The operation of one PE, on its device.
#[allow(clippy::large_enum_variant)] // one in a run
pub(super) enum Operation<'pe> {
    /// On the CPU.
    Cpu(ContextParallel<'pe>),
    /// On a GPU, with slots in NVSHMEM's heap.
    #[cfg(feature = "cuda")]
    Cuda { op: Box<ContextParallel<'pe, CudaExecutor>>, nvshmem: Nvshmem<'pe> },
}

impl<'pe> Operation<'pe> {
    fn new(pe: &'pe Pe, config: Config, pool_bytes: usize) -> Result<Self, OpError> {
        match config.device {
            Device::Cpu => {
                let _ = pool_bytes;
                let mut op = ContextParallel::new(pe, config)?;
                op.set_clock_origin(machine_epoch());
                Ok(Operation::Cpu(op))
            }
            #[cfg(feature = "cuda")]
            Device::Cuda => {
                let on_gpu = GpuOfPe::start(pe, config.transport, pool_bytes)?;
                let exec = on_gpu.executor().map_err(OpError::from);
                match exec.and_then(|exec| ContextParallel::on(pe, config, exec)) {
                    Ok(op) => Ok(Operation::Cuda { op: Box::new(op), nvshmem: on_gpu.nvshmem }),
                    Err(error) => {
                        on_gpu.abandon();
                        Err(error)
                    }
                }
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda => Err(OpError::NoCuda),
        }
    }

    fn forward(&mut self, plan: &Plan, inputs: &Inputs<'_>) -> Result<Forward, OpError> {
        match self {
            Operation::Cpu(op) => op.forward(plan, inputs),
            #[cfg(feature = "cuda")]
            Operation::Cuda { op, .. } => op.forward(plan, inputs),
        }
    }

    /// A forward and a backward call.
    pub fn backward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        upstream: &Upstream<'_>,
    ) -> Result<PartBackward, OpError> {
        match self {
            Operation::Cpu(op) => one_backward(op, plan, inputs, upstream),
            #[cfg(feature = "cuda")]
            Operation::Cuda { op, .. } => one_backward(op, plan, inputs, upstream),
        }
    }
}

impl<'pe> Stage<'pe> {
    /// This process as `pe` of its world; on a GPU with `pool_bytes` of symmetric heap there.
    pub fn joined(pe: &'pe Pe, config: Config, pool_bytes: usize) -> Result<Self, OpError> {
        Ok(Stage::Joined { pe, op: Box::new(Operation::new(pe, config, pool_bytes)?) })
    }

    /// Whether the results arrive here.
    pub fn reports(&self) -> bool {
        match self {
            Stage::Threads(_) => true,
            Stage::Joined { pe, .. } => pe.rank() == 0,
        }
    }

    /// What a PE is.
    pub fn world(&self) -> World {
        match self {
            Stage::Threads(_) => World::Threads,
            Stage::Joined { .. } => World::Processes,
        }
    }

    /// Computes `job` on all PEs, as often as `soak` says. The result of all of them arrives where
    /// [`reports`](Self::reports) says; `None` elsewhere.
    pub fn forward(
        &mut self,
        job: &Job,
        config: &Config,
        soak: &Soak,
    ) -> Result<Option<(Whole, Vec<Outcome>)>, RunCommandError> {
        let inputs = job.file.inputs();
        let failed = |source| RunCommandError::compute(&job.name, source);
        let all: Vec<(Forward, Outcome)> = match self {
            Stage::Threads(options) => {
                whole::forward_by(&job.plan, &inputs, config, options, |pe, step| soak.run(pe.rank(), step))
                    .map_err(failed)?
            }
            Stage::Joined { pe, op } => {
                let share = Share::new(&job.plan, pe.rank(), &inputs);
                let share = share.inputs(&inputs);
                let (part, outcome) = soak.run(pe.rank(), &mut || op.forward(&job.plan, &share)).map_err(failed)?;
                let outcomes = pe.gather("repetitions", 0, &outcome.encode())?;
                let (Some(all), Some(outcomes)) = (pe.gather("results", 0, &parts::encode(&part))?, outcomes) else {
                    return Ok(None);
                };
                let decode = |(rank, (bytes, outcome)): (usize, (&Vec<u8>, &Vec<u8>))| {
                    let unreadable = |reason| RunCommandError::Part { rank, reason };
                    let outcome = Outcome::decode(outcome).map_err(unreadable)?;
                    Ok::<_, RunCommandError>((parts::decode(bytes).map_err(unreadable)?, outcome))
                };
                all.iter().zip(&outcomes).enumerate().map(decode).collect::<Result<_, _>>()?
            }
        };
        let (all, outcomes) = all.into_iter().unzip();
        Ok(Some((join(&job.plan, &inputs, all), outcomes)))
    }

    /// After the last computation, on all PEs: ends what is collective.
    pub fn close(self) -> Result<(), RunCommandError> {
        match self {
            Stage::Threads(_) => Ok(()),
            Stage::Joined { op, .. } => match *op {
                Operation::Cpu(_) => Ok(()),
                #[cfg(feature = "cuda")]
                Operation::Cuda { op, nvshmem } => {
                    // It holds parts of the heap, which must be free.
                    drop(op);
                    Ok(nvshmem.close().map_err(|error| OpError::from(ExecError::from(error)))?)
                }
            },
        }
    }

    /// After a failure: waits for nobody.
    pub fn abandon(self) {
        #[cfg(feature = "cuda")]
        if let Stage::Joined { op, .. } = self
            && let Operation::Cuda { op, nvshmem } = *op
        {
            drop(op);
            nvshmem.abandon();
        }
    }
}

/// The zero of the machine's monotonic clock, the same for all its processes.
fn machine_epoch() -> Instant {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let since = Duration::new(clock.tv_sec.unsigned_abs(), clock.tv_nsec.unsigned_abs() as u32);
    let now = Instant::now();
    // Where this cannot be represented each process keeps an axis of its own.
    now.checked_sub(since).unwrap_or(now)
}
