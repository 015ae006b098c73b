//! Launches, and the checks before them.

use std::ffi::{c_int, c_void};

use bytemuck::NoUninit;

use super::driver::{self, check, failure, function_attribute};
use super::{CudaError, Function, Stream};

/// Most bytes of parameters that every driver takes.
const MAX_PARAM_BYTES: usize = 4096;

/// The form of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks, in one dimension.
    pub blocks: u32,
    /// Threads of a block, in one dimension.
    pub threads: u32,
    /// Dynamic shared bytes of a block.
    pub shared_bytes: u32,
}

/// How many blocks of a kernel run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residency {
    /// On one SM.
    pub per_sm: u32,
    /// SMs.
    pub sms: u32,
}

impl Residency {
    /// On the whole GPU.
    pub fn blocks(&self) -> u32 {
        self.per_sm * self.sms
    }

    /// For each of `sharers` PEs that run the kernel on this GPU at once.
    pub fn share(&self, sharers: u32) -> u32 {
        self.blocks() / sharers.max(1)
    }
}

impl Function {
    /// Lets blocks have up to `bytes` of dynamic shared memory; without it the limit is 48 KiB. Once, before launches.
    ///
    /// # Errors
    /// [`CudaError::Shared`] if the GPU has less.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        let (fixed, max) = (self.attributes().static_shared_bytes, self.gpu().properties().max_shared_bytes);
        if bytes.saturating_add(fixed) > max {
            return Err(CudaError::Shared { kernel: self.name().into(), dynamic: bytes, fixed, max });
        }
        self.gpu().make_current()?;
        // SAFETY: a function of a loaded module, and an attribute that may be set.
        check("cuFuncSetAttribute", unsafe {
            driver::cuFuncSetAttribute(self.raw, function_attribute::MAX_DYNAMIC_SHARED_BYTES, bytes as i32)
        })
    }

    /// How many blocks of `threads` threads with `shared_bytes` of dynamic shared memory run at the same time, on a GPU
    /// that does nothing else.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn residency(&self, threads: u32, shared_bytes: u32) -> Result<Residency, CudaError> {
        self.gpu().make_current()?;
        let mut per_sm = 0;
        // SAFETY: a function of a loaded module; writes one int.
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            driver::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut per_sm,
                self.raw,
                threads as i32,
                shared_bytes as usize,
            )
        })?;
        Ok(Residency { per_sm: per_sm.max(0) as u32, sms: self.gpu().properties().sms })
    }

    /// Checks that all blocks of a launch run at once although `sharers` PEs make it on this GPU: a kernel that waits
    /// inside would otherwise wait for blocks that cannot start.
    ///
    /// # Errors
    /// [`CudaError::NotResident`] with what was asked and what fits.
    pub fn check_resident(&self, shape: Shape, sharers: u32) -> Result<(), CudaError> {
        self.check_fits(shape, self.residency(shape.threads, shape.shared_bytes)?, sharers)
    }

    /// As [`check_resident`](Self::check_resident), where it is known how many blocks run at once.
    pub(super) fn check_fits(&self, shape: Shape, residency: Residency, sharers: u32) -> Result<(), CudaError> {
        let Shape { blocks, threads, shared_bytes } = shape;
        let fits = residency.share(sharers);
        if blocks <= fits {
            return Ok(());
        }
        let Residency { per_sm, sms } = residency;
        let kernel = self.name().into();
        Err(CudaError::NotResident { kernel, blocks, threads, shared_bytes, fits, per_sm, sms, sharers })
    }

    /// Puts the kernel behind the stream's work, with `params` by value as its one parameter.
    ///
    /// # Errors
    /// [`CudaError`] if the launch cannot be made: its shape, or parameters of another size than the kernel has.
    ///
    /// # Safety
    /// The kernel takes a `P`, and everything that it reaches through `params` stays allocated, and is used by nobody else
    /// in a way that the kernel does not expect, until the stream has done it.
    pub unsafe fn launch<P: NoUninit>(&self, stream: &Stream, shape: Shape, params: &P) -> Result<(), CudaError> {
        let Shape { blocks, threads, shared_bytes } = shape;
        // SAFETY: a function of a loaded module and its parameters; the rest is the caller's promise.
        self.enqueue(stream, shape, params, |params| unsafe {
            driver::cuLaunchKernel(
                self.raw,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared_bytes,
                stream.raw(),
                params,
                std::ptr::null_mut(),
            )
        })
    }

    /// As [`launch`](Self::launch), but it may start as soon as all blocks of the launch before have said that it may
    /// (`griddepcontrol.launch_dependents`) or have ended.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    ///
    /// # Safety
    /// As [`launch`](Self::launch); and the kernel ends after the one before, or else nothing that follows needs that.
    pub unsafe fn launch_dependent<P: NoUninit>(
        &self,
        stream: &Stream,
        shape: Shape,
        params: &P,
    ) -> Result<(), CudaError> {
        let mut attribute = driver::CUlaunchAttribute {
            id: driver::PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            // An int in the first bytes.
            value: [1, 0, 0, 0, 0, 0, 0, 0],
        };
        let config = driver::CUlaunchConfig {
            grid: [shape.blocks, 1, 1],
            block: [shape.threads, 1, 1],
            shared_bytes: shape.shared_bytes,
            stream: stream.raw(),
            attributes: &mut attribute,
            attribute_count: 1,
        };
        // SAFETY: as of `launch`; configuration and attribute live until the driver returns.
        self.enqueue(stream, shape, params, |params| unsafe {
            driver::cuLaunchKernelEx(&config, self.raw, params, std::ptr::null_mut())
        })
    }

    /// Checks a launch and makes it: `call` gets the list of its one parameter, which the driver copies and does not write.
    fn enqueue<P: NoUninit>(
        &self,
        stream: &Stream,
        shape: Shape,
        params: &P,
        call: impl FnOnce(*mut *mut c_void) -> c_int,
    ) -> Result<(), CudaError> {
        self.check(shape, size_of::<P>())?;
        let mut list = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let status = call(list.as_mut_ptr());
        if status != 0 {
            return Err(CudaError::Kernel { kernel: self.name().into(), failure: failure(status) });
        }
        stream.note(&self.name);
        Ok(())
    }

    fn check(&self, shape: Shape, bytes: usize) -> Result<(), CudaError> {
        let kernel = || self.name().to_owned();
        let Shape { blocks, threads, .. } = shape;
        let max = self.attributes().max_threads;
        if blocks == 0 || threads == 0 || threads > max {
            return Err(CudaError::Shape { kernel: kernel(), blocks, threads, max });
        }
        if bytes > MAX_PARAM_BYTES {
            return Err(CudaError::ParamBytes { kernel: kernel(), bytes, max: MAX_PARAM_BYTES });
        }
        match &self.params {
            Some(sizes) if **sizes != [bytes] => {
                Err(CudaError::Params { kernel: kernel(), device: sizes.clone(), host: bytes })
            }
            _ => self.gpu().make_current(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pes_on_one_gpu_share_its_blocks() {
        let residency = Residency { per_sm: 2, sms: 132 };
        assert_eq!(
            (residency.blocks(), residency.share(1), residency.share(8), residency.share(0)),
            (264, 264, 33, 264)
        );
    }
}
