//! Memory barriers in shared memory: 8 bytes each, aligned to 8, that count arrivals and bytes.

use super::{asm, table::instructions};

instructions! {
    /// Makes a barrier that completes a phase after `count` arrivals. By one thread; others may use the barrier after
    /// [`fence_mbarrier_init`](super::fence_mbarrier_init) and a barrier of the block.
    opaque mbarrier_init(barrier: reg32 u32, count: reg32 u32) = "mbarrier.init.shared::cta.b64 [{barrier}], {count};";
    /// Ends a barrier's life, after which its memory may hold something else.
    opaque mbarrier_inval(barrier: reg32 u32) = "mbarrier.inval.shared::cta.b64 [{barrier}];";
    /// Arrives, with release.
    opaque mbarrier_arrive(barrier: reg32 u32) = "mbarrier.arrive.shared::cta.b64 _, [{barrier}];";
    /// Arrives, with release, if `condition` is not 0. No branch, so it may stand between products under way.
    opaque mbarrier_arrive_if(barrier: reg32 u32, condition: reg32 u32) =
        "{{ .reg .pred p; setp.ne.b32 p, {condition}, 0; @p mbarrier.arrive.shared::cta.b64 _, [{barrier}]; }}";
    /// Announces `bytes` (below 2^20) more to be copied in this phase, then arrives.
    opaque mbarrier_arrive_expect_tx(barrier: reg32 u32, bytes: reg32 u32) =
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {bytes};";
    /// Announces `bytes` more to be copied in this phase, without arriving.
    opaque mbarrier_expect_tx(barrier: reg32 u32, bytes: reg32 u32) =
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{barrier}], {bytes};";
    /// Whether the phase of parity `parity` is complete, with acquire; may suspend the thread for a while first. The
    /// first phase has parity 0. Waiting is a loop over this.
    opaque mbarrier_try_wait_parity(barrier: reg32 u32, parity: reg32 u32) -> flag =
        "{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{barrier}], {parity}; selp.b32 {flag}, 1, 0, p; }}";
    /// As [`mbarrier_try_wait_parity`], without suspending.
    opaque mbarrier_test_wait_parity(barrier: reg32 u32, parity: reg32 u32) -> flag =
        "{{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [{barrier}], {parity}; selp.b32 {flag}, 1, 0, p; }}";
    /// Lets the barrier complete an arrival of this thread when its `cp.async` so far are done. The arrival counts
    /// among those that the barrier was made for.
    opaque cp_async_mbarrier_arrive_noinc(barrier: reg32 u32) =
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{barrier}];";
}
