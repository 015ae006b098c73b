//! `begin`: the first kernel of a step. Sets the words that count from zero in every step, and advances the epoch.
//!
//! Both lie in the device's memory, so a step needs nothing from the host but its launches: one that was captured can be
//! replayed as it is. Epochs then count steps wherever they were launched from, and all PEs must replay alike, as they must call
//! alike. The kernels of the step see what this one leaves because they come after it in the order of the stream.

use core::sync::atomic::Ordering;

use bytemuck::{Pod, Zeroable};

use crate::params::Array;
use crate::tile::{RESERVED_BYTES, Warpgroup};

/// Blocks of the launch.
pub const BLOCKS: usize = 1;
/// Warpgroups in a block.
pub const WARPGROUPS: usize = 1;

/// Dynamic shared memory of a block.
pub const fn shared_bytes() -> usize {
    RESERVED_BYTES
}

/// Parameters of [`begin`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BeginParams {
    /// Of u64: tickets.
    pub tickets: Array,
    /// Of u64: what the step counts.
    pub counts: Array,
    /// One u64, which grows by 1; or none.
    pub epoch: Array,
}

/// The grid: [`BLOCKS`]. The words are a few; one thread does it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn begin(wg: &mut Warpgroup<'_>, p: &BeginParams) {
    wg.expect_shared(shared_bytes());
    wg.elect(|wg| {
        // Relaxed throughout: kernels before and after this one are apart in time.
        for i in 0..p.tickets.len as usize {
            wg.word(p.tickets, i).store(0, Ordering::Relaxed);
        }
        for i in 0..p.counts.len as usize {
            wg.word(p.counts, i).store(0, Ordering::Relaxed);
        }
        if p.epoch.len > 0 {
            let epoch = wg.word(p.epoch, 0);
            epoch.store(epoch.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
    });
}
