//! What a kernel can do wrong.

/// A kernel broke a rule of the instructions that it uses: a bug of the kernel or of its launch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel {kernel}, block {block}{}: {kind}", place(*.thread, .instruction))]
pub struct Fault {
    /// Name of the kernel.
    pub kernel: String,
    /// Block in the grid.
    pub block: u32,
    /// Thread in the block, where one is to blame.
    pub thread: Option<u32>,
    /// The instruction that it was at, with its place in the source.
    pub instruction: String,
    /// What happened.
    pub kind: FaultKind,
}

fn place(thread: Option<u32>, instruction: &str) -> String {
    let thread = match thread {
        Some(t) => format!(", thread {t} (warp {}, lane {})", t / 32, t % 32),
        None => String::new(),
    };
    if instruction.is_empty() { thread } else { format!("{thread}, {instruction}") }
}

/// Which rule was broken. Addresses are those of the shared window.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum FaultKind {
    #[error(
        "no thread can go on: {waits}; some thread does not reach what the others wait for, or a copy or arrival is missing"
    )]
    Deadlock { waits: String },
    #[error(
        "a collective instruction was reached by threads that are elsewhere: thread {other} is at {there}; all threads that it \
         names must be at the same instruction with the same operands that are part of it"
    )]
    Divergent { other: u32, there: String },
    #[error(
        "lanes of the warp reached a barrier of several warps apart: this one and thread {other} have not met since one of them \
         waited for an mbarrier alone, and the barrier would count the warp twice; let them meet first (bar.warp.sync)"
    )]
    WarpApart { other: u32 },
    #[error(
        "operand {operand} differs between threads: {here:#x}, and {there:#x} in thread {other}; it must be uniform"
    )]
    NotUniform { operand: &'static str, here: u64, there: u64, other: u32 },
    #[error("lane {lane} is not among the lanes {mask:#010x} that it names")]
    NotInMask { lane: u32, mask: u32 },
    #[error("{bytes} bytes at {address:#x} are outside the shared memory of the block, {start:#x}..{end:#x}")]
    Bounds { address: u32, bytes: u32, start: u32, end: u32 },
    #[error("address {address:#x} is not a multiple of {align}")]
    Misaligned { address: u64, align: u32 },
    #[error("the global address is 0")]
    Null,
    #[error("shared memory at {address:#x} holds an mbarrier")]
    HoldsBarrier { address: u32 },
    #[error("there is no mbarrier at {address:#x}; initialise it first")]
    NoBarrier { address: u32 },
    #[error("barrier {id} was reached with {found} threads and, by thread {other}, with {expected}")]
    BarrierThreads { id: u32, found: u32, expected: u32, other: u32 },
    #[error(
        "barrier {id} cannot have {threads} threads: a multiple of 32 up to those of the block ({of}), and ids are below 16"
    )]
    BarrierShape { id: u32, threads: u32, of: u32 },
    #[error(
        "one arrival too many at the mbarrier at {address:#x}: it completed phase {phase} before any thread had waited for the \
         phase before, or counted more than {count} arrivals"
    )]
    Arrivals { address: u32, phase: u32, count: u32 },
    #[error(
        "shared memory at {address:#x} is the destination of an asynchronous copy ({copy}) that nobody has waited for"
    )]
    CopyUnderWay { address: u32, copy: String },
    #[error("shared memory at {address:#x} was written while {reader} may still read it; wait for that first")]
    ReadUnderWay { address: u32, reader: String },
    #[error(
        "shared memory at {address:#x} was written by ordinary stores of thread {writer} with no fence.proxy.async between \
         them and the asynchronous access"
    )]
    NoProxyFence { address: u32, writer: u32 },
    #[error("race on shared memory at {address:#x}: thread {other} {what} it, and nothing orders the two accesses")]
    Race { address: u32, other: u32, what: &'static str },
    #[error("register {register} was used while a wgmma may still write it; wait with wgmma.wait_group first")]
    AccumulatorUnderWay { register: String },
    #[error("register {register} of an accumulator was written while a wgmma was under way")]
    AccumulatorWritten { register: usize },
    #[error("an accumulator of {product}, which may be under way, was not given to wgmma.wait_group")]
    AccumulatorNotCarried { product: String },
    #[error(
        "operand registers of {product}, which may be under way, are not among those given to wgmma.wait_group, or changed \
         before it"
    )]
    OperandNotCarried { product: String },
    #[error("there is no wgmma.fence between what wrote its registers and this product")]
    NoFence,
    #[error("products of wgmma were issued and not committed to a group before the wait or the end of the kernel")]
    NotCommitted,
    #[error("the kernel ended while {what} was under way; wait for it first")]
    EndedEarly { what: String },
    #[error("matrix descriptor {descriptor:#018x}: {why}")]
    Descriptor { descriptor: u64, why: &'static str },
    #[error("{bytes} bytes: a bulk copy takes a multiple of 16 that is not 0")]
    CopyBytes { bytes: u32 },
    #[error("the kernel panicked: {0}")]
    Panic(String),
}
