//! Every other instruction of `cuda_std::ptx`, by the module that it is in.

use cuda_std::{kernel, math, ptx, shared, thread, warp};

/// `special`, and what `thread` and `warp` add.
#[kernel(threads = 128, registers = 64, hot)]
pub unsafe fn special(out: *mut u32, clocks: *mut u64) {
    // SAFETY: assembled and looked at, never run.
    unsafe {
        ptx::griddepcontrol_wait();
        ptx::setmaxnreg_dec::<40>();
        let start = ptx::clock64();
        ptx::nanosleep(100);
        ptx::st_global_u64(clocks, ptx::clock64() - start + ptx::globaltimer());
        let places = [thread::thread_idx_x(), thread::thread_idx_y(), thread::block_idx_x(), thread::block_idx_y()];
        let sizes = [thread::block_idx_z(), thread::block_dim_x(), thread::grid_dim_x(), thread::grid_dim_y()];
        ptx::st_global_v4_u32(out, places[0], places[1], places[2], places[3]);
        ptx::st_global_v4_u32(out.add(4), sizes[0], sizes[1], sizes[2], sizes[3]);
        ptx::st_global_v2_u32(out.add(8), warp::lane_id(), ptx::smid());
        if ptx::elect_sync(warp::ALL) {
            ptx::st_global_u32(out.add(10), ptx::activemask());
        }
        ptx::setmaxnreg_inc::<56>();
        ptx::griddepcontrol_launch_dependents();
        if ptx::ld_global_u32(out) == 7 {
            ptx::trap();
        }
    }
}

/// `barrier`, and the shuffles and votes of `warp`.
#[kernel(threads = 128, hot)]
pub unsafe fn barriers(out: *mut u32, x: f32, n: u32) {
    // SAFETY: assembled and looked at, never run.
    unsafe {
        ptx::barrier0();
        ptx::bar_sync(n, 64);
        ptx::bar_sync_id::<5, 64>();
        ptx::bar_arrive(2, 128);
        let mut votes = ptx::bar_red_and(3, 128, n & 1) as u32 + ptx::bar_red_or(4, 128, n & 2) as u32;
        votes += warp::all(n > 3) as u32 + warp::any(n > 4) as u32 + ptx::vote_sync_ballot(n, warp::ALL);
        warp::sync();
        let mut sum = warp::shuffle_idx(x, 3) + warp::shuffle_xor(x, 1);
        sum += warp::shuffle_down(x, 2) + warp::shuffle_up(x, 1);
        ptx::st_global_v2_u32(out, votes, warp::shuffle_idx(sum.to_bits(), 0));
    }
}

/// `mbarrier` and `bulk`.
#[kernel(threads = 128, hot)]
pub unsafe fn copies(to: *mut u8, from: *const u8, bytes: u32) {
    let base = shared::dynamic();
    let barrier = base + 4096;
    // SAFETY: assembled and looked at, never run.
    unsafe {
        if thread::thread_idx_x() == 0 {
            ptx::mbarrier_init(barrier, 1);
            ptx::mbarrier_init(barrier + 8, 129);
            ptx::fence_mbarrier_init();
        }
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            ptx::mbarrier_arrive_expect_tx(barrier, bytes);
            ptx::cp_async_bulk_shared_global(base, from, bytes, barrier);
            ptx::mbarrier_expect_tx(barrier + 8, 0);
            ptx::mbarrier_arrive(barrier + 8);
        }
        ptx::cp_async_cg_16(base + 2048 + 16 * thread::thread_idx_x(), from);
        ptx::cp_async_cg_16_zfill(base + 2048 + 16 * thread::thread_idx_x(), from, bytes & 15);
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group::<1>();
        ptx::cp_async_wait_all();
        ptx::cp_async_mbarrier_arrive_noinc(barrier + 8);
        while !ptx::mbarrier_try_wait_parity(barrier, 0) {}
        while !ptx::mbarrier_test_wait_parity(barrier + 8, 0) {}
        ptx::fence_proxy_async();
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            ptx::cp_async_bulk_global_shared(to, base, bytes);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read::<1>();
            ptx::cp_async_bulk_wait_group::<0>();
            ptx::mbarrier_inval(barrier);
        }
    }
}

/// `order`.
#[kernel(hot)]
pub unsafe fn order(word: *mut u64) {
    // SAFETY: assembled and looked at, never run.
    unsafe {
        let mut x = ptx::ld_acquire_gpu_u64(word) + ptx::ld_acquire_sys_u64(word);
        x += ptx::ld_relaxed_gpu_u64(word) + ptx::ld_relaxed_sys_u64(word);
        ptx::fence_acq_rel_cta();
        ptx::fence_acq_rel_gpu();
        ptx::fence_acq_rel_sys();
        ptx::fence_proxy_async_shared();
        ptx::fence_proxy_async_global();
        x += ptx::atom_add_relaxed_gpu_u64(word, x) + ptx::atom_add_acq_rel_gpu_u64(word, x);
        x += ptx::atom_add_acq_rel_sys_u64(word, x) + ptx::atom_cas_relaxed_gpu_u64(word, x, 1);
        ptx::red_release_sys_add_u64(word, x);
        ptx::red_relaxed_gpu_add_u64(word, x);
        ptx::st_relaxed_gpu_u64(word, x);
        ptx::st_relaxed_sys_u64(word.add(1), x);
        ptx::st_release_gpu_u64(word.add(2), x);
        ptx::st_release_sys_u64(word.add(3), x);
    }
}

