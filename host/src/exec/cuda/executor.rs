//! Steps on a GPU.

use std::time::Instant;

use kernels_gpu::params::{Sizes, Tensor as Param};
use kernels_gpu::protocol::{TrapRecord, Watch};

use super::buffers::{Buffers, Counted, Use};
use super::{CudaError, DeviceBuffer, Event, Gpu, HostBuffer, Kernels, Shape, Stream};
use crate::exec::cpu::code;
use crate::exec::{
    Body, ExecError, Executor, Grid, Image, KeptMemory, Kernel, Launch, Scratch, Slot, SymmetricBytes, Times, Waits,
};
use crate::heap::{DevicePool, Heap};
use crate::tensor::{Data, Dtype, Tensor, TensorView};
use crate::world::Pe;

/// Threads of a warpgroup.
const WARPGROUP: usize = 128;

/// Places in [`Watch`].
const ABORT: usize = std::mem::offset_of!(Watch, abort);
const TRAP: usize = std::mem::offset_of!(Watch, trap);

/// How PEs share a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// PEs that run on one GPU at the same time; the same on all PEs.
    pub pes: usize,
    /// Whether their kernels start while others' run, as those of processes under MPS do. Threads of one process do not:
    /// there allocating, loading and launching can wait for everything that runs.
    pub concurrent: bool,
}

impl Sharing {
    /// A GPU for each PE.
    pub const NONE: Self = Self { pes: 1, concurrent: true };

    fn waits(self) -> Waits {
        if self.pes > 1 && !self.concurrent { Waits::Host } else { Waits::Kernels }
    }

    /// Blocks of a launch that stays until its work is done, of a kernel of which `resident` fit the whole GPU of `sms` SMs.
    ///
    /// Kernels that wait for those of other PEs must leave room for them, whatever these need. With no more blocks in all
    /// than there are SMs, a block that has yet to start finds an SM without any.
    fn blocks(self, resident: u32, sms: u32) -> u32 {
        let pes = self.pes.max(1) as u32;
        let most = if pes > 1 && self.concurrent { sms / pes } else { resident / pes };
        most.min(resident / pes).max(1)
    }
}

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
    /// Begin and end of each launch since times were last taken, and spare events.
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
            timed: Vec::new(),
            spare: Vec::new(),
        })
    }

    fn event(&mut self) -> Result<Event, CudaError> {
        self.spare.pop().map_or_else(|| self.gpu.event(), Ok)
    }

    /// Waits for all launches so far. Kernels that wait for another PE give up when `peer_failed`.
    fn wait(&self, peer_failed: &dyn Fn() -> bool) -> Result<(), CudaError> {
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
        })
    }
}

fn param(buffer: &DeviceBuffer, len: usize, dtype: Dtype) -> Param {
    if len == 0 { Param::absent() } else { Param::new(buffer.address(), len, code(dtype)) }
}

