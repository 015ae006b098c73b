//! Puts by NVSHMEM, through the functions of `nvshmem-device-shim`.

use cuda_std::ptx;

use super::Warpgroup;
use crate::tile::{Place, Put};

unsafe extern "C" {
    /// Collective over a warp.
    fn dl_putmem_signal_nbi_warp(to: *mut u8, from: *const u8, bytes: usize, signal: *mut u64, value: u64, pe: i32);
    fn dl_signal_set(signal: *mut u64, value: u64, pe: i32);
    fn dl_quiet();
}

impl Warpgroup<'_> {
    /// Sends a block, then its signal; collective. What this warpgroup stored at `from` before is sent.
    #[inline(always)]
    pub fn put_signal(&mut self, put: &Put) {
        self.sync();
        if self.warp_lane().0 == 0 {
            // SAFETY: addresses of the symmetric heap, by the launcher's word; the whole warp calls. The fence lets whoever
            // sends the block, this warp or a network card, see what the other warps stored before the barrier.
            unsafe {
                ptx::fence_acq_rel_sys();
                let Put { pe, from, to, bytes, signal, value } = *put;
                let (to, signal) = (to.own as *mut u8, signal.own as *mut u64);
                dl_putmem_signal_nbi_warp(to, from as *const u8, bytes, signal, value, pe as i32);
            }
        }
        self.sync();
    }

    /// Sets a signal of `pe`, after everything that this thread has read and written. Call on one thread.
    #[inline(always)]
    pub fn set_signal(&self, signal: Place, value: u64, pe: u32) {
        // SAFETY: a word of the symmetric heap, by the launcher's word.
        unsafe {
            ptx::fence_acq_rel_sys();
            dl_signal_set(signal.own as *mut u64, value, pe as i32);
        }
    }

    /// Waits until the blocks that this warpgroup has put have left, so that their memory may be written again; collective.
    /// Some transports start on a put only here.
    #[inline(always)]
    pub fn finish_puts(&mut self) {
        if self.warp_lane().0 == 0 {
            // SAFETY: no conditions. All lanes call: each may have begun a part.
            unsafe { dl_quiet() }
        }
        self.sync();
    }
}
