//! The device of a world: its operations, and the pool of its symmetric buffers.

use deltalink::exec::cpu::Cpu;
use deltalink::gradients::Upstream;
use deltalink::heap::{HeapStats, Lent};
use deltalink::inputs::Inputs;
use deltalink::op::convolution::{
    Activation, ConvolutionConfig, ConvolutionGradientsOut, ConvolutionInput, ConvolutionOut, ConvolutionUpstream,
    ShortConvolution, ShortConvolutionError,
};
use deltalink::op::{BackwardOut, Config, ContextParallel, ForwardOut, OpError};
use deltalink::plan::Plan;
use deltalink::world::Pe;

use crate::errors::Failure;
#[cfg(feature = "cuda")]
use crate::gpu::Gpu;
use crate::operation::{Attention, Convolution, SavedCall};
use crate::tensor::CurrentStream;

/// Which device a world is to compute on.
#[derive(Clone, Copy, Debug)]
pub enum Wanted {
    /// The CPU, with so many threads; absent means the machine's cores over the PEs.
    Cpu { workers: Option<usize> },
    /// The GPU of this number, with so many bytes of symmetric heap there.
    #[cfg(feature = "cuda")]
    Gpu { ordinal: usize, heap_bytes: usize },
}

/// A device in use.
pub enum Device<'pe> {
    /// The CPU.
    Cpu { pe: &'pe Pe, workers: Option<usize> },
    /// A GPU.
    #[cfg(feature = "cuda")]
    Gpu(Box<Gpu<'pe>>),
}

/// Attention on either device.
pub enum AnyAttention<'pe> {
    Cpu(Attention<'pe, Cpu>),
    #[cfg(feature = "cuda")]
    Gpu(Attention<'pe, deltalink::exec::cuda::CudaExecutor>),
}

/// A short convolution on either device.
pub enum AnyConvolution<'pe> {
    Cpu(Convolution<'pe, Cpu>),
    #[cfg(feature = "cuda")]
    Gpu(Convolution<'pe, deltalink::exec::cuda::CudaExecutor>),
}

impl<'pe> Device<'pe> {
    /// Starts the device for `pe`. Collective on GPUs.
    ///
    /// # Errors
    /// [`Failure`] if the GPU cannot be used or the PEs cannot reach each other's.
    pub fn start(pe: &'pe Pe, wanted: Wanted) -> Result<Self, Failure> {
        match wanted {
            Wanted::Cpu { workers } => Ok(Device::Cpu { pe, workers }),
            #[cfg(feature = "cuda")]
            Wanted::Gpu { ordinal, heap_bytes } => Ok(Device::Gpu(Box::new(Gpu::start(pe, ordinal, heap_bytes)?))),
        }
    }

    /// The operation with these options.
    ///
    /// # Errors
    /// [`OpError`] if an option is out of range, or the device gives no stream or threads.
    pub fn attention(&self, config: &Config) -> Result<AnyAttention<'pe>, OpError> {
        match self {
            &Device::Cpu { pe, workers } => {
                let own = Config { workers, ..config.clone() };
                Ok(AnyAttention::Cpu(Attention::new(pe, ContextParallel::new(pe, own)?)))
            }
            #[cfg(feature = "cuda")]
            Device::Gpu(gpu) => {
                let operation = ContextParallel::on(gpu.pe(), config.clone(), gpu.executor()?)?;
                Ok(AnyAttention::Gpu(Attention::new(gpu.pe(), operation)))
            }
        }
    }

    /// The short convolution with these options.
    ///
    /// # Errors
    /// [`Failure`] if the device gives no stream or threads.
    pub fn convolution(&self, config: &ConvolutionConfig) -> Result<AnyConvolution<'pe>, Failure> {
        match self {
            &Device::Cpu { pe, workers } => {
                let own = ConvolutionConfig { workers, ..config.clone() };
                Ok(AnyConvolution::Cpu(Convolution::new(pe, ShortConvolution::new(pe, own)?)))
            }
            #[cfg(feature = "cuda")]
            Device::Gpu(gpu) => {
                let executor = gpu.executor().map_err(OpError::from)?;
                let operation = ShortConvolution::on(gpu.pe(), config.clone(), executor)?;
                Ok(AnyConvolution::Gpu(Convolution::new(gpu.pe(), operation)))
            }
        }
    }

    /// A buffer of zeros at the same place of every PE's pool. Collective.
    ///
    /// # Errors
    /// [`Failure`] if there is no room or the PEs differ.
    pub fn symmetric(&self, name: &str, bytes: usize) -> Result<Lent, Failure> {
        match self {
            Device::Cpu { pe, .. } => Ok(pe.heap().alloc::<u8>(name, bytes)?.lend()),
            #[cfg(feature = "cuda")]
            Device::Gpu(gpu) => Ok(gpu.heap().alloc::<u8>(name, bytes)?.lend()),
        }
    }

    /// Use of this PE's pool.
    pub fn heap_stats(&self) -> HeapStats {
        match self {
            Device::Cpu { pe, .. } => pe.heap().stats(),
            #[cfg(feature = "cuda")]
            Device::Gpu(gpu) => gpu.heap().stats(),
        }
    }

    /// Ends what is collective, if `together`; otherwise waits for nobody. Operations must be gone.
    pub fn close(self, together: bool) {
        match self {
            Device::Cpu { .. } => {
                let _ = together;
            }
            #[cfg(feature = "cuda")]
            Device::Gpu(gpu) => gpu.close(together),
        }
    }
}

/// `$body` with the operation in `$any`, whatever its device; on a GPU its work goes into `$stream`.
macro_rules! on {
    ($kind:ident: $any:expr, $stream:expr, |$one:ident| $body:expr) => {
        match $any {
            $kind::Cpu($one) => {
                let CurrentStream(_) = $stream;
                $body
            }
            #[cfg(feature = "cuda")]
            $kind::Gpu($one) => {
                let CurrentStream(raw) = $stream;
                // SAFETY: torch's current stream of this GPU, in its primary context; torch keeps its streams for the life of
                // the process.
                unsafe { $one.operation.executor_mut().use_stream(raw) }.map_err(deltalink::exec::ExecError::from)?;
                $body
            }
        }
    };
}

impl AnyAttention<'_> {
    /// See [`Attention::forward`].
    pub fn forward(
        &mut self,
        stream: CurrentStream,
        plan: &Plan,
        inputs: &Inputs<'_>,
        out: &mut ForwardOut<'_>,
        save: bool,
    ) -> Result<Option<SavedCall>, OpError> {
        on!(AnyAttention: self, stream, |one| one.forward(plan, inputs, out, save))
    }

    /// See [`Attention::backward`].
    #[allow(clippy::too_many_arguments)] // those of the call, and where it runs
    pub fn backward(
        &mut self,
        stream: CurrentStream,
        plan: &Plan,
        inputs: &Inputs<'_>,
        call: u64,
        upstream: &Upstream<'_>,
        out: &mut BackwardOut<'_>,
        complete: bool,
    ) -> Result<(), OpError> {
        on!(AnyAttention: self, stream, |one| one.backward(plan, inputs, call, upstream, out, complete))
    }

    /// See [`Attention::release`].
    pub fn release(&mut self, call: u64) {
        match self {
            AnyAttention::Cpu(one) => one.release(call),
            #[cfg(feature = "cuda")]
            AnyAttention::Gpu(one) => one.release(call),
        }
    }
}

