//! Which world the environment of this process says it belongs to, and joining it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::segment::{HeapAddress, Segment};
use super::{Pe, WorldError, WorldOptions, pmi};

/// Rank of a process that [`Launch`](super::Launch) started.
pub(super) const RANK: &str = "DELTALINK_RANK";
/// Number of PEs of its world.
pub(super) const SIZE: &str = "DELTALINK_SIZE";
/// The segment, as `pid:fd`.
pub(super) const HEAP: &str = "DELTALINK_HEAP";
/// What PMI-1 launchers set; a process started from inside such a world must not take them for its own.
pub(super) const PMI: [&str; 5] = ["PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "PMI_ID"];

/// Keys under which PE 0 publishes the segment, and the machine on which it lies.
const HEAP_KEY: &str = "deltalink-heap";
const MACHINE_KEY: &str = "deltalink-machine";

/// Who started this process.
#[derive(Debug, PartialEq, Eq)]
enum Origin {
    Launch { rank: usize, size: usize, heap: HeapAddress },
    Pmi(pmi::Address),
}

/// Reads the environment through `get`.
fn origin(get: impl Fn(&str) -> Option<String>) -> Result<Option<Origin>, WorldError> {
    let number = |name: &str, want: &str, because: &str| -> Result<usize, WorldError> {
        let Some(value) = get(name) else {
            return Err(WorldError::MissingVariable { name: name.into(), because: because.into() });
        };
        value.parse().map_err(|_| WorldError::Variable { name: name.into(), value, want: want.into() })
    };
    let place = |rank_name: &str, size_name: &str| -> Result<(usize, usize), WorldError> {
        let size = number(size_name, "a number of PEs", rank_name)?;
        let rank = number(rank_name, "a rank", size_name)?;
        if rank >= size {
            let want = format!("below {size_name}, which is {size}");
            return Err(WorldError::Variable { name: rank_name.into(), value: rank.to_string(), want });
        }
        Ok((rank, size))
    };

    if let Some(value) = get(HEAP) {
        let (rank, size) = place(RANK, SIZE)?;
        if let Some(first) = get("PMI_SIZE").and_then(|text| text.parse().ok()).filter(|&first| first != size) {
            return Err(WorldError::SizesDiffer { first_source: "PMI_SIZE", first, second_source: SIZE, second: size });
        }
        let Some(heap) = HeapAddress::parse(&value) else {
            return Err(WorldError::Variable { name: HEAP.into(), value, want: "pid:fd".into() });
        };
        return Ok(Some(Origin::Launch { rank, size, heap }));
    }
    if let Some(because) = [RANK, SIZE].into_iter().find(|name| get(name).is_some()) {
        return Err(WorldError::MissingVariable { name: HEAP.into(), because: because.into() });
    }
    if get("PMI_FD").is_some() {
        let (rank, size) = place("PMI_RANK", "PMI_SIZE")?;
        let fd = number("PMI_FD", "a file descriptor", "PMI_RANK")?;
        return match i32::try_from(fd) {
            Ok(fd) => Ok(Some(Origin::Pmi(pmi::Address::Inherited { fd, rank, size }))),
            Err(_) => Err(WorldError::Variable {
                name: "PMI_FD".into(),
                value: fd.to_string(),
                want: "a file descriptor".into(),
            }),
        };
    }
    if let Some(address) = get("PMI_PORT") {
        let id = number("PMI_ID", "a number", "PMI_PORT")?;
        return Ok(Some(Origin::Pmi(pmi::Address::Port { address, id })));
    }
    if let Some(because) = ["PMI_RANK", "PMI_SIZE"].into_iter().find(|name| get(name).is_some()) {
        return Err(WorldError::MissingVariable { name: "PMI_FD (or PMI_PORT)".into(), because: because.into() });
    }
    // Without this every process of such a launcher would compute the whole problem alone, and nobody would notice.
    if let Some(value) = get("OMPI_COMM_WORLD_SIZE").filter(|value| value != "1") {
        return Err(WorldError::Launcher { launcher: "Open MPI", variable: "OMPI_COMM_WORLD_SIZE", value });
    }
    Ok(None)
}

/// See [`Pe::from_environment`].
pub(super) fn join(options: &WorldOptions) -> Result<Option<Pe>, WorldError> {
    static JOINED: AtomicBool = AtomicBool::new(false);
    let Some(origin) = origin(|name| std::env::var(name).ok())? else {
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
            Pe::join(Arc::new(segment), rank, options.timeout, None).map(Some)
        }
        Origin::Pmi(address) => join_pmi(&address, options).map(Some),
    }
}

