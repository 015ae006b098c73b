//! Who a thread is within its grid, and the barrier of a block.

use crate::emulated::{At, Site, barrier, with};

macro_rules! special_registers {
    ($($(#[$meta:meta])* $name:ident = $register:literal, $block:ident => $value:expr;)*) => {$(
        $(#[$meta])*
        #[track_caller]
        pub fn $name() -> u32 {
            with(Site::here($register), |$block| Ok($value as u32))
        }
    )*};
}

special_registers! {
    /// Index of the thread in its block.
    thread_idx_x = "%tid.x", block => block.current;
    /// Second coordinate of the thread in its block: blocks have one dimension.
    thread_idx_y = "%tid.y", _block => 0u32;
    /// Index of the block in its grid.
    block_idx_x = "%ctaid.x", block => block.index;
    /// Second coordinate of the block in its grid: grids have one dimension.
    block_idx_y = "%ctaid.y", _block => 0u32;
    /// Third coordinate of the block in its grid.
    block_idx_z = "%ctaid.z", _block => 0u32;
    /// Threads of a block.
    block_dim_x = "%ntid.x", block => block.threads.len();
    /// Blocks of the grid.
    grid_dim_x = "%nctaid.x", block => block.grid;
    /// Blocks of the grid in the second direction.
    grid_dim_y = "%nctaid.y", _block => 1u32;
}

/// Waits for all threads of the block; what they wrote to memory before it is visible to them all after it.
#[track_caller]
pub fn sync_threads() {
    barrier(Site::here("bar.sync 0"), 0, None, At::Sync);
}
