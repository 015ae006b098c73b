//! How an operation is to be run.

use std::num::NonZeroUsize;

use crate::tensor::Dtype;

/// How the PEs exchange summaries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// One pass; each head's summary leaves from inside the scan, outputs are corrected when it has arrived.
    #[default]
    Overlap,
    /// The same kernels, with the exchange between two launches: what overlap is measured against.
    Bulk,
    /// The state arrives first, then the scan starts from it: bitwise the result of one PE if all cuts are
    /// at multiples of the chunk length from the start of their sequence.
    Exact,
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Mode::Overlap => "overlap",
            Mode::Bulk => "bulk",
            Mode::Exact => "exact",
        })
    }
}

/// Element type of the transition M on the wire. States always travel as f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MWire {
    /// bf16 for bf16 and f16 tensors, f32 for f32 tensors. Every PE between the first of a sequence and the receiver adds
    /// a relative error of about 1e-3 to the state where it keeps most of what it received (slow decay, small steps):
    /// half as much as bf16 operands make on one PE. For f16 tensors f32 is more exact, and a third larger.
    #[default]
    Auto,
    /// bf16.
    Bf16,
    /// f32.
    F32,
}

impl MWire {
    /// The type for tensors of type `dtype`.
    pub fn resolve(self, dtype: Dtype) -> Dtype {
        match (self, dtype) {
            (MWire::F32, _) | (MWire::Auto, Dtype::F32) => Dtype::F32,
            (MWire::Bf16, _) | (MWire::Auto, _) => Dtype::Bf16,
        }
    }
}

/// How summaries are written into other PEs' memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// By the kernels' own stores where they reach it, by puts with signals elsewhere.
    #[default]
    Auto,
    /// By puts with signals everywhere: NVSHMEM's on GPUs, a copy and a signal on the CPU. For tests, and to compare.
    Put,
}

/// What a backward step computes again. Whatever it is, `prep` and the walks over the chunks need no other PE, so they go on
/// while gradients of states travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Everything, from the inputs. The forward step keeps nothing that grows with the number of tokens.
    #[default]
    All,
    /// The states of the chunks; what `prep` computed is kept: for each head and chunk of C tokens `C (3 K + 2 C)` elements and
    /// K more in f32.
    States,
}

impl std::fmt::Display for Recompute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Recompute::All => "all",
            Recompute::States => "states",
        })
    }
}

/// Into how many parts a PE cuts each of its segments, to walk them side by side. Exact mode never cuts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Segments {
    /// As many as fill the multiprocessors of a GPU, where one part leaves most of them idle; one on the CPU.
    #[default]
    Auto,
    /// So many, or as many as there are chunks. 1 is never to cut.
    #[serde(untagged)]
    At(NonZeroUsize),
}

impl std::fmt::Display for Segments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Segments::Auto => f.write_str("auto"),
            Segments::At(count) => count.fmt(f),
        }
    }
}

impl std::str::FromStr for Segments {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Segments::Auto),
            _ => text.parse().map(Segments::At).map_err(|_| {
                "it must be auto, or a number of parts from 1 on for each segment (1: never cut)".to_owned()
            }),
        }
    }
}

/// Whether a call looks at the values that it is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Values {
    /// At those in memory of the host. Tensors on GPUs are trusted: a pass over them takes as long as computing with them.
    #[default]
    Check,
    /// At none: the caller vouches for them.
    Trust,
}

/// [`Config::cut_tolerance`] unless something else is asked for: half the distance of two f32 around 1.
pub const CUT_TOLERANCE: f32 = f32::EPSILON / 2.0;

/// The least [`Config::cut_tolerance`] but 0: below, squares of what is measured would vanish in f32.
pub const LEAST_CUT_TOLERANCE: f32 = 1e-15;

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The CPU back end.
    #[default]
    Cpu,
    /// NVIDIA GPUs (feature `cuda`).
    Cuda,
}

impl Device {
    /// The best that this build and this machine have.
    pub fn available() -> Self {
        #[cfg(feature = "cuda")]
        if crate::exec::cuda::Gpu::count().is_ok() {
            return Device::Cuda;
        }
        Device::Cpu
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
        })
    }
}

/// Options of an operation; the same on all PEs unless said otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// What computes, where the library chooses: in [`super::whole::forward`] and the program.
    pub device: Device,
    /// How the PEs exchange summaries.
    pub mode: Mode,
    /// Chunk length: 16, 32 or 64.
    pub chunk: usize,
    /// Element type of M on the wire.
    pub m_wire: MWire,
    /// How small the norm of a transition M must have become for the rest of it to be left out: the walk of M's columns, the
    /// correction of outputs by it, and M itself on the wire. An output then changes by at most this times `scale |q|` times
    /// the norm of the state that arrives, a state by this times that norm. 0 leaves out nothing, as exact mode does; else
    /// from [`LEAST_CUT_TOLERANCE`] to below 1.
    pub cut_tolerance: f32,
    /// Into how many parts segments are cut that this PE walks; need not be the same on all PEs.
    pub segments: Segments,
    /// How summaries are written into other PEs' memory; need not be the same on all PEs.
    pub transport: Transport,
    /// Whether to return the state after each sequence.
    pub final_state: bool,
    /// What a backward step computes again.
    pub recompute: Recompute,
    /// Check what hardware cannot: barriers, bounds, unwritten outputs. Slow; on GPUs it checks nothing.
    pub checked: bool,
    /// Compute with NaN and infinity instead of refusing them.
    pub allow_nonfinite: bool,
    /// Whether values are looked at before anything is launched.
    pub values: Values,
    /// Threads of each PE's executor; absent means the machine's cores over the PEs.
    pub workers: Option<usize>,
    /// Whether to record a timeline.
    pub trace: bool,
}

impl Default for Config {
    /// The CPU, overlap, chunks of 64, final states, nothing else.
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            mode: Mode::Overlap,
            chunk: 64,
            m_wire: MWire::Auto,
            cut_tolerance: CUT_TOLERANCE,
            segments: Segments::Auto,
            transport: Transport::Auto,
            final_state: true,
            recompute: Recompute::All,
            checked: false,
            allow_nonfinite: false,
            values: Values::Check,
            workers: None,
            trace: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_parts_are_said_and_read_alike() {
        let three = Segments::At(NonZeroUsize::new(3).unwrap());
        for (segments, text, json) in [(Segments::Auto, "auto", "\"auto\""), (three, "3", "3")] {
            assert_eq!((segments.to_string().as_str(), text.parse()), (text, Ok(segments)));
            assert_eq!(serde_json::to_string(&segments).unwrap(), json);
            assert_eq!(serde_json::from_str::<Segments>(json).unwrap(), segments);
        }
        for bad in ["0", "-1", "all", "2.5", ""] {
            assert!(bad.parse::<Segments>().unwrap_err().contains("from 1 on"), "{bad}");
        }
        assert!(serde_json::from_str::<Segments>("0").is_err());
    }
}
