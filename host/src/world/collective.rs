//! Collective steps: every PE arrives with a letter, waits until all have arrived, and reads the letters of all.
//!
//! Step `e` (the epoch, from 1, never reset):
//!
//! 1. write one's letter, of parity `e % 2`;
//! 2. store `e` in one's `arrived` (release);
//! 3. wait until `arrived >= e` on every PE (acquire);
//! 4. read the letters of parity `e % 2`.
//!
//! A PE writes letter `e + 2` over letter `e` only after step 3 of epoch `e + 1`, which every PE enters only after its
//! reads of epoch `e`: so one wait per step is enough, and no PE is ever more than one epoch ahead of another. A barrier
//! is a step with an empty letter; longer contents go in as many steps as the longest needs.
//!
//! A PE whose step fails arrives nowhere again (`broken`), hence nobody passes a later step and overwrites what it reads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::WorldError;
use super::segment::Segment;

/// Bytes of contents that one letter carries.
pub(crate) const PIECE: usize = 16 << 10;
const WHAT: usize = 96;

/// The two letters of a PE, by parity of the epoch.
pub(super) type Letters = [Letter; 2];

#[repr(C, align(128))]
pub(super) struct Letter {
    envelope: Envelope,
    piece: [u8; PIECE],
}

/// Says which step its writer is in, so that PEs in different steps notice.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
struct Envelope {
    kind: u32,
    what_len: u32,
    root: u64,
    /// Bytes of the whole contents.
    total: u64,
    /// Bytes in this letter.
    piece: u64,
    what: [u8; WHAT],
}

/// What a step is for; all PEs must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The first step of a world.
    Start,
    /// Nothing but to wait for all.
    Barrier,
    /// Contents of every PE for every PE.
    AllGather,
    /// Contents of every PE for one.
    Gather {
        /// The one.
        root: usize,
    },
    /// The PEs compare what they ask of the heap; names may differ, the heap reports that better.
    Allocation,
    /// The allocation's memory is zero on every PE.
    AllocationReady,
}

impl Purpose {
    fn code(self) -> (u32, u64) {
        match self {
            Purpose::Start => (1, 0),
            Purpose::Barrier => (2, 0),
            Purpose::AllGather => (3, 0),
            Purpose::Gather { root } => (4, root as u64),
            Purpose::Allocation => (5, 0),
            Purpose::AllocationReady => (6, 0),
        }
    }

    fn from_code(code: (u32, u64)) -> Option<Self> {
        let root = usize::try_from(code.1).ok()?;
        let all = [
            Purpose::Start,
            Purpose::Barrier,
            Purpose::AllGather,
            Purpose::Gather { root },
            Purpose::Allocation,
            Purpose::AllocationReady,
        ];
        all.into_iter().find(|purpose| purpose.code() == code)
    }
}

/// A step as its callers name it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step<'a> {
    pub(crate) purpose: Purpose,
    pub(crate) what: &'a str,
}

impl std::fmt::Display for Step<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = self.what;
        match self.purpose {
            Purpose::Start => write!(f, "the start of the world"),
            Purpose::Barrier => write!(f, "barrier `{what}`"),
            Purpose::AllGather => write!(f, "all-gather `{what}`"),
            Purpose::Gather { root } => write!(f, "gather `{what}` to PE {root}"),
            Purpose::Allocation => write!(f, "the allocation of `{what}`"),
            Purpose::AllocationReady => write!(f, "the end of the allocation of `{what}`"),
        }
    }
}

impl Envelope {
    fn new(step: Step<'_>, total: usize, piece: usize) -> Self {
        let (kind, root) = step.purpose.code();
        let end = step.what.floor_char_boundary(WHAT);
        let mut what = [0; WHAT];
        what[..end].copy_from_slice(&step.what.as_bytes()[..end]);
        Self { kind, what_len: end as u32, root, total: total as u64, piece: piece as u64, what }
    }

    fn same_step(&self, other: &Self) -> bool {
        (self.kind, self.root) == (other.kind, other.root)
            && (self.kind == Purpose::Allocation.code().0 || self.what == other.what)
    }

