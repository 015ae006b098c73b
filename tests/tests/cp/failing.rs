//! What the tests share in which one of three PEs fails, stops or does something else.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use deltalink::op::{Mode, OpError};
use deltalink::world::{Pe, RunError, WorldError};
use kernels_gpu::protocol::Awaited;

/// Timeout of worlds in which a wait must reach it: longer than any step takes on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of worlds in which no wait should reach it.
pub const LONG: Duration = Duration::from_secs(120);
/// More than any of these tests takes unless a wait ran to [`LONG`], or never ended. It is no measure of speed.
pub const NOT_FOREVER: Duration = Duration::from_secs(60);
/// The PE that misbehaves, of three.
pub const ODD: usize = 1;

/// What each PE's call returned in which one misbehaved, and how the world ended.
pub struct Outcome {
    pub calls: Vec<Option<Result<(), OpError>>>,
    pub end: Result<(), RunError<OpError>>,
    pub elapsed: Duration,
}

/// Where PEs leave what their call returned.
pub type Calls = Mutex<Vec<Option<Result<(), OpError>>>>;

impl Outcome {
    /// Of a world that `run` runs.
    pub fn of<T>(run: impl FnOnce(&Calls) -> Result<Vec<T>, RunError<OpError>>) -> Self {
        let calls = Mutex::new(vec![None, None, None]);
        let start = Instant::now();
        let end = run(&calls).map(|_| ());
        Self { calls: calls.into_inner().unwrap(), end, elapsed: start.elapsed() }
    }

    /// The error of the call on `rank`.
    #[track_caller]
    pub fn error(&self, rank: usize) -> &OpError {
        match &self.calls[rank] {
            Some(Err(error)) => error,
            other => panic!("PE {rank}: {other:?}"),
        }
    }

    /// [`ODD`] never called, and the time of `waiter` was up, which needed it, in `kernel` (in `exact_kernel` in exact mode). In
    /// bulk mode the third PE, `other`, waits as well, and its time may be up first.
    #[track_caller]
    pub fn assert_the_odd_one_is_missed(&self, mode: Mode, waiter: usize, other: usize, exact_kernel: &str) {
        assert!(self.end.is_err() && self.elapsed < NOT_FOREVER, "{mode}: {:?}", self.elapsed);
        let error = self.error(waiter);
        let message = error.to_string();
        match error {
            OpError::Expired(wait) => {
                assert_ne!(mode, Mode::Bulk, "{message}");
                let expired = &wait.expired;
                assert_eq!((expired.pe, expired.epoch, expired.found), (waiter as u32, 2, 1), "{message}");
                let awaited = Awaited::from_u32(expired.awaited);
                assert_eq!((expired.peer, awaited), (ODD as u32, Some(Awaited::Signal)), "{message}");
                let kernel = if mode == Mode::Exact { exact_kernel } else { "fix_out" };
                let (place, who) = (format!("in {kernel}, head 0, lane 0"), format!("PE {waiter}"));
                for part in [place.as_str(), &who, "of epoch 2 from PE 1", "found epoch 1"] {
                    assert!(message.contains(part), "{message}");
                }
            }
            OpError::World(WorldError::Timeout { waiter: late, missing, .. }) if *late == waiter => {
                assert_eq!((mode, &missing[..]), (Mode::Bulk, &[ODD][..]));
            }
            OpError::World(WorldError::PeFailed { rank, .. }) if *rank == other => {
                assert!(mode == Mode::Bulk && message.contains("for PE 1, which did not arrive"), "{message}");
            }
            _ => panic!("{mode}: {message}"),
        }
    }
}

/// What a silent PE does: nothing, until another one's time is up. However slow the machine, it is not gone before that.
pub fn stay_away(pe: &Pe) {
    let start = Instant::now();
    while pe.failed_peer().is_none() {
        assert!(start.elapsed() < NOT_FOREVER, "nobody missed PE {}", pe.rank());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The error that [`ODD`] makes.
pub fn refusal() -> OpError {
    OpError::PlanSize { plan: 7, world: 3 }
}

/// The error says that PE 1 failed, and with what.
#[track_caller]
pub fn assert_blames_the_odd_one(mode: Mode, error: &OpError, why: &str) {
    let OpError::World(WorldError::PeFailed { rank: ODD, message }) = error else { panic!("{mode}: {error}") };
    assert!(message.contains(why), "{mode}: {message}");
}
