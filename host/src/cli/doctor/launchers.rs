//! Programs that start one process for each PE.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::machine::Machine;
use super::nvshmem::sites_below;
use super::{Finding, Status};

/// Name and how to get it.
const LAUNCHERS: [(&str, &str); 5] = [
    (
        "nvshmrun",
        "comes with NVSHMEM (bin of its archive, or its scripts/install_hydra.sh builds it); starts PEs on GPUs of one or many nodes",
    ),
    ("mpiexec.hydra", "comes with MPICH and with Hydra (Debian: apt install mpich); does what nvshmrun does"),
    ("mpirun", "comes with Open MPI (Debian: apt install openmpi-bin)"),
    ("srun", "comes with Slurm; only clusters that run it have it"),
    ("torchrun", "comes with PyTorch (pip install torch); starts PEs beside a PyTorch program"),
];

/// How long a launcher may take to tell its version.
const PATIENCE: Duration = Duration::from_secs(5);

/// `ask`: what a launcher prints for `--version`. PEs as threads or processes of one machine need none of them.
pub(super) fn findings(machine: &Machine, ask: &dyn Fn(&Path) -> Option<String>) -> Vec<Finding> {
    let folders = machine.env_paths("PATH");
    let look = |(name, origin): (&str, &str)| {
        let item = format!("launcher {name}");
        let Some(path) = folders.iter().map(|folder| folder.join(name)).find(|file| is_program(file)) else {
            return Finding::new(item, Status::Missing, "not on PATH").advice(origin);
        };
        let version = match name {
            // Starting torchrun loads PyTorch, and it has no --version.
            "torchrun" => torch_version(&path),
            _ => ask(&path).and_then(|text| version_in(&text)),
        };
        Finding::new(
            item,
            Status::Ok,
            format!("{}, {}", version.as_deref().unwrap_or("version unknown"), path.display()),
        )
    };
    LAUNCHERS.map(look).into()
}

fn is_program(file: &Path) -> bool {
    file.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// The first thing like a version number in what a launcher prints, and whose it is.
pub(super) fn version_in(text: &str) -> Option<String> {
    let like_version = |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    let mut words = text.split_whitespace().map(|word| word.trim_matches(|c: char| !c.is_ascii_alphanumeric()));
    let version = words.find(like_version)?;
    let maker = [
        ("Open MPI", "Open MPI"),
        ("OpenRTE", "Open MPI"),
        ("HYDRA", "Hydra"),
        ("Intel(R) MPI", "Intel MPI"),
        ("slurm", "Slurm"),
    ]
    .iter()
    .find(|(mark, _)| text.contains(mark));
    Some(maker.map_or(version.to_owned(), |(_, maker)| format!("{maker} {version}")))
}

/// PyTorch's version from the `torch-VERSION.dist-info` beside the environment's torchrun.
fn torch_version(torchrun: &Path) -> Option<String> {
    let prefix: PathBuf = torchrun.parent()?.parent()?.into();
    let entries =
        sites_below(&prefix).into_iter().flat_map(|site| std::fs::read_dir(site).into_iter().flatten().flatten());
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let version = |name: String| Some(name.strip_prefix("torch-")?.strip_suffix(".dist-info")?.to_owned());
    names.into_iter().find_map(version).map(|v| format!("PyTorch {v}"))
}

/// Runs `program --version`; nothing if that fails or takes too long.
pub(super) fn ask_program(program: &Path) -> Option<String> {
    let mut child = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let start = Instant::now();
    // A version fits into the pipe, so waiting before reading does not block the launcher.
    let in_time = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status.success(),
            Ok(None) if start.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) | Err(_) => {
                // It may have ended by itself meanwhile; either way it is gone after this.
                let _ = child.kill();
                let _ = child.wait();
                break false;
            }
        }
    };
    let mut text = String::new();
    child.stdout.take().filter(|_| in_time)?.read_to_string(&mut text).ok()?;
    Some(text)
}
