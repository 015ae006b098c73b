//! The device's code on the CPU.
//!
//! The kernels as GPUs run them, compiled for the host against the emulation of GPU instructions in [`cuda_std::emulated`]:
//! [`kernel`] finds one by the name of its entry in a device module, [`Emulated`] runs whole steps with them, and [`check`]
//! compares such a step with the f64 reference. [`Tiles`] runs the operations of the tile DSL one by one. No GPU is needed. It
//! is a tool for tests: a step takes thousands of times longer than on a GPU.

pub mod check;
mod executor;
pub mod images;
mod tiles;

pub use executor::{Emulated, Launches};
pub use kernels_gpu_emulated::entry::find as kernel;
pub use tiles::Tiles;
