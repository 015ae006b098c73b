//! The measurement on one PE.

use kernels_gpu::comm_bench::{CommBenchParams, WARPGROUPS, payload_bytes, shared_bytes};
use kernels_gpu::params::{Array, Channel, StepMode, TraceBuffer, Way};
use kernels_gpu::protocol::{ChannelLayout, TrapRecord, Watch};

use super::super::super::progress::Progress;
use super::CommBenchError;
use crate::exec::{Executor, Grid, Image, KeptMemory, Launch, SymmetricBytes};
use crate::heap::ALIGN;
use crate::inputs::Op;
use crate::op::Transport;
use crate::tensor::Dtype;
use crate::world::Pe;

/// What is measured at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    /// Of a message.
    pub bytes: usize,
    /// Messages at once.
    pub blocks: usize,
}

impl Point {
    /// Exchanges of a sample: many where they are short, against the clock's resolution, and few where they are long.
    pub fn rounds(&self) -> u32 {
        const BYTES: usize = 4 << 20;
        (BYTES / (self.bytes * self.blocks)).clamp(4, 64) as u32
    }
}

/// How often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sampling {
    /// Exchanges before the first sample.
    pub warmup: u32,
    /// Samples.
    pub samples: u32,
    /// How messages travel.
    pub transport: Transport,
}

/// Nanoseconds of one exchange, for each point and sample, on one PE.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Samples {
    flat: Vec<f64>,
    points: usize,
    puts: bool,
}

impl Samples {
    /// For another PE.
    pub fn to_bytes(&self) -> Vec<u8> {
        [&[u8::from(self.puts)], bytemuck::cast_slice(&self.flat)].concat()
    }

    /// From what [`to_bytes`](Self::to_bytes) gave; nothing if it is not that of `points` points.
    pub fn from_bytes(bytes: &[u8], points: usize) -> Option<Self> {
        let (&puts, flat) = bytes.split_first()?;
        let flat: Vec<f64> = (flat.len() % size_of::<f64>() == 0).then(|| bytemuck::pod_collect_to_vec(flat))?;
        let fits = points > 0 && !flat.is_empty() && flat.len().is_multiple_of(points);
        fits.then_some(Self { flat, points, puts: puts == 1 })
    }

    /// Whether messages went by puts rather than stores.
    pub fn by_puts(&self) -> bool {
        self.puts
    }

    /// Those of point `i`.
    pub fn of_point(&self, i: usize) -> &[f64] {
        let each = self.flat.len() / self.points;
        &self.flat[i * each..][..each]
    }
}

/// Words of all points: a row for each block.
fn layout(points: &[Point], pes: usize) -> ChannelLayout {
    let rows = points.iter().map(|point| point.blocks).max().unwrap_or(1);
    ChannelLayout::new(pes as u32, rows as u32, 1, 1, 0).expect("sizes that the options bound")
}

fn slots(points: &[Point]) -> usize {
    points.iter().map(|point| payload_bytes(point.bytes, point.blocks)).max().unwrap_or(0)
}

/// Bytes of the words.
pub(super) fn words_bytes(points: &[Point], pes: usize) -> usize {
    layout(points, pes).words() * size_of::<u64>()
}

/// Symmetric memory that [`all`] takes.
#[cfg(feature = "cuda")]
pub(super) fn heap_bytes(points: &[Point], pes: usize) -> usize {
    slots(points).next_multiple_of(ALIGN) + words_bytes(points, pes).next_multiple_of(ALIGN)
}

/// Measures all points, with the same ones on every PE. Collective.
pub(super) fn all<X: Executor>(
    pe: &Pe,
    exec: &mut X,
    points: &[Point],
    sampling: Sampling,
    progress: Option<&Progress>,
) -> Result<Samples, CommBenchError> {
    let payload = exec.symmetric(pe, "slots to measure", slots(points).next_multiple_of(ALIGN))?;
    let words = exec.symmetric(pe, "signals to measure", words_bytes(points, pe.size()))?;
    let way = |rank: usize| {
        let reached = payload.addresses[rank].is_some() && words.addresses[rank].is_some();
        let stores = rank == pe.rank() || (reached && sampling.transport == Transport::Auto);
        if stores { Way::Stores } else { Way::Puts }
    };
    let ways: Vec<Way> = (0..pe.size()).map(way).collect();
    let memory = Memory { payload, words, ways, layout: layout(points, pe.size()) };
    // Words only grow: epochs go on from point to point.
    let mut epoch = 0;
    let mut flat = Vec::with_capacity(points.len() * sampling.samples as usize);
    for point in points {
        if let Some(progress) = progress {
            progress.start(format!("{} blocks of {} bytes", point.blocks, point.bytes));
        }
        flat.extend(memory.measure(pe, exec, *point, sampling, &mut epoch)?);
        if let Some(progress) = progress {
            progress.done();
        }
    }
    // Nobody gives its memory back while a partner may still write there.
    pe.barrier("the end of the measurement")?;
    Ok(Samples { flat, points: points.len(), puts: memory.ways[pe.rank() ^ 1] == Way::Puts })
}

/// Symmetric memory of the measurement.
struct Memory {
    payload: SymmetricBytes,
    words: SymmetricBytes,
    /// By rank.
    ways: Vec<Way>,
    layout: ChannelLayout,
}

