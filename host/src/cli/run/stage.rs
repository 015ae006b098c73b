//! Where the PEs are: threads, or processes that started themselves or were started by a launcher.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

#[cfg(feature = "cuda")]
use super::super::gpus::GpuOfPe;
use super::input::Job;
use super::soak::{Outcome, Soak};
use super::{RunCommandError, World, backward, parts};
#[cfg(feature = "cuda")]
use crate::exec::{ExecError, cuda::CudaExecutor};
use crate::gradients::Upstream;
use crate::inputs::Inputs;
use crate::op::whole::{
    self, BackwardStep, PartBackward, Share, UpstreamShare, Whole, WholeBackward, join, join_backward, one_backward_by,
};
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

    /// A forward and a backward call, with `between` called between them.
    fn backward(
        &mut self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        upstream: &Upstream<'_>,
        between: &mut dyn FnMut(),
    ) -> Result<PartBackward, OpError> {
        match self {
            Operation::Cpu(op) => one_backward_by(op, plan, inputs, upstream, between),
            #[cfg(feature = "cuda")]
            Operation::Cuda { op, .. } => one_backward_by(op, plan, inputs, upstream, between),
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
        let all = match self {
            Stage::Threads(options) => {
                let body = |pe: &Pe, step: &mut dyn FnMut() -> _| soak.run(pe.rank(), &mut |_| step());
                Some(whole::forward_by(&job.plan, &inputs, config, options, body).map_err(failed)?)
            }
            Stage::Joined { pe, op } => {
                let share = Share::new(&job.plan, pe.rank(), &inputs);
                let share = share.inputs(&inputs);
                let mine = soak.run(pe.rank(), &mut |_| op.forward(&job.plan, &share)).map_err(failed)?;
                gather(pe, &mine, parts::encode, parts::decode)?
            }
        };
        let Some(all) = all else { return Ok(None) };
        let (all, outcomes) = all.into_iter().unzip();
        Ok(Some((join(&job.plan, &inputs, all), outcomes)))
    }

    /// As [`forward`](Self::forward), a forward and a backward call each time.
    pub fn backward(
        &mut self,
        job: &Job,
        config: &Config,
        soak: &Soak,
    ) -> Result<Option<(WholeBackward, Vec<Outcome>)>, RunCommandError> {
        let (inputs, upstream) = (job.file.inputs(), backward::upstream(job)?);
        let failed = |source| RunCommandError::compute(&job.name, source);
        let all = match self {
            Stage::Threads(options) => {
                let body = |pe: &Pe, step: &mut BackwardStep<'_>| soak.run(pe.rank(), step);
                Some(whole::backward_by(&job.plan, &inputs, &upstream, config, options, body).map_err(failed)?)
            }
            Stage::Joined { pe, op } => {
                let share = Share::new(&job.plan, pe.rank(), &inputs);
                let upstream = UpstreamShare::new(&job.plan, pe.rank(), &upstream);
                let (share, upstream) = (share.inputs(&inputs), upstream.view());
                let step = &mut |between: &mut dyn FnMut()| op.backward(&job.plan, &share, &upstream, between);
                let mine = soak.run(pe.rank(), step).map_err(failed)?;
                gather(pe, &mine, backward::parts::encode, backward::parts::decode)?
            }
        };
        let Some(all) = all else { return Ok(None) };
        let (all, outcomes) = all.into_iter().unzip();
        Ok(Some((join_backward(&job.plan, &inputs, all), outcomes)))
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

/// Brings what each PE has to PE 0, which gets it by rank; the others get nothing.
fn gather<T>(
    pe: &Pe,
    (part, outcome): &(T, Outcome),
    encode: impl Fn(&T) -> Vec<u8>,
    decode: impl Fn(&[u8]) -> Result<T, String>,
) -> Result<Option<Vec<(T, Outcome)>>, RunCommandError> {
    let outcomes = pe.gather("repetitions", 0, &outcome.encode())?;
    let (Some(all), Some(outcomes)) = (pe.gather("results", 0, &encode(part))?, outcomes) else {
        return Ok(None);
    };
    let decode = |(rank, (bytes, outcome)): (usize, (&Vec<u8>, &Vec<u8>))| {
        let unreadable = |reason| RunCommandError::Part { rank, reason };
        Ok((decode(bytes).map_err(unreadable)?, Outcome::decode(outcome).map_err(unreadable)?))
    };
    all.iter().zip(&outcomes).enumerate().map(decode).collect::<Result<_, _>>().map(Some)
}

/// The zero of the machine's monotonic clock: the same instant for all threads of a process, and for its processes as nearly as
/// it can be read.
pub(in crate::cli) fn machine_epoch() -> Instant {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    *EPOCH.get_or_init(|| {
        let reading = || {
            let before = Instant::now();
            let clock = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            let since = Duration::new(clock.tv_sec.unsigned_abs(), clock.tv_nsec.unsigned_abs() as u32);
            (before.elapsed(), before, since)
        };
        // An interruption between two calls would shift the epoch by as long as it lasts: the shortest of many readings has none.
        let (_, before, since) = (0..32).map(|_| reading()).min_by_key(|&(took, ..)| took).expect("32 readings");
        // Where this cannot be represented each process keeps an axis of its own.
        before.checked_sub(since).unwrap_or(before)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two PEs that are threads compare their stamps: an epoch for each would be off by what interrupts the reading of it.
    #[test]
    fn threads_share_the_zero_of_their_clock() {
        let readings: Vec<_> = (0..8).map(|_| std::thread::spawn(machine_epoch)).collect();
        let mut epochs = readings.into_iter().map(|reading| reading.join().expect("a reading"));
        let first = epochs.next().expect("eight");
        assert!(epochs.all(|epoch| epoch == first));
        let clock = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let since = first.elapsed();
        // Read later, so longer; by less than the machine can have stood still meanwhile.
        assert!(since.as_secs().abs_diff(clock.tv_sec.unsigned_abs()) < 60, "{since:?}, {clock:?}");
    }
}
