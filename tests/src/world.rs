//! What the PEs of a test world do: one scenario is one function, run by PEs of every kind (threads, processes started by
//! `deltalink`, processes started by `mpiexec`). A scenario checks what it can see and returns what the test should know.

use std::error::Error;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use deltalink::heap::{HeapError, Symmetric};
use deltalink::world::{Pe, WorldError};

/// What a PE says at its end.
pub type Outcome = Result<String, Box<dyn Error + Send + Sync>>;

/// What each PE does.
pub type Scenario = fn(&Pe) -> Outcome;

/// All scenarios, by name.
pub const SCENARIOS: [(&str, Scenario); 19] = [
    ("barriers", barriers),
    ("put-signal", put_signal),
    ("gathers", gathers),
    ("heap-reuse", heap_reuse),
    ("lending", lending),
    ("element-types", element_types),
    ("differing-requests", differing_requests),
    ("differing-frees", differing_frees),
    ("out-of-memory", out_of_memory),
    ("diverged", diverged),
    ("leaves-early", leaves_early),
    ("fails", fails),
    ("fails-polled", fails_polled),
    ("fails-in-allocation", fails_in_allocation),
    ("panics", panics),
    ("killed", killed),
    ("exits", exits),
    ("late", late),
    ("deaf", deaf),
];

/// Bytes of each PE's heap in these worlds.
pub const HEAP_BYTES: usize = 1 << 20;

/// The scenario called `name`.
pub fn scenario(name: &str) -> Option<Scenario> {
    SCENARIOS.iter().find(|(known, _)| *known == name).map(|&(_, scenario)| scenario)
}

fn ensure(holds: bool, otherwise: impl Display) -> Result<(), Box<dyn Error + Send + Sync>> {
    if holds { Ok(()) } else { Err(otherwise.to_string().into()) }
}

fn is_last(pe: &Pe) -> bool {
    pe.rank() == pe.size() - 1
}

/// Waits with acquire until `word` is at least `epoch`, as long as nobody failed.
fn wait(pe: &Pe, word: &AtomicU64, epoch: u64) -> Result<(), WorldError> {
    let start = Instant::now();
    while word.load(Ordering::Acquire) < epoch {
        if let Some((rank, message)) = pe.failed_peer() {
            return Err(WorldError::PeFailed { rank, message });
        }
        if start.elapsed() > pe.timeout() {
            let left = (pe.rank() + pe.size() - 1) % pe.size();
            return Err(WorldError::PeFailed { rank: left, message: format!("no signal {epoch}") });
        }
        thread::yield_now();
    }
    Ok(())
}

/// After each of 1000 barriers every peer is in this round or, having passed it, in the next.
fn barriers(pe: &Pe) -> Outcome {
    let rounds = pe.heap().alloc::<u64>("rounds", 1)?;
    for round in 1..=1000 {
        rounds.atomic(pe.rank(), 0).store(round, Ordering::Relaxed);
        pe.barrier("round")?;
        for peer in 0..pe.size() {
            let seen = rounds.atomic(peer, 0).load(Ordering::Relaxed);
            ensure(seen == round || seen == round + 1, format!("PE {peer} is in round {seen}, not {round}"))?;
        }
    }
    Ok("1000 rounds".into())
}

/// Each PE puts blocks into its right neighbour and raises a signal; the neighbour reads and acknowledges.
fn put_signal(pe: &Pe) -> Outcome {
    const LEN: usize = 1000;
    let block = pe.heap().alloc::<u64>("block", LEN)?;
    let signals = pe.heap().alloc::<u64>("signals", 2)?;
    let (arrived, read) = (0, 1);
    let right = (pe.rank() + 1) % pe.size();
    let left = (pe.rank() + pe.size() - 1) % pe.size();
    for epoch in 1..=200 {
        wait(pe, signals.atomic(pe.rank(), read), epoch - 1)?;
        let values: Vec<u64> = (0..LEN as u64).map(|i| i * epoch + pe.rank() as u64).collect();
        // SAFETY: `LEN` elements; the right neighbour has acknowledged that it no longer reads the block.
        unsafe { block.peer_addr(right).copy_from_nonoverlapping(values.as_ptr(), LEN) };
        signals.atomic(right, arrived).store(epoch, Ordering::Release);

        wait(pe, signals.atomic(pe.rank(), arrived), epoch)?;
        // SAFETY: the left neighbour's put came before its signal, and it puts nothing more before the acknowledgement.
        let got = unsafe { block.as_slice() };
        let wrong = (0..LEN).find(|&i| got[i] != i as u64 * epoch + left as u64);
        ensure(wrong.is_none(), format!("epoch {epoch}: element {wrong:?} of PE {left}'s block is wrong"))?;
        signals.atomic(left, read).store(epoch, Ordering::Release);
    }
    // Nobody drops the block while a neighbour may still signal.
    pe.barrier("end")?;
    Ok("200 blocks".into())
}

