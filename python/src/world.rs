//! Worlds, as Python sees them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use deltalink::tensor::Dtype;
use deltalink::world::{self, Pe, WorldOptions};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffer::Buffer;
use crate::device::Wanted;
use crate::errors::Failure;
use crate::worker::Worker;

/// This process's PE of a world.
#[pyclass(frozen)]
pub struct World {
    pub worker: Arc<Worker>,
}

/// The memory of a world that nobody has joined yet.
#[pyclass(frozen)]
pub struct Invitation {
    inner: Mutex<Option<world::Invitation>>,
    #[pyo3(get)]
    words: String,
}

fn options(heap_bytes: usize, timeout: f64) -> Result<WorldOptions, Failure> {
    let timeout = Duration::try_from_secs_f64(timeout).map_err(|_| Failure::Option {
        option: "timeout",
        found: timeout.to_string(),
        choices: "a number of seconds",
    })?;
    Ok(WorldOptions { heap_bytes, timeout })
}

/// What every world is made with, by name.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Settings {
    heap_bytes: usize,
    timeout: f64,
    workers: Option<usize>,
    /// The GPU to compute on, with the heap there.
    gpu: Option<usize>,
}

impl Settings {
    /// The heap on the CPU has what the heap of a world on GPUs does not need.
    fn options(&self) -> Result<WorldOptions, Failure> {
        options(self.heap_bytes, self.timeout)
    }

    fn wanted(&self) -> Result<Wanted, Failure> {
        match self.gpu {
            None => Ok(Wanted::Cpu { workers: self.workers }),
            #[cfg(feature = "cuda")]
            Some(ordinal) => Ok(Wanted::Gpu { ordinal, heap_bytes: self.heap_bytes }),
            #[cfg(not(feature = "cuda"))]
            Some(_) => Err(deltalink::op::OpError::NoCuda.into()),
        }
    }
}

impl World {
    fn start(
        py: Python<'_>,
        settings: &Settings,
        join: impl FnOnce() -> Result<Pe, deltalink::world::WorldError> + Send + 'static,
    ) -> PyResult<Self> {
        let wanted = settings.wanted()?;
        Ok(Self { worker: py.detach(|| Worker::start(wanted, join))? })
    }
}

#[pymethods]
impl World {
    /// A world of one PE.
    #[staticmethod]
    fn alone(py: Python<'_>, settings: Settings) -> PyResult<Self> {
        let options = settings.options()?;
        Self::start(py, &settings, move || Pe::alone(&options))
    }

    /// The world that this process was started for by its launcher; one of its own if it was by none.
    #[staticmethod]
    fn from_environment(py: Python<'_>, settings: Settings) -> PyResult<Self> {
        let options = settings.options()?;
        Self::start(py, &settings, move || Pe::from_environment(&options)?.map_or_else(|| Pe::alone(&options), Ok))
    }

    /// Comes into a world as PE `rank`.
    #[staticmethod]
    fn accept(py: Python<'_>, words: String, rank: usize, size: usize, settings: Settings) -> PyResult<Self> {
        let options = settings.options()?;
        Self::start(py, &settings, move || world::Invitation::accept(&words, rank, size, &options))
    }

    /// Unique in this process.
    #[getter]
    fn number(&self) -> u64 {
        self.worker.number
    }

    #[getter]
    fn rank(&self) -> usize {
        self.worker.rank
    }

    #[getter]
    fn size(&self) -> usize {
        self.worker.size
    }

    /// Waits until every PE is here.
    fn barrier(&self, py: Python<'_>, what: String) -> PyResult<()> {
        let worker = &self.worker;
        Ok(py.detach(|| worker.call(move |desk| Ok(desk.pe.barrier(&what)?)))?)
    }

    /// The bytes of every PE, by rank.
    fn all_gather<'py>(&self, py: Python<'py>, what: String, bytes: Vec<u8>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let worker = &self.worker;
        let all = py.detach(|| worker.call(move |desk| Ok(desk.pe.all_gather(&what, &bytes)?)))?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// A buffer of zeros at the same place of every PE's heap. Collective.
    fn empty(&self, py: Python<'_>, name: String, shape: Vec<usize>, dtype: &str) -> PyResult<Buffer> {
        let element = match dtype {
            "float32" => Dtype::F32,
            "bfloat16" => Dtype::Bf16,
            "float16" => Dtype::F16,
            other => {
                return Err(Failure::Element { name, found: other.to_owned() }.into());
            }
        };
        let elements = shape.iter().try_fold(element.size(), |bytes, &n| bytes.checked_mul(n)).unwrap_or(usize::MAX);
        let (worker, asked) = (&self.worker, name);
        let lent = py.detach(|| worker.call(move |desk| desk.device.symmetric(&asked, elements)))?;
        Ok(Buffer::symmetric(self.worker.number, lent, &shape, element))
    }

    /// Use of this PE's heap: (capacity, bytes in use, peak, live objects).
    fn heap_stats(&self, py: Python<'_>) -> PyResult<(usize, usize, usize, usize)> {
        let worker = &self.worker;
        let stats = py.detach(|| worker.call(|desk| Ok(desk.device.heap_stats())))?;
        Ok((stats.capacity, stats.in_use, stats.peak, stats.live))
    }

    /// Whether it was not closed.
    #[getter]
    fn open(&self) -> bool {
        self.worker.is_open()
    }

    /// Leaves the world, together with the other PEs where it can. Memory that others still hold stays until they drop it.
    fn close(&self, py: Python<'_>, together: bool) {
        let worker = &self.worker;
        py.detach(|| worker.close(together));
    }
}

#[pymethods]
impl Invitation {
    /// Makes the memory of a world of `size` PEs.
    #[new]
    fn new(size: usize, settings: Settings) -> PyResult<Self> {
        let inner = world::Invitation::new(size, &settings.options()?).map_err(Failure::from)?;
        let words = inner.words().map_err(Failure::from)?;
        Ok(Self { inner: Mutex::new(Some(inner)), words })
    }

    /// Comes in as PE 0; once.
    fn join(&self, py: Python<'_>, settings: Settings) -> PyResult<World> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or(Failure::Closed)?;
        World::start(py, &settings, move || inner.join())
    }
}
