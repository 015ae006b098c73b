//! The CPU back end: blocks over a pool of threads.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use kernels_gpu::element::DtypeCode;
use kernels_gpu::params::{Sizes, Tensor as Param};
use kernels_gpu::protocol::{TrapRecord, Watch};
use kernels_gpu::tile::host::{BlockRunner, Fault, LaunchContext};

use super::{
    Body, ExecError, Executor, Grid, Image, KeptMemory, Kernel, Launch, Scratch, Slot, SymmetricBytes, Times, Waits,
};
use crate::tensor::{Data, Dtype, Tensor, TensorView};
use crate::world::Pe;

/// One PE's executor.
pub struct Cpu {
    pool: Option<rayon::ThreadPool>,
    runners: Vec<Mutex<BlockRunner>>,
    origin: Instant,
    scratch: HashMap<Scratch, Vec<u64>>,
    spare: Vec<CpuMemory>,
    image: Vec<u64>,
    watch: Box<Watch>,
    /// Begin and end of each launch since times were last taken.
    timed: Vec<(Instant, Instant)>,
}

/// Memory of the host that outlives a step.
#[derive(Debug)]
pub struct CpuMemory(Vec<u64>);

impl KeptMemory for CpuMemory {
    fn address(&mut self) -> u64 {
        if self.0.is_empty() { 0 } else { self.0.as_mut_ptr() as u64 }
    }

    fn bytes(&self) -> usize {
        8 * self.0.len()
    }
}

/// The threads of a PE's executor could not be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot start {workers} worker threads ({reason}); ask for fewer workers")]
pub struct PoolError {
    /// Threads asked for.
    pub workers: usize,
    /// What the system said.
    pub reason: String,
}

impl Cpu {
    /// An executor with `workers` threads. With one, blocks run on the calling thread.
    ///
    /// # Errors
    /// [`PoolError`] if the system refuses the threads.
    pub fn new(workers: usize) -> Result<Self, PoolError> {
        let workers = workers.max(1);
        let pool = match workers {
            1 => None,
            _ => Some(
                rayon::ThreadPoolBuilder::new()
                    .num_threads(workers)
                    .thread_name(|i| format!("deltalink-worker-{i}"))
                    .build()
                    .map_err(|e| PoolError { workers, reason: e.to_string() })?,
            ),
        };
        let runners = (0..workers).map(|_| Mutex::new(BlockRunner::new())).collect();
        let (scratch, spare, image, timed) = (HashMap::new(), Vec::new(), Vec::new(), Vec::new());
        let watch = Box::new(Watch::zeroed());
        Ok(Self { pool, runners, origin: Instant::now(), scratch, spare, image, watch, timed })
    }

    /// Blocks that run at the same time.
    pub fn workers(&self) -> usize {
        self.runners.len()
    }

    /// Runs a kernel to its end.
    fn run<K: Kernel>(&self, launch: &Launch<'_>, params: &K) -> Result<(), Fault> {
        let kernel = K::host_entry(launch.op, launch.dtype);
        let blocks = match launch.blocks.grid {
            Grid::Blocks(blocks) => blocks,
            Grid::Resident => self.workers(),
        };
        let context = LaunchContext {
            kernel: K::NAME,
            warpgroups: launch.blocks.warpgroups,
            grid: blocks,
            origin: self.origin,
            checker: launch.checker,
            peer_failed: launch.peer_failed,
        };
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let work = |worker: usize| -> Result<(), Fault> {
            // Each worker has a runner of its own: the lock is never contended.
            let mut runner = self.runners[worker].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            while !failed.load(Ordering::Relaxed) {
                let block = next.fetch_add(1, Ordering::Relaxed);
                if block >= blocks {
                    break;
                }
                if let Err(fault) = runner.run(&context, block, kernel, params) {
                    failed.store(true, Ordering::Relaxed);
                    return Err(fault);
                }
            }
            Ok(())
        };
        match &self.pool {
            None => work(0),
            Some(pool) => pool.broadcast(|context| work(context.index())).into_iter().collect(),
        }
    }
}

/// The kernels' number of an element type.
pub(crate) fn code(dtype: Dtype) -> DtypeCode {
    match dtype {
        Dtype::F32 => DtypeCode::F32,
        Dtype::Bf16 => DtypeCode::Bf16,
        Dtype::F16 => DtypeCode::F16,
    }
}

fn param(addr: u64, len: usize, dtype: Dtype) -> Param {
    if len == 0 { Param::absent() } else { Param::new(addr, len, code(dtype)) }
}

impl Executor for Cpu {
    type Memory = CpuMemory;

