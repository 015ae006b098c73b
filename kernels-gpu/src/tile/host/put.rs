//! Puts on the CPU, where every PE's memory is reached: a copy, then a store with release.

use core::sync::atomic::{AtomicU64, Ordering};

use super::Warpgroup;
use crate::tile::{Place, Put};

impl Warpgroup<'_> {
    /// Sends a block, then its signal; collective.
    pub fn put_signal(&mut self, put: &Put) {
        self.sync();
        // SAFETY: the launcher vouches for symmetric memory; the protocol makes this warpgroup the only one that touches
        // either range: the receiver reads after the signal.
        unsafe { core::ptr::copy_nonoverlapping(put.from as *const u8, put.to.reached as *mut u8, put.bytes) };
        self.set_signal(put.signal, put.value, put.pe);
        self.sync();
    }

    /// Sets a signal of `pe`, after everything that this thread has read and written. Call on one thread.
    pub fn set_signal(&self, signal: Place, value: u64, _pe: u32) {
        // SAFETY: the launcher's words live as long as the launch and are only accessed atomically meanwhile.
        unsafe { AtomicU64::from_ptr(signal.reached as *mut u64) }.store(value, Ordering::Release);
    }

    /// Waits until the blocks that this warpgroup has put have left; collective.
    pub fn finish_puts(&mut self) {
        self.sync();
    }
}
