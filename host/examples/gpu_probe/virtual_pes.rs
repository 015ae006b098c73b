//! PEs as threads of this process: on GPU 0, and on all GPUs if there are several.

use deltalink::exec::cuda::{CudaError, Gpu};
use deltalink::heap::HeapError;
use deltalink::world::WorldError;
use deltalink::world::virtual_pes::{VirtualError, VirtualPe, run_virtual_pes};

use crate::{Checks, Outcome, ensure, options, ring};

/// Why a PE stops.
#[derive(Debug, thiserror::Error)]
enum Stop {
    #[error(transparent)]
    World(#[from] WorldError),
    #[error(transparent)]
    Virtual(#[from] VirtualError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Heap(#[from] HeapError),
    #[error("{0}")]
    Other(String),
}

pub fn check(checks: &mut Checks) {
    for size in [1, 2, 4, 8] {
        checks.note(&format!("{size} virtual PEs on one GPU"), on_gpus(size, 1));
    }
    match Gpu::count() {
        Ok(count) if count > 1 => checks.note(&format!("virtual PEs on {count} GPUs"), on_gpus(count, count)),
        Ok(_) => println!("skipping: virtual PEs on several GPUs (there is one)"),
        Err(error) => checks.note("count GPUs", Err(error.into())),
    }
}

fn on_gpus(size: usize, count: usize) -> Outcome {
    let gpus = (0..count).map(Gpu::open).collect::<Result<Vec<_>, _>>()?;
    let said = run_virtual_pes(size, &gpus, &options(), 1 << 20, body).map_err(|error| error.to_string())?;
    Ok(said.join("; "))
}

fn body(virtual_pe: &VirtualPe<'_>) -> Result<String, Stop> {
    let VirtualPe { pe, gpu, heap, sharers } = virtual_pe;
    let stream = gpu.stream()?;
    let object = heap.alloc::<u32>("values", 1000)?;
    let stats = heap.stats();
    let mut values = vec![1_u32; 1000];
    object.download(&stream, 0, &mut values)?;
    let wrong = |text: &str| Stop::Other(format!("PE {}: {text}", pe.rank()));
    if values != vec![0; 1000] || stats.live != 1 {
        return Err(wrong("a new object is not zero"));
    }
    object.upload(&stream, 0, &vec![pe.rank() as u32; 1000])?;
    pe.barrier("written")?;
    let next = (pe.rank() + 1) % pe.size();
    if next != pe.rank() {
        // SAFETY: each PE reads the first half of its neighbour's copy and writes the second half of its own.
        let direct = unsafe { object.copy_from_peer(&stream, next, 0, 500, 500)? };
        object.download(&stream, 0, &mut values)?;
        if !direct || values[499] != pe.rank() as u32 || values[500] != next as u32 {
            return Err(wrong("the neighbour's values did not come"));
        }
    }
    pe.barrier("read")?;
    let outcome = ring::run(pe, gpu, heap, *sharers);
    let said = outcome.map_err(|error| wrong(&error.to_string()))?;
    ensure(*sharers > 0, "no PE on this GPU").map_err(|error| wrong(&error.to_string()))?;
    Ok(format!("PE {}: {said}", pe.rank()))
}
