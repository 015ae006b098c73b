//! Special registers, clocks, and instructions that steer a thread or a kernel.

use crate::emulated::{FaultKind, Scope, Site, Status, WARP, meet, raise, suspend, with};

/// Index of the thread in its warp.
#[track_caller]
pub fn laneid() -> u32 {
    with(Site::here("%laneid"), |block| Ok(block.lane()))
}

/// The multiprocessor that the block runs on: every block has one of its own.
#[track_caller]
pub fn smid() -> u32 {
    with(Site::here("%smid"), |block| Ok(block.index))
}

/// Address of the dynamic shared memory of the block, in the shared window.
pub fn dynamic_shared_address() -> u32 {
    crate::emulated::SHARED_BASE
}

/// The generic address of a shared address. Accesses through it are not checked.
#[track_caller]
pub fn cvta_shared_u64(address: u64) -> u64 {
    with(Site::here("cvta.shared"), |block| Ok(block.memory.pointer(address) as u64))
}

/// Nanoseconds since the launch's origin. Other threads get a turn, so that a loop that looks at the clock ends.
#[track_caller]
fn clock(name: &'static str) -> u64 {
    let site = Site::here(name);
    suspend(site, Status::Polling);
    with(site, |block| Ok(block.origin.elapsed().as_nanos() as u64))
}

/// Clock of the multiprocessor.
#[track_caller]
pub unsafe fn clock64() -> u64 {
    clock("%clock64")
}

/// Clock of the device, in nanoseconds.
#[track_caller]
pub unsafe fn globaltimer() -> u64 {
    clock("%globaltimer")
}

/// Gives other threads a turn.
#[track_caller]
pub unsafe fn nanosleep(ns: u32) {
    let _ = ns; // time passes anyway
    suspend(Site::here("nanosleep"), Status::Polling);
}

/// Ends the grid with an error.
#[track_caller]
pub unsafe fn trap() {
    raise(Site::here("trap"), FaultKind::Panic("trap".into()))
}

/// Threads of the warp that run this instruction together: here those that have not ended.
#[track_caller]
pub unsafe fn activemask() -> u32 {
    with(Site::here("activemask"), |block| {
        let first = block.warp() * WARP;
        let lanes = block.threads[first..].iter().take(WARP).enumerate();
        Ok(lanes.fold(0, |mask, (lane, thread)| mask | u32::from(thread.status != Status::Done) << lane))
    })
}

/// True in exactly one of the threads of `mask`, the lowest.
#[track_caller]
pub unsafe fn elect_sync(mask: u32) -> bool {
    let mut elected = false;
    meet(Scope::Warp(mask), Site::here("elect.sync"), &mut elected, |_, all| {
        *all[0].1 = true;
        Ok(())
    });
    elected
}

/// Nothing: every launch starts when the one before has ended.
pub unsafe fn griddepcontrol_wait() {}

/// Nothing, as [`griddepcontrol_wait`].
pub unsafe fn griddepcontrol_launch_dependents() {}

#[track_caller]
fn registers(name: &'static str, count: u32) {
    let site = Site::here(name).with([count as i32, 0, 0, 0, 0]);
    if !count.is_multiple_of(8) || !(24..=256).contains(&count) {
        raise(site, FaultKind::Panic(format!("{count} registers: a multiple of 8 from 24 to 256 is needed")));
    }
    meet(Scope::Warp(u32::MAX), site, &mut (), |_, _| Ok(()));
}

/// Raises the registers of a thread to `N`: a meeting of the warp.
#[track_caller]
pub unsafe fn setmaxnreg_inc<const N: u32>() {
    registers("setmaxnreg.inc", N);
}

/// Lowers the registers of a thread to `N`: a meeting of the warp.
#[track_caller]
pub unsafe fn setmaxnreg_dec<const N: u32>() {
    registers("setmaxnreg.dec", N);
}