impl Memory {
    fn measure<X: Executor>(
        &self,
        pe: &Pe,
        exec: &mut X,
        point: Point,
        sampling: Sampling,
        epoch: &mut u64,
    ) -> Result<Vec<f64>, CommBenchError> {
        let Point { bytes, blocks } = point;
        let Sampling { warmup, samples, .. } = sampling;
        let mut image = Image::default();
        // 0 where a PE is not reached.
        let addresses = |of: &SymmetricBytes| of.addresses.iter().map(|at| at.unwrap_or(0)).collect::<Vec<u64>>();
        let payload = image.push(&addresses(&self.payload));
        let words = image.push(&addresses(&self.words));
        let ways = image.push(&self.ways.iter().map(|&way| way as u32).collect::<Vec<_>>());
        let trap = image.push_zeroed::<TrapRecord>(1);
        let wrong = image.push_zeroed::<u64>(1);
        let ticks = image.push_zeroed::<u64>(blocks * (samples as usize + 1));
        let mut device = exec.keep(image.bytes().len())?;
        exec.write(&mut device, 0, image.bytes())?;
        let base = device.address();
        let watch = Array { addr: exec.watch(), len: (size_of::<Watch>() / size_of::<u64>()) as u64 };
        let none = Array { addr: 0, len: 0 };
        let (rank, partner) = (pe.rank(), pe.rank() ^ 1);
        let params = CommBenchParams {
            channel: Channel {
                layout: self.layout,
                pad: 0,
                payload: payload.at(base),
                words: words.at(base),
                ways: ways.at(base),
                trap: trap.at(base),
                watch,
                stats: none,
                epoch: none,
                timeout_ns: pe.timeout().as_nanos() as u64,
                pe: rank as u32,
                mode: StepMode::Overlap as u32,
            },
            trace: TraceBuffer { stamps: none, cursor: none },
            ticks: ticks.at(base),
            wrong: wrong.at(base),
            bytes: bytes as u64,
            epoch: *epoch,
            partner: partner as u32,
            warmup,
            rounds: point.rounds(),
            samples,
        };
        *epoch += params.exchanges();
        // Slots of different points overlap: all PEs have done with the last point before one begins the next. It also keeps
        // the time in which a kernel waits for its partner's launch short.
        pe.barrier("the next point")?;
        let peer_failed = || pe.failed_peer().is_some();
        let launch = Launch {
            op: Op::Kda,
            dtype: Dtype::F32,
            blocks: (Grid::Blocks(blocks), WARPGROUPS, shared_bytes()).into(),
            checker: None,
            peer_failed: &peer_failed,
        };
        exec.launch(&launch, &params)?;
        exec.wait(&peer_failed)?;
        exec.read(&mut device, 0, image.bytes_mut())?;
        exec.reuse(device);
        exec.take_times()?;
        if let [TrapRecord { state: TrapRecord::SET, expired }] = image.get::<TrapRecord>(trap)[..] {
            return Err(match pe.failed_peer() {
                Some((rank, message)) => crate::world::WorldError::PeFailed { rank, message }.into(),
                None => CommBenchError::Expired { bytes, blocks, expired },
            });
        }
        match image.get::<u64>(wrong)[..] {
            [0] => Ok(slowest(&image.get::<u64>(ticks), blocks, f64::from(point.rounds()))),
            [wrong, ..] => Err(CommBenchError::Wrong { bytes, blocks, wrong, partner }),
            [] => unreachable!("one word was pushed"),
        }
    }
}

/// Nanoseconds of an exchange in each sample: those of the block that took longest.
fn slowest(ticks: &[u64], blocks: usize, rounds: f64) -> Vec<f64> {
    let boundaries = ticks.len() / blocks;
    let sample = |i: usize| {
        let of_block = |block: usize| {
            let ticks = &ticks[block * boundaries..];
            ticks[i + 1].saturating_sub(ticks[i])
        };
        (0..blocks).map(of_block).max().unwrap_or(0) as f64 / rounds
    };
    (0..boundaries - 1).map(sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_block_counts() {
        // Two blocks, two samples.
        assert_eq!(slowest(&[100, 140, 160, 90, 110, 190], 2, 4.0), [10.0, 20.0]);
    }

    #[test]
    fn samples_are_long_enough_and_not_too_long() {
        assert_eq!(Point { bytes: 16, blocks: 1 }.rounds(), 64);
        assert_eq!(Point { bytes: 64 << 10, blocks: 4 }.rounds(), 16);
        assert_eq!(Point { bytes: 1 << 20, blocks: 128 }.rounds(), 4);
    }

    #[test]
    fn samples_survive_the_way_between_pes() {
        let samples = Samples { flat: vec![1.0, 2.0, 3.0, 4.0], points: 2, puts: true };
        let bytes = samples.to_bytes();
        assert_eq!(Samples::from_bytes(&bytes, 2), Some(samples.clone()));
        assert_eq!(samples.of_point(1), [3.0, 4.0]);
        for (cut, points) in [(bytes.len() - 1, 2), (bytes.len() - 8, 2), (1, 2), (0, 2), (bytes.len(), 0)] {
            assert_eq!(Samples::from_bytes(&bytes[..cut], points), None, "{cut} bytes, {points} points");
        }
    }
}
