//! The part of [`cust`](https://docs.rs/cust/0.3) that deltalink uses, under the same names, over a driver that is loaded
//! when it is first asked for.
//!
//! The published crate cannot be used: it links `libcuda`, so that a program with it neither links where no driver is
//! installed nor starts there to say so, and its errors are an enumeration of CUDA 11's, which cannot hold the codes that
//! newer drivers return. Here nothing is linked, [`sys::load`] tells whether there is a driver, and an error is the driver's
//! own [number](error::CudaError).
//!
//! Owned here are contexts, devices, graphs and memory; [`sys`] has the raw functions for everything else.

pub mod context;
pub mod device;
pub mod error;
pub mod graph;
pub mod memory;
pub mod sys;
