//! Launching kernels. [`cpu`] runs them on the CPU back end of the tile DSL.

pub mod cpu;
