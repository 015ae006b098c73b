//! The GPUs of a command's PEs: which ones it may use, and the one of a PE that is a process.

#[cfg(feature = "cuda")]
use crate::{
    exec::{
        ExecError,
        cuda::{CudaExecutor, Gpu, Kernels, choose_device},
    },
    heap::{DevicePool, Heap},
    op::Transport,
    world::{Pe, nvshmem::Nvshmem},
};

/// What names the GPUs that the driver shows to a process.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Which GPUs the PEs of this machine use.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct GpuChoice {
    /// GPUs to use, as numbers from 0; PEs of this machine are dealt out to them in turn. [default: all that are visible]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub gpus: Vec<usize>,
}

/// The GPUs that were asked for cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum GpusError {
    #[error("--gpus {asked:?} was asked for with --device cpu; leave one of them out")]
    OnCpu { asked: Vec<usize> },
    #[error(
        "--gpus {asked:?} names GPU {twice} twice; PEs share a GPU by themselves where there are more PEs than GPUs"
    )]
    Twice { asked: Vec<usize>, twice: usize },
    #[error(
        "--gpus asks for GPU {asked}; {VISIBLE}={visible} shows {found}, numbered from 0: ask for fewer or change it"
    )]
    Hidden { asked: usize, visible: String, found: usize },
    #[error("--gpus {asked:?} was asked for, and the driver shows {found} of these GPUs; `deltalink doctor` lists all")]
    Absent { asked: Vec<usize>, found: usize },
    #[error(
        "--gpus {asked:?} was asked for, and this build has no GPU support; build it with \
         `cargo build --release --features cuda` (after `cargo xtask setup`), or leave --gpus out"
    )]
    NoCuda { asked: Vec<usize> },
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::exec::cuda::CudaError),
}

impl GpuChoice {
    /// Hides the other GPUs from this process. Call it before anything asks the driver, in the process that computes (one
    /// that starts others must leave it to them), before the program has threads that read the environment other than through
    /// `std::env`.
    ///
    /// # Errors
    /// [`GpusError`].
    pub(super) fn apply(&self, on_cpu: bool) -> Result<(), GpusError> {
        let asked = &self.gpus;
        if asked.is_empty() {
            return Ok(());
        }
        if on_cpu {
            return Err(GpusError::OnCpu { asked: asked.clone() });
        }
        let visible = chosen(std::env::var(VISIBLE).ok().as_deref(), asked)?;
        if cfg!(not(feature = "cuda")) {
            return Err(GpusError::NoCuda { asked: asked.clone() });
        }
        // SAFETY: the driver has not started, so it reads nothing now; other readers are excluded as documented.
        unsafe { std::env::set_var(VISIBLE, visible) };
        #[cfg(feature = "cuda")]
        match Gpu::count()? {
            // The driver shows those before the first that does not exist.
            found if found != asked.len() => return Err(GpusError::Absent { asked: asked.clone(), found }),
            _ => {}
        }
        Ok(())
    }
}

/// The value that shows only `asked` of what `visible` shows.
fn chosen(visible: Option<&str>, asked: &[usize]) -> Result<String, GpusError> {
    if let Some(twice) = asked.iter().enumerate().find(|(i, gpu)| asked[..*i].contains(gpu)).map(|(_, &gpu)| gpu) {
        return Err(GpusError::Twice { asked: asked.to_vec(), twice });
    }
    let shown: Option<Vec<&str>> = visible.filter(|text| !text.is_empty()).map(|text| text.split(',').collect());
    let names = asked.iter().map(|&gpu| match &shown {
        None => Ok(gpu.to_string()),
        Some(shown) => shown.get(gpu).map(|&name| name.to_owned()).ok_or_else(|| {
            let visible = visible.unwrap_or_default().to_owned();
            GpusError::Hidden { asked: gpu, visible, found: shown.len() }
        }),
    });
    Ok(names.collect::<Result<Vec<_>, _>>()?.join(","))
}

/// The GPU of a PE that is a process, the symmetric heap there, and the kernels that reach all PEs.
#[cfg(feature = "cuda")]
pub(super) struct GpuOfPe<'pe> {
    /// Its GPU.
    pub gpu: Gpu,
    /// The heap.
    pub nvshmem: Nvshmem<'pe>,
    /// The kernels.
    pub kernels: Kernels,
}

#[cfg(feature = "cuda")]
impl<'pe> GpuOfPe<'pe> {
    /// Opens the GPU that falls to `pe` by its rank on this machine, with `pool_bytes` of symmetric heap. Collective.
    pub fn start(pe: &'pe Pe, transport: Transport, pool_bytes: usize) -> Result<Self, ExecError> {
        let gpu = Gpu::open(choose_device(pe.local_rank(), Gpu::count()?))?;
        let mut nvshmem = Nvshmem::start(pe, &gpu, pool_bytes)?;
        for warning in nvshmem.warnings().iter().filter(|_| pe.rank() == 0) {
            tracing::warn!("{warning}");
        }
        match kernels(&gpu, transport, &mut nvshmem) {
            Ok(kernels) => Ok(Self { gpu, nvshmem, kernels }),
            Err(error) => {
                nvshmem.abandon();
                Err(error)
            }
        }
    }

    /// An executor in the heap of all PEs.
    pub fn executor(&self) -> Result<CudaExecutor, ExecError> {
        self.executor_in(self.nvshmem.heap().clone())
    }

    /// An executor in another heap in the same memory.
    pub fn executor_in(&self, heap: Heap<DevicePool>) -> Result<CudaExecutor, ExecError> {
        Ok(CudaExecutor::new(&self.gpu, self.kernels.clone(), heap, self.nvshmem.sharing())?)
    }

    /// Ends NVSHMEM on all PEs. Collective; executors must be gone.
    pub fn close(self) -> Result<(), ExecError> {
        // A module goes once NVSHMEM has been told of its end.
        drop(self.kernels);
        Ok(self.nvshmem.close()?)
    }

    /// After a failure: waits for nobody.
    pub fn abandon(self) {
        self.nvshmem.abandon();
    }
}

#[cfg(feature = "cuda")]
fn kernels(gpu: &Gpu, transport: Transport, nvshmem: &mut Nvshmem<'_>) -> Result<Kernels, ExecError> {
    if transport != Transport::Put && !nvshmem.needs_puts() {
        return Ok(Kernels::direct(gpu)?);
    }
    Ok(nvshmem.kernels()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_one_of_what_is_visible() {
        assert_eq!(chosen(None, &[0, 2]).as_deref(), Ok("0,2"));
        assert_eq!(chosen(Some("3,GPU-77,5"), &[1, 0]).as_deref(), Ok("GPU-77,3"));
        assert_eq!(chosen(Some(""), &[4]).as_deref(), Ok("4"));
        let text = |visible, asked: &[usize]| chosen(visible, asked).expect_err("refused").to_string();
        assert_eq!(
            text(Some("3,5"), &[2]),
            "--gpus asks for GPU 2; CUDA_VISIBLE_DEVICES=3,5 shows 2, numbered from 0: ask for fewer or change it"
        );
        assert!(text(None, &[1, 0, 1]).contains("names GPU 1 twice"));
    }

    #[test]
    fn gpus_and_the_cpu_contradict_each_other() {
        let choice = GpuChoice { gpus: vec![0, 1] };
        assert_eq!(choice.apply(true), Err(GpusError::OnCpu { asked: vec![0, 1] }));
        assert_eq!(GpuChoice::default().apply(true), Ok(()));
    }
}
