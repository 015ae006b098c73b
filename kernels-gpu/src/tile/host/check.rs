//! What the CPU back end checks that hardware does not: shared tiles read or overwritten without a barrier
//! in between, tiles read before anything was written, views out of bounds, outputs never written.

use std::sync::atomic::{AtomicU64, Ordering};

/// A kernel broke a rule of the tile DSL: a bug in the kernel or in its launch, never in the user's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Name of the kernel.
    pub kernel: String,
    /// Block and warpgroup, where one is to blame.
    pub place: Option<(usize, usize)>,
    /// What happened.
    pub kind: FaultKind,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "kernel {}", self.kernel)?;
        if let Some((block, warpgroup)) = self.place {
            write!(f, ", block {block}, warpgroup {warpgroup}")?;
        }
        write!(f, ": {}", self.kind)
    }
}

impl std::error::Error for Fault {}

/// Which rule was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A part of a shared tile reaches past the tile.
    TileBounds {
        /// Rows and columns reached.
        found: [usize; 2],
        /// Rows and columns there are.
        bound: [usize; 2],
    },
    /// Operands or a register tile do not fit together.
    Shapes {
        /// The operation.
        op: &'static str,
        /// Shapes of its operands.
        shapes: Vec<[usize; 2]>,
    },
    /// A global matrix reaches past its tensor.
    GlobalBounds {
        /// The operation.
        op: &'static str,
        /// Largest element reached.
        element: usize,
        /// Elements there are.
        len: usize,
    },
    /// Shared memory over the budget of a block.
    SharedBudget {
        /// Bytes asked for so far.
        asked: usize,
        /// Bytes there are.
        limit: usize,
    },
    /// A kernel allocates other than what its launcher provides.
    SharedSize {
        /// Bytes allocated.
        allocated: usize,
        /// Bytes that the kernel's `shared_bytes` says.
        declared: usize,
    },
    /// An element was read that no one has written.
    ReadUnwritten {
        /// Element of the arena.
        element: usize,
    },
    /// An element was read with no barrier after its write.
    ReadBeforeBarrier {
        /// Element of the arena.
        element: usize,
        /// Warpgroup that wrote.
        writer: usize,
        /// Warpgroup that read.
        reader: usize,
    },
    /// An element was overwritten with no barrier after it was read or written.
    WriteBeforeBarrier {
        /// Element of the arena.
        element: usize,
        /// Warpgroup that read or wrote before.
        earlier: usize,
        /// Warpgroup that wrote.
        writer: usize,
    },
    /// Some warpgroups wait at a block barrier, others have left the kernel.
    DivergentBarrier {
        /// Warpgroups that wait.
        waiting: usize,
        /// Warpgroups in the block.
        of: usize,
    },
    /// Output elements that no one wrote.
    Unwritten {
        /// Name of the output.
        output: String,
        /// The first such element.
        first: usize,
        /// How many there are.
        count: usize,
        /// Elements of the output.
        of: usize,
    },
    /// The kernel panicked.
    Panic(String),
}

impl std::fmt::Display for FaultKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FaultKind::TileBounds { found, bound } => {
                write!(f, "part of a shared tile reaches {found:?}, the tile is {bound:?}")
            }
            FaultKind::Shapes { op, shapes } => write!(f, "{op}: shapes {shapes:?} do not fit together"),
            FaultKind::GlobalBounds { op, element, len } => {
                write!(f, "{op}: element {element} of a tensor with {len}")
            }
            FaultKind::SharedBudget { asked, limit } => {
                write!(f, "{asked} bytes of shared memory asked for, a block has {limit}")
            }
            FaultKind::SharedSize { allocated, declared } => {
                write!(f, "{allocated} bytes of shared memory allocated, {declared} declared to the launcher")
            }
            FaultKind::ReadUnwritten { element } => write!(f, "shared element {element} was read before any write"),
            FaultKind::ReadBeforeBarrier { element, writer, reader } => write!(
                f,
                "shared element {element}: warpgroup {reader} read what warpgroup {writer} wrote with no barrier between"
            ),
            FaultKind::WriteBeforeBarrier { element, earlier, writer } => write!(
                f,
                "shared element {element}: warpgroup {writer} wrote over what warpgroup {earlier} used with no barrier between"
            ),
            FaultKind::DivergentBarrier { waiting, of } => {
                write!(f, "{waiting} of {of} warpgroups wait at a barrier that the others never reach")
            }
            FaultKind::Unwritten { output, first, count, of } => {
                write!(f, "{count} of {of} elements of output {output} were never written, the first is {first}")
            }
            FaultKind::Panic(message) => write!(f, "panicked: {message}"),
        }
    }
}

/// Ends the kernel with a fault. The launcher catches it and adds the place.
#[cold]
pub(super) fn raise(kind: FaultKind) -> ! {
    std::panic::resume_unwind(Box::new(kind))
}

