//! Steps on a GPU.

mod beside;
mod streams;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels_gpu::begin;
use kernels_gpu::params::{Sizes, Tensor as Param};
use kernels_gpu::protocol::{TrapRecord, Watch};

use super::buffers::{Buffers, Counted, Use};
use super::{CudaError, DeviceBuffer, Event, Gpu, HostBuffer, Kernels, Residency, Shape, Sharing, Stream};
use crate::exec::cpu::code;
use crate::exec::{
    Blocks, Body, ExecError, Executor, Grid, KeptMemory, Kernel, Launch, Overlap, Scratch, Slot, SymmetricBytes, Times,
    Waits,
};
use crate::heap::{DevicePool, Heap};
use crate::inputs::Op;
use crate::tensor::{Dtype, Location, TensorView, TensorViewMut};
use crate::world::Pe;

/// Threads of a warpgroup.
const WARPGROUP: usize = 128;

/// Places in [`Watch`].
const ABORT: usize = std::mem::offset_of!(Watch, abort);
const TRAP: usize = std::mem::offset_of!(Watch, trap);

/// A PE's GPU, its stream and its memory.
pub struct CudaExecutor {
    gpu: Gpu,
    stream: Stream,
    kernels: Kernels,
    /// Whether bodies for Hopper run where they fit.
    hopper: bool,
    heap: Heap<DevicePool>,
    sharing: Sharing,
    buffers: Buffers,
    /// Memory that a step kept for a later one and that came back.
    returned: Vec<Counted>,
    /// A [`Watch`].
    watch: HostBuffer,
    /// Whether walks start before all their records are there.
    overlap: Overlap,
    /// After this executor's last walk of that kind.
    walked: Option<Arc<Event>>,
    /// How many blocks of a kernel run at once, by its name, threads and shared bytes.
    residencies: HashMap<(String, u32, u32), Residency>,
    /// Whether what is launched is captured.
    captures: bool,
    /// Whether something was launched that nobody has waited for.
    unfinished: bool,
    timing: bool,
    /// Begin of the step since times were last taken, begin and end of each launch since then, and spare events.
    begun: Option<Event>,
    timed: Vec<(Event, Event)>,
    spare: Vec<Event>,
}

