//! Barriers, votes, shuffles and fragments of the emulation against what they are defined to do.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};

use common::{at, results};
use cuda_std::{math, ptx, thread, warp};

#[test]
fn threads_know_who_they_are() {
    let found = results(96, |_| {
        let here = [thread::thread_idx_x(), thread::block_dim_x(), thread::grid_dim_x(), thread::block_idx_x()];
        (here, ptx::laneid(), [thread::thread_idx_y(), thread::block_idx_y(), thread::block_idx_z()])
    });
    for (t, (here, lane, zeros)) in found.into_iter().enumerate() {
        assert_eq!((here, lane, zeros), ([t as u32, 96, 1, 0], t as u32 % 32, [0; 3]));
    }
}

#[test]
fn shuffles_exchange_between_lanes() {
    // SAFETY: by all lanes.
    let found = results(64, |t| unsafe {
        [
            warp::shuffle_idx(t, 5),
            warp::shuffle_xor(t, 3),
            warp::shuffle_down(t, 4),
            warp::shuffle_up(t, 4),
            // Segments of 8 lanes.
            ptx::shfl_sync_idx_b32(t, 1, 0x181f, warp::ALL),
            ptx::shfl_sync_down_b32(t, 6, 0x181f, warp::ALL),
        ]
    });
    for (t, found) in found.into_iter().enumerate() {
        let (t, first, lane) = (t as u32, t as u32 & !31, t as u32 % 32);
        let down = if lane < 28 { t + 4 } else { t };
        let up = if lane >= 4 { t - 4 } else { t };
        let segment_down = if lane % 8 + 6 < 8 { t + 6 } else { t };
        assert_eq!(found, [first + 5, t ^ 3, down, up, t / 8 * 8 + 1, segment_down]);
    }
}

#[test]
fn votes_count_all_lanes() {
    // SAFETY: by all lanes; the last by those it names.
    let found = results(32, |t| unsafe {
        let odd = ptx::vote_sync_ballot(t % 2, warp::ALL);
        let some = [warp::all(t < 32), warp::all(t != 7), warp::any(t == 7), warp::any(t > 40)];
        let elected = ptx::elect_sync(warp::ALL);
        let half = if t < 16 { ptx::vote_sync_ballot(1, 0xffff) } else { ptx::vote_sync_ballot(1, 0xffff_0000) };
        (odd, some, elected, half)
    });
    for (t, found) in found.into_iter().enumerate() {
        let half = if t < 16 { 0xffff } else { 0xffff_0000 };
        assert_eq!(found, (0xaaaa_aaaa, [true, false, true, false], t == 0, half));
    }
}

#[test]
fn barriers_order_and_vote() {
    // SAFETY: every word has one writer, and a barrier before it is read; all threads that are named reach each barrier.
    let found = results(128, |t| unsafe {
        ptx::st_shared_u32(at(4 * t), t + 1);
        thread::sync_threads();
        let mirrored = ptx::ld_shared_u32(at(4 * (127 - t)));
        let all = [ptx::bar_red_and(1, 128, (t != 9) as u32), ptx::bar_red_and(1, 128, 1)];
        let any = [ptx::bar_red_or(2, 128, (t == 9) as u32), ptx::bar_red_or(2, 128, 0)];
        // The first warp hands over to the second one and goes on.
        if t < 32 {
            ptx::st_shared_u32(at(4 * t), 1000 + t);
            ptx::bar_arrive(3, 64);
        } else if t < 64 {
            ptx::bar_sync(3, 64);
        }
        let handed = if (32..64).contains(&t) { ptx::ld_shared_u32(at(4 * (t - 32))) } else { 0 };
        (mirrored, all, any, handed)
    });
    for (t, found) in found.into_iter().enumerate() {
        let handed = if (32..64).contains(&t) { 1000 + t as u32 - 32 } else { 0 };
        assert_eq!(found, (128 - t as u32, [false, true], [true, false], handed));
    }
}

