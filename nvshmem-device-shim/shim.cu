// The device functions of NVSHMEM that kernels call, under names with C linkage: NVSHMEM's own are inline C++ templates,
// which a kernel in another language cannot name. Built and linked by cuda_builder, which needs nothing else of CUDA C++.
//
// `to`, `from` and `signal` are addresses of this PE's symmetric heap; they stand for the same place on PE `pe`.
// Functions named `_warp` are collective over a warp, the others are of the calling thread.

#include <cstddef>
#include <cstdint>

#include <nvshmem.h>
#include <nvshmemx.h>

extern "C" {

// This PE's number, and how many there are.
__device__ int dl_my_pe() { return nvshmem_my_pe(); }
__device__ int dl_n_pes() { return nvshmem_n_pes(); }

// Where this PE can load and store what is at `symmetric` on `pe`; null if it cannot. Not for the functions below.
__device__ void *dl_ptr(const void *symmetric, int pe) { return nvshmem_ptr(symmetric, pe); }

// Copies `bytes` to `pe`, then sets its signal to `value`; the signal is seen only after the data. Returns at once: `from`
// must stay as it is until dl_quiet. Warpgroups of a block send on their own, so a warp calls, not the block.
__device__ void dl_putmem_signal_nbi_warp(void *to, const void *from, size_t bytes, uint64_t *signal, uint64_t value,
                                          int pe) {
  nvshmemx_putmem_signal_nbi_warp(to, from, bytes, signal, value, NVSHMEM_SIGNAL_SET, pe);
}

// Sets a signal of `pe`.
__device__ void dl_signal_set(uint64_t *signal, uint64_t value, int pe) {
  nvshmemx_signal_op(signal, value, NVSHMEM_SIGNAL_SET, pe);
}

// Waits until everything that this PE sent is there; orders what is sent before and after, for each destination.
__device__ void dl_quiet() { nvshmem_quiet(); }
__device__ void dl_fence() { nvshmem_fence(); }

}  // extern "C"
