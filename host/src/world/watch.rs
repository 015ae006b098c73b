//! A bound for calls that have none: a PE that stays in one too long is reported, so that the others learn which PE is where.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use super::{Member, Pe};

/// Watches one call of a PE; see [`Pe::watch`]. Dropped, it watches no longer.
#[derive(Debug)]
pub struct Watch {
    /// Its end tells the watching thread that the call has returned.
    _returned: Sender<()>,
}

impl Pe {
    /// Watches what this PE does until the guard is dropped. If that takes longer than the world's timeout, the PE is reported
    /// as failed in `phase`: the others' waits end with this, and [`Launch`](super::Launch) stops the processes. The call
    /// itself cannot be interrupted.
    #[must_use]
    pub fn watch(&self, phase: &str) -> Watch {
        let (returned, end) = channel();
        let (member, phase) = (self.member(), phase.to_owned());
        let timeout = self.timeout();
        let watching = thread::Builder::new().name(format!("watch of PE {}", self.rank())).spawn(move || {
            if end.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
                report(&member, &phase, timeout);
            }
        });
        if let Err(error) = watching {
            tracing::warn!("PE {}: a call without a bound of its own is not watched: {error}", self.rank());
        }
        Watch { _returned: returned }
    }
}

fn report(member: &Member, phase: &str, waited: Duration) {
    let message = format!(
        "it has been in {phase} for {waited:.1?} and does not come back; NVSHMEM_DEBUG=INFO makes NVSHMEM say where, and a longer \
         timeout helps if it is only slow"
    );
    tracing::error!("PE {}: {message}", member.rank);
    member.report_failure(&message);
}

#[cfg(test)]
mod tests {
    use super::super::{RunError, WorldError, WorldOptions, run_threads};
    use super::*;

    const SHORT: Duration = Duration::from_millis(200);

    #[test]
    fn a_pe_that_does_not_come_back_is_named_with_its_phase() {
        let options = WorldOptions { heap_bytes: 4096, timeout: SHORT };
        let outcome = run_threads(2, &options, |pe| -> Result<(), WorldError> {
            if pe.rank() == 1 {
                let _watch = pe.watch("the start of NVSHMEM");
                thread::sleep(4 * SHORT);
            }
            // PE 0 learns of it before its own wait runs out, or says itself whom it waits for.
            thread::sleep(SHORT);
            while pe.failed_peer().is_none() {
                thread::sleep(SHORT / 20);
            }
            pe.barrier("afterwards")
        });
        let Err(RunError::World(error) | RunError::Pe { error, .. }) = outcome else { panic!("{outcome:?}") };
        let text = error.to_string();
        assert!(text.contains("PE 1 failed: it has been in the start of NVSHMEM for 200.0ms"), "{text}");
    }

    #[test]
    fn a_call_that_returns_is_no_failure() {
        let options = WorldOptions { heap_bytes: 4096, timeout: SHORT };
        let failed = run_threads(1, &options, |pe| -> Result<bool, WorldError> {
            drop(pe.watch("a short call"));
            thread::sleep(2 * SHORT);
            Ok(pe.failed_peer().is_some())
        });
        assert_eq!(failed, Ok(vec![false]));
    }
}
