//! Who a thread is within its grid, and the barrier of a block.

use core::arch::nvptx;

macro_rules! special_registers {
    ($($(#[$meta:meta])* $name:ident = $intrinsic:ident;)*) => {$(
        $(#[$meta])*
        #[inline(always)]
        pub fn $name() -> u32 {
            // SAFETY: reads a special register.
            unsafe { nvptx::$intrinsic() as u32 }
        }
    )*};
}

special_registers! {
    /// Index of the thread in its block.
    thread_idx_x = _thread_idx_x;
    /// Second coordinate of the thread in its block.
    thread_idx_y = _thread_idx_y;
    /// Index of the block in its grid.
    block_idx_x = _block_idx_x;
    /// Second coordinate of the block in its grid.
    block_idx_y = _block_idx_y;
    /// Third coordinate of the block in its grid.
    block_idx_z = _block_idx_z;
    /// Threads of a block.
    block_dim_x = _block_dim_x;
    /// Blocks of the grid.
    grid_dim_x = _grid_dim_x;
    /// Blocks of the grid in the second direction.
    grid_dim_y = _grid_dim_y;
}

/// Waits for all threads of the block; what they wrote to shared and global memory before it is visible to them
/// all after it. Every thread of the block must reach the same call.
#[inline(always)]
pub fn sync_threads() {
    // SAFETY: a barrier touches no memory of its own. A thread that does not come hangs the block, which is safe.
    unsafe { nvptx::_syncthreads() }
}
