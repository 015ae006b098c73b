//! Steps on emulated GPUs.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cuda_std::emulated::{Emulator, Fault, Launch as Blocks, Schedule};
use deltalink::exec::cpu::{Cpu, CpuMemory, PoolError};
use deltalink::exec::{
    Body, ExecError, Executor, Grid, Kernel, Launch, Overlap, Scratch, Slot, SymmetricBytes, Times, Waits,
};
use deltalink::inputs::Op;
use deltalink::tensor::{Dtype, Location, TensorView, TensorViewMut};
use deltalink::world::Pe;
use kernels_gpu::begin;
use kernels_gpu::element::DtypeCode;
use kernels_gpu::params::{Sizes, Tensor as Param};
use kernels_gpu::protocol::{TrapRecord, Watch};
use kernels_gpu::tile::host::FaultKind;
use kernels_gpu_emulated::entry::find;

/// One PE's executor: the device's bodies of the kernels, on emulated threads. Memory is the CPU back end's.
pub struct Emulated {
    cpu: Cpu,
    emulators: Vec<Mutex<Emulator>>,
    schedule: Schedule,
    hopper: bool,
    multiprocessors: usize,
    overlap: Overlap,
    origin: Instant,
    launches: Launches,
}

/// Names of the entries that an executor has launched. A clone is the same list.
#[derive(Clone, Debug, Default)]
pub struct Launches(Arc<Mutex<Vec<String>>>);

