//! Torch tensors as the library takes them: DLPack without a copy.

use deltalink::tensor::{Data, Dtype, TensorView};
use dlpark::DlpackElement;
use dlpark::ffi::{DLDataType, DLDevice, DLDeviceType};
use dlpark::python::{ImportedDlpack, from_dlpack};
use half::{bf16, f16};
use pyo3::prelude::*;

use crate::errors::Failure;

/// A tensor of the caller's, held while a call reads it.
pub struct Input {
    tensor: ImportedDlpack,
    name: &'static str,
    shape: Vec<usize>,
    dtype: Dtype,
}

impl Input {
    /// Takes hold of `object`, which errors call `name`.
    ///
    /// # Errors
    /// [`Failure`] as an exception if it is no tensor in this machine's memory, not contiguous, or of another element type.
    pub fn new(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let tensor = from_dlpack(object.as_borrowed(), None, None)?;
        let (shape, dtype) = Self::inspect(name, &tensor)?;
        Ok(Self { tensor, name, shape, dtype })
    }

    /// [`Input::new`] where there may be none.
    pub fn optional(name: &'static str, object: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Self>> {
        object.map(|object| Self::new(name, object)).transpose()
    }

    fn inspect(name: &str, tensor: &ImportedDlpack) -> Result<(Vec<usize>, Dtype), Failure> {
        let unreadable =
            |error: dlpark::tensor::Error| Failure::Descriptor { name: name.into(), reason: error.to_string() };
        let descriptor = tensor.validate().map_err(unreadable)?;
        let device = descriptor.device();
        if device.device_type != DLDevice::CPU.device_type {
            let found = device_name(device);
            return Err(Failure::Device { name: name.into(), found, want: "the CPU" });
        }
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
        Ok((descriptor.shape().iter().map(|&n| n as usize).collect(), dtype))
    }

    /// The tensor as the library borrows it.
    ///
    /// # Errors
    /// [`Failure`] if its descriptor does not fit its data.
    pub fn view(&self) -> Result<TensorView<'_>, Failure> {
        let data = match self.dtype {
            Dtype::F32 => Data::F32(self.elements::<f32>()?),
            Dtype::Bf16 => Data::Bf16(self.elements::<bf16>()?),
            Dtype::F16 => Data::F16(self.elements::<f16>()?),
        };
        Ok(TensorView::new(&self.shape, data)?)
    }

    /// [`Input::view`] where there may be none.
    pub fn view_optional(tensor: &Option<Self>) -> Result<Option<TensorView<'_>>, Failure> {
        tensor.as_ref().map(Self::view).transpose()
    }

    fn elements<T: DlpackElement>(&self) -> Result<&[T], Failure> {
        let unreadable =
            |error: dlpark::tensor::Error| Failure::Descriptor { name: self.name.into(), reason: error.to_string() };
        let descriptor = self.tensor.validate().map_err(unreadable)?;
        let len = descriptor.num_elements();
        if len == 0 {
            return Ok(&[]);
        }
        // SAFETY: the producer's descriptor holds the memory while `self` lives and describes it.
        let start = unsafe { descriptor.offset_data_ptr::<T>() }.map_err(unreadable)?;
        // SAFETY: `inspect` saw that `len` elements follow each other from there, in this machine's memory; torch maps all of a
        // tensor's memory. That nobody writes a tensor while an operation reads it is the caller's duty, as in torch.
        Ok(unsafe { std::slice::from_raw_parts(start, len) })
    }
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

fn device_name(device: DLDevice) -> String {
    match device.device_type {
        DLDeviceType(2) => format!("cuda:{}", device.device_id),
        DLDeviceType(other) => format!("a device of DLPack type {other}"),
    }
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
