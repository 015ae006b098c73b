//! What exchanging the summaries costs, by scheme: a model to choose by, not a measurement.
//!
//! The model answers one question: after the local scans are done, how long until the last rank has its `S_in`? One
//! sequence spans all P ranks. It knows a latency and a bandwidth for each link and a time for each merge, and leaves out
//! contention, clocks and ranks that are late.
//!
//! With `nS = rows * 4 K V` bytes (S in f32), `n = nS + rows * K K * m_bytes`, `n32 = rows * (4 K V + 4 K K)`,
//! `blk = 4 * 64 K` bytes, a link's latency `a` and bandwidth `b`, and the merge time `m`:
//!
//! | scheme | time |
//! |---|---|
//! | push to all later ranks, local merge | `a + max(0, (nS + (P-2) n)/b - overlap) + (P-1) m` |
//! | chain of S blocks | `(P-1) (a + m + blk/b) + (nS - blk)/b` |
//! | log scan of (M, S) pairs | `ceil(log2 P) (a + 2m + n/b)` |
//! | all-gather by a collective library | `base(P) + (P-1) n32/b + (P-1) m` |
//! | hierarchical, on several nodes of G GPUs | push inside each node, then per GPU a chain across the nodes of `1/G` of the heads, then a broadcast inside the node |
//!
//! On several nodes the links between nodes take the place of the link wherever a scheme crosses from node to node: the
//! push waits for the slower of both, the chain crosses N - 1 times, the scan in its last `ceil(log2 N)` steps, and the
//! all-gather runs at the slower of one GPU's link and the node's G links to the others.
//!
//! Measured (2x H200, NV18, CUDA 13.0, driver 580): NVLink's latency for a small put, signal and wait, 2.5 us; its
//! bandwidth, 368 GB/s a direction; the start of an all-gather of 16 KiB from a collective library, 34 us, launch
//! included. Assumed: the latency and bandwidth of InfiniBand (8 us, 45 GB/s) and PCIe (5 us, 22 GB/s), the merge time
//! (1.5 us), and that an all-gather's start grows from 34 us at 8 ranks to 150 us at 64, evenly with each doubling.

use std::str::FromStr;

use super::traffic::{COLUMNS, Sizes};
use super::{Plan, PlanError};

/// Start of an all-gather on up to 8 ranks, us (measured on 2 GPUs linked by NVLink, launch included).
pub const ALL_GATHER_US: f64 = 34.0;

/// Start of an all-gather on 64 ranks, us (assumed).
const ALL_GATHER_64_US: f64 = 150.0;

/// Time to merge one block of one predecessor's summary, us (assumed).
pub const MERGE_US: f64 = 1.5;

/// What two GPUs of one node are connected by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// NVLink through NVSwitch or direct.
    #[default]
    Nvlink,
    /// InfiniBand, one adapter for each GPU.
    Ib,
    /// PCIe peer to peer.
    Pcie,
}

impl Link {
    /// One small put, its signal and the wait for it, us.
    pub fn latency_us(self) -> f64 {
        match self {
            Link::Nvlink => 2.5,
            Link::Ib => 8.0,
            Link::Pcie => 5.0,
        }
    }

    /// Bandwidth in one direction, GB/s (1e9 bytes).
    pub fn gb_per_s(self) -> f64 {
        match self {
            Link::Nvlink => 368.0,
            Link::Ib => 45.0,
            Link::Pcie => 22.0,
        }
    }

    /// Whether the two figures were measured; otherwise they are assumed.
    pub fn measured(self) -> bool {
        self == Link::Nvlink
    }

    /// Time for `bytes` at full bandwidth, us.
    fn us(self, bytes: f64) -> f64 {
        bytes / (self.gb_per_s() * 1e3)
    }
}

impl std::fmt::Display for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Link::Nvlink => "nvlink",
            Link::Ib => "ib",
            Link::Pcie => "pcie",
        })
    }
}

