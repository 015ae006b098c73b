//! Small kernels that break a rule each, and what the emulation says about them: copies, mbarriers and products under way.

mod common;

use common::{Global, PANEL, at, fault, fault_in, store_image};
use cuda_std::emulated::{FaultKind, Order, Schedule, Timing};
use cuda_std::{ptx, thread, warp};

const LAZY: Schedule = Schedule { timing: Timing::Lazy, order: Order::Ascending };

/// A bulk copy of 128 bytes into offset 1024, counted at offset 0, by thread 0.
///
/// # Safety
/// By all threads.
unsafe fn bring(global: &Global, t: u32, announced: u32) {
    // SAFETY: by contract.
    unsafe {
        if t == 0 {
            ptx::mbarrier_init(at(0), 1);
            ptx::mbarrier_arrive_expect_tx(at(0), announced);
            ptx::cp_async_bulk_shared_global(at(1024), global.address(), 128, at(0));
        }
        thread::sync_threads();
    }
}

#[test]
fn copies_that_nobody_has_waited_for() {
    let global = Global::new();
    // SAFETY: the wait is missing, which is found; so below.
    let found = fault(32, |t| unsafe {
        bring(&global, t, 128);
        _ = ptx::ld_shared_u32(at(1024 + 4 * t));
    });
    assert!(matches!(found.kind, FaultKind::CopyUnderWay { .. }), "{found}");
    // One thread has waited, and tells nobody.
    // SAFETY: as above.
    let found = fault(64, |t| unsafe {
        bring(&global, t, 128);
        if t == 0 {
            while !ptx::mbarrier_try_wait_parity(at(0), 0) {}
        }
        if t < 32 {
            warp::sync();
        } else {
            _ = ptx::ld_shared_u32(at(1024));
        }
    });
    assert!(matches!(found.kind, FaultKind::CopyUnderWay { .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |t| unsafe {
        ptx::cp_async_cg_16(at(16 * t), global.address());
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group::<1>();
        _ = ptx::ld_shared_u32(at(16 * t));
    });
    assert!(matches!(found.kind, FaultKind::CopyUnderWay { .. }), "{found}");
    // The wait of a thread is for its own copies.
    // SAFETY: as above.
    let found = fault(32, |t| unsafe {
        ptx::cp_async_cg_16(at(16 * t), global.address());
        ptx::cp_async_wait_all();
        _ = ptx::ld_shared_u32(at(16 * (t ^ 1)));
    });
    assert!(matches!(found.kind, FaultKind::CopyUnderWay { .. } | FaultKind::Race { .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |_| unsafe { ptx::cp_async_cg_16(at(0), global.address()) });
    assert!(matches!(found.kind, FaultKind::CopyUnderWay { .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |t| unsafe { ptx::cp_async_cg_16(at(16 * t), global.address()) });
    assert!(matches!(found.kind, FaultKind::EndedEarly { .. }), "{found}");
    // More was announced than is copied.
    // SAFETY: as above.
    let found = fault(32, |t| unsafe {
        bring(&global, t, 256);
        while !ptx::mbarrier_try_wait_parity(at(0), 0) {}
    });
    assert!(matches!(found.kind, FaultKind::Deadlock { .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |_| unsafe { ptx::cp_async_bulk_global_shared(global.address(), at(0), 24) });
    assert_eq!(found.kind, FaultKind::CopyBytes { bytes: 24 });
}

#[test]
fn bulk_stores_whose_source_changes() {
    let global = Global::new();
    // SAFETY: the source is overwritten too early, which is found; so below.
    let found = fault(32, |_| unsafe {
        ptx::st_shared_u32(at(512), 1);
        ptx::fence_proxy_async_shared();
        warp::sync();
        if thread::thread_idx_x() == 0 {
            ptx::cp_async_bulk_global_shared(global.address(), at(512), 128);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read::<1>();
            ptx::st_shared_u32(at(512), 2);
        }
    });
    assert!(matches!(found.kind, FaultKind::ReadUnderWay { .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |t| unsafe {
        if t == 0 {
            ptx::cp_async_bulk_global_shared(global.address(), at(512), 128);
            ptx::cp_async_bulk_commit_group();
        }
    });
    assert!(matches!(found.kind, FaultKind::EndedEarly { .. }), "{found}");
}

#[test]
fn ordinary_stores_with_no_proxy_fence() {
    let global = Global::new();
    // SAFETY: the fence is missing, which is found; so below.
    let found = fault(32, |t| unsafe {
        ptx::st_shared_u32(at(4 * t), t);
        thread::sync_threads();
        if t == 0 {
            ptx::cp_async_bulk_global_shared(global.address(), at(0), 128);
        }
    });
    assert!(matches!(found.kind, FaultKind::NoProxyFence { .. }), "{found}");
    // A fence before the stores is none.
    // SAFETY: as above.
    let found = fault(32, |t| unsafe {
        ptx::fence_proxy_async_shared();
        ptx::st_shared_u32(at(1024 + 4 * t), t);
        thread::sync_threads();
        bring(&global, t, 128);
    });
    assert!(matches!(found.kind, FaultKind::NoProxyFence { .. }), "{found}");
    // SAFETY: as above.
    let found = fault(128, |t| unsafe {
        store_image(at(0), 64, 64, |_, _| 0);
        store_image(at(PANEL), 64, 64, |_, _| 0);
        ptx::st_shared_u32(at(4 * t), 0);
        thread::sync_threads();
        product(&mut [0.0; 32]);
    });
    assert!(matches!(found.kind, FaultKind::NoProxyFence { .. }), "{found}");
}

#[test]
fn arrivals_and_lives_of_mbarriers() {
    // SAFETY: the counts are wrong, which is found; so below.
    let found = fault(32, |t| unsafe {
        if t == 0 {
            ptx::mbarrier_init(at(0), 2);
            for _ in 0..4 {
                ptx::mbarrier_arrive(at(0));
            }
        }
    });
    assert!(matches!(found.kind, FaultKind::Arrivals { phase: 1, count: 2, .. }), "{found}");
    // More than one phase takes while bytes are under way.
    // SAFETY: as above.
    let found = fault(32, |t| unsafe {
        if t == 0 {
            ptx::mbarrier_init(at(0), 1);
            ptx::mbarrier_arrive_expect_tx(at(0), 128);
            ptx::mbarrier_arrive(at(0));
        }
    });
    assert!(matches!(found.kind, FaultKind::Arrivals { phase: 0, count: 1, .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |_| unsafe { ptx::mbarrier_arrive(at(8)) });
    assert!(matches!(found.kind, FaultKind::NoBarrier { .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |t| unsafe {
        if t == 0 {
            ptx::mbarrier_init(at(8), 1);
            ptx::st_shared_u32(at(12), 0);
        }
    });
    assert!(matches!(found.kind, FaultKind::HoldsBarrier { .. }), "{found}");
}

#[test]
fn a_warp_that_comes_apart_before_a_barrier_of_the_block() {
    let kernel = |meet: bool| {
        // SAFETY: with `meet` every lane comes with its warp; without, that is what is found.
        move |t: u32| unsafe {
            if t == 0 {
                ptx::mbarrier_init(at(0), 1);
                ptx::mbarrier_arrive(at(0));
                while !ptx::mbarrier_try_wait_parity(at(0), 0) {}
            }
            if meet {
                warp::sync();
            }
            thread::sync_threads();
        }
    };
    let found = fault(64, kernel(false));
    assert!(matches!(found.kind, FaultKind::WarpApart { .. }), "{found}");
    common::results(64, kernel(true));
}

/// What lanes do after they have arrived together does not bring them apart before that.
#[test]
fn lanes_that_only_arrive_go_on_by_themselves() {
    // SAFETY: every lane arrives with its warp; the wait ends at once.
    common::results(64, |t| unsafe {
        if t == 0 {
            ptx::mbarrier_init(at(0), 1);
            ptx::mbarrier_arrive(at(0));
        }
        thread::sync_threads();
        if t < 32 {
            warp::sync();
            ptx::bar_arrive_id::<5, 64>();
            while !ptx::mbarrier_try_wait_parity(at(0), 0) {}
        } else {
            ptx::bar_sync_id::<5, 64>();
        }
    });
}

/// `d = a b` of the images at 0 and `PANEL`, under way.
///
/// # Safety
/// By the warpgroup.
unsafe fn product(d: &mut [f32; 32]) {
    let (a, b) = (ptx::wgmma_descriptor_128(at(0), 16, 1024), ptx::wgmma_descriptor_128(at(PANEL), 16, 1024));
    // SAFETY: by contract.
    unsafe {
        ptx::wgmma_fence();
        ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(d, a, b, 0);
        ptx::wgmma_commit_group();
    }
}

/// Images of zeros for [`product`].
///
/// # Safety
/// By the warpgroup.
unsafe fn operands() {
    // SAFETY: by contract.
    unsafe {
        store_image(at(0), 64, 64, |_, _| 0);
        store_image(at(PANEL), 64, 64, |_, _| 0);
    }
}

#[test]
fn registers_of_products_under_way() {
    // An accumulator that is read too early: by an instruction, or by arithmetic before one.
    // SAFETY: the wait is missing, which is found; so below.
    let found = fault_in(LAZY, 128, |_| unsafe {
        let mut d = [0.0; 32];
        operands();
        product(&mut d);
        _ = ptx::cvt_rn_bf16x2_f32(d[1], d[0]);
    });
    assert!(matches!(found, FaultKind::AccumulatorUnderWay { .. }), "{found}");
    // SAFETY: as above.
    let found = fault_in(LAZY, 128, |t| unsafe {
        let mut d = [0.0; 32];
        operands();
        product(&mut d);
        ptx::st_shared_f32(at(4 * PANEL + 4 * t), 2.0 * d[3] + 1.0);
    });
    assert!(matches!(found, FaultKind::AccumulatorUnderWay { .. }), "{found}");
    // Written, in whatever order of events.
    // SAFETY: as above.
    let found = fault(128, |_| unsafe {
        let mut d = [0.0; 32];
        operands();
        product(&mut d);
        d[5] = 1.0;
        ptx::wgmma_wait_group::<0>(&mut d);
    });
    assert_eq!(found.kind, FaultKind::AccumulatorWritten { register: 5 });
    // SAFETY: as above.
    let found = fault(128, |_| unsafe {
        let (mut d, mut other) = ([0.0; 32], [0.0; 32]);
        operands();
        product(&mut d);
        ptx::wgmma_wait_group::<0>(&mut other);
    });
    assert!(matches!(found.kind, FaultKind::AccumulatorNotCarried { .. }), "{found}");
    // Operand registers: not given to the wait, and changed before it.
    for carried in [false, true] {
        // SAFETY: as above.
        let found = fault(128, |t| unsafe {
            let (mut d, mut a) = ([0.0; 32], [t + 1, t + 2, t + 3, t + 4]);
            operands();
            ptx::wgmma_fence();
            let b = ptx::wgmma_descriptor_128(at(PANEL), 16, 1024);
            ptx::wgmma_m64n64k16_bf16_rs::<1, 1, 0>(&mut d, a, b, 0);
            ptx::wgmma_commit_group();
            if carried {
                a[2] = 0;
                ptx::wgmma_wait_group::<0>((&mut d, &mut a));
            } else {
                ptx::wgmma_wait_group::<0>(&mut d);
            }
        });
        assert!(matches!(found.kind, FaultKind::OperandNotCarried { .. }), "{found}");
    }
}

#[test]
fn products_without_fence_group_wait_or_a_common_descriptor() {
    // SAFETY: what is missing is found; so below.
    let found = fault(128, |_| unsafe {
        let mut d = [0.0; 32];
        operands();
        let a = ptx::wgmma_descriptor_128(at(0), 16, 1024);
        ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(&mut d, a, a, 0);
    });
    assert_eq!(found.kind, FaultKind::NoFence);
    // SAFETY: as above.
    let found = fault(128, |_| unsafe {
        let mut d = [0.0; 32];
        operands();
        let a = ptx::wgmma_descriptor_128(at(0), 16, 1024);
        ptx::wgmma_fence();
        ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(&mut d, a, a, 0);
        ptx::wgmma_wait_group::<0>(&mut d);
    });
    assert_eq!(found.kind, FaultKind::NotCommitted);
    // SAFETY: as above.
    let found = fault(128, |_| unsafe {
        operands();
        product(&mut [0.0; 32]);
    });
    assert!(matches!(found.kind, FaultKind::EndedEarly { .. }), "{found}");
    // SAFETY: as above.
    let found = fault(128, |t| unsafe {
        operands();
        ptx::wgmma_fence();
        let a = ptx::wgmma_descriptor_128(at(1024 * (t / 32)), 16, 1024);
        ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(&mut [0.0; 32], a, a, 0);
    });
    assert!(matches!(found.kind, FaultKind::NotUniform { .. }), "{found}");
    for (address, swizzle) in [(at(128), 1), (at(0), 2)] {
        // SAFETY: as above.
        let found = fault(128, |_| unsafe {
            operands();
            ptx::wgmma_fence();
            let a = ptx::wgmma_descriptor_128(address, 16, 1024) & !(3 << 62) | swizzle << 62;
            ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(&mut [0.0; 32], a, a, 0);
        });
        assert!(matches!(found.kind, FaultKind::Descriptor { .. }), "{found}");
    }
    // A warpgroup is 128 threads at one place.
    // SAFETY: as above.
    let found = fault(128, |t| unsafe {
        if t < 96 {
            ptx::wgmma_fence();
        }
    });
    assert!(matches!(found.kind, FaultKind::Deadlock { .. }), "{found}");
}

#[test]
fn operands_that_change_under_a_product() {
    // SAFETY: the store comes too early, which is found.
    let found = fault(128, |t| unsafe {
        let mut d = [0.0; 32];
        operands();
        product(&mut d);
        if t == 0 {
            ptx::st_shared_u32(at(PANEL), 1);
        }
        ptx::wgmma_wait_group::<0>(&mut d);
    });
    assert!(matches!(found.kind, FaultKind::ReadUnderWay { .. }), "{found}");
    // Another warpgroup, which does not know that the product is done.
    // SAFETY: as above.
    let found = fault_in(LAZY, 256, |t| unsafe {
        let mut d = [0.0; 32];
        if t < 128 {
            ptx::wgmma_fence();
            let a = ptx::wgmma_descriptor_128(at(0), 16, 1024);
            ptx::wgmma_m64n64k16_bf16_ss::<1, 1, 0, 0>(&mut d, a, a, 0);
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group::<0>(&mut d);
        } else {
            ptx::nanosleep(1);
            ptx::nanosleep(1);
            ptx::nanosleep(1);
            ptx::nanosleep(1);
            ptx::st_shared_u32(at(0), 1);
        }
    });
    assert!(matches!(found, FaultKind::ReadUnderWay { .. }), "{found}");
}