    fn label(&self) -> String {
        let what = String::from_utf8_lossy(&self.what[..(self.what_len as usize).min(WHAT)]);
        match Purpose::from_code((self.kind, self.root)) {
            Some(purpose) => Step { purpose, what: &what }.to_string(),
            None => format!("an unknown step {} `{what}`", self.kind),
        }
    }
}

/// One PE's membership of a world: what its [`Pe`](super::Pe) and its heap share.
#[derive(Debug)]
pub(crate) struct Member {
    pub(super) segment: Arc<Segment>,
    pub(super) rank: usize,
    pub(super) timeout: Duration,
    pub(super) closed: AtomicBool,
    steps: Mutex<Steps>,
}

#[derive(Debug, Default)]
struct Steps {
    epoch: u64,
    broken: Option<WorldError>,
}

impl Member {
    /// Takes `rank` in the world of `segment` and waits until all PEs have joined.
    pub(super) fn join(segment: Arc<Segment>, rank: usize, timeout: Duration) -> Result<Arc<Self>, WorldError> {
        let me = u64::from(std::process::id());
        // Relaxed: only who takes the rank is decided here; the first step orders everything else.
        if let Err(pid) = segment.slots()[rank].joined.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed) {
            return Err(WorldError::RankTaken { rank, pid });
        }
        let member = Arc::new(Self { segment, rank, timeout, closed: AtomicBool::new(false), steps: Mutex::default() });
        member.turn().step(Step { purpose: Purpose::Start, what: "" })?;
        Ok(member)
    }

    /// The segment this PE shares with its peers.
    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// This PE.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Tells the other PEs why this one stops.
    pub(crate) fn report_failure(&self, message: &str) {
        self.segment.failure().report(self.rank, message);
    }

    /// The right to make collective steps, held by one thread of the PE at a time.
    pub(crate) fn turn(&self) -> Turn<'_> {
        // A panic elsewhere leaves no half-made state behind: each step commits its epoch in one assignment.
        Turn { member: self, steps: self.steps.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

/// See [`Member::turn`].
pub(crate) struct Turn<'a> {
    member: &'a Member,
    steps: MutexGuard<'a, Steps>,
}

