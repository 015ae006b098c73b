//! Special registers, clocks, and instructions that steer a thread or a kernel.

use super::{asm, table::instructions};

instructions! {
    /// Index of the thread in its warp.
    pure laneid() -> (lane: reg32 u32) = "mov.u32 {lane}, %laneid;";
    /// The multiprocessor that the block runs on.
    pure smid() -> (sm: reg32 u32) = "mov.u32 {sm}, %smid;";
    /// Address of the dynamic shared memory of the block, in the shared window.
    pure dynamic_shared_address() -> (address: reg32 u32) = "mov.u32 {address}, cuda_std_dynamic_shared;";
    /// Clock of the multiprocessor, in cycles.
    opaque clock64() -> (cycles: reg64 u64) = "mov.u64 {cycles}, %clock64;";
    /// Clock of the device, in nanoseconds, the same for all multiprocessors. Its steps may be as long as 1 us.
    opaque globaltimer() -> (ns: reg64 u64) = "mov.u64 {ns}, %globaltimer;";
    /// Suspends the thread for about `ns` nanoseconds, at most twice as long, at most 1 ms.
    opaque nanosleep(ns: reg32 u32) = "nanosleep.u32 {ns};";
    /// Ends the grid with an error.
    opaque trap() = "trap;";
    /// Threads of the warp that run this instruction together.
    opaque activemask() -> (mask: reg32 u32) = "activemask.b32 {mask};";
    /// True in exactly one of the threads of `mask`, the same one each time.
    opaque elect_sync(mask: reg32 u32) -> flag =
        "{{ .reg .pred p; elect.sync _|p, {mask}; selp.b32 {flag}, 1, 0, p; }}";
    /// Waits until the grids that this one depends on have finished, or have all called
    /// [`griddepcontrol_launch_dependents`], and their writes are visible.
    opaque griddepcontrol_wait() = "griddepcontrol.wait;";
    /// Lets dependent grids start.
    opaque griddepcontrol_launch_dependents() = "griddepcontrol.launch_dependents;";
}

// The size comes from the launch. 1024 bytes of alignment is what 128-byte swizzled tiles need.
core::arch::global_asm!(".extern .shared .align 1024 .b8 cuda_std_dynamic_shared[];");

/// Raises the registers of a thread to `N`, a multiple of 8 from 24 to 256; waits until they are free. By all warps
/// of a warpgroup; the kernel needs `threads` and `registers` (see [`crate::kernel`]), otherwise it is ignored.
#[inline(always)]
pub unsafe fn setmaxnreg_inc<const N: u32>() {
    // SAFETY: the caller's, see the module.
    unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {n};", n = const N, options(nostack)) }
}

/// Lowers the registers of a thread to `N`, a multiple of 8 from 24 to 256. By all warps of a warpgroup; see
/// [`setmaxnreg_inc`].
#[inline(always)]
pub unsafe fn setmaxnreg_dec<const N: u32>() {
    // SAFETY: the caller's, see the module.
    unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {n};", n = const N, options(nostack)) }
}
