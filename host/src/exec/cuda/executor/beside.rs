//! Walks that wait for a kernel beside them, one at a time on a GPU.
//!
//! Two of them in two streams could hold all multiprocessors and wait for kernels that find none. Those of one executor come one after
//! the other; those of several executors of this process are put in order here. Captured ones are ordered among themselves where they
//! are captured, and with others as the caller orders the launches of the graph.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::CudaExecutor;
use crate::exec::Overlap;
use crate::exec::cuda::{CudaError, Event};

/// The latest walk of this process on a GPU.
pub(super) struct Latest {
    gpu: usize,
    stream: u64,
    /// After it.
    end: Weak<Event>,
}

static LATEST: Mutex<Vec<Latest>> = Mutex::new(Vec::new());

/// What `DELTALINK_BESIDE` asks for: nothing, or hundredths of the chunks.
pub(super) fn asked(value: Option<&str>) -> Result<Overlap, CudaError> {
    match value.map(|value| (value, value.parse())) {
        None => Ok(Overlap::Auto),
        Some((_, Ok(0))) => Ok(Overlap::Never),
        Some((_, Ok(percent @ 1..=100))) => Ok(Overlap::Percent(percent)),
        Some((value, _)) => Err(CudaError::Beside { value: value.into() }),
    }
}

/// What is known of walks of this process, while one is launched.
pub(super) fn latest() -> MutexGuard<'static, Vec<Latest>> {
    LATEST.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CudaExecutor {
    /// Puts what is launched next behind the walks that other executors have launched.
    pub(super) fn follow(&self, latest: &[Latest]) -> Result<(), CudaError> {
        let (gpu, stream) = self.place();
        // An executor that is gone has waited for its launches.
        let other = latest.iter().find(|other| other.gpu == gpu && other.stream != stream);
        match other.and_then(|other| other.end.upgrade()) {
            Some(end) if !self.captures => self.stream.wait(&end),
            _ => Ok(()),
        }
    }

    /// Says that a walk was launched.
    pub(super) fn note(&mut self, latest: &mut Vec<Latest>) -> Result<(), CudaError> {
        if self.captures {
            return Ok(());
        }
        let end = match self.walked.take() {
            Some(end) => end,
            None => Arc::new(self.gpu.event()?),
        };
        end.record(&self.stream)?;
        let (gpu, stream) = self.place();
        latest.retain(|other| other.gpu != gpu);
        latest.push(Latest { gpu, stream, end: Arc::downgrade(&end) });
        self.walked = Some(end);
        Ok(())
    }

    fn place(&self) -> (usize, u64) {
        (self.gpu.properties().ordinal, self.stream.raw() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_a_share_or_an_error() {
        let of = |value| asked(value).map_err(|error| error.to_string());
        assert_eq!(of(None), Ok(Overlap::Auto));
        assert_eq!((of(Some("0")), of(Some("100"))), (Ok(Overlap::Never), Ok(Overlap::Percent(100))));
        for wrong in ["101", "-1", "half", ""] {
            let text = of(Some(wrong)).unwrap_err();
            assert!(text.contains("DELTALINK_BESIDE") && text.contains(&format!("{wrong:?}")), "{text}");
        }
    }
}
