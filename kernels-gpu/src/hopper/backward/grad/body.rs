//! The phases in order, and where things lie in shared memory.

use cuda_std::{ptx, thread, warp};

use super::columns::{Columns, load, operands};
use super::finish::finish;
use super::pairs::{around, gather, inside, level};
use super::products::{d_v, level_product, over_values, stage_around, stage_level, through_the_inverse};
use super::stage::scatter;
use super::{SHARED, WARPGROUPS};
use crate::gate::Gate;
use crate::hopper::{CHANNELS, CHUNK, IMAGE, PANEL, RECORD, RECORD_A, repeat};
use crate::params::{Chunk, GradParams, StampKind, Tensor};
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
/// Two barriers.
const BARRIERS: u32 = WARP_SUMS + 64 + 64;
const _: () = assert!((BARRIERS + 64) as usize <= SHARED && SHARED <= crate::tile::SHARED_BYTES);

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
}

impl Place {
    /// For products: which of two kinds this warpgroup works at, and for which 64 channels. Its threads own these channels as well.
    #[inline(always)]
    pub fn group(&self) -> (u32, u32) {
        (self.warp / 8, self.half)
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

/// The grid: one block per chunk and value head, chunk by chunk.
#[inline(always)]
pub fn grad<G: Gate>(wg: &mut Warpgroup<'_>, p: &GradParams) {
    let start_ns = wg.clock();
    let (hv, block) = (p.prep.tables.sizes.hv.max(1), wg.block() as u32);
    let (chunk, head) = ((block / hv) as usize, (block % hv) as usize);
    let Chunk { token, len } = wg.read(p.prep.tables.chunks, chunk);
    let (thread, lane) = (thread::thread_idx_x(), ptx::laneid());
    // From lane 0, so that the assembler knows what depends on the warp alone to be uniform.
    // SAFETY: by all threads.
    let warp = unsafe { warp::shuffle_idx(thread / 32, 0) };
    // Warps `w` and `w + 8` are on one scheduler, the same for both halves. Their blocks, w and 7 - w, part at every level: one is a row,
    // with more work, where the other is a column.
    let (s, half) = (warp % 4 ^ (warp / 8) * 7, warp / 4 % 2);
    let at = Place {
        head,
        token: token as usize,
        len,
        row: chunk * hv as usize + head,
        s,
        half,
        channel: 64 * half + 2 * lane,
        warp,
        lane,
        thread,
        base: wg.base(),
    };
    // SAFETY: the block's shared memory; barriers separate the phases; control flow is uniform in the warps.
    unsafe {
        bring(p, &at);
        let columns: Columns = load::<G>(p, &at);
        ptx::cp_async_wait_all();
        ptx::fence_proxy_async_shared();
        thread::sync_threads();
        let [first, mut second] = over_values(&at, [at.base + BARRIERS, at.base + BARRIERS + 8]);
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
            stage_around(&at, &first, &second);
            // Nobody reads dw any more.
            ptx::bar_sync_id::<D_W_READ, 384>();
            at.arrive_half();
        }
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
        let mut g = gather::<G>(&at, &columns, &sums);
        inside::<G>(&at, &columns, &mut g);
        finish::<G>(p, &at, &columns, &mut g);
    }
    let end_ns = wg.clock();
    wg.stamp_block(&p.prep.trace, StampKind::Grad, [start_ns, end_ns], [head as u32, chunk as u32], 0);
}

/// Starts the copies of what lies in images (announced at two barriers: what the first product needs, the rest), and of do and v.
#[inline(always)]
unsafe fn bring(p: &GradParams, at: &Place) {
    let (base, row) = (at.base, at.row);
    let from = |x: &Tensor, bytes: u32| (x.addr as *const u8).wrapping_add(row * bytes as usize);
    if at.thread == 0 {
        let (first, rest) = (base + BARRIERS, base + BARRIERS + 8);
        // SAFETY: whole images of this chunk and head; one thread, and the block's barrier before anybody waits.
        unsafe {
            ptx::mbarrier_init(first, 1);
            ptx::mbarrier_init(rest, 1);
            ptx::fence_mbarrier_init();
            ptx::mbarrier_arrive_expect_tx(first, 3 * IMAGE + PANEL);
            ptx::cp_async_bulk_shared_global(base + D_R, from(&p.d_v_new, IMAGE), IMAGE, first);
            ptx::cp_async_bulk_shared_global(base + S, from(&p.states, 2 * IMAGE), 2 * IMAGE, first);
            let record = from(&p.prep.records.operands, RECORD);
            ptx::cp_async_bulk_shared_global(base + A, record.wrapping_add(RECORD_A as usize), PANEL, first);
            ptx::mbarrier_arrive_expect_tx(rest, 3 * IMAGE);
            ptx::cp_async_bulk_shared_global(base + R, from(&p.v_new, IMAGE), IMAGE, rest);
            ptx::cp_async_bulk_shared_global(base + D, from(&p.d_states, 2 * IMAGE), 2 * IMAGE, rest);
        }
    }
    // SAFETY: by all lanes, which meet again before a barrier of the block.
    unsafe { warp::sync() };
    let hv = p.prep.tables.sizes.hv as usize;
    let start = (at.token * hv + at.head) * CHANNELS * 2;
    let bytes = hv * CHANNELS * 2;
    repeat!(I in 4 => {
        const N: u32 = I as u32;
        let x = if N < 2 { &p.d_o } else { &p.v };
        // A row has 16 pieces of 16 bytes.
        let number = at.thread + 512 * (N % 2);
        let (r, piece) = (number / 16, number % 16);
        let to = base + if N < 2 { D_O } else { V } + (piece / 8) * PANEL + r * 128 + (((piece % 8) ^ (r % 8)) << 4);
        let valid = r < at.len;
        let source = start + if valid { r as usize * bytes } else { 0 } + piece as usize * 16;
        // SAFETY: a row of this chunk, or nothing.
        unsafe {
            let source = (x.addr as *const u8).wrapping_add(source);
            ptx::cp_async_cg_16_zfill(to, source, if valid { 16 } else { 0 });
        }
    });
    const _: () = assert!(CHUNK * 16 == 2 * 128 * WARPGROUPS);
    // Blocks of a level that no pair of tokens has stay zero.
    repeat!(I in 2 => {
        let to = base + LEVELS + 16 * (at.thread + 512 * I as u32);
        // SAFETY: inside the two panels; one writer for each word.
        unsafe { ptx::st_shared_v4_u32(to, 0, 0, 0, 0) };
    });
}
