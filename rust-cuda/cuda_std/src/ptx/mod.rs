//! One function per PTX instruction, named like it: the only home of `asm!`.
//!
//! # Safety
//! Functions on registers alone are safe. The others are unsafe, for these reasons, which their documentation
//! does not repeat:
//! * **Addresses** must be valid for the access, aligned to its size (vectors to the whole vector) and point to
//!   the state space that the name says. Shared addresses are 32-bit addresses in the shared window of the block
//!   (see [`crate::shared::dynamic`]); global addresses are plain pointers.
//! * **Collective instructions** (barriers, shuffles, votes, `ldmatrix`, `mma`, `wgmma`, `elect`, `setmaxnreg`)
//!   must be reached by all threads they name, together and with the same constant arguments.
//! * **Asynchronous instructions** (`cp.async`, bulk copies, `wgmma`) use their operands until a wait says that
//!   they are done. Until then memory must stay as it is, and registers too: [`wgmma_wait_group`] takes
//!   accumulators and operands along for that reason.
//!
//! Memory is ordered as the PTX memory model says: plain accesses are weak, `relaxed`, `acquire`, `release` and the
//! fences are what their names say, at the scope in the name. To the compiler every instruction that may write
//! memory, or wait for someone else's writes, is opaque: it moves no access across it.

use core::arch::asm;

mod table;

mod arithmetic;
mod barrier;
mod bulk;
mod descriptor;
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
