//! A ring of puts with signals, over any heap in GPU memory.

use deltalink::exec::cuda::{CudaError, Gpu, Module, Shape};
use deltalink::heap::{DevicePool, Heap, Reach};
use deltalink::world::Pe;

use crate::kernels::{PTX, Ring};
use crate::{Outcome, ensure};

const BLOCKS: u32 = 4;
const ROUNDS: u64 = 1000;

/// Loads the module; before PEs start kernels that wait.
pub fn load(gpu: &Gpu) -> Result<Module, CudaError> {
    gpu.load("kernels.ptx", PTX.as_bytes())
}

/// Every PE puts into its right neighbour's copy and waits for its left neighbour's puts, a thousand times.
pub fn run(pe: &Pe, gpu: &Gpu, heap: &Heap<DevicePool>, sharers: usize) -> Outcome {
    let module = load(gpu)?;
    let (stream, ring) = (gpu.stream()?, module.function("ring")?);
    let right = (pe.rank() + 1) % pe.size();
    let left = (pe.rank() + pe.size() - 1) % pe.size();
    let words = heap.alloc::<u64>("ring", 2 * BLOCKS as usize)?;
    let Some(peer) = words.address(right) else {
        ensure(words.reach(right) == Reach::Put, "no address and yet direct")?;
        return Ok(format!("PE {right} is reached by puts only: nothing to do"));
    };
    let errors = gpu.host_buffer(8)?;
    let shape = Shape { blocks: BLOCKS, threads: 32, shared_bytes: 0 };
    ring.check_resident(shape, sharers as u32)?;
    let params = Ring {
        own: words.own_address(),
        peer,
        errors: errors.device_address(),
        rounds: ROUNDS,
        rank: pe.rank() as u64,
        left: left as u64,
        timeout_ns: 5_000_000_000,
    };
    let (start, end) = (gpu.event()?, gpu.event()?);
    pe.barrier("ready")?;
    start.record(&stream)?;
    // SAFETY: `ring` takes a `Ring`; all PEs hold the words until the barrier after it.
    unsafe { ring.launch(&stream, shape, &params)? };
    end.record(&stream)?;
    let ended = stream.synchronize();
    pe.barrier("done")?;
    ended?;
    let found = errors.read::<u64>(0);
    ensure(found == 0, format!("{found} errors (a million for each wait that ran out)"))?;
    let each = end.since(&start)? / ROUNDS as u32;
    Ok(format!("{ROUNDS} rounds of {BLOCKS} blocks, {each:?} each"))
}
