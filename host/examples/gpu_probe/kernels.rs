//! Small kernels as PTX, and their parameters.

use bytemuck::{Pod, Zeroable};

/// The module.
pub const PTX: &str = include_str!("kernels.ptx");

/// Parameters of `fill`: `out[i] = value + i` for `i < len`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Fill {
    /// Of u32.
    pub out: u64,
    /// Elements.
    pub len: u64,
    /// First value.
    pub value: u32,
    /// Zero.
    pub pad: u32,
}

/// Parameters of `handshake`, one thread: `words[0] = 1`, waits until `words[1] = 2`, then `words[2] = words[1] + 1`, or
/// 99 if the wait ran out.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Handshake {
    /// Three u64.
    pub words: u64,
    /// Bound of the wait, in nanoseconds.
    pub timeout_ns: u64,
}

/// Parameters of `ring`, one thread a block, two words for each block: for epochs 1 to `rounds`, `peer[2 b] = epoch * 1000 +
/// rank`, then the release signal `peer[2 b + 1] = epoch`; waits (acquire) until `own[2 b + 1] >= epoch` and counts in
/// `errors` the values that are not the left neighbour's of this epoch or, since it may run ahead, a later one. A wait that
/// runs out counts a million and ends the block.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Ring {
    /// Of u64, this PE's copy.
    pub own: u64,
    /// The right neighbour's copy.
    pub peer: u64,
    /// One u64, host-mapped.
    pub errors: u64,
    /// Epochs.
    pub rounds: u64,
    /// This PE.
    pub rank: u64,
    /// The left neighbour.
    pub left: u64,
    /// Bound of every wait, in nanoseconds.
    pub timeout_ns: u64,
}

/// Parameters of `wild`, which stores to `address` whatever it is.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Wild {
    /// Where.
    pub address: u64,
}