/// `shared`.
#[kernel(hot)]
pub unsafe fn shared_memory(at: u32) {
    let at = shared::dynamic() + at;
    // SAFETY: assembled and looked at, never run.
    unsafe {
        ptx::st_shared_b16(at, ptx::ld_shared_b16(at + 64));
        ptx::st_shared_u32(at, ptx::ld_shared_u32(at + 64));
        ptx::st_shared_f32(at, ptx::ld_shared_f32(at + 64));
        ptx::st_shared_u64(at, ptx::ld_shared_u64(at + 64));
        let [a, b] = ptx::ld_shared_v2_u32(at + 64);
        ptx::st_shared_v2_u32(at, a, b);
        let [a, b, c, d] = ptx::ld_shared_v4_u32(at + 64);
        ptx::st_shared_v4_u32(at, a, b, c, d);
        let [a, b] = ptx::ld_shared_v2_f32(at + 64);
        ptx::st_shared_v2_f32(at, a, b);
        let [a, b, c, d] = ptx::ld_shared_v4_f32(at + 64);
        ptx::st_shared_v4_f32(at, a, b, c, d);
    }
}

/// `global`.
#[kernel(hot)]
pub unsafe fn global_memory(to: *mut u32, from: *const u32) {
    let (to_f32, from_f32) = (to as *mut f32, from as *const f32);
    // SAFETY: assembled and looked at, never run.
    unsafe {
        ptx::st_global_b16(to as *mut u16, ptx::ld_global_b16(from as *const u16));
        ptx::st_global_b16(to as *mut u16, ptx::ld_global_nc_b16(from as *const u16));
        ptx::st_global_u32(to, ptx::ld_global_u32(from) + ptx::ld_global_nc_u32(from.add(1)));
        ptx::st_global_f32(to_f32, ptx::ld_global_f32(from_f32) + ptx::ld_global_nc_f32(from_f32.add(1)));
        ptx::st_global_u64(to as *mut u64, ptx::ld_global_u64(from as *const u64));
        let ([a, b], [c, d]) = (ptx::ld_global_v2_u32(from), ptx::ld_global_nc_v2_u32(from.add(2)));
        ptx::st_global_v2_u32(to, a + c, b + d);
        let ([a, b, c, d], [e, f, g, h]) = (ptx::ld_global_v4_u32(from), ptx::ld_global_nc_v4_u32(from.add(4)));
        ptx::st_global_v4_u32(to, a + e, b + f, c + g, d + h);
        let ([a, b], [c, d]) = (ptx::ld_global_v2_f32(from_f32), ptx::ld_global_nc_v2_f32(from_f32.add(2)));
        ptx::st_global_v2_f32(to_f32, a + c, b + d);
        let ([a, b, c, d], [e, f, g, h]) = (ptx::ld_global_v4_f32(from_f32), ptx::ld_global_nc_v4_f32(from_f32.add(4)));
        ptx::st_global_v4_f32(to_f32, a + e, b + f, c + g, d + h);
    }
}

/// `arithmetic` and `math`.
#[kernel(hot)]
pub unsafe fn arithmetic(out: *mut f32, x: f32, y: f32) {
    let pairs = [ptx::cvt_rn_bf16x2_f32(x, y), ptx::cvt_rn_f16x2_f32(x, y), ptx::cvt_rn_tf32_f32(x)];
    let halves = [ptx::cvt_rn_bf16_f32(x), ptx::cvt_rn_f16_f32(y)];
    let mut sum = ptx::cvt_f32_f16(halves[1]) + ptx::fma_rn_f32(x, y, x) + ptx::ex2_approx_ftz_f32(x);
    sum +=
        ptx::lg2_approx_f32(x) + ptx::lg2_approx_ftz_f32(y) + ptx::rsqrt_approx_f32(x) + ptx::rsqrt_approx_ftz_f32(y);
    sum += ptx::rcp_approx_f32(x) + ptx::rcp_approx_ftz_f32(y) + ptx::sqrt_approx_f32(x) + ptx::sqrt_rn_f32(y);
    sum += math::exp(x) + math::ln_1p(y) + math::fma(x, x, y);
    // SAFETY: assembled and looked at, never run.
    unsafe {
        ptx::st_global_f32(out, sum);
        ptx::st_global_v4_u32(out.add(4) as *mut u32, pairs[0], pairs[1], pairs[2], halves[0] as u32);
        let packed = ptx::fma_rn_bf16x2(pairs[0], pairs[1], ptx::mul_rn_bf16x2(pairs[0], pairs[2]));
        ptx::st_global_u32(out.add(8) as *mut u32, packed);
    }
}
