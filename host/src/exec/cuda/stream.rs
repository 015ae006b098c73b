//! Streams: work that a GPU does in order. Events: points in that order.

use std::ffi::c_uint;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cust::graph::{self, CaptureMode};

use super::driver::{self, CUevent, CUstream, check, checked, code, failure};
use super::graph::Graph;
use super::{CudaError, Gpu};

/// A stream: one that waits for no other, the default stream included, or one that somebody else made.
#[derive(Debug)]
pub struct Stream {
    raw: CUstream,
    gpu: Gpu,
    /// Whether it goes with this handle.
    owned: bool,
    /// Kernels launched since the stream was last known to be done, for the error that one of them may cause.
    running: Mutex<Vec<Arc<str>>>,
}

// SAFETY: the driver's handles may be used by any thread, and by several at a time.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Gpu {
    /// A new stream.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn stream(&self) -> Result<Stream, CudaError> {
        const NON_BLOCKING: c_uint = 1;
        self.make_current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; the context is current.
        check("cuStreamCreate", unsafe { driver::cuStreamCreate(&mut raw, NON_BLOCKING) })?;
        Ok(Stream { raw, gpu: self.clone(), owned: true, running: Mutex::default() })
    }

    /// A new event that can tell times.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn event(&self) -> Result<Event, CudaError> {
        self.make_current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; the context is current.
        check("cuEventCreate", unsafe { driver::cuEventCreate(&mut raw, 0) })?;
        Ok(Event { raw, gpu: self.clone() })
    }
}

impl Stream {
    /// A stream of somebody else: a `CUstream` or `cudaStream_t`, of which 0 is the default stream.
    ///
    /// # Safety
    /// A stream of the GPU's primary context that lives as long as the handle.
    pub unsafe fn borrowed(gpu: &Gpu, raw: u64) -> Self {
        let raw = std::ptr::with_exposed_provenance_mut(raw as usize);
        Self { raw, gpu: gpu.clone(), owned: false, running: Mutex::default() }
    }

