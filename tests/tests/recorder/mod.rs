//! A device that can capture steps, as a GPU's stream can: what is launched meanwhile is not done, but can be done again and again
//! later with the parameters that it has. It computes as the CPU back end does.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use deltalink::exec::cpu::{Cpu, CpuMemory};
use deltalink::exec::{
    Blocks, Body, ExecError, Executor, KeptMemory, Kernel, Launch, Scratch, Slot, SymmetricBytes, Times, Waits,
};
use deltalink::inputs::Op;
use deltalink::tensor::{Dtype, Location, TensorView, TensorViewMut};
use deltalink::world::Pe;
use kernels_gpu::params::{Sizes, Tensor as Param};
use kernels_gpu::protocol::TrapRecord;

type Again = Box<dyn Fn(&mut Cpu, &(dyn Fn() -> bool + Sync)) -> Result<(), ExecError>>;

/// Launches that were captured, and copies on the device.
#[derive(Default)]
pub struct Captured {
    launches: Vec<Again>,
}

impl Captured {
    /// How many, the first kernels of steps among them.
    pub fn launches(&self) -> usize {
        self.launches.len()
    }
}

/// The device.
pub struct Recorder {
    cpu: Cpu,
    captured: Option<Captured>,
    /// Bytes of scratch that there are.
    scratch: HashMap<Scratch, usize>,
    /// Memory that came back.
    returned: Vec<CpuMemory>,
    /// Bytes that were brought to the device so far, and from it.
    pub moved: usize,
    /// Where steps wait for other PEs.
    pub waits: Waits,
}

impl Recorder {
    pub fn new(workers: usize) -> Result<Self, ExecError> {
        let (cpu, captured) = (Cpu::new(workers)?, None);
        let waits = cpu.waits();
        Ok(Self { cpu, captured, scratch: HashMap::new(), returned: Vec::new(), moved: 0, waits })
    }

    /// Captures what is launched from here on.
    pub fn begin(&mut self) {
        self.captured = Some(Captured::default());
    }

    /// Ends the capture.
    pub fn end(&mut self) -> Captured {
        self.captured.take().expect("a capture was begun")
    }

    /// Does what was captured. Tensors that it uses are where they were.
    pub fn replay(&mut self, captured: &Captured, pe: &Pe) -> Result<(), ExecError> {
        let peer_failed = || pe.failed_peer().is_some();
        captured.launches.iter().try_for_each(|launch| launch(&mut self.cpu, &peer_failed))
    }

    /// What a capture cannot have.
    fn needs(&self, what: &'static str) -> Result<(), ExecError> {
        if self.captures() { Err(ExecError::NotWarm { what }) } else { Ok(()) }
    }
}

fn copied<K: Kernel>(op: Op, dtype: Dtype, blocks: Blocks, params: &K) -> Again {
    let params = *params;
    Box::new(move |cpu, peer_failed| {
        // `Launch` wants a reference of its own.
        let failed = || peer_failed();
        cpu.launch(&Launch { op, dtype, blocks, checker: None, peer_failed: &failed }, &params)
    })
}

impl Executor for Recorder {
    type Memory = CpuMemory;

    fn keep(&mut self, bytes: usize) -> Result<CpuMemory, ExecError> {
        match self.returned.iter().position(|memory| memory.bytes() == bytes.next_multiple_of(8)) {
            Some(at) => Ok(self.returned.swap_remove(at)),
            None => {
                self.needs("memory that a step keeps")?;
                self.cpu.keep(bytes)
            }
        }
    }

    fn reuse(&mut self, memory: CpuMemory) {
        self.returned.push(memory);
    }

    fn write(&mut self, memory: &mut CpuMemory, at: usize, bytes: &[u8]) -> Result<(), ExecError> {
        self.needs("a copy from the host")?;
        self.moved += bytes.len();
        self.cpu.write(memory, at, bytes)
    }

