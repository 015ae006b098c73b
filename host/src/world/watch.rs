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
    use std::sync::Mutex;
    use std::time::Instant;

    use super::super::{RunError, WorldError, WorldOptions, run_threads};
    use super::*;

    const NOT_FOREVER: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(200);

    #[test]
    fn a_pe_that_does_not_come_back_is_named_with_its_phase() {
        let options = WorldOptions { heap_bytes: 4096, timeout: SHORT };
        let outcome = run_threads(2, &options, |pe| -> Result<(), WorldError> {
            // PE 1 does not come back before it is reported; PE 0 begins no wait of its own before that.
            let _watch = (pe.rank() == 1).then(|| pe.watch("the start of NVSHMEM"));
            let start = Instant::now();
            while pe.failed_peer().is_none() {
                assert!(start.elapsed() < NOT_FOREVER, "nobody reports PE 1");
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
        // A call that the machine made long says nothing, and is made again in a new world.
        let watched = || {
            let reported = Mutex::new(None);
            let _ = run_threads(1, &options, |pe| -> Result<(), WorldError> {
                let start = Instant::now();
                drop(pe.watch("a short call"));
                if start.elapsed() < SHORT {
                    thread::sleep(2 * SHORT);
                    *reported.lock().expect("one thread") = Some(pe.failed_peer());
                }
                Ok(())
            });
            reported.into_inner().expect("one thread")
        };
        let reported = (0..100).find_map(|_| watched()).expect("a call of nothing in less than the timeout");
        assert_eq!(reported, None);
    }
}