#[test]
fn matrices_come_and_go_in_fragments() {
    // SAFETY: one writer for each element, a barrier in between, rows of 16 bytes.
    let found = results(32, |t| unsafe {
        // Four matrices of 8 x 8: element (m, r, c) is 100 m + 8 r + c.
        let (m, r) = (t / 8, t % 8);
        for c in 0..8 {
            ptx::st_shared_b16(at(16 * t + 2 * c), (100 * m + 8 * r + c) as u16);
        }
        warp::sync();
        let (plain, turned) = (ptx::ldmatrix_x4(at(16 * t)), ptx::ldmatrix_x4_trans(at(16 * t)));
        let one = ptx::ldmatrix_x1(at(16 * (t % 8)));
        let two = ptx::ldmatrix_x2_trans(at(16 * (t % 16)));
        warp::sync();
        ptx::stmatrix_x4_trans(at(1024 + 16 * t), plain[0], plain[1], plain[2], plain[3]);
        ptx::stmatrix_x2(at(2048 + 16 * (t % 16)), plain[2], plain[3]);
        warp::sync();
        let stored = [ptx::ld_shared_b16(at(1024 + 16 * t + 6)), ptx::ld_shared_b16(at(2048 + 16 * (t % 16) + 6))];
        (plain, turned, one, two, stored)
    });
    for (t, found) in found.into_iter().enumerate() {
        let t = t as u32;
        let (r, c) = (t / 4, 2 * (t % 4));
        let plain = [0, 1, 2, 3].map(|m| (100 * m + 8 * r + c) | (100 * m + 8 * r + c + 1) << 16);
        let turned = [0, 1, 2, 3].map(|m| (100 * m + 8 * c + r) | (100 * m + 8 * (c + 1) + r) << 16);
        // Row t % 8 of matrix t / 8, transposed: element 3 of it.
        let stored = [100 * (t / 8) + 8 * 3 + t % 8, 100 * (2 + t % 16 / 8) + 8 * (t % 8) + 3].map(|x| x as u16);
        assert_eq!(found, (plain, turned, plain[0], [turned[0], turned[1]], stored));
    }
}

/// `d += a b` of small integers, which every type holds.
fn products(inner: usize, product: impl Fn(&mut [f32; 4], [u32; 4], [u32; 2])) {
    let a = |r: usize, k: usize| ((3 * r + 5 * k) % 11) as f32 - 5.0;
    let b = |k: usize, c: usize| ((7 * k + 2 * c) % 13) as f32 - 6.0;
    let (d0, wide) = (|r: usize, c: usize| (r + 2 * c) as f32, inner == 16);
    let found = results(32, |t| {
        let (row, column) = (t as usize / 4, t as usize % 4);
        let pair = |x: f32, y: f32| if wide { ptx::cvt_rn_bf16x2_f32(y, x) } else { x.to_bits() };
        let half = |i: usize| if wide { 2 * column + 8 * i } else { column + 4 * i };
        let of_a = |i: usize| {
            let (r, k) = (row + 8 * (i % 2), half(i / 2));
            pair(a(r, k), if wide { a(r, k + 1) } else { 0.0 })
        };
        let of_b = |i: usize| pair(b(half(i), row), if wide { b(half(i) + 1, row) } else { 0.0 });
        let place = |i: usize| (row + 8 * (i / 2), 2 * column + i % 2);
        let mut d = [0, 1, 2, 3].map(|i| d0(place(i).0, place(i).1));
        product(&mut d, [of_a(0), of_a(1), of_a(2), of_a(3)], [of_b(0), of_b(1)]);
        d
    });
    for (t, d) in found.into_iter().enumerate() {
        for (i, d) in d.into_iter().enumerate() {
            let (r, c) = (t / 4 + 8 * (i / 2), 2 * (t % 4) + i % 2);
            assert_eq!(d, (0..inner).fold(d0(r, c), |sum, k| sum + a(r, k) * b(k, c)));
        }
    }
}

#[test]
fn products_of_a_warp_are_those_of_loops() {
    // SAFETY: by all lanes.
    products(16, |d, a, b| unsafe { ptx::mma_m16n8k16_f32_bf16(d, a, b) });
    // SAFETY: as above.
    products(8, |d, a, b| unsafe { ptx::mma_m16n8k8_f32_tf32(d, a, b) });
    let as_f16 = |pair: u32| ptx::cvt_rn_f16x2_f32(f32::from_bits(pair & 0xffff_0000), f32::from_bits(pair << 16));
    // SAFETY: as above.
    products(16, |d, a, b| unsafe { ptx::mma_m16n8k16_f32_f16(d, a.map(as_f16), b.map(as_f16)) });
}

