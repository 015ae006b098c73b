//! Loads and stores of shared memory by 32-bit address.

use crate::emulated::{Site, settled, with};

#[track_caller]
fn load<const N: usize>(name: &'static str, address: u32) -> [u8; N] {
    with(Site::here(name), |block| block.memory.load::<N>(&block.clocks, block.current, address))
}

#[track_caller]
fn store(name: &'static str, address: u32, value: &[u8]) {
    with(Site::here(name), |block| block.memory.store(&block.clocks, block.current, address, value));
}

fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

/// Loads 16 bits.
#[track_caller]
pub unsafe fn ld_shared_b16(address: u32) -> u16 {
    u16::from_le_bytes(load("ld.shared.b16", address))
}

/// Loads a word.
#[track_caller]
pub unsafe fn ld_shared_u32(address: u32) -> u32 {
    u32::from_le_bytes(load("ld.shared.u32", address))
}

/// Loads a number.
#[track_caller]
pub unsafe fn ld_shared_f32(address: u32) -> f32 {
    f32::from_le_bytes(load("ld.shared.f32", address))
}

/// Loads a double word.
#[track_caller]
pub unsafe fn ld_shared_u64(address: u32) -> u64 {
    u64::from_le_bytes(load("ld.shared.u64", address))
}

/// Loads 2 words.
#[track_caller]
pub unsafe fn ld_shared_v2_u32(address: u32) -> [u32; 2] {
    words(&load::<8>("ld.shared.v2.u32", address))
}

/// Loads 4 words.
#[track_caller]
pub unsafe fn ld_shared_v4_u32(address: u32) -> [u32; 4] {
    words(&load::<16>("ld.shared.v4.u32", address))
}

/// Loads 2 numbers.
#[track_caller]
pub unsafe fn ld_shared_v2_f32(address: u32) -> [f32; 2] {
    words::<2>(&load::<8>("ld.shared.v2.f32", address)).map(f32::from_bits)
}

/// Loads 4 numbers.
#[track_caller]
pub unsafe fn ld_shared_v4_f32(address: u32) -> [f32; 4] {
    words::<4>(&load::<16>("ld.shared.v4.f32", address)).map(f32::from_bits)
}

/// Stores 16 bits.
#[track_caller]
pub unsafe fn st_shared_b16(address: u32, value: u16) {
    store("st.shared.b16", address, &value.to_le_bytes());
}

/// Stores a word.
#[track_caller]
pub unsafe fn st_shared_u32(address: u32, value: u32) {
    store("st.shared.u32", address, &value.to_le_bytes());
}

/// Stores a number.
#[track_caller]
pub unsafe fn st_shared_f32(address: u32, value: f32) {
    store("st.shared.f32", address, &settled("st.shared.f32", value).to_le_bytes());
}

/// Stores a double word.
#[track_caller]
pub unsafe fn st_shared_u64(address: u32, value: u64) {
    store("st.shared.u64", address, &value.to_le_bytes());
}

#[track_caller]
fn store_words<const N: usize>(name: &'static str, address: u32, words: [u32; N]) {
    let mut bytes = [0; 16];
    for (bytes, word) in bytes.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    store(name, address, &bytes[..4 * N]);
}

/// Stores 2 words.
#[track_caller]
pub unsafe fn st_shared_v2_u32(address: u32, a: u32, b: u32) {
    store_words("st.shared.v2.u32", address, [a, b]);
}

/// Stores 4 words.
#[track_caller]
pub unsafe fn st_shared_v4_u32(address: u32, a: u32, b: u32, c: u32, d: u32) {
    store_words("st.shared.v4.u32", address, [a, b, c, d]);
}

/// Stores 2 numbers.
#[track_caller]
pub unsafe fn st_shared_v2_f32(address: u32, a: f32, b: f32) {
    const NAME: &str = "st.shared.v2.f32";
    store_words(NAME, address, [settled(NAME, a).to_bits(), settled(NAME, b).to_bits()]);
}

/// Stores 4 numbers.
#[track_caller]
pub unsafe fn st_shared_v4_f32(address: u32, a: f32, b: f32, c: f32, d: f32) {
    const NAME: &str = "st.shared.v4.f32";
    let bits = |x| settled(NAME, x).to_bits();
    store_words(NAME, address, [bits(a), bits(b), bits(c), bits(d)]);
}
