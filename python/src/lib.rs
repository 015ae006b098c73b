//! The native half of the Python package `deltalink`: worlds, plans, calls and memory, as the Python half needs them.
//!
//! # How a call goes
//! The Python half hands over torch tensors, for results as well, which come in by DLPack without a copy ([`tensor`]), and a plan. A
//! thread of the world ([`worker`]) owns the PE and its operations ([`device`]) and computes, while the calling thread waits without the
//! GIL. On a GPU the work goes into torch's current stream and the call returns when it is there. The library's own memory goes out by
//! DLPack, again without a copy ([`buffer`]): the tensor's deleter gives it back, on whatever thread that runs.
//!
//! What a forward call saves for its backward call stays with the world. A [`ticket`] stands for it: a tensor of one number, so that
//! autograd, checkpoints and compiled graphs keep it as they keep any tensor, and drop it when they drop that.

mod attention;
mod buffer;
mod convolution;
mod device;
mod errors;
#[cfg(feature = "cuda")]
mod gpu;
mod ledger;
mod operation;
mod plan;
mod tensor;
mod ticket;
mod worker;
mod world;

/// The extension module.
#[pyo3::pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::attention::{attention_backward, attention_forward};
    #[pymodule_export]
    use super::buffer::Buffer;
    #[pymodule_export]
    use super::convolution::{convolution_backward, convolution_forward};
    #[pymodule_export]
    use super::ledger::lent;
    #[pymodule_export]
    use super::plan::Plan;
    #[pymodule_export]
    use super::world::{Invitation, World};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("CUDA", cfg!(feature = "cuda"))
    }
}
