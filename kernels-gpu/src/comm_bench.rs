//! How fast messages are: every block sends one into a slot of the partner, signals, and waits for the partner's, over and
//! over, both directions at once.
//!
//! Tiles, stores, puts, signals and waits are those with which the scan sends its summaries ([`crate::comm`]). Acks are not
//! needed: slots alternate, a PE writes one again two epochs later, and the signal of the epoch between tells it that the
//! partner has read it.

use core::sync::atomic::Ordering;

use bytemuck::{Pod, Zeroable};

use crate::comm::{Link, Port};
use crate::element::DtypeCode;
use crate::params::{Array, Channel, Tensor, TraceBuffer};
use crate::protocol::{self, Medium, Message, parity};
#[cfg(any(not(target_arch = "nvptx64"), feature = "nvshmem"))]
use crate::tile::Put;
use crate::tile::{RESERVED_BYTES, Shared, Warpgroup, tile_bytes};

/// Rows and columns of the largest tile that is stored at once; its f32 elements have 16 KiB.
const TILE: usize = 64;
const TILE_ELEMENTS: usize = TILE * TILE;
/// Elements of a message that are compared with what was sent, at most.
const COMPARED: usize = 64;

/// Smallest and largest message of a block, in bytes; sizes are powers of two.
pub const MESSAGE_BYTES: core::ops::RangeInclusive<usize> = 16..=1 << 20;

/// [`crate::comm::Port::step`] of this kernel.
pub const STEP_BENCH: u32 = 4;

/// Warpgroups in a block.
pub const WARPGROUPS: usize = 1;

/// Dynamic shared memory of a block.
pub const fn shared_bytes() -> usize {
    RESERVED_BYTES + tile_bytes(TILE, TILE, size_of::<f32>())
}

/// Bytes of slots on every PE: those that the partner fills, then those out of which messages are put.
pub const fn payload_bytes(bytes: usize, blocks: usize) -> usize {
    2 * protocol::SLOTS as usize * blocks * bytes
}

/// Parameters of [`comm_bench`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct CommBenchParams {
    /// Words and trap as usual, with a row for each block; the payload is this kernel's own slots.
    pub channel: Channel,
    /// Empty.
    pub trace: TraceBuffer,
    /// Of u64, `[blocks, samples + 1]`: when each sample began, and when the last one ended.
    pub ticks: Array,
    /// One u64: elements that did not arrive as they were sent.
    pub wrong: Array,
    /// Bytes of a message, in [`MESSAGE_BYTES`].
    pub bytes: u64,
    /// Epoch before the first.
    pub epoch: u64,
    /// The PE to exchange with, whose partner is this one.
    pub partner: u32,
    /// Exchanges before the first sample; what they bring is compared with what was sent.
    pub warmup: u32,
    /// Exchanges of a sample.
    pub rounds: u32,
    /// Samples.
    pub samples: u32,
}

impl CommBenchParams {
    /// Exchanges of a launch, hence epochs.
    pub const fn exchanges(&self) -> u64 {
        self.warmup as u64 + self.samples as u64 * self.rounds as u64
    }

    /// Rows and columns of the tiles that make up a message, and how many there are.
    #[inline(always)]
    fn tiles(&self) -> (usize, usize, usize) {
        let elements = self.bytes as usize / size_of::<f32>();
        match elements {
            0..TILE => (1, elements, 1),
            TILE..TILE_ELEMENTS => (elements / TILE, TILE, 1),
            _ => (TILE, TILE, elements / TILE_ELEMENTS),
        }
    }

    /// Where the slot of an epoch lies in a PE's payload memory.
    #[inline(always)]
    fn offset(&self, wg: &Warpgroup<'_>, epoch: u64) -> u64 {
        (parity(epoch) as u64 * wg.grid() as u64 + wg.block() as u64) * self.bytes
    }

    /// The message at byte `offset` of `pe`'s payload memory.
    #[inline(always)]
    fn slot(&self, wg: &Warpgroup<'_>, pe: u32, offset: u64) -> Tensor {
        let base: u64 = wg.read(self.channel.payload, pe as usize);
        Tensor::new(base + offset, self.bytes as usize / size_of::<f32>(), DtypeCode::F32)
    }
}

/// Element `at` of a tile that `pe` sends in `epoch`; exact in f32.
#[inline(always)]
fn value(pe: u32, epoch: u64, at: usize) -> f32 {
    ((epoch % 256) as u32 * 65536 + pe % 16 * 4096 + (at % TILE_ELEMENTS) as u32) as f32
}

/// The kernel. All its blocks, and those of the partner, must run at once, or be started in the order of their numbers.
pub fn comm_bench(wg: &mut Warpgroup<'_>, params: &CommBenchParams) {
    let tile = wg.shared::<f32>(TILE, TILE);
    wg.expect_shared(shared_bytes());
    let exchanges = params.exchanges();
    let warmup = u64::from(params.warmup);
    let (mut done, mut sample, mut left) = (0, 0, 0);
    let mut arrived = true;
    while arrived && done < exchanges {
        let epoch = params.epoch + 1 + done;
        let compare = done < warmup;
        if compare || done == warmup {
            // Values that say when they were sent: stale ones would be noticed.
            prepare(wg, params, tile, epoch);
        }
        if !compare && left == 0 {
            tick(wg, params, sample);
            sample += 1;
            left = params.rounds;
        }
        arrived = exchange(wg, params, tile, epoch);
        if compare {
            if arrived {
                verify(wg, params, epoch);
            }
        } else {
            left -= 1;
        }
        done += 1;
    }
    if arrived {
        tick(wg, params, sample);
    }
}

