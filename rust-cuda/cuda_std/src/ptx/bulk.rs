//! Asynchronous copies: 16 bytes by every thread (`cp.async`), or any multiple of 16 by one thread (bulk).

use super::{asm, table::instructions};

instructions! {
    /// Copies 16 bytes from global to shared memory, past the L1 cache.
    opaque cp_async_cg_16(shared: reg32 u32, global: reg64 *const u8) = "cp.async.cg.shared.global [{shared}], [{global}], 16;";
    /// As [`cp_async_cg_16`], of `bytes` bytes (at most 16); the rest is filled with zeros.
    opaque cp_async_cg_16_zfill(shared: reg32 u32, global: reg64 *const u8, bytes: reg32 u32) =
        "cp.async.cg.shared.global [{shared}], [{global}], 16, {bytes};";
    /// Makes a group of this thread's `cp.async` since the last one.
    opaque cp_async_commit_group() = "cp.async.commit_group;";
    /// Waits for all `cp.async` of this thread.
    opaque cp_async_wait_all() = "cp.async.wait_all;";

    /// Copies `bytes` (a multiple of 16) from global to shared memory; counts them at `barrier`. Addresses are
    /// multiples of 16.
    opaque cp_async_bulk_shared_global(shared: reg32 u32, global: reg64 *const u8, bytes: reg32 u32, barrier: reg32 u32) =
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{shared}], [{global}], {bytes}, [{barrier}];";
    /// Copies `bytes` (a multiple of 16) from shared to global memory, as part of this thread's bulk group.
    opaque cp_async_bulk_global_shared(global: reg64 *mut u8, shared: reg32 u32, bytes: reg32 u32) =
        "cp.async.bulk.global.shared::cta.bulk_group [{global}], [{shared}], {bytes};";
    /// Makes a group of this thread's bulk stores since the last one.
    opaque cp_async_bulk_commit_group() = "cp.async.bulk.commit_group;";
}

/// Waits until at most `N` of this thread's `cp.async` groups are under way.
#[inline(always)]
pub unsafe fn cp_async_wait_group<const N: u32>() {
    // SAFETY: the caller's, see the module.
    unsafe { asm!("cp.async.wait_group {n};", n = const N, options(nostack)) }
}

/// Waits until at most `N` of this thread's bulk groups are under way: the others are written and visible to this
/// thread.
#[inline(always)]
pub unsafe fn cp_async_bulk_wait_group<const N: u32>() {
    // SAFETY: the caller's, see the module.
    unsafe { asm!("cp.async.bulk.wait_group {n};", n = const N, options(nostack)) }
}

/// Waits until at most `N` of this thread's bulk groups still read: the shared memory of the others may be reused.
#[inline(always)]
pub unsafe fn cp_async_bulk_wait_group_read<const N: u32>() {
    // SAFETY: the caller's, see the module.
    unsafe { asm!("cp.async.bulk.wait_group.read {n};", n = const N, options(nostack)) }
}
