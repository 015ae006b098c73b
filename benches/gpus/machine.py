"""What a record says about the machine and the programs, so that a figure can be judged without the machine."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def said(argv, timeout=20):
    """What a program says; None if it cannot."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def gpus():
    """Names of the GPUs that programs see, and their driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = ["-i", visible] if visible else []
    lines = said(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", *which])
    rows = [line.rsplit(",", 1) for line in (lines or "").splitlines() if "," in line]
    return [name.strip() for name, _ in rows], rows[0][1].strip() if rows else None


def cpu():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvshmem_folder():
    """Folder of NVSHMEM's libraries in the wheel that Python has, where bootstrap plugins are found as well."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations if spec else None) or []:
        folder = Path(place, "nvshmem", "lib")
        if folder.is_dir():
            return str(folder)
    return None


def environment():
    """Variables for all commands: NVSHMEM's libraries, and no NVLink multicast, which neither side of a comparison needs and
    which some machines cannot set up."""
    env = {name: os.environ.get(name, value) for name, value in (("NVSHMEM_DISABLE_NVLS", "1"), ("NCCL_NVLS_ENABLE", "0"))}
    folder = nvshmem_folder()
    if folder:
        before = os.environ.get("LD_LIBRARY_PATH")
        env["LD_LIBRARY_PATH"] = f"{folder}:{before}" if before else folder
    return env


def commit():
    """Of the repository around this file, with + where files differ from it; None outside of one."""
    head = said(["git", "-C", str(REPOSITORY), "rev-parse", "--short=12", "HEAD"])
    if head is None:
        return None
    changed = said(["git", "-C", str(REPOSITORY), "status", "--porcelain"])
    return head.strip() + ("+" if changed and changed.strip() else "")


def describe(program, named_commit):
    names, driver = gpus()
    own = said([program, "--version"])
    packages = {"torch": "torch", "triton": "triton", "flash-linear-attention": "flash-linear-attention",
                "fla-core": "fla-core", "nvshmem": "nvidia-nvshmem-cu13"}
    versions = {"deltalink": own.split()[-1] if own else None, "python": platform.python_version()}
    versions.update({name: version(package) for name, package in packages.items()})
    return {
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "kernel": platform.release(), "gpus": names},
        "driver": driver,
        "versions": {name: found for name, found in versions.items() if found},
        "commit": named_commit or commit(),
    }


def tool(asked, names, beside):
    """Path of a program: the one asked for, one that lies in a folder of `beside`, or one on PATH; None if there is none."""
    candidates = [asked] if asked else [Path(folder, name) for folder in beside for name in names]
    for path in candidates:
        if Path(path).is_file():
            return str(Path(path).resolve())
    return None if asked else next(filter(None, map(shutil.which, names)), None)


def open_mpi(asked):
    """mpirun, if it is Open MPI's."""
    for name in [asked] if asked else ["mpirun.openmpi", "mpirun"]:
        text = said([name, "--version"])
        if text and ("Open MPI" in text or "OpenRTE" in text):
            return name
    return None
