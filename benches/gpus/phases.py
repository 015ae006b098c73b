"""What a session records: phases, each a few commands with one bound, in the order of their importance."""

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import figures
import machine
import tensors
from running import Command

COMPARE = machine.REPOSITORY / "benches" / "peers" / "compare.py"


@dataclasses.dataclass(frozen=True)
class Session:
    """What is measured with. `toy`: on the CPU back end, at sizes that take seconds."""

    program: str
    device: str
    gpus: int
    convolution: str | None
    hydra: str | None
    mpirun: str | None
    sanitizer: str | None
    racecheck: str
    mps: str | None
    soak_steps: int

    @property
    def toy(self):
        return self.device == "cpu"

    def deltalink(self, *words):
        return Command([self.program, *words])

    def own(self, *words):
        """A command of the program that computes, on the device."""
        return self.deltalink(*words, "--device", self.device)

    def one_gpu(self):
        return [] if self.toy else ["--gpus", "0"]


@dataclasses.dataclass(frozen=True)
class Phase:
    """`commands` and `read` get the session and the phase's folder; `missing` says what the session lacks, or None; `mps` says
    whether its processes run under a Multi-Process Service."""

    name: str
    group: str
    limit_s: int
    commands: Callable
    read: Callable
    missing: Callable = lambda session: None
    mps: Callable = lambda session: False


def report(folder, name="report.json"):
    return json.loads((folder / name).read_text())


def log_of(folder):
    return (folder / "log.txt").read_text(errors="replace")


def checked(name, group, limit_s, *words, **of_phase):
    """The program's own checks on many problems."""
    def commands(session, folder):
        few = ["--case", "0"] if session.toy else ["--quick"]
        # A GPU for each process: more of them share it as phases of their own.
        few += ["--pes", "1,2"] if group == "two" and not session.toy else []
        return [session.own("verify", *few, *words, "--json", folder / "report.json")]

    return Phase(name, group, limit_s, commands, lambda session, folder: figures.verify(report(folder)), **of_phase)


def doctor(name, limit_s, option, read):
    def commands(session, folder):
        return [session.deltalink("doctor", option, "--json", folder / "report.json")]

    return Phase(name, "one", limit_s, commands, lambda session, folder: read(report(folder), not session.toy))


def steps(name, group, limit_s, op, tokens, *words, gates="both", missing=lambda session: None):
    """Times of steps."""
    def commands(session, folder):
        toy = ["--heads", "2", "--dim", "16", "--tokens", "48", "--repeats", "2", "--warmup", "1"]
        size = toy if session.toy else ["--tokens", str(tokens), "--repeats", "20" if tokens <= 8192 else "10"]
        where = session.one_gpu() if group == "one" else []
        asked = ["--op", op, "--gates", gates, "--timeout", "20"]
        return [session.own("bench", "op", *asked, *size, *where, *words, "--json", folder / "report.json")]

    return Phase(name, group, limit_s, commands, lambda session, folder: figures.op(report(folder)), missing)


def problem(session, folder, op):
    """A file with a problem for the kernels that have bodies for Hopper; of a toy size on the CPU back end."""
    path = folder / f"{op}.safetensors"
    sizes = (80, 1, 16) if session.toy else (1024, 2, 128)
    tensors.save(path, *tensors.problem(op, *sizes))
    return path


def accuracy(op, body):
    """The device's results beside those of the CPU back end."""
    def commands(session, folder):
        words = ["run", "--input", problem(session, folder, op), "--pes", "2", "--world", "threads", "--backward"]
        own = session.own(*words, "--output", folder / "device.safetensors", "--json", folder / "report.json")
        return [Command(own.argv, {"DELTALINK_BODY": body} if body == "portable" else {}),
                session.deltalink(*words, "--output", folder / "cpu.safetensors", "--device", "cpu")]

    def read(session, folder):
        beside = figures.accuracy(folder / "device.safetensors", folder / "cpu.safetensors", figures.ACCURACY)
        return {**beside, "run": figures.run(report(folder))}

    return Phase(f"accuracy-{op}-{body}", "one", 90, commands, read)


