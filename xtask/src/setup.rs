//! `cargo xtask setup`: compilers from Debian, CUDA and NVSHMEM from PyPI.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cuda_builder::{CudaTools, Llvm, RustToolchain, cuda_folder};

use crate::shell::{SetupError, at, run, succeeds, text};

/// The wheels, and their versions: one CUDA, and the NVSHMEM whose host library the GPU machines have. A wheel is a zip:
/// they are unpacked side by side, nothing is installed.
const WHEELS: [(&str, &str); 6] = [
    ("nvidia-cuda-nvcc", "13.0.88"),
    ("nvidia-nvvm", "13.0.88"),
    ("nvidia-cuda-crt", "13.0.88"),
    ("nvidia-cuda-runtime", "13.0.96"),
    ("nvidia-cuda-cccl", "13.0.85"),
    ("nvidia-nvshmem-cu13", "3.4.5"),
];

/// Brings what is missing, and says what is used.
pub fn setup() -> Result<(), SetupError> {
    let rust = rust()?;
    println!("rustc {}.{} of {}", rust.version.0, rust.version.1, rust.sysroot.display());
    let llvm = llvm(&rust)?;
    println!("LLVM {}.{}: {}", llvm.version.0, llvm.version.1, llvm.opt.display());
    let folder = cuda_folder();
    host_compiler()?;
    wheels(&folder)?;
    let tools = CudaTools::new();
    println!("CUDA: {}, {}, {}", tools.ptxas()?.display(), tools.nvlink()?.display(), tools.nvcc()?.display());
    println!("NVSHMEM: {}", folder.join("nvidia/nvshmem").display());
    Ok(())
}

/// A rustc that builds device code; Debian's if there is no other.
fn rust() -> Result<RustToolchain, SetupError> {
    if let Err(error) = RustToolchain::find() {
        packages(&error.to_string(), &["rustc-web", "cargo-web", "rust-web-src"])?;
    }
    Ok(RustToolchain::find()?)
}

/// An LLVM that reads what that rustc writes.
fn llvm(rust: &RustToolchain) -> Result<Llvm, SetupError> {
    if let Err(error) = Llvm::find(rust) {
        packages(&error.to_string(), &[&format!("llvm-{}", rust.llvm.0)])?;
    }
    Ok(Llvm::find(rust)?)
}

/// nvcc preprocesses the NVSHMEM shim with g++.
fn host_compiler() -> Result<(), SetupError> {
    if succeeds(Command::new("g++").arg("--version")) {
        return Ok(());
    }
    packages("There is no g++, which nvcc needs.", &["g++"])
}

/// Installs Debian packages, or says how to.
fn packages(why: &str, names: &[&str]) -> Result<(), SetupError> {
    let mut install = Command::new("apt-get");
    install.args(["install", "--yes", "--no-install-recommends"]).args(names);
    install.env("DEBIAN_FRONTEND", "noninteractive");
    let mut update = Command::new("apt-get");
    update.arg("update");
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0");
    if !root || !succeeds(Command::new("apt-get").arg("--version")) {
        let command = format!("{} && {}", text(&update), text(&install));
        return Err(SetupError::NeedsRoot { why: why.into(), command });
    }
    println!("{why}\nInstalling {}:", names.join(", "));
    run(&mut update)?;
    run(&mut install)
}

/// Downloads and unpacks the wheels whose stamp is not of their version.
fn wheels(folder: &Path) -> Result<(), SetupError> {
    let stamps = folder.join("stamps");
    let stamp = |name: &str| stamps.join(name);
    let missing: Vec<(&str, &str)> = WHEELS
        .into_iter()
        .filter(|(name, version)| fs::read_to_string(stamp(name)).ok().as_deref() != Some(version))
        .collect();
    if missing.is_empty() {
        println!("CUDA and NVSHMEM are in {}", folder.display());
        return Ok(());
    }
    // Another version of a wheel may have left files that this one has not.
    if missing.iter().any(|(name, _)| stamp(name).is_file()) {
        println!("The versions changed: unpacking all of them anew");
        remove(&folder.join("nvidia"))?;
        remove(&stamps)?;
        return wheels(folder);
    }
    let download = folder.join("download");
    remove(&download)?;
    fs::create_dir_all(&download).map_err(at("creating", &download))?;
    fs::create_dir_all(&stamps).map_err(at("creating", &stamps))?;

    let names: Vec<String> = missing.iter().map(|(name, version)| format!("{name}=={version}")).collect();
    println!("Downloading {} (160 MB in all) into {}:", names.join(", "), folder.display());
    let mut pip = pip(&names, folder)?;
    run(pip.args(["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]).arg(&download).args(&names))?;
    for wheel in entries(&download)? {
        run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(folder))?;
    }
    // A zip that is unpacked this way loses the permission to run.
    for programs in ["nvidia/cu13/bin", "nvidia/cu13/nvvm/bin"] {
        for program in entries(&folder.join(programs))?.into_iter().filter(|path| path.is_file()) {
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755))
                .map_err(at("allowing to run", &program))?;
        }
    }
    for (name, version) in missing {
        fs::write(stamp(name), version).map_err(at("writing", &stamp(name)))?;
    }
    remove(&download)
}

/// pip, as a module of Python or as a program; Debian's if there is neither.
fn pip(names: &[String], folder: &Path) -> Result<Command, SetupError> {
    let candidates: [&[&str]; 2] = [&["python3", "-m", "pip"], &["pip"]];
    let find = || {
        candidates.iter().find_map(|words| {
            let command = || {
                let mut command = Command::new(words[0]);
                command.args(&words[1..]);
                command
            };
            succeeds(command().arg("--version")).then(command)
        })
    };
    if let Some(pip) = find() {
        return Ok(pip);
    }
    packages("There is no pip, which downloads CUDA and NVSHMEM.", &["python3-pip"])?;
    find().ok_or_else(|| SetupError::NoPip { wheels: names.join(" "), folder: folder.into() })
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, SetupError> {
    let read = || fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>();
    read().map_err(at("listing", folder))
}

fn remove(folder: &Path) -> Result<(), SetupError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(at("removing", folder)(error)),
        _ => Ok(()),
    }
}
