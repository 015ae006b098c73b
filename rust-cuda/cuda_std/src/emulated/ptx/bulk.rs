//! Asynchronous copies.

use crate::emulated::{Site, with};

/// Copies 16 bytes from global to shared memory.
#[track_caller]
pub unsafe fn cp_async_cg_16(shared: u32, global: *const u8) {
    with(Site::here("cp.async"), |block| block.copy_small(shared, global, 16));
}

/// Copies `bytes` bytes (at most 16); the rest is filled with zeros.
#[track_caller]
pub unsafe fn cp_async_cg_16_zfill(shared: u32, global: *const u8, bytes: u32) {
    with(Site::here("cp.async"), |block| block.copy_small(shared, global, bytes));
}

/// Makes a group of this thread's `cp.async` since the last one.
#[track_caller]
pub unsafe fn cp_async_commit_group() {
    with(Site::here("cp.async.commit_group"), |block| {
        block.commit_small();
        Ok(())
    });
}

/// Waits for all `cp.async` of this thread.
#[track_caller]
pub unsafe fn cp_async_wait_all() {
    with(Site::here("cp.async.wait_all"), |block| block.wait_small(None));
}

/// Waits until at most `N` of this thread's `cp.async` groups are under way.
#[track_caller]
pub unsafe fn cp_async_wait_group<const N: u32>() {
    with(Site::here("cp.async.wait_group"), |block| block.wait_small(Some(N as usize)));
}

/// Copies `bytes` from global to shared memory; counts them at `barrier`.
#[track_caller]
pub unsafe fn cp_async_bulk_shared_global(shared: u32, global: *const u8, bytes: u32, barrier: u32) {
    with(Site::here("cp.async.bulk"), |block| block.copy_to_shared(shared, global, bytes, barrier));
}

/// Copies `bytes` from shared to global memory, as part of this thread's bulk group.
#[track_caller]
pub unsafe fn cp_async_bulk_global_shared(global: *mut u8, shared: u32, bytes: u32) {
    with(Site::here("cp.async.bulk"), |block| block.copy_to_global(global, shared, bytes));
}

/// Makes a group of this thread's bulk stores since the last one.
#[track_caller]
pub unsafe fn cp_async_bulk_commit_group() {
    with(Site::here("cp.async.bulk.commit_group"), |block| {
        block.commit_bulk();
        Ok(())
    });
}

#[track_caller]
fn wait(name: &'static str, groups: u32, only_read: bool) {
    with(Site::here(name), |block| {
        block.wait_bulk(groups as usize, only_read);
        Ok(())
    });
}

/// Waits until at most `N` of this thread's bulk groups are under way.
#[track_caller]
pub unsafe fn cp_async_bulk_wait_group<const N: u32>() {
    wait("cp.async.bulk.wait_group", N, false);
}

/// Waits until at most `N` of this thread's bulk groups still read.
#[track_caller]
pub unsafe fn cp_async_bulk_wait_group_read<const N: u32>() {
    wait("cp.async.bulk.wait_group.read", N, true);
}
