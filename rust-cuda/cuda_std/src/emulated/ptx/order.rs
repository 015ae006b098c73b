//! Fences, and accesses that carry an ordering, of 64-bit words in global memory.

use core::sync::atomic::{AtomicU64, Ordering, fence};

use crate::emulated::{FaultKind, Site, raise, with};

macro_rules! fences {
    ($($name:ident;)*) => {$(
        /// Fence, acquire and release, at the scope of the name.
        pub unsafe fn $name() {
            fence(Ordering::AcqRel);
        }
    )*};
}

fences! {
    fence_acq_rel_cta;
    fence_acq_rel_gpu;
    fence_acq_rel_sys;
}

/// Makes initialised mbarriers visible to the asynchronous proxy and the cluster.
pub unsafe fn fence_mbarrier_init() {}

#[track_caller]
fn proxy_fence(name: &'static str) {
    with(Site::here(name), |block| {
        block.memory.proxy_fence(block.current);
        Ok(())
    });
}

/// Orders ordinary accesses of this thread and those of the asynchronous proxy.
#[track_caller]
pub unsafe fn fence_proxy_async() {
    proxy_fence("fence.proxy.async");
}

/// As [`fence_proxy_async`], for shared memory only.
#[track_caller]
pub unsafe fn fence_proxy_async_shared() {
    proxy_fence("fence.proxy.async.shared::cta");
}

/// As [`fence_proxy_async`], for global memory only, which is not checked.
pub unsafe fn fence_proxy_async_global() {}

/// The word.
#[track_caller]
unsafe fn word<'a>(name: &'static str, address: *const u64) -> &'a AtomicU64 {
    if address.is_null() {
        raise(Site::here(name), FaultKind::Null);
    }
    if !(address as u64).is_multiple_of(8) {
        raise(Site::here(name), FaultKind::Misaligned { address: address as u64, align: 8 });
    }
    // SAFETY: a valid word, by the caller's word; aligned, as was checked.
    unsafe { AtomicU64::from_ptr(address.cast_mut()) }
}

macro_rules! loads {
    ($($name:ident = $order:ident;)*) => {$(
        /// Loads a word with the ordering of the name.
        #[track_caller]
        pub unsafe fn $name(address: *const u64) -> u64 {
            // SAFETY: the caller's, see the module.
            unsafe { word(stringify!($name), address) }.load(Ordering::$order)
        }
    )*};
}

loads! {
    ld_acquire_gpu_u64 = Acquire;
    ld_acquire_sys_u64 = Acquire;
    ld_relaxed_gpu_u64 = Relaxed;
    ld_relaxed_sys_u64 = Relaxed;
}

macro_rules! stores {
    ($($name:ident = $order:ident;)*) => {$(
        /// Stores a word with the ordering of the name.
        #[track_caller]
        pub unsafe fn $name(address: *mut u64, value: u64) {
            // SAFETY: the caller's, see the module.
            unsafe { word(stringify!($name), address) }.store(value, Ordering::$order);
        }
    )*};
}

stores! {
    st_release_gpu_u64 = Release;
    st_release_sys_u64 = Release;
    st_relaxed_gpu_u64 = Relaxed;
    st_relaxed_sys_u64 = Relaxed;
}

macro_rules! additions {
    ($($name:ident = $order:ident;)*) => {$(
        /// Adds, with the ordering of the name, and returns the value before.
        #[track_caller]
        pub unsafe fn $name(address: *mut u64, value: u64) -> u64 {
            // SAFETY: the caller's, see the module.
            unsafe { word(stringify!($name), address) }.fetch_add(value, Ordering::$order)
        }
    )*};
}

additions! {
    atom_add_relaxed_gpu_u64 = Relaxed;
    atom_add_acq_rel_gpu_u64 = AcqRel;
    atom_add_acq_rel_sys_u64 = AcqRel;
}

/// Stores `new` where the word is `expected`, and returns the value before.
#[track_caller]
pub unsafe fn atom_cas_relaxed_gpu_u64(address: *mut u64, expected: u64, new: u64) -> u64 {
    // SAFETY: the caller's, see the module.
    let word = unsafe { word("atom.cas", address) };
    word.compare_exchange(expected, new, Ordering::Relaxed, Ordering::Relaxed).unwrap_or_else(|found| found)
}

/// Adds; release.
#[track_caller]
pub unsafe fn red_release_sys_add_u64(address: *mut u64, value: u64) {
    // SAFETY: the caller's, see the module.
    unsafe { word("red.release", address) }.fetch_add(value, Ordering::Release);
}

/// Adds; relaxed.
#[track_caller]
pub unsafe fn red_relaxed_gpu_add_u64(address: *mut u64, value: u64) {
    // SAFETY: the caller's, see the module.
    unsafe { word("red.relaxed", address) }.fetch_add(value, Ordering::Relaxed);
}
