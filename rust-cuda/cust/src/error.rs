//! Errors of the driver.

use std::ffi::c_int;

/// A status of the driver other than success: its `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the CUDA driver answers {0}")]
pub struct CudaError(pub c_int);

/// What a call gives.
pub type CudaResult<T> = Result<T, CudaError>;

/// Success, or the error of `status`.
pub(crate) fn check(status: c_int) -> CudaResult<()> {
    if status == 0 { Ok(()) } else { Err(CudaError(status)) }
}
