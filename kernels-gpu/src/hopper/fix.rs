//! The correction of outputs on the tensor cores of Hopper: `o^T = o_local^T + S_in^T q-tilde^T`, 8 products of 64 x 64 x 16 for a
//! chunk and 64 columns of V.
//!
//! Each warpgroup brings q-tilde and o_local of its next chunk while it works on one, so that memory never rests.

use cuda_std::{ptx, thread};
use half::bf16;

use super::{
    CHANNELS, CHUNK, FIX_IMAGES, FIX_IMAGES_AT, IMAGE, PANEL, by_rows, put_panel_transposed, repeat, row_step,
};
use crate::fixup::{Correction, Place, Tiles, fix_out_by};
use crate::params::{Chunk, FixParams};
use crate::tile::{Warpgroup, share_of};

/// Threads of a warpgroup.
const THREADS: u32 = 128;

/// [`crate::fixup::fix_out`] with these products.
#[inline(always)]
pub fn fix_out(wg: &mut Warpgroup<'_>, p: &FixParams) {
    fix_out_by::<bf16, Products>(wg, p);
}

struct Products;

/// Where a chunk lies.
#[derive(Clone, Copy)]
struct Rows {
    /// Elements before its first row of this head, in tensors whose rows are HV x 128.
    start: usize,
    len: u32,
}

impl Rows {
    #[inline(always)]
    fn of(wg: &Warpgroup<'_>, p: &FixParams, at: &Place, index: u32) -> Self {
        // Beyond the last chunk: the last one again, of which nothing is used.
        let chunk = at.segment.first_chunk + at.item.first_chunk + index.min(at.corrected - 1);
        let Chunk { token, len } = wg.read(p.tables.chunks, chunk as usize);
        let hv = p.tables.sizes.hv as usize;
        Self { start: (token as usize * hv + at.item.head as usize) * CHANNELS, len }
    }
}

impl Correction<bf16> for Products {
    #[inline(always)]
    fn correct(wg: &mut Warpgroup<'_>, p: &FixParams, at: &Place, t: &Tiles<bf16>) {
        let thread = thread::thread_idx_x() % THREADS;
        let (lane, warp) = (ptx::laneid(), thread / 32);
        let images = wg.base() + (FIX_IMAGES_AT + wg.index() * FIX_IMAGES) as u32;
        let output = images + 2 * IMAGE;
        let row = p.tables.sizes.hv as usize * CHANNELS;
        // Chunks with rows of q-tilde of the first and of the second 64 channels; the others read as zero.
        let with = (at.with_block(wg, p, 0), at.with_block(wg, p, 1));
        if at.needing == 0 {
            // Nobody has brought the state. Zero, since it is multiplied all the same.
            let (first, rows) = share_of(t.operand.rows(), wg.count(), wg.index());
            wg.fill(t.operand.row_range(first, rows), |_, _| 0.0);
            wg.sync_block();
        }
        let mut s_half = [0u32; 32];
        let (matrix, matrix_row) = (lane / 8, lane % 8);
        repeat!(J in 8 => {
            let (r, c) = (16 * warp + 8 * (matrix % 2) + matrix_row, 16 * J as u32 + 8 * (matrix / 2));
            // SAFETY: inside the tile, whose rows are padded to 16 bytes; by all lanes.
            let x = unsafe { ptx::ldmatrix_x4(t.operand.at(r, c)) };
            s_half[4 * J] = x[0];
            s_half[4 * J + 1] = x[1];
            s_half[4 * J + 2] = x[2];
            s_half[4 * J + 3] = x[3];
        });
        let step = wg.count() as u32;
        let mut index = wg.index() as u32;
        if index >= at.corrected {
            return;
        }
        let mut rows = Rows::of(wg, p, at, index);
        let mut image = images;
        let mut next_o = [0f32; 32];
        // SAFETY: images are this warpgroup's own; rows of chunks of this item; barriers as the comments say.
        unsafe {
            bring(p, rows, image, thread, (index < with.0, index < with.1));
            local(p, at, rows, row, lane, warp, &mut next_o);
            while index < at.corrected {
                let mut o = next_o;
                let next = Rows::of(wg, p, at, index + step);
                let next_image = if image == images { images + IMAGE } else { images };
                bring(p, next, next_image, thread, (index + step < with.0, index + step < with.1));
                local(p, at, next, row, lane, warp, &mut next_o);
                ptx::cp_async_wait_group::<1>();
                ptx::fence_proxy_async_shared();
                // q-tilde is complete, and the outputs of the chunk before are taken away.
                wg.sync();
                let q = by_rows(image);
                ptx::wgmma_fence();
                repeat!(J in 8 => {
                    let a = [s_half[4 * J], s_half[4 * J + 1], s_half[4 * J + 2], s_half[4 * J + 3]];
                    ptx::wgmma_m64n64k16_bf16_rs::<1, 1, 0>(&mut o, a, q + row_step(J, PANEL), 1);
                });
                ptx::wgmma_commit_group();
                ptx::wgmma_wait_group::<0>((&mut o, &mut s_half));
                put_panel_transposed(&o, output, warp, lane);
                // The outputs lie there, and q-tilde is read.
                wg.sync();
                let to = (p.o.addr as *mut u32).wrapping_add((rows.start + at.first) / 2);
                repeat!(I in 4 => {
                    let number = thread + THREADS * I as u32;
                    let (r, piece) = (number / 8, number % 8);
                    if r < rows.len {
                        let [a, b, c, d] = ptx::ld_shared_v4_u32(output + r * 128 + ((piece ^ (r % 8)) << 4));
                        ptx::st_global_v4_u32(to.wrapping_add(r as usize * (row / 2) + piece as usize * 4), a, b, c, d);
                    }
                });
                rows = next;
                image = next_image;
                index += step;
            }
            ptx::cp_async_wait_all();
        }
    }
}

