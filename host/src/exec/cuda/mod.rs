//! The GPU back end: devices, memory, modules, launches, streams and events of the CUDA driver API.
//!
//! `cust` (this workspace's, see there) loads the driver and owns contexts and memory. Modules, streams and events are owned
//! here, as NVSHMEM needs the handle of a module, and no stream may wait for the default stream: in one that does, a copy of
//! one PE would wait for a kernel of another that waits for it.
//!
//! Every call makes the GPU's primary context current on the calling thread first, so that handles may be used from any
//! thread and beside PyTorch. Memory comes from `cuMemAlloc`; a GPU's handles count what they hold.

mod buffers;
mod driver;
mod error;
mod executor;
mod gpu;
mod graph;
mod kernels;
mod launch;
mod memory;
mod module;
mod sharing;
mod stream;

pub use buffers::Counted;
pub use error::{CudaError, Failure};
pub use executor::CudaExecutor;
pub(crate) use gpu::mps_is_running;
pub use gpu::{Deferral, Gpu, MemoryUse, Properties, choose_device};
pub(crate) use graph::Graph;
pub use kernels::{DEVICE_MODULE, Kernels};
pub use launch::{Residency, Shape};
pub use memory::{DeviceBuffer, HostBuffer};
pub use module::{Attributes, Function, Module};
pub use sharing::Sharing;
pub use stream::{Event, Stream};
