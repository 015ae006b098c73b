//! Memory barriers in shared memory.

use crate::emulated::{Site, test, with};

/// Makes a barrier that completes a phase after `count` arrivals.
#[track_caller]
pub unsafe fn mbarrier_init(barrier: u32, count: u32) {
    with(Site::here("mbarrier.init"), |block| block.mbarrier_init(barrier, count));
}

/// Ends a barrier's life.
#[track_caller]
pub unsafe fn mbarrier_inval(barrier: u32) {
    with(Site::here("mbarrier.inval"), |block| block.mbarrier_inval(barrier));
}

#[track_caller]
fn arrive(name: &'static str, barrier: u32, arrivals: u32, bytes: u32) {
    with(Site::here(name), |block| block.mbarrier_arrive(barrier, block.current, arrivals, bytes));
}

/// Arrives, with release.
#[track_caller]
pub unsafe fn mbarrier_arrive(barrier: u32) {
    arrive("mbarrier.arrive", barrier, 1, 0);
}

/// Arrives, with release, if `condition` is not 0.
#[track_caller]
pub unsafe fn mbarrier_arrive_if(barrier: u32, condition: u32) {
    if condition != 0 {
        arrive("mbarrier.arrive", barrier, 1, 0);
    }
}

/// Announces `bytes` more to be copied in this phase, then arrives.
#[track_caller]
pub unsafe fn mbarrier_arrive_expect_tx(barrier: u32, bytes: u32) {
    arrive("mbarrier.arrive.expect_tx", barrier, 1, bytes);
}

/// Announces `bytes` more to be copied in this phase, without arriving.
#[track_caller]
pub unsafe fn mbarrier_expect_tx(barrier: u32, bytes: u32) {
    arrive("mbarrier.expect_tx", barrier, 0, bytes);
}

/// Whether the phase of parity `parity` is complete, with acquire. Here it waits until it is.
#[track_caller]
pub unsafe fn mbarrier_try_wait_parity(barrier: u32, parity: u32) -> bool {
    test(Site::here("mbarrier.try_wait"), barrier, parity, true)
}

/// As [`mbarrier_try_wait_parity`], without waiting; other threads get a turn.
#[track_caller]
pub unsafe fn mbarrier_test_wait_parity(barrier: u32, parity: u32) -> bool {
    test(Site::here("mbarrier.test_wait"), barrier, parity, false)
}

/// Lets the barrier complete an arrival of this thread when its `cp.async` so far are done.
#[track_caller]
pub unsafe fn cp_async_mbarrier_arrive_noinc(barrier: u32) {
    with(Site::here("cp.async.mbarrier.arrive"), |block| block.copy_small_arrive(barrier));
}
