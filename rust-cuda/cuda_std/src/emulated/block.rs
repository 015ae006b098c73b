//! A block that runs: its threads, and how they wait for each other.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Instant;

use corosensei::Yielder;

use super::Timing;
use super::barriers::Barrier;
use super::clocks::Clocks;
use super::copies::Copies;
use super::fault::FaultKind;
use super::mbarriers::Mbarrier;
use super::memory::Memory;
use super::products::Products;
use super::site::Site;

/// Threads of a warp.
pub(crate) const WARP: usize = 32;
/// Threads of a warpgroup.
pub(crate) const WARPGROUP: usize = 128;

/// What a thread is doing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Status {
    Ready,
    /// Ready, and there is nothing new for it as far as the block can tell.
    Polling,
    /// Until others release it.
    Waiting(Site),
    /// Until the mbarrier at this address has completed the phase of this parity.
    WaitingPhase(u32, u32, Site),
    Done,
}

/// A thread.
pub(crate) struct Thread {
    pub(crate) status: Status,
    pub(crate) yielder: *const Yielder<(), ()>,
    /// What a vote of a barrier came to.
    pub(crate) vote: bool,
    /// Waits for mbarriers since its warp last came together.
    pub(crate) waits: u32,
}

/// Threads of a warp or warpgroup that have reached a collective instruction, with what they bring.
struct Gathering {
    site: Site,
    mask: u32,
    expected: usize,
    members: Vec<(usize, *mut ())>,
}

/// Who takes part in a collective instruction.
#[derive(Clone, Copy)]
pub(crate) enum Scope {
    /// These lanes of the caller's warp.
    Warp(u32),
    /// The caller's warpgroup.
    Warpgroup,
}

/// The state of a block.
pub(crate) struct Block {
    pub(crate) index: u32,
    pub(crate) grid: u32,
    pub(crate) origin: Instant,
    pub(crate) timing: Timing,
    pub(crate) current: usize,
    pub(crate) threads: Vec<Thread>,
    pub(crate) memory: Memory,
    pub(crate) clocks: Clocks,
    /// Of each warp, then of each warpgroup.
    gatherings: Vec<Vec<Gathering>>,
    pub(crate) barriers: [Barrier; 16],
    pub(crate) mbarriers: BTreeMap<u32, Mbarrier>,
    pub(crate) copies: Copies,
    pub(crate) products: Vec<Products>,
}

thread_local! {
    /// The block that runs on this thread of the host.
    static BLOCK: Cell<*const RefCell<Block>> = const { Cell::new(std::ptr::null()) };
}

/// What a fault unwinds with, from a thread of the block to whoever runs it.
pub(crate) struct Raised {
    pub(crate) instruction: String,
    pub(crate) kind: FaultKind,
}

/// Ends the kernel with a fault.
pub(crate) fn raise(site: Site, kind: FaultKind) -> ! {
    std::panic::resume_unwind(Box::new(Raised { instruction: site.to_string(), kind }))
}

/// Makes `block` the one that runs on this thread of the host, until the result is dropped.
pub(crate) fn enter(block: &RefCell<Block>) -> impl Drop {
    struct Leave(*const RefCell<Block>);
    impl Drop for Leave {
        fn drop(&mut self) {
            BLOCK.set(self.0);
        }
    }
    Leave(BLOCK.replace(block))
}

/// Calls `f` with the block that runs, for the instruction at `site`; a fault ends the kernel.
///
/// # Panics
/// If no block runs: the instruction was called from outside of a kernel.
pub(crate) fn with<R>(site: Site, f: impl FnOnce(&mut Block) -> Result<R, FaultKind>) -> R {
    let block = BLOCK.get();
    assert!(!block.is_null(), "{site}: no emulated block runs here");
    // SAFETY: `enter` keeps the pointer to a block only as long as the block is borrowed.
    let result = f(&mut unsafe { &*block }.borrow_mut());
    result.unwrap_or_else(|kind| raise(site, kind))
}

/// Lets other threads go on until this one is ready again.
pub(crate) fn suspend(site: Site, status: Status) {
    let yielder = with(site, |block| {
        let thread = &mut block.threads[block.current];
        thread.status = status;
        Ok(thread.yielder)
    });
    // SAFETY: the yielder of the coroutine that this is, which lives on this stack.
    unsafe { (*yielder).suspend(()) }
}

