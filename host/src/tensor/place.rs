//! Where tensors lie, and the memory that a caller gives for results.

use std::marker::PhantomData;

use super::{Dtype, Tensor};
use crate::error::InputError;

/// Alignment that kernels need of a tensor in a GPU's memory, in bytes: their widest access.
pub const GPU_ALIGN: u64 = 16;

/// Where a tensor's elements lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// Memory of the host.
    Host,
    /// Memory of the GPU of this number, the CUDA driver's ordinal in this process.
    Gpu(usize),
}

impl Location {
    /// Alignment that elements of `dtype` need here, in bytes.
    pub fn align(self, dtype: Dtype) -> u64 {
        match self {
            Location::Host => dtype.size() as u64,
            Location::Gpu(_) => GPU_ALIGN,
        }
    }

    /// Refuses an address at which no tensor of `len` elements can lie.
    pub(super) fn check(self, address: u64, len: usize, dtype: Dtype) -> Result<(), InputError> {
        let align = self.align(dtype);
        if len > 0 && (address == 0 || !address.is_multiple_of(align)) {
            return Err(InputError::Address { address, location: self, align });
        }
        Ok(())
    }
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Location::Host => f.write_str("the host"),
            Location::Gpu(ordinal) => write!(f, "GPU {ordinal}"),
        }
    }
}

/// A row-major tensor of the caller's that results are written into.
///
/// Whether its elements are initialised does not matter: every one of them is written.
#[derive(Debug)]
pub struct TensorViewMut<'a> {
    shape: Vec<usize>,
    dtype: Dtype,
    address: u64,
    location: Location,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> TensorViewMut<'a> {
    /// Memory for a tensor of `shape` at `address`.
    ///
    /// # Errors
    /// [`InputError::Address`] if it is null or not aligned: to the element on the host, to [`GPU_ALIGN`] on a GPU.
    ///
    /// # Safety
    /// The product of `shape` elements at `address` are memory of `location`. As long as `'a` lasts, and until work that was
    /// enqueued with it has ended, it stays allocated and nobody else reads or writes it.
    pub unsafe fn from_raw(
        address: u64,
        shape: &[usize],
        dtype: Dtype,
        location: Location,
    ) -> Result<Self, InputError> {
        location.check(address, shape.iter().product(), dtype)?;
        Ok(Self { shape: shape.to_vec(), dtype, address, location, memory: PhantomData })
    }

    /// Shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Where it lies.
    pub fn location(&self) -> Location {
        self.location
    }

    /// Address of the first element, in the memory of its location.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of bytes.
    pub fn byte_len(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// The bytes, if they are memory of the host. Kernels on the CPU write them through the address.
    #[cfg(feature = "cuda")]
    pub(crate) fn host_bytes_mut(&mut self) -> Option<&mut [u8]> {
        match self.location {
            _ if self.is_empty() => Some(&mut []),
            // SAFETY: the memory is this view's alone by its maker's promise. It may be uninitialised where the view was made
            // from an address; the bytes are only overwritten.
            Location::Host => Some(unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.byte_len()) }),
            Location::Gpu(_) => None,
        }
    }
}

impl Tensor {
    /// Borrow as memory for a result.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        TensorViewMut {
            dtype: self.data.dtype(),
            address: self.data.bytes_mut().as_mut_ptr() as u64,
            shape: self.shape.clone(),
            location: Location::Host,
            memory: PhantomData,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::TensorView;
    use super::*;

    #[test]
    fn addresses_are_checked_before_anybody_uses_them() {
        let refused = |address, dtype, location| {
            // SAFETY: refused, so nobody uses it.
            let view = unsafe { TensorViewMut::from_raw(address, &[4], dtype, location) };
            view.expect_err("refused").to_string()
        };
        assert!(refused(0, Dtype::F32, Location::Host).contains("no tensor lies at address 0x0 on the host"));
        assert!(refused(4098, Dtype::F32, Location::Host).contains("a multiple of 4"));
        assert!(refused(4104, Dtype::Bf16, Location::Gpu(1)).contains("a multiple of 16"));
        // SAFETY: no elements, so no memory.
        let empty = unsafe { TensorViewMut::from_raw(0, &[0, 3], Dtype::F32, Location::Gpu(0)) };
        assert!(empty.expect("nothing to lie anywhere").is_empty());
    }

    #[test]
    fn a_view_of_host_memory_by_address_is_one_like_any_other() {
        let x = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        // SAFETY: the array lives as long as the view and holds as many elements.
        let view = unsafe { TensorView::from_raw(x.as_ptr() as u64, &[3, 2], Dtype::F32, Location::Host) }.unwrap();
        assert_eq!((view.to_f64(), view.address()), (vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0], x.as_ptr() as u64));
        assert_eq!(view.rows(1, 3).to_f64(), [3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn a_view_on_a_gpu_knows_where_its_parts_lie() {
        // SAFETY: nobody reads it.
        let view = unsafe { TensorView::from_raw(1 << 20, &[4, 8], Dtype::Bf16, Location::Gpu(2)) }.unwrap();
        let rows = view.rows(1, 3);
        assert_eq!((rows.shape(), rows.address(), rows.location()), (&[2, 8][..], (1 << 20) + 16, Location::Gpu(2)));
        assert!(view.host().is_none() && view.reshape(&[32]).is_ok());
        assert_eq!(view.reshape(&[31]).unwrap_err(), InputError::Length { shape: vec![31], found: 32 });
    }

    #[test]
    fn results_go_into_a_tensors_own_memory() {
        let mut x = Tensor::zeros(Dtype::F16, &[2, 3]);
        let address = x.data.bytes().as_ptr() as u64;
        let view = x.view_mut();
        assert_eq!((view.address(), view.byte_len(), view.location()), (address, 12, Location::Host));
    }
}