    fn read(&mut self, memory: &mut CpuMemory, at: usize, bytes: &mut [u8]) -> Result<(), ExecError> {
        self.needs("a copy to the host")?;
        self.moved += bytes.len();
        self.cpu.read(memory, at, bytes)
    }

    fn location(&self) -> Location {
        self.cpu.location()
    }

    fn multiprocessors(&self) -> usize {
        self.cpu.multiprocessors()
    }

    fn input(&mut self, slot: Slot, tensor: &TensorView<'_>) -> Result<Param, ExecError> {
        self.cpu.input(slot, tensor)
    }

    fn output(&mut self, slot: Slot, tensor: &mut TensorViewMut<'_>) -> Result<Param, ExecError> {
        self.cpu.output(slot, tensor)
    }

    fn fetch(&mut self, slot: Slot, tensor: &mut TensorViewMut<'_>) -> Result<(), ExecError> {
        self.cpu.fetch(slot, tensor)
    }

    fn scratch(&mut self, which: Scratch, len: usize, dtype: Dtype) -> Result<Param, ExecError> {
        let bytes = len * dtype.size();
        if self.scratch.get(&which).is_none_or(|&there| there < bytes) && bytes > 0 {
            self.needs("scratch memory")?;
            self.scratch.insert(which, bytes);
        }
        self.cpu.scratch(which, len, dtype)
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
        self.captured.is_some()
    }

    fn begin<K: Kernel>(&mut self, params: &K) -> Result<(), ExecError> {
        let Some(captured) = &mut self.captured else { return self.cpu.begin(params) };
        let params = *params;
        captured.launches.push(Box::new(move |cpu, _| cpu.begin(&params)));
        Ok(())
    }

    fn launch<K: Kernel>(&mut self, launch: &Launch<'_>, params: &K) -> Result<(), ExecError> {
        let Some(captured) = &mut self.captured else { return self.cpu.launch(launch, params) };
        captured.launches.push(copied(launch.op, launch.dtype, launch.blocks, params));
        Ok(())
    }

    type Mark = Instant;

    fn mark(&mut self) -> Result<Instant, ExecError> {
        self.cpu.mark()
    }

    fn reached(&mut self, mark: &Instant) -> Result<bool, ExecError> {
        self.cpu.reached(mark)
    }

    fn between(&self, from: &Instant, to: &Instant) -> Result<Duration, ExecError> {
        self.cpu.between(from, to)
    }

    fn give_up(&mut self) {
        self.cpu.give_up();
    }

    fn take_times(&mut self) -> Result<Times, ExecError> {
        self.cpu.take_times()
    }

    unsafe fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), ExecError> {
        let Some(captured) = &mut self.captured else {
            // SAFETY: by contract.
            return unsafe { self.cpu.copy(to, from, bytes) };
        };
        // SAFETY: by contract, which holds whenever it is done.
        captured.launches.push(Box::new(move |cpu, _| unsafe { cpu.copy(to, from, bytes) }));
        Ok(())
    }

    fn symmetric(&mut self, pe: &Pe, name: &str, bytes: usize) -> Result<SymmetricBytes, ExecError> {
        self.needs("memory of the symmetric heap")?;
        self.cpu.symmetric(pe, name, bytes)
    }

    fn heap_bytes(&self, pe: &Pe) -> usize {
        self.cpu.heap_bytes(pe)
    }

    fn concurrency(&self) -> usize {
        self.cpu.concurrency()
    }

    fn body(&self, sizes: &Sizes, operands: Dtype) -> Body {
        self.cpu.body(sizes, operands)
    }

    fn checks(&self) -> bool {
        self.cpu.checks()
    }

    fn waits(&self) -> Waits {
        self.waits
    }

    fn peak_device_bytes(&self, pe: &Pe) -> usize {
        self.cpu.peak_device_bytes(pe)
    }

    fn set_clock_origin(&mut self, origin: Instant) {
        self.cpu.set_clock_origin(origin);
    }
}