impl Turn<'_> {
    /// A step without contents.
    pub(crate) fn step(&mut self, step: Step<'_>) -> Result<(), WorldError> {
        self.exchange(step, 0, &[], |_, _| ()).map(drop)
    }

    /// The contents of every PE, by rank, if `keep`; takes part in the same steps otherwise.
    pub(crate) fn gather(
        &mut self,
        step: Step<'_>,
        bytes: &[u8],
        keep: bool,
    ) -> Result<Option<Vec<Vec<u8>>>, WorldError> {
        let mut contents = vec![Vec::new(); if keep { self.member.segment.size() } else { 0 }];
        let mut sent = 0;
        loop {
            let piece = &bytes[sent.min(bytes.len())..(sent + PIECE).min(bytes.len())];
            let longest = self.exchange(step, bytes.len(), piece, |rank, piece| {
                if keep {
                    contents[rank].extend_from_slice(piece);
                }
            })?;
            sent += PIECE;
            if sent >= longest {
                return Ok(keep.then_some(contents));
            }
        }
    }

    /// One step; hands every PE's letter to `read` and returns the longest contents of any PE, in bytes.
    fn exchange(
        &mut self,
        step: Step<'_>,
        total: usize,
        piece: &[u8],
        read: impl FnMut(usize, &[u8]),
    ) -> Result<usize, WorldError> {
        if let Some(error) = &self.steps.broken {
            return Err(error.clone());
        }
        let done = self.try_exchange(step, total, piece, read);
        if let Err(error) = &done {
            self.steps.broken = Some(error.clone());
            self.member.segment.failure().report(self.member.rank, &error.to_string());
        }
        done
    }

    fn try_exchange(
        &mut self,
        step: Step<'_>,
        total: usize,
        piece: &[u8],
        mut read: impl FnMut(usize, &[u8]),
    ) -> Result<usize, WorldError> {
        let Member { segment, rank, closed, .. } = self.member;
        if closed.load(Ordering::Relaxed) {
            return Err(WorldError::Closed { rank: *rank, what: step.to_string() });
        }
        if let Some((rank, message)) = segment.failure().get() {
            return Err(WorldError::PeFailed { rank, message });
        }
        let epoch = self.steps.epoch + 1;
        let parity = (epoch % 2) as usize;
        let envelope = Envelope::new(step, total, piece.len());
        let own = segment.letters(*rank);
        // SAFETY: the letters lie inside the mapping and are aligned; we hold this PE's turn, and by the protocol above
        // every peer has finished reading this letter; `piece` is at most PIECE long and lies outside the mailbox.
        unsafe {
            (&raw mut (*own)[parity].envelope).write(envelope);
            (&raw mut (*own)[parity].piece).cast::<u8>().copy_from_nonoverlapping(piece.as_ptr(), piece.len());
        }
        // Release: publishes the letter, and everything this PE did before the step.
        segment.slots()[*rank].arrived.store(epoch, Ordering::Release);
        self.steps.epoch = epoch;
        self.wait(step, epoch)?;

        // SAFETY: all PEs have arrived at `epoch` (acquire), and none writes a letter of this parity before all,
        // this PE included, arrive at `epoch + 1`; plain data without invalid values.
        let letters: Vec<*mut Letter> =
            (0..segment.size()).map(|peer| unsafe { &raw mut (*segment.letters(peer))[parity] }).collect();
        // SAFETY: as above.
        let envelopes: Vec<Envelope> = letters.iter().map(|&letter| unsafe { (*letter).envelope }).collect();
        if let Some(second) = envelopes.iter().position(|other| !other.same_step(&envelopes[0])) {
            return Err(WorldError::Diverged {
                epoch,
                first: 0,
                first_what: envelopes[0].label(),
                second,
                second_what: envelopes[second].label(),
            });
        }
        for (peer, (&letter, envelope)) in letters.iter().zip(&envelopes).enumerate() {
            let len = (envelope.piece as usize).min(PIECE);
            // SAFETY: as above; the slice does not outlive this step.
            read(peer, unsafe { std::slice::from_raw_parts((&raw const (*letter).piece).cast::<u8>(), len) });
        }
        Ok(envelopes.iter().map(|envelope| envelope.total as usize).max().unwrap_or(0))
    }

    /// Waits until every PE has arrived at `epoch`; ends early if one failed or left before it.
    fn wait(&self, step: Step<'_>, epoch: u64) -> Result<(), WorldError> {
        let segment = &self.member.segment;
        let slots = segment.slots();
        // Acquire: what the peer did before it arrived, its letter included, is visible from here on.
        let arrived = |rank: usize| slots[rank].arrived.load(Ordering::Acquire) >= epoch;
        let mut first = 0;
        let mut all_arrived = || {
            while first < slots.len() && arrived(first) {
                first += 1;
            }
            first == slots.len()
        };
        let mut pause = Pause::new();
        loop {
            // In this order: a PE may complete this step and then fail, and whoever sees that failure also sees that all
            // have arrived. So all PEs agree on whether the step completed.
            let failure = segment.failure().get();
            if all_arrived() {
                return Ok(());
            }
            if let Some((rank, message)) = failure {
                return Err(WorldError::PeFailed { rank, message });
            }
            // Acquire: a PE that arrived and then left is seen to have arrived.
            let gone = (0..slots.len()).find(|&rank| slots[rank].left.load(Ordering::Acquire) != 0 && !arrived(rank));
            if let Some(rank) = gone {
                let (waiter, what) = (self.member.rank, step.to_string());
                // It may have failed before it left; that says more.
                return Err(match segment.failure().get() {
                    Some((rank, message)) => WorldError::PeFailed { rank, message },
                    None => WorldError::PeLeft { rank, waiter, what, epoch },
                });
            }
            if pause.waited() >= self.member.timeout {
                let missing: Vec<usize> = (0..slots.len()).filter(|&rank| !arrived(rank)).collect();
                if missing.is_empty() {
                    return Ok(());
                }
                let never_joined =
                    missing.iter().copied().filter(|&rank| slots[rank].joined.load(Ordering::Relaxed) == 0).collect();
                return Err(WorldError::Timeout {
                    waiter: self.member.rank,
                    what: step.to_string(),
                    missing,
                    never_joined,
                    epoch,
                    waited: pause.waited(),
                });
            }
            pause.pause();
        }
    }
}

