//! Loads, stores and asynchronous copies of the emulation.

mod common;

use std::cell::UnsafeCell;

use common::{at, results};
use cuda_std::{ptx, shared, thread};

/// Global memory, aligned as a GPU's.
#[repr(align(16))]
struct Global<const N: usize>(UnsafeCell<[u32; N]>);

impl<const N: usize> Global<N> {
    fn new(of: impl Fn(usize) -> u32) -> Self {
        Self(UnsafeCell::new(std::array::from_fn(of)))
    }

    fn address(&self) -> *mut u32 {
        self.0.get().cast()
    }
}

#[test]
fn vectors_go_through_shared_and_global_memory() {
    let global = Global::<256>::new(|i| i as u32);
    let from = global.address();
    // SAFETY: every thread has 16 bytes of its own of either memory.
    let found = results(32, |t| unsafe {
        let place = from.wrapping_add(4 * t as usize);
        let [a, b, c, d] = ptx::ld_global_v4_u32(place);
        ptx::st_shared_v4_u32(at(16 * t), a, b, c, d);
        let [x, y] = ptx::ld_shared_v2_u32(at(16 * t + 8));
        ptx::st_shared_u64(at(16 * t), 0x1_0000_0002);
        ptx::st_shared_v2_f32(at(16 * t + 8), 1.5, -2.5);
        let wide = ptx::ld_shared_u64(at(16 * t));
        let numbers = ptx::ld_shared_v4_f32(at(16 * t));
        let out = place.wrapping_add(128);
        ptx::st_global_v2_f32(out.cast(), numbers[2], numbers[3]);
        ptx::st_global_f32_if(out.wrapping_add(2).cast(), 9.0, t % 2);
        ptx::st_global_b16(out.wrapping_add(3).cast(), 77);
        let skipped = ptx::ld_global_nc_u32_if(core::ptr::null(), 0);
        let taken = ptx::ld_global_nc_v2_u32_if(place, 1);
        let generic = ptx::cvta_shared_u64(at(16 * t).into()) as *const u64;
        ([x, y], wide, numbers[3], skipped, taken, generic.read())
    });
    for (t, found) in found.into_iter().enumerate() {
        let first = 4 * t as u32;
        let wide = 0x1_0000_0002;
        assert_eq!(found, ([first + 2, first + 3], wide, -2.5, 0, [first, first + 1], wide));
    }
    // SAFETY: the kernel has ended.
    let memory = unsafe { &*global.0.get() };
    assert_eq!(memory[128..132], [1.5f32.to_bits(), (-2.5f32).to_bits(), 130, 77]);
    assert_eq!(memory[134], 9f32.to_bits());
}

#[test]
fn small_copies_arrive_when_they_are_waited_for() {
    let global = Global::<256>::new(|i| 100 + i as u32);
    let from = global.address() as *const u8;
    // SAFETY: 16 bytes of each memory for each thread; waits before reads.
    let found = results(32, |t| unsafe {
        let source = from.wrapping_add(16 * t as usize);
        ptx::cp_async_cg_16(at(64 * t), source);
        ptx::cp_async_commit_group();
        ptx::cp_async_cg_16_zfill(at(64 * t + 16), source.wrapping_add(512), 8);
        ptx::cp_async_cg_16_zfill(at(64 * t + 32), core::ptr::null(), 0);
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group::<1>();
        let first = ptx::ld_shared_v4_u32(at(64 * t));
        ptx::cp_async_wait_all();
        (first, ptx::ld_shared_v4_u32(at(64 * t + 16)), ptx::ld_shared_v4_u32(at(64 * t + 32)))
    });
    for (t, found) in found.into_iter().enumerate() {
        let a = 100 + 4 * t as u32;
        assert_eq!(found, ([a, a + 1, a + 2, a + 3], [a + 128, a + 129, 0, 0], [0; 4]));
    }
}

