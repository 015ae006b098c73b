//! Work of a stream that is captured once and launched again and again.

use std::ffi::c_int;

use crate::error::{CudaResult, check};
use crate::sys::{self, CUgraph, CUgraphExec, CUgraphNode, CUstream};

/// What becomes of calls that a capture does not allow, of which `cudaMalloc` is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum CaptureMode {
    /// They fail on every thread of the process.
    Global = 0,
    /// They fail on the capturing thread.
    ThreadLocal = 1,
    /// They are made.
    Relaxed = 2,
}

/// What a node of a graph does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// Launches a kernel.
    Kernel,
    /// Copies memory.
    Memcpy,
    /// Fills memory.
    Memset,
    /// Something else, by the driver's number.
    Other(c_int),
}

/// Whether `stream` captures what is put into it.
///
/// # Errors
/// The driver's.
///
/// # Safety
/// A stream of the current context.
pub unsafe fn is_capturing(stream: CUstream) -> CudaResult<bool> {
    let mut status = 0;
    // SAFETY: writes one int; the rest is the caller's promise.
    check(unsafe { sys::cuStreamIsCapturing(stream, &mut status) })?;
    Ok(status != 0)
}

/// Lets `stream` capture what is put into it from here on, in place of doing it.
///
/// # Errors
/// The driver's.
///
/// # Safety
/// A stream of the current context.
pub unsafe fn begin_capture(stream: CUstream, mode: CaptureMode) -> CudaResult<()> {
    // SAFETY: the caller's promise.
    check(unsafe { sys::cuStreamBeginCapture_v2(stream, mode as c_int) })
}

/// Ends a capture.
///
/// # Errors
/// The driver's, also if something in between was not allowed: then the stream captures no longer either.
///
/// # Safety
/// A stream of the current context.
pub unsafe fn end_capture(stream: CUstream) -> CudaResult<Graph> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: writes one handle; the rest is the caller's promise.
    check(unsafe { sys::cuStreamEndCapture(stream, &mut raw) })?;
    Ok(Graph { raw })
}

/// What was captured.
#[derive(Debug)]
pub struct Graph {
    raw: CUgraph,
}

// SAFETY: the handle belongs to one owner, and any thread may use it, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// What its nodes do, in no order.
    ///
    /// # Errors
    /// The driver's.
    pub fn nodes(&self) -> CudaResult<Vec<NodeKind>> {
        let mut count = 0;
        // SAFETY: a live graph; without a place for nodes their number is written.
        check(unsafe { sys::cuGraphGetNodes(self.raw, std::ptr::null_mut(), &mut count) })?;
        let mut nodes: Vec<CUgraphNode> = vec![std::ptr::null_mut(); count];
        // SAFETY: a live graph; as many handles as there is room for are written.
        check(unsafe { sys::cuGraphGetNodes(self.raw, nodes.as_mut_ptr(), &mut count) })?;
        nodes.truncate(count);
        let kind = |node: CUgraphNode| {
            let mut kind = 0;
            // SAFETY: a node of a live graph; writes one int.
            check(unsafe { sys::cuGraphNodeGetType(node, &mut kind) })?;
            Ok(match kind {
                0 => NodeKind::Kernel,
                1 => NodeKind::Memcpy,
                2 => NodeKind::Memset,
                other => NodeKind::Other(other),
            })
        };
        nodes.into_iter().map(kind).collect()
    }

    /// Makes it ready to be launched.
    ///
    /// # Errors
    /// The driver's.
    pub fn instantiate(&self) -> CudaResult<GraphExec> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live graph; writes one handle.
        check(unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, self.raw, 0) })?;
        Ok(GraphExec { raw })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // A failure means that the context is gone, and the graph with it.
        // SAFETY: this handle's only release.
        let _ = unsafe { sys::cuGraphDestroy(self.raw) };
    }
}

/// A graph that can be launched.
#[derive(Debug)]
pub struct GraphExec {
    raw: CUgraphExec,
}

// SAFETY: as for graphs.
unsafe impl Send for GraphExec {}

impl GraphExec {
    /// Puts all of its work into `stream`.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// A stream of the current context; all memory that the captured work uses is there until the stream has done it.
    pub unsafe fn launch(&self, stream: CUstream) -> CudaResult<()> {
        // SAFETY: the caller's promise.
        check(unsafe { sys::cuGraphLaunch(self.raw, stream) })
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        // As for graphs. The driver keeps it until launches of it have ended.
        // SAFETY: this handle's only release.
        let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
    }
}