/// Meets the other threads of `scope` at the instruction `site`. The last one runs `all` on what all of them brought, in the
/// order of their numbers; then all go on.
pub(crate) fn meet<T>(
    scope: Scope,
    site: Site,
    mine: &mut T,
    all: impl FnOnce(&mut Block, &mut [(usize, &mut T)]) -> Result<(), FaultKind>,
) {
    let members = with(site, |block| block.arrive(scope, site, (&raw mut *mine).cast()));
    let Some(mut members) = members else {
        return suspend(site, Status::Waiting(site));
    };
    members.sort_unstable_by_key(|member| member.0);
    // SAFETY: equal sites bring equal types. The owners of the other operands are suspended until they are released below,
    // and their stacks live until then; each brought its own.
    let mut brought: Vec<(usize, &mut T)> =
        members.iter().map(|&(thread, operand)| (thread, unsafe { &mut *operand.cast::<T>() })).collect();
    let whole = !matches!(scope, Scope::Warp(mask) if mask != u32::MAX);
    with(site, |block| {
        all(block, &mut brought)?;
        if whole {
            members.iter().for_each(|member| block.threads[member.0].waits = 0);
        }
        for (thread, _) in &members {
            block.threads[*thread].status = Status::Ready;
        }
        Ok(())
    });
}

impl Block {
    pub(crate) fn new(launch: &super::Launch<'_>, index: u32, mut memory: Memory) -> Self {
        let threads = launch.threads as usize;
        memory.reset(launch.shared_bytes, threads);
        let (warps, warpgroups) = (threads.div_ceil(WARP), threads.div_ceil(WARPGROUP));
        let thread = || Thread { status: Status::Ready, yielder: std::ptr::null(), vote: false, waits: 0 };
        Self {
            index,
            grid: launch.grid,
            origin: launch.origin,
            timing: launch.schedule.timing,
            current: 0,
            threads: std::iter::repeat_with(thread).take(threads).collect(),
            memory,
            clocks: Clocks::new(threads),
            gatherings: std::iter::repeat_with(Vec::new).take(warps + warpgroups).collect(),
            barriers: Default::default(),
            mbarriers: BTreeMap::new(),
            copies: Copies::new(threads),
            products: std::iter::repeat_with(Products::default).take(warpgroups).collect(),
        }
    }

    pub(crate) fn warp(&self) -> usize {
        self.current / WARP
    }

    pub(crate) fn lane(&self) -> u32 {
        (self.current % WARP) as u32
    }

    /// The current thread is at a collective instruction; everybody who is, once all are.
    fn arrive(
        &mut self,
        scope: Scope,
        site: Site,
        operand: *mut (),
    ) -> Result<Option<Vec<(usize, *mut ())>>, FaultKind> {
        let current = self.current;
        let warps = self.threads.len().div_ceil(WARP);
        let (slot, mask, expected) = match scope {
            Scope::Warp(mask) => {
                if mask >> self.lane() & 1 == 0 {
                    return Err(FaultKind::NotInMask { lane: self.lane(), mask });
                }
                (self.warp(), mask, mask.count_ones() as usize)
            }
            Scope::Warpgroup => (warps + current / WARPGROUP, u32::MAX, WARPGROUP),
        };
        if let Scope::Warpgroup = scope
            && let Some(open) = self.gatherings[self.warp()].first()
        {
            return Err(FaultKind::Divergent { other: open.members[0].0 as u32, there: open.site.to_string() });
        }
        let open = &mut self.gatherings[slot];
        if let Some(clash) = open.iter().find(|g| g.mask & mask != 0 && (g.mask != mask || g.site != site)) {
            return Err(FaultKind::Divergent { other: clash.members[0].0 as u32, there: clash.site.to_string() });
        }
        let at = open.iter().position(|g| g.mask == mask).unwrap_or_else(|| {
            open.push(Gathering { site, mask, expected, members: Vec::with_capacity(expected) });
            open.len() - 1
        });
        open[at].members.push((current, operand));
        Ok((open[at].members.len() == open[at].expected).then(|| open.swap_remove(at).members))
    }

    /// Where all threads wait, for a message.
    pub(crate) fn waits(&self) -> String {
        let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
        for (t, thread) in self.threads.iter().enumerate() {
            let what = match thread.status {
                Status::Ready | Status::Polling => "may go on".to_owned(),
                Status::Waiting(site) => format!("wait in {site}"),
                Status::WaitingPhase(address, parity, site) => {
                    format!("wait for parity {parity} of the mbarrier at {address:#x} in {site}")
                }
                Status::Done => "have ended".to_owned(),
            };
            match groups.iter_mut().find(|group| group.0 == what) {
                Some(group) => group.1.push(t),
                None => groups.push((what, vec![t])),
            }
        }
        let text: Vec<String> = groups.iter().map(|(what, threads)| format!("{} {what}", ranges(threads))).collect();
        text.join("; ")
    }
}

/// Ascending numbers as `threads 0 to 31, 64`.
fn ranges(threads: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &t in threads {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == t => *last = t,
            _ => parts.push((t, t)),
        }
    }
    let part = |&(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a} to {b}") };
    format!("threads {}", parts.iter().map(part).collect::<Vec<_>>().join(", "))
}
