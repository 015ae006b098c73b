//! Why a plan cannot be made.

/// The most PEs a plan is made for.
pub const MAX_PES: usize = 1024;

/// The sequences, the cuts or the number of PEs do not describe a plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum PlanError {
    #[error("cu_seqlens is empty; give N + 1 offsets for N sequences, the first of them 0")]
    CuSeqlensEmpty,
    #[error("cu_seqlens starts at {found}; the first offset must be 0")]
    CuSeqlensStart { found: usize },
    #[error(
        "cu_seqlens[{index}] = {found} is below cu_seqlens[{}] = {previous}; offsets must not descend (are these lengths? then sum them up)",
        index - 1
    )]
    CuSeqlensOrder { index: usize, previous: usize, found: usize },
    #[error("cu_seqlens ends at {found}, the tensors hold T = {tokens} tokens; the last offset must be T")]
    CuSeqlensEnd { found: usize, tokens: usize },
    #[error("0 PEs were asked for; a plan needs at least 1")]
    NoPes,
    #[error("{pes} PEs were asked for; a plan is made for at most {MAX_PES}")]
    TooManyPes { pes: usize },
    #[error(
        "{pes} PEs were asked for and there are only {tokens} tokens to share out; ask for at most {} PEs, or give explicit cuts, which may leave PEs empty",
        (*tokens).max(1)
    )]
    MorePesThanTokens { pes: usize, tokens: usize },
    #[error("cut {index} = {found} is below the cut before it, {previous}; cuts must not descend")]
    CutsOrder { index: usize, previous: usize, found: usize },
    #[error("cut {index} = {found} lies beyond the end, T = {tokens}; a cut is a token offset from 0 to T")]
    CutBeyondEnd { index: usize, found: usize, tokens: usize },
    #[error(
        "the offsets cover tokens {first}..{last}, the tensors hold 0..{tokens}; P + 1 offsets must begin with 0 and end with T"
    )]
    CutsCover { first: usize, last: usize, tokens: usize },
    #[error(
        "topology {nodes}x{gpus} (nodes x GPUs) has {} PEs, the plan has {pes}; make the product of the two numbers {pes}",
        nodes * gpus
    )]
    Topology { nodes: usize, gpus: usize, pes: usize },
    #[error("topology {found:?} is not NODESxGPUS; write 8x8 for 8 nodes of 8 GPUs each")]
    TopologySyntax { found: String },
    #[error("unknown link {found:?}; choose nvlink, ib or pcie")]
    Link { found: String },
    #[error("no layout of the slots: {reason}")]
    Slots { reason: String },
}
