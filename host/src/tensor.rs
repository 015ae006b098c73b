//! Borrowed, contiguous, row-major tensors: what a caller hands to the operation.

use half::{bf16, f16};
use ndarray::{Array, ArrayView, Dimension};

use crate::error::InputError;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl Dtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
        })
    }
}

/// The elements of a tensor, by type.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// IEEE binary32.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// IEEE binary16.
    F16(&'a [f16]),
}

impl Data<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Data::F32(x) => x.len(),
            Data::Bf16(x) => x.len(),
            Data::F16(x) => x.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        match self {
            Data::F32(_) => Dtype::F32,
            Data::Bf16(_) => Dtype::Bf16,
            Data::F16(_) => Dtype::F16,
        }
    }
}

impl<'a> From<&'a [f32]> for Data<'a> {
    fn from(x: &'a [f32]) -> Self {
        Data::F32(x)
    }
}
impl<'a> From<&'a [bf16]> for Data<'a> {
    fn from(x: &'a [bf16]) -> Self {
        Data::Bf16(x)
    }
}
impl<'a> From<&'a [f16]> for Data<'a> {
    fn from(x: &'a [f16]) -> Self {
        Data::F16(x)
    }
}

/// A borrowed row-major tensor of any supported element type.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    shape: Vec<usize>,
    data: Data<'a>,
}

impl<'a> TensorView<'a> {
    /// A tensor of `shape` over `data`.
    ///
    /// # Errors
    /// [`InputError::Length`] if `data` does not hold exactly the product of `shape`.
    pub fn new(shape: &[usize], data: impl Into<Data<'a>>) -> Result<Self, InputError> {
        let data = data.into();
        let want: usize = shape.iter().product();
        if data.len() != want {
            return Err(InputError::Length { shape: shape.to_vec(), found: data.len() });
        }
        Ok(Self { shape: shape.to_vec(), data })
    }

    /// Shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.data.dtype()
    }

    /// The elements.
    pub fn data(&self) -> Data<'a> {
        self.data
    }

    /// Element `i` in row-major order, widened to f64.
    pub fn get(&self, i: usize) -> f64 {
        match self.data {
            Data::F32(x) => f64::from(x[i]),
            Data::Bf16(x) => x[i].to_f64(),
            Data::F16(x) => x[i].to_f64(),
        }
    }

    /// All elements widened to f64.
    pub fn to_f64(&self) -> Vec<f64> {
        (0..self.data.len()).map(|i| self.get(i)).collect()
    }

    /// Rows `start..end` of the outermost dimension.
    ///
    /// # Panics
    /// If the range is out of bounds or the tensor has no dimension.
    pub fn rows(&self, start: usize, end: usize) -> TensorView<'a> {
        let row: usize = self.shape[1..].iter().product();
        let range = start * row..end * row;
        let mut shape = self.shape.clone();
        shape[0] = end - start;
        let data = match self.data {
            Data::F32(x) => Data::F32(&x[range]),
            Data::Bf16(x) => Data::Bf16(&x[range]),
            Data::F16(x) => Data::F16(&x[range]),
        };
        TensorView { shape, data }
    }

    /// The same elements under another shape.
    ///
    /// # Errors
    /// [`InputError::Length`] if the number of elements differs.
    pub fn reshape(&self, shape: &[usize]) -> Result<TensorView<'a>, InputError> {
        TensorView::new(shape, self.data)
    }
}

/// A view of any dimension of f32, bf16 or f16 in row-major order.
impl<'a, T, D: Dimension> TryFrom<ArrayView<'a, T, D>> for TensorView<'a>
where
    Data<'a>: From<&'a [T]>,
{
    type Error = InputError;
    fn try_from(a: ArrayView<'a, T, D>) -> Result<Self, InputError> {
        let shape = a.shape().to_vec();
        let data = a.to_slice().ok_or_else(|| InputError::NotContiguous { shape: shape.clone() })?;
        TensorView::new(&shape, data)
    }
}

/// An array of any dimension of f32, bf16 or f16 in row-major order.
impl<'a, T, D: Dimension> TryFrom<&'a Array<T, D>> for TensorView<'a>
where
    Data<'a>: From<&'a [T]>,
{
    type Error = InputError;
    fn try_from(a: &'a Array<T, D>) -> Result<Self, InputError> {
        a.view().try_into()
    }
}

