//! What `deltalink bench comm` says: JSON for programs, a table for eyes.

use indicatif::BinaryBytes;
use serde::Serialize;

use super::super::super::output::{number, table};
use super::super::super::pes::World;
use super::super::{Envelope, Summary};
use super::cores_each;
use super::measure::{Point, Samples, Sampling};
use crate::op::Device;

/// What is the same for all points.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Settings {
    /// What computed.
    pub device: Device,
    /// What a PE was.
    pub world: World,
    /// Number of PEs, which exchange in pairs.
    pub pes: usize,
    /// How messages travelled: `stores` are a kernel's own stores into the partner's memory, then a signal with release;
    /// `puts` are NVSHMEM's puts with signals out of a PE's own memory, on the CPU a copy and a signal.
    pub path: &'static str,
    /// Exchanges before the first sample of a point.
    pub warmup: u32,
    /// Samples of each point and PE.
    pub repeats: u32,
}

impl Settings {
    pub(super) fn new(device: Device, world: World, all: &[Samples], sampling: Sampling) -> Self {
        let path = if all.iter().any(Samples::by_puts) { "puts" } else { "stores" };
        Self { device, world, pes: all.len(), path, warmup: sampling.warmup, repeats: sampling.samples }
    }
}

/// One size and number of blocks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Bytes of a message.
    pub bytes: usize,
    /// Blocks, each of which sends one per exchange.
    pub blocks: usize,
    /// Exchanges of a sample.
    pub rounds: u32,
    /// Time of an exchange in microseconds, over samples and PEs.
    pub time_us: Summary,
    /// Bytes in one direction of one PE over that time, in 1e9 bytes per second.
    pub bandwidth_gb_s: Summary,
    /// Whether blocks took turns on the cores, so that the numbers say more about the scheduler than about messages.
    pub oversubscribed: bool,
}

/// What the PEs' samples of point `i` say; nothing without samples.
pub(super) fn measured(all: &[Samples], i: usize, point: Point, device: Device, pes: usize) -> Option<Measured> {
    let samples: Vec<f64> = all.iter().flat_map(|samples| samples.of_point(i)).map(|ns| ns / 1e3).collect();
    let time_us = Summary::of(&samples)?;
    let Point { bytes, blocks } = point;
    let moved = (bytes * blocks) as f64;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Some(Measured {
        bytes,
        blocks,
        rounds: point.rounds(),
        time_us,
        // A sample shorter than the clock's step would make this infinite.
        bandwidth_gb_s: time_us.inverted(|us| if us > 0.0 { moved / us / 1e3 } else { 0.0 }),
        oversubscribed: device == Device::Cpu && (blocks > cores_each(pes) || pes > cores),
    })
}

/// The table with its head.
pub(super) fn text(envelope: &Envelope<Settings, Measured>) -> String {
    let Settings { device, world, pes, path, warmup, repeats } = &envelope.settings;
    let place = match (device, *path) {
        (Device::Cpu, "puts") => "on the CPU: copies between cores, no network and no NVLink",
        (Device::Cpu, _) => "on the CPU: stores between cores, no network and no NVLink",
        (Device::Cuda, "puts") => "on GPUs: NVSHMEM's puts with signals",
        (Device::Cuda, _) => "on GPUs: a kernel's own stores into the partner's memory",
    };
    let mut text = envelope.head();
    text += &format!(
        "\nPut, signal and wait, both directions at once, {pes} PEs ({world}) {place}.\n\
         {repeats} samples of each PE after {warmup} exchanges, whose contents were compared.\n\n"
    );
    let head = ["bytes", "blocks", "time us", "p10", "p90", "GB/s", "p10", "p90", ""].map(number);
    let mut rows = table(head);
    for Measured { bytes, blocks, time_us, bandwidth_gb_s, oversubscribed, .. } in &envelope.points {
        let times = [time_us.median, time_us.p10, time_us.p90].map(significant);
        let rates = [bandwidth_gb_s.median, bandwidth_gb_s.p10, bandwidth_gb_s.p90].map(significant);
        let size = BinaryBytes(*bytes as u64).to_string();
        let note = if *oversubscribed { "*" } else { "" };
        let cells = [size, blocks.to_string()].into_iter().chain(times).chain(rates).chain([note.to_owned()]);
        rows.add_row(cells.map(number));
    }
    text += &rows.trim_fmt().lines().map(|line| format!("{}\n", line.trim_end())).collect::<String>();
    if envelope.points.iter().any(|point| point.oversubscribed) {
        text +=
            "\n* more blocks than cores: they took turns, so this is the scheduler's time more than the messages'.\n";
    }
    text
}

/// Three significant digits, without an exponent.
pub(in super::super) fn significant(x: f64) -> String {
    let decimals = match x.abs() {
        0.0 => 0,
        x => (2 - x.log10().floor() as i32).clamp(0, 6) as usize,
    };
    format!("{x:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let texts = [0.0, 0.004_567, 3.217, 45.67, 365.4, 12_345.6].map(significant);
        assert_eq!(texts, ["0", "0.00457", "3.22", "45.7", "365", "12346"]);
    }
}
