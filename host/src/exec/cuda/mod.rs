//! The GPU back end: devices, memory, modules, launches, streams and events of the CUDA driver API.
//!
//! `cust` owns contexts, device memory and pinned host memory. Modules, streams and events are owned here: those of `cust`
//! 0.3 hide the module's handle, which NVSHMEM needs, make every stream wait for the default stream, in which a copy of
//! one PE would wait for a kernel of another that waits for it, and number errors as CUDA 11 did ([`driver`]).
//!
//! Every call makes the GPU's primary context current on the calling thread first, so that handles may be used from any
//! thread and beside PyTorch. Memory comes from `cuMemAlloc`; a GPU's handles count what they hold.

mod driver;
mod error;
mod executor;
mod gpu;
mod launch;
mod memory;
mod module;
mod stream;

pub use error::{CudaError, Failure};
pub use executor::{CudaExecutor, DEVICE_MODULE};
pub use gpu::{Deferral, Gpu, MemoryUse, Properties, choose_device};
pub use launch::{Residency, Shape};
pub use memory::{DeviceBuffer, HostBuffer};
pub use module::{Attributes, Function, Module};
pub use stream::{Event, Stream};
