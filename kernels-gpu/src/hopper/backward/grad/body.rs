//! The phases in order, and where things lie in shared memory.

use cuda_std::{ptx, thread, warp};

use super::bring::{Item, bring, bring_d_states, bring_gate};
use super::columns::{Columns, load, operands};
use super::finish::finish;
use super::pairs::{around, gather, inside, level};
use super::products::{d_v, level_product, over_values, stage_around, stage_level, through_the_inverse};
use super::stage::scatter;
use super::{SHARED, WARPGROUPS};
use crate::gate::Gate;
use crate::hopper::{IMAGE, PANEL, wait};
use crate::params::{Chunk, GradParams, StampKind};
use crate::tile::Warpgroup;

/// Images, from the first phase on: A'; scores of pairs of tokens, in two panels (see [`Level`]); k exp G; dw. dN's first factor
/// overwrites k exp G.
pub(super) const A: u32 = 0;
pub(super) const LEVELS: u32 = A + PANEL;
pub(super) const KB: u32 = LEVELS + 2 * PANEL;
pub(super) const D_W: u32 = KB + IMAGE;
/// What the caller and the walks left: states, gradients of states, v_new, do, v, gradient of v_new.
pub(super) const S: u32 = D_W + IMAGE;
pub(super) const D: u32 = S + 2 * IMAGE;
pub(super) const R: u32 = D + 2 * IMAGE;
pub(super) const D_O: u32 = R + IMAGE;
pub(super) const V: u32 = D_O + IMAGE;
pub(super) const D_R: u32 = V + IMAGE;

/// Gradients around the chunk before their decays, f32 `[64,128]` each (see [`super::stage`]), over D, S, R and do. Where that of a row of
/// q lay, its sum waits until the end.
pub(super) const AROUND_Q: u32 = D;
pub(super) const AROUND_COLUMNS: u32 = S;
pub(super) const AROUND_K: u32 = R;
/// Bytes of such a tile.
pub(super) const STAGED: u32 = 64 * 512;
const _: () = assert!(AROUND_K + STAGED <= V);

/// Operands of levels, after that: rows of q and of k (an image), columns of k (half of one).
pub(super) const fn rows_at(bit: u32) -> u32 {
    match bit {
        4 => KB,
        2 => S,
        _ => S + IMAGE,
    }
}
pub(super) const fn columns_at(bit: u32) -> u32 {
    match bit {
        4 => R,
        2 => R + PANEL,
        _ => A,
    }
}
/// A level's gradients before their decays: 64 rows of q and of k, then 32 columns.
pub(super) const STAGED_LEVEL: u32 = D_O;

/// Where threads keep q, a panel for each half, from the third phase on: they do not need it all the time.
pub(super) const PARKED: u32 = D_W;
const _: () = assert!(STAGED_LEVEL + STAGED + STAGED / 2 <= TOTALS);

/// Where an item's rows of q, of k, and of what a gate with a decay per channel was given are brought to: they become registers before
/// these places are used. f32 takes the second place as well.
pub(super) const Q_GIVEN: u32 = KB;
pub(super) const K_GIVEN: u32 = R;
pub(super) const G_GIVEN: [u32; 2] = [LEVELS, V];

/// Small rows behind the images. Decays of blocks of 8 tokens, `[8,128]`.
pub(super) const TOTALS: u32 = D_R + IMAGE;
/// Sums of S D over 16 rows each, `[8,128]`; then, times the decay of the chunk, a share of what dg of all tokens has in common.
pub(super) const COMMON: u32 = TOTALS + 4096;
/// Sums over blocks of 8 tokens that other tokens' dg need, `[8,128]` each: of rows and of columns around the chunk; of rows, or columns,
/// up to the first and up to the second level.
pub(super) const CARRIED: u32 = COMMON + 4096;
/// Until they are carried: decays from the chunk's start to a block, from it to the chunk's end, and between it and the middle of the
/// chunk, `[8,128]` each.
pub(super) const DECAY_BEFORE: u32 = CARRIED;
pub(super) const DECAY_AFTER: u32 = CARRIED + 4096;
pub(super) const DECAY_TO_MIDDLE: u32 = CARRIED + 2 * 4096;
/// Scores on the diagonal, f32 `[8 blocks, 8, 8]`: dP, dN.
pub(super) const SQUARES: u32 = CARRIED + 4 * 4096;
/// Bytes of the squares of one.
pub(super) const SQUARE_BYTES: u32 = 8 * 64 * 4;
/// Factors of rows of q and k, pairs `[64,2]`.
pub(super) const NORMS: u32 = SQUARES + 2 * SQUARE_BYTES;
/// Sums of squares of q and k, over 64 channels each: `[2,64,2]`.
pub(super) const SQUARE_SUMS: u32 = NORMS + 512;
/// Row sums of dv v, over 64 columns each, `[2,64]`.
pub(super) const D_BETA: u32 = SQUARE_SUMS + 1024;
/// Row sums over 64 channels each, `[2, 16, 8]` for 8 blocks: of k times its gradients, of dg.
pub(super) const ROW_SUMS: u32 = D_BETA + 512;
/// One number of each warp.
pub(super) const WARP_SUMS: u32 = ROW_SUMS + 1024;
/// Three barriers: copies of images that come early, of the others, and that nobody uses the places of the early ones any more.
pub(super) const BARRIERS: u32 = WARP_SUMS + 64 + 64;
/// The next item's chunk.
const NEXT: u32 = BARRIERS + 32;
/// Parameters of the gate of an item's head: bias `[128]`, then exp A_log. Of this item and of the next one, in turn.
pub(super) const GATES: u32 = NEXT + 32;
pub(super) const GATE_BYTES: u32 = 512 + 16;
const _: () = assert!((GATES + 2 * GATE_BYTES) as usize <= SHARED && SHARED <= crate::tile::SHARED_BYTES);