def convolution(pes, group, missing):
    def lacks(session):
        if not session.convolution:
            return "no gpu_convolution (cargo build --release --example gpu_convolution; see --convolution)"
        return missing(session)

    def commands(session, folder):
        return [Command([session.convolution, pes, session.device])]

    return Phase(f"convolution-{pes}", group, 120, commands,
                 lambda session, folder: figures.convolution(log_of(folder)), lacks)


def sanitized(tool, direction):
    """Small steps under compute-sanitizer, portable bodies and those for Hopper; on the CPU back end under its own checks."""
    backward = ["--backward"] if direction == "backward" else []

    def commands(session, folder):
        small = folder / "small.safetensors"
        tensors.save(small, *tensors.problem("kda", 96, 1, 16 if session.toy else 128))
        common = ["--pes", "2", "--world", "threads", "--timeout", "60", *backward]
        runs = [["run", "--op", "kda", "--dtype", "bf16", *common], ["run", "--input", small, *common]]
        if session.toy:
            return [session.own(*words, "--checked") for words in runs[1:]]
        under = [session.sanitizer, "--tool", tool, "--error-exitcode", "9"]
        # The list of a kernel's parameters ends with an error of the driver's interface, which is no invalid access.
        under += ["--report-api-errors", "no"] if tool == "memcheck" else []
        program = session.racecheck if tool == "racecheck" else session.program
        return [Command([*under, program, *session.own(*words).argv[1:]]) for words in runs]

    def read(session, folder):
        return {} if session.toy else figures.sanitizer(log_of(folder))

    def missing(session):
        return None if session.toy or session.sanitizer else "no compute-sanitizer (it comes with CUDA; see --sanitizer)"

    return Phase(f"{tool}-{direction}", "one", 150, commands, read, missing)


def two(session):
    return None if session.toy or session.gpus >= 2 else f"it needs two GPUs, there are {session.gpus}"


def one_for_all(session):
    """Whether PEs that are processes share one GPU."""
    return not session.toy and session.gpus == 1


def shareable(session):
    """What is checked and not timed needs no GPU for each PE."""
    if one_for_all(session):
        return None if session.mps else "it needs two GPUs, or nvidia-cuda-mps-control on PATH"
    return two(session)


def launched(name, launcher, limit_s, lacks):
    """Forward and backward under a launcher."""
    def commands(session, folder):
        words = ["run", "--op", "kda", "--backward", "--timeout", "30", "--json", folder / "report.json"]
        return [Command([*launcher(session), *session.own(*words).argv])]

    return Phase(name, "two", limit_s, commands, lambda session, folder: figures.run(report(folder)),
                 lambda session: shareable(session) or lacks(session), one_for_all)


def under_hydra(session):
    return [session.hydra, "-launcher", "fork", "-n", "2"]


def under_open_mpi(session):
    return [session.mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2"]


def under_torchrun(session):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]


def shared(pes):
    """More PEs than GPUs, under a Multi-Process Service of their own."""
    def commands(session, folder):
        words = ["run", "--backward", "--world", "processes", "--pes", pes, "--timeout", "30"]
        return [session.own(*words, "--json", folder / "report.json")]

    def lacks(session):
        return shareable(session) or (None if session.toy or session.mps else "no nvidia-cuda-mps-control on PATH")

    return Phase(f"mps-{pes}", "two", 90, commands, lambda session, folder: figures.run(report(folder)), lacks,
                 lambda session: not session.toy)


def messages(transport):
    def commands(session, folder):
        toy = ["--sizes", "16,4K", "--blocks", "1", "--repeats", "3"] if session.toy else []
        words = ["bench", "comm", "--world", "processes", "--transport", transport, "--timeout", "20", *toy]
        return [session.own(*words, "--json", folder / "report.json")]

    return Phase(f"comm-{transport}", "two", 90, commands, lambda session, folder: figures.comm(report(folder)), two)