impl AnyConvolution<'_> {
    /// See [`Convolution::forward`].
    pub fn forward(
        &mut self,
        stream: CurrentStream,
        plan: &Plan,
        inputs: (&[ConvolutionInput<'_>], Activation),
        out: &mut [ConvolutionOut<'_>],
        save: bool,
    ) -> Result<Option<SavedCall>, ShortConvolutionError> {
        on!(AnyConvolution: self, stream, |one| one.forward(plan, inputs, out, save))
    }

    /// See [`Convolution::backward`].
    pub fn backward(
        &mut self,
        stream: CurrentStream,
        plan: &Plan,
        inputs: (&[ConvolutionInput<'_>], Activation),
        call: u64,
        upstream: (&[ConvolutionUpstream<'_>], &mut [ConvolutionGradientsOut<'_>]),
        complete: bool,
    ) -> Result<(), ShortConvolutionError> {
        on!(AnyConvolution: self, stream, |one| one.backward(plan, inputs, call, upstream, complete))
    }

    /// See [`Convolution::release`].
    pub fn release(&mut self, call: u64) {
        match self {
            AnyConvolution::Cpu(one) => one.release(call),
            #[cfg(feature = "cuda")]
            AnyConvolution::Gpu(one) => one.release(call),
        }
    }
}
