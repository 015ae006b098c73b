//! Descriptors of matrices in shared memory.

/// Descriptor of a matrix in shared memory in 128-byte swizzled panels (8 rows of 128 bytes, 16-byte pieces of row r
/// at piece xor r % 8, panels aligned to 1024 bytes). Read K-major: `leading` is not used (give 16), `stride` is 1024,
/// the distance of the next 8 rows; the next 16 of K start 32 bytes further. Read MN-major: `leading` is the distance of
/// the next 64 of M or N, `stride` is 1024, that of the next 8 of K; the next 16 of K start 2048 bytes further.
#[inline(always)]
pub const fn wgmma_descriptor_128(address: u32, leading: u32, stride: u32) -> u64 {
    const SWIZZLE_128: u64 = 1 << 62;
    const fn field(bytes: u32) -> u64 {
        ((bytes & 0x3ffff) >> 4) as u64
    }
    field(address) | field(leading) << 16 | field(stride) << 32 | SWIZZLE_128
}
