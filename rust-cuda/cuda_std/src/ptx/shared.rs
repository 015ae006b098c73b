//! Loads and stores of shared memory by 32-bit address. A vector access is one transaction and is aligned to its size.

use super::{asm, table::instructions};

instructions! {
    /// Loads 16 bits.
    read ld_shared_b16(address: reg32 u32) -> (value: reg16 u16) = "ld.shared.b16 {value}, [{address}];";
    /// Loads a word.
    read ld_shared_u32(address: reg32 u32) -> (value: reg32 u32) = "ld.shared.u32 {value}, [{address}];";
    /// Loads a number.
    read ld_shared_f32(address: reg32 u32) -> (value: reg32 f32) = "ld.shared.f32 {value}, [{address}];";
    /// Loads a double word.
    read ld_shared_u64(address: reg32 u32) -> (value: reg64 u64) = "ld.shared.u64 {value}, [{address}];";
    /// Loads 2 words.
    read ld_shared_v2_u32(address: reg32 u32) -> [a, b: reg32 u32] = "ld.shared.v2.u32 {{{a}, {b}}}, [{address}];";
    /// Loads 4 words.
    read ld_shared_v4_u32(address: reg32 u32) -> [a, b, c, d: reg32 u32] =
        "ld.shared.v4.u32 {{{a}, {b}, {c}, {d}}}, [{address}];";
    /// Loads 2 numbers.
    read ld_shared_v2_f32(address: reg32 u32) -> [a, b: reg32 f32] = "ld.shared.v2.f32 {{{a}, {b}}}, [{address}];";
    /// Loads 4 numbers.
    read ld_shared_v4_f32(address: reg32 u32) -> [a, b, c, d: reg32 f32] =
        "ld.shared.v4.f32 {{{a}, {b}, {c}, {d}}}, [{address}];";
    /// Stores 16 bits.
    opaque st_shared_b16(address: reg32 u32, value: reg16 u16) = "st.shared.b16 [{address}], {value};";
    /// Stores a word.
    opaque st_shared_u32(address: reg32 u32, value: reg32 u32) = "st.shared.u32 [{address}], {value};";
    /// Stores a number.
    opaque st_shared_f32(address: reg32 u32, value: reg32 f32) = "st.shared.f32 [{address}], {value};";
    /// Stores a double word.
    opaque st_shared_u64(address: reg32 u32, value: reg64 u64) = "st.shared.u64 [{address}], {value};";
    /// Stores 2 words.
    opaque st_shared_v2_u32(address: reg32 u32, a: reg32 u32, b: reg32 u32) = "st.shared.v2.u32 [{address}], {{{a}, {b}}};";
    /// Stores 4 words.
    opaque st_shared_v4_u32(address: reg32 u32, a: reg32 u32, b: reg32 u32, c: reg32 u32, d: reg32 u32) =
        "st.shared.v4.u32 [{address}], {{{a}, {b}, {c}, {d}}};";
    /// Stores 2 numbers.
    opaque st_shared_v2_f32(address: reg32 u32, a: reg32 f32, b: reg32 f32) = "st.shared.v2.f32 [{address}], {{{a}, {b}}};";
    /// Stores 4 numbers.
    opaque st_shared_v4_f32(address: reg32 u32, a: reg32 f32, b: reg32 f32, c: reg32 f32, d: reg32 f32) =
        "st.shared.v4.f32 [{address}], {{{a}, {b}, {c}, {d}}};";
}