impl CudaExecutor {
    /// An executor of one PE on `gpu`, which runs `kernels` and whose symmetric heap is `heap`.
    ///
    /// # Errors
    /// [`CudaError::Call`] if the GPU gives no stream or no pinned memory.
    pub fn new(gpu: &Gpu, kernels: Kernels, heap: Heap<DevicePool>, sharing: Sharing) -> Result<Self, CudaError> {
        // DELTALINK_BODY=portable is for comparing the two.
        let portable = std::env::var_os("DELTALINK_BODY").is_some_and(|body| body == "portable");
        Ok(Self {
            stream: gpu.stream()?,
            gpu: gpu.clone(),
            hopper: kernels.has_hopper() && !portable,
            kernels,
            heap,
            sharing,
            buffers: Buffers::new(gpu),
            returned: Vec::new(),
            watch: gpu.host_buffer(size_of::<Watch>())?,
            overlap: beside::asked(std::env::var("DELTALINK_BESIDE").ok().as_deref())?,
            walked: None,
            residencies: HashMap::new(),
            captures: false,
            unfinished: false,
            timing: true,
            begun: None,
            timed: Vec::new(),
            spare: Vec::new(),
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Memory for `what`; while launches are captured there is only what was there before.
    fn memory(&mut self, what: Use, bytes: usize) -> Result<&DeviceBuffer, ExecError> {
        if self.captures && !self.buffers.pin(what, bytes) {
            return Err(ExecError::NotWarm { what: "scratch memory" });
        }
        Ok(self.buffers.at_least(&self.stream, what, bytes)?)
    }

    fn residency(&mut self, name: &str, threads: u32, shared_bytes: u32) -> Result<Residency, CudaError> {
        let key = (name.to_owned(), threads, shared_bytes);
        if let Some(&found) = self.residencies.get(&key) {
            return Ok(found);
        }
        let found = self.kernels.function(name).residency(threads, shared_bytes)?;
        self.residencies.insert(key, found);
        Ok(found)
    }

    /// Launches `params`' kernel of the name `name`.
    fn run<K: Kernel>(&mut self, name: &str, blocks: &Blocks, params: &K) -> Result<(), ExecError> {
        self.run_when(name, blocks, params, false)
    }

    /// The same; if `early`, as soon as the launch before allows it.
    fn run_when<K: Kernel>(&mut self, name: &str, blocks: &Blocks, params: &K, early: bool) -> Result<(), ExecError> {
        let threads = (blocks.warpgroups * WARPGROUP) as u32;
        let shared_bytes = blocks.shared_bytes as u32;
        let resident = match blocks.grid {
            Grid::Blocks(_) => None,
            Grid::Resident => Some(self.residency(name, threads, shared_bytes)?),
        };
        let count = match (blocks.grid, resident) {
            (Grid::Blocks(blocks), _) => blocks as u32,
            (Grid::Resident, residency) => residency.map_or(0, |r| self.sharing.blocks(r.blocks(), r.sms)),
        };
        if count == 0 {
            return Ok(());
        }
        let function = self.kernels.function(name);
        let shape = Shape { blocks: count, threads, shared_bytes };
        if let Some(residency) = resident {
            function.check_fits(shape, residency, self.sharing.pes as u32)?;
        }
        // SAFETY: the entry takes these parameters by value. Memory that they name stays until the stream has done the step: the
        // executor's, because its release waits for the stream's work, the caller's by its promise, where a call returns before.
        unsafe {
            if early {
                function.launch_dependent(&self.stream, shape, params)?;
            } else {
                function.launch(&self.stream, shape, params)?;
            }
        }
        self.unfinished |= !self.captures;
        tracing::debug!(kernel = K::NAME, blocks = count, threads, shared_bytes, "launched");
        Ok(())
    }

    /// Makes launches that count as one, and times them.
    fn time(&mut self, launches: impl FnOnce(&mut Self) -> Result<(), ExecError>) -> Result<(), ExecError> {
        if !self.timing {
            return launches(self);
        }
        let (begin, end) = (self.event()?, self.event()?);
        begin.record(&self.stream)?;
        launches(self)?;
        end.record(&self.stream)?;
        self.timed.push((begin, end));
        Ok(())
    }

    fn event(&mut self) -> Result<Event, CudaError> {
        self.spare.pop().map_or_else(|| self.gpu.event(), Ok)
    }

    /// Waits for all launches so far. Kernels that wait for another PE give up when `peer_failed`.
    fn wait_until_done(&mut self, peer_failed: &dyn Fn() -> bool) -> Result<(), CudaError> {
        let (mut told, mut warned) = (false, false);
        self.stream.synchronize_with(|| {
            if !told && peer_failed() {
                self.watch.write(ABORT, 1_u64);
                told = true;
            }
            if !warned && self.watch.read::<u64>(TRAP) == TrapRecord::SET {
                let expired = self.trap().expired;
                tracing::debug!(%expired, "a kernel gave up; waiting for the others to end");
                warned = true;
            }
        })?;
        self.unfinished = false;
        Ok(())
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        if self.unfinished {
            // What was only enqueued still uses the heap, and other PEs' slots, which others get next. It ends, because its waits
            // are bounded; if it ended badly there is nothing left to do about it.
            let _ = self.stream.synchronize();
        }
    }
}

/// The name of a launch's entry in a device module.
fn entry<K: Kernel>(launch: &Launch<'_>) -> String {
    match launch.blocks.body {
        Body::Portable => K::device_entry(launch.op, launch.dtype),
        Body::Hopper => K::hopper_entry(launch.op, launch.blocks.warpgroups),
    }
}

fn param(address: u64, len: usize, dtype: Dtype) -> Param {
    if len == 0 { Param::absent() } else { Param::new(address, len, code(dtype)) }
}

/// A tensor of the caller where it lies, if that is where kernels run.
fn in_place(found: Location, want: Location, address: u64, len: usize, dtype: Dtype) -> Result<Param, ExecError> {
    if len > 0 && found != want {
        return Err(ExecError::Elsewhere { found, want });
    }
    Ok(param(address, len, dtype))
}

impl KeptMemory for Counted {
    fn address(&mut self) -> u64 {
        DeviceBuffer::address(self)
    }

    fn bytes(&self) -> usize {
        self.len()
    }
}

impl Executor for CudaExecutor {
    type Memory = Counted;

    fn keep(&mut self, bytes: usize) -> Result<Counted, ExecError> {
        // Layers are alike, so what one gave back is just what another asks for; nothing is allocated in the long run.
        if let Some(at) = self.returned.iter().position(|buffer| buffer.len() == bytes) {
            let found = self.returned.swap_remove(at);
            if self.captures {
                self.buffers.pin_memory(&found);
            }
            return Ok(found);
        }
        if self.captures && bytes > 0 {
            return Err(ExecError::NotWarm { what: "memory that a forward call keeps for its backward call" });
        }
        // One comes, one goes: sizes that are not asked for any more do not pile up.
        self.returned.drain(..self.returned.len().min(1));
        Ok(self.buffers.alloc(bytes)?)
    }

    fn reuse(&mut self, memory: Counted) {
        if self.captures {
            self.buffers.pin_memory(&memory);
        }
        self.returned.push(memory);
    }

    fn write(&mut self, memory: &mut Counted, at: usize, bytes: &[u8]) -> Result<(), ExecError> {
        Ok(memory.upload(&self.stream, at, bytes)?)
    }

    fn read(&mut self, memory: &mut Counted, at: usize, bytes: &mut [u8]) -> Result<(), ExecError> {
        Ok(memory.download(&self.stream, at, bytes)?)
    }

    fn location(&self) -> Location {
        Location::Gpu(self.gpu.properties().ordinal)
    }

    fn input(&mut self, slot: Slot, tensor: &TensorView<'_>) -> Result<Param, ExecError> {
        let (len, dtype) = (tensor.len(), tensor.dtype());
        let Some(data) = tensor.host() else {
            return in_place(tensor.location(), self.location(), tensor.address(), len, dtype);
        };
        let (stream, bytes) = (&self.stream, data.bytes());
        let memory = self.buffers.at_least(stream, Use::Slot(slot), bytes.len())?;
        memory.upload(stream, 0, bytes)?;
        Ok(param(memory.address(), len, dtype))
    }

    fn output(&mut self, slot: Slot, tensor: &mut TensorViewMut<'_>) -> Result<Param, ExecError> {
        let (len, dtype) = (tensor.len(), tensor.dtype());
        if tensor.location() != Location::Host {
            return in_place(tensor.location(), self.location(), tensor.address(), len, dtype);
        }
        let bytes = tensor.byte_len();
        let memory = self.buffers.at_least(&self.stream, Use::Slot(slot), bytes)?;
        // Whatever a kernel should fail to write must not look like a result.
        memory.fill_async(&self.stream, 0, bytes, 0xff)?;
        Ok(param(memory.address(), len, dtype))
    }

    fn fetch(&mut self, slot: Slot, tensor: &mut TensorViewMut<'_>) -> Result<(), ExecError> {
        let Some(bytes) = tensor.host_bytes_mut().filter(|bytes| !bytes.is_empty()) else { return Ok(()) };
        if let Some(memory) = self.buffers.get(Use::Slot(slot)) {
            memory.download(&self.stream, 0, bytes)?;
        }
        Ok(())
    }

    fn scratch(&mut self, which: Scratch, len: usize, dtype: Dtype) -> Result<Param, ExecError> {
        let memory = self.memory(Use::Scratch(which), len * dtype.size())?;
        Ok(param(memory.address(), len, dtype))
    }

    fn scratch_bytes(&self) -> usize {
        let returned: usize = self.returned.iter().map(|buffer| buffer.len()).sum();
        returned + self.buffers.bytes(|what| matches!(what, Use::Scratch(_)))
    }

    fn wait(&mut self, peer_failed: &dyn Fn() -> bool) -> Result<(), ExecError> {
        Ok(self.wait_until_done(peer_failed)?)
    }

    fn watch(&self) -> u64 {
        self.watch.device_address()
    }

    fn trap(&self) -> TrapRecord {
        let state = self.watch.read::<u64>(TRAP);
        // Acquire, with the release of the kernel: the record is complete when the state says so.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        TrapRecord { state, ..self.watch.read(TRAP) }
    }

    fn prepare(&mut self, timed: bool) -> Result<(), ExecError> {
        self.captures = self.stream.is_capturing()?;
        self.timing = timed && !self.captures;
        self.spare.extend(self.begun.take());
        for (begin, end) in self.timed.drain(..) {
            self.spare.extend([begin, end]);
        }
        Ok(())
    }

    fn captures(&self) -> bool {
        self.captures
    }

    fn begin<K: Kernel>(&mut self, params: &K) -> Result<(), ExecError> {
        if self.timing {
            let begin = self.event()?;
            begin.record(&self.stream)?;
            self.begun = Some(begin);
        }
        let blocks = (Grid::Blocks(begin::BLOCKS), begin::WARPGROUPS, begin::shared_bytes()).into();
        // It is the same for all operations and element types.
        self.run(&K::device_entry(Op::Kda, Dtype::F32), &blocks, params)
    }

    fn launch<K: Kernel>(&mut self, launch: &Launch<'_>, params: &K) -> Result<(), ExecError> {
        self.time(|exec| exec.run(&entry::<K>(launch), &launch.blocks, params))
    }

    fn overlap(&self) -> Overlap {
        // PEs that share the GPU may need the multiprocessors that a walk and what it waits for hold.
        if self.sharing.pes == 1 { self.overlap } else { Overlap::Never }
    }

    fn launch_beside<K: Kernel, W: Kernel>(
        &mut self,
        [before, beside]: [(&Launch<'_>, &K); 2],
        walk: (&Launch<'_>, &W),
    ) -> Result<(), ExecError> {
        self.time(|exec| {
            let mut latest = beside::latest();
            exec.run(&entry::<K>(before.0), &before.0.blocks, before.1)?;
            exec.follow(&latest)?;
            exec.run(&entry::<W>(walk.0), &walk.0.blocks, walk.1)?;
            exec.run_when(&entry::<K>(beside.0), &beside.0.blocks, beside.1, true)?;
            Ok(exec.note(&mut latest)?)
        })
    }

    type Mark = Event;

    fn mark(&mut self) -> Result<Event, ExecError> {
        // Its holder may keep it for long, so it is none of the spare ones.
        let mark = self.gpu.event()?;
        mark.record(&self.stream)?;
        Ok(mark)
    }

    fn reached(&mut self, mark: &Event) -> Result<bool, ExecError> {
        Ok(mark.is_reached(&self.stream)?)
    }

    fn between(&self, from: &Event, to: &Event) -> Result<Duration, ExecError> {
        Ok(to.since(from)?)
    }

    fn give_up(&mut self) {
        self.watch.write(ABORT, 1_u64);
    }

    fn take_times(&mut self) -> Result<Times, ExecError> {
        let mut times = Times::default();
        let (begun, timed) = (self.begun.take(), std::mem::take(&mut self.timed));
        if let Some((first, last)) = timed.first().zip(timed.last()) {
            self.stream.synchronize()?;
            times.span = last.1.since(begun.as_ref().unwrap_or(&first.0))?;
        }
        for (begin, end) in timed {
            times.launches.push(end.since(&begin)?);
            self.spare.extend([begin, end]);
        }
        self.spare.extend(begun);
        Ok(times)
    }

    unsafe fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), ExecError> {
        // SAFETY: by contract; both lie in device memory that this GPU reaches.
        unsafe { self.stream.copy(to, from, bytes)? };
        Ok(())
    }

    fn concurrency(&self) -> usize {
        self.gpu.properties().sms as usize
    }

    fn multiprocessors(&self) -> usize {
        // PEs that share the GPU have their kernels on it, too.
        (self.gpu.properties().sms as usize / self.sharing.pes.max(1)).max(1)
    }

    fn symmetric(&mut self, pe: &Pe, name: &str, bytes: usize) -> Result<SymmetricBytes, ExecError> {
        let object = self.heap.alloc::<u64>(name, bytes.div_ceil(8))?;
        let addresses = (0..pe.size()).map(|rank| object.address(rank)).collect();
        Ok(SymmetricBytes { addresses, owner: Box::new(object) })
    }

    fn body(&self, sizes: &Sizes, operands: Dtype) -> Body {
        let hopper = self.hopper && kernels_gpu::hopper::fits(sizes, code(operands));
        if hopper { Body::Hopper } else { Body::Portable }
    }

    fn heap_bytes(&self, _: &Pe) -> usize {
        self.heap.stats().in_use
    }

    fn checks(&self) -> bool {
        false
    }

    fn waits(&self) -> Waits {
        self.sharing.waits()
    }

    fn peak_device_bytes(&self, _: &Pe) -> usize {
        self.buffers.peak() + self.heap.stats().peak
    }

    fn set_clock_origin(&mut self, _: Instant) {
        // Kernels stamp the device's own clock.
    }
}
