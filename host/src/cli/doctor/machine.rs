//! CPU, memory and operating system.

use std::collections::BTreeMap;
use std::ffi::{CStr, OsString, c_char};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use indicatif::BinaryBytes;
use rustix::fs::{MemfdFlags, memfd_create};

use super::{Finding, Status};

/// Memory below which not even small inputs fit beside the program.
const LEAST_MEMORY: u64 = 64 << 20;

/// A file tree and an environment to look at: this machine's, or a made-up one.
pub(super) struct Machine {
    /// Absolute paths are looked up below this folder.
    pub root: PathBuf,
    /// Environment variables.
    pub env: BTreeMap<OsString, OsString>,
}

impl Machine {
    pub fn this() -> Self {
        Self { root: "/".into(), env: std::env::vars_os().collect() }
    }

    /// `absolute` below this machine's root.
    pub fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }

    /// The text of a file, if it can be read.
    pub fn read(&self, absolute: &str) -> Option<String> {
        std::fs::read_to_string(self.path(absolute)).ok()
    }

    /// A variable's value, if it is set and not empty.
    pub fn env(&self, name: &str) -> Option<&OsString> {
        self.env.get(&OsString::from(name)).filter(|value| !value.is_empty())
    }

    /// The folders of a variable such as `PATH`.
    pub fn env_paths(&self, name: &str) -> Vec<PathBuf> {
        let all = self.env(name).map(|value| std::env::split_paths(value).collect::<Vec<_>>()).unwrap_or_default();
        all.into_iter().filter(|path| !path.as_os_str().is_empty()).collect()
    }

    pub fn findings(&self) -> Vec<Finding> {
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        let mut all = cpu(&self.read("/proc/cpuinfo").unwrap_or_default(), usable);
        all.push(atomics(cfg!(target_has_atomic = "64")));
        let limit = self.read("/sys/fs/cgroup/memory.max");
        let used = self.read("/sys/fs/cgroup/memory.current");
        all.push(memory(&self.read("/proc/meminfo").unwrap_or_default(), limit.as_deref(), used.as_deref()));
        all.push(glibc(glibc_version()));
        all.push(memfd(&make_memfd().map(|_| ())));
        all.push(peer_files(&open_peer_file()));
        all.extend(self.launched_by());
        all
    }

    /// Whether an MPS server runs, and which GPUs this process sees; nothing where there is none.
    pub fn mps(&self, has_gpus: bool) -> Vec<Finding> {
        const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";
        if !has_gpus {
            return Vec::new();
        }
        let folder = self.env(PIPES).map_or_else(|| self.path("/tmp/nvidia-mps"), PathBuf::from);
        let mps = match folder.join("control").exists() {
            true => Finding::new("MPS", Status::Ok, format!("running, {}", folder.display())),
            false => Finding { searched: vec![folder], ..Finding::new("MPS", Status::Note, "not running") }.advice(format!(
                "only PEs that are processes and share a GPU need it: without, they take turns, and each message between them costs about 1 ms instead of 3 us; start it with nvidia-cuda-mps-control -d ({PIPES} says where its pipes are)"
            )),
        };
        let visible = self.env("CUDA_VISIBLE_DEVICES").map(|value| {
            Finding::new("CUDA_VISIBLE_DEVICES", Status::Note, value.to_string_lossy())
                .advice("only these GPUs are seen, numbered from 0 in this order; --gpus chooses among them")
        });
        std::iter::once(mps).chain(visible).collect()
    }

    /// The launcher that this process runs under, by the variables that launchers set.
    pub fn launched_by(&self) -> Option<Finding> {
        let launchers = [
            ("PMI_RANK", "PMI_SIZE", "nvshmrun, mpiexec.hydra or another PMI launcher"),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI"),
            ("SLURM_PROCID", "SLURM_NTASKS", "Slurm"),
            ("RANK", "WORLD_SIZE", "torchrun"),
        ];
        let value = |name: &str| self.env(name).map(|v| v.to_string_lossy().into_owned());
        let found: Vec<String> = launchers
            .iter()
            .filter_map(|(rank, size, by)| Some(format!("{by}: {rank}={} of {size}={}", value(rank)?, value(size)?)))
            .collect();
        (!found.is_empty()).then(|| Finding::new("started by", Status::Note, found.join(", ")))
    }
}

/// Findings from the text of `/proc/cpuinfo` and the number of cores that this process may use.
pub(super) fn cpu(cpuinfo: &str, usable: usize) -> Vec<Finding> {
    let fields = |name: &'static str| {
        let pairs = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        pairs.filter(move |(key, _)| key.trim() == name).map(|(_, value)| value.trim())
    };
    let model = match fields("model name").next() {
        Some(model) => Finding::new("CPU", Status::Ok, model),
        None => Finding::new("CPU", Status::Note, format!("{}, model unknown", std::env::consts::ARCH)),
    };
    let there = fields("processor").count().max(usable);
    let cores = match there > usable {
        false => Finding::new("CPU cores", Status::Ok, there.to_string()),
        true => Finding::new("CPU cores", Status::Note, format!("{usable} of {there} may be used")).advice(
            "an affinity mask or a container's quota leaves the others out; more PEs than usable cores take turns",
        ),
    };
    let x86: Option<Vec<&str>> = fields("flags").next().map(|flags| flags.split_whitespace().collect());
    let arm: Option<Vec<&str>> = fields("Features").next().map(|flags| flags.split_whitespace().collect());
    let present = |flags: &[&str], names: &[&str]| -> String {
        let list =
            |has: bool| names.iter().copied().filter(|n| flags.contains(n) == has).collect::<Vec<_>>().join(", ");
        match (list(true), list(false)) {
            (has, lacks) if lacks.is_empty() => has,
            (has, lacks) if has.is_empty() => format!("no {lacks}"),
            (has, lacks) => format!("{has}; no {lacks}"),
        }
    };
    let vector = match (x86, arm) {
        (Some(flags), _) => {
            let found = present(&flags, &["avx2", "fma", "avx512f"]);
            if flags.contains(&"avx2") && flags.contains(&"fma") {
                Finding::new("vector instructions", Status::Ok, found)
            } else {
                Finding::new("vector instructions", Status::Note, found)
                    .advice("the CPU back end runs without AVX2 and FMA too, but its matrix products are slower")
            }
        }
        (None, Some(flags)) => Finding::new("vector instructions", Status::Ok, present(&flags, &["asimd", "sve"])),
        (None, None) => Finding::new("vector instructions", Status::Note, "unknown: /proc/cpuinfo names none"),
    };
    vec![model, cores, vector]
}