#[test]
fn an_mbarrier_counts_arrivals_and_bytes() {
    let global = Global::<256>::new(|i| i as u32);
    let from = global.address() as *const u8;
    // SAFETY: one thread makes the barrier and the copies; everybody waits before reading.
    let found = results(64, |t| unsafe {
        let barrier = at(0);
        if t == 0 {
            ptx::mbarrier_init(barrier, 2);
            ptx::fence_mbarrier_init();
        }
        thread::sync_threads();
        let mut sums = [0; 3];
        for (round, sum) in sums.iter_mut().enumerate() {
            let source = from.wrapping_add(256 * round);
            if t == 0 {
                ptx::mbarrier_expect_tx(barrier, 128);
                ptx::cp_async_bulk_shared_global(at(1024), source, 128, barrier);
                ptx::mbarrier_arrive_expect_tx(barrier, 128);
                ptx::cp_async_bulk_shared_global(at(1152), source.wrapping_add(128), 128, barrier);
            }
            ptx::mbarrier_arrive_if(barrier, (t == 40) as u32);
            while !ptx::mbarrier_try_wait_parity(barrier, round as u32 % 2) {}
            *sum = ptx::ld_shared_u32(at(1024 + 4 * t));
            // Before the next copies overwrite what was read.
            thread::sync_threads();
        }
        let later = ptx::mbarrier_test_wait_parity(barrier, 0);
        thread::sync_threads();
        if t == 0 {
            ptx::mbarrier_inval(barrier);
            ptx::st_shared_u32(barrier, 5);
        }
        (sums, later)
    });
    for (t, found) in found.into_iter().enumerate() {
        assert_eq!(found, ([t as u32, 64 + t as u32, 128 + t as u32], true));
    }
}

#[test]
fn arrivals_of_small_copies_come_with_them() {
    let global = Global::<128>::new(|i| i as u32);
    let from = global.address() as *const u8;
    // SAFETY: as in the tests above.
    let found = results(64, |t| unsafe {
        let barrier = at(0);
        if t == 0 {
            ptx::mbarrier_init(barrier, 32);
        }
        thread::sync_threads();
        if t < 32 {
            ptx::cp_async_cg_16(at(1024 + 16 * t), from.wrapping_add(16 * t as usize));
            ptx::cp_async_mbarrier_arrive_noinc(barrier);
        }
        while !ptx::mbarrier_try_wait_parity(barrier, 0) {}
        ptx::ld_shared_u32(at(1024 + 4 * t))
    });
    assert_eq!(found, (0..64).collect::<Vec<u32>>());
}

#[test]
fn bulk_stores_leave_before_their_wait_ends() {
    let global = Global::<256>::new(|_| 0);
    let to = global.address() as *mut u8;
    // SAFETY: stores, fence and barrier before the copy; a wait before the source is written again.
    results(32, |t| unsafe {
        ptx::st_shared_u32(at(4 * t), 7 + t);
        ptx::fence_proxy_async_shared();
        thread::sync_threads();
        if t == 0 {
            ptx::cp_async_bulk_global_shared(to, at(0), 128);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read::<0>();
        }
        thread::sync_threads();
        ptx::st_shared_u32(at(4 * t), 0);
        if t == 0 {
            ptx::cp_async_bulk_wait_group::<0>();
        }
    });
    // SAFETY: the kernel has ended.
    let memory = unsafe { &*global.0.get() };
    assert_eq!(memory[..33], std::array::from_fn::<u32, 33, _>(|i| if i < 32 { 7 + i as u32 } else { 0 }));
}

#[test]
fn dynamic_shared_memory_is_aligned_for_panels() {
    assert_eq!(results(32, |_| shared::dynamic())[0] % 1024, 0);
}

#[test]
fn clocks_go_on_and_registers_move() {
    // SAFETY: by whole warps.
    let found = results(128, |_| unsafe {
        ptx::setmaxnreg_dec::<40>();
        let start = ptx::globaltimer();
        ptx::nanosleep(10);
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
        let later = ptx::clock64() >= start;
        ptx::setmaxnreg_inc::<240>();
        (later, ptx::smid(), ptx::activemask() >> ptx::laneid() & 1)
    });
    assert!(found.iter().all(|found| *found == (true, 0, 1)));
}
