//! What goes wrong without the builder's guards, or must be refused.

use cuda_std::{kernel, ptx, thread};

/// Two conditional parts with a barrier between: jump threading would put a copy of the barrier into each arm.
#[kernel]
pub unsafe fn barrier_between_arms(out: *mut u32, n: u32) {
    let t = thread::thread_idx_x();
    let first = t < n;
    let mut x = 1;
    if first {
        // SAFETY: assembled and looked at, never run.
        x = unsafe { ptx::ld_global_u32(out.add(t as usize)) };
    }
    thread::sync_threads();
    // SAFETY: assembled and looked at, never run.
    unsafe { if first { ptx::st_global_u32(out, x) } else { ptx::st_global_u32(out.add(1), x + 1) } }
}

/// The same with a barrier of assembly: LLVM's jump threading would do it.
#[kernel]
pub unsafe fn assembly_between_arms(out: *mut u32, n: u32) {
    let t = thread::thread_idx_x();
    let first = t < n;
    // SAFETY: assembled and looked at, never run.
    unsafe {
        if first {
            ptx::st_global_u32(out.add(2), n);
        }
        ptx::bar_sync(1, 128);
        if first { ptx::st_global_u32(out, n) } else { ptx::st_global_u32(out.add(1), n + 1) }
    }
}

/// Results of the whole warp that only some threads use: LLVM would sink the instructions to where they are used.
#[kernel]
pub unsafe fn used_in_one_arm(out: *mut u32, n: u32) {
    let t = thread::thread_idx_x();
    let mut d = [0f32; 4];
    // SAFETY: assembled and looked at, never run.
    unsafe {
        let shuffled = ptx::shfl_sync_bfly_b32(t, 1, 0x1f, cuda_std::warp::ALL);
        let a = ptx::ldmatrix_x4(cuda_std::shared::dynamic() + 16 * (t % 32));
        ptx::mma_m16n8k16_f32_bf16(&mut d, a, [n, n]);
        if t < n {
            ptx::st_global_u32(out, shuffled);
            ptx::st_global_f32(out.add(8) as *mut f32, d[0]);
        }
    }
}

/// An array that cannot stay in registers: indexed by a value of run time.
#[kernel]
pub unsafe fn local_array(out: *mut u32, n: u32) {
    let mut array = [0u32; 32];
    let mut i = 0;
    while i < n {
        array[(i * 7 % 32) as usize] += i;
        i += 1;
    }
    // SAFETY: assembled and looked at, never run.
    unsafe { ptx::st_global_u32(out, array[(n % 32) as usize]) }
}

/// Where values are written, and which.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Side {
    out: *mut f32,
    len: u64,
    value: f32,
}

/// Too large for LLVM to inline it more than once of its own accord.
fn write_squares(side: &Side, next: &mut u64) {
    macro_rules! sixteen {
        ($($i:literal)*) => {$(sixteen!(@ $i, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);)*};
        (@ $i:literal, $($j:literal)*) => {$(
            if *next < side.len {
                // SAFETY: assembled and looked at, never run.
                unsafe { ptx::st_global_f32(side.out.add(*next as usize), side.value * ($i * $j) as f32) };
                *next += 1;
            }
        )*};
    }
    sixteen!(0 1 2 3 4 5 6 7);
}

/// References to arguments, for a function and in a choice: calls would put the arguments into local memory.
#[kernel]
pub unsafe fn references_to_arguments(left: Side, right: Side) {
    let mut next = 0;
    write_squares(&left, &mut next);
    thread::sync_threads();
    write_squares(&right, &mut next);
    thread::sync_threads();
    write_squares(if thread::thread_idx_x() < 32 { &left } else { &right }, &mut next);
}

/// The accumulators are written between issue and wait: ptxas must serialise the products.
#[kernel(threads = 128)]
pub unsafe fn touched_accumulators(out: *mut f32, n: u32) {
    let b = ptx::wgmma_descriptor_128(cuda_std::shared::dynamic(), 16, 1024);
    let mut d = [0f32; 32];
    // SAFETY: assembled and looked at, never run.
    unsafe {
        ptx::wgmma_fence();
        ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(&mut d, b, b, 0);
        ptx::wgmma_commit_group();
        d[0] *= n as f32;
        ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(&mut d, b, b, 1);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group::<0>(&mut d);
        ptx::st_global_f32(out, d[0] + d[31]);
    }
}

/// More values than registers are allowed.
#[kernel(threads = 128, registers = 24)]
pub unsafe fn too_few_registers(out: *mut f32) {
    // SAFETY: assembled and looked at, never run.
    unsafe {
        let mut x = [0f32; 32];
        macro_rules! each {
            ($($i:literal)*) => {
                $(x[$i] = ptx::ld_global_f32(out.add($i));)*
                ptx::barrier0();
                $(ptx::st_global_f32(out.add(64 * $i), x[$i]);)*
            };
        }
        each!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
    }
}

/// An index that is checked.
#[kernel]
pub unsafe fn checked_index(out: *mut u32, n: u32) {
    let table = [1u32, 2, 3, 4];
    // SAFETY: assembled and looked at, never run.
    let slice: &[u32] = unsafe { core::slice::from_raw_parts(out, 4) };
    // SAFETY: assembled and looked at, never run.
    unsafe { ptx::st_global_u32(out, table[0] + slice[n as usize]) }
}

/// A read-modify-write whose ordering this target drops.
#[kernel]
pub unsafe fn ordered_update(word: *mut u64) {
    // SAFETY: assembled and looked at, never run.
    let word = unsafe { core::sync::atomic::AtomicU64::from_ptr(word) };
    word.fetch_add(1, core::sync::atomic::Ordering::AcqRel);
}

/// A call of something that nothing defines.
#[kernel]
pub unsafe fn undefined(out: *mut f32) {
    unsafe extern "C" {
        fn expf(x: f32) -> f32;
    }
    // SAFETY: assembled and looked at, never run.
    unsafe { ptx::st_global_f32(out, expf(ptx::ld_global_f32(out))) }
}