/// When a warpgroup touched an element: by the number of block barriers and of its own barriers before.
#[derive(Clone, Copy)]
struct Touch {
    block_epoch: u32,
    own_epoch: u32,
    warpgroup: u8,
}

impl Touch {
    /// Whether a barrier separates this touch from one by `warpgroup` now.
    fn separated(&self, block_epoch: u32, own_epoch: u32, warpgroup: u8) -> bool {
        self.block_epoch < block_epoch || (self.warpgroup == warpgroup && self.own_epoch < own_epoch)
    }
}

/// Last write and last reads of every element of a block's arena.
pub(super) struct SharedLog {
    writes: Vec<Option<Touch>>,
    reads: Vec<Vec<Option<Touch>>>,
}

impl SharedLog {
    pub(super) fn new(len: usize, warpgroups: usize) -> Self {
        Self { writes: vec![None; len], reads: vec![vec![None; len]; warpgroups] }
    }

    pub(super) fn clear(&mut self) {
        self.writes.fill(None);
        for reads in &mut self.reads {
            reads.fill(None);
        }
    }

    pub(super) fn read(&mut self, element: usize, warpgroup: usize, block_epoch: u32, own_epoch: u32) {
        let now = Touch { block_epoch, own_epoch, warpgroup: warpgroup as u8 };
        match self.writes[element] {
            None => raise(FaultKind::ReadUnwritten { element }),
            Some(write) if !write.separated(block_epoch, own_epoch, now.warpgroup) => {
                raise(FaultKind::ReadBeforeBarrier { element, writer: write.warpgroup.into(), reader: warpgroup })
            }
            Some(_) => self.reads[warpgroup][element] = Some(now),
        }
    }

    /// A read and a write by the same threads, element by element: no barrier is needed between the two.
    pub(super) fn update(&mut self, element: usize, warpgroup: usize, block_epoch: u32, own_epoch: u32) {
        let own_read = self.reads[warpgroup][element];
        self.read(element, warpgroup, block_epoch, own_epoch);
        self.reads[warpgroup][element] = own_read;
        self.write(element, warpgroup, block_epoch, own_epoch);
    }

    pub(super) fn write(&mut self, element: usize, warpgroup: usize, block_epoch: u32, own_epoch: u32) {
        let now = Touch { block_epoch, own_epoch, warpgroup: warpgroup as u8 };
        let earlier = self.reads.iter().map(|reads| reads[element]).chain([self.writes[element]]).flatten();
        for touch in earlier {
            if !touch.separated(block_epoch, own_epoch, now.warpgroup) {
                raise(FaultKind::WriteBeforeBarrier { element, earlier: touch.warpgroup.into(), writer: warpgroup });
            }
        }
        self.writes[element] = Some(now);
    }
}

/// One output of a launch in checked mode.
struct Output {
    name: String,
    addr: u64,
    element_bytes: usize,
    len: usize,
    written: Vec<AtomicU64>,
}

/// The outputs of a launch and which of their elements have been written.
#[derive(Default)]
pub struct Checker {
    outputs: Vec<Output>,
}

impl Checker {
    /// A checker with no outputs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Says that the launch must write every element of `tensor`.
    pub fn expect_written(&mut self, name: &str, tensor: crate::params::Tensor) {
        let len = tensor.len as usize;
        self.outputs.push(Output {
            name: name.to_owned(),
            addr: tensor.addr,
            element_bytes: tensor.dtype().size(),
            len,
            written: (0..len.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        });
    }

    /// Notes a store of one element at `addr`.
    pub(super) fn stored(&self, addr: u64) {
        for output in &self.outputs {
            let Some(offset) = addr.checked_sub(output.addr) else { continue };
            let element = offset as usize / output.element_bytes;
            if element < output.len {
                // Relaxed: bits are read after the launch has been joined.
                output.written[element / 64].fetch_or(1 << (element % 64), Ordering::Relaxed);
            }
        }
    }

    /// Says that nobody had to write these elements after all.
    pub fn excuse(&self, matrix: &crate::params::Matrix) {
        let size = matrix.tensor.dtype().size();
        for r in 0..matrix.rows {
            for c in 0..matrix.cols {
                let element = matrix.offset + r * matrix.row_stride + c * matrix.col_stride;
                self.stored(matrix.tensor.addr + (element * size) as u64);
            }
        }
    }

    /// After the launch: the first output with an element that no one wrote.
    ///
    /// # Errors
    /// [`FaultKind::Unwritten`].
    pub fn finish(&self, kernel: &str) -> Result<(), Fault> {
        for output in &self.outputs {
            let is_missing = |&e: &usize| output.written[e / 64].load(Ordering::Relaxed) >> (e % 64) & 1 == 0;
            let mut missing = (0..output.len).filter(is_missing);
            if let Some(first) = missing.next() {
                let kind = FaultKind::Unwritten {
                    output: output.name.clone(),
                    first,
                    count: 1 + missing.count(),
                    of: output.len,
                };
                return Err(Fault { kernel: kernel.to_owned(), place: None, kind });
            }
        }
        Ok(())
    }
}
