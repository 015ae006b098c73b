//! Errors of the short convolution.

use kernels_gpu::convolution::{STEP_CONVOLVE, STEP_CONVOLVE_BACK};
use kernels_gpu::protocol::Expired;

use super::{MAX_CONVOLUTIONS, WIDTHS};
use crate::error::InputError;
use crate::exec::ExecError;
use crate::op::OpError;
use crate::world::WorldError;

/// A short convolution could not be run, or did not complete.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum ShortConvolutionError {
    #[error(transparent)]
    Op(#[from] OpError),
    #[error("{found} convolutions in one call; a call takes 1 to {MAX_CONVOLUTIONS}, such as those of q, k and v")]
    Count { found: usize },
    #[error("{name} has {found} taps per channel; it must have {} to {}", WIDTHS.start(), WIDTHS.end())]
    Width { name: &'static str, found: usize },
    #[error("{name} has no channels; leave it out")]
    NoChannels { name: &'static str },
    #[error("{found} upstream gradients for {want} convolutions; pass one for each, in the same order")]
    Upstream { found: usize, want: usize },
    #[error(
        "memory for the results of {found} convolutions, the call has {want}; give memory for each, in the same order"
    )]
    Results { found: usize, want: usize },
    #[error("halos of {columns} channels with {width} taps on {pes} PEs: {reason}")]
    Slots { columns: usize, width: usize, pes: usize, reason: String },
    #[error("{0}")]
    Expired(ExpiredHalo),
    #[error(
        "PE {rank}: backward was called with what a forward call with {what} = {saved} saved, the call is one with {call}; \
         pass what the forward call with the same plan and shapes saved on this PE"
    )]
    ForeignSaved { rank: usize, what: String, saved: String, call: String },
    #[error("PE {rank}: this operation failed before ({first}); make a new world and a new operation")]
    FailedBefore { rank: usize, first: String },
}

impl From<InputError> for ShortConvolutionError {
    fn from(error: InputError) -> Self {
        Self::Op(error.into())
    }
}

impl From<ExecError> for ShortConvolutionError {
    fn from(error: ExecError) -> Self {
        Self::Op(error.into())
    }
}

impl From<WorldError> for ShortConvolutionError {
    fn from(error: WorldError) -> Self {
        Self::Op(error.into())
    }
}

#[cfg(feature = "cuda")]
impl From<crate::world::virtual_pes::VirtualError> for ShortConvolutionError {
    fn from(error: crate::world::virtual_pes::VirtualError) -> Self {
        Self::Op(error.into())
    }
}

/// A wait inside a kernel that ran out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpiredHalo {
    /// What the kernel left. Its row is the lane of the halo.
    pub expired: Expired,
}

impl std::fmt::Display for ExpiredHalo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kernel = match self.expired.step {
            STEP_CONVOLVE => "convolve",
            STEP_CONVOLVE_BACK => "convolve_back",
            _ => "a kernel",
        };
        write!(f, "in {kernel}, halo of lane {}: {}", self.expired.row, self.expired)
    }
}