fn bytes_of<'a>(data: &Data<'a>) -> &'a [u8] {
    match *data {
        Data::F32(x) => bytemuck::cast_slice(x),
        Data::Bf16(x) => bytemuck::cast_slice(x),
        Data::F16(x) => bytemuck::cast_slice(x),
    }
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
            return Ok(self.returned.swap_remove(at));
        }
        // One comes, one goes: sizes that are not asked for any more do not pile up.
        self.returned.drain(..self.returned.len().min(1));
        Ok(self.buffers.alloc(bytes)?)
    }

    fn reuse(&mut self, memory: Counted) {
        self.returned.push(memory);
    }

    fn input(&mut self, slot: Slot, tensor: &TensorView<'_>) -> Result<Param, ExecError> {
        let bytes = bytes_of(&tensor.data());
        let memory = self.buffers.at_least(&self.stream, Use::Slot(slot), bytes.len())?;
        memory.upload(&self.stream, 0, bytes)?;
        Ok(param(memory, tensor.data().len(), tensor.dtype()))
    }

    fn output(&mut self, slot: Slot, tensor: &mut Tensor) -> Result<Param, ExecError> {
        let bytes = tensor.data.bytes().len();
        let memory = self.buffers.at_least(&self.stream, Use::Slot(slot), bytes)?;
        // Whatever a kernel should fail to write must not look like a result.
        memory.fill_async(&self.stream, 0, bytes, 0xff)?;
        Ok(param(memory, tensor.data.data().len(), tensor.data.dtype()))
    }

    fn fetch(&mut self, slot: Slot, tensor: &mut Tensor) -> Result<(), ExecError> {
        let bytes = tensor.data.bytes_mut();
        if let Some(memory) = self.buffers.get(Use::Slot(slot)).filter(|_| !bytes.is_empty()) {
            memory.download(&self.stream, 0, bytes)?;
        }
        Ok(())
    }

    fn scratch(&mut self, which: Scratch, len: usize, dtype: Dtype) -> Result<Param, ExecError> {
        let memory = self.buffers.at_least(&self.stream, Use::Scratch(which), len * dtype.size())?;
        Ok(param(memory, len, dtype))
    }

    fn scratch_bytes(&self) -> usize {
        let returned: usize = self.returned.iter().map(|buffer| buffer.len()).sum();
        returned + self.buffers.bytes(|what| matches!(what, Use::Scratch(_) | Use::Image))
    }

    fn put_image(&mut self, image: &Image) -> Result<u64, ExecError> {
        let device = self.buffers.at_least(&self.stream, Use::Image, image.bytes().len())?;
        device.upload(&self.stream, 0, image.bytes())?;
        Ok(device.address())
    }

    fn get_image(&mut self, image: &mut Image, peer_failed: &dyn Fn() -> bool) -> Result<(), ExecError> {
        self.wait(peer_failed)?;
        if let Some(device) = self.buffers.get(Use::Image) {
            device.download(&self.stream, 0, image.bytes_mut())?;
            tracing::debug!("all launches so far have ended");
        }
        Ok(())
    }

    fn watch(&mut self) -> Result<u64, ExecError> {
        self.watch.write(0, <Watch as bytemuck::Zeroable>::zeroed());
        Ok(self.watch.device_address())
    }

    fn trap(&self) -> TrapRecord {
        let state = self.watch.read::<u64>(TRAP);
        // Acquire, with the release of the kernel: the record is complete when the state says so.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        TrapRecord { state, ..self.watch.read(TRAP) }
    }

    fn launch<K: Kernel>(&mut self, launch: &Launch<'_>, params: &K) -> Result<(), ExecError> {
        let (begin, end) = (self.event()?, self.event()?);
        let threads = (launch.blocks.warpgroups * WARPGROUP) as u32;
        let shared_bytes = launch.blocks.shared_bytes as u32;
        let name = match launch.blocks.body {
            Body::Portable => K::device_entry(launch.op, launch.dtype),
            Body::Hopper => K::hopper_entry(launch.op, launch.blocks.warpgroups),
        };
        let function = self.kernels.function(&name);
        let blocks = match launch.blocks.grid {
            Grid::Blocks(blocks) => blocks as u32,
            Grid::Resident => {
                let residency = function.residency(threads, shared_bytes)?;
                self.sharing.blocks(residency.blocks(), residency.sms)
            }
        };
        begin.record(&self.stream)?;
        if blocks > 0 {
            let shape = Shape { blocks, threads, shared_bytes };
            if launch.blocks.grid == Grid::Resident {
                function.check_resident(shape, self.sharing.pes as u32)?;
            }
            // SAFETY: the entry takes these parameters by value; the step keeps all memory that they name until it has
            // read the image back, which waits for the stream.
            unsafe { function.launch(&self.stream, shape, params)? };
        }
        end.record(&self.stream)?;
        self.timed.push((begin, end));
        tracing::debug!(kernel = K::NAME, blocks, threads, shared_bytes, "launched");
        Ok(())
    }

    fn take_times(&mut self) -> Result<Times, ExecError> {
        self.stream.synchronize()?;
        let mut times = Times::default();
        if let (Some((first, _)), Some((_, last))) = (self.timed.first(), self.timed.last()) {
            times.span = last.since(first)?;
        }
        for (begin, end) in std::mem::take(&mut self.timed) {
            times.launches.push(end.since(&begin)?);
            self.spare.extend([begin, end]);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_wait_leave_room_for_those_of_other_pes() {
        let sharing = |pes, concurrent| Sharing { pes, concurrent };
        assert_eq!(Sharing::NONE.blocks(264, 132), 264);
        assert_eq!((sharing(8, false).blocks(264, 132), sharing(8, true).blocks(264, 132)), (33, 16));
        assert_eq!((sharing(200, true).blocks(264, 132), sharing(2, true).blocks(66, 132)), (1, 33));
    }

    #[test]
    fn pes_that_may_hold_each_other_up_wait_on_the_host() {
        assert_eq!(Sharing { pes: 2, concurrent: false }.waits(), Waits::Host);
        assert_eq!(Sharing { pes: 2, concurrent: true }.waits(), Waits::Kernels);
        assert_eq!(Sharing { pes: 1, concurrent: false }.waits(), Waits::Kernels);
    }
}