fn atomics(has: bool) -> Finding {
    match has {
        true => Finding::new("64-bit atomics", Status::Ok, "yes"),
        false => Finding {
            stops_cpu: true,
            ..Finding::new("64-bit atomics", Status::Missing, "no")
                .advice("signals are 64-bit words that PEs share; use a machine with 64-bit atomic instructions")
        },
    }
}

/// A finding from the text of `/proc/meminfo` and, in a container, its limit and use.
pub(super) fn memory(meminfo: &str, limit: Option<&str>, used: Option<&str>) -> Finding {
    let field = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
    };
    let (Some(total), Some(free)) = (field("MemTotal"), field("MemAvailable")) else {
        return Finding::new("memory", Status::Note, "unknown: /proc/meminfo cannot be read");
    };
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let limit = limit.and_then(number).filter(|limit| *limit < total);
    let free = limit.map_or(free, |limit| free.min(limit.saturating_sub(used.and_then(number).unwrap_or(0))));
    let mut found = format!("{} available of {}", BinaryBytes(free), BinaryBytes(limit.unwrap_or(total)));
    if limit.is_some() {
        found += " that this container may use";
    }
    if free < LEAST_MEMORY {
        let advice = format!("free some memory: the smallest runs take {}", BinaryBytes(LEAST_MEMORY));
        return Finding { stops_cpu: true, ..Finding::new("memory", Status::Missing, found).advice(advice) };
    }
    Finding::new("memory", Status::Ok, found)
}

pub(super) fn glibc(version: Option<String>) -> Finding {
    match version {
        Some(version) => Finding::new("glibc", Status::Ok, version),
        None => Finding::new("glibc", Status::Note, "this program runs on another C library")
            .advice("the CPU back end does not mind; libcuda and NVSHMEM need a build of deltalink for glibc"),
    }
}

fn glibc_version() -> Option<String> {
    let program = libloading::os::unix::Library::this();
    // SAFETY: glibc declares `const char *gnu_get_libc_version(void)`; other C libraries lack the name.
    let version = unsafe { program.get::<unsafe extern "C" fn() -> *const c_char>("gnu_get_libc_version") }.ok()?;
    // SAFETY: the function has no conditions and returns a static string that ends with 0.
    Some(unsafe { CStr::from_ptr(version()) }.to_string_lossy().into_owned())
}

pub(super) fn memfd(made: &io::Result<()>) -> Finding {
    match made {
        Ok(()) => Finding::new("memory files (memfd)", Status::Ok, "yes"),
        Err(e) => Finding::new("memory files (memfd)", Status::Missing, e.to_string()).advice(
            "PEs cannot be processes here, since these share memory through such files; PEs as threads can run",
        ),
    }
}

fn make_memfd() -> io::Result<File> {
    Ok(File::from(memfd_create("deltalink-doctor", MemfdFlags::CLOEXEC)?))
}

/// Whether a process of the same user can open another one's memory file.
pub(super) enum PeerFile {
    /// It can.
    Opened,
    /// It was refused, with this message.
    Refused(String),
    /// It could not be tried, for this reason.
    Untried(String),
}

pub(super) fn peer_files(outcome: &PeerFile) -> Finding {
    const ITEM: &str = "/proc/PID/fd of own processes";
    match outcome {
        PeerFile::Opened => Finding::new(ITEM, Status::Ok, "can be opened"),
        PeerFile::Refused(why) => Finding::new(ITEM, Status::Missing, why.as_str()).advice(
            "PEs cannot be processes here, since these open each other's memory there; look at how /proc is mounted (hidepid) and at the container's seccomp profile, or let PEs be threads",
        ),
        PeerFile::Untried(why) => Finding::new(ITEM, Status::Note, format!("not tried: {why}")),
    }
}

/// Lets another program read a memory file of this process through `/proc`.
fn open_peer_file() -> PeerFile {
    const TEXT: &[u8] = b"deltalink";
    let file = match make_memfd().and_then(|mut file| file.write_all(TEXT).map(|()| file)) {
        Ok(file) => file,
        Err(e) => return PeerFile::Untried(format!("no memory file ({e})")),
    };
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    match Command::new("cat").arg(Path::new(&path)).stdin(Stdio::null()).output() {
        Ok(output) if output.stdout == TEXT => PeerFile::Opened,
        Ok(output) => PeerFile::Refused(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(e) => PeerFile::Untried(format!("cannot start cat ({e})")),
    }
}
