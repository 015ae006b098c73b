//! Sending to a PE whose memory kernels cannot store to: copy, then signal, by whoever can.

/// A place of the symmetric heap on another PE.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Address of this PE's own copy, by which NVSHMEM knows the place.
    pub own: u64,
    /// Address of the other PE's copy where this one reaches it, as on the CPU; 0 where it does not.
    pub reached: u64,
}

/// A block on its way from this PE's symmetric memory to the same heap on `pe`.
#[derive(Clone, Copy, Debug)]
pub struct Put {
    /// The receiver.
    pub pe: u32,
    /// Address in this PE's own symmetric memory.
    pub from: u64,
    /// Where the block goes.
    pub to: Place,
    /// Bytes, a multiple of 4.
    pub bytes: usize,
    /// One u64, set after the block has arrived.
    pub signal: Place,
    /// What it is set to.
    pub value: u64,
}
