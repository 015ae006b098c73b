//! The CPU back end: blocks over a pool of threads.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kernels_gpu::begin;
use kernels_gpu::element::DtypeCode;
use kernels_gpu::params::{Sizes, Tensor as Param};
use kernels_gpu::protocol::{TrapRecord, Watch};
use kernels_gpu::tile::host::{BlockRunner, Fault, LaunchContext};

use super::{Body, ExecError, Executor, Grid, KeptMemory, Kernel, Launch, Scratch, Slot, SymmetricBytes, Times, Waits};
use crate::inputs::Op;
use crate::tensor::{Dtype, Location, TensorView, TensorViewMut};
use crate::world::Pe;

/// One PE's executor.
pub struct Cpu {
    pool: Option<rayon::ThreadPool>,
    runners: Vec<Mutex<BlockRunner>>,
    origin: Instant,
    scratch: HashMap<Scratch, Vec<u64>>,
    spare: Vec<CpuMemory>,
    given: Arc<Given>,
    /// A [`Watch`], used by address only.
    _watch: CpuMemory,
    watch_at: u64,
    /// When the step since times were last taken began.
    begun: Option<Instant>,
    /// Begin and end of each launch since then.
    timed: Vec<(Instant, Instant)>,
    timing: bool,
}

/// Bytes of [`CpuMemory`] that an executor has given, and the most there were at once.
#[derive(Debug, Default)]
struct Given {
    now: AtomicUsize,
    peak: AtomicUsize,
}

/// Memory of the host that outlives a step, counted while it lives.
#[derive(Debug)]
pub struct CpuMemory {
    words: Vec<u64>,
    given: Arc<Given>,
}

impl CpuMemory {
    fn new(bytes: usize, given: &Arc<Given>) -> Self {
        let memory = Self { words: vec![0; bytes.div_ceil(8)], given: Arc::clone(given) };
        // Relaxed throughout: the numbers order nothing.
        let now = given.now.fetch_add(memory.bytes(), Ordering::Relaxed) + memory.bytes();
        given.peak.fetch_max(now, Ordering::Relaxed);
        memory
    }
}

impl Drop for CpuMemory {
    fn drop(&mut self) {
        self.given.now.fetch_sub(self.bytes(), Ordering::Relaxed);
    }
}

impl KeptMemory for CpuMemory {
    fn address(&mut self) -> u64 {
        if self.words.is_empty() { 0 } else { self.words.as_mut_ptr() as u64 }
    }

