//! Small kernels on the emulation.
#![allow(dead_code)] // not every test file uses all of it

use std::cell::{RefCell, UnsafeCell};
use std::time::Instant;

use cuda_std::emulated::{Emulator, Fault, FaultKind, Launch, Schedule};
use cuda_std::{ptx, thread};

/// Shared memory of the kernels here.
pub const SHARED: u32 = 64 * 1024;

/// Runs a block of `threads` threads.
pub fn run_in(schedule: Schedule, threads: u32, kernel: &dyn Fn(u32)) -> Result<(), Fault> {
    let launch = Launch {
        kernel: "small",
        grid: 1,
        threads,
        shared_bytes: SHARED,
        schedule,
        origin: Instant::now(),
        idle: &|| (),
    };
    Emulator::new().run(&launch, 0, &|| kernel(thread::thread_idx_x()))
}

/// Runs a block in every order of events; what each thread returned must not depend on it.
pub fn results<T: Clone + PartialEq + std::fmt::Debug>(threads: u32, kernel: impl Fn(u32) -> T) -> Vec<T> {
    let mut all = Vec::new();
    for schedule in Schedule::ALL {
        let found = RefCell::new(vec![None; threads as usize]);
        let body = |t| {
            let result = kernel(t);
            found.borrow_mut()[t as usize] = Some(result);
        };
        run_in(schedule, threads, &body).unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
        all.push(found.into_inner().into_iter().map(|x| x.expect("every thread ends")).collect::<Vec<T>>());
    }
    assert!(all.iter().all(|other| *other == all[0]));
    all.swap_remove(0)
}

/// The fault of a kernel, which must be of the same kind in every order of events.
pub fn fault(threads: u32, kernel: impl Fn(u32)) -> Fault {
    let run = |schedule| run_in(schedule, threads, &kernel).expect_err("the kernel breaks a rule");
    let faults = Schedule::ALL.map(run);
    for other in &faults[1..] {
        let same = std::mem::discriminant(&other.kind) == std::mem::discriminant(&faults[0].kind);
        assert!(same, "{other} and {}", faults[0]);
    }
    let [first, ..] = faults;
    first
}

/// The fault of a kernel in one order of events.
pub fn fault_in(schedule: Schedule, threads: u32, kernel: impl Fn(u32)) -> FaultKind {
    run_in(schedule, threads, &kernel).expect_err("the kernel breaks a rule").kind
}

/// Shared address of byte `offset`.
pub fn at(offset: u32) -> u32 {
    cuda_std::shared::dynamic() + offset
}

/// Bytes of a panel of 64 rows.
pub const PANEL: u32 = 8192;

/// Address of an element of an image of 128-byte swizzled panels, `panel` bytes each.
pub fn in_image(base: u32, panel: u32, row: u32, column: u32) -> u32 {
    base + column / 64 * panel + row * 128 + (((column % 64 / 8) ^ (row % 8)) << 4) + column % 8 * 2
}

/// Stores an image by all threads of a block of 128, and makes it visible to products.
///
/// # Safety
/// By all threads.
pub unsafe fn store_image(base: u32, rows: u32, columns: u32, bits: impl Fn(u32, u32) -> u16) {
    let mut number = thread::thread_idx_x();
    while number < rows * columns {
        let (row, column) = (number / columns, number % columns);
        // SAFETY: inside the image, which the caller places in shared memory.
        unsafe { ptx::st_shared_b16(in_image(base, rows * 128, row, column), bits(row, column)) };
        number += 128;
    }
    // SAFETY: no condition.
    unsafe { ptx::fence_proxy_async_shared() };
    thread::sync_threads();
}

/// 4 KiB of global memory.
#[repr(align(16))]
pub struct Global(UnsafeCell<[u8; 4096]>);

impl Global {
    /// Ones.
    pub fn new() -> Self {
        Self(UnsafeCell::new([1; 4096]))
    }
    /// Its first byte.
    pub fn address(&self) -> *mut u8 {
        self.0.get().cast()
    }
}
