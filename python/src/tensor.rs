//! Torch tensors as the library takes them: DLPack without a copy.

use deltalink::tensor::{Dtype, Location, TensorView, TensorViewMut};
use dlpark::ffi::{DLDataType, DLDevice, DLDeviceType};
use dlpark::python::consumer::stream;
use dlpark::python::{DlpackStream, ImportedDlpack, StreamArg, from_dlpack};
use pyo3::prelude::*;

use crate::errors::Failure;

/// The stream of the caller's device on which a call's tensors are ready, and into which its work goes; 0 on the CPU and for the
/// default stream.
#[derive(Clone, Copy, Debug)]
pub struct CurrentStream(pub u64);

// SAFETY: torch's current stream of the tensor's device, which torch keeps for the life of the process.
unsafe impl DlpackStream for CurrentStream {
    fn as_python_arg(&self, _py: Python<'_>, device: DLDevice) -> PyResult<StreamArg> {
        Ok(if device.device_type == DLDeviceType::CUDA { stream::cuda(self.0 as *mut _) } else { stream::none() })
    }

    unsafe fn wait_for_producer(&self, _device: DLDevice, producer: *mut std::ffi::c_void) -> PyResult<bool> {
        // Torch's work is in its current stream, which is this one; anything else is left to torch to put in order.
        Ok(producer.is_null() || producer as u64 == self.0)
    }
}

/// A tensor of the caller's, held while a call uses it.
pub struct Held {
    _tensor: ImportedDlpack,
    address: u64,
    shape: Vec<usize>,
    dtype: Dtype,
    location: Location,
}

impl Held {
    /// Takes hold of `object`, which errors call `name`, as it is ready on `stream`.
    ///
    /// # Errors
    /// [`Failure`] as an exception if it is no tensor of a CPU or GPU, not contiguous, or of another element type.
    pub fn new(name: &str, object: &Bound<'_, PyAny>, stream: CurrentStream) -> PyResult<Self> {
        let tensor = from_dlpack(object.as_borrowed(), Some(&stream), None)?;
        let (address, shape, dtype, location) = inspect(name, &tensor)?;
        Ok(Self { _tensor: tensor, address, shape, dtype, location })
    }

    /// [`Held::new`] where there may be none.
    pub fn optional(name: &str, object: Option<&Bound<'_, PyAny>>, stream: CurrentStream) -> PyResult<Option<Self>> {
        object.map(|object| Self::new(name, object, stream)).transpose()
    }

    /// The tensor as the library reads it.
    ///
    /// # Errors
    /// [`Failure`] if it is not aligned as its device needs it.
    pub fn view(&self) -> Result<TensorView<'_>, Failure> {
        // SAFETY: the producer's descriptor says that these elements follow each other at this address, and holds them while
        // `self` lives; torch maps all of a tensor's memory. On a GPU torch gives the memory to nobody else before the stream's
        // work, into which the library's goes, has ended. That nobody writes a tensor while an operation reads it is the caller's
        // duty, as in torch.
        Ok(unsafe { TensorView::from_raw(self.address, &self.shape, self.dtype, self.location) }?)
    }

    /// [`Held::view`] where there may be none.
    ///
    /// # Errors
    /// As [`Held::view`].
    pub fn view_optional(tensor: &Option<Self>) -> Result<Option<TensorView<'_>>, Failure> {
        tensor.as_ref().map(Self::view).transpose()
    }

    /// The tensor as memory for a result.
    ///
    /// # Errors
    /// As [`Held::view`].
    pub fn view_mut(&mut self) -> Result<TensorViewMut<'_>, Failure> {
        // SAFETY: as in `view`. The package's Python half makes the tensor for this result, and hands it out after the call.
        Ok(unsafe { TensorViewMut::from_raw(self.address, &self.shape, self.dtype, self.location) }?)
    }

    /// [`Held::view_mut`] where there may be none.
    ///
    /// # Errors
    /// As [`Held::view`].
    pub fn view_mut_optional(tensor: &mut Option<Self>) -> Result<Option<TensorViewMut<'_>>, Failure> {
        tensor.as_mut().map(Self::view_mut).transpose()
    }
}

fn inspect(name: &str, tensor: &ImportedDlpack) -> Result<(u64, Vec<usize>, Dtype, Location), Failure> {
    let unreadable =
        |error: dlpark::tensor::Error| Failure::Descriptor { name: name.into(), reason: error.to_string() };
    let descriptor = tensor.validate().map_err(unreadable)?;
    let location = match descriptor.device() {
        DLDevice { device_type: DLDeviceType::CPU | DLDeviceType::CUDAHOST, .. } => Location::Host,
        // A validated device has no negative number.
        DLDevice { device_type: DLDeviceType::CUDA, device_id } => Location::Gpu(device_id as usize),
        DLDevice { device_type: DLDeviceType(found), .. } => {
            let found = format!("a device of DLPack type {found}");
            return Err(Failure::Device { name: name.into(), found, want: "the CPU and on NVIDIA GPUs" });
        }
    };
    if !is_row_major(descriptor.shape(), &descriptor.strides_or_compact().map_err(unreadable)?) {
        return Err(Failure::Strides { name: name.into(), shape: descriptor.shape().to_vec() });
    }
    let found = descriptor.dtype();
    let dtype = [(DLDataType::F32, Dtype::F32), (DLDataType::BF16, Dtype::Bf16), (DLDataType::F16, Dtype::F16)]
        .into_iter()
        .find_map(|(theirs, ours)| found.matches(theirs).then_some(ours));
    let Some(dtype) = dtype else {
        return Err(Failure::Element { name: name.into(), found: dtype_name(found) });
    };
    // A validated shape has no negative dimension.
    let shape: Vec<usize> = descriptor.shape().iter().map(|&n| n as usize).collect();
    let address = descriptor.data_ptr() as u64 + descriptor.byte_offset();
    Ok((address, shape, dtype, location))
}

/// Whether the elements follow each other. Strides of dimensions of one element say nothing, and none do where there are no elements.
fn is_row_major(shape: &[i64], strides: &[i64]) -> bool {
    let mut want = 1;
    shape.contains(&0)
        || shape.iter().zip(strides).rev().all(|(&n, &stride)| {
            let fits = n == 1 || stride == want;
            want *= n;
            fits
        })
}

fn dtype_name(dtype: DLDataType) -> String {
    let kind = match dtype.code.0 {
        0 => "int",
        1 => "uint",
        2 => "float",
        4 => "bfloat",
        5 => "complex",
        6 => "bool",
        _ => "other",
    };
    format!("{kind}{}", dtype.bits)
}