impl FromStr for Link {
    type Err = PlanError;
    fn from_str(s: &str) -> Result<Self, PlanError> {
        [Link::Nvlink, Link::Ib, Link::Pcie]
            .into_iter()
            .find(|link| link.to_string() == s)
            .ok_or_else(|| PlanError::Link { found: s.into() })
    }
}

/// How PEs lie on nodes: ranks `0..gpus` on the first node, and so on. Nodes are connected by [`Link::Ib`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Topology {
    /// Nodes.
    pub nodes: usize,
    /// GPUs, and PEs, of each node.
    pub gpus: usize,
}

impl Topology {
    /// All PEs on one node.
    pub fn one_node(pes: usize) -> Self {
        Self { nodes: 1, gpus: pes }
    }

    /// Number of PEs.
    pub fn pes(self) -> usize {
        self.nodes * self.gpus
    }

    /// The part of this topology that `pes` of the ranks `first..=last` lie on: a piece of one node, or whole nodes.
    fn part(self, first: usize, last: usize, pes: usize) -> Self {
        match last / self.gpus - first / self.gpus {
            0 => Self::one_node(pes),
            crossings => Self { nodes: crossings + 1, gpus: self.gpus },
        }
    }
}

impl std::fmt::Display for Topology {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.nodes, self.gpus)
    }
}

impl FromStr for Topology {
    type Err = PlanError;
    /// `NODESxGPUS`: `8x8` is 8 nodes of 8 GPUs.
    fn from_str(s: &str) -> Result<Self, PlanError> {
        let number = |part: &str| part.parse().ok().filter(|n| (1..=super::MAX_PES).contains(n));
        s.split_once('x')
            .and_then(|(nodes, gpus)| Some(Self { nodes: number(nodes)?, gpus: number(gpus)? }))
            .ok_or_else(|| PlanError::TopologySyntax { found: s.into() })
    }
}

/// A way to give every rank its incoming state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// Each rank writes its summary to all later ranks; each merges what it got. What modes overlap and bulk do.
    Push,
    /// Each rank waits for the state, continues it and hands it on. What mode exact does.
    Chain,
    /// Hillis-Steele scan over pairs (M, S).
    Scan,
    /// Push inside a node, a chain across nodes, a broadcast inside the node.
    Hierarchical,
    /// An all-gather of all summaries by a collective library, then a merge.
    AllGather,
}

impl std::fmt::Display for Scheme {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Scheme::Push => "push",
            Scheme::Chain => "chain",
            Scheme::Scan => "log scan",
            Scheme::Hierarchical => "hierarchical",
            Scheme::AllGather => "NCCL all-gather",
        })
    }
}

/// What to model.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Question {
    /// Sizes of one sequence's summary.
    pub sizes: Sizes,
    /// Sequences that cross each cut: 1 when packed, b in a batch.
    pub lanes: usize,
    /// The ranks that one sequence spans.
    pub topology: Topology,
    /// Link inside a node.
    pub link: Link,
    /// Bytes that take up to this long travel while heads still compute, us; 0 hides none. Counts for pushes only.
    pub overlap_us: f64,
}

/// The model's answer for one scheme.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Estimate {
    /// Which scheme.
    pub scheme: Scheme,
    /// Time until the last rank has its `S_in`, us.
    pub us: f64,
    /// The same if the scans hid all pushed bytes, us: what no overlap can hide. Only for schemes that push.
    pub floor_us: Option<f64>,
    /// Bytes into the busiest rank.
    pub bytes_in: f64,
    /// Whether no other scheme is faster. Of equals, the first is marked.
    pub cheapest: bool,
}

