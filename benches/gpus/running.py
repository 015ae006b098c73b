"""Commands with a bound: what overruns is ended together with everything that it has started."""

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

GRACE_S = 5
"""How long what is told to stop may take before it is killed."""
MPS = "nvidia-cuda-mps-control"


@dataclasses.dataclass(frozen=True)
class Command:
    """A program with its arguments, and variables beside those of this process."""

    argv: list
    env: dict = dataclasses.field(default_factory=dict)


def run(command, limit_s, log, env=None):
    """Runs `command` for at most `limit_s` seconds, appends what it writes to `log`, and says how it ended.

    `rc` is None where it could not be started or was ended from here.
    """
    argv = [str(word) for word in command.argv]
    result = {"argv": argv, "env": dict(command.env), "rc": None, "wall_s": 0.0, "timed_out": False}
    adopt_orphans()
    begin, before = time.monotonic(), descendants(os.getpid())
    with open(log, "ab") as out:
        out.write(f"+ {' '.join(argv)}\n".encode())
        out.flush()
        try:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                     env={**os.environ, **(env or {}), **command.env}, start_new_session=True)
        except OSError as error:
            out.write(f"cannot be started: {error}\n".encode())
            return result
        try:
            result["rc"] = child.wait(timeout=max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            result["timed_out"] = True
        finally:
            end_tree(child, before)
    result["wall_s"] = round(time.monotonic() - begin, 3)
    return result


def adopt_orphans():
    """Makes this process the parent of what its commands leave behind, so that it can be found whatever its session is."""
    set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot adopt what its commands leave behind")


def end_tree(child, before):
    """Ends what came into being below this process since `before`: `child` and all that it has started."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 10 * GRACE_S)):
        deadline = time.monotonic() + patience
        while tree := started_since(child, before):
            for pid, begun in tree.items():
                send(pid, begun, number)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
    # Only a process that hangs in the kernel is still there; it cannot be waited for.
    child.poll()


def started_since(child, before):
    """Living processes below this one that are not in `before`; takes leave of those that have ended."""
    tree = {pid: begun for pid, begun in descendants(os.getpid()).items() if before.get(pid) != begun}
    child.poll()
    for pid in tree:
        stat = stat_of(pid)
        if stat and stat[0] == "Z" and stat[1] == os.getpid() and pid != child.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return {pid: begun for pid, begun in tree.items() if is_alive(pid, begun)}


def stat_of(pid):
    """State, parent and time of start of a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name before it may have spaces.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])


def descendants(root):
    """Processes that `root` has started, and those that these have: number and time of start."""
    children, begun = {}, {}
    for entry in Path("/proc").iterdir():
        stat = stat_of(entry.name) if entry.name.isdigit() else None
        if stat:
            children.setdefault(stat[1], []).append(int(entry.name))
            begun[int(entry.name)] = stat[2]
    found, waiting = {}, [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            found[pid] = begun[pid]
            waiting.append(pid)
    return found


def is_alive(pid, begun):
    stat = stat_of(pid)
    return stat is not None and stat[2] == begun and stat[0] not in "ZX"


def send(pid, begun, number):
    """A number that another process has got meanwhile is left alone."""
    if is_alive(pid, begun):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def mps(log):
    """A Multi-Process Service of its own, in a temporary folder; yields the variables by which programs find it."""
    with tempfile.TemporaryDirectory(prefix="deltalink-mps-") as folder:
        pipe, logs = Path(folder, "pipe"), Path(folder, "log")
        pipe.mkdir()
        logs.mkdir()
        env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        started = control(["-d"], None, env, log)
        if started != 0:
            raise RuntimeError(f"{MPS} -d ended with {started}; its words are in the log")
        try:
            yield env
        finally:
            ended = control([], "quit\n", env, log)
        if ended != 0:
            raise RuntimeError(f"the service did not end ({MPS} ended with {ended}); its words are in the log")


def control(arguments, words, env, log):
    # Not from a pipe: the service goes on with what it inherits, and a pipe would not end.
    with open(log, "ab") as out:
        out.write(f"+ {MPS} {' '.join(arguments)} <<< {words!r}\n".encode())
        out.flush()
        try:
            done = subprocess.run([MPS, *arguments], input=words.encode() if words else None, stdout=out, stderr=out,
                                  stdin=None if words else subprocess.DEVNULL, env={**os.environ, **env}, timeout=30,
                                  check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            out.write(f"{error}\n".encode())
            return None
    return done.returncode