fn contents(rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + rank * 31 + len) as u8).collect()
}

/// Lengths that differ by PE, from none to several mailboxes.
fn gathers(pe: &Pe) -> Outcome {
    let lengths: [fn(usize) -> usize; 5] =
        [|_| 0, |rank| rank, |rank| rank * 40_000, |rank| 16384 - rank % 2, |rank| if rank == 0 { 100_000 } else { 0 }];
    for (case, length) in lengths.into_iter().enumerate() {
        let mine = contents(pe.rank(), length(pe.rank()));
        let want: Vec<Vec<u8>> = (0..pe.size()).map(|rank| contents(rank, length(rank))).collect();
        ensure(pe.all_gather("contents", &mine)? == want, format!("all-gather {case}"))?;
        for root in 0..pe.size() {
            let got = pe.gather("contents", root, &mine)?;
            let want = (root == pe.rank()).then_some(&want);
            ensure(got.as_ref() == want, format!("gather {case} to PE {root}"))?;
        }
    }
    let refused = pe.gather("contents", pe.size(), &[]).map_err(|error| error.to_string());
    ensure(refused.is_err_and(|text| text.contains("is not a PE of this world")), "a root out of range")?;
    pe.barrier("still in step")?;
    Ok("gathered".into())
}

/// Fills this PE's whole copy.
fn fill(object: &mut Symmetric<u64>, value: u64) {
    // SAFETY: in these scenarios no peer reads or writes another's copy of this object.
    unsafe { object.as_mut_slice() }.fill(value);
}

/// Freed blocks join in any order of frees, come back zeroed, and only after their last reference.
fn heap_reuse(pe: &Pe) -> Outcome {
    let heap = pe.heap();
    let mut objects = Vec::new();
    for name in ["a", "b", "c", "d"] {
        let mut object = heap.alloc::<u64>(name, 100)?;
        ensure(object.addr().addr() % 256 == 0, "alignment")?;
        fill(&mut object, u64::MAX);
        objects.push(object);
    }
    let stats = heap.stats();
    ensure((stats.in_use, stats.live) == (4 * 1024, 4), format!("{stats:?}"))?;
    let offsets: Vec<usize> = objects.iter().map(Symmetric::offset).collect();
    ensure(offsets == [0, 1024, 2048, 3072], format!("{offsets:?}"))?;

    // The middle two are dropped, in an order that differs by PE; a clone of the last keeps it.
    let kept = objects[3].clone();
    ensure(format!("{kept:?}").contains("references: 2"), "the references are counted")?;
    drop(objects.pop());
    drop(objects.remove(1 + pe.rank() % 2));
    drop(objects.pop());
    ensure(heap.stats().live == 2, format!("{:?}", heap.stats()))?;
    let large = heap.alloc::<u64>("large", 256)?;
    ensure(large.offset() == 1024, format!("two blocks of 1024 bytes did not join: {large:?}"))?;
    for peer in 0..pe.size() {
        let stale = (0..256).find(|&i| large.atomic(peer, i).load(Ordering::Relaxed) != 0);
        ensure(stale.is_none(), format!("element {stale:?} of PE {peer}'s copy was not cleared"))?;
    }
    // SAFETY: nobody else touches this copy.
    ensure(unsafe { kept.as_slice() }.iter().all(|&x| x == u64::MAX), "a kept object was changed")?;
    pe.barrier("compared")?;

    let more = heap.alloc::<u8>("behind", 1)?;
    ensure(more.offset() == 4096, "the kept block is not free")?;
    drop((objects, kept, large, more));
    let stats = heap.stats();
    ensure((stats.in_use, stats.live, stats.peak) == (0, 0, 4 * 1024 + 256), format!("{stats:?}"))?;
    let whole = heap.alloc::<u8>("whole", stats.capacity)?;
    ensure(whole.offset() == 0 && heap.stats().in_use == HEAP_BYTES, "the whole heap is one block again")?;
    Ok("reused".into())
}

