//! The device's instructions on the CPU: what [`crate::ptx`] and its neighbours are on any other target.
//!
//! Code written for GPUs compiles for the host against the same names, and an [`Emulator`] runs a block of it: each thread is
//! a coroutine, and one thread of the host runs them in turn, each up to its next wait. A collective instruction is a
//! rendezvous: the last thread to reach it does it for all. Shared addresses count from 1024 in the block's memory; global
//! addresses are pointers of the process. Matrix products and their descriptors are decoded as hardware does it for
//! 128-byte swizzled panels, and accumulate in f32.
//!
//! Asynchronous instructions happen at once or as late as the waits allow ([`Timing`]), threads run in ascending or
//! descending order ([`Order`]): a missing wait or barrier gives a wrong result in one of the four. Most are found as what they
//! are, with block, thread and instruction ([`FaultKind`]):
//!
//! * waits that never end, and collective instructions that threads reach at different places or with different operands;
//! * shared memory out of bounds or misaligned, and accesses that no barrier orders. Each thread has a vector clock, and
//!   every two bytes remember who wrote and who last read them;
//! * copies and products whose results are used, or whose operands are overwritten, before they were waited for; registers
//!   of products that a wait is not given; and ordinary stores with no proxy fence before asynchronous reads.
//!
//! Lanes of a warp are not made to run together. That they should have is found at collective instructions, and at barriers of
//! several warps where one lane has waited for an mbarrier alone. What it cannot find: other ways for a warp to come apart, races
//! on global memory, races with any but the last reader of a word, register pressure, and speed.

mod barriers;
mod block;
mod clocks;
mod copies;
mod descriptor;
mod fault;
mod mbarriers;
mod memory;
mod products;
mod run;
mod site;

pub use fault::{Fault, FaultKind};
pub use run::{Emulator, Launch, Order, Schedule, Timing};

pub(crate) use barriers::{At, barrier};
pub(crate) use block::{Block, Scope, Status, WARP, meet, raise, suspend, with};
pub(crate) use descriptor::Half;
pub(crate) use mbarriers::test;
pub(crate) use memory::BASE as SHARED_BASE;
pub(crate) use products::{Carried, Instruction, LeftOf, commit, fence, is_under_way, issue, settled, wait};
pub(crate) use site::Site;
