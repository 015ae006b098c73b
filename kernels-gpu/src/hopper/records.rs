//! Records that `prep` makes while a walk is under way: see [`Beside`].

use core::sync::atomic::Ordering;

use cuda_std::{ptx, thread, warp};

use crate::comm::{Link, Port};
use crate::element::DtypeCode;
use crate::params::{Beside, BesidePass, Channel, PrepParams, TraceBuffer};
use crate::protocol::{Awaited, Medium, Wait};
use crate::tile::Warpgroup;

/// The records of a head, as the thread knows them that brings them to a walk.
pub(super) struct Records<'w, 'a> {
    wg: &'w Warpgroup<'a>,
    port: Port<'w>,
    beside: &'w Beside,
    head: u32,
    hv: u32,
    /// Whether none has failed to come. Afterwards nothing is awaited: the walk must end, and its results are void.
    sound: bool,
}

impl<'w, 'a> Records<'w, 'a> {
    /// Those of head `head` of `hv`, for kernel `step` of [`crate::comm`].
    #[inline(always)]
    pub(super) fn new(
        wg: &'w Warpgroup<'a>,
        channel: &'w Channel,
        trace: &'w TraceBuffer,
        step: u32,
        beside: &'w Beside,
        [head, hv]: [u32; 2],
    ) -> Self {
        let port = Port { channel, trace, step, m_dtype: DtypeCode::F32 };
        Self { wg, port, beside, head, hv, sound: true }
    }

    /// Waits for those of chunk `chunk`, unless they were there before the walk.
    ///
    /// # Safety
    /// By one thread, which then starts the bulk copies.
    #[inline(always)]
    pub(super) unsafe fn wait(&mut self, chunk: u32) {
        let Some(word) = self.beside.place(chunk, self.head, self.hv) else { return };
        if !self.sound {
            return;
        }
        let peer = self.port.channel.pe;
        let wait = Wait { awaited: Awaited::Records, peer, row: self.head, block: chunk, epoch: 1, word };
        let ready = self.beside.ready;
        // Acquire, with the release of the block of `prep`.
        let found =
            Link { wg: self.wg, port: self.port }.wait(&wait, || self.wg.word(ready, word).load(Ordering::Acquire));
        if let Err(expired) = found {
            self.port.trap(self.wg, expired);
            self.sound = false;
        }
        // SAFETY: orders what this thread has seen and its copies.
        unsafe { ptx::fence_proxy_async_global() };
    }
}

/// After the last store of a block of `prep`, the `block`-th of its launch: says that its records are there, to a walk beside it. Of
/// the launch before: takes back what was said in an earlier step. Contains a barrier of the block.
///
/// # Safety
/// By all threads of the block.
#[inline(always)]
pub(super) unsafe fn announce(p: &PrepParams, block: u32, thread_in_block: u32) {
    let Beside { ready, pass, .. } = p.beside;
    let word = |i: u32| (ready.addr as *mut u64).wrapping_add(i as usize);
    if pass == BesidePass::Beside as u32 {
        // SAFETY: by all threads. Bulk stores are visible to the thread that started them once it has waited, as are the others'
        // ordinary ones behind the barrier; the release makes all of them visible to whoever sees the word.
        unsafe {
            ptx::cp_async_bulk_wait_group::<0>();
            // A barrier of the block counts warps: the lanes of one meet first.
            warp::sync();
            thread::sync_threads();
            if thread_in_block == 0 {
                ptx::fence_proxy_async_global();
                ptx::st_release_gpu_u64(word(block), 1);
                if u64::from(block) + 1 == ready.len {
                    // What follows in the stream comes after this launch, and must come after the walk as well. All other blocks of
                    // this launch run or have ended, so the walk does not wait in vain.
                    ptx::griddepcontrol_wait();
                }
            }
        }
    } else if pass == BesidePass::Before as u32 && thread_in_block == 0 {
        let mut i = block;
        while u64::from(i) < ready.len {
            // SAFETY: one writer for each word; the launches that use it come afterwards.
            unsafe { ptx::st_global_u64(word(i), 0) };
            i += p.beside.first * p.tables.sizes.hv;
        }
    }
}
