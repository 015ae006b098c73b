//! The kernels for Hopper: operands of bf16, K = V = 128, chunks of 64 tokens.
//!
//! They compute what [`crate::prep`], [`crate::scan`], [`crate::fixup`] and [`crate::backward`] compute, from the same parameters.
//! The bytes between them differ: records of a chunk and head, and what the backward's kernels hand to each other, lie there as
//! the images that shared memory holds, so that a bulk copy brings them to where the tensor cores read them. A *panel* is 64
//! columns: rows of 128 bytes, whose 16-byte pieces are permuted by `piece ^ (row % 8)` (the 128-byte swizzle). The same panel can
//! be read row by row (K-major) and column by column (MN-major), so each operand has one image for all products.

pub mod backward;
#[cfg(any(emulated, all(target_arch = "nvptx64", not(feature = "nvshmem"))))]
pub mod entry;
#[cfg(any(target_arch = "nvptx64", emulated))]
pub mod fix;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod gate;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod operands;
#[cfg(any(target_arch = "nvptx64", emulated))]
pub mod prep;
#[cfg(any(target_arch = "nvptx64", emulated))]
mod records;
#[cfg(any(target_arch = "nvptx64", emulated))]
pub mod scan;

use crate::element::DtypeCode;
use crate::fixup;
use crate::params::Sizes;
use crate::tile::{RESERVED_BYTES, SHARED_BYTES};

#[cfg(any(target_arch = "nvptx64", emulated))]
pub(crate) use operands::*;

/// Bytes of a panel of 64 rows.
pub const PANEL: u32 = 8192;
/// Bytes of an image of 64 rows and 128 columns.
pub const IMAGE: u32 = 2 * PANEL;

/// Places of a record's images, in bytes: w, A', qg, Aqk, kg.
pub const RECORD_W: u32 = 0;
/// See [`RECORD_W`].
pub const RECORD_A: u32 = IMAGE;
/// See [`RECORD_W`].
pub const RECORD_QG: u32 = RECORD_A + PANEL;
/// See [`RECORD_W`].
pub const RECORD_AQK: u32 = RECORD_QG + IMAGE;
/// See [`RECORD_W`].
pub const RECORD_KG: u32 = RECORD_AQK + PANEL;
/// Bytes of a record.
pub const RECORD: u32 = RECORD_KG + IMAGE;

/// Key and value channels that these kernels are for.
pub const CHANNELS: usize = 128;
/// Tokens of a chunk that these kernels are for.
pub const CHUNK: usize = 64;

/// Whether these kernels compute problems of these sizes and this operand type.
pub fn fits(sizes: &Sizes, operands: DtypeCode) -> bool {
    let [k, v, chunk] = [CHANNELS, CHANNELS, CHUNK].map(|x| x as u32);
    operands == DtypeCode::Bf16 && (sizes.k, sizes.v, sizes.chunk) == (k, v, chunk)
}

/// Warpgroups in a block of `prep`.
pub const PREP_WARPGROUPS: usize = 2;
/// Bytes of shared memory of a block of `prep`: seven tiles of operands, and rows of decays, norms and beta.
pub const PREP_SHARED: usize = 6 * IMAGE as usize + 4 * CHANNELS * 4 + 64 * (2 * 2 * 4 + 2 * 2 * 4 + 2 * 4 + 4);
/// The same where a gate is one number per token and head: q and k, a matrix and its inverse, numbers of tokens. Three blocks fit on
/// a multiprocessor.
pub const PREP_SCALAR_SHARED: usize = 76_672;
const _: () = assert!(3 * (PREP_SCALAR_SHARED + 1024) <= 228 * 1024);

/// Chunks under way in a block of the scan with `n` walking warpgroups (it has `n + 1`).
pub const fn scan_stages(n: usize) -> u32 {
    if n == 1 { 3 } else { 2 }
}
/// Bytes of one chunk's operands for `n` walking warpgroups: the record, and each one's v.
pub const fn scan_stage_bytes(n: usize) -> u32 {
    RECORD + n as u32 * PANEL
}
/// Bytes of the six barriers of a stage of the scan.
pub const SCAN_STAGE_BARRIERS: u32 = 48;
/// Bytes of the two barriers of a walking warpgroup's outputs.
pub const SCAN_OUTPUT_BARRIERS: u32 = 16;
/// Bytes of shared memory of a block of the scan with `n` walking warpgroups: stages and each one's outputs, the stages' decays,
/// barriers.
pub const fn scan_shared(n: usize) -> usize {
    let stage = scan_stage_bytes(n) + CHANNELS as u32 * 4 + SCAN_STAGE_BARRIERS;
    RESERVED_BYTES + (scan_stages(n) * stage + n as u32 * (PANEL + SCAN_OUTPUT_BARRIERS)) as usize
}
const _: () = assert!(scan_shared(1) <= SHARED_BYTES && scan_shared(2) <= SHARED_BYTES);

/// Bytes of a warpgroup's images in the correction: q-tilde of two chunks, and outputs.
pub const FIX_IMAGES: usize = (2 * IMAGE + PANEL) as usize;
/// Where the images of the correction begin: behind the tiles of the portable body.
pub const FIX_IMAGES_AT: usize = fixup::shared_bytes(CHANNELS, CHUNK, 2).next_multiple_of(1024);
/// Bytes of shared memory of a block of the correction.
pub const FIX_SHARED: usize = FIX_IMAGES_AT + fixup::WARPGROUPS * FIX_IMAGES;
