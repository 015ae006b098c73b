//! A channel's memory in the symmetric heap.

use kernels_gpu::params::Array;
use kernels_gpu::protocol::ChannelLayout;

use super::{Config, OpError};
use crate::heap::Symmetric;
use crate::inputs::{Dims, Inputs};
use crate::plan::Plan;
use crate::world::Pe;

/// Slots and words of one layout, with their addresses on every PE, and the epoch of the last step.
pub(super) struct Channel {
    payload: Symmetric<u8>,
    payload_addresses: Vec<u64>,
    /// Held for its memory; reached through the addresses.
    _words: Symmetric<u64>,
    word_addresses: Vec<u64>,
    epoch: [u64; 1],
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
            payload,
            _words: words,
            epoch: [0],
        })
    }

    /// Begins the next step on this channel.
    pub fn advance(&mut self) {
        self.epoch[0] += 1;
    }

    pub fn epoch(&self) -> u64 {
        self.epoch[0]
    }

    pub fn epoch_array(&self) -> Array {
        Array::of(&self.epoch)
    }

    pub fn payload_array(&self) -> Array {
        Array::of(&self.payload_addresses)
    }

    pub fn words_array(&self) -> Array {
        Array::of(&self.word_addresses)
    }

    /// Copies `bytes` bytes at `from` of the payload of PE `source` to `to` of this PE's.
    pub fn copy_from_peer(&self, source: usize, from: usize, to: usize, bytes: usize) {
        assert!(from.max(to) + bytes <= self.payload.len(), "slots lie inside the payload");
        // SAFETY: both ranges lie inside the object, which every PE has allocated with this length; they belong to
        // different PEs; the caller has synchronised with the writer of the source (a barrier after the scan), and
        // nothing else touches the destination slot until its ack.
        unsafe {
            let source = self.payload.peer_addr(source).add(from);
            std::ptr::copy_nonoverlapping(source, self.payload.addr().add(to), bytes);
        }
    }
}