#[test]
fn conversions_round_as_they_say() {
    assert_eq!(ptx::cvt_rn_bf16x2_f32(-2.0, 1.0 + 1.0 / 256.0), 0xc000_3f80);
    assert_eq!(ptx::cvt_rn_bf16_f32(1.0 + 3.0 / 256.0), 0x3f82);
    assert_eq!(
        (ptx::cvt_rn_f16_f32(65504.0), ptx::cvt_rn_f16_f32(1e6), ptx::cvt_f32_f16(0x3c01)),
        (0x7bff, 0x7c00, 1.0 + 1.0 / 1024.0)
    );
    assert_eq!(ptx::cvt_rn_tf32_f32(1.0 + 3.0 * f32::powi(2.0, -11)), (1.0 + f32::powi(2.0, -9)).to_bits());
    assert_eq!(ptx::cvt_rn_tf32_f32(1.0 + f32::powi(2.0, -11)), 1f32.to_bits());
    let tiny = f32::from_bits(1);
    assert_eq!((ptx::ex2_approx_ftz_f32(-3.0), ptx::ex2_approx_ftz_f32(-140.0)), (0.125, 0.0));
    assert_eq!((ptx::lg2_approx_f32(8.0), ptx::lg2_approx_ftz_f32(tiny)), (3.0, f32::NEG_INFINITY));
    assert_eq!((ptx::rcp_approx_f32(4.0), ptx::rcp_approx_ftz_f32(tiny)), (0.25, f32::INFINITY));
    assert_eq!((ptx::rsqrt_approx_f32(4.0), ptx::rsqrt_approx_ftz_f32(tiny)), (0.5, f32::INFINITY));
    assert_eq!((ptx::sqrt_approx_f32(9.0), ptx::sqrt_rn_f32(2.0)), (3.0, 2f32.sqrt()));
    assert_eq!(math::fma(1e20, 1e20, f32::NEG_INFINITY), f32::NEG_INFINITY);
}

#[test]
fn packed_products_are_rounded_once() {
    let pair = |high: f32, low: f32| ptx::cvt_rn_bf16x2_f32(high, low);
    // 1 + 2^-7 squared is 1 + 2^-6 + 2^-14, of which the last is lost; 1.5 * 1.5 is a number of bf16.
    let x = pair(1.0 + 1.0 / 128.0, 1.5);
    assert_eq!(ptx::mul_rn_bf16x2(x, x), pair(1.0 + 1.0 / 64.0, 2.25));
    // Added to what it is nearly the negative of, nothing is lost: all bits of the product count.
    assert_eq!(ptx::fma_rn_bf16x2(x, x, pair(-1.0 - 1.0 / 64.0, -2.0)), pair(f32::powi(2.0, -14), 0.25));
    assert_eq!(ptx::mul_rn_bf16x2(pair(-0.0, f32::NAN), pair(1.0, 1.0)) >> 16, 0x8000);
}

#[test]
fn words_are_changed_atomically() {
    let word = AtomicU64::new(0);
    let address = word.as_ptr();
    // SAFETY: a word that outlives the kernel.
    let found = results(64, |t| unsafe {
        ptx::atom_add_relaxed_gpu_u64(address, 1);
        ptx::red_release_sys_add_u64(address, 2);
        ptx::red_relaxed_gpu_add_u64(address, 3);
        ptx::fence_acq_rel_gpu();
        thread::sync_threads();
        let sum = ptx::ld_acquire_gpu_u64(address);
        thread::sync_threads();
        let old = if t == 0 { ptx::atom_cas_relaxed_gpu_u64(address, sum, 7) } else { 7 };
        thread::sync_threads();
        if t == 1 {
            ptx::st_release_sys_u64(address, ptx::atom_add_acq_rel_gpu_u64(address, 0) - 7);
        }
        thread::sync_threads();
        (sum, if t == 0 { old } else { sum }, ptx::ld_relaxed_sys_u64(address))
    });
    assert!(found.iter().all(|&found| found == (64 * 6, 64 * 6, 0)));
    assert_eq!(word.load(Ordering::Relaxed), 0);
}