    fn bytes(&self) -> usize {
        8 * self.words.len()
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
        let (scratch, spare, timed) = (HashMap::new(), Vec::new(), Vec::new());
        let given = Arc::default();
        let mut watch = CpuMemory::new(size_of::<Watch>(), &given);
        let (watch_at, origin) = (watch.address(), Instant::now());
        Ok(Self {
            pool,
            runners,
            origin,
            scratch,
            spare,
            given,
            _watch: watch,
            watch_at,
            begun: None,
            timed,
            timing: true,
        })
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

/// Refuses tensors of GPUs.
fn here(found: Location) -> Result<(), ExecError> {
    let want = Location::Host;
    if found == want { Ok(()) } else { Err(ExecError::Elsewhere { found, want }) }
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
                Ok(CpuMemory::new(bytes, &self.given))
            }
        }
    }

    fn reuse(&mut self, memory: CpuMemory) {
        self.spare.push(memory);
    }

    fn write(&mut self, memory: &mut CpuMemory, at: usize, bytes: &[u8]) -> Result<(), ExecError> {
        assert!(at + bytes.len() <= memory.bytes(), "bytes {at} and {} more of {}", bytes.len(), memory.bytes());
        // SAFETY: inside the memory, and no launch runs. By address, as kernels write it: see `read`.
        unsafe { (memory.address() as *mut u8).add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn read(&mut self, memory: &mut CpuMemory, at: usize, bytes: &mut [u8]) -> Result<(), ExecError> {
        assert!(at + bytes.len() <= memory.bytes(), "bytes {at} and {} more of {}", bytes.len(), memory.bytes());
        let from = std::hint::black_box(memory.address()) as *const u8;
        // SAFETY: inside the memory, and no launch runs. Kernels wrote through the address, so the compiler must not assume
        // that the vector still holds what it was made of.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from.add(at), bytes.len()) };
        Ok(())
    }

    fn location(&self) -> Location {
        Location::Host
    }

    fn input(&mut self, _: Slot, tensor: &TensorView<'_>) -> Result<Param, ExecError> {
        here(tensor.location())?;
        Ok(param(tensor.address(), tensor.len(), tensor.dtype()))
    }

    fn output(&mut self, _: Slot, tensor: &mut TensorViewMut<'_>) -> Result<Param, ExecError> {
        here(tensor.location())?;
        Ok(param(tensor.address(), tensor.len(), tensor.dtype()))
    }

    fn fetch(&mut self, _: Slot, _: &mut TensorViewMut<'_>) -> Result<(), ExecError> {
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
        spare + 8 * self.scratch.values().map(Vec::len).sum::<usize>()
    }

    fn wait(&mut self, _: &dyn Fn() -> bool) -> Result<(), ExecError> {
        Ok(())
    }

    fn watch(&self) -> u64 {
        self.watch_at
    }

    fn trap(&self) -> TrapRecord {
        let at = std::hint::black_box(self.watch_at) as usize + std::mem::offset_of!(Watch, trap);
        // SAFETY: inside `_watch`, which is as large as a `Watch` and whose bytes are one, and no launch runs; by address, as
        // kernels write it.
        unsafe { (at as *const TrapRecord).read_volatile() }
    }

    fn prepare(&mut self, timed: bool) -> Result<(), ExecError> {
        (self.timing, self.begun) = (timed, None);
        self.timed.clear();
        Ok(())
    }

    fn captures(&self) -> bool {
        false
    }

    fn begin<K: Kernel>(&mut self, params: &K) -> Result<(), ExecError> {
        self.begun = Some(Instant::now());
        let blocks = (Grid::Blocks(begin::BLOCKS), begin::WARPGROUPS, begin::shared_bytes()).into();
        // It is the same for all operations and element types, and waits for nobody.
        let launch = Launch { op: Op::Kda, dtype: Dtype::F32, blocks, checker: None, peer_failed: &|| false };
        Ok(self.run(&launch, params)?)
    }

    fn launch<K: Kernel>(&mut self, launch: &Launch<'_>, params: &K) -> Result<(), ExecError> {
        let start = Instant::now();
        self.run(launch, params)?;
        if self.timing {
            self.timed.push((start, Instant::now()));
        }
        Ok(())
    }

    type Mark = Instant;

    fn mark(&mut self) -> Result<Instant, ExecError> {
        Ok(Instant::now())
    }

    fn reached(&mut self, _: &Instant) -> Result<bool, ExecError> {
        Ok(true)
    }

    fn between(&self, from: &Instant, to: &Instant) -> Result<Duration, ExecError> {
        Ok(to.saturating_duration_since(*from))
    }

    fn give_up(&mut self) {
        // Kernels have ended when a launch returns.
    }

    fn take_times(&mut self) -> Result<Times, ExecError> {
        let timed = std::mem::take(&mut self.timed);
        let span = match (self.begun.take().or(timed.first().map(|&(begin, _)| begin)), timed.last()) {
            (Some(begin), Some((_, end))) => *end - begin,
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

    fn multiprocessors(&self) -> usize {
        1
    }

    fn checks(&self) -> bool {
        true
    }

    fn waits(&self) -> Waits {
        Waits::Kernels
    }

    fn peak_device_bytes(&self, pe: &Pe) -> usize {
        // Scratch only grows; spare memory is among what was given.
        let scratch = self.scratch.values().map(Vec::len).sum::<usize>();
        8 * scratch + self.given.peak.load(Ordering::Relaxed) + pe.heap().stats().peak
    }

    fn set_clock_origin(&mut self, origin: Instant) {
        self.origin = origin;
    }
}
