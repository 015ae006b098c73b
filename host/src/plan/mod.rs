//! Which PE holds which tokens, and which PE needs whose state summary.
//!
//! A plan is a pure function of the sequences and the cuts: every PE computes the same one, so nothing about it is ever
//! communicated. The token axis is cut into one contiguous range for each PE ("rank" = index of a PE). Where a cut falls
//! inside a sequence, the ranks after it need the state that the ranks before it leave behind:
//!
//! 1. each rank scans its own tokens of the sequence from a zero state and gets the summary `(S, M)`, which maps the state
//!    at its left edge to the state at its right edge: `S_out = M S_in + S`;
//! 2. it sends that summary to every later rank that holds tokens of the sequence ([`Send`]);
//! 3. each of those merges what it received, in rank order, into its own `S_in` ([`Receive`]).
//!
//! The first rank of a sequence starts from the initial state itself, so its `S` is absolute and it sends no `M`.
//! Sequences that end at a cut cross nothing, and nothing is sent for them. The backward pass follows the same plan
//! [the other way round](Plan::mirrored).
//!
//! ```
//! use deltalink::plan::{Cuts, Plan};
//! // Two packed sequences of 6 and 4 tokens on two PEs: the first one is cut after its 5th token.
//! let plan = Plan::packed(&[0, 6, 10], &Cuts::equal(2)).unwrap();
//! let send = plan.ranks[0].segments[0].send.as_ref().unwrap();
//! assert_eq!(send.next().rank, 1);
//! let (tail, second) = (&plan.ranks[1].segments[0], &plan.ranks[1].segments[1]);
//! assert_eq!((tail.seq, tail.len), (0, 1));
//! assert_eq!(tail.receive.as_ref().unwrap().from, [0]);
//! assert_eq!((second.seq, second.len, second.initial), (1, 4, Some(0)));
//! ```

mod build;
pub mod cost;
mod cuts;
mod error;
mod mirror;
mod traffic;

pub use build::check_cu_seqlens;
pub use cuts::Cuts;
pub use error::{MAX_PES, PlanError};
pub use traffic::{COLUMNS, Exchange, HeapBytes, Message, Sizes, heap_bytes};

/// How sequences lie in the tensors of the whole batch.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// `B = 1`; sequence `i` is tokens `cu_seqlens[i]..cu_seqlens[i + 1]`.
    Packed {
        /// N + 1 offsets, from 0 to T, not descending.
        cu_seqlens: Vec<usize>,
    },
    /// Every row of the batch is a sequence of `t` tokens, and each rank holds the same token range of every row.
    Batch {
        /// Rows.
        b: usize,
        /// Tokens per row.
        t: usize,
    },
}

impl Layout {
    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        match self {
            Layout::Packed { cu_seqlens } => cu_seqlens.len() - 1,
            Layout::Batch { b, .. } => *b,
        }
    }

    /// T: tokens per batch row.
    pub fn tokens(&self) -> usize {
        match self {
            Layout::Packed { cu_seqlens } => cu_seqlens[cu_seqlens.len() - 1],
            Layout::Batch { t, .. } => *t,
        }
    }

    /// Where sequence `seq` lies on the token axis, `[begin, end)`.
    pub fn range(&self, seq: usize) -> (usize, usize) {
        match self {
            Layout::Packed { cu_seqlens } => (cu_seqlens[seq], cu_seqlens[seq + 1]),
            Layout::Batch { t, .. } => (0, *t),
        }
    }
}

/// Who holds what, and who sends what to whom.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Plan {
    /// The sequences.
    pub layout: Layout,
    /// P + 1 token offsets: rank `r` holds tokens `cuts[r]..cuts[r + 1]` (of every row, in a batch).
    pub cuts: Vec<usize>,
    /// One entry for each PE.
    pub ranks: Vec<RankPlan>,
    /// The most segments that any rank receives a state for: at most 1 when packed, `b` or 0 in a batch.
    /// Slots in the symmetric heap are laid out for this many.
    pub lanes: usize,
}

/// What one PE holds and does.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RankPlan {
    /// Rows of the local tensors: local tensors are `[batch, tokens, ...]`.
    pub batch: usize,
    /// Tokens per row.
    pub tokens: usize,
    /// The pieces of sequences held here, in local token order.
    pub segments: Vec<Segment>,
    /// Sequences whose first token is here: the rows of this rank's `h0`.
    pub starts: Vec<usize>,
    /// Sequences whose last token is here: the rows of this rank's `ht`.
    pub ends: Vec<usize>,
}