impl Question {
    /// The question that a plan asks: its widest sequence on the part of `topology` that holds it.
    /// `None` if no sequence crosses a cut.
    ///
    /// # Errors
    /// [`PlanError::Topology`] if `topology` has another number of PEs than the plan.
    pub fn of(
        plan: &Plan,
        sizes: Sizes,
        topology: Topology,
        link: Link,
        overlap_us: f64,
    ) -> Result<Option<Self>, PlanError> {
        let Topology { nodes, gpus } = topology;
        if topology.pes() != plan.pes() {
            return Err(PlanError::Topology { nodes, gpus, pes: plan.pes() });
        }
        let receivers = plan.ranks.iter().enumerate().flat_map(|(r, rank)| rank.receiving().map(move |(_, x)| (r, x)));
        // Rank order within a sequence: the last receiver has the longest list of sources.
        let widest = receivers.max_by_key(|(_, receive)| receive.from.len());
        Ok(widest.map(|(last, receive)| Self {
            sizes,
            lanes: plan.lanes,
            topology: topology.part(receive.origin(), last, receive.from.len() + 1),
            link,
            overlap_us,
        }))
    }

    /// Times of all schemes, the cheapest marked. The hierarchical one is listed where there are several nodes of several
    /// GPUs: on one node it is a push, on nodes of one GPU a chain.
    pub fn compare(&self) -> Vec<Estimate> {
        let mut all = vec![self.push(), self.chain(), self.scan()];
        if self.topology.nodes > 1 && self.topology.gpus > 1 {
            all.push(self.hierarchical());
        }
        all.push(self.all_gather());
        // A tie that differs by rounding is a tie.
        let best = all.iter().map(|e| e.us).fold(f64::INFINITY, f64::min) + 1e-6;
        if let Some(first) = all.iter_mut().find(|e| e.us <= best) {
            first.cheapest = true;
        }
        all
    }

    fn pes(&self) -> f64 {
        self.topology.pes() as f64
    }

    fn s_bytes(&self) -> f64 {
        (self.lanes * self.sizes.s_bytes()) as f64
    }

    fn pair_bytes(&self) -> f64 {
        self.s_bytes() + (self.lanes * self.sizes.m_bytes()) as f64
    }

    /// `blk`: one block of S. No more than S has.
    fn block_bytes(&self) -> f64 {
        (COLUMNS.min(self.sizes.v) * self.sizes.k * size_of::<f32>()) as f64
    }

    /// The slowest link in use.
    fn outer(&self) -> Link {
        if self.topology.nodes > 1 { Link::Ib } else { self.link }
    }

    fn push(&self) -> Estimate {
        let Topology { nodes, gpus } = self.topology;
        // Into the last rank: S of the first one, (S, M) of the others.
        let pairs = |sources: usize, origin: bool| {
            sources as f64 * self.pair_bytes() - if origin { self.pair_bytes() - self.s_bytes() } else { 0.0 }
        };
        let (near, far) = match nodes {
            1 => (pairs(gpus.saturating_sub(1), gpus > 1), 0.0),
            _ => (pairs(gpus - 1, false), pairs((nodes - 1) * gpus, true)),
        };
        let wire = self.link.us(near).max(Link::Ib.us(far));
        let floor = self.hop(self.outer().latency_us()) + (self.pes() - 1.0) * MERGE_US;
        estimate(Scheme::Push, floor + (wire - self.overlap_us).max(0.0), Some(floor), near + far)
    }

    fn chain(&self) -> Estimate {
        let Topology { nodes, gpus } = self.topology;
        let blk = self.block_bytes();
        let step = |link: Link| link.latency_us() + MERGE_US + link.us(blk);
        let near = (nodes * (gpus - 1)) as f64;
        let far = (nodes - 1) as f64;
        let tail = if self.pes() > 1.0 { self.outer().us(self.s_bytes() - blk) } else { 0.0 };
        estimate(Scheme::Chain, near * step(self.link) + far * step(Link::Ib) + tail, None, self.s_bytes())
    }

    fn scan(&self) -> Estimate {
        let steps = |ranks: usize| f64::from(ranks.next_power_of_two().trailing_zeros());
        let far = steps(self.topology.nodes);
        let near = steps(self.topology.pes()) - far;
        let step = |link: Link| link.latency_us() + 2.0 * MERGE_US + link.us(self.pair_bytes());
        let us = near * step(self.link) + far * step(Link::Ib);
        estimate(Scheme::Scan, us, None, (near + far) * self.pair_bytes())
    }

