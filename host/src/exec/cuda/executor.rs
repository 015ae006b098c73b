//! Steps on a GPU.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kernels_gpu::params::{Sizes, Tensor as Param};

use super::{CudaError, DeviceBuffer, Event, Function, Gpu, Shape, Stream};
use crate::exec::cpu::code;
use crate::exec::{Body, ExecError, Executor, Grid, Image, KeptMemory, Kernel, Launch, Scratch, Slot, SymmetricBytes};
use crate::heap::{DevicePool, Heap};
use crate::tensor::{Data, Dtype, Tensor, TensorView};
use crate::world::Pe;

/// The device module of this build: all kernels, for Hopper.
static MODULE: &[u8] = include_bytes!(env!("DELTALINK_DEVICE_MODULE"));

/// Threads of a warpgroup.
const WARPGROUP: usize = 128;

/// A PE's GPU, its stream and its memory.
pub struct CudaExecutor {
    gpu: Gpu,
    stream: Stream,
    kernels: Arc<HashMap<String, Function>>,
    heap: Heap<DevicePool>,
    /// PEs that run on this GPU at the same time.
    sharers: u32,
    slots: HashMap<Slot, DeviceBuffer>,
    scratch: HashMap<Scratch, DeviceBuffer>,
    /// Memory that a step kept for a later one and that came back.
    returned: Vec<DeviceBuffer>,
    image: Option<DeviceBuffer>,
    /// Begin and end of each launch since times were last taken, and spare events.
    timed: Vec<(Event, Event)>,
    spare: Vec<Event>,
}

/// The kernels of `gpu`, by name, loaded once per process. All of them at once and before any launch: loading one may
/// wait for the kernels that run, and those may wait for a PE that has yet to launch.
fn kernels(gpu: &Gpu) -> Result<Arc<HashMap<String, Function>>, CudaError> {
    static LOADED: OnceLock<Mutex<HashMap<usize, Arc<HashMap<String, Function>>>>> = OnceLock::new();
    let mut loaded = LOADED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let ordinal = gpu.properties().ordinal;
    if let Some(kernels) = loaded.get(&ordinal) {
        return Ok(kernels.clone());
    }
    let module = gpu.load("deltalink", MODULE)?;
    let mut kernels = HashMap::new();
    for name in crate::exec::device_entries() {
        let function = module.function(&name)?;
        function.allow_shared(kernels_gpu::tile::SHARED_BYTES as u32)?;
        kernels.insert(name, function);
    }
    let kernels = Arc::new(kernels);
    loaded.insert(ordinal, kernels.clone());
    Ok(kernels)
}

impl CudaExecutor {
    /// An executor of one PE on `gpu`, whose symmetric heap is `heap`; `sharers` PEs run on this GPU at the same time.
    ///
    /// # Errors
    /// [`CudaError`] if the module does not load.
    pub fn new(gpu: &Gpu, heap: Heap<DevicePool>, sharers: usize) -> Result<Self, CudaError> {
        Ok(Self {
            stream: gpu.stream()?,
            gpu: gpu.clone(),
            kernels: kernels(gpu)?,
            heap,
            sharers: sharers as u32,
            slots: HashMap::new(),
            scratch: HashMap::new(),
            returned: Vec::new(),
            image: None,
            timed: Vec::new(),
            spare: Vec::new(),
        })
    }

    fn event(&mut self) -> Result<Event, CudaError> {
        self.spare.pop().map_or_else(|| self.gpu.event(), Ok)
    }
}

/// A buffer of at least `bytes` under `key`.
fn buffer<'a, K: std::hash::Hash + Eq>(
    gpu: &Gpu,
    stream: &Stream,
    buffers: &'a mut HashMap<K, DeviceBuffer>,
    key: K,
    bytes: usize,
) -> Result<&'a DeviceBuffer, CudaError> {
    use std::collections::hash_map::Entry;
    Ok(match buffers.entry(key) {
        Entry::Occupied(entry) if entry.get().len() >= bytes => entry.into_mut(),
        Entry::Occupied(mut entry) => {
            // Kernels may still use the smaller one.
            stream.synchronize()?;
            entry.insert(gpu.alloc(bytes)?);
            entry.into_mut()
        }
        Entry::Vacant(entry) => entry.insert(gpu.alloc(bytes)?),
    })
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

impl KeptMemory for DeviceBuffer {
    fn address(&mut self) -> u64 {
        DeviceBuffer::address(self)
    }

    fn bytes(&self) -> usize {
        self.len()
    }
}

impl Executor for CudaExecutor {
    type Memory = DeviceBuffer;

    fn keep(&mut self, bytes: usize) -> Result<DeviceBuffer, ExecError> {
        // Layers are alike, so what one gave back is just what another asks for; nothing is allocated in the long run.
        if let Some(at) = self.returned.iter().position(|buffer| buffer.len() == bytes) {
            return Ok(self.returned.swap_remove(at));
        }
        // One comes, one goes: sizes that are not asked for any more do not pile up.
        self.returned.drain(..self.returned.len().min(1));
        Ok(self.gpu.alloc(bytes)?)
    }

    fn reuse(&mut self, memory: DeviceBuffer) {
        self.returned.push(memory);
    }

