//! Asynchronous matrix products of a warpgroup (128 threads): `d = [d] + a b` with d 64 x N in f32 registers, a 64 x 16
//! from registers or shared memory, b 16 x N from shared memory.
//!
//! Order of a product: [`wgmma_fence`] once registers were written, any number of `wgmma_m64*`, then
//! [`wgmma_commit_group`], then [`wgmma_wait_group`], which is given every accumulator and register operand that is
//! under way: to the compiler they change there, so it neither uses accumulators earlier nor moves them elsewhere.
//!
//! Accumulator `d[i]` of thread t: row 16 (t / 32) + (t % 32) / 4 + 8 ((i / 2) % 2), column 8 (i / 4) + 2 (t % 4) + i % 2.
//! Operand a in registers: rows r = 16 (t / 32) + (t % 32) / 4, r + 8, r, r + 8, columns 2 (t % 4) + 0, 0, 8, 8 and the
//! next, the lower column in the low half.
//!
//! Arrays of registers are indexed by constants only: a loop over them that is not unrolled puts them into local
//! memory, and the products are then serialised.

use super::{asm, table::instructions};

instructions! {
    /// Orders writes of registers before the products that use them. Before the first product and whenever ordinary
    /// instructions wrote accumulators or operands.
    opaque wgmma_fence() = "wgmma.fence.sync.aligned;";
    /// Makes a group of the products since the last one.
    opaque wgmma_commit_group() = "wgmma.commit_group.sync.aligned;";
}

/// Waits until at most `N` groups of products are under way. `registers` are a `&mut` array, or a tuple of them: all
/// accumulators and register operands of products that may be under way.
#[inline(always)]
pub unsafe fn wgmma_wait_group<const N: u32>(registers: impl Carried) {
    // SAFETY: the caller's, see the module.
    unsafe { asm!("wgmma.wait_group.sync.aligned {n};", n = const N, options(nostack)) }
    // Opaque instructions keep their order, so what is carried changes after the wait.
    registers.carry();
}

/// Has these registers computed here, and not where they are used at last: what they are made of need not be kept until then.
#[inline(always)]
pub fn computed(registers: impl Carried) {
    registers.carry();
}

/// Registers that products use asynchronously.
pub trait Carried {
    /// Makes the compiler believe that the registers change here.
    fn carry(self);
}

macro_rules! carried {
    ($element:ty, $length:literal, [$($i:literal)*]) => {
        impl Carried for &mut [$element; $length] {
            #[inline(always)]
            fn carry(self) {
                // SAFETY: the assembly is a comment.
                unsafe { asm!(concat!("//" $(, " {", $i, "}")*), $(inout(reg32) self[$i],)* options(nostack)) }
            }
        }
    };
}

macro_rules! carried_tuple {
    ($($name:ident)*) => {
        impl<$($name: Carried),*> Carried for ($($name,)*) {
            #[inline(always)]
            fn carry(self) {
                #[allow(non_snake_case)]
                let ($($name,)*) = self;
                $($name.carry();)*
            }
        }
    };
}

