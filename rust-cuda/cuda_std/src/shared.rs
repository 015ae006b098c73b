//! The dynamic shared memory of a block.

use crate::ptx;

/// Address of the block's dynamic shared memory in the shared window, as the instructions in [`ptx`] take it.
///
/// The symbol asks for 1024 bytes of alignment, which swizzled tiles need. The driver grants it as long as the
/// kernel has no static shared memory in front; check `dynamic() & 1023 == 0` where it matters.
#[inline(always)]
pub fn dynamic() -> u32 {
    ptx::dynamic_shared_address()
}