/// Starts the copy of q-tilde of a chunk into an image; zeros beyond it, and where it does not have the first or the second 64
/// channels.
#[inline(always)]
unsafe fn bring(p: &FixParams, rows: Rows, image: u32, thread: u32, has: (bool, bool)) {
    let from = (p.q_tilde.addr as *const u8).wrapping_add(rows.start * 2);
    let row = p.tables.sizes.hv as usize * CHANNELS * 2;
    // SAFETY: rows of the chunk; 16-byte pieces of the image.
    unsafe {
        repeat!(I in 8 => {
            let number = thread + THREADS * I as u32;
            let (r, piece) = (number / 16, number % 16);
            let to = image + (piece / 8) * PANEL + r * 128 + (((piece % 8) ^ (r % 8)) << 4);
            let valid = r < rows.len && if piece < 8 { has.0 } else { has.1 };
            let source = if valid { r as usize * row } else { 0 };
            let bytes = if valid { 16 } else { 0 };
            ptx::cp_async_cg_16_zfill(to, from.wrapping_add(source + piece as usize * 16), bytes);
        });
        ptx::cp_async_commit_group();
    }
    const _: () = assert!(CHUNK * 16 == 8 * THREADS as usize);
}

/// Loads o_local^T of a chunk as an accumulator; zeros beyond it.
#[inline(always)]
unsafe fn local(p: &FixParams, at: &Place, rows: Rows, row: usize, lane: u32, warp: u32, o: &mut [f32; 32]) {
    let channel = at.first + (16 * warp + lane / 4) as usize;
    let from = (p.o_local.addr as *const f32).wrapping_add(rows.start + channel);
    let first = 2 * (lane % 4);
    // SAFETY: rows of the chunk.
    unsafe {
        repeat!(J in 8 => {
            let t = first + 8 * J as u32;
            let (even, odd) = ((t < rows.len) as u32, (t + 1 < rows.len) as u32);
            let (a, b) = (from.wrapping_add(t as usize * row), from.wrapping_add((t as usize + 1) * row));
            o[4 * J] = f32::from_bits(ptx::ld_global_nc_u32_if(a.cast(), even));
            o[4 * J + 1] = f32::from_bits(ptx::ld_global_nc_u32_if(b.cast(), odd));
            o[4 * J + 2] = f32::from_bits(ptx::ld_global_nc_u32_if(a.wrapping_add(8).cast(), even));
            o[4 * J + 3] = f32::from_bits(ptx::ld_global_nc_u32_if(b.wrapping_add(8).cast(), odd));
        });
    }
}
