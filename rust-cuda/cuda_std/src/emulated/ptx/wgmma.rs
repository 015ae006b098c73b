//! Asynchronous matrix products of a warpgroup.

use crate::emulated::{Carried as Registers, Half, Instruction, LeftOf, Site, commit, fence, issue, wait};

/// Orders writes of registers before the products that use them.
#[track_caller]
pub unsafe fn wgmma_fence() {
    fence(Site::here("wgmma.fence"));
}

/// Makes a group of the products since the last one.
#[track_caller]
pub unsafe fn wgmma_commit_group() {
    commit(Site::here("wgmma.commit_group"));
}

/// Waits until at most `N` groups of products are under way. `registers`: all accumulators and register operands of
/// products that may be under way.
#[track_caller]
pub unsafe fn wgmma_wait_group<const N: u32>(registers: impl Carried) {
    let mut list = List::default();
    registers.carry(&mut list);
    wait(Site::here("wgmma.wait_group").with([N as i32, 0, 0, 0, 0]), N as usize, list.0);
}

/// Has these registers computed here.
pub fn computed(registers: impl Carried) {
    let _ = registers;
}

/// Registers, as [`Carried::carry`] notes them.
#[derive(Default)]
pub struct List(Registers);

/// Registers that products use asynchronously.
pub trait Carried {
    /// Notes which registers these are.
    fn carry(self, list: &mut List);
}

impl<const N: usize> Carried for &mut [f32; N] {
    fn carry(self, list: &mut List) {
        list.0.accumulators.push((self.as_mut_ptr(), N));
    }
}

impl<const N: usize> Carried for &mut [u32; N] {
    fn carry(self, list: &mut List) {
        list.0.operands.extend_from_slice(self);
    }
}

macro_rules! carried_tuple {
    ($($name:ident)*) => {
        impl<$($name: Carried),*> Carried for ($($name,)*) {
            fn carry(self, list: &mut List) {
                let _ = &list; // of no use to the empty tuple
                #[allow(non_snake_case)]
                let ($($name,)*) = self;
                $($name.carry(list);)*
            }
        }
    };
}

carried_tuple!();
carried_tuple!(A B);
carried_tuple!(A B C);
carried_tuple!(A B C D);

macro_rules! wgmma {
    ($($columns:literal, $half:ident, $length:literal, $rs:ident, $ss:ident;)*) => {$(
        /// `d = [d] + SCALE_A SCALE_B a b`, a from registers.
        #[track_caller]
        pub unsafe fn $rs<const SCALE_A: i32, const SCALE_B: i32, const TRANS_B: i32>(
            d: &mut [f32; $length], a: [u32; 4], b: u64, scale_d: u32,
        ) {
            const { assert!(SCALE_A.abs() == 1 && SCALE_B.abs() == 1 && (TRANS_B == 0 || TRANS_B == 1)) };
            let of = Instruction {
                half: Half::$half, columns: $columns, signs: [SCALE_A, SCALE_B], outer_major: [false, TRANS_B == 1],
            };
            let site = Site::here(stringify!($rs)).with([SCALE_A, SCALE_B, TRANS_B, 0, 0]);
            issue(site, of, d, LeftOf::Registers(a), b, scale_d);
        }

        /// `d = [d] + SCALE_A SCALE_B a b`, a from shared memory.
        #[track_caller]
        pub unsafe fn $ss<const SCALE_A: i32, const SCALE_B: i32, const TRANS_A: i32, const TRANS_B: i32>(
            d: &mut [f32; $length], a: u64, b: u64, scale_d: u32,
        ) {
            const {
                assert!(SCALE_A.abs() == 1 && SCALE_B.abs() == 1);
                assert!((TRANS_A == 0 || TRANS_A == 1) && (TRANS_B == 0 || TRANS_B == 1));
            };
            let of = Instruction {
                half: Half::$half, columns: $columns, signs: [SCALE_A, SCALE_B],
                outer_major: [TRANS_A == 1, TRANS_B == 1],
            };
            let site = Site::here(stringify!($ss)).with([SCALE_A, SCALE_B, TRANS_A, TRANS_B, 0]);
            issue(site, of, d, LeftOf::Shared(a), b, scale_d);
        }
    )*};
}

wgmma! {
    16, Bf16, 8, wgmma_m64n16k16_bf16_rs, wgmma_m64n16k16_bf16_ss;
    32, Bf16, 16, wgmma_m64n32k16_bf16_rs, wgmma_m64n32k16_bf16_ss;
    64, Bf16, 32, wgmma_m64n64k16_bf16_rs, wgmma_m64n64k16_bf16_ss;
    128, Bf16, 64, wgmma_m64n128k16_bf16_rs, wgmma_m64n128k16_bf16_ss;
    16, F16, 8, wgmma_m64n16k16_f16_rs, wgmma_m64n16k16_f16_ss;
    32, F16, 16, wgmma_m64n32k16_f16_rs, wgmma_m64n32k16_f16_ss;
    64, F16, 32, wgmma_m64n64k16_f16_rs, wgmma_m64n64k16_f16_ss;
    128, F16, 64, wgmma_m64n128k16_f16_rs, wgmma_m64n128k16_f16_ss;
}