/// Objects that are lent and given back on another thread leave nothing behind, however often.
fn lending(pe: &Pe) -> Outcome {
    const ROUNDS: usize = 1000;
    let heap = pe.heap();
    let kept = heap.alloc::<u64>("kept", 10)?;
    let before = heap.stats();
    let (to_owner, owned) = std::sync::mpsc::channel::<deltalink::heap::Lent>();
    let owner = thread::spawn(move || {
        let total: usize = owned.into_iter().map(|lent| lent.bytes()).sum();
        total
    });
    for round in 0..ROUNDS {
        let object = heap.alloc::<u64>("lent", 1 + round % 50)?;
        ensure(object.offset() == 256, format!("round {round}: {object:?}"))?;
        for lent in [object.lend(), object.lend()] {
            ensure(lent.address() == object.addr() as u64, "a loan is of this PE's copy")?;
            to_owner.send(lent)?;
        }
        drop(object);
        // Every PE has its object back before the next one is asked for.
        heap.await_loans(Duration::from_secs(30))?;
        while heap.stats().live > before.live {
            thread::yield_now();
        }
    }
    drop(to_owner);
    let total = owner.join().map_err(|_| "the owner panicked")?;
    ensure(total == 2 * 8 * (0..ROUNDS).map(|round| 1 + round % 50).sum::<usize>(), format!("{total} bytes"))?;
    let after = heap.stats();
    ensure((after.live, after.in_use, after.lent) == (before.live, before.in_use, 0), format!("{after:?}"))?;
    ensure((1..=2).contains(&after.peak_lent), format!("{after:?}"))?;
    drop(kept);
    Ok("given back".into())
}

/// Each type's address arithmetic, an empty object, and an object that outlives its PE's handle of the heap.
fn element_types(pe: &Pe) -> Outcome {
    let bytes = pe.heap().alloc::<u8>("bytes", 3)?;
    let mut reals = pe.heap().clone().alloc::<f32>("reals", 5)?;
    let none = pe.heap().alloc::<[u32; 4]>("none", 0)?;
    ensure((bytes.len(), reals.len(), none.len(), none.is_empty()) == (3, 5, 0, true), "lengths")?;
    ensure((bytes.name(), reals.offset(), none.offset()) == ("bytes", 256, 512), "places")?;
    // SAFETY: each PE writes its own copy only; peers read after the barrier.
    unsafe { reals.as_mut_slice() }.copy_from_slice(&[pe.rank() as f32; 5]);
    pe.barrier("written")?;
    for peer in 0..pe.size() {
        // SAFETY: element 4 of 5; its PE wrote it before the barrier and not since.
        let value = unsafe { reals.peer_addr(peer).add(4).read() };
        ensure(value == peer as f32, format!("PE {peer} wrote {value}"))?;
    }
    ensure(reals.addr() == reals.peer_addr(pe.rank()), "own address")?;
    pe.barrier("read")?;
    Ok("typed".into())
}

/// PEs that ask for different things all learn the same; the heap works on.
fn differing_requests(pe: &Pe) -> Outcome {
    let (heap, odd) = (pe.heap(), is_last(pe));
    let mut texts = Vec::new();
    let mut note = |result: Result<(), HeapError>| match result {
        Err(HeapError::Mismatch(mismatch)) => {
            texts.push(mismatch.to_string());
            Ok(())
        }
        other => Err(format!("{other:?} instead of a mismatch")),
    };
    note(heap.alloc::<f32>(if odd { "second" } else { "first" }, 8).map(drop))?;
    note(if odd { heap.alloc::<u32>("x", 8).map(drop) } else { heap.alloc::<f32>("x", 8).map(drop) })?;
    note(heap.alloc::<f32>("x", if odd { 9 } else { 8 }).map(drop))?;
    note(heap.alloc::<u8>("x", if odd { 2 * HEAP_BYTES } else { 8 }).map(drop))?;
    ensure(heap.stats().live == 0, "a refused allocation left a block behind")?;
    let after = heap.alloc::<f32>("after", 8)?;
    ensure(after.offset() == 0, "offset after refusals")?;
    Ok(texts.join(" | "))
}

