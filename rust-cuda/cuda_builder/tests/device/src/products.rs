//! Matrix products: each `mma` and `wgmma`, and a chain of two as a scan has it, which must stay asynchronous.

use cuda_std::{kernel, ptx, shared};

/// A chain of dependent products with register operands, hot.
#[kernel(threads = 128, registers = 240, hot)]
pub unsafe fn wgmma_chain(out: *mut f32, steps: u32) {
    let base = shared::dynamic();
    let (b, t) = (ptx::wgmma_descriptor_128(base, 16, 1024), ptx::wgmma_descriptor_128(base, 8192, 1024));
    let (mut s, mut r) = ([0f32; 64], [0f32; 32]);
    let (mut s_half, mut r_half) = ([0u32; 32], [0u32; 16]);
    macro_rules! halves {
        ($to:ident, $from:ident, $($i:literal)*) => {
            $($to[$i] = ptx::cvt_rn_bf16x2_f32($from[2 * $i + 1], $from[2 * $i]);)*
        };
    }
    macro_rules! products {
        ($product:ident, $scale:literal, $trans:literal, $d:ident, $a:ident, $b:ident, $step:literal, $($k:literal)*) => {
            $(ptx::$product::<1, $scale, $trans>(
                &mut $d,
                [$a[4 * $k], $a[4 * $k + 1], $a[4 * $k + 2], $a[4 * $k + 3]],
                $b + $step * $k,
                ($k != 0 || $trans == 1) as u32,
            );)*
        };
    }
    let mut step = 0;
    // SAFETY: assembled and looked at, never run.
    unsafe {
        while step < steps {
            halves!(s_half, s, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
            ptx::wgmma_fence();
            products!(wgmma_m64n64k16_bf16_rs, -1, 0, r, s_half, b, 2, 0 1 2 3 4 5 6 7);
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group::<0>((&mut r, &mut s_half));
            halves!(r_half, r, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
            ptx::wgmma_fence();
            products!(wgmma_m64n128k16_bf16_rs, 1, 1, s, r_half, t, 128, 0 1 2 3);
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group::<0>((&mut s, &mut r_half));
            step += 1;
        }
        macro_rules! store {
            ($($i:literal)*) => { $(ptx::st_global_f32(out.add($i), s[$i]);)* };
        }
        store!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
        store!(32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63);
    }
}

macro_rules! each_product {
    ($($kernel:ident: $length:literal, $rs:ident, $ss:ident;)*) => {$(
        /// One product of each kind.
        #[kernel(threads = 128, hot)]
        pub unsafe fn $kernel(out: *mut f32, a: u32) {
            let b = ptx::wgmma_descriptor_128(shared::dynamic(), 16, 1024);
            let mut d = [0f32; $length];
            let mut operand = [a, a + 1, a + 2, a + 3];
            // SAFETY: assembled and looked at, never run.
            unsafe {
                ptx::wgmma_fence();
                ptx::$rs::<-1, 1, 1>(&mut d, operand, b, 0);
                ptx::$ss::<1, -1, 1, 0>(&mut d, b, b, a);
                ptx::wgmma_commit_group();
                ptx::wgmma_wait_group::<0>((&mut d, &mut operand));
                ptx::st_global_f32(out, d[0] + d[$length - 1]);
                ptx::st_global_u32(out.add(1) as *mut u32, operand[0]);
            }
        }
    )*};
}

each_product! {
    product_n16_bf16: 8, wgmma_m64n16k16_bf16_rs, wgmma_m64n16k16_bf16_ss;
    product_n32_bf16: 16, wgmma_m64n32k16_bf16_rs, wgmma_m64n32k16_bf16_ss;
    product_n64_bf16: 32, wgmma_m64n64k16_bf16_rs, wgmma_m64n64k16_bf16_ss;
    product_n128_bf16: 64, wgmma_m64n128k16_bf16_rs, wgmma_m64n128k16_bf16_ss;
    product_n16_f16: 8, wgmma_m64n16k16_f16_rs, wgmma_m64n16k16_f16_ss;
    product_n32_f16: 16, wgmma_m64n32k16_f16_rs, wgmma_m64n32k16_f16_ss;
    product_n64_f16: 32, wgmma_m64n64k16_f16_rs, wgmma_m64n64k16_f16_ss;
    product_n128_f16: 64, wgmma_m64n128k16_f16_rs, wgmma_m64n128k16_f16_ss;
}

/// Products of a warp, and the fragments in and out of shared memory.
#[kernel(threads = 32, hot)]
pub unsafe fn fragments(out: *mut f32) {
    let row = shared::dynamic() + 16 * ptx::laneid();
    let mut d = [0f32; 4];
    // SAFETY: assembled and looked at, never run.
    unsafe {
        let (a, b) = (ptx::ldmatrix_x4(row), ptx::ldmatrix_x2(row));
        ptx::mma_m16n8k16_f32_bf16(&mut d, a, b);
        ptx::mma_m16n8k16_f32_f16(&mut d, ptx::ldmatrix_x4_trans(row), ptx::ldmatrix_x2_trans(row));
        ptx::mma_m16n8k8_f32_tf32(&mut d, a, [ptx::ldmatrix_x1(row), ptx::ldmatrix_x1_trans(row)]);
        ptx::stmatrix_x1(row, a[0]);
        ptx::stmatrix_x1_trans(row, a[1]);
        ptx::stmatrix_x2(row, a[0], a[1]);
        ptx::stmatrix_x2_trans(row, a[2], a[3]);
        ptx::stmatrix_x4(row, a[0], a[1], a[2], a[3]);
        ptx::stmatrix_x4_trans(row, a[3], a[2], a[1], a[0]);
        ptx::st_global_v4_f32(out, d[0], d[1], d[2], d[3]);
    }
}
