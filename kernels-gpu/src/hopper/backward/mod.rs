//! The backward's kernels for Hopper.

pub mod grad;
