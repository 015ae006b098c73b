//! Plain loads and stores of global memory. A vector access is one transaction and is aligned to its size.
//!
//! `nc` loads go through the read-only cache: the memory must not be written while the kernel runs.

use super::{asm, table::instructions};

instructions! {
    /// Loads 16 bits.
    read ld_global_b16(address: reg64 *const u16) -> (value: reg16 u16) = "ld.global.b16 {value}, [{address}];";
    /// Loads a word.
    read ld_global_u32(address: reg64 *const u32) -> (value: reg32 u32) = "ld.global.u32 {value}, [{address}];";
    /// Loads a number.
    read ld_global_f32(address: reg64 *const f32) -> (value: reg32 f32) = "ld.global.f32 {value}, [{address}];";
    /// Loads a double word.
    read ld_global_u64(address: reg64 *const u64) -> (value: reg64 u64) = "ld.global.u64 {value}, [{address}];";
    /// Loads 2 words.
    read ld_global_v2_u32(address: reg64 *const u32) -> [a, b: reg32 u32] = "ld.global.v2.u32 {{{a}, {b}}}, [{address}];";
    /// Loads 4 words.
    read ld_global_v4_u32(address: reg64 *const u32) -> [a, b, c, d: reg32 u32] =
        "ld.global.v4.u32 {{{a}, {b}, {c}, {d}}}, [{address}];";
    /// Loads 2 numbers.
    read ld_global_v2_f32(address: reg64 *const f32) -> [a, b: reg32 f32] = "ld.global.v2.f32 {{{a}, {b}}}, [{address}];";
    /// Loads 4 numbers.
    read ld_global_v4_f32(address: reg64 *const f32) -> [a, b, c, d: reg32 f32] =
        "ld.global.v4.f32 {{{a}, {b}, {c}, {d}}}, [{address}];";
    /// Loads 16 bits that nobody writes.
    read ld_global_nc_b16(address: reg64 *const u16) -> (value: reg16 u16) = "ld.global.nc.b16 {value}, [{address}];";
    /// Loads a word that nobody writes.
    read ld_global_nc_u32(address: reg64 *const u32) -> (value: reg32 u32) = "ld.global.nc.u32 {value}, [{address}];";
    /// Loads a number that nobody writes.
    read ld_global_nc_f32(address: reg64 *const f32) -> (value: reg32 f32) = "ld.global.nc.f32 {value}, [{address}];";
    /// Loads 2 words that nobody writes.
    read ld_global_nc_v2_u32(address: reg64 *const u32) -> [a, b: reg32 u32] =
        "ld.global.nc.v2.u32 {{{a}, {b}}}, [{address}];";
    /// Loads 4 words that nobody writes.
    read ld_global_nc_v4_u32(address: reg64 *const u32) -> [a, b, c, d: reg32 u32] =
        "ld.global.nc.v4.u32 {{{a}, {b}, {c}, {d}}}, [{address}];";
    /// Loads 2 numbers that nobody writes.
    read ld_global_nc_v2_f32(address: reg64 *const f32) -> [a, b: reg32 f32] =
        "ld.global.nc.v2.f32 {{{a}, {b}}}, [{address}];";
    /// Loads 4 numbers that nobody writes.
    read ld_global_nc_v4_f32(address: reg64 *const f32) -> [a, b, c, d: reg32 f32] =
        "ld.global.nc.v4.f32 {{{a}, {b}, {c}, {d}}}, [{address}];";
    /// Loads a word that nobody writes, if `condition` is not 0; else it is 0.
    read ld_global_nc_u32_if(address: reg64 *const u32, condition: reg32 u32) -> (value: reg32 u32) =
        "{{ .reg .pred p; setp.ne.b32 p, {condition}, 0; mov.b32 {value}, 0; @p ld.global.nc.u32 {value}, [{address}]; }}";
    /// Loads 2 words that nobody writes, if `condition` is not 0; else they are 0.
    read ld_global_nc_v2_u32_if(address: reg64 *const u32, condition: reg32 u32) -> [a, b: reg32 u32] =
        "{{ .reg .pred p; setp.ne.b32 p, {condition}, 0; mov.b32 {a}, 0; mov.b32 {b}, 0; \
         @p ld.global.nc.v2.u32 {{{a}, {b}}}, [{address}]; }}";
    /// Stores 16 bits.
    opaque st_global_b16(address: reg64 *mut u16, value: reg16 u16) = "st.global.b16 [{address}], {value};";
    /// Stores a word.
    opaque st_global_u32(address: reg64 *mut u32, value: reg32 u32) = "st.global.u32 [{address}], {value};";
    /// Stores a number.
    opaque st_global_f32(address: reg64 *mut f32, value: reg32 f32) = "st.global.f32 [{address}], {value};";
    /// Stores a number, if `condition` is not 0. No branch, so it may stand between products under way.
    opaque st_global_f32_if(address: reg64 *mut f32, value: reg32 f32, condition: reg32 u32) =
        "{{ .reg .pred p; setp.ne.b32 p, {condition}, 0; @p st.global.f32 [{address}], {value}; }}";
    /// Stores a double word.
    opaque st_global_u64(address: reg64 *mut u64, value: reg64 u64) = "st.global.u64 [{address}], {value};";
    /// Stores 2 words.
    opaque st_global_v2_u32(address: reg64 *mut u32, a: reg32 u32, b: reg32 u32) =
        "st.global.v2.u32 [{address}], {{{a}, {b}}};";
    /// Stores 4 words.
    opaque st_global_v4_u32(address: reg64 *mut u32, a: reg32 u32, b: reg32 u32, c: reg32 u32, d: reg32 u32) =
        "st.global.v4.u32 [{address}], {{{a}, {b}, {c}, {d}}};";
    /// Stores 2 numbers.
    opaque st_global_v2_f32(address: reg64 *mut f32, a: reg32 f32, b: reg32 f32) =
        "st.global.v2.f32 [{address}], {{{a}, {b}}};";
    /// Stores 4 numbers.
    opaque st_global_v4_f32(address: reg64 *mut f32, a: reg32 f32, b: reg32 f32, c: reg32 f32, d: reg32 f32) =
        "st.global.v4.f32 [{address}], {{{a}, {b}, {c}, {d}}};";
}
