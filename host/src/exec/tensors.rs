//! Tensors that an executor's device holds for a caller.

use super::{ExecError, Executor, KeptMemory};
use crate::error::InputError;
use crate::inputs::Inputs;
use crate::tensor::{Dtype, Location, Tensor, TensorView, TensorViewMut};

/// A tensor where kernels use it in place.
pub struct DeviceTensor<X: Executor> {
    memory: X::Memory,
    address: u64,
    location: Location,
    shape: Vec<usize>,
    dtype: Dtype,
}

impl<X: Executor> std::fmt::Debug for DeviceTensor<X> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { shape, dtype, location, .. } = self;
        f.debug_struct("DeviceTensor").field("shape", shape).field("dtype", dtype).field("location", location).finish()
    }
}

impl<X: Executor> DeviceTensor<X> {
    /// Memory for a tensor of `shape`, full of NaN so that what nobody writes does not look like a result.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for it.
    pub fn new(exec: &mut X, shape: &[usize], dtype: Dtype) -> Result<Self, ExecError> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Self::holding(exec, shape, dtype, &vec![0xff; bytes])
    }

    /// A copy of `tensor`, which lies on the host.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// # Panics
    /// If it lies on a GPU.
    pub fn of(exec: &mut X, tensor: &TensorView<'_>) -> Result<Self, ExecError> {
        Self::holding(exec, tensor.shape(), tensor.dtype(), tensor.data().bytes())
    }

    fn holding(exec: &mut X, shape: &[usize], dtype: Dtype, bytes: &[u8]) -> Result<Self, ExecError> {
        let mut memory = exec.keep(bytes.len())?;
        exec.write(&mut memory, 0, bytes)?;
        let (address, location) = (memory.address(), exec.location());
        Ok(Self { memory, address, location, shape: shape.to_vec(), dtype })
    }

    /// Borrow as a tensor of a call.
    ///
    /// # Errors
    /// [`InputError`] does not occur: devices align their memory.
    pub fn view(&self) -> Result<TensorView<'_>, InputError> {
        // SAFETY: the memory is this tensor's and holds its elements, initialised, as long as it is borrowed. A device lets its
        // release wait for the work that uses it.
        unsafe { TensorView::from_raw(self.address, &self.shape, self.dtype, self.location) }
    }

    /// Borrow as memory for a result.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    pub fn view_mut(&mut self) -> Result<TensorViewMut<'_>, InputError> {
        // SAFETY: as in `view`, and nobody else has it.
        unsafe { TensorViewMut::from_raw(self.address, &self.shape, self.dtype, self.location) }
    }

    /// Fills it with NaN again, after all work of `exec` so far.
    ///
    /// # Errors
    /// [`ExecError`] if some of that work failed.
    pub fn spoil(&mut self, exec: &mut X) -> Result<(), ExecError> {
        let bytes = self.shape.iter().product::<usize>() * self.dtype.size();
        exec.write(&mut self.memory, 0, &vec![0xff; bytes])
    }

    /// A copy on the host, after all work of `exec` so far.
    ///
    /// # Errors
    /// [`ExecError`] if some of that work failed.
    pub fn read(&mut self, exec: &mut X) -> Result<Tensor, ExecError> {
        let mut tensor = Tensor::zeros(self.dtype, &self.shape);
        exec.read(&mut self.memory, 0, tensor.data.bytes_mut())?;
        Ok(tensor)
    }
}

/// The tensors of a call, copied to where kernels use them in place.
#[derive(Debug)]
pub struct DeviceInputs<X: Executor> {
    /// By their names in [`Inputs::tensors`].
    tensors: Vec<(&'static str, DeviceTensor<X>)>,
}

impl<X: Executor> DeviceInputs<X> {
    /// Copies of all tensors of `inputs`, which lie on the host.
    ///
    /// # Errors
    /// [`ExecError`] if there is no memory for them.
    ///
    /// # Panics
    /// If one lies on a GPU.
    pub fn of(exec: &mut X, inputs: &Inputs<'_>) -> Result<Self, ExecError> {
        let copy = |(name, tensor): (&'static str, &TensorView<'_>)| Ok((name, DeviceTensor::of(exec, tensor)?));
        Ok(Self { tensors: inputs.tensors().into_iter().map(copy).collect::<Result<_, ExecError>>()? })
    }

    /// `inputs`, of which these are copies, with the copies in place of the tensors.
    ///
    /// # Errors
    /// As [`DeviceTensor::view`].
    ///
    /// # Panics
    /// If `inputs` has a tensor of which there is no copy.
    pub fn inputs(&self, inputs: &Inputs<'_>) -> Result<Inputs<'_>, InputError> {
        inputs.with_tensors(|name, _| {
            let copy = self.tensors.iter().find(|(of, _)| *of == name);
            copy.map(|(_, copy)| copy).expect("a copy of each tensor").view()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::cpu::Cpu;
    use crate::generate::{GateKind, Spec};

    #[test]
    fn copies_of_inputs_are_the_same_inputs_elsewhere() {
        let mut exec = Cpu::new(1).unwrap();
        for gate in [GateKind::Given, GateKind::Softplus, GateKind::LowerBound] {
            let case = Spec { gate, initial_state: true, t: 7, k: 16, v: 16, ..Spec::default() }.generate();
            let inputs = case.inputs();
            let copies = DeviceInputs::of(&mut exec, &inputs).unwrap();
            let copied = copies.inputs(&inputs).unwrap();
            assert_eq!(copied.dims(), inputs.dims());
            for ((name, copy), (_, x)) in copied.tensors().into_iter().zip(inputs.tensors()) {
                assert_eq!(copy.to_f64(), x.to_f64(), "{name}");
                assert_ne!(copy.address(), x.address(), "{name}");
            }
        }
    }

    #[test]
    fn a_tensor_for_results_holds_none_at_first() {
        let mut exec = Cpu::new(1).unwrap();
        let mut tensor = DeviceTensor::new(&mut exec, &[2, 3], Dtype::Bf16).unwrap();
        assert!(tensor.read(&mut exec).unwrap().data.to_f64().iter().all(|x| x.is_nan()));
        assert_eq!(tensor.view_mut().unwrap().byte_len(), 12);
    }
}
