//! A channel's memory in the symmetric heap.

use kernels_gpu::protocol::ChannelLayout;

use super::{Config, OpError};
use crate::heap::Symmetric;
use crate::inputs::{Dims, Inputs};
use crate::plan::Plan;
use crate::world::Pe;

/// Slots and words of one layout, with their addresses on every PE, and the epoch of the last step.
pub(super) struct Channel {
    /// Held for their memory; reached through the addresses.
    _memory: (Symmetric<u8>, Symmetric<u64>),
    payload_addresses: Vec<u64>,
    word_addresses: Vec<u64>,
    epoch: u64,
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

impl Channel {
    /// Collective: allocates the channel on every PE, with all words zero.
    pub fn new(pe: &Pe, layout: ChannelLayout) -> Result<Self, OpError> {
        let payload = pe.heap().alloc::<u8>("summary slots", layout.payload_bytes())?;
        let words = pe.heap().alloc::<u64>("summary signals", layout.words())?;
        let addresses = |addr: &dyn Fn(usize) -> u64| (0..pe.size()).map(addr).collect::<Vec<u64>>();
        Ok(Self {
            payload_addresses: addresses(&|rank| payload.peer_addr(rank) as u64),
            word_addresses: addresses(&|rank| words.peer_addr(rank) as u64),
            _memory: (payload, words),
            epoch: 0,
        })
    }

    /// Begins the next step on this channel.
    pub fn advance(&mut self) {
        self.epoch += 1;
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Address of every PE's payload memory, as this PE reaches it.
    pub fn payload_addresses(&self) -> &[u64] {
        &self.payload_addresses
    }

    /// Address of every PE's words, as this PE reaches them.
    pub fn word_addresses(&self) -> &[u64] {
        &self.word_addresses
    }
}
