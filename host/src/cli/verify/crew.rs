//! Cases on PEs that are processes. One world of all processes lasts; each case has a smaller one of its own, so that what
//! fails in one case does not reach the next.

use super::super::run::backward::parts as gradient_parts;
use super::super::run::parts;
use super::VerifyError;
use super::gradients::Computed;
use super::matrix::Case;
use super::measure::{Bench, How, config};
use crate::exec::Executor;
use crate::gradients::Upstream;
use crate::inputs::Inputs;
use crate::op::whole::{Share, UpstreamShare, join, join_backward, one_backward};
use crate::op::{Config, ContextParallel, Device, OpError};
use crate::plan::Plan;
use crate::world::{Pe, RunError, WorldOptions};
#[cfg(feature = "cuda")]
use crate::{
    cli::gpus::GpuOfPe,
    exec::{ExecError, cuda::CudaExecutor},
    heap::{DevicePool, Heap, PoolMemory},
    op::Transport,
};

/// Symmetric memory on a GPU, enough for the slots of every case.
#[cfg(feature = "cuda")]
const POOL_BYTES: usize = 256 << 20;

/// This process and the others.
pub(super) struct Crew<'pe> {
    pe: &'pe Pe,
    device: Device,
    #[cfg(feature = "cuda")]
    gpu: Option<GpuOfPe<'pe>>,
}

impl<'pe> Crew<'pe> {
    /// The processes of `pe`'s world, on their GPUs if `device` is. Collective.
    pub fn new(pe: &'pe Pe, device: Device) -> Result<Self, OpError> {
        match device {
            Device::Cpu => Ok(Self {
                pe,
                device,
                #[cfg(feature = "cuda")]
                gpu: None,
            }),
            #[cfg(feature = "cuda")]
            Device::Cuda => Ok(Self { pe, device, gpu: Some(GpuOfPe::start(pe, Transport::Auto, POOL_BYTES)?) }),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda => Err(OpError::NoCuda),
        }
    }

    /// Computes `case`, whose problem is on `bench`, on as many PEs as it wants. Collective; on PE 0 what came of it, which may
    /// be why it could not be computed.
    ///
    /// # Errors
    /// [`VerifyError`] if the processes cannot go on.
    pub fn compute(
        &self,
        case: &Case,
        how: How,
        bench: &Bench,
    ) -> Result<Option<Result<Computed, String>>, VerifyError> {
        let plan = match bench.plan(case) {
            Ok(plan) => plan,
            // The same on every PE.
            Err(error) => return Ok((self.pe.rank() == 0).then(|| Err(error.to_string()))),
        };
        let inputs = bench.inputs();
        let mut sent = Vec::new();
        if let Some(few) = self.pe.subset(plan.pes(), &WorldOptions::default())? {
            let outcome = few.run(|pe| {
                let share = Share::new(&plan, pe.rank(), &inputs);
                let upstream = how.backward.then(|| UpstreamShare::new(&plan, pe.rank(), &bench.upstream()));
                let config = config(case, How { device: self.device, ..how });
                self.part(pe, &plan, config, &share.inputs(&inputs), upstream.as_ref().map(UpstreamShare::view))
            });
            sent = match outcome {
                Ok(part) => [vec![COMPUTED], part].concat(),
                Err(RunError::Pe { error, .. }) => [&[FAILED], error.to_string().as_bytes()].concat(),
                Err(error) => [&[FAILED], error.to_string().as_bytes()].concat(),
            };
        }
        let Some(all) = self.pe.gather("results of a case", 0, &sent)? else { return Ok(None) };
        let (mut computed, mut failed) = (Vec::new(), Vec::new());
        for (rank, bytes) in all.iter().enumerate().take(plan.pes()) {
            match bytes.split_first() {
                Some((&COMPUTED, part)) => {
                    computed.push((rank, part));
                }
                Some((_, message)) => failed.push(format!("PE {rank}: {}", String::from_utf8_lossy(message))),
                None => return Err(VerifyError::Part { rank, reason: "it is empty".into() }),
            }
        }
        if !failed.is_empty() {
            return Ok(Some(Err(failed.join("; "))));
        }
        let unreadable = |rank| move |reason| VerifyError::Part { rank, reason };
        let joined: Computed = if how.backward {
            let parts = computed.into_iter().map(|(rank, part)| gradient_parts::decode(part).map_err(unreadable(rank)));
            join_backward(&plan, &inputs, parts.collect::<Result<_, _>>()?).into()
        } else {
            let parts = computed.into_iter().map(|(rank, part)| parts::decode(part).map_err(unreadable(rank)));
            join(&plan, &inputs, parts.collect::<Result<_, _>>()?).into()
        };
        Ok(Some(Ok(joined)))
    }

    /// After the last case, on all PEs: ends what is collective.
    ///
    /// # Errors
    /// [`OpError`] if another PE does not come.
    pub fn close(self) -> Result<(), OpError> {
        #[cfg(feature = "cuda")]
        if let Some(on_gpu) = self.gpu {
            on_gpu.close()?;
        }
        Ok(())
    }

    /// After a failure: waits for nobody.
    pub fn abandon(self) {
        #[cfg(feature = "cuda")]
        if let Some(on_gpu) = self.gpu {
            on_gpu.abandon();
        }
    }

    /// What one PE computes, as bytes.
    fn part(
        &self,
        pe: &Pe,
        plan: &Plan,
        config: Config,
        inputs: &Inputs<'_>,
        upstream: Option<Upstream<'_>>,
    ) -> Result<Vec<u8>, OpError> {
        #[cfg(feature = "cuda")]
        if let Some(on_gpu) = &self.gpu {
            let exec = executor(on_gpu, pe)?;
            return one_part(ContextParallel::on(pe, config, exec)?, plan, inputs, upstream);
        }
        one_part(ContextParallel::new(pe, config)?, plan, inputs, upstream)
    }
}

fn one_part<X: Executor>(
    mut op: ContextParallel<'_, X>,
    plan: &Plan,
    inputs: &Inputs<'_>,
    upstream: Option<Upstream<'_>>,
) -> Result<Vec<u8>, OpError> {
    Ok(match upstream {
        Some(upstream) => gradient_parts::encode(&one_backward(&mut op, plan, inputs, &upstream)?),
        None => parts::encode(&op.forward(plan, inputs)?),
    })
}

/// First byte of what a PE sends of a case.
const COMPUTED: u8 = 1;
const FAILED: u8 = 2;

/// An executor of `few`, a PE of a smaller world, in the symmetric memory of all.
#[cfg(feature = "cuda")]
fn executor(on_gpu: &GpuOfPe<'_>, few: &Pe) -> Result<CudaExecutor, ExecError> {
    let memory = on_gpu.nvshmem.heap().memory();
    let addresses = (0..few.size()).map(|rank| memory.address(rank)).collect();
    // SAFETY: addresses of the pool that NVSHMEM gave, which stays up until the process ends; nothing is ever allocated from
    // the heap of all, and the case before has ended on every PE.
    let pool =
        unsafe { DevicePool::new(few.rank(), &on_gpu.gpu, memory.capacity(), addresses, std::sync::Arc::new(())) }?;
    on_gpu.executor_in(Heap::over(few, pool))
}
