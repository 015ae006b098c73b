//! Borrowed, contiguous, row-major tensors: what a caller hands to the operation, in memory of the host or of a GPU.

mod place;

use half::{bf16, f16};
use ndarray::{Array, ArrayView, Dimension};

pub use place::{GPU_ALIGN, Location, TensorViewMut};

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

impl<'a> Data<'a> {
    /// The elements as bytes.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Data::F32(x) => bytemuck::cast_slice(x),
            Data::Bf16(x) => bytemuck::cast_slice(x),
            Data::F16(x) => bytemuck::cast_slice(x),
        }
    }

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

/// A borrowed row-major tensor of any supported element type, in memory of the host or of a GPU.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    shape: Vec<usize>,
    elements: Elements<'a>,
}

/// Where a view's elements are found.
#[derive(Clone, Copy, Debug)]
enum Elements<'a> {
    Host(Data<'a>),
    /// Address, element type, the GPU's ordinal.
    Gpu(u64, Dtype, usize),
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
        Ok(Self { shape: shape.to_vec(), elements: Elements::Host(data) })
    }

    /// The tensor of `shape` whose elements lie at `address`.
    ///
    /// # Errors
    /// [`InputError::Address`] if it is null or not aligned: to the element on the host, to [`GPU_ALIGN`] on a GPU.
    ///
    /// # Safety
    /// The product of `shape` elements of `dtype` at `address` are memory of `location`. As long as `'a` lasts, and until work
    /// that was enqueued with it has ended, it stays allocated and nobody writes it; on the host it is initialised.
    pub unsafe fn from_raw(
        address: u64,
        shape: &[usize],
        dtype: Dtype,
        location: Location,
    ) -> Result<Self, InputError> {
        let len = shape.iter().product();
        location.check(address, len, dtype)?;
        let elements = match location {
            Location::Gpu(ordinal) => Elements::Gpu(address, dtype, ordinal),
            // SAFETY: by the caller's promise; the address is aligned, and not null unless there is no element.
            Location::Host => Elements::Host(unsafe {
                match dtype {
                    Dtype::F32 => Data::F32(elements_at(address, len)),
                    Dtype::Bf16 => Data::Bf16(elements_at(address, len)),
                    Dtype::F16 => Data::F16(elements_at(address, len)),
                }
            }),
        };
        Ok(Self { shape: shape.to_vec(), elements })
    }

    /// Shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        match self.elements {
            Elements::Host(data) => data.dtype(),
            Elements::Gpu(_, dtype, _) => dtype,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it lies.
    pub fn location(&self) -> Location {
        match self.elements {
            Elements::Host(_) => Location::Host,
            Elements::Gpu(_, _, ordinal) => Location::Gpu(ordinal),
        }
    }

    /// Address of the first element, in the memory of its location.
    pub fn address(&self) -> u64 {
        match self.elements {
            Elements::Host(Data::F32(x)) => x.as_ptr() as u64,
            Elements::Host(Data::Bf16(x)) => x.as_ptr() as u64,
            Elements::Host(Data::F16(x)) => x.as_ptr() as u64,
            Elements::Gpu(address, ..) => address,
        }
    }

    /// The elements, if they lie on the host.
    pub fn host(&self) -> Option<Data<'a>> {
        match self.elements {
            Elements::Host(data) => Some(data),
            Elements::Gpu(..) => None,
        }
    }

    /// The elements.
    ///
    /// # Panics
    /// If they lie on a GPU; [`host`](Self::host) asks.
    pub fn data(&self) -> Data<'a> {
        self.host().expect("a tensor on the host")
    }

    /// Element `i` in row-major order, widened to f64.
    ///
    /// # Panics
    /// If there is none, or the tensor lies on a GPU.
    pub fn get(&self, i: usize) -> f64 {
        match self.data() {
            Data::F32(x) => f64::from(x[i]),
            Data::Bf16(x) => x[i].to_f64(),
            Data::F16(x) => x[i].to_f64(),
        }
    }

    /// All elements widened to f64.
    ///
    /// # Panics
    /// If the tensor lies on a GPU.
    pub fn to_f64(&self) -> Vec<f64> {
        (0..self.len()).map(|i| self.get(i)).collect()
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
        let elements = match self.elements {
            Elements::Host(Data::F32(x)) => Elements::Host(Data::F32(&x[range])),
            Elements::Host(Data::Bf16(x)) => Elements::Host(Data::Bf16(&x[range])),
            Elements::Host(Data::F16(x)) => Elements::Host(Data::F16(&x[range])),
            Elements::Gpu(address, dtype, ordinal) => {
                assert!(
                    range.start <= range.end && range.end <= self.len(),
                    "rows {start}..{end} of {}",
                    self.shape[0]
                );
                Elements::Gpu(address + (range.start * dtype.size()) as u64, dtype, ordinal)
            }
        };
        TensorView { shape, elements }
    }

    /// The same elements under another shape.
    ///
    /// # Errors
    /// [`InputError::Length`] if the number of elements differs.
    pub fn reshape(&self, shape: &[usize]) -> Result<TensorView<'a>, InputError> {
        if shape.iter().product::<usize>() != self.len() {
            return Err(InputError::Length { shape: shape.to_vec(), found: self.len() });
        }
        Ok(TensorView { shape: shape.to_vec(), elements: self.elements })
    }
}

/// The `len` elements at `address`.
///
/// # Safety
/// As of [`TensorView::from_raw`] on the host.
unsafe fn elements_at<'a, T>(address: u64, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: by contract.
    unsafe { std::slice::from_raw_parts(address as *const T, len) }
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
        self.data().bytes()
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
        TensorView { shape: self.shape.clone(), elements: Elements::Host(self.data.data()) }
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
