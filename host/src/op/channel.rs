//! A channel's memory in the symmetric heap.

use kernels_gpu::params::{Array, Way};
use kernels_gpu::protocol::ChannelLayout;

use super::agreement::Direction;
use super::{Config, OpError, Transport};
use crate::exec::{Executor, SymmetricBytes};
use crate::inputs::{Dims, Inputs};
use crate::plan::Plan;
use crate::world::Pe;

/// Slots and words of one layout, with their addresses on every PE, and the epoch of the last step.
pub(super) struct Channel {
    payload: SymmetricBytes,
    words: SymmetricBytes,
    ways: Vec<u32>,
    /// Steps that the host has begun. The device counts for itself, as steps may be replayed there: see [`Channel::epoch_word`].
    epoch: u64,
    epoch_word: Array,
}

/// The layout that a plan and its tensors ask for.
pub(super) fn layout(plan: &Plan, inputs: &Inputs<'_>, dims: &Dims, config: &Config) -> Result<ChannelLayout, OpError> {
    let m_size = config.m_wire.resolve(inputs.dtype()).size() as u32;
    let rows = plan.lanes.max(1) * dims.hv;
    ChannelLayout::new(plan.pes() as u32, rows as u32, dims.k as u32, dims.v as u32, m_size).map_err(|reason| {
        let Dims { hv, k, v, .. } = *dims;
        OpError::Slots { lanes: plan.lanes, hv, k, v, pes: plan.pes(), reason: reason.to_string() }
    })
}

/// Bytes of the symmetric heap that a channel of this layout takes, with room for alignment.
#[cfg(feature = "cuda")]
pub(super) fn heap_bytes(layout: &ChannelLayout) -> usize {
    let align = crate::heap::ALIGN;
    layout.payload_bytes().next_multiple_of(align) + words_bytes(layout).next_multiple_of(align)
}

/// Bytes of a channel's words, and of this PE's epoch behind them.
fn words_bytes(layout: &ChannelLayout) -> usize {
    (layout.words() + 1) * size_of::<u64>()
}

impl Channel {
    /// Collective: allocates the channel on every PE, with all words zero. States of a forward step and gradients of a
    /// backward step travel in channels of their own, see `kernels_gpu::protocol`. How each PE is sent to is decided here, once.
    pub fn new<X: Executor>(
        exec: &mut X,
        pe: &Pe,
        direction: Direction,
        layout: ChannelLayout,
        transport: Transport,
    ) -> Result<Self, OpError> {
        let (slots, signals) = match direction {
            Direction::Forward => ("summary slots", "summary signals"),
            Direction::Backward => ("gradient slots", "gradient signals"),
        };
        let payload = exec.symmetric(pe, slots, layout.payload_bytes())?;
        let words = exec.symmetric(pe, signals, words_bytes(&layout))?;
        let way = |rank: usize| {
            let reached = payload.addresses[rank].is_some() && words.addresses[rank].is_some();
            let stores = rank == pe.rank() || (reached && transport == Transport::Auto);
            if stores { Way::Stores as u32 } else { Way::Puts as u32 }
        };
        let ways = (0..pe.size()).map(way).collect();
        // Every PE reaches its own; a kernel that is given 0 fails rather than writes elsewhere.
        let own = words.addresses[pe.rank()].unwrap_or(0);
        let epoch_word = Array { addr: own + (layout.words() * size_of::<u64>()) as u64, len: 1 };
        Ok(Self { payload, words, ways, epoch: 0, epoch_word })
    }

    /// The epoch of the last step as kernels have it: one u64 of this PE's own, which every step advances on the device.
    pub fn epoch_word(&self) -> Array {
        self.epoch_word
    }

    /// Begins the next step on this channel.
    pub fn advance(&mut self) {
        self.epoch += 1;
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Address of PE `rank`'s payload memory, if this PE reaches it.
    pub fn payload_of(&self, rank: usize) -> Option<u64> {
        self.payload.addresses[rank]
    }

    /// Address of every PE's payload memory, as kernels have it: 0 where this PE does not reach it.
    pub fn payload_addresses(&self) -> Vec<u64> {
        self.payload.addresses.iter().map(|address| address.unwrap_or(0)).collect()
    }

    /// Address of every PE's words, in the same way.
    pub fn word_addresses(&self) -> Vec<u64> {
        self.words.addresses.iter().map(|address| address.unwrap_or(0)).collect()
    }

    /// The [`Way`] to every PE.
    pub fn ways(&self) -> &[u32] {
        &self.ways
    }
}