/// Number of the first half's barrier: behind the block's and the warpgroups'. It comes from a register, which makes the assembler reserve
/// all barriers; no other block is there that could want them.
const HALVES: u32 = 5;

/// Barrier of all warpgroups that read dw but not the first.
pub(super) const D_W_READ: u32 = 7;

/// A thread's place.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub head: usize,
    /// First token, and tokens of the chunk.
    pub token: usize,
    pub len: u32,
    /// Row of the chunk and head in what has one for each.
    pub row: usize,
    /// Block of 8 tokens, and panel of 64 channels.
    pub s: u32,
    pub half: u32,
    /// First of the two channels.
    pub channel: u32,
    /// Warp of the block: warp / 4 is the warpgroup.
    pub warp: u32,
    pub lane: u32,
    pub thread: u32,
    pub base: u32,
    /// Where the parameters of the head's gate are.
    pub gate: u32,
}

impl Place {
    /// For products: which of two kinds this warpgroup works at, and for which 64 channels. Its threads own these channels as well.
    #[inline(always)]
    pub fn group(&self) -> (u32, u32) {
        (self.warp / 8, self.half)
    }

    /// The same place, of which the compiler does not know it: addresses and conditions that phases share are made again, since kept they
    /// would take registers.
    #[inline(always)]
    fn again(&self) -> Self {
        let mut of_thread = [self.thread, self.lane, self.base, self.channel];
        ptx::computed(&mut of_thread);
        let [thread, lane, base, channel] = of_thread;
        Self { thread, lane, base, channel, ..*self }
    }

    /// Waits for the two warpgroups that work at the same 64 channels.
    ///
    /// # Safety
    /// By all their threads, in whole warps.
    #[inline(always)]
    pub unsafe fn sync_half(&self) {
        // SAFETY: by contract.
        unsafe { ptx::bar_sync(HALVES + self.half, 256) }
    }

    /// Lets the others pass a [`Self::sync_half`] without waiting for them.
    ///
    /// # Safety
    /// By one warpgroup, where the other waits.
    #[inline(always)]
    unsafe fn arrive_half(&self) {
        // SAFETY: by contract.
        unsafe { ptx::bar_arrive(HALVES + self.half, 256) }
    }
}

/// The grid: blocks that each take every so many of the chunks and value heads, which go chunk by chunk.
#[inline(always)]
pub fn grad<G: Gate>(wg: &mut Warpgroup<'_>, p: &GradParams) {
    let hv = p.prep.tables.sizes.hv.max(1);
    let (items, step) = (p.prep.tables.chunks.len as u32 * hv, wg.grid() as u32);
    let mut number = wg.block() as u32;
    if number >= items {
        return;
    }
    let base = wg.base();
    let (thread, lane) = (thread::thread_idx_x(), ptx::laneid());
    // From lane 0, so that the assembler knows what depends on the warp alone to be uniform.
    // SAFETY: by all threads.
    let warp = unsafe { warp::shuffle_idx(thread / 32, 0) };
    // Warps `w` and `w + 8` are on one scheduler, the same for both halves. Their blocks, w and 7 - w, part at every level: one is a row,
    // with more work, where the other is a column.
    let (s, half) = ((warp % 4) ^ ((warp / 8) * 7), warp / 4 % 2);
    let place = |item: Item, parity: u32| Place {
        head: item.head,
        token: item.token,
        len: item.len,
        row: item.row,
        s,
        half,
        channel: 64 * half + 2 * lane,
        warp,
        lane,
        thread,
        base,
        gate: base + GATES + parity * GATE_BYTES,
    };
    // SAFETY: the block's shared memory.
    unsafe {
        if thread == 0 {
            ptx::mbarrier_init(base + BARRIERS, 1);
            ptx::mbarrier_init(base + BARRIERS + 8, 1);
            ptx::mbarrier_init(base + BARRIERS + 16, 4 * WARPGROUPS as u32);
            ptx::fence_mbarrier_init();
            let Chunk { token, len } = wg.read(p.prep.tables.chunks, (number / hv) as usize);
            ptx::st_shared_u32(base + NEXT, token);
            ptx::st_shared_u32(base + NEXT + 4, len);
        }
        warp::sync();
        if warp >= 12 {
            bring_gate::<G>(&p.prep, thread % 128, (number % hv) as usize, base + GATES);
        }
        thread::sync_threads();
        let item = next(p, base, number);
        bring::<G>(p, &place(item, 0), &item);
    }
    let mut parity = 0;
    while number < items {
        let start_ns = wg.clock();
        // SAFETY: the block's shared memory.
        let item = unsafe { next(p, base, number) };
        let following = number + step;
        // SAFETY: the block's shared memory; barriers separate the phases; control flow is uniform in the warps.
        unsafe { chunk::<G>(wg, p, &place(item, parity), &item, [following, items], parity) };
        let end_ns = wg.clock();
        let (head, chunk) = (number % hv, number / hv);
        wg.stamp_block(&p.prep.trace, StampKind::Grad, [start_ns, end_ns], [head, chunk], 0);
        number = following;
        parity ^= 1;
    }
}