    fn hierarchical(&self) -> Estimate {
        let (nodes, gpus) = (self.topology.nodes as f64, self.topology.gpus as f64);
        let inner = (gpus - 1.0) * self.pair_bytes();
        let share = self.s_bytes() / gpus;
        let blk = self.block_bytes();
        let floor_inside = self.link.latency_us() + (gpus - 1.0) * MERGE_US;
        let across = (nodes - 1.0) * (Link::Ib.latency_us() + MERGE_US + Link::Ib.us(blk)) + Link::Ib.us(share);
        // Every rank merges the node's incoming state with its own predecessors' summary.
        let broadcast = self.link.latency_us() + self.link.us((gpus - 1.0) * share) + MERGE_US;
        let floor = floor_inside + across + broadcast;
        let us = floor + (self.link.us(inner) - self.overlap_us).max(0.0);
        estimate(Scheme::Hierarchical, us, Some(floor), inner + gpus * share)
    }

    fn all_gather(&self) -> Estimate {
        let Topology { nodes, gpus } = self.topology;
        let f32_bytes = self.lanes * Sizes { m_bytes: size_of::<f32>(), ..self.sizes }.m_bytes();
        let bytes = (self.pes() - 1.0) * (self.s_bytes() + f32_bytes as f64);
        let wire = match nodes {
            1 => self.link.us(bytes),
            _ => self.link.us(bytes).max(Link::Ib.us(bytes / gpus as f64)),
        };
        let base =
            self.hop(ALL_GATHER_US + (self.pes() / 8.0).log2().max(0.0) * (ALL_GATHER_64_US - ALL_GATHER_US) / 3.0);
        estimate(Scheme::AllGather, base + wire + (self.pes() - 1.0) * MERGE_US, None, bytes)
    }

    /// A fixed cost that a single PE does not have.
    fn hop(&self, us: f64) -> f64 {
        if self.topology.pes() > 1 { us } else { 0.0 }
    }
}

fn estimate(scheme: Scheme, us: f64, floor_us: Option<f64>, bytes_in: f64) -> Estimate {
    Estimate { scheme, us, floor_us, bytes_in, cheapest: false }
}

#[cfg(test)]
mod tests {
    use super::super::Cuts;
    use super::*;

    fn question(topology: &str, link: Link) -> Question {
        let sizes = Sizes { hv: 32, k: 128, v: 128, m_bytes: 2 };
        Question { sizes, lanes: 1, topology: topology.parse().unwrap(), link, overlap_us: 0.0 }
    }

    fn us(question: &Question, scheme: Scheme) -> f64 {
        question.compare().iter().find(|e| e.scheme == scheme).unwrap().us
    }

    #[track_caller]
    fn close(found: f64, want: f64) {
        assert!((found - want).abs() < 0.05, "found {found}, want {want}");
    }

    /// Worked by hand at H = 32, K = V = 128: nS = 2 MiB, n = 3 MiB, n32 = 4 MiB, blk = 32 KiB.
    #[test]
    fn eight_ranks_on_infiniband() {
        let q = question("1x8", Link::Ib);
        close(us(&q, Scheme::Push), 8.0 + (2.0 + 6.0 * 3.0) * 1048576.0 / 45e3 + 7.0 * 1.5);
        close(us(&q, Scheme::Chain), 7.0 * (8.0 + 1.5 + 0.728) + 45.875);
        close(us(&q, Scheme::Scan), 3.0 * (8.0 + 3.0 + 69.905));
        close(us(&q, Scheme::AllGather), 34.0 + 7.0 * 93.207 + 7.0 * 1.5);
        // Eight nodes of one GPU are the same machine.
        for (one, many) in q.compare().iter().zip(question("8x1", Link::Nvlink).compare()) {
            assert_eq!(one.scheme, many.scheme);
            close(one.us, many.us);
        }
    }

