//! One process, one GPU: properties, memory, copies, launches, occupancy, memory that host and kernel share.

use std::process::Command;
use std::time::{Duration, Instant};

use deltalink::exec::cuda::{CudaError, Gpu, Module, Shape};

use crate::kernels::{Fill, Handshake, PTX, Wild};
use crate::{Checks, Outcome, ensure};

/// The word on the command line that makes a process do nothing but [`wild`].
pub const WILD: &str = "wild";

pub fn check(gpu: &Gpu, checks: &mut Checks) {
    checks.note("properties", properties(gpu));
    checks.note("peer matrix", Gpu::peer_matrix().map(|m| format!("{m:?}")).map_err(Into::into));
    checks.note("memory", memory(gpu));
    checks.note("out of memory", out_of_memory(gpu));
    let module = match gpu.load("kernels.ptx", PTX.as_bytes()) {
        Ok(module) => module,
        Err(error) => return checks.note("load PTX", Err(error.into())),
    };
    checks.note("kernels", attributes(&module));
    checks.note("launch, events", launch(gpu, &module));
    checks.note("refusals before a launch", refusals(gpu, &module));
    checks.note("occupancy, cooperative launch", occupancy(gpu, &module));
    checks.note("host-mapped memory during a kernel", handshake(gpu, &module));
    checks.note("a bad image", bad_image(gpu));
    checks.note("a kernel that faults, in another process", faulting_process());
}

fn properties(gpu: &Gpu) -> Outcome {
    let p = gpu.properties();
    let (free, total) = gpu.free_memory()?;
    Ok(format!("{p:?}, {}, {free} of {total} bytes free", p.uuid_text()))
}

fn memory(gpu: &Gpu) -> Outcome {
    let before = gpu.memory_use();
    let stream = gpu.stream()?;
    let values: Vec<u32> = (0..1 << 20).collect();
    let bytes = size_of_val(values.as_slice());
    let buffer = gpu.upload(&stream, &values)?;
    let mut back = vec![0_u32; values.len()];
    buffer.download(&stream, 0, bytemuck::cast_slice_mut(&mut back))?;
    ensure(back == values, "what came back differs")?;
    buffer.fill_async(&stream, 4, 8, 0xff)?;
    buffer.download(&stream, 0, bytemuck::cast_slice_mut(&mut back))?;
    ensure(back[..4] == [0, u32::MAX, u32::MAX, 3], format!("after memset: {:?}", &back[..4]))?;
    let copy = gpu.alloc(bytes)?;
    // SAFETY: two buffers of that size, of which nobody else knows.
    unsafe { stream.copy(copy.address(), buffer.address(), bytes)? };
    copy.download(&stream, 0, bytemuck::cast_slice_mut(&mut back))?;
    ensure(back[..4] == [0, u32::MAX, u32::MAX, 3], "the copy differs")?;
    let pinned = gpu.host_buffer(bytes)?;
    ensure(pinned.read::<u64>(bytes - 8) == 0, "pinned memory is not zero")?;
    let range = buffer.download(&stream, bytes - 1, &mut [0; 2]);
    ensure(matches!(range, Err(CudaError::Range { .. })), "a range past the end was copied")?;
    let during = gpu.memory_use();
    drop((buffer, copy));
    let after = gpu.memory_use();
    ensure((during.current - before.current, after.current) == (2 * bytes, before.current), "bytes are miscounted")?;
    Ok(format!("{bytes} bytes up and down, set, copied; peak {}", after.peak))
}

fn out_of_memory(gpu: &Gpu) -> Outcome {
    match gpu.alloc(1 << 50) {
        Err(error @ CudaError::OutOfMemory { .. }) => Ok(error.to_string()),
        other => Err(format!("{other:?}").into()),
    }
}

fn attributes(module: &Module) -> Outcome {
    let mut text = String::new();
    for name in ["fill", "handshake", "ring"] {
        text += &format!("{name} {:?} ", module.function(name)?.attributes());
    }
    let missing = module.function("no_such_kernel").map(drop);
    ensure(matches!(missing, Err(CudaError::Symbol { .. })), format!("{missing:?} for a kernel that is not there"))?;
    ensure(module.global("no_such_variable")?.is_none(), "a variable that is not there was found")?;
    Ok(text)
}

fn launch(gpu: &Gpu, module: &Module) -> Outcome {
    const LEN: usize = 1_000_003;
    let (stream, fill) = (gpu.stream()?, module.function("fill")?);
    let out = gpu.alloc(LEN * 4)?;
    let shape = Shape { blocks: LEN.div_ceil(256) as u32, threads: 256, shared_bytes: 0 };
    let params = Fill { out: out.address(), len: LEN as u64, value: 7, pad: 0 };
    let (start, end) = (gpu.event()?, gpu.event()?);
    start.record(&stream)?;
    // SAFETY: `fill` takes a `Fill`; `out` holds LEN values and lives past the synchronisation.
    unsafe { fill.launch(&stream, shape, &params)? };
    end.record(&stream)?;
    end.synchronize()?;
    let mut values = vec![0_u32; LEN];
    out.download(&stream, 0, bytemuck::cast_slice_mut(&mut values))?;
    let wrong = values.iter().enumerate().find(|&(i, &value)| value != i as u32 + 7);
    ensure(wrong.is_none(), format!("{wrong:?} is wrong"))?;
    ensure(stream.is_done()?, "a stream is busy after its synchronisation")?;
    Ok(format!("{LEN} values in {:?}", end.since(&start)?))
}

