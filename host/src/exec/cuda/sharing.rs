//! PEs that share a GPU.

use crate::exec::Waits;

/// How PEs share a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// PEs that run on one GPU at the same time; the same on all PEs.
    pub pes: usize,
    /// Whether their kernels start while others' run, as those of processes under MPS do. Threads of one process do not:
    /// there allocating, loading and launching can wait for everything that runs.
    pub concurrent: bool,
}

impl Sharing {
    /// A GPU for each PE.
    pub const NONE: Self = Self { pes: 1, concurrent: true };

    pub(super) fn waits(self) -> Waits {
        if self.pes > 1 && !self.concurrent { Waits::Host } else { Waits::Kernels }
    }

    /// Blocks of a launch that stays until its work is done, of a kernel of which `resident` fit the whole GPU of `sms` SMs.
    ///
    /// Kernels that wait for those of other PEs must leave room for them, whatever these need. With no more blocks in all
    /// than there are SMs, a block that has yet to start finds an SM without any.
    pub(super) fn blocks(self, resident: u32, sms: u32) -> u32 {
        let pes = self.pes.max(1) as u32;
        let most = if pes > 1 && self.concurrent { sms / pes } else { resident / pes };
        most.min(resident / pes).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_wait_leave_room_for_those_of_other_pes() {
        let sharing = |pes, concurrent| Sharing { pes, concurrent };
        assert_eq!(Sharing::NONE.blocks(264, 132), 264);
        assert_eq!((sharing(8, false).blocks(264, 132), sharing(8, true).blocks(264, 132)), (33, 16));
        assert_eq!((sharing(200, true).blocks(264, 132), sharing(2, true).blocks(66, 132)), (1, 33));
    }

    #[test]
    fn pes_that_may_hold_each_other_up_wait_on_the_host() {
        assert_eq!(Sharing { pes: 2, concurrent: false }.waits(), Waits::Host);
        assert_eq!(Sharing { pes: 2, concurrent: true }.waits(), Waits::Kernels);
        assert_eq!(Sharing { pes: 1, concurrent: false }.waits(), Waits::Kernels);
    }
}
