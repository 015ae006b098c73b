//! Launching kernels. [`cpu`] runs them on the CPU back end of the tile DSL, [`cuda`] (feature `cuda`) on GPUs.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
