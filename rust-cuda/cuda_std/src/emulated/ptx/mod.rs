//! One function per PTX instruction, named like it, as the emulation has it. What each does, and its safety conditions, are
//! those of the device's functions of the same names; here a broken condition on shared memory, collective or asynchronous
//! instructions ends the kernel with a [fault](crate::emulated::FaultKind), outside of a kernel with a panic.
#![allow(clippy::missing_safety_doc)] // said above, once

#[path = "../../ptx/descriptor.rs"]
mod descriptor;

mod arithmetic;
mod barrier;
mod bulk;
mod global;
mod matrix;
mod mbarrier;
mod order;
mod shared;
mod special;
mod wgmma;

pub use arithmetic::*;
pub use barrier::*;
pub use bulk::*;
pub use descriptor::*;
pub use global::*;
pub use matrix::*;
pub use mbarrier::*;
pub use order::*;
pub use shared::*;
pub use special::*;
pub use wgmma::*;