def soak(name, limit_s, *words, from_file=False):
    """Forward and backward again and again with random delays; every repetition must have the bits of the first."""
    def commands(session, folder):
        source = ["--input", problem(session, folder, "kda")] if from_file else ["--op", "kda"]
        return [session.own("run", *source, "--backward", "--world", "processes", "--pes", "2", "--repeat",
                            session.soak_steps, "--jitter", "300", "--timeout", "30", *words,
                            "--json", folder / "report.json")]

    return Phase(name, "two", limit_s, commands, lambda session, folder: figures.run(report(folder)), shareable, one_for_all)


def timeline(name, *words):
    """One step on two PEs, head by head, as figures and as a drawing."""
    def commands(session, folder):
        toy = ["--heads", "4", "--dim", "16", "--tokens", "64"]
        size = toy if session.toy else ["--heads", "16", "--tokens", "8192"]
        recorded = folder / "step.json"
        bench = ["bench", "op", "--pes", "2", "--world", "processes", "--gates", "slow", "--repeats", "3", "--warmup", "3"]
        return [session.own(*bench, *size, *words, "--trace", recorded, "--json", folder / "times.json"),
                session.deltalink("trace", recorded, "--json", folder / "report.json", "--heads", "--rows", "heads",
                                  "--svg", folder / "heads.svg"),
                session.deltalink("trace", recorded, "--svg", folder / "tracks.svg")]

    return Phase(name, "two", 90, commands, lambda session, folder: figures.trace(report(folder)), two)


def peers(op, pes):
    def lacks(session):
        if session.toy:
            return "FLA needs a GPU"
        if importlib.util.find_spec("fla") is None:
            return "this Python has no flash-linear-attention"
        return two(session) if pes == 2 else None

    def commands(session, folder):
        # Each side has less than the phase, so that a side that overruns leaves a table of the other.
        words = ["--op", op, "--pes", str(pes), "--deltalink", session.program, "--timeout", "400", "--out", folder]
        return [Command([sys.executable, COMPARE, *words])]

    return Phase(f"peers-{op}-{pes}", "peers", 590, commands,
                 lambda session, folder: figures.peers(report(folder, "compare.json")), lacks)


def all_phases():
    """In the order in which they are run."""
    lengths = (2048, 8192, 32768)
    return [
        checked("verify-forward", "one", 120),
        doctor("tiles", 90, "--tiles", figures.tiles),
        doctor("self-test", 60, "--self-test", figures.self_test),
        *(accuracy(op, body) for op in ("kda", "gdn") for body in ("portable", "hopper")),
        *(steps(f"{op}-forward-{tokens}", "one", 90, op, tokens) for op in ("kda", "gdn") for tokens in lengths),
        checked("verify-backward", "one", 240, "--backward"),
        *(steps(f"{op}-backward-{tokens}", "one", 120, op, tokens, "--backward") for op in ("kda", "gdn") for tokens in lengths),
        convolution(1, "one", lambda session: None),
        *(sanitized(tool, direction) for direction in ("forward", "backward") for tool in ("memcheck", "synccheck", "racecheck")),
        *(checked(f"processes-{direction}", "two", limit_s, "--world", "processes", *words, missing=shareable, mps=one_for_all)
          for direction, limit_s, words in (("forward", 180, []), ("backward", 300, ["--backward"]))),
        launched("hydra", under_hydra, 60, lambda session: None if session.hydra else "no mpiexec.hydra (see --hydra)"),
        launched("open-mpi", under_open_mpi, 60, lambda session: None if session.mpirun else "no mpirun of Open MPI"),
        launched("torchrun", under_torchrun, 90,
                 lambda session: None if importlib.util.find_spec("torch") else "this Python has no torch"),
        *(messages(transport) for transport in ("auto", "put")),
        timeline("timeline-forward"),
        timeline("timeline-training", "--backward"),
        *(steps(f"modes-{direction}", "two", 150, "kda", 8192, "--pes", "2", "--world", "processes", "--mode",
                "overlap,bulk,exact", *words, missing=two)
          for direction, words in (("forward", []), ("backward", ["--backward"]))),
        soak("soak", 300),
        soak("soak-bf16", 300, from_file=True),
        soak("soak-put", 300, "--transport", "put"),
        *(shared(pes) for pes in ("4", "8")),
        convolution(2, "two", two),
        *(peers(op, pes) for pes in (1, 2) for op in ("kda", "gdn")),
    ]
