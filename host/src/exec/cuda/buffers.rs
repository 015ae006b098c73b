//! The device memory of an executor, and how much of it there was at most.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

use super::gpu::Ledger;
use super::{CudaError, DeviceBuffer, Gpu, Stream};
use crate::exec::{Scratch, Slot};

/// What a buffer is for that stays from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Use {
    /// A tensor of the caller.
    Slot(Slot),
    /// Scratch of a step.
    Scratch(Scratch),
}

/// Device memory of an executor, counted while it lives.
#[derive(Debug)]
pub struct Counted {
    held: Arc<Held>,
}

#[derive(Debug)]
struct Held {
    buffer: DeviceBuffer,
    ledger: Arc<Ledger>,
}

impl Deref for Counted {
    type Target = DeviceBuffer;

    fn deref(&self) -> &DeviceBuffer {
        &self.held.buffer
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ledger.give(self.buffer.len());
    }
}

/// One buffer for each use, which grows when it must; and memory whose holder somebody else is.
#[derive(Debug)]
pub(super) struct Buffers {
    gpu: Gpu,
    held: HashMap<Use, Counted>,
    ledger: Arc<Ledger>,
    /// What captured steps use: it stays whoever else lets go of it, since they may be replayed at any time.
    pinned: Vec<Arc<Held>>,
}

impl Buffers {
    pub fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone(), held: HashMap::new(), ledger: Arc::default(), pinned: Vec::new() }
    }

    /// Memory of `bytes` bytes, whose contents are whatever was there.
    pub fn alloc(&self, bytes: usize) -> Result<Counted, CudaError> {
        let buffer = self.gpu.alloc(bytes)?;
        self.ledger.take(bytes);
        Ok(Counted { held: Arc::new(Held { buffer, ledger: Arc::clone(&self.ledger) }) })
    }

    /// The buffer for `what`, if there is one.
    pub fn get(&self, what: Use) -> Option<&DeviceBuffer> {
        self.held.get(&what).map(|buffer| &**buffer)
    }

    /// Whether the buffer for `what` has `bytes` bytes already; if so, it is kept as long as the executor.
    pub fn pin(&mut self, what: Use, bytes: usize) -> bool {
        let Some(buffer) = self.held.get(&what).filter(|buffer| buffer.len() >= bytes) else { return bytes == 0 };
        pin(&mut self.pinned, buffer);
        true
    }

    /// Keeps `memory` as long as the executor.
    pub fn pin_memory(&mut self, memory: &Counted) {
        pin(&mut self.pinned, memory);
    }

    /// A buffer of at least `bytes` bytes for `what`. A smaller one goes first, after `stream`'s work, which may use it.
    pub fn at_least(&mut self, stream: &Stream, what: Use, bytes: usize) -> Result<&DeviceBuffer, CudaError> {
        if self.held.get(&what).is_none_or(|buffer| buffer.len() < bytes) {
            if let Some(smaller) = self.held.remove(&what) {
                stream.synchronize()?;
                drop(smaller);
            }
            let buffer = self.alloc(bytes)?;
            self.held.insert(what, buffer);
        }
        Ok(&self.held[&what])
    }

    /// Bytes held for those uses that `counts`.
    pub fn bytes(&self, counts: impl Fn(Use) -> bool) -> usize {
        self.held.iter().filter(|&(&what, _)| counts(what)).map(|(_, buffer)| buffer.len()).sum()
    }

    /// Most bytes that lived at once.
    pub fn peak(&self) -> usize {
        self.ledger.read().peak
    }
}

fn pin(pinned: &mut Vec<Arc<Held>>, buffer: &Counted) {
    if !pinned.iter().any(|held| Arc::ptr_eq(held, &buffer.held)) {
        pinned.push(Arc::clone(&buffer.held));
    }
}