    fn keep(&mut self, bytes: usize) -> Result<CpuMemory, ExecError> {
        // Layers are alike, so what one gave back is just what another asks for.
        match self.spare.iter().position(|spare| spare.bytes() == bytes.next_multiple_of(8)) {
            Some(at) => Ok(self.spare.swap_remove(at)),
            None => {
                // One comes, one goes: sizes that are not asked for any more do not pile up.
                self.spare.drain(..self.spare.len().min(1));
                Ok(CpuMemory(vec![0; bytes.div_ceil(8)]))
            }
        }
    }

    fn reuse(&mut self, memory: CpuMemory) {
        self.spare.push(memory);
    }

    fn input(&mut self, _: Slot, tensor: &TensorView<'_>) -> Result<Param, ExecError> {
        let addr = match tensor.data() {
            Data::F32(x) => x.as_ptr() as u64,
            Data::Bf16(x) => x.as_ptr() as u64,
            Data::F16(x) => x.as_ptr() as u64,
        };
        Ok(param(addr, tensor.data().len(), tensor.dtype()))
    }

    fn output(&mut self, _: Slot, tensor: &mut Tensor) -> Result<Param, ExecError> {
        let (dtype, len) = (tensor.data.dtype(), tensor.data.data().len());
        Ok(param(tensor.data.bytes_mut().as_mut_ptr() as u64, len, dtype))
    }

    fn fetch(&mut self, _: Slot, _: &mut Tensor) -> Result<(), ExecError> {
        Ok(())
    }

    fn scratch(&mut self, which: Scratch, len: usize, dtype: Dtype) -> Result<Param, ExecError> {
        let words = (len * dtype.size()).div_ceil(8);
        let memory = self.scratch.entry(which).or_default();
        if memory.len() < words {
            *memory = vec![0; words];
        }
        Ok(param(memory.as_mut_ptr() as u64, len, dtype))
    }

    fn scratch_bytes(&self) -> usize {
        let spare: usize = self.spare.iter().map(CpuMemory::bytes).sum();
        spare + 8 * (self.image.len() + self.scratch.values().map(Vec::len).sum::<usize>())
    }

    fn put_image(&mut self, image: &Image) -> Result<u64, ExecError> {
        self.image = bytemuck::pod_collect_to_vec(image.bytes());
        Ok(self.image.as_mut_ptr() as u64)
    }

    fn get_image(&mut self, image: &mut Image, _: &dyn Fn() -> bool) -> Result<(), ExecError> {
        // SAFETY: the vector lives and no launch runs; kernels wrote through the address that `put_image` gave, so the
        // compiler must not assume that the vector still holds what it was made of.
        let words = unsafe { std::slice::from_raw_parts(std::hint::black_box(self.image.as_ptr()), self.image.len()) };
        image.bytes_mut().copy_from_slice(bytemuck::cast_slice(words));
        Ok(())
    }

    fn watch(&mut self) -> Result<u64, ExecError> {
        *self.watch = Watch::zeroed();
        Ok((&raw mut *self.watch) as u64)
    }

    fn trap(&self) -> TrapRecord {
        // SAFETY: as in `get_image`.
        unsafe { std::hint::black_box(&raw const self.watch.trap).read_volatile() }
    }

    fn launch<K: Kernel>(&mut self, launch: &Launch<'_>, params: &K) -> Result<(), ExecError> {
        let start = Instant::now();
        self.run(launch, params)?;
        self.timed.push((start, Instant::now()));
        Ok(())
    }

    fn take_times(&mut self) -> Result<Times, ExecError> {
        let timed = std::mem::take(&mut self.timed);
        let span = match (timed.first(), timed.last()) {
            (Some((begin, _)), Some((_, end))) => *end - *begin,
            _ => Duration::ZERO,
        };
        Ok(Times { launches: timed.into_iter().map(|(begin, end)| end - begin).collect(), span })
    }

    unsafe fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), ExecError> {
        // SAFETY: by contract.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    fn symmetric(&mut self, pe: &Pe, name: &str, bytes: usize) -> Result<SymmetricBytes, ExecError> {
        let object = pe.heap().alloc::<u64>(name, bytes.div_ceil(8))?;
        let addresses = (0..pe.size()).map(|rank| Some(object.peer_addr(rank) as u64)).collect();
        Ok(SymmetricBytes { addresses, owner: Box::new(object) })
    }

    fn body(&self, _: &Sizes, _: Dtype) -> Body {
        Body::Portable
    }

    fn heap_bytes(&self, pe: &Pe) -> usize {
        pe.heap().stats().in_use
    }

    fn concurrency(&self) -> usize {
        self.workers()
    }

    fn checks(&self) -> bool {
        true
    }

    fn waits(&self) -> Waits {
        Waits::Kernels
    }

    fn peak_device_bytes(&self, pe: &Pe) -> usize {
        // Scratch only grows.
        self.scratch_bytes() + pe.heap().stats().peak
    }

    fn set_clock_origin(&mut self, origin: Instant) {
        self.origin = origin;
    }
}