impl Launches {
    /// The names so far, in order.
    pub fn names(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Emulated {
    /// An executor that runs `workers` blocks at the same time, with bodies for Hopper where they fit if `hopper`.
    ///
    /// # Errors
    /// [`PoolError`] as the CPU back end.
    pub fn new(workers: usize, schedule: Schedule, hopper: bool) -> Result<Self, PoolError> {
        let emulators = (0..workers.max(1)).map(|_| Mutex::new(Emulator::new())).collect();
        let (cpu, origin) = (Cpu::new(1)?, Instant::now());
        let overlap = Overlap::Never;
        Ok(Self {
            cpu,
            emulators,
            schedule,
            hopper,
            multiprocessors: 1,
            overlap,
            origin,
            launches: Launches::default(),
        })
    }

    /// The same, which says that it has so many multiprocessors.
    pub fn with_multiprocessors(self, multiprocessors: usize) -> Self {
        Self { multiprocessors, ..self }
    }

    /// The same, which prepares so many hundredths of the chunks beside walks.
    pub fn with_percent_beside(self, percent: u32) -> Self {
        Self { overlap: Overlap::Percent(percent), ..self }
    }

    /// What this executor launches, also after it was given away.
    pub fn launches(&self) -> Launches {
        self.launches.clone()
    }

    /// Tells waiting kernels to give up.
    fn abort(&self) {
        let at = self.cpu.watch() + std::mem::offset_of!(Watch, abort) as u64;
        // SAFETY: a word of the page that `watch` gives out, which the inner executor keeps.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }.store(1, Ordering::Relaxed);
    }

    fn run<K: Kernel>(&self, name: &str, launch: &Launch<'_>, params: &K) -> Result<(), Fault> {
        let entry = find(name).unwrap_or_else(|| panic!("no entry {name}: add it to kernels_gpu::entry"));
        let blocks = match launch.blocks.grid {
            Grid::Blocks(blocks) => blocks as u32,
            Grid::Resident => self.emulators.len() as u32,
        };
        let (next, failed) = (AtomicU32::new(0), AtomicBool::new(false));
        let work = |emulator: &Mutex<Emulator>| -> Result<(), Fault> {
            let idle = || {
                // What is waited for is another PE's work, on the same cores.
                std::thread::sleep(Duration::from_micros(50));
                if (launch.peer_failed)() || failed.load(Ordering::Relaxed) {
                    self.abort();
                }
            };
            let grid = Blocks {
                kernel: name,
                grid: blocks,
                threads: 128 * launch.blocks.warpgroups as u32,
                shared_bytes: launch.blocks.shared_bytes as u32,
                schedule: self.schedule,
                origin: self.origin,
                idle: &idle,
            };
            // Each worker has an emulator of its own: the lock is never contended.
            let mut emulator = emulator.lock().unwrap_or_else(PoisonError::into_inner);
            while !failed.load(Ordering::Relaxed) {
                let block = next.fetch_add(1, Ordering::Relaxed);
                if block >= blocks {
                    break;
                }
                // SAFETY: the same parameters, of the same sources; the step keeps all memory that they name.
                let result = unsafe { entry.run(&mut emulator, &grid, block, params) };
                failed.fetch_or(result.is_err(), Ordering::Relaxed);
                result?;
            }
            Ok(())
        };
        match &self.emulators[..] {
            [only] => work(only),
            all => std::thread::scope(|scope| {
                let workers: Vec<_> = all.iter().map(|emulator| scope.spawn(|| work(emulator))).collect();
                workers.into_iter().try_for_each(|worker| worker.join().expect("a worker returns its fault"))
            }),
        }
    }
}

/// As a fault of the CPU back end.
pub(crate) fn as_fault(fault: &Fault) -> ExecError {
    let place = fault.thread.map(|thread| (fault.block as usize, thread as usize / 128));
    let kind = FaultKind::Panic(fault.to_string());
    ExecError::Fault(kernels_gpu::tile::host::Fault { kernel: fault.kernel.clone(), place, kind })
}

impl Executor for Emulated {
    type Memory = CpuMemory;

    fn keep(&mut self, bytes: usize) -> Result<CpuMemory, ExecError> {
        self.cpu.keep(bytes)
    }

    fn reuse(&mut self, memory: CpuMemory) {
        self.cpu.reuse(memory);
    }

    fn write(&mut self, memory: &mut CpuMemory, at: usize, bytes: &[u8]) -> Result<(), ExecError> {
        self.cpu.write(memory, at, bytes)
    }

    fn read(&mut self, memory: &mut CpuMemory, at: usize, bytes: &mut [u8]) -> Result<(), ExecError> {
        self.cpu.read(memory, at, bytes)
    }

    fn location(&self) -> Location {
        self.cpu.location()
    }

    fn input(&mut self, slot: Slot, tensor: &TensorView<'_>) -> Result<Param, ExecError> {
        self.cpu.input(slot, tensor)
    }

    fn output(&mut self, slot: Slot, tensor: &mut TensorViewMut<'_>) -> Result<Param, ExecError> {
        let bytes = tensor.len() * tensor.dtype().size();
        let result = self.cpu.output(slot, tensor)?;
        if bytes > 0 {
            // Whatever a kernel should fail to write must not look like a result.
            // SAFETY: the view's memory, which nothing else uses while the view is borrowed.
            unsafe { std::ptr::write_bytes(tensor.address() as *mut u8, 0xff, bytes) };
        }
        Ok(result)
    }

    fn fetch(&mut self, slot: Slot, tensor: &mut TensorViewMut<'_>) -> Result<(), ExecError> {
        self.cpu.fetch(slot, tensor)
    }

    fn scratch(&mut self, which: Scratch, len: usize, dtype: Dtype) -> Result<Param, ExecError> {
        let memory = self.cpu.scratch(which, len, dtype)?;
        if memory.is_present() {
            // SAFETY: memory of this executor, of that many bytes, that no kernel uses now.
            unsafe { std::ptr::write_bytes(memory.addr as *mut u8, 0xff, len * dtype.size()) };
        }
        Ok(memory)
    }

    fn scratch_bytes(&self) -> usize {
        self.cpu.scratch_bytes()
    }

    fn wait(&mut self, peer_failed: &dyn Fn() -> bool) -> Result<(), ExecError> {
        self.cpu.wait(peer_failed)
    }

    fn watch(&self) -> u64 {
        self.cpu.watch()
    }

    fn trap(&self) -> TrapRecord {
        self.cpu.trap()
    }

    fn prepare(&mut self, timed: bool) -> Result<(), ExecError> {
        self.cpu.prepare(timed)
    }

    fn captures(&self) -> bool {
        self.cpu.captures()
    }

    fn begin<K: Kernel>(&mut self, params: &K) -> Result<(), ExecError> {
        let blocks = (Grid::Blocks(begin::BLOCKS), begin::WARPGROUPS, begin::shared_bytes()).into();
        // It is the same for all operations and element types, and waits for nobody.
        let launch = Launch { op: Op::Kda, dtype: Dtype::F32, blocks, checker: None, peer_failed: &|| false };
        self.run(&K::device_entry(Op::Kda, Dtype::F32), &launch, params).map_err(|fault| as_fault(&fault))
    }

    fn launch<K: Kernel>(&mut self, launch: &Launch<'_>, params: &K) -> Result<(), ExecError> {
        let name = match launch.blocks.body {
            Body::Portable => K::device_entry(launch.op, launch.dtype),
            Body::Hopper => K::hopper_entry(launch.op, launch.blocks.warpgroups),
        };
        let result = self.run(&name, launch, params).map_err(|fault| as_fault(&fault));
        self.launches.0.lock().unwrap_or_else(PoisonError::into_inner).push(name);
        result
    }

    fn overlap(&self) -> Overlap {
        self.overlap
    }

    type Mark = <Cpu as Executor>::Mark;

    fn mark(&mut self) -> Result<Self::Mark, ExecError> {
        self.cpu.mark()
    }

    fn reached(&mut self, mark: &Self::Mark) -> Result<bool, ExecError> {
        self.cpu.reached(mark)
    }

    fn between(&self, from: &Self::Mark, to: &Self::Mark) -> Result<Duration, ExecError> {
        self.cpu.between(from, to)
    }

    fn give_up(&mut self) {
        self.cpu.give_up();
    }

    fn take_times(&mut self) -> Result<Times, ExecError> {
        Ok(Times::default())
    }

    unsafe fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), ExecError> {
        // SAFETY: by contract.
        unsafe { self.cpu.copy(to, from, bytes) }
    }

    fn symmetric(&mut self, pe: &Pe, name: &str, bytes: usize) -> Result<SymmetricBytes, ExecError> {
        self.cpu.symmetric(pe, name, bytes)
    }

    fn heap_bytes(&self, pe: &Pe) -> usize {
        self.cpu.heap_bytes(pe)
    }

    fn concurrency(&self) -> usize {
        self.emulators.len()
    }

    fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    fn body(&self, sizes: &Sizes, operands: Dtype) -> Body {
        let operands = match operands {
            Dtype::F32 => DtypeCode::F32,
            Dtype::Bf16 => DtypeCode::Bf16,
            Dtype::F16 => DtypeCode::F16,
        };
        if self.hopper && kernels_gpu::hopper::fits(sizes, operands) { Body::Hopper } else { Body::Portable }
    }

    fn checks(&self) -> bool {
        false
    }

    fn waits(&self) -> Waits {
        Waits::Kernels
    }

    fn peak_device_bytes(&self, pe: &Pe) -> usize {
        self.cpu.peak_device_bytes(pe)
    }

    fn set_clock_origin(&mut self, origin: Instant) {
        self.origin = origin;
        self.cpu.set_clock_origin(origin);
    }
}