impl RankPlan {
    /// Segments that begin with a state received from earlier ranks, in the order of their lanes.
    pub fn receiving(&self) -> impl Iterator<Item = (&Segment, &Receive)> {
        self.segments.iter().filter_map(|s| Some((s, s.receive.as_ref()?)))
    }

    /// Segments whose summary goes to later ranks, in the order of their lanes.
    pub fn sending(&self) -> impl Iterator<Item = (&Segment, &Send)> {
        self.segments.iter().filter_map(|s| Some((s, s.send.as_ref()?)))
    }
}

/// A piece of one sequence on one rank.
///
/// A sequence without tokens has one segment of length 0, on the rank that holds its position; its final state is its
/// initial state.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Segment {
    /// Index of the sequence in the whole batch.
    pub seq: usize,
    /// First token, as an offset into the rank's flattened `[batch * tokens]` local tokens.
    pub start: usize,
    /// Tokens.
    pub len: usize,
    /// If the sequence starts here: its row in [`RankPlan::starts`].
    pub initial: Option<usize>,
    /// If the sequence ends here: its row in [`RankPlan::ends`].
    pub final_row: Option<usize>,
    /// If the sequence started on an earlier rank: whose summaries give the state at the left edge.
    pub receive: Option<Receive>,
    /// If the sequence goes on on a later rank: who needs this segment's summary.
    pub send: Option<Send>,
}

/// Where a segment's incoming state comes from.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Receive {
    /// Index among the receiving segments of this rank: the slots that the summaries arrive in.
    pub lane: usize,
    /// All earlier ranks that hold tokens of the sequence, ascending, never empty. ([Mirrored](Plan::mirrored): all later ones,
    /// descending.)
    pub from: Vec<usize>,
}

impl Receive {
    /// The rank whose tokens come right before: the one that sends in exact mode.
    pub fn previous(&self) -> usize {
        self.from[self.from.len() - 1]
    }

    /// The rank on which the sequence starts; its `S` is absolute, so it sends no `M`.
    pub fn origin(&self) -> usize {
        self.from[0]
    }
}

/// Where a segment's summary goes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Send {
    /// Index among the sending segments of this rank.
    pub lane: usize,
    /// All later ranks that hold tokens of the sequence, ascending, never empty. ([Mirrored](Plan::mirrored): all earlier
    /// ones, descending.)
    pub to: Vec<Target>,
}

impl Send {
    /// The rank whose tokens come right after: the only target in exact mode.
    pub fn next(&self) -> Target {
        self.to[0]
    }
}

/// One receiver of a summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Target {
    /// The receiving rank.
    pub rank: usize,
    /// [`Receive::lane`] of the receiving segment there.
    pub lane: usize,
}

impl Plan {
    /// A plan for packed sequences: `B = 1`, sequence `i` is tokens `cu_seqlens[i]..cu_seqlens[i + 1]`.
    ///
    /// # Errors
    /// [`PlanError`] if `cu_seqlens` does not start at 0 or descends, or if the cuts do not fit.
    pub fn packed(cu_seqlens: &[usize], cuts: &Cuts) -> Result<Self, PlanError> {
        let tokens = check_cu_seqlens(cu_seqlens, None)?;
        let cuts = cuts.resolve(tokens)?;
        Ok(build::build(Layout::Packed { cu_seqlens: cu_seqlens.to_vec() }, cuts))
    }

    /// A plan for `b` rows of `t` tokens, all cut at the same places.
    ///
    /// # Errors
    /// [`PlanError`] if the cuts do not fit `t` tokens.
    pub fn batch(b: usize, t: usize, cuts: &Cuts) -> Result<Self, PlanError> {
        let cuts = cuts.resolve(t)?;
        Ok(build::build(Layout::Batch { b, t }, cuts))
    }

    /// P: number of PEs.
    pub fn pes(&self) -> usize {
        self.ranks.len()
    }

    /// The most ranks that hold tokens of one and the same sequence: 1 if nothing crosses a cut.
    pub fn span(&self) -> usize {
        let sources = self.ranks.iter().flat_map(RankPlan::receiving).map(|(_, receive)| receive.from.len());
        1 + sources.max().unwrap_or(0)
    }
}