/// Fills the tile with the values of `epoch`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn prepare(wg: &mut Warpgroup<'_>, params: &CommBenchParams, tile: Shared<f32>, epoch: u64) {
    let (pe, (_, cols, _)) = (params.channel.pe, params.tiles());
    wg.sync();
    wg.fill(tile, |r, c| value(pe, epoch, r * cols + c));
    wg.sync();
}

/// Sends a message with its signal, and waits for the partner's signal. False if that did not come in time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn exchange(wg: &mut Warpgroup<'_>, params: &CommBenchParams, tile: Shared<f32>, epoch: u64) -> bool {
    let Channel { layout, pe, .. } = params.channel;
    let (partner, row) = (params.partner, wg.block() as u32);
    let port = Port { channel: &params.channel, trace: &params.trace, step: STEP_BENCH, m_dtype: DtypeCode::F32 };
    #[cfg(any(not(target_arch = "nvptx64"), feature = "nvshmem"))]
    let puts = port.puts_to(wg, partner);
    #[cfg(not(any(not(target_arch = "nvptx64"), feature = "nvshmem")))]
    let puts = false;
    if puts {
        #[cfg(any(not(target_arch = "nvptx64"), feature = "nvshmem"))]
        put(wg, params, &port, tile, epoch);
    } else {
        let slot = params.slot(wg, partner, params.offset(wg, epoch));
        store(wg, params, slot, tile);
    }
    wg.elect(|wg| {
        let link = Link { wg, port };
        if !puts {
            // Release, with the acquire in `receive`: the payload is visible to whoever sees the signal.
            let message = Message { source: pe, dest: partner, row, block: 0, epoch };
            link.store_release(partner, message.signal(&layout), message.signal_value(false));
        }
        let message = Message { source: partner, dest: pe, row, block: 0, epoch };
        match protocol::receive(&link, &layout, message) {
            Ok(_) => true,
            Err(expired) => {
                port.trap(wg, expired);
                false
            }
        }
    })
}

/// Stores a message tile by tile; complete for the whole warpgroup when it returns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store(wg: &mut Warpgroup<'_>, params: &CommBenchParams, slot: Tensor, tile: Shared<f32>) {
    let (rows, cols, tiles) = params.tiles();
    for i in 0..tiles {
        wg.store(slot.matrix(i * TILE_ELEMENTS, rows, cols, cols, 1), tile);
    }
    // Every thread's part is stored before one of them signals.
    wg.sync();
}

/// Puts a message with its signal out of this PE's own memory, whose slots alternate as the partner's do: what left two
/// epochs ago has arrived.
#[cfg(any(not(target_arch = "nvptx64"), feature = "nvshmem"))]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn put(wg: &mut Warpgroup<'_>, params: &CommBenchParams, port: &Port<'_>, tile: Shared<f32>, epoch: u64) {
    let Channel { layout, payload, pe, .. } = params.channel;
    let (to, row) = (params.offset(wg, epoch), wg.block() as u32);
    let message = Message { source: pe, dest: params.partner, row, block: 0, epoch };
    let received = protocol::SLOTS as u64 * wg.grid() as u64 * params.bytes;
    let staged = params.slot(wg, pe, received + to);
    store(wg, params, staged, tile);
    wg.put_signal(&Put {
        pe: params.partner,
        from: staged.addr,
        to: port.place(wg, payload, params.partner, to as usize),
        bytes: params.bytes as usize,
        signal: port.word_place(wg, params.partner, message.signal(&layout)),
        value: message.signal_value(false),
    });
    wg.finish_puts();
}

/// Compares what arrived with what the partner sent: up to [`COMPARED`] elements, the last among them.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn verify(wg: &mut Warpgroup<'_>, params: &CommBenchParams, epoch: u64) {
    let slot = params.slot(wg, params.channel.pe, params.offset(wg, epoch));
    let elements = slot.len as usize;
    let stride = if elements < COMPARED { 1 } else { elements / COMPARED };
    wg.elect(|wg| {
        let (mut wrong, mut at) = (0, 0);
        while at < elements {
            // The last of each stride: with them the last of all, which is stored last.
            let element = at + stride - 1;
            let found = wg.scalar(slot.matrix(element, 1, 1, 1, 1));
            wrong += u64::from(found != value(params.partner, epoch, element));
            at += stride;
        }
        if wrong > 0 {
            wg.word(params.wrong, 0).fetch_add(wrong, Ordering::Relaxed);
        }
    });
}

/// Notes the time before sample `sample` of this block.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn tick(wg: &mut Warpgroup<'_>, params: &CommBenchParams, sample: u32) {
    let place = wg.block() * (params.samples as usize + 1) + sample as usize;
    wg.elect(|wg| wg.word(params.ticks, place).store(wg.clock(), Ordering::Relaxed));
}
