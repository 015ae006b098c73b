//! The sixteen barriers of a block.

use super::block::{Block, Status, WARP, suspend, with};
use super::clocks::Past;
use super::fault::FaultKind;
use super::site::Site;

/// One of the barriers.
#[derive(Debug, Default)]
pub(crate) struct Barrier {
    threads: u32,
    arrived: u32,
    waiting: Vec<usize>,
    /// Who reached it first, of each warp, at which instruction, and how often it had waited alone until then. (If it only arrived, it
    /// may have gone on and waited since.)
    sites: Vec<Option<(usize, Site, u32)>>,
    all: bool,
    any: bool,
    past: Past,
}

/// What a thread does at a barrier.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum At {
    /// Waits.
    Sync,
    /// Waits, and learns whether the condition held in all threads.
    All(bool),
    /// Waits, and learns whether the condition held in some thread.
    Any(bool),
    /// Goes on at once.
    Arrive,
}

/// Reaches barrier `id` of `threads` threads; all of the block if nothing is said.
pub(crate) fn barrier(site: Site, id: u32, threads: Option<u32>, at: At) -> bool {
    let wait = with(site, |block| block.reach(site, id, threads, at));
    if wait {
        suspend(site, Status::Waiting(site));
    }
    with(site, |block| Ok(block.threads[block.current].vote))
}

impl Block {
    /// Whether the current thread has to wait.
    fn reach(&mut self, site: Site, id: u32, threads: Option<u32>, at: At) -> Result<bool, FaultKind> {
        let of = self.threads.len() as u32;
        let expected = threads.unwrap_or(of);
        if id >= 16 || expected == 0 || !expected.is_multiple_of(WARP as u32) || expected > of {
            return Err(FaultKind::BarrierShape { id, threads: expected, of });
        }
        let (current, warp) = (self.current, self.warp());
        let barrier = &mut self.barriers[id as usize];
        if barrier.arrived == 0 {
            *barrier = Barrier {
                threads: expected,
                all: true,
                sites: vec![None; of.div_ceil(WARP as u32) as usize],
                past: self.clocks.past(),
                ..Barrier::default()
            };
        }
        if barrier.threads != expected {
            let other = barrier.sites.iter().flatten().next().map_or(0, |first| first.0 as u32);
            return Err(FaultKind::BarrierThreads { id, found: expected, expected: barrier.threads, other });
        }
        match barrier.sites[warp] {
            None => barrier.sites[warp] = Some((current, site, self.threads[current].waits)),
            Some((other, there, _)) if there != site => {
                return Err(FaultKind::Divergent { other: other as u32, there: there.to_string() });
            }
            // The barrier counts warps. Lanes that come one after the other because one of them waited for something else are
            // counted as often as they come.
            Some((other, _, waits)) if waits != self.threads[current].waits => {
                return Err(FaultKind::WarpApart { other: other as u32 });
            }
            Some(_) => {}
        }
        barrier.arrived += 1;
        if let At::All(condition) | At::Any(condition) = at {
            barrier.all &= condition;
            barrier.any |= condition;
        }
        self.clocks.release(current, &mut barrier.past);
        let wait = at != At::Arrive;
        if wait {
            barrier.waiting.push(current);
        }
        self.threads[current].vote = matches!(at, At::All(_));
        if barrier.arrived < expected {
            return Ok(wait);
        }
        for &thread in &barrier.waiting {
            self.clocks.acquire(thread, &barrier.past);
            let waiting = &mut self.threads[thread];
            waiting.waits = 0;
            waiting.vote = if waiting.vote { barrier.all } else { barrier.any };
            if thread != current {
                waiting.status = Status::Ready;
            }
        }
        barrier.arrived = 0;
        barrier.waiting.clear();
        Ok(false)
    }
}
