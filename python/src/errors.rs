//! Which exception of the package an error becomes. The texts are those of the library.

use deltalink::error::InputError;
use deltalink::heap::HeapError;
use deltalink::op::OpError;
use deltalink::op::convolution::ShortConvolutionError;
use deltalink::plan::PlanError;
use deltalink::world::WorldError;
use pyo3::PyErr;

/// The package's exceptions; `deltalink/errors.py` documents them.
pub mod exceptions {
    pyo3::import_exception!(deltalink.errors, DeltalinkError);
    pyo3::import_exception!(deltalink.errors, DeviceError);
    pyo3::import_exception!(deltalink.errors, HeapError);
    pyo3::import_exception!(deltalink.errors, InputError);
    pyo3::import_exception!(deltalink.errors, MismatchError);
    pyo3::import_exception!(deltalink.errors, OperationError);
    pyo3::import_exception!(deltalink.errors, PlanError);
    pyo3::import_exception!(deltalink.errors, SavedStateError);
    pyo3::import_exception!(deltalink.errors, WorldError);
}

/// A call did not complete.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Op(#[from] OpError),
    #[error(transparent)]
    Convolution(#[from] ShortConvolutionError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    World(#[from] WorldError),
    #[error(transparent)]
    Heap(#[from] HeapError),
    #[error("{name} is on {found}; this build computes on {want}: move the tensor there")]
    Device { name: String, found: String, want: &'static str },
    #[error("{name} has elements of type {found}; tensors must be float32, bfloat16 or float16")]
    Element { name: String, found: String },
    #[error("{name} is not contiguous in memory (shape {shape:?}); pass {name}.contiguous()")]
    Strides { name: String, shape: Vec<i64> },
    #[error("{name} cannot be read by DLPack: {reason}")]
    Descriptor { name: String, reason: String },
    #[error("{option} is {found:?}; choose {choices}")]
    Option { option: &'static str, found: String, choices: &'static str },
    #[error(
        "saved state {number} is not there: it was used by an earlier backward call or its world was shut down; a saved state serves \
         one backward call, so call the operation again instead of backward with retain_graph"
    )]
    Spent { number: i64 },
    #[error("saved state {number} was left by {found}, the call is one of {want}; pass what the same operation saved")]
    OtherSaved { number: i64, found: &'static str, want: &'static str },
    #[error("this world was shut down; call deltalink.init() for a new one")]
    Closed,
    #[error(
        "this world was made by process {made}, this is process {here}, which was forked from it; processes that compute must make \
         worlds of their own (start workers with the method \"spawn\")"
    )]
    Forked { made: u32, here: u32 },
    #[error("cannot start a thread for the world ({reason}); look at the limits of this process")]
    Thread { reason: String },
    #[error("a bug of deltalink: {message}; the world is of no further use. Please report it")]
    Panic { message: String },
}

impl From<InputError> for Failure {
    fn from(error: InputError) -> Self {
        Failure::Op(error.into())
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        use exceptions as e;
        let text = failure.to_string();
        match &failure {
            Failure::Convolution(ShortConvolutionError::Op(error)) | Failure::Op(error) => of_operation(error, text),
            Failure::Convolution(error) => match error {
                ShortConvolutionError::Count { .. }
                | ShortConvolutionError::Width { .. }
                | ShortConvolutionError::NoChannels { .. }
                | ShortConvolutionError::Upstream { .. } => e::InputError::new_err(text),
                ShortConvolutionError::ForeignSaved { .. } => e::SavedStateError::new_err(text),
                _ => e::OperationError::new_err(text),
            },
            Failure::Plan(_) => e::PlanError::new_err(text),
            Failure::World(_) | Failure::Closed | Failure::Forked { .. } | Failure::Thread { .. } => {
                e::WorldError::new_err(text)
            }
            Failure::Heap(error) => of_heap(error, text),
            Failure::Device { .. } => e::DeviceError::new_err(text),
            Failure::Element { .. } | Failure::Strides { .. } | Failure::Descriptor { .. } | Failure::Option { .. } => {
                e::InputError::new_err(text)
            }
            Failure::Spent { .. } | Failure::OtherSaved { .. } => e::SavedStateError::new_err(text),
            Failure::Panic { .. } => e::DeltalinkError::new_err(text),
        }
    }
}

fn of_operation(error: &OpError, text: String) -> PyErr {
    use exceptions as e;
    match error {
        OpError::Input(_) | OpError::TooManyTokens { .. } => e::InputError::new_err(text),
        OpError::Plan(_) | OpError::PlanSize { .. } => e::PlanError::new_err(text),
        OpError::World(_) => e::WorldError::new_err(text),
        OpError::Heap(error) => of_heap(error, text),
        OpError::Disagreement { .. } | OpError::DifferentCalls { .. } | OpError::DifferentSaved { .. } => {
            e::MismatchError::new_err(text)
        }
        OpError::ForeignSaved { .. } | OpError::SpentHandle { .. } => e::SavedStateError::new_err(text),
        _ => e::OperationError::new_err(text),
    }
}

fn of_heap(error: &HeapError, text: String) -> PyErr {
    use exceptions as e;
    match error {
        HeapError::Mismatch(_) => e::MismatchError::new_err(text),
        HeapError::World(_) => e::WorldError::new_err(text),
        _ => e::HeapError::new_err(text),
    }
}
