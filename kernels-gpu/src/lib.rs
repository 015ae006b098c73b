//! The tile DSL and the KDA / Gated DeltaNet chunk kernels written in it.
//!
//! One source, two targets: a kernel is a plain function over a [`tile::Warpgroup`] and a Pod parameter
//! struct ([`params`]). Its body is a sequence of collective tile operations with uniform control flow. On
//! `nvptx64` an operation is each thread's share of it; on the CPU ([`tile::host`]) a warpgroup is a
//! coroutine that performs the whole operation, and a barrier is a barrier.
//!
//! Kernels, in the order of a forward step: [`begin`], [`prep`], [`scan`], [`fixup`]; those of a backward step are in
//! [`backward`]; [`convolution`] is what a layer does to q, k and v before. What differs between KDA and GDN is the type
//! parameter [`gate::Gate`]. [`cut`] says from where on a transition does not matter. How summaries travel between
//! PEs is [`protocol`] (rules) and [`comm`] (the rules applied inside a kernel); [`comm_bench`] measures it. [`conformance`]
//! has a small kernel for each operation of tiles.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_ptx, asm_experimental_arch))]

pub mod backward;
pub mod begin;
pub mod comm;
pub mod comm_bench;
pub mod conformance;
pub mod convolution;
pub mod cut;
pub mod element;
#[cfg(any(target_arch = "nvptx64", emulated))]
pub mod entry;
pub mod fixup;
pub mod gate;
pub mod hopper;
pub mod math;
pub mod params;
pub mod prep;
pub mod protocol;
pub mod scan;
pub mod tile;
