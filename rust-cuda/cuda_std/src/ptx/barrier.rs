//! Barriers, votes and shuffles.

use super::{asm, table::instructions};

instructions! {
    /// Barrier 0 of the whole block.
    opaque barrier0() = "bar.sync 0;";
    /// Barrier `id` (0 to 15) of `threads` threads, a multiple of 32.
    opaque bar_sync(id: reg32 u32, threads: reg32 u32) = "bar.sync {id}, {threads};";
    /// Arrives at barrier `id` without waiting; those that wait use [`bar_sync`] with the same count.
    opaque bar_arrive(id: reg32 u32, threads: reg32 u32) = "bar.arrive {id}, {threads};";
    /// Barrier `id` of `threads` threads, and whether `condition` was not 0 in all of them.
    opaque bar_red_and(id: reg32 u32, threads: reg32 u32, condition: reg32 u32) -> flag =
        "{{ .reg .pred p, q; setp.ne.b32 p, {condition}, 0; bar.red.and.pred q, {id}, {threads}, p; \
         selp.b32 {flag}, 1, 0, q; }}";
    /// Barrier `id` of `threads` threads, and whether `condition` was not 0 in some of them.
    opaque bar_red_or(id: reg32 u32, threads: reg32 u32, condition: reg32 u32) -> flag =
        "{{ .reg .pred p, q; setp.ne.b32 p, {condition}, 0; bar.red.or.pred q, {id}, {threads}, p; \
         selp.b32 {flag}, 1, 0, q; }}";
    /// Waits for the threads of `mask` in this warp and orders their memory accesses.
    opaque bar_warp_sync(mask: reg32 u32) = "bar.warp.sync {mask};";

    /// Whether `condition` is not 0 in all threads of `mask`.
    lane vote_sync_all(condition: reg32 u32, mask: reg32 u32) -> flag =
        "{{ .reg .pred p, q; setp.ne.b32 p, {condition}, 0; vote.sync.all.pred q, p, {mask}; \
         selp.b32 {flag}, 1, 0, q; }}";
    /// Whether `condition` is not 0 in some thread of `mask`.
    lane vote_sync_any(condition: reg32 u32, mask: reg32 u32) -> flag =
        "{{ .reg .pred p, q; setp.ne.b32 p, {condition}, 0; vote.sync.any.pred q, p, {mask}; \
         selp.b32 {flag}, 1, 0, q; }}";
    /// The threads of `mask` in which `condition` is not 0.
    lane vote_sync_ballot(condition: reg32 u32, mask: reg32 u32) -> (ballot: reg32 u32) =
        "{{ .reg .pred p; setp.ne.b32 p, {condition}, 0; vote.sync.ballot.b32 {ballot}, p, {mask}; }}";
    /// The value of lane `lane`. `clamp` is 0x1f for the whole warp.
    lane shfl_sync_idx_b32(value: reg32 u32, lane: reg32 u32, clamp: reg32 u32, mask: reg32 u32)
        -> (found: reg32 u32) = "shfl.sync.idx.b32 {found}, {value}, {lane}, {clamp}, {mask};";
    /// The value of the lane whose index differs by xor with `bits`. `clamp` is 0x1f for the whole warp.
    lane shfl_sync_bfly_b32(value: reg32 u32, bits: reg32 u32, clamp: reg32 u32, mask: reg32 u32)
        -> (found: reg32 u32) = "shfl.sync.bfly.b32 {found}, {value}, {bits}, {clamp}, {mask};";
    /// The value of the lane `delta` further. `clamp` is 0x1f for the whole warp.
    lane shfl_sync_down_b32(value: reg32 u32, delta: reg32 u32, clamp: reg32 u32, mask: reg32 u32)
        -> (found: reg32 u32) = "shfl.sync.down.b32 {found}, {value}, {delta}, {clamp}, {mask};";
    /// The value of the lane `delta` before. `clamp` is 0 for the whole warp.
    lane shfl_sync_up_b32(value: reg32 u32, delta: reg32 u32, clamp: reg32 u32, mask: reg32 u32)
        -> (found: reg32 u32) = "shfl.sync.up.b32 {found}, {value}, {delta}, {clamp}, {mask};";
}

/// Barrier `ID` (0 to 15) of `THREADS` threads, a multiple of 32, both written into the instruction. The assembler then
/// knows how many barriers a kernel has; [`bar_sync`] with an id in a register makes it keep all 16, and tools cannot
/// tell one barrier from another before the kernel runs.
#[inline(always)]
pub unsafe fn bar_sync_id<const ID: u32, const THREADS: u32>() {
    const { assert!(ID < 16 && THREADS > 0 && THREADS.is_multiple_of(32)) };
    // SAFETY: the caller's, see the module.
    unsafe { asm!("bar.sync {id}, {threads};", id = const ID, threads = const THREADS, options(nostack)) }
}

/// Arrives at barrier `ID`, as [`bar_sync_id`] does, without waiting.
#[inline(always)]
pub unsafe fn bar_arrive_id<const ID: u32, const THREADS: u32>() {
    const { assert!(ID < 16 && THREADS > 0 && THREADS.is_multiple_of(32)) };
    // SAFETY: the caller's, see the module.
    unsafe { asm!("bar.arrive {id}, {threads};", id = const ID, threads = const THREADS, options(nostack)) }
}
