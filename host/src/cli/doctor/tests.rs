//! Reports of made-up machines: none of this depends on the machine that runs the tests.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use super::cuda::{Driver, Gpu};
use super::machine::{Machine, PeerFile};
use super::peers::Link;
use super::*;

const CPUINFO: &str = "processor\t: 0\nmodel name\t: Made-Up 9000\nflags\t\t: fpu sse2 avx2 fma avx512f\n\
                       processor\t: 1\nmodel name\t: Made-Up 9000\nflags\t\t: fpu sse2 avx2 fma avx512f\n";
const MEMINFO: &str = "MemTotal:       16777216 kB\nMemFree:        1000 kB\nMemAvailable:   8388608 kB\n";

/// A machine whose files lie in a temporary folder.
struct Fake {
    folder: tempfile::TempDir,
    machine: Machine,
}

impl Fake {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let machine = Machine { root: folder.path().join("root"), env: Default::default() };
        Self { folder, machine }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn set(&mut self, name: &str, value: impl Into<std::ffi::OsString>) {
        self.machine.env.insert(name.into(), value.into());
    }

    /// An empty file and the folders above it.
    fn file(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        path
    }

    fn program(&self, name: &str) -> PathBuf {
        let path = self.file(name);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// A report of findings on this machine, as text without the folder's name, whose length also sets the table's width.
    fn report(&self, mut findings: Vec<Finding>) -> Report {
        for f in &mut findings {
            f.found = self.plain(&f.found);
            f.searched.iter_mut().for_each(|path| *path = self.plain(&path.display().to_string()).into());
        }
        Report { deltalink: "0.0.0", ..Report::of(findings) }
    }

    /// Text without the folder's random name.
    fn plain(&self, text: &str) -> String {
        text.replace(&self.folder.path().display().to_string(), "FOLDER")
    }
}

fn never_asked(path: &Path) -> Result<String, String> {
    panic!("{} was loaded", path.display())
}

fn cannot_load(_: &Path) -> Result<String, String> {
    Err("it cannot be loaded".into())
}

#[test]
fn a_bare_machine_is_told_what_to_install() {
    let mut fake = Fake::new();
    fake.set("LD_LIBRARY_PATH", fake.path("lib"));
    fs::create_dir_all(fake.path("env/lib/python3.12/site-packages")).unwrap();
    fake.set("VIRTUAL_ENV", fake.path("env"));
    let mut findings = machine::cpu(CPUINFO, 2);
    findings.push(machine::memory(MEMINFO, None, None));
    findings.push(machine::glibc(Some("2.36".into())));
    findings.push(machine::memfd(&Ok(())));
    findings.push(machine::peer_files(&PeerFile::Opened));
    findings.extend(Driver::Absent { why: "libcuda.so.1: cannot open shared object file".into() }.findings(None));
    findings.extend(nvshmem::findings(&fake.machine, &never_asked));
    findings.extend(launchers::findings(&fake.machine, &|_| None));
    let report = fake.report(findings);
    insta::assert_snapshot!(report.text());
    assert!(report.cpu_back_end().is_ok());
}

#[test]
fn a_machine_with_gpus_has_nothing_to_do() {
    let mut fake = Fake::new();
    fake.file("env/lib/python3.12/site-packages/nvidia/nvshmem/lib/libnvshmem_host.so.3");
    fake.set("VIRTUAL_ENV", fake.path("env"));
    for name in ["nvshmrun", "mpiexec.hydra", "mpirun", "srun", "torchrun"] {
        fake.program(&format!("env/bin/{name}"));
    }
    fs::create_dir_all(fake.path("env/lib/python3.12/site-packages/torch-2.11.0.dist-info")).unwrap();
    fake.set("PATH", fake.path("env/bin"));
    let gpu = Gpu { name: "NVIDIA H200".into(), memory: 150_000_000_000, compute: (9, 0) };
    fake.file("env/lib/python3.12/site-packages/nvidia/nvshmem/lib/nvshmem_bootstrap_uid.so.3");
    fake.file("env/lib/python3.12/site-packages/nvidia/nvshmem/lib/nvshmem_bootstrap_pmi.so.3");
    fake.file("root/tmp/nvidia-mps/control");
    let driver = Driver::Present { cuda: 13_000, gpus: vec![gpu; 2], links: vec![vec![Link::Atomic; 2]; 2] };
    let module = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (someone@host)\n";
    let mut findings = driver.findings(Some(module));
    findings.extend(fake.machine.mps(driver.gpu_count() > 0));
    findings.extend(nvshmem::findings(&fake.machine, &|_| Ok("3.4.5".into())));
    findings.extend(launchers::findings(&fake.machine, &|path| {
        Some(match path.file_name()?.to_str()? {
            "mpirun" => "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n".into(),
            "srun" => "slurm 23.02.1".into(),
            _ => "HYDRA build details:\n    Version:                                 4.1.2\n".into(),
        })
    }));
    let report = fake.report(findings);
    insta::assert_snapshot!(report.text());
}

#[test]
fn the_json_names_every_field() {
    let finding = Finding::new("glibc", Status::Ok, "2.36");
    let json = serde_json::to_value(Report { deltalink: "0.0.0", ..Report::of(vec![finding]) }).unwrap();
    assert_eq!(
        json,
        serde_json::json!({"schema": 1, "deltalink": "0.0.0", "findings": [
            {"item": "glibc", "status": "ok", "found": "2.36", "searched": [], "advice": null, "stops_cpu": false}
        ]})
    );
}

#[test]
fn too_little_memory_stops_the_cpu_back_end() {
    let little = machine::memory("MemTotal: 1000000 kB\nMemAvailable: 1000 kB\n", None, None);
    let report = Report::of(vec![little]);
    let why = report.cpu_back_end().unwrap_err().to_string();
    assert!(why.starts_with("the CPU back end cannot run here: memory: 1000.00 KiB available"), "{why}");
    assert!(report.text().ends_with("\nThe CPU back end cannot run here.\n"));
}

#[test]
fn memory_is_what_the_container_leaves() {
    let found = |limit, used| machine::memory(MEMINFO, limit, used).found;
    assert_eq!(found(None, None), "8.00 GiB available of 16.00 GiB");
    assert_eq!(found(Some("max\n"), Some("5")), "8.00 GiB available of 16.00 GiB");
    let limited = found(Some("2147483648\n"), Some("1073741824\n"));
    assert_eq!(limited, "1.00 GiB available of 2.00 GiB that this container may use");
    assert_eq!(machine::memory("", None, None).status, Status::Note);
}

#[test]
fn processors_are_described_by_what_they_have() {
    let describe =
        |info: &str, usable| machine::cpu(info, usable).into_iter().map(|f| (f.status, f.found)).collect::<Vec<_>>();
    let full = describe(CPUINFO, 2);
    assert_eq!(full[0], (Status::Ok, "Made-Up 9000".into()));
    assert_eq!(full[1], (Status::Ok, "2".into()));
    assert_eq!(full[2], (Status::Ok, "avx2, fma, avx512f".into()));
    assert_eq!(describe(CPUINFO, 1)[1], (Status::Note, "1 of 2 may be used".into()));
    assert_eq!(describe("flags : sse2 avx2 fma\n", 1)[2], (Status::Ok, "avx2, fma; no avx512f".into()));
    assert_eq!(describe("flags : sse2\n", 1)[2], (Status::Note, "no avx2, fma, avx512f".into()));
    assert_eq!(describe("Features : fp asimd\n", 1)[2], (Status::Ok, "asimd; no sve".into()));
    assert_eq!(describe("", 1)[2].0, Status::Note);
}

#[test]
fn what_processes_need_is_told_apart_from_what_threads_need() {
    let refused = machine::memfd(&Err(io::Error::from_raw_os_error(38)));
    assert_eq!((refused.status, refused.stops_cpu), (Status::Missing, false));
    assert!(refused.advice.unwrap().contains("PEs as threads can run"));
    let hidden = machine::peer_files(&PeerFile::Refused("Permission denied".into()));
    assert!(hidden.advice.unwrap().contains("hidepid"));
    assert_eq!(machine::peer_files(&PeerFile::Untried("no cat".into())).status, Status::Note);
    assert_eq!(machine::glibc(None).status, Status::Note);
}

#[test]
fn the_launcher_that_started_us_is_named() {
    let started = |pairs: &[(&str, &str)]| {
        let mut fake = Fake::new();
        pairs.iter().for_each(|(name, value)| fake.set(name, *value));
        fake.machine.launched_by().map(|f| f.found)
    };
    assert_eq!(started(&[("RANK", "1"), ("WORLD_SIZE", "4")]).as_deref(), Some("torchrun: RANK=1 of WORLD_SIZE=4"));
    assert_eq!(started(&[("RANK", "1")]), None);
}

#[test]
fn a_library_that_is_no_driver_is_absent() {
    let fake = Fake::new();
    for file in [fake.file("libcuda.so.1"), fake.path("none/libcuda.so.1")] {
        let driver = Driver::probe(file.as_os_str());
        assert!(matches!(&driver, Driver::Absent { why } if why.contains("libcuda.so.1")), "{driver:?}");
    }
}

#[test]
fn driver_failures_have_their_own_advice() {
    let advice = |code| Driver::Failed { call: "cuInit", code }.findings(None)[0].advice.clone().unwrap();
    assert!(advice(100).contains("CUDA_VISIBLE_DEVICES"));
    assert!(advice(803).contains("different versions"));
    assert!(advice(804).contains("cuda/compat"));
    assert!(advice(999).contains("nvidia-smi"));
    let module = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n";
    let hidden = &Driver::Absent { why: "not found".into() }.findings(Some(module))[0];
    assert_eq!(hidden.found, "version 550.54.15, but not found");
    assert!(hidden.advice.as_ref().unwrap().contains("kernel module is loaded"));
    let none = Driver::Present { cuda: 12_040, gpus: vec![], links: vec![] }.findings(None);
    assert_eq!(none[0].found, "version unknown, CUDA 12.4");
    assert_eq!(none[1].status, Status::Missing);
}

#[test]
fn nvshmem_is_searched_where_the_user_says_first() {
    let mut fake = Fake::new();
    fake.set("PATH", fake.path("py/bin"));
    fake.file("py/bin/python3");
    let site = "py/lib/python3.11/site-packages/nvidia/nvshmem/lib/libnvshmem_host.so.3";
    let nvshmem = |fake: &Fake, ask: &dyn Fn(&Path) -> Result<String, String>| {
        let all = nvshmem::findings(&fake.machine, ask);
        (all[0].status, fake.plain(&all[0].found), all[0].advice.as_ref().map(|a| fake.plain(a)))
    };
    fake.file(site);
    assert_eq!(nvshmem(&fake, &|_| Ok("3.4.5".into())), (Status::Ok, format!("3.4.5, FOLDER/{site}"), None));
    assert_eq!(nvshmem(&fake, &cannot_load).1, format!("version unknown (it cannot be loaded), FOLDER/{site}"));

    // NVSHMEM_HOME goes first, and the name of the file behind the link tells the version.
    let real = fake.file("home/lib/libnvshmem_host.so.3.8.0");
    symlink(&real, fake.path("home/lib/libnvshmem_host.so.3")).unwrap();
    fake.set("NVSHMEM_HOME", fake.path("home"));
    let (status, found, advice) = nvshmem(&fake, &never_asked);
    assert_eq!((status, found.as_str()), (Status::Note, "3.8.0, FOLDER/home/lib/libnvshmem_host.so.3"));
    assert!(advice.unwrap().contains(site));

    // The same file by another name is no second copy, and the loader's path goes before everything.
    fs::remove_file(fake.path(site)).unwrap();
    fs::create_dir(fake.path("links")).unwrap();
    symlink(&real, fake.path("links/libnvshmem_host.so.3")).unwrap();
    fake.set("LD_LIBRARY_PATH", fake.path("links"));
    assert_eq!(nvshmem(&fake, &never_asked), (Status::Ok, "3.8.0, FOLDER/links/libnvshmem_host.so.3".into(), None));
}

#[test]
fn nvshmem_is_found_in_the_systems_folders() {
    let fake = Fake::new();
    fake.file("root/usr/lib/x86_64-linux-gnu/nvshmem/13/libnvshmem_host.so.3");
    let all = nvshmem::findings(&fake.machine, &|_| Ok("3.4.5".into()));
    assert_eq!(
        fake.plain(&all[0].found),
        "3.4.5, FOLDER/root/usr/lib/x86_64-linux-gnu/nvshmem/13/libnvshmem_host.so.3"
    );
}

#[test]
fn a_size_without_effect_is_pointed_out() {
    let mut fake = Fake::new();
    fake.set("NVSHMEM_SYMMETRIC_SIZE", "4G");
    let sized = |fake: &Fake| nvshmem::findings(&fake.machine, &cannot_load).get(1).map(|f| f.found.clone());
    assert_eq!(sized(&fake).as_deref(), Some("4G"));
    fake.set("NVSHMEM_DISABLE_CUDA_VMM", "1");
    assert_eq!(sized(&fake), None);
}

#[test]
fn a_launcher_is_a_program_on_the_path() {
    let mut fake = Fake::new();
    fake.file("first/mpirun");
    fake.program("second/mpirun");
    fake.set("PATH", std::env::join_paths([fake.path("first"), fake.path("second")]).unwrap());
    let all = launchers::findings(&fake.machine, &|_| None);
    let mpirun = all.iter().find(|f| f.item == "launcher mpirun").unwrap();
    assert_eq!(fake.plain(&mpirun.found), "version unknown, FOLDER/second/mpirun");
    assert!(
        all.iter().filter(|f| f.item != "launcher mpirun").all(|f| f.status == Status::Missing && f.advice.is_some())
    );
}

#[test]
fn versions_are_read_from_what_launchers_print() {
    let version = |text| launchers::version_in(text);
    assert_eq!(version("mpirun (Open MPI) 5.0.3\n").as_deref(), Some("Open MPI 5.0.3"));
    assert_eq!(version("slurm 23.11.4").as_deref(), Some("Slurm 23.11.4"));
    assert_eq!(
        version("HYDRA build details:\n    Version:       3.4.1\n    Release Date: x\n").as_deref(),
        Some("Hydra 3.4.1")
    );
    assert_eq!(
        version(
            "Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 20211102 (id: 9279b7d62)\nCopyright 2003-2021"
        )
        .as_deref(),
        Some("Intel MPI 2021.5")
    );
    assert_eq!(version("no number here"), None);
}

#[test]
fn a_program_without_a_version_gives_none() {
    assert_eq!(launchers::ask_program(Path::new("/does/not/exist")), None);
    assert_eq!(launchers::ask_program(Path::new("/bin/false")), None);
}

#[test]
fn gpus_that_do_not_reach_each_other_are_named() {
    use Link::{Atomic, None, Plain};
    let finding = |links: &[Vec<Link>]| peers::findings(links).remove(0);
    assert_eq!(peers::findings(&[vec![Atomic]]), []);
    let all = finding(&[vec![Atomic, Plain], vec![Plain, Atomic]]);
    assert_eq!((all.status, all.found.as_str()), (Status::Note, "PCIe, all pairs"));
    let mixed = finding(&[vec![Atomic, Atomic, None], vec![Atomic, Atomic, Plain], vec![None, Plain, Atomic]]);
    assert_eq!(mixed.status, Status::Missing);
    assert_eq!(mixed.found, "NVLink 0->1 1->0; PCIe 1->2 2->1; no access 0->2 2->0");
    assert!(mixed.advice.expect("advice").contains("--gpus"));
}

#[test]
fn processes_that_share_a_gpu_are_told_what_mps_saves() {
    let mut fake = Fake::new();
    assert_eq!(fake.machine.mps(false), []);
    let stopped = &fake.machine.mps(true)[0];
    assert_eq!((stopped.status, stopped.found.as_str()), (Status::Note, "not running"));
    assert!(stopped.advice.as_ref().expect("advice").contains("about 1 ms instead of 3 us"));
    fake.file("pipes/control");
    fake.set("CUDA_MPS_PIPE_DIRECTORY", fake.path("pipes"));
    fake.set("CUDA_VISIBLE_DEVICES", "1,0");
    let all = fake.machine.mps(true);
    assert_eq!((all[0].status, fake.plain(&all[0].found)), (Status::Ok, "running, FOLDER/pipes".into()));
    assert_eq!((all[1].item.as_str(), all[1].found.as_str()), ("CUDA_VISIBLE_DEVICES", "1,0"));
}

#[test]
fn nvshmem_without_the_plugin_that_starts_it_is_incomplete() {
    let mut fake = Fake::new();
    fake.set("NVSHMEM_HOME", fake.path("home"));
    fake.file("home/lib/libnvshmem_host.so.3");
    fake.file("home/lib/nvshmem_bootstrap_mpi.so.3");
    fake.set("NVSHMEM_BOOTSTRAP", "MPI");
    let all = nvshmem::findings(&fake.machine, &|_| Ok("3.4.5".into()));
    assert_eq!((all[1].status, all[1].found.as_str()), (Status::Missing, "mpi, but no uid"));
    assert_eq!(all[1].searched, [fake.path("home/lib")]);
    assert_eq!((all[2].item.as_str(), all[2].status), ("NVSHMEM_BOOTSTRAP", Status::Note));
    fake.file("home/lib/nvshmem_bootstrap_uid.so.3.0.0");
    assert_eq!(nvshmem::findings(&fake.machine, &|_| Ok("3.4.5".into()))[1].found, "mpi, uid");
}

#[test]
fn a_failed_self_test_fails_the_report() {
    let passed = Report::of(vec![Finding::new("self-test on the CPU", Status::Ok, "2 PEs")]);
    assert!(passed.passed());
    let failed = Report::of(vec![Finding::new("self-test on the CPU", Status::Failed, "nothing arrived")]);
    assert!(!failed.passed() && failed.text().contains("FAILED"), "{}", failed.text());
}