    /// Whether it captures what is put into it, in place of doing it.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        // The default stream cannot, and must not be asked while another one does.
        if self.raw.is_null() {
            return Ok(false);
        }
        self.gpu.make_current()?;
        // SAFETY: a live handle of the current context.
        checked("cuStreamIsCapturing", unsafe { graph::is_capturing(self.raw) })
    }

    /// Captures what is put into it from here on. Calls of this thread that a capture does not allow fail until its end.
    pub(super) fn begin_capture(&self) -> Result<(), CudaError> {
        self.gpu.make_current()?;
        // SAFETY: a live handle of the current context.
        checked("cuStreamBeginCapture", unsafe { graph::begin_capture(self.raw, CaptureMode::ThreadLocal) })
    }

    /// What was captured.
    pub(super) fn end_capture(&self) -> Result<Graph, CudaError> {
        self.gpu.make_current()?;
        // Noted when they were captured, and not running.
        self.running.lock().unwrap_or_else(PoisonError::into_inner).clear();
        // SAFETY: a live handle of the current context.
        let captured = checked("cuStreamEndCapture", unsafe { graph::end_capture(self.raw) })?;
        Graph::new(&self.gpu, captured)
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The driver's handle.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits until all its work is done.
    ///
    /// # Errors
    /// [`CudaError::Async`] with the kernels of which one failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.gpu.make_current()?;
        // SAFETY: a live handle.
        self.done("cuStreamSynchronize", unsafe { driver::cuStreamSynchronize(self.raw) })
    }

    /// As [`synchronize`](Self::synchronize), but `meanwhile` is called again and again until then, at first without pauses
    /// and later every 50 us or so.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    pub fn synchronize_with(&self, mut meanwhile: impl FnMut()) -> Result<(), CudaError> {
        const SPINS: u32 = 1000;
        let mut polls = 0;
        while !self.is_done()? {
            meanwhile();
            match polls {
                SPINS => std::thread::sleep(Duration::from_micros(50)),
                _ => {
                    polls += 1;
                    std::thread::yield_now();
                }
            }
        }
        Ok(())
    }

    /// Whether all its work is done.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.gpu.make_current()?;
        // SAFETY: a live handle.
        match unsafe { driver::cuStreamQuery(self.raw) } {
            code::NOT_READY => Ok(false),
            status => self.done("cuStreamQuery", status).map(|()| true),
        }
    }

    /// Lets the work that follows wait for `event`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.gpu.make_current()?;
        // SAFETY: live handles; the driver keeps what it needs of a destroyed event.
        check("cuStreamWaitEvent", unsafe { driver::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// Copies `bytes` bytes between addresses of any GPU that this one reaches, in the order of the stream's work.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// Both ranges are device memory and stay allocated until the stream has done the copy; nobody else writes the
    /// source or uses the destination meanwhile.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.gpu.make_current()?;
        // SAFETY: the caller's promise.
        check("cuMemcpyAsync", unsafe { driver::cuMemcpyAsync(to, from, bytes, self.raw) })
    }

    /// Copies `bytes` to address `to`, in the order of the stream's work.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// As [`copy`](Self::copy); `bytes` stays as it is until the stream has done the copy.
    pub unsafe fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.gpu.make_current()?;
        // SAFETY: the caller's promise.
        check("cuMemcpyHtoDAsync", unsafe {
            driver::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.raw)
        })
    }

    /// Copies from address `from` to `bytes`, in the order of the stream's work.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// As [`copy`](Self::copy); nobody reads or writes `bytes`, and it stays allocated, until the stream has done the copy.
    pub unsafe fn download(&self, bytes: &mut [u8], from: u64) -> Result<(), CudaError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.gpu.make_current()?;
        // SAFETY: the caller's promise.
        check("cuMemcpyDtoHAsync", unsafe {
            driver::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.raw)
        })
    }

    /// Sets `bytes` bytes at `to` to `value`, in the order of the stream's work.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// As [`copy`](Self::copy) for the destination.
    pub unsafe fn fill(&self, to: u64, bytes: usize, value: u8) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.gpu.make_current()?;
        // SAFETY: the caller's promise.
        check("cuMemsetD8Async", unsafe { driver::cuMemsetD8Async(to, value, bytes, self.raw) })
    }

    pub(super) fn note(&self, kernel: &Arc<str>) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if !running.contains(kernel) {
            running.push(Arc::clone(kernel));
        }
    }

    /// Judges the status of a call that reports what all of the stream's work ended with.
    fn done(&self, call: &'static str, status: i32) -> Result<(), CudaError> {
        self.judge(call, status)?;
        self.running.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Ok(())
    }

    /// Judges the status of a call that reports what some of the stream's work ended with.
    fn judge(&self, call: &'static str, status: i32) -> Result<(), CudaError> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        match status {
            0 => Ok(()),
            _ if running.is_empty() => check(call, status),
            _ => {
                let kernels = running.iter().map(|kernel| kernel.to_string()).collect();
                Err(CudaError::Async { kernels, failure: failure(status) })
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        // Work that is queued goes on without the handle. A failure means that the context is gone, and the stream too.
        let _ = self.gpu.make_current();
        // SAFETY: this handle's only release.
        let _ = unsafe { driver::cuStreamDestroy_v2(self.raw) };
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    raw: CUevent,
    gpu: Gpu,
}

// SAFETY: as for streams.
unsafe impl Send for Event {}
// SAFETY: as for streams.
unsafe impl Sync for Event {}

impl Event {
    /// Puts it behind the stream's work so far.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        self.gpu.make_current()?;
        // SAFETY: live handles.
        check("cuEventRecord", unsafe { driver::cuEventRecord(self.raw, stream.raw()) })
    }

    /// Whether `stream`, in which it lies, has come here.
    ///
    /// # Errors
    /// As [`Stream::synchronize`], if the work before it failed.
    pub fn is_reached(&self, stream: &Stream) -> Result<bool, CudaError> {
        self.gpu.make_current()?;
        // SAFETY: a live handle.
        match unsafe { driver::cuEventQuery(self.raw) } {
            code::NOT_READY => Ok(false),
            status => stream.judge("cuEventQuery", status).map(|()| true),
        }
    }

    /// Waits until the stream has come here.
    ///
    /// # Errors
    /// [`CudaError::Call`] with what the stream's work ended with.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.gpu.make_current()?;
        // SAFETY: a live handle.
        check("cuEventSynchronize", unsafe { driver::cuEventSynchronize(self.raw) })
    }

    /// Time from `start` to here, on the GPU's clock; both must have been reached.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn since(&self, start: &Event) -> Result<Duration, CudaError> {
        self.gpu.make_current()?;
        let mut milliseconds = 0.0;
        // SAFETY: live handles; writes one float.
        check("cuEventElapsedTime", unsafe { driver::cuEventElapsedTime(&mut milliseconds, start.raw, self.raw) })?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) * 1e-3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // As for streams.
        let _ = self.gpu.make_current();
        // SAFETY: this handle's only release.
        let _ = unsafe { driver::cuEventDestroy_v2(self.raw) };
    }
}