/// Item `number`, the next one of this block.
///
/// # Safety
/// Its chunk was written before a barrier.
#[inline(always)]
unsafe fn next(p: &GradParams, base: u32, number: u32) -> Item {
    // SAFETY: by contract.
    let [token, len] = unsafe { [ptx::ld_shared_u32(base + NEXT), ptx::ld_shared_u32(base + NEXT + 4)] };
    Item::of(p, number, Chunk { token, len })
}

/// One chunk and head; `following` is the block's next one, of so many.
///
/// # Safety
/// By all threads, after [`bring`] of this item, with the parity of how many the block has done.
#[inline(always)]
unsafe fn chunk<G: Gate>(
    wg: &mut Warpgroup<'_>,
    p: &GradParams,
    at: &Place,
    item: &Item,
    [following, items]: [u32; 2],
    parity: u32,
) {
    let at = at.again();
    let (warp, base) = (at.warp, at.base);
    // SAFETY: by contract.
    unsafe {
        ptx::cp_async_wait_all();
        ptx::fence_proxy_async_shared();
        thread::sync_threads();
        if at.thread == 0 {
            bring_d_states(p, &at, item);
        }
        warp::sync();
        let columns: Columns = load::<G>(p, &at, item);
        ptx::cp_async_wait_all();
        ptx::fence_proxy_async_shared();
        thread::sync_threads();
        let [first, mut second] = over_values(&at, [base + BARRIERS, base + BARRIERS + 8], parity);
        thread::sync_threads();
        if warp < 8 {
            if warp < 4 {
                d_v(wg, p, &at);
                scatter::<false>(&at, &second);
                ptx::fence_proxy_async_shared();
            } else {
                through_the_inverse(wg, &at, &mut second);
            }
            at.sync_half();
        } else {
            // A warpgroup stages what its own threads read and those of the other one with its channels: it need not wait for dv and dN.
            if at.thread == 256 && following < items {
                let hv = p.prep.tables.sizes.hv.max(1);
                let Chunk { token, len } = wg.read(p.prep.tables.chunks, (following / hv) as usize);
                ptx::st_shared_u32(base + NEXT, token);
                ptx::st_shared_u32(base + NEXT + 4, len);
            }
            warp::sync();
            stage_around(&at, &first, &second);
            if warp >= 12 && following < items {
                let head = (following % p.prep.tables.sizes.hv.max(1)) as usize;
                bring_gate::<G>(&p.prep, at.thread % 128, head, base + GATES + (parity ^ 1) * GATE_BYTES);
            }
            // Nobody reads dw any more.
            ptx::bar_sync_id::<D_W_READ, 384>();
            at.arrive_half();
        }
        let at = at.again();
        columns.park(&at);
        let mut sums = around::<G>(&at, &columns);
        thread::sync_threads();
        // From here to the norms of rows, channels of one half have nothing to do with those of the other.
        operands::<G>(&at, &columns);
        ptx::fence_proxy_async_shared();
        at.sync_half();
        let x = level_product::<4>(&at);
        stage_level::<4>(&at, &x);
        at.sync_half();
        level::<G, 4>(&at, &columns, &mut sums);
        let x = level_product::<2>(&at);
        // The level before is read.
        at.sync_half();
        stage_level::<2>(&at, &x);
        at.sync_half();
        level::<G, 2>(&at, &columns, &mut sums);
        let x = level_product::<1>(&at);
        at.sync_half();
        stage_level::<1>(&at, &x);
        at.sync_half();
        level::<G, 1>(&at, &columns, &mut sums);
        ptx::fence_proxy_async_shared();
        warp::sync();
        ptx::mbarrier_arrive_if(base + BARRIERS + 16, (at.lane == 0) as u32);
        let mut g = gather::<G>(&at, &columns, &sums);
        // Of the images only q and sums for dq are needed from here on.
        wait(base + BARRIERS + 16, parity);
        if following < items {
            bring::<G>(p, &at, &next(p, base, following));
        }
        inside::<G>(&at, &columns, &mut g);
        finish::<G>(p, &at, &columns, &mut g);
    }
}