/// An owned row-major tensor of any supported element type.
#[derive(Clone, Debug, PartialEq)]
pub enum Buffer {
    /// IEEE binary32.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// IEEE binary16.
    F16(Vec<f16>),
}

impl Buffer {
    /// `len` zeros of type `dtype`.
    pub fn zeros(dtype: Dtype, len: usize) -> Self {
        match dtype {
            Dtype::F32 => Buffer::F32(vec![0.0; len]),
            Dtype::Bf16 => Buffer::Bf16(vec![bf16::ZERO; len]),
            Dtype::F16 => Buffer::F16(vec![f16::ZERO; len]),
        }
    }

    /// `values` rounded to `dtype` (nearest, ties to even).
    pub fn from_f64(dtype: Dtype, values: impl IntoIterator<Item = f64>) -> Self {
        let values = values.into_iter();
        match dtype {
            Dtype::F32 => Buffer::F32(values.map(|x| x as f32).collect()),
            Dtype::Bf16 => Buffer::Bf16(values.map(bf16::from_f64).collect()),
            Dtype::F16 => Buffer::F16(values.map(f16::from_f64).collect()),
        }
    }

    /// Borrow the elements.
    pub fn data(&self) -> Data<'_> {
        match self {
            Buffer::F32(x) => Data::F32(x),
            Buffer::Bf16(x) => Data::Bf16(x),
            Buffer::F16(x) => Data::F16(x),
        }
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.data().dtype()
    }

    /// All elements widened to f64.
    pub fn to_f64(&self) -> Vec<f64> {
        match self {
            Buffer::F32(x) => x.iter().map(|&x| f64::from(x)).collect(),
            Buffer::Bf16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Buffer::F16(x) => x.iter().map(|x| x.to_f64()).collect(),
        }
    }

    /// The elements as bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Buffer::F32(x) => bytemuck::cast_slice(x),
            Buffer::Bf16(x) => bytemuck::cast_slice(x),
            Buffer::F16(x) => bytemuck::cast_slice(x),
        }
    }

    /// The elements as writable bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Buffer::F32(x) => bytemuck::cast_slice_mut(x),
            Buffer::Bf16(x) => bytemuck::cast_slice_mut(x),
            Buffer::F16(x) => bytemuck::cast_slice_mut(x),
        }
    }
}

/// An owned tensor: a shape and a [`Buffer`] that fits it.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Row-major elements.
    pub data: Buffer,
}

impl Tensor {
    /// A tensor of zeros.
    pub fn zeros(dtype: Dtype, shape: &[usize]) -> Self {
        Self { shape: shape.to_vec(), data: Buffer::zeros(dtype, shape.iter().product()) }
    }

    /// Borrow as a view.
    pub fn view(&self) -> TensorView<'_> {
        TensorView { shape: self.shape.clone(), data: self.data.data() }
    }

    /// The same values in another element type (nearest, ties to even).
    pub fn to_dtype(&self, dtype: Dtype) -> Tensor {
        Tensor { shape: self.shape.clone(), data: Buffer::from_f64(dtype, self.data.to_f64()) }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array3;

    use super::*;

    #[test]
    fn arrays_are_borrowed_in_their_own_type() {
        let a = Array3::from_shape_fn((2, 3, 4), |(i, j, k)| bf16::from_f64((100 * i + 10 * j + k) as f64));
        let x = TensorView::try_from(&a).unwrap();
        assert_eq!((x.shape(), x.dtype(), x.get(23)), (&[2, 3, 4][..], Dtype::Bf16, 123.0));
        let last = TensorView::try_from(a.index_axis(ndarray::Axis(0), 1)).unwrap();
        assert_eq!((last.shape(), last.get(0)), (&[3, 4][..], 100.0));
    }

    #[test]
    fn arrays_in_another_order_are_refused() {
        let a = Array3::<f32>::zeros((2, 3, 4));
        let error = TensorView::try_from(a.t()).unwrap_err();
        assert_eq!(error, InputError::NotContiguous { shape: vec![4, 3, 2] });
        assert!(error.to_string().contains("make a contiguous copy"), "{error}");
    }
}