    fn input(&mut self, slot: Slot, tensor: &TensorView<'_>) -> Result<Param, ExecError> {
        let bytes = bytes_of(&tensor.data());
        let memory = buffer(&self.gpu, &self.stream, &mut self.slots, slot, bytes.len())?;
        memory.upload(&self.stream, 0, bytes)?;
        Ok(param(memory, tensor.data().len(), tensor.dtype()))
    }

    fn output(&mut self, slot: Slot, tensor: &mut Tensor) -> Result<Param, ExecError> {
        let bytes = tensor.data.bytes().len();
        let memory = buffer(&self.gpu, &self.stream, &mut self.slots, slot, bytes)?;
        // Whatever a kernel should fail to write must not look like a result.
        memory.fill_async(&self.stream, 0, bytes, 0xff)?;
        Ok(param(memory, tensor.data.data().len(), tensor.data.dtype()))
    }

    fn fetch(&mut self, slot: Slot, tensor: &mut Tensor) -> Result<(), ExecError> {
        let bytes = tensor.data.bytes_mut();
        if let Some(memory) = self.slots.get(&slot).filter(|_| !bytes.is_empty()) {
            memory.download(&self.stream, 0, bytes)?;
        }
        Ok(())
    }

    fn scratch(&mut self, which: Scratch, len: usize, dtype: Dtype) -> Result<Param, ExecError> {
        let memory = buffer(&self.gpu, &self.stream, &mut self.scratch, which, len * dtype.size())?;
        Ok(param(memory, len, dtype))
    }

    fn scratch_bytes(&self) -> usize {
        let image = self.image.as_ref().map_or(0, DeviceBuffer::len);
        image + self.scratch.values().chain(&self.returned).map(DeviceBuffer::len).sum::<usize>()
    }

    fn put_image(&mut self, image: &Image) -> Result<u64, ExecError> {
        let bytes = image.bytes();
        if self.image.as_ref().is_none_or(|device| device.len() < bytes.len()) {
            self.stream.synchronize()?;
            self.image = Some(self.gpu.alloc(bytes.len())?);
        }
        let device = self.image.as_ref().expect("just made");
        device.upload(&self.stream, 0, bytes)?;
        Ok(device.address())
    }

    fn get_image(&mut self, image: &mut Image) -> Result<(), ExecError> {
        if let Some(device) = &self.image {
            device.download(&self.stream, 0, image.bytes_mut())?;
            tracing::debug!("all launches so far have ended");
        }
        Ok(())
    }

    fn launch<K: Kernel>(&mut self, launch: &Launch<'_>, params: &K) -> Result<(), ExecError> {
        let (begin, end) = (self.event()?, self.event()?);
        let (sharers, threads) = (self.sharers, (launch.blocks.warpgroups * WARPGROUP) as u32);
        let shared_bytes = launch.blocks.shared_bytes as u32;
        let name = match launch.blocks.body {
            Body::Portable => K::device_entry(launch.op, launch.dtype),
            Body::Hopper => K::hopper_entry(launch.op, launch.blocks.warpgroups),
        };
        let function = &self.kernels[&name];
        let blocks = match launch.blocks.grid {
            Grid::Blocks(blocks) => blocks as u32,
            Grid::Resident => function.residency(threads, shared_bytes)?.share(sharers).max(1),
        };
        begin.record(&self.stream)?;
        if blocks > 0 {
            let shape = Shape { blocks, threads, shared_bytes };
            if launch.blocks.grid == Grid::Resident {
                function.check_resident(shape, sharers)?;
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

    fn take_times(&mut self) -> Result<Vec<Duration>, ExecError> {
        self.stream.synchronize()?;
        let mut times = Vec::with_capacity(self.timed.len());
        for (begin, end) in std::mem::take(&mut self.timed) {
            times.push(end.since(&begin)?);
            self.spare.extend([begin, end]);
        }
        Ok(times)
    }

    unsafe fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), ExecError> {
        // SAFETY: by contract; both lie in device memory that this GPU reaches.
        Ok(unsafe { self.stream.copy(to, from, bytes)? })
    }

    fn concurrency(&self) -> usize {
        self.gpu.properties().sms as usize
    }

    fn symmetric(&mut self, pe: &Pe, name: &str, bytes: usize) -> Result<SymmetricBytes, ExecError> {
        let object = self.heap.alloc::<u64>(name, bytes.div_ceil(8))?;
        let addresses = (0..pe.size()).map(|rank| object.address(rank).ok_or(ExecError::NotReached { rank }));
        let addresses = addresses.collect::<Result<_, _>>()?;
        Ok(SymmetricBytes { addresses, owner: Box::new(object) })
    }

    fn body(&self, sizes: &Sizes, operands: Dtype) -> Body {
        // DELTALINK_BODY=portable is for comparing the two.
        let portable = std::env::var_os("DELTALINK_BODY").is_some_and(|body| body == "portable");
        if kernels_gpu::hopper::fits(sizes, code(operands)) && !portable { Body::Hopper } else { Body::Portable }
    }

    fn heap_bytes(&self, _: &Pe) -> usize {
        self.heap.stats().in_use
    }

    fn checks(&self) -> bool {
        false
    }

    fn shares_device(&self) -> bool {
        self.sharers > 1
    }

    fn set_clock_origin(&mut self, _: Instant) {
        // Kernels stamp the device's own clock.
    }
}