/// One PE has dropped an object that the others hold.
fn differing_frees(pe: &Pe) -> Outcome {
    let kept = pe.heap().alloc::<f32>("kept", 8)?;
    let kept = (!is_last(pe)).then_some(kept);
    match pe.heap().alloc::<f32>("next", 8) {
        Err(HeapError::Mismatch(mismatch)) => {
            // Once the others drop it too, the pools agree again.
            drop(kept);
            let next = pe.heap().alloc::<f32>("next", 8)?;
            ensure(next.offset() == 0, "offset after all dropped it")?;
            Ok(mismatch.to_string())
        }
        other => Err(format!("{other:?} instead of a mismatch").into()),
    }
}

/// All PEs run out together, and go on with less.
fn out_of_memory(pe: &Pe) -> Outcome {
    let first = pe.heap().alloc::<u8>("first", HEAP_BYTES / 2)?;
    let text = match pe.heap().alloc::<u64>("second", HEAP_BYTES / 8) {
        Err(error @ HeapError::OutOfMemory { .. }) => error.to_string(),
        other => return Err(format!("{other:?} instead of no memory").into()),
    };
    let absurd = pe.heap().alloc::<u64>("absurd", usize::MAX / 2);
    ensure(matches!(absurd, Err(HeapError::OutOfMemory { requested: usize::MAX, .. })), "a length that overflows")?;
    drop(first);
    pe.heap().alloc::<u64>("second", HEAP_BYTES / 8)?;
    Ok(text)
}

/// The last PE makes another call than the others.
fn diverged(pe: &Pe) -> Outcome {
    if is_last(pe) {
        pe.barrier("step 2")?
    } else {
        pe.all_gather("lengths", &[1]).map(drop)?
    };
    Ok("passed".into())
}

/// The last PE is done while the others still wait for it.
fn leaves_early(pe: &Pe) -> Outcome {
    if is_last(pe) {
        return Ok("done".into());
    }
    pe.barrier("one more")?;
    Ok("passed".into())
}

/// The last PE returns an error, the others wait for it.
fn fails(pe: &Pe) -> Outcome {
    pe.barrier("together")?;
    if is_last(pe) {
        return Err("the disk is full".into());
    }
    pe.barrier("after")?;
    Ok("passed".into())
}

/// As [`fails`], but the others poll in a wait of their own.
fn fails_polled(pe: &Pe) -> Outcome {
    let word = pe.heap().alloc::<u64>("word", 1)?;
    if is_last(pe) {
        return Err("the disk is full".into());
    }
    wait(pe, word.atomic(pe.rank(), 0), 1)?;
    Ok("passed".into())
}

/// As [`fails`], but the others wait in an allocation.
fn fails_in_allocation(pe: &Pe) -> Outcome {
    if is_last(pe) {
        return Err("the disk is full".into());
    }
    pe.heap().alloc::<u8>("slots", 1)?;
    Ok("passed".into())
}

/// The last PE panics.
fn panics(pe: &Pe) -> Outcome {
    pe.barrier("together")?;
    assert!(!is_last(pe), "a bug in PE {}", pe.rank());
    pe.barrier("after")?;
    Ok("passed".into())
}

/// The last PE's process is killed without a chance to say a word.
fn killed(pe: &Pe) -> Outcome {
    pe.barrier("together")?;
    if is_last(pe) {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
        thread::sleep(Duration::from_secs(3600));
    }
    pe.barrier("after")?;
    Ok("passed".into())
}

/// The last PE's process ends in the middle, as if all were well.
fn exits(pe: &Pe) -> Outcome {
    pe.barrier("together")?;
    if is_last(pe) {
        std::process::exit(0);
    }
    pe.barrier("after")?;
    Ok("passed".into())
}

/// The last PE arrives after the timeout. The others have given up for good by then, and it learns so.
fn late(pe: &Pe) -> Outcome {
    if is_last(pe) {
        while pe.failed_peer().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
    }
    let Err(first) = pe.barrier("lunch") else { return Ok("passed".into()) };
    ensure(pe.barrier("lunch") == Err(first.clone()), "a broken world is used again")?;
    Err(first.into())
}

/// The last PE does not stop when another fails.
fn deaf(pe: &Pe) -> Outcome {
    pe.barrier("together")?;
    if is_last(pe) {
        thread::sleep(Duration::from_secs(3600));
    }
    Err("the disk is full".into())
}