    #[test]
    fn the_hierarchy_wins_on_eight_nodes_of_eight() {
        let q = question("8x8", Link::Nvlink);
        let inside = 2.5 + 7.0 * 3.0 * 1048576.0 / 368e3 + 7.0 * 1.5;
        let across = 7.0 * (8.0 + 1.5 + 0.728) + 2.0 * 1048576.0 / 8.0 / 45e3;
        let back = 2.5 + 7.0 * 2.0 * 1048576.0 / 8.0 / 368e3 + 1.5;
        close(us(&q, Scheme::Hierarchical), inside + across + back);
        close(us(&q, Scheme::Scan), 3.0 * (2.5 + 3.0 + 8.548) + 3.0 * (8.0 + 3.0 + 69.905));
        close(us(&q, Scheme::Push), 8.0 + (2.0 + 55.0 * 3.0) * 1048576.0 / 45e3 + 63.0 * 1.5);
        let best: Vec<_> = q.compare().into_iter().filter(|e| e.cheapest).map(|e| e.scheme).collect();
        assert_eq!(best, [Scheme::Hierarchical]);
    }

    #[test]
    fn overlap_leaves_latency_and_merges_of_a_push() {
        let hidden = Question { overlap_us: 1e6, ..question("1x8", Link::Nvlink) };
        close(us(&hidden, Scheme::Push), 2.5 + 7.0 * 1.5);
        assert_eq!(us(&hidden, Scheme::Chain), us(&question("1x8", Link::Nvlink), Scheme::Chain));
        let push = hidden.compare()[0];
        assert!(push.cheapest);
        assert_eq!(push.floor_us, Some(push.us));
    }

    #[test]
    fn two_ranks_tie_and_the_push_is_marked() {
        let all = question("1x2", Link::Nvlink).compare();
        close(all[0].us, all[1].us);
        assert!(all[0].cheapest && !all[1].cheapest);
    }

    #[test]
    fn one_rank_costs_nothing() {
        assert!(question("1x1", Link::Nvlink).compare().iter().all(|e| e.us == 0.0));
    }

    #[test]
    fn a_plan_asks_about_the_nodes_its_widest_sequence_lies_on() {
        let sizes = question("1x1", Link::Ib).sizes;
        let of = |cu: &[usize], topology: &str| {
            let plan = Plan::packed(cu, &Cuts::equal(8)).unwrap();
            Question::of(&plan, sizes, topology.parse().unwrap(), Link::Nvlink, 0.0)
        };
        let topology = |q: Result<Option<Question>, PlanError>| q.unwrap().map(|q| q.topology.to_string());
        assert_eq!(topology(of(&[0, 80], "2x4")).as_deref(), Some("2x4"));
        assert_eq!(topology(of(&[0, 40, 80], "2x4")).as_deref(), Some("1x4"));
        assert_eq!(topology(of(&[0, 30, 50, 80], "4x2")).as_deref(), Some("2x2"));
        assert_eq!(topology(of(&[0, 10, 20, 30, 40, 50, 60, 70, 80], "2x4")), None);
        assert_eq!(
            of(&[0, 80], "3x3").unwrap_err().to_string(),
            "topology 3x3 (nodes x GPUs) has 9 PEs, the plan has 8; make the product of the two numbers 8"
        );
    }

    #[test]
    fn names_are_parsed_and_others_refused() {
        assert_eq!("8x4".parse(), Ok(Topology { nodes: 8, gpus: 4 }));
        for wrong in ["8", "x8", "8x", "0x8", "8x0", "8x8x8", "-1x8", "2000x1"] {
            assert_eq!(wrong.parse::<Topology>(), Err(PlanError::TopologySyntax { found: wrong.into() }));
        }
        assert_eq!("pcie".parse(), Ok(Link::Pcie));
        assert_eq!("nvl".parse::<Link>(), Err(PlanError::Link { found: "nvl".into() }));
    }
}
