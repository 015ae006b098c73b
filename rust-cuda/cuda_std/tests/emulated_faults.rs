//! Small kernels that break a rule each, and what the emulation says about them: threads that do not come together, addresses,
//! and accesses that nothing orders.

mod common;

use common::{Global, SHARED, at, fault, run_in};
use cuda_std::emulated::{FaultKind, Schedule};
use cuda_std::{ptx, thread, warp};

#[test]
fn a_fault_names_thread_and_instruction() {
    // SAFETY: the address is wrong, which is what the emulation finds.
    let fault = fault(64, |t| unsafe {
        if t == 37 {
            ptx::st_shared_f32(at(2), 0.0);
        }
    });
    assert_eq!((fault.thread, fault.block), (Some(37), 0));
    let text = fault.to_string();
    assert!(text.starts_with("kernel small, block 0, thread 37 (warp 1, lane 5), st.shared.f32 at "), "{text}");
    assert!(text.contains("emulated_faults.rs:") && text.ends_with("is not a multiple of 4"), "{text}");
}

#[test]
fn threads_that_all_wait() {
    // SAFETY: the barrier never completes, which is found.
    let found = fault(128, |t| unsafe {
        if t < 64 {
            ptx::bar_sync(1, 128);
        } else {
            ptx::bar_sync(2, 128);
        }
    });
    let FaultKind::Deadlock { waits } = &found.kind else { panic!("{found}") };
    assert!(waits.contains("threads 0 to 63 wait in bar.sync") && waits.contains("threads 64 to 127"), "{waits}");

    let found = fault(64, |t| {
        if t >= 32 {
            thread::sync_threads();
        }
    });
    let FaultKind::Deadlock { waits } = &found.kind else { panic!("{found}") };
    assert!(waits.contains("threads 0 to 31 have ended") && waits.contains("threads 32 to 63"), "{waits}");

    // SAFETY: nobody arrives, which is found.
    let found = fault(32, |t| unsafe {
        if t == 0 {
            ptx::mbarrier_init(at(0), 1);
        }
        warp::sync();
        while !ptx::mbarrier_try_wait_parity(at(0), 0) {}
    });
    assert!(matches!(found.kind, FaultKind::Deadlock { .. }), "{found}");
}

#[test]
#[allow(clippy::if_same_then_else)] // that it stands at two places is the point
fn threads_of_one_collective_at_different_places() {
    // SAFETY: the lanes diverge, which is found; so below.
    let found = fault(32, |t| unsafe {
        if t < 16 {
            warp::shuffle_xor(t, 1);
        } else {
            warp::shuffle_xor(t, 1);
        }
    });
    assert!(matches!(found.kind, FaultKind::Divergent { .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |t| unsafe {
        if t == 0 {
            ptx::bar_sync_id::<1, 32>();
        } else {
            ptx::bar_sync_id::<1, 32>();
        }
    });
    assert!(matches!(found.kind, FaultKind::Divergent { .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |t| unsafe { if t < 8 { ptx::setmaxnreg_dec::<24>() } else { ptx::setmaxnreg_dec::<32>() } });
    assert!(matches!(found.kind, FaultKind::Divergent { .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |_| unsafe { ptx::bar_warp_sync(0xffff) });
    assert!(matches!(found.kind, FaultKind::NotInMask { mask: 0xffff, .. }), "{found}");
    // SAFETY: as above.
    let found = fault(96, |t| unsafe { ptx::bar_sync(1, if t < 32 { 64 } else { 96 }) });
    assert!(matches!(found.kind, FaultKind::BarrierThreads { id: 1, .. }), "{found}");
    // SAFETY: as above.
    let found = fault(64, |_| unsafe { ptx::bar_sync(1, 48) });
    assert!(matches!(found.kind, FaultKind::BarrierShape { threads: 48, .. }), "{found}");
}

#[test]
fn addresses_that_are_none() {
    // SAFETY: the addresses are wrong, which is found; so below.
    let found = fault(32, |_| _ = unsafe { ptx::ld_shared_u32(at(SHARED)) });
    assert!(matches!(found.kind, FaultKind::Bounds { bytes: 4, .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |_| _ = unsafe { ptx::ld_shared_u32(512) });
    assert!(matches!(found.kind, FaultKind::Bounds { address: 512, .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |_| _ = unsafe { ptx::ld_shared_v4_f32(at(8)) });
    assert!(matches!(found.kind, FaultKind::Misaligned { align: 16, .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |_| _ = unsafe { ptx::ldmatrix_x1(at(8)) });
    assert!(matches!(found.kind, FaultKind::Misaligned { align: 16, .. }), "{found}");
    // SAFETY: as above.
    let found = fault(32, |_| _ = unsafe { ptx::ld_global_u32(core::ptr::null()) });
    assert_eq!(found.kind, FaultKind::Null);
    let global = Global::new();
    // SAFETY: as above.
    let found = fault(32, |_| _ = unsafe { ptx::ld_global_v4_u32(global.address().wrapping_add(4).cast()) });
    assert!(matches!(found.kind, FaultKind::Misaligned { align: 16, .. }), "{found}");
}

#[test]
fn accesses_that_nothing_orders() {
    // SAFETY: the race is what is found; so below.
    let found = fault(64, |t| unsafe {
        ptx::st_shared_u32(at(4 * t), t);
        _ = ptx::ld_shared_u32(at(4 * (t ^ 32)));
    });
    assert!(matches!(found.kind, FaultKind::Race { .. }), "{found}");
    // Written before others have read: a barrier is missing at the end of the loop.
    // SAFETY: as above.
    let found = fault(64, |t| unsafe {
        for round in 0..2 {
            ptx::st_shared_u32(at(4 * t), t + round);
            thread::sync_threads();
            _ = ptx::ld_shared_u32(at(4 * (t ^ 32)));
        }
    });
    assert!(matches!(found.kind, FaultKind::Race { .. }), "{found}");
    // A barrier of another warp orders nothing here.
    // SAFETY: as above.
    let found = fault(64, |t| unsafe {
        ptx::st_shared_u32(at(4 * t), t);
        warp::sync();
        _ = ptx::ld_shared_u32(at(4 * (t ^ 32)));
    });
    assert!(matches!(found.kind, FaultKind::Race { .. }), "{found}");
    // A shuffle is no barrier for memory.
    // SAFETY: as above.
    let found = fault(32, |t| unsafe {
        ptx::st_shared_u32(at(4 * t), t);
        warp::shuffle_xor(t, 1);
        _ = ptx::ld_shared_u32(at(4 * (t ^ 1)));
    });
    assert!(matches!(found.kind, FaultKind::Race { .. }), "{found}");
}

#[test]
fn panics_and_traps_end_the_kernel() {
    let found = fault(32, |t| assert!(t != 3, "three"));
    assert_eq!((found.thread, found.kind), (Some(3), FaultKind::Panic("three".into())));
    // SAFETY: no condition.
    let found = fault(32, |_| unsafe { ptx::trap() });
    assert_eq!(found.kind, FaultKind::Panic("trap".into()));
}

#[test]
fn a_kernel_that_keeps_the_rules_runs_after_one_that_did_not() {
    let broken = fault(64, |t| assert!(t < 40));
    assert_eq!(broken.thread, Some(40));
    assert_eq!(run_in(Schedule::default(), 64, &|_| thread::sync_threads()), Ok(()));
}
