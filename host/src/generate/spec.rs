//! What a generated problem shall be like.

use crate::inputs::{Op, StateLayout};
use crate::tensor::Dtype;

/// How the gate is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateKind {
    /// `g` itself, in f32.
    Given,
    /// Raw input, `A_log` and `dt_bias` of the softplus gate.
    Softplus,
    /// Raw input, `A_log` and `dt_bias` of the gate bounded by [`GateKind::BOUND`] (KDA only): stronger decays are cut there.
    LowerBound,
}

impl GateKind {
    /// The bound of [`GateKind::LowerBound`].
    pub const BOUND: f32 = -5.0;
}

/// How fast the state forgets. Heads differ in strength, except where all are at an extreme (`None`, `AllStrong`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Not at all: g = 0.
    None,
    /// About 0.4 % per token: the transition across a rank matters.
    Slow,
    /// About 10 % per token.
    Default,
    /// About 95 % per token.
    Fast,
    /// Slow, but the first token and one in 24 after it has g between -160 and -32 in all channels.
    Bursty,
    /// Every token has g = -160: the state is forgotten at once, and `exp(g)` is 0 in f32.
    AllStrong,
}

/// How q and k are spread over directions. Their rows are unit vectors unless the operation normalises them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Evenly.
    Iso,
    /// Around a mean direction per head, with a cosine of about 0.7 between rows.
    CommonMean,
}

/// The step size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BetaKind {
    /// Sigmoid of a standard normal.
    Standard,
    /// About 0.02: little is erased, the transition across a rank matters.
    Small,
    /// Twice `Standard`: negative eigenvalues.
    UpTo2,
    /// Standard normal logits for the operation's sigmoid.
    Logits,
    /// The same with factor 2.
    Logits2,
}

/// A recipe; fields left out with `..Spec::default()` are those of a small ordinary KDA problem in f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Which delta rule.
    pub op: Op,
    /// Batch.
    pub b: usize,
    /// Tokens per batch row.
    pub t: usize,
    /// Query/key heads.
    pub h: usize,
    /// Value heads, a multiple of `h`.
    pub hv: usize,
    /// Key channels.
    pub k: usize,
    /// Value channels.
    pub v: usize,
    /// Element type of q, k, v, the gate's raw input and beta.
    pub dtype: Dtype,
    /// How the gate is given.
    pub gate: GateKind,
    /// How fast the state forgets.
    pub decay: Decay,
    /// Directions of q and k.
    pub keys: Keys,
    /// Step size.
    pub beta: BetaKind,
    /// Whether the operation normalises q and k.
    pub l2norm: bool,
    /// Whether there is one.
    pub initial_state: bool,
    /// Layout of the initial and final states.
    pub state_layout: StateLayout,
    /// `[N+1]` offsets of packed sequences, from 0 to `t`; needs `b` = 1.
    pub cu_seqlens: Option<Vec<usize>>,
    /// Everything random follows from it.
    pub seed: u64,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            op: Op::Kda,
            b: 1,
            t: 200,
            h: 2,
            hv: 2,
            k: 32,
            v: 32,
            dtype: Dtype::F32,
            gate: GateKind::Given,
            decay: Decay::Default,
            keys: Keys::Iso,
            beta: BetaKind::Standard,
            l2norm: false,
            initial_state: false,
            state_layout: StateLayout::KFirst,
            cu_seqlens: None,
            seed: 1,
        }
    }
}

impl Spec {
    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.cu_seqlens.as_ref().map_or(self.b, |cu| cu.len() - 1)
    }
}

/// The shape, as messages name it.
impl std::fmt::Display for Spec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { op, b, t, h, hv, k, v, dtype, .. } = self;
        write!(f, "{op} {dtype} B={b} T={t} H={h} HV={hv} K={k} V={v}")?;
        match &self.cu_seqlens {
            Some(cu) => write!(f, " cu_seqlens={cu:?}"),
            None => Ok(()),
        }
    }
}
