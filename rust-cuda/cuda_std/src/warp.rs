//! Exchange and votes between the 32 threads of a warp.
//!
//! The functions are collective over the whole warp: each of its threads must call the same one, in uniform
//! control flow. That is the safety condition of all of them.
#![allow(clippy::missing_safety_doc)] // said above, once

use crate::ptx;

/// All threads of a warp.
pub const ALL: u32 = 0xffff_ffff;

/// Threads of a warp.
pub const SIZE: u32 = 32;

/// Index of the thread in its warp.
#[inline(always)]
pub fn lane_id() -> u32 {
    ptx::laneid()
}

/// What can travel between threads: 32 bits.
pub trait Word: Copy {
    /// The bits.
    fn bits(self) -> u32;
    /// The value of the bits.
    fn from_bits(bits: u32) -> Self;
}

impl Word for u32 {
    #[inline(always)]
    fn bits(self) -> u32 {
        self
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        bits
    }
}

impl Word for f32 {
    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits()
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }
}

/// The value of lane `lane`.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn shuffle_idx<T: Word>(value: T, lane: u32) -> T {
    // SAFETY: collective over the warp, by this module's condition.
    T::from_bits(unsafe { ptx::shfl_sync_idx_b32(value.bits(), lane, 0x1f, ALL) })
}

/// The value of the lane whose index is this one's xor `mask`.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn shuffle_xor<T: Word>(value: T, mask: u32) -> T {
    // SAFETY: collective over the warp, by this module's condition.
    T::from_bits(unsafe { ptx::shfl_sync_bfly_b32(value.bits(), mask, 0x1f, ALL) })
}

/// The value of the lane `delta` further; a lane that has none there keeps its own.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn shuffle_down<T: Word>(value: T, delta: u32) -> T {
    // SAFETY: collective over the warp, by this module's condition.
    T::from_bits(unsafe { ptx::shfl_sync_down_b32(value.bits(), delta, 0x1f, ALL) })
}

/// The value of the lane `delta` before; a lane that has none there keeps its own.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn shuffle_up<T: Word>(value: T, delta: u32) -> T {
    // SAFETY: collective over the warp, by this module's condition.
    T::from_bits(unsafe { ptx::shfl_sync_up_b32(value.bits(), delta, 0, ALL) })
}

/// Whether `condition` holds in every thread.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn all(condition: bool) -> bool {
    // SAFETY: collective over the warp, by this module's condition.
    unsafe { ptx::vote_sync_all(condition as u32, ALL) }
}

/// Whether `condition` holds in some thread.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn any(condition: bool) -> bool {
    // SAFETY: collective over the warp, by this module's condition.
    unsafe { ptx::vote_sync_any(condition as u32, ALL) }
}

/// Waits for the warp; what its threads wrote before is visible to all of them after.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn sync() {
    // SAFETY: collective over the warp, by this module's condition.
    unsafe { ptx::bar_warp_sync(ALL) }
}
