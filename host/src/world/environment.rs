//! Joining the world that the environment of this process says it belongs to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::launcher::{Meeting, Origin, Placed};
use super::rendezvous::{Job, Note, Port};
use super::segment::{HeapAddress, Segment};
use super::{Pe, Place, WorldError, WorldOptions, machine, pmi};

/// Keys under which PE 0 publishes the segment, and the machine on which it lies.
const HEAP_KEY: &str = "deltalink-heap";
const MACHINE_KEY: &str = "deltalink-machine";

/// See [`Pe::from_environment`].
pub(super) fn join(options: &WorldOptions) -> Result<Option<Pe>, WorldError> {
    static JOINED: AtomicBool = AtomicBool::new(false);
    let variable = |name: &str| std::env::var(name).ok();
    let Some(origin) = Origin::read(variable)? else {
        return Ok(None);
    };
    if JOINED.swap(true, Ordering::Relaxed) {
        return Err(WorldError::AlreadyJoined);
    }
    match origin {
        Origin::Launch { rank, size, heap } => {
            // A PE whose launcher was killed would wait for peers that nobody watches. It runs without this as well.
            #[cfg(target_os = "linux")]
            let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
            let segment = Segment::open(heap, size, options.heap_bytes)?;
            let place = Place { rank, local_rank: rank, launcher: "deltalink" };
            Pe::join(Arc::new(segment), place, options.timeout, None).map(Some)
        }
        Origin::Pmi { address, local_rank } => join_pmi(&address, local_rank, options).map(Some),
        Origin::Placed(placed) => {
            let runtime = variable("XDG_RUNTIME_DIR");
            join_placed(&placed, runtime.as_deref(), options).map(Some)
        }
    }
}

fn join_pmi(address: &pmi::Address, local_rank: Option<usize>, options: &WorldOptions) -> Result<Pe, WorldError> {
    let (mut manager, rank, size) = pmi::Client::connect(address, options.timeout)?;
    let machine = machine();
    let segment = if rank == 0 {
        let segment = Segment::shared(size, options.heap_bytes)?;
        manager.put(HEAP_KEY, &address_of(&segment)?.to_string())?;
        manager.put(MACHINE_KEY, &machine)?;
        manager.barrier()?;
        segment
    } else {
        manager.barrier()?;
        // A process of the same number on another machine is not PE 0.
        let found = manager.get(MACHINE_KEY)?;
        if found != machine {
            return Err(WorldError::OtherMachine { rank, found, want: machine });
        }
        let value = manager.get(HEAP_KEY)?;
        let Some(heap) = HeapAddress::parse(&value) else {
            return Err(WorldError::Variable { name: HEAP_KEY.into(), value, want: "pid:fd".into() });
        };
        Segment::open(heap, size, options.heap_bytes)?
    };
    let place = Place { rank, local_rank: local_rank.unwrap_or(rank), launcher: "the PMI launcher" };
    Pe::join(Arc::new(segment), place, options.timeout, Some(manager))
}

fn join_placed(placed: &Placed, runtime: Option<&str>, options: &WorldOptions) -> Result<Pe, WorldError> {
    let &Placed { launcher, rank, size, local_rank, ref meeting } = placed;
    let place = Place { rank, local_rank: local_rank.unwrap_or(rank), launcher };
    let enter = |segment| Pe::join(Arc::new(segment), place, options.timeout, None);
    match (meeting, rank) {
        (Meeting::File { launcher, job }, 0) => {
            let segment = Segment::shared(size, options.heap_bytes)?;
            let note = Note::new(address_of(&segment)?, size);
            // Taken back when all have joined, or when one has not in time.
            let _posted = Job::new(launcher, job, runtime).post(&note)?;
            enter(segment)
        }
        (Meeting::File { launcher, job }, _) => enter(Job::new(launcher, job, runtime).open(rank, size, options)?),
        (Meeting::Tcp { host, master, port }, _) => {
            let port = port.map_or_else(|| Port::beside(host, *master), |port| Port::at(host, port));
            if rank == 0 {
                let segment = Segment::shared(size, options.heap_bytes)?;
                if size > 1 {
                    port.serve(&Note::new(address_of(&segment)?, size), options.timeout)?;
                }
                enter(segment)
            } else {
                let heap = port.ask(rank, size, options.timeout)?;
                enter(Segment::open(heap, size, options.heap_bytes)?)
            }
        }
    }
}

fn address_of(segment: &Segment) -> Result<HeapAddress, WorldError> {
    segment.address().ok_or(WorldError::Unsupported { what: "a world of processes" })
}