fn refusals(gpu: &Gpu, module: &Module) -> Outcome {
    let (stream, fill) = (gpu.stream()?, module.function("fill")?);
    let shape = Shape { blocks: 1, threads: 32, shared_bytes: 0 };
    // SAFETY: refused, or, where the driver cannot tell the size, a `Fill` of no elements.
    let other = unsafe { fill.launch(&stream, shape, &[0_u64; 4]) };
    let checked = match other {
        Err(CudaError::Params { .. }) => "sizes of parameters are checked",
        Ok(()) => "this driver cannot tell the sizes of parameters",
        Err(error) => return Err(error.into()),
    };
    let params = Fill { out: 0, len: 0, value: 0, pad: 0 };
    // SAFETY: a `Fill` of no elements.
    let threads = unsafe { fill.launch(&stream, Shape { threads: 2048, ..shape }, &params) };
    ensure(matches!(threads, Err(CudaError::Shape { .. })), format!("{threads:?} for 2048 threads"))?;
    let shared = fill.allow_shared(1 << 20);
    ensure(matches!(shared, Err(CudaError::Shared { .. })), format!("{shared:?} for 1 MiB of shared memory"))?;
    stream.synchronize()?;
    Ok(checked.into())
}

fn occupancy(gpu: &Gpu, module: &Module) -> Outcome {
    let (stream, fill) = (gpu.stream()?, module.function("fill")?);
    let shared_bytes = 200 << 10;
    fill.allow_shared(shared_bytes)?;
    let residency = fill.residency(128, shared_bytes)?;
    ensure(residency.per_sm == 1, format!("{residency:?} with 200 KiB of shared memory a block"))?;
    let fits = Shape { blocks: residency.blocks(), threads: 128, shared_bytes };
    let params = Fill { out: 0, len: 0, value: 0, pad: 0 };
    // SAFETY: a `Fill` of no elements.
    unsafe { fill.launch(&stream, fits, &params)? };
    stream.synchronize()?;
    match fill.check_resident(Shape { blocks: fits.blocks + 1, ..fits }, 1) {
        Err(error @ CudaError::NotResident { .. }) => Ok(format!("{residency:?}; {error}")),
        other => Err(format!("{other:?} for a block too many").into()),
    }
}

fn handshake(gpu: &Gpu, module: &Module) -> Outcome {
    let (stream, kernel) = (gpu.stream()?, module.function("handshake")?);
    let words = gpu.host_buffer(24)?;
    let params = Handshake { words: words.device_address(), timeout_ns: 2_000_000_000 };
    // SAFETY: `handshake` takes a `Handshake`; the words live past the synchronisation.
    unsafe { kernel.launch(&stream, Shape { blocks: 1, threads: 1, shared_bytes: 0 }, &params)? };
    let start = Instant::now();
    while words.read::<u64>(0) != 1 && start.elapsed() < Duration::from_secs(1) {
        std::hint::spin_loop();
    }
    let seen = start.elapsed();
    let running = !stream.is_done()?;
    words.write(8, 2_u64);
    stream.synchronize()?;
    ensure(words.read::<u64>(0) == 1, "the kernel's word was not seen")?;
    ensure(running, "the kernel had ended before the host answered")?;
    ensure(words.read::<u64>(16) == 3, format!("the kernel left {} instead of 3", words.read::<u64>(16)))?;
    Ok(format!("seen after {seen:?}, answered while it ran"))
}

fn bad_image(gpu: &Gpu) -> Outcome {
    match gpu.load("bad.ptx", b".version 8.0\n.target sm_90\nnonsense\n") {
        Err(error @ CudaError::Module { .. }) => Ok(error.to_string()),
        other => Err(format!("{other:?}").into()),
    }
}

/// A fault ends the context of its process, so another one has it.
fn faulting_process() -> Outcome {
    let output = Command::new(std::env::current_exe()?).arg(WILD).output()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure(output.status.success(), &text)?;
    Ok(text)
}

/// Lets a kernel fault, and says what the error says.
pub fn wild() -> Outcome {
    let gpu = Gpu::open(0)?;
    let module = gpu.load("kernels.ptx", PTX.as_bytes())?;
    let (stream, kernel) = (gpu.stream()?, module.function("wild")?);
    // SAFETY: `wild` takes a `Wild`; that it faults is the point, and this process does nothing after it.
    unsafe { kernel.launch(&stream, Shape { blocks: 1, threads: 1, shared_bytes: 0 }, &Wild { address: 64 })? };
    match stream.synchronize() {
        Err(error @ CudaError::Async { .. }) => Ok(error.to_string()),
        other => Err(format!("{other:?} after a wild store").into()),
    }
}
