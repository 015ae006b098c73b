//! Fences, and accesses that carry an ordering, of 64-bit words in global memory.
//!
//! rustc's `AtomicU64::fetch_add` loses its ordering on this target (rust-lang/rust#136480); these do not.

use super::{asm, table::instructions};

instructions! {
    /// Fence, acquire and release, among the block.
    opaque fence_acq_rel_cta() = "fence.acq_rel.cta;";
    /// Fence, acquire and release, among the device.
    opaque fence_acq_rel_gpu() = "fence.acq_rel.gpu;";
    /// Fence, acquire and release, among all devices and the host.
    opaque fence_acq_rel_sys() = "fence.acq_rel.sys;";
    /// Makes initialised mbarriers visible to the asynchronous proxy and the cluster.
    opaque fence_mbarrier_init() = "fence.mbarrier_init.release.cluster;";
    /// Orders ordinary accesses of this thread and those of the asynchronous proxy (bulk copies, wgmma operands),
    /// in all memory. After writing, before the barrier that lets others start the copy or product.
    opaque fence_proxy_async() = "fence.proxy.async;";
    /// As [`fence_proxy_async`], for shared memory only.
    opaque fence_proxy_async_shared() = "fence.proxy.async.shared::cta;";
    /// As [`fence_proxy_async`], for global memory only.
    opaque fence_proxy_async_global() = "fence.proxy.async.global;";

    /// Load, acquire, among the device.
    opaque ld_acquire_gpu_u64(word: reg64 *const u64) -> (value: reg64 u64) = "ld.acquire.gpu.global.u64 {value}, [{word}];";
    /// Load, acquire, among all devices and the host.
    opaque ld_acquire_sys_u64(word: reg64 *const u64) -> (value: reg64 u64) = "ld.acquire.sys.global.u64 {value}, [{word}];";
    /// Load, relaxed, among the device.
    opaque ld_relaxed_gpu_u64(word: reg64 *const u64) -> (value: reg64 u64) = "ld.relaxed.gpu.global.u64 {value}, [{word}];";
    /// Load, relaxed, among all devices and the host.
    opaque ld_relaxed_sys_u64(word: reg64 *const u64) -> (value: reg64 u64) = "ld.relaxed.sys.global.u64 {value}, [{word}];";
    /// Store, release, among the device.
    opaque st_release_gpu_u64(word: reg64 *mut u64, value: reg64 u64) = "st.release.gpu.global.u64 [{word}], {value};";
    /// Store, release, among all devices and the host.
    opaque st_release_sys_u64(word: reg64 *mut u64, value: reg64 u64) = "st.release.sys.global.u64 [{word}], {value};";
    /// Store, relaxed, among the device.
    opaque st_relaxed_gpu_u64(word: reg64 *mut u64, value: reg64 u64) = "st.relaxed.gpu.global.u64 [{word}], {value};";
    /// Store, relaxed, among all devices and the host.
    opaque st_relaxed_sys_u64(word: reg64 *mut u64, value: reg64 u64) = "st.relaxed.sys.global.u64 [{word}], {value};";

    /// Adds and returns the value before; relaxed, among the device.
    opaque atom_add_relaxed_gpu_u64(word: reg64 *mut u64, value: reg64 u64) -> (old: reg64 u64) =
        "atom.relaxed.gpu.global.add.u64 {old}, [{word}], {value};";
    /// Adds and returns the value before; acquire and release, among the device.
    opaque atom_add_acq_rel_gpu_u64(word: reg64 *mut u64, value: reg64 u64) -> (old: reg64 u64) =
        "atom.acq_rel.gpu.global.add.u64 {old}, [{word}], {value};";
    /// Adds and returns the value before; acquire and release, among all devices and the host.
    opaque atom_add_acq_rel_sys_u64(word: reg64 *mut u64, value: reg64 u64) -> (old: reg64 u64) =
        "atom.acq_rel.sys.global.add.u64 {old}, [{word}], {value};";
    /// Stores `new` where the word is `expected`, and returns the value before; relaxed, among the device.
    opaque atom_cas_relaxed_gpu_u64(word: reg64 *mut u64, expected: reg64 u64, new: reg64 u64) -> (old: reg64 u64) =
        "atom.relaxed.gpu.global.cas.b64 {old}, [{word}], {expected}, {new};";
    /// Adds; release, among all devices and the host.
    opaque red_release_sys_add_u64(word: reg64 *mut u64, value: reg64 u64) =
        "red.release.sys.global.add.u64 [{word}], {value};";
    /// Adds; relaxed, among the device.
    opaque red_relaxed_gpu_add_u64(word: reg64 *mut u64, value: reg64 u64) =
        "red.relaxed.gpu.global.add.u64 [{word}], {value};";
}
