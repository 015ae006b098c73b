//! `deltalink plan`: who sends what to whom, how much heap it takes, and what it should cost. Computes nothing.

use std::io::Write;

use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};

use super::output::{JsonTarget, OutputError, emit};
use crate::error::InputError;
use crate::plan::cost::{Estimate, Link, Question, Topology};
use crate::plan::{Cuts, Exchange, HeapBytes, Message, Plan, PlanError, Sizes, check_cu_seqlens};

mod render;

/// Show who sends what to whom for given sequences and PEs, without computing anything.
///
/// The token axis is cut into one contiguous range for each PE. A sequence that lies across a cut makes the PEs before
/// the cut send a summary of their part, (S, M) for each head, to the PEs after it. A sequence that ends at a cut makes
/// nobody send anything, so good cuts lie between sequences.
///
/// The modelled times say how long the last PE waits for its state if no byte travels while heads still compute, and, for
/// schemes that push, what remains if all of them do. They are for choosing between schemes, not a promise.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = "Examples:
  One long sequence on 8 GPUs:
    deltalink plan --pes 8 --tokens 65536 --heads 32
  Three packed sequences, cut where you want:
    deltalink plan --pes 2 --tokens 4096 --heads 16 --cu-seqlens 0,1000,3000,4096 --cuts 3000
  8 nodes of 8 GPUs:
    deltalink plan --pes 64 --tokens 524288 --heads 32 --topology 8x8")]
pub struct Args {
    /// Number of PEs (processing elements: one GPU, process or thread each) that share the tokens.
    #[arg(long, value_name = "P")]
    pub pes: usize,
    /// Tokens in each row of the batch, over all PEs.
    #[arg(long, value_name = "T", value_parser = up_to(0, 1 << 40))]
    pub tokens: usize,
    /// Rows of the batch; each is a sequence of its own, and all are cut at the same places.
    #[arg(long, value_name = "B", default_value_t = 1, conflicts_with = "cu_seqlens", value_parser = up_to(1, 1 << 16))]
    pub batch: usize,
    /// Query and key heads, H.
    #[arg(long, value_name = "H", value_parser = up_to(1, 1 << 16))]
    pub heads: usize,
    /// Value heads, HV: a multiple of H. Each has its own state. [default: H]
    #[arg(long, value_name = "HV", value_parser = up_to(1, 1 << 16))]
    pub value_heads: Option<usize>,
    /// Key channels of a head, K: the rows of its state.
    #[arg(long, value_name = "K", default_value_t = 128)]
    pub key_dim: usize,
    /// Value channels of a head, V: the columns of its state.
    #[arg(long, value_name = "V", default_value_t = 128)]
    pub value_dim: usize,
    /// Offsets of packed sequences, from 0 to T: 0,1000,4096 are two sequences of 1000 and 3096 tokens.
    #[arg(long, value_name = "OFFSETS", value_delimiter = ',')]
    pub cu_seqlens: Vec<usize>,
    /// Where to cut, P - 1 token offsets; one given twice leaves a PE without tokens. [default: equal shares]
    #[arg(long, value_name = "OFFSETS", value_delimiter = ',')]
    pub cuts: Vec<usize>,
    /// Element type of M on the wire. S always travels in f32.
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = wire())]
    pub m_wire: MWire,
    /// Link between the GPUs of a node. NVLink's figures are measured, those of ib and pcie assumed.
    #[arg(long, value_name = "LINK", default_value = "nvlink", value_parser = link())]
    pub link: Link,
    /// Nodes x GPUs of each: 8x8 is 8 nodes of 8 GPUs. Nodes are linked by InfiniBand. [default: one node]
    #[arg(long, value_name = "NODESxGPUS")]
    pub topology: Option<Topology>,
    /// Count what training needs as well: messages of the backward pass, and heap for both directions.
    #[arg(long)]
    pub backward: bool,
    /// Also write the whole plan as JSON to FILE; - writes JSON, and nothing else, to standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<JsonTarget>,
}

/// Element type of M on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MWire {
    /// bfloat16.
    Bf16,
    /// IEEE binary32.
    F32,
}

impl MWire {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            MWire::Bf16 => 2,
            MWire::F32 => 4,
        }
    }
}

/// Numbers for which no count of bytes overflows.
fn up_to(least: u64, most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(least..=most)
}

fn wire() -> impl TypedValueParser<Value = MWire> {
    PossibleValuesParser::new(["bf16", "f32"]).map(|s| if s == "f32" { MWire::F32 } else { MWire::Bf16 })
}

