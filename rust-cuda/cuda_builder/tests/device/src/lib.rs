//! Kernels for the tests of `cuda_builder`: every instruction of `cuda_std::ptx`, so that ptxas has seen each, and
//! every pattern that the builder guards against. They are assembled, not run.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![cfg(target_arch = "nvptx64")]

mod guarded;
mod instructions;
mod nvshmem;
mod products;