fn join_pmi(address: &pmi::Address, options: &WorldOptions) -> Result<Pe, WorldError> {
    let (mut manager, rank, size) = pmi::Client::connect(address, options.timeout)?;
    let machine = machine();
    let segment = if rank == 0 {
        let segment = Segment::shared(size, options.heap_bytes)?;
        if let Some(address) = segment.address() {
            manager.put(HEAP_KEY, &address.to_string())?;
        }
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
    Pe::join(Arc::new(segment), rank, options.timeout, Some(manager))
}

/// Identifies the running kernel.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = boot.trim();
    if boot.is_empty() { "unknown".into() } else { boot.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Origin>, WorldError> {
        origin(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn each_launcher_is_recognised() {
        assert_eq!(read(&[]), Ok(None));
        let heap = HeapAddress::parse("12:3").expect("pid:fd");
        assert_eq!(
            read(&[(RANK, "1"), (SIZE, "4"), (HEAP, "12:3"), ("PMI_SIZE", "4")]),
            Ok(Some(Origin::Launch { rank: 1, size: 4, heap }))
        );
        assert_eq!(
            read(&[("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("PMI_FD", "6")]),
            Ok(Some(Origin::Pmi(pmi::Address::Inherited { fd: 6, rank: 1, size: 2 })))
        );
        assert_eq!(
            read(&[("PMI_PORT", "host:99"), ("PMI_ID", "3")]),
            Ok(Some(Origin::Pmi(pmi::Address::Port { address: "host:99".into(), id: 3 })))
        );
        assert_eq!(read(&[("OMPI_COMM_WORLD_SIZE", "1")]), Ok(None));
    }

    #[test]
    fn what_does_not_fit_together_is_named() {
        let text = |variables: &[(&str, &str)]| read(variables).expect_err("refused").to_string();
        assert!(text(&[(RANK, "1"), (SIZE, "4")]).contains("DELTALINK_HEAP is missing although DELTALINK_RANK is set"));
        assert!(text(&[(RANK, "4"), (SIZE, "4"), (HEAP, "1:1")]).contains("must be below DELTALINK_SIZE, which is 4"));
        assert!(
            text(&[(RANK, "x"), (SIZE, "4"), (HEAP, "1:1")]).contains("DELTALINK_RANK is \"x\"; it must be a rank")
        );
        assert!(
            text(&[(RANK, "0"), (SIZE, "4"), (HEAP, "11")]).contains("DELTALINK_HEAP is \"11\"; it must be pid:fd")
        );
        assert!(
            text(&[(RANK, "0"), (SIZE, "4"), (HEAP, "1:1"), ("PMI_SIZE", "2")])
                .contains("PMI_SIZE says 2 PEs, DELTALINK_SIZE says 4")
        );
        assert!(text(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]).contains("PMI_FD (or PMI_PORT) is missing"));
        assert!(text(&[("PMI_FD", "99999999999"), ("PMI_RANK", "0"), ("PMI_SIZE", "2")]).contains("a file descriptor"));
        assert!(text(&[("PMI_PORT", "host:99")]).contains("PMI_ID is missing although PMI_PORT is set"));
        assert!(text(&[("OMPI_COMM_WORLD_SIZE", "4")]).contains("every process would be PE 0 of 1"));
    }
}
