//! Why `deltalink run` has no results.

use super::super::gpus::GpusError;
use super::super::output::OutputError;
use super::super::pes::PesError;
use crate::error::InputError;
use crate::file::FileError;
use crate::heap::HeapError;
use crate::inputs::Op;
use crate::op::OpError;
use crate::plan::PlanError;
use crate::reference::ProblemError;
use crate::trace::TraceError;
use crate::world::WorldError;

/// The results could not be computed or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum RunCommandError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{input}: {source}")]
    Input { input: String, source: InputError },
    #[error("{input}: {source}")]
    Problem { input: String, source: ProblemError },
    #[error("{input}: {source}")]
    Plan { input: String, source: PlanError },
    #[error("{input} holds {found} tensors, --op asks for {asked}; leave --op out or pass a file of that op")]
    Op { input: String, found: Op, asked: Op },
    #[error(
        "--cuts has {cuts} offsets, which make {} PEs, and there are {pes}; give {} offsets",
        cuts + 1,
        pes.saturating_sub(1)
    )]
    Cuts { cuts: usize, pes: usize },
    #[error(
        "{input}: tensor {name} has shape {found:?}, the result has {want:?}; correct the expected tensor or remove it"
    )]
    Expected { input: String, name: &'static str, found: Vec<usize>, want: Vec<usize> },
    #[error(
        "{input} has no tensor do, the gradient of the loss with respect to o, which --backward starts from; add it (and dht, if \
         the loss depends on the final states), or leave --backward out"
    )]
    NoUpstream { input: String },
    #[error("{input}: {source}")]
    Compute { input: String, source: Box<OpError> },
    #[error(transparent)]
    Options(#[from] OpError),
    #[error(transparent)]
    World(#[from] WorldError),
    #[error(transparent)]
    Pes(#[from] PesError),
    #[error(transparent)]
    Gpus(#[from] GpusError),
    #[error("the result that PE {rank} sent cannot be read ({reason}); start all PEs with one program")]
    Part { rank: usize, reason: String },
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error(transparent)]
    Output(#[from] OutputError),
}

impl RunCommandError {
    /// That `input` could not be computed.
    pub(super) fn compute(input: &str, source: OpError) -> Self {
        Self::Compute { input: input.to_owned(), source: Box::new(source) }
    }

    /// What else to try, if the message itself does not say it.
    pub fn help(&self) -> Option<&'static str> {
        const FILES: &str = "`deltalink help run` lists the tensors of an input file";
        const HEAP: &str = "--heap-mib makes the symmetric heap larger";
        const TIMEOUT: &str = "--timeout sets how long a PE waits for another";
        match self {
            Self::File(FileError::Foreign { .. } | FileError::MissingTensor { .. }) => Some(FILES),
            Self::World(WorldError::Timeout { .. }) => Some(TIMEOUT),
            Self::Compute { source, .. } => match source.as_ref() {
                OpError::Heap(HeapError::OutOfMemory { .. }) => Some(HEAP),
                OpError::World(WorldError::Timeout { .. }) | OpError::Expired(_) => Some(TIMEOUT),
                _ => None,
            },
            _ => None,
        }
    }
}
