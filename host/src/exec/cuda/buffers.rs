//! The device memory that an executor keeps from step to step.

use std::collections::HashMap;

use super::{CudaError, DeviceBuffer, Gpu, Stream};
use crate::exec::{Scratch, Slot};

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Use {
    /// A tensor of the caller.
    Slot(Slot),
    /// Scratch of a step.
    Scratch(Scratch),
    /// A step's tables and words.
    Image,
}

/// One buffer for each use, which grows when it must.
#[derive(Debug)]
pub(super) struct Buffers {
    gpu: Gpu,
    held: HashMap<Use, DeviceBuffer>,
    peak: usize,
}

impl Buffers {
    pub fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone(), held: HashMap::new(), peak: 0 }
    }

    /// The buffer for `what`, if there is one.
    pub fn get(&self, what: Use) -> Option<&DeviceBuffer> {
        self.held.get(&what)
    }

    /// A buffer of at least `bytes` bytes for `what`. A smaller one goes first, after `stream`'s work, which may use it.
    pub fn at_least(&mut self, stream: &Stream, what: Use, bytes: usize) -> Result<&DeviceBuffer, CudaError> {
        let grows = self.held.get(&what).is_none_or(|buffer| buffer.len() < bytes);
        if grows {
            if let Some(smaller) = self.held.remove(&what) {
                stream.synchronize()?;
                drop(smaller);
            }
            let buffer = self.gpu.alloc(bytes)?;
            self.held.insert(what, buffer);
            self.peak = self.peak.max(self.bytes(|_| true));
        }
        Ok(&self.held[&what])
    }

    /// Bytes held for those uses that `counts`.
    pub fn bytes(&self, counts: impl Fn(Use) -> bool) -> usize {
        self.held.iter().filter(|&(&what, _)| counts(what)).map(|(_, buffer)| buffer.len()).sum()
    }

    /// Most bytes that were held at once.
    pub fn peak(&self) -> usize {
        self.peak
    }
}
