//! NVSHMEM under a world of processes.

use std::time::Instant;

use deltalink::exec::cuda::{Gpu, choose_device};
use deltalink::world::Pe;
use deltalink::world::nvshmem::{Nvshmem, NvshmemError};

use crate::{Checks, Outcome, ensure, ring};

pub fn check(pe: Pe, checks: &mut Checks) {
    let name = format!("PE {} of {} with NVSHMEM", pe.rank(), pe.size());
    let outcome = pe.run(body).map_err(|error| error.to_string().into());
    checks.note(&name, outcome);
}

fn body(pe: &Pe) -> Outcome {
    let gpu = Gpu::open(choose_device(pe.local_rank(), Gpu::count()?))?;
    let start = Instant::now();
    let mut nvshmem = Nvshmem::start(pe, &gpu, 64 << 20)?;
    let started = start.elapsed();
    for warning in nvshmem.warnings() {
        println!("note    PE {}: {warning}", pe.rank());
    }
    let stream = gpu.stream()?;
    let reach: Vec<_> = (0..pe.size()).map(|rank| nvshmem.reach(rank)).collect();

    let object = nvshmem.heap().alloc::<u64>("values", 1 << 16)?;
    object.upload(&stream, 0, &vec![pe.rank() as u64 + 1; 1 << 15])?;
    pe.barrier("written")?;
    let next = (pe.rank() + 1) % pe.size();
    // SAFETY: each PE reads the first half of its neighbour's copy and writes the second half of its own.
    let direct = unsafe { object.copy_from_peer(&stream, next, 0, 1 << 15, 1 << 15)? };
    let mut values = vec![0_u64; 1 << 16];
    object.download(&stream, 0, &mut values)?;
    ensure(!direct || values[(1 << 16) - 1] == next as u64 + 1, "the neighbour's values did not come")?;
    pe.barrier("read")?;
    drop(object);

    let sharers = pe.size().div_ceil(Gpu::count()?);
    let rounds = ring::run(pe, &gpu, nvshmem.heap(), sharers)?;
    // A module without NVSHMEM's device library is refused.
    let refused = nvshmem.attach(&ring::load(&gpu)?, &stream);
    ensure(matches!(refused, Err(NvshmemError::NoDeviceLibrary { .. })), format!("{refused:?}"))?;
    let text = format!(
        "{} from {}, up in {started:?}, GPU {}, reach {reach:?}; {rounds}",
        nvshmem.version(),
        nvshmem.path().display(),
        gpu.properties().uuid_text()
    );
    nvshmem.close()?;
    Ok(text)
}
