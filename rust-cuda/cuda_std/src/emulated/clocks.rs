//! What happened before what: a vector clock for each thread, and for what threads meet at.

/// Agents: the threads of the block, behind them the engine that does bulk copies, and the tensor cores of each warpgroup.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    agents: usize,
    /// A row of `agents` for each thread.
    rows: Vec<u32>,
    threads: usize,
    /// How far the agents that are no threads have come.
    others: Vec<u32>,
}

/// What has happened before a point: how far each agent had come.
pub(crate) type Past = Vec<u32>;

/// When an agent did something, in 32 bits: the agent in the upper 10, its time in the lower 22. 0 is never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moment(u32);

impl Moment {
    pub(crate) fn agent(self) -> usize {
        (self.0 >> 22) as usize
    }

    fn time(self) -> u32 {
        self.0 & 0x3f_ffff
    }

    pub(crate) fn is_never(self) -> bool {
        self.0 == 0
    }
}

impl Clocks {
    pub(crate) fn new(threads: usize) -> Self {
        let others = 1 + threads.div_ceil(super::block::WARPGROUP);
        let agents = threads + others;
        let mut clocks = Self { agents, rows: vec![0; threads * agents], threads, others: vec![0; others] };
        for thread in 0..threads {
            clocks.tick(thread);
        }
        clocks
    }

    /// The number of the engine among agents.
    pub(crate) fn engine(&self) -> usize {
        self.threads
    }

    /// Whether the agent is a thread.
    pub(crate) fn is_thread(&self, agent: usize) -> bool {
        agent < self.threads
    }

    pub(crate) fn past(&self) -> Past {
        vec![0; self.agents]
    }

    fn row(&self, thread: usize) -> &[u32] {
        &self.rows[thread * self.agents..][..self.agents]
    }

    fn row_mut(&mut self, thread: usize) -> &mut [u32] {
        &mut self.rows[thread * self.agents..][..self.agents]
    }

    fn tick(&mut self, thread: usize) {
        let own = &mut self.rows[thread * self.agents + thread];
        // At the end of 22 bits time stands still: accesses then count as ordered, and no race is invented.
        *own = (*own + 1).min(0x3f_ffff);
    }

    pub(crate) fn now(&self, thread: usize) -> Moment {
        Moment((thread as u32) << 22 | self.row(thread)[thread])
    }

    /// Whether `moment` comes before what `thread` does now.
    pub(crate) fn ordered(&self, moment: Moment, thread: usize) -> bool {
        moment.time() <= self.row(thread)[moment.agent()]
    }

    /// What `thread` did before happens before whatever acquires `past` later.
    pub(crate) fn release(&mut self, thread: usize, past: &mut Past) {
        for (past, own) in past.iter_mut().zip(self.row(thread)) {
            *past = (*past).max(*own);
        }
        self.tick(thread);
    }

    /// `past` happens before what `thread` does from now on.
    pub(crate) fn acquire(&mut self, thread: usize, past: &Past) {
        for (own, past) in self.row_mut(thread).iter_mut().zip(past) {
            *own = (*own).max(*past);
        }
    }

    /// What any of `threads` did before happens before what any of them does after.
    pub(crate) fn meet(&mut self, threads: impl Iterator<Item = usize> + Clone) {
        let mut past = self.past();
        for thread in threads.clone() {
            self.release(thread, &mut past);
        }
        for thread in threads {
            self.acquire(thread, &past);
        }
    }

    /// An agent that is no thread does something.
    fn act(&mut self, other: usize) -> (usize, u32) {
        let time = &mut self.others[other];
        *time = (*time + 1).min(0x3f_ffff);
        (self.threads + other, *time)
    }

    /// The engine does a copy: when, and after it `past` includes it.
    pub(crate) fn copy(&mut self, past: &mut Past) -> Moment {
        let (agent, time) = self.act(0);
        past[agent] = past[agent].max(time);
        Moment((agent as u32) << 22 | time)
    }

    /// The tensor cores of a warpgroup have done what its threads have waited for: when, which all of them then know.
    pub(crate) fn products(&mut self, warpgroup: usize) -> Moment {
        let (agent, time) = self.act(1 + warpgroup);
        for thread in super::block::WARPGROUP * warpgroup..super::block::WARPGROUP * (warpgroup + 1) {
            self.row_mut(thread)[agent] = time;
        }
        Moment((agent as u32) << 22 | time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_released_and_acquired_is_ordered() {
        let mut clocks = Clocks::new(3);
        let (mut past, before) = (clocks.past(), clocks.now(0));
        assert!(clocks.ordered(before, 0) && !clocks.ordered(before, 1));
        clocks.release(0, &mut past);
        let after = clocks.now(0);
        clocks.acquire(1, &past);
        assert!(clocks.ordered(before, 1) && !clocks.ordered(after, 1) && !clocks.ordered(before, 2));
        clocks.meet([1, 2].into_iter());
        assert!(clocks.ordered(before, 2));
        let copy = clocks.copy(&mut past);
        assert!(!clocks.ordered(copy, 2));
        clocks.acquire(2, &past);
        assert!(clocks.ordered(copy, 2));
    }
}