macro_rules! wgmma {
    ($shape:literal, $types:literal, $length:literal, $rs:ident, $ss:ident, [$first:literal $($i:literal)*]) => {
        #[doc = concat!("`d = [d] + SCALE_A SCALE_B a b`, ", $shape, ", ", $types, ", a from registers.")]
        ///
        /// `d` is not read if `scale_d` is 0. `SCALE_A` and `SCALE_B` are 1 or -1. `b` is a matrix descriptor, of a
        /// matrix `[N, 16]` (`TRANS_B` 0, K-major) or `[16, N]` (`TRANS_B` 1, MN-major).
        #[inline(always)]
        pub unsafe fn $rs<const SCALE_A: i32, const SCALE_B: i32, const TRANS_B: i32>(
            d: &mut [f32; $length], a: [u32; 4], b: u64, scale_d: u32,
        ) {
            // SAFETY: the caller's, see the module.
            unsafe {
                asm!(
                    concat!(
                        "{{ .reg .pred p; setp.ne.b32 p, {scale_d}, 0; wgmma.mma_async.sync.aligned.", $shape, ".f32.", $types,
                        " {{{", $first, "}" $(, ", {", $i, "}")*, "}}, {{{a0}, {a1}, {a2}, {a3}}}, {b}, p, {sa}, {sb}, {tb}; }}"
                    ),
                    inout(reg32) d[$first], $(inout(reg32) d[$i],)*
                    a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                    b = in(reg64) b, scale_d = in(reg32) scale_d,
                    sa = const SCALE_A, sb = const SCALE_B, tb = const TRANS_B,
                    options(nostack),
                )
            }
        }

        #[doc = concat!("`d = [d] + SCALE_A SCALE_B a b`, ", $shape, ", ", $types, ", a from shared memory.")]
        ///
        /// `d` is not read if `scale_d` is 0. `SCALE_A` and `SCALE_B` are 1 or -1. `a` and `b` are matrix descriptors: a of
        /// `[64, 16]` (`TRANS_A` 0, K-major) or `[16, 64]` (`TRANS_A` 1, MN-major), b of `[N, 16]` or `[16, N]` likewise.
        #[inline(always)]
        pub unsafe fn $ss<const SCALE_A: i32, const SCALE_B: i32, const TRANS_A: i32, const TRANS_B: i32>(
            d: &mut [f32; $length], a: u64, b: u64, scale_d: u32,
        ) {
            // SAFETY: the caller's, see the module.
            unsafe {
                asm!(
                    concat!(
                        "{{ .reg .pred p; setp.ne.b32 p, {scale_d}, 0; wgmma.mma_async.sync.aligned.", $shape, ".f32.", $types,
                        " {{{", $first, "}" $(, ", {", $i, "}")*, "}}, {a}, {b}, p, {sa}, {sb}, {ta}, {tb}; }}"
                    ),
                    inout(reg32) d[$first], $(inout(reg32) d[$i],)*
                    a = in(reg64) a, b = in(reg64) b, scale_d = in(reg32) scale_d,
                    sa = const SCALE_A, sb = const SCALE_B, ta = const TRANS_A, tb = const TRANS_B,
                    options(nostack),
                )
            }
        }
    };
}

/// Calls `$macro!($arguments, [0 1 .. n - 1])`.
macro_rules! with_indices {
    (4, $macro:ident!($($arguments:tt)*)) => { $macro!($($arguments)*, [0 1 2 3]); };
    (8, $macro:ident!($($arguments:tt)*)) => { $macro!($($arguments)*, [0 1 2 3 4 5 6 7]); };
    (16, $macro:ident!($($arguments:tt)*)) => { $macro!($($arguments)*, [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]); };
    (32, $macro:ident!($($arguments:tt)*)) => {
        $macro!($($arguments)*, [
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
        ]);
    };
    (64, $macro:ident!($($arguments:tt)*)) => {
        $macro!($($arguments)*, [
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
            32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
        ]);
    };
}

with_indices!(8, carried!(f32, 8));
with_indices!(16, carried!(f32, 16));
with_indices!(32, carried!(f32, 32));
with_indices!(64, carried!(f32, 64));
with_indices!(4, carried!(u32, 4));
with_indices!(8, carried!(u32, 8));
with_indices!(16, carried!(u32, 16));
with_indices!(32, carried!(u32, 32));

carried_tuple!();
carried_tuple!(A B);
carried_tuple!(A B C);
carried_tuple!(A B C D);

with_indices!(8, wgmma!("m64n16k16", "bf16.bf16", 8, wgmma_m64n16k16_bf16_rs, wgmma_m64n16k16_bf16_ss));
with_indices!(16, wgmma!("m64n32k16", "bf16.bf16", 16, wgmma_m64n32k16_bf16_rs, wgmma_m64n32k16_bf16_ss));
with_indices!(32, wgmma!("m64n64k16", "bf16.bf16", 32, wgmma_m64n64k16_bf16_rs, wgmma_m64n64k16_bf16_ss));
with_indices!(64, wgmma!("m64n128k16", "bf16.bf16", 64, wgmma_m64n128k16_bf16_rs, wgmma_m64n128k16_bf16_ss));
with_indices!(8, wgmma!("m64n16k16", "f16.f16", 8, wgmma_m64n16k16_f16_rs, wgmma_m64n16k16_f16_ss));
with_indices!(16, wgmma!("m64n32k16", "f16.f16", 16, wgmma_m64n32k16_f16_rs, wgmma_m64n32k16_f16_ss));
with_indices!(32, wgmma!("m64n64k16", "f16.f16", 32, wgmma_m64n64k16_f16_rs, wgmma_m64n64k16_f16_ss));
with_indices!(64, wgmma!("m64n128k16", "f16.f16", 64, wgmma_m64n128k16_f16_rs, wgmma_m64n128k16_f16_ss));
