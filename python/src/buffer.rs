//! Native memory as tensors: DLPack without a copy.

use std::ffi::c_void;
use std::sync::Arc;

use deltalink::heap::Lent;
use deltalink::tensor::{Buffer as Elements, Dtype, Location, Tensor};
use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::python::{DlpackExporter, ExportRequest, export_dlpack};
use dlpark::{DlpackFlags, Managed, ManagedTensorBase};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

use crate::ledger::{Entry, Kind};
use crate::ticket::Ticket;

/// Memory that somebody outside may hold. Whoever drops it last gives it back.
pub struct Lease {
    memory: Memory,
    _entry: Entry,
}

/// Where the elements are.
enum Memory {
    /// In the symmetric heap, whose memory stays while this lives.
    Symmetric(Lent),
    /// In a vector of a result.
    Elements(Elements),
    /// The number of a ticket.
    Ticket(Arc<Ticket>),
}

impl Lease {
    fn address(&self) -> *mut c_void {
        match &self.memory {
            Memory::Symmetric(lent) => lent.address() as *mut c_void,
            Memory::Elements(elements) => elements.bytes().as_ptr().cast_mut().cast(),
            Memory::Ticket(ticket) => std::ptr::from_ref(ticket.number()).cast_mut().cast(),
        }
    }

    fn device(&self) -> DLDevice {
        match &self.memory {
            Memory::Symmetric(lent) => match lent.location() {
                Location::Host => DLDevice::CPU,
                // A machine has fewer GPUs than that.
                Location::Gpu(ordinal) => DLDevice::cuda(ordinal as i32),
            },
            Memory::Elements(_) | Memory::Ticket(_) => DLDevice::CPU,
        }
    }
}

/// A tensor over native memory, for `torch.from_dlpack`. Every export holds the memory by itself, so this object may go first.
#[pyclass(frozen)]
pub struct Buffer {
    lease: Arc<Lease>,
    shape: Vec<i64>,
    dtype: DLDataType,
}

impl Buffer {
    /// A result, which belongs to nobody else.
    pub fn result(name: &str, tensor: Tensor) -> Self {
        let Tensor { shape, data } = tensor;
        let entry = Entry::new(Kind::Result, 0, name, data.bytes().len());
        let (shape, dtype) = (signed(&shape), dl_dtype(data.dtype()));
        Self { lease: Arc::new(Lease { memory: Memory::Elements(data), _entry: entry }), shape, dtype }
    }

    /// A buffer of the symmetric heap of world `world`, of as many bytes as the shape needs.
    pub fn symmetric(world: u64, lent: Lent, shape: &[usize], dtype: Dtype) -> Self {
        let entry = Entry::new(Kind::Symmetric, world, lent.name(), lent.bytes());
        let (shape, dtype) = (signed(shape), dl_dtype(dtype));
        Self { lease: Arc::new(Lease { memory: Memory::Symmetric(lent), _entry: entry }), shape, dtype }
    }

    /// The number that stands for what a forward call saved.
    pub fn ticket(world: u64, name: &str, ticket: Arc<Ticket>, bytes: usize) -> Self {
        let entry = Entry::new(Kind::Saved, world, name, bytes);
        let lease = Lease { memory: Memory::Ticket(ticket), _entry: entry };
        Self { lease: Arc::new(lease), shape: vec![1], dtype: DLDataType::I64 }
    }

    fn export<M: ManagedTensorBase>(&self) -> PyResult<Managed<M>> {
        let metadata = Dynamic::compact(self.shape.as_slice());
        let initialized = metadata.initialize_as::<M>(Arc::clone(&self.lease));
        let mut tensor = initialized.map_err(|error| PyBufferError::new_err(error.to_string()))?;
        tensor.set_data(self.lease.address()).set_device(self.lease.device()).set_dtype(self.dtype);
        // SAFETY: the address is that of as many elements of this type as the shape says, initialised, and alive as long as the
        // lease that the tensor's context holds. Nobody on this side reads or writes them any more, or (in the symmetric heap)
        // their use is the business of the caller who asked for them.
        Ok(unsafe { tensor.finish() })
    }
}

fn signed(shape: &[usize]) -> Vec<i64> {
    // No dimension of an allocation exceeds isize.
    shape.iter().map(|&n| n as i64).collect()
}

fn dl_dtype(dtype: Dtype) -> DLDataType {
    match dtype {
        Dtype::F32 => DLDataType::F32,
        Dtype::Bf16 => DLDataType::BF16,
        Dtype::F16 => DLDataType::F16,
    }
}

impl DlpackExporter for Buffer {
    fn device(&self) -> DLDevice {
        self.lease.device()
    }

    fn flags(&self) -> DlpackFlags {
        DlpackFlags::empty()
    }

    fn prepare_export(&self, _py: Python<'_>, _request: &ExportRequest<'_>) -> PyResult<()> {
        // Zeros of a new buffer, and results of the CPU, are there when a call returns.
        Ok(())
    }

    fn export_legacy(&self, _py: Python<'_>) -> PyResult<Managed<DLManagedTensor>> {
        self.export()
    }

    fn export_versioned(&self, _py: Python<'_>) -> PyResult<Managed<DLManagedTensorVersioned>> {
        self.export()
    }
}

#[pymethods]
impl Buffer {
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        export_dlpack(self, py, ExportRequest::parse(stream, max_version, dl_device, copy)?)
    }

    fn __dlpack_device__(&self) -> (u32, i32) {
        let device = self.lease.device();
        (device.device_type.0, device.device_id)
    }
}