/// Waiting that is quick when the other PE runs on another core and polite when it needs this one.
struct Pause {
    start: Instant,
    rounds: u32,
}

impl Pause {
    const SPINS: u32 = 64;
    const YIELDS: u32 = 256;
    const LONGEST_SLEEP: Duration = Duration::from_micros(100);

    fn new() -> Self {
        Self { start: Instant::now(), rounds: 0 }
    }

    fn waited(&self) -> Duration {
        self.start.elapsed()
    }

    fn pause(&mut self) {
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds <= Self::SPINS {
            std::hint::spin_loop();
        } else if self.rounds <= Self::SPINS + Self::YIELDS {
            std::thread::yield_now();
        } else {
            let step = Duration::from_micros(u64::from(self.rounds - Self::SPINS - Self::YIELDS));
            std::thread::sleep(step.min(Self::LONGEST_SLEEP));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_taken_once() {
        let segment = Arc::new(Segment::anonymous(1, 4096).expect("mapped"));
        let join = || Member::join(Arc::clone(&segment), 0, Duration::from_secs(1)).map(drop);
        assert_eq!(join(), Ok(()));
        assert_eq!(join(), Err(WorldError::RankTaken { rank: 0, pid: u64::from(std::process::id()) }));
    }

    #[test]
    fn a_step_that_all_have_reached_completes_although_one_failed_after_it() {
        let segment = Arc::new(Segment::anonymous(2, 4096).expect("mapped"));
        let member = Member {
            segment: Arc::clone(&segment),
            rank: 0,
            timeout: Duration::from_secs(1),
            closed: AtomicBool::new(false),
            steps: Mutex::default(),
        };
        let step = Step { purpose: Purpose::Barrier, what: "x" };
        segment.slots()[0].arrived.store(3, Ordering::Release);
        segment.slots()[1].arrived.store(2, Ordering::Release);
        segment.failure().report(1, "after step 2");
        assert_eq!(member.turn().wait(step, 2), Ok(()));
        let failed = WorldError::PeFailed { rank: 1, message: "after step 2".into() };
        assert_eq!(member.turn().wait(step, 3), Err(failed));
    }

    #[test]
    fn envelopes_tell_steps_apart() {
        let of = |purpose, what| Envelope::new(Step { purpose, what }, 0, 0);
        let long = "x".repeat(2 * WHAT);
        let steps = [
            of(Purpose::Start, ""),
            of(Purpose::Barrier, "x"),
            of(Purpose::Barrier, "y"),
            of(Purpose::Barrier, &long),
            of(Purpose::AllGather, "x"),
            of(Purpose::Gather { root: 0 }, "x"),
            of(Purpose::Gather { root: 1 }, "x"),
            of(Purpose::Allocation, "x"),
            of(Purpose::AllocationReady, "x"),
        ];
        for (i, a) in steps.iter().enumerate() {
            for (j, b) in steps.iter().enumerate() {
                assert_eq!(a.same_step(b), i == j, "{} and {}", a.label(), b.label());
            }
        }
        assert!(of(Purpose::Allocation, "x").same_step(&of(Purpose::Allocation, "y")), "the heap compares names");
        assert_eq!(steps[6].label(), "gather `x` to PE 1");
    }

    #[test]
    fn a_pause_soon_sleeps_and_never_long() {
        let mut pause = Pause::new();
        let rounds = Pause::SPINS + Pause::YIELDS + 150;
        (0..rounds).for_each(|_| pause.pause());
        assert!(pause.waited() >= Duration::from_millis(5), "150 growing sleeps take longer: {:?}", pause.waited());
    }
}
