//! Kernels.

pub mod protocol;