fn link() -> impl TypedValueParser<Value = Link> {
    PossibleValuesParser::new(["nvlink", "ib", "pcie"]).try_map(|s| s.parse::<Link>())
}

/// `deltalink plan` could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum PlanCommandError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("--cuts has {cuts} offsets, which make {} PEs, and --pes asks for {pes}; give {} offsets", cuts + 1, pes.saturating_sub(1))]
    Cuts { cuts: usize, pes: usize },
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// Everything that `deltalink plan` says; the JSON it writes.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Report {
    /// Version of this layout: 1.
    pub schema: u32,
    /// Query and key heads.
    pub heads: usize,
    /// Sizes of a summary.
    pub sizes: Sizes,
    /// The plan.
    pub plan: Plan,
    /// Messages of modes overlap and bulk.
    pub push: Vec<Message>,
    /// Messages of mode exact.
    pub chain: Vec<Message>,
    /// Messages of the backward pass in modes overlap and bulk, with `--backward`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub back: Option<Vec<Message>>,
    /// Bytes that each PE keeps between a forward and a backward call in these modes, by rank; with `--backward`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved: Option<Vec<usize>>,
    /// Symmetric heap of each PE, in bytes; with `--backward` of both directions.
    pub heap: HeapBytes,
    /// Nodes and GPUs of each.
    pub topology: Topology,
    /// Link inside a node.
    pub link: Link,
    /// Modelled times; absent if nothing crosses a cut.
    pub cost: Option<Cost>,
}

/// What was modelled and the outcome.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Cost {
    /// What was modelled.
    pub question: Question,
    /// One estimate for each scheme.
    pub schemes: Vec<Estimate>,
}

/// Makes the plan that `args` describe.
///
/// # Errors
/// [`PlanCommandError`] if the sequences, the cuts, the heads or the topology do not fit together.
pub fn report(args: &Args) -> Result<Report, PlanCommandError> {
    let hv = args.value_heads.unwrap_or(args.heads);
    if args.heads == 0 || hv == 0 || !hv.is_multiple_of(args.heads) {
        return Err(InputError::Heads { h: args.heads, hv }.into());
    }
    for (name, found) in [("K", args.key_dim), ("V", args.value_dim)] {
        if found == 0 || found > 256 || !found.is_multiple_of(16) {
            return Err(InputError::HeadDim { name, found }.into());
        }
    }
    let cuts = match args.cuts.len() {
        0 => Cuts::equal(args.pes),
        cuts if cuts + 1 != args.pes => return Err(PlanCommandError::Cuts { cuts, pes: args.pes }),
        _ => Cuts::at(args.cuts.clone()),
    };
    let plan = if args.cu_seqlens.is_empty() {
        Plan::batch(args.batch, args.tokens, &cuts)?
    } else {
        check_cu_seqlens(&args.cu_seqlens, Some(args.tokens))?;
        Plan::packed(&args.cu_seqlens, &cuts)?
    };
    let sizes = Sizes { hv, k: args.key_dim, v: args.value_dim, m_bytes: args.m_wire.size() };
    let topology = args.topology.unwrap_or(Topology::one_node(args.pes));
    let cost = Question::of(&plan, sizes, topology, args.link, 0.0)?
        .map(|question| Cost { question, schemes: question.compare() });
    Ok(Report {
        schema: 1,
        heads: args.heads,
        sizes,
        push: plan.traffic(&sizes, Exchange::Push),
        chain: plan.traffic(&sizes, Exchange::Chain),
        back: args.backward.then(|| plan.mirrored().traffic(&sizes, Exchange::Push)),
        saved: args
            .backward
            .then(|| (0..plan.pes()).map(|rank| plan.saved_bytes(rank, &sizes, Exchange::Push)).collect()),
        heap: if args.backward { plan.heap_bytes(&sizes)?.both_directions() } else { plan.heap_bytes(&sizes)? },
        plan,
        topology,
        link: args.link,
        cost,
    })
}

/// Makes the plan and writes it to `out` as tables, or as JSON where `args.json` says so.
///
/// # Errors
/// [`PlanCommandError`] if there is no such plan or the report cannot be written.
pub fn run(args: &Args, out: &mut impl Write) -> Result<(), PlanCommandError> {
    let report = report(args)?;
    Ok(emit(out, args.json.as_ref(), &report, || render::text(&report))?)
}

#[cfg(test)]
mod tests;
