"""deltalink beside flash-linear-attention (FLA) on this machine's GPUs: one table, as Markdown and as JSON.

    python3 benches/peers/compare.py

Needs a build of deltalink for GPUs, and torch, triton and flash-linear-attention in this Python; README.md beside this file
says how to get them and how to read the result.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import page

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
GATES = ("fast", "slow")


@dataclasses.dataclass(frozen=True)
class Case:
    """An op with its heads; tokens of each PE."""

    op: str
    heads: int
    tokens: tuple

    @staticmethod
    def parse(text):
        try:
            op, heads, tokens = text.split(":")
            case = Case(op, int(heads), tuple(int(number) for number in tokens.split(",")))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not OP:HEADS:TOKENS,..") from None
        if case.op not in ("kda", "gdn") or min(case.heads, *case.tokens) < 1:
            raise argparse.ArgumentTypeError(f"{text}: the op is kda or gdn, numbers are at least 1")
        return case

    def __str__(self):
        return f"{self.op}:{self.heads}:{','.join(map(str, self.tokens))}"


# By number of PEs.
CASES = {
    1: [Case("kda", 32, (2048, 8192, 32768)), Case("kda", 8, (32768,)), Case("gdn", 32, (8192,))],
    2: [Case("kda", 32, (8192, 32768)), Case("gdn", 32, (8192,))],
}


def main():
    arguments = parse()
    program = find_program(arguments.deltalink)
    if importlib.util.find_spec("fla") is None:
        sys.exit("error: this Python has no flash-linear-attention; install it with `pip install flash-linear-attention`")
    gpus = asked_of_driver("name")
    pes = arguments.pes or [count for count in (1, 2) if count <= len(gpus)]
    if max(pes) > len(gpus):
        sys.exit(f"error: {max(pes)} PEs were asked for, and there are {len(gpus)} GPUs; a comparison needs one for each")
    raw = arguments.out / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    report = {
        "schema": 2,
        "date": None,
        "commit": None,
        "command": sys.argv,
        "machine": {"gpus": gpus, "driver": asked_of_driver("driver_version")[0]},
        "versions": {},
        "settings": {"dim": arguments.dim, "dtype": "bf16", "warmup": arguments.warmup, "repeats": arguments.repeats},
        "rows": [],
        "failures": [],
    }
    for count in pes:
        for op in arguments.op:
            cases = [case for case in arguments.case or CASES.get(count, CASES[2]) if case.op == op]
            if cases:
                compare(arguments, program, op, count, cases, report)
                # After each, so that whatever ends this program leaves what there is.
                write(arguments.out, report)
    print(write(arguments.out, report))
    for failure in report["failures"]:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if report["failures"] else 0


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", choices=["kda", "gdn"], default=["kda", "gdn"])
    parser.add_argument("--case", nargs="+", type=Case.parse, metavar="OP:HEADS:TOKENS,..",
                        help="tokens are of each PE [default: one PE " + " ".join(map(str, CASES[1])) + "; two "
                             + " ".join(map(str, CASES[2])) + "]")
    parser.add_argument("--gates", nargs="+", choices=GATES, default=list(GATES))
    parser.add_argument("--dim", type=int, default=128, help="channels of keys and of values")
    parser.add_argument("--pes", type=int, nargs="+", help="numbers of PEs, one GPU each [default: 1, and 2 if there are]")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--deltalink", type=Path, help="the program [default: target/release/deltalink, or that on PATH]")
    parser.add_argument("--world", choices=["threads", "processes"], default="threads", help="what a PE of deltalink is")
    parser.add_argument("--out", type=Path, default=Path("peers-results"), help="folder for the results")
    parser.add_argument("--reuse", action="store_true", help="keep measurements that the folder has already")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for each program")
    return parser.parse_args(words)


def find_program(asked):
    folder = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
    for path in [asked] if asked else [folder / "release" / "deltalink", shutil.which("deltalink")]:
        if path and Path(path).is_file():
            return str(Path(path).resolve())
    sys.exit(f"error: {asked or 'deltalink'} is not there; build it with `cargo build --release --features cuda` "
             "(after `cargo xtask setup`), or name it with --deltalink")


def compare(arguments, program, op, pes, cases, report):
    """Measures both sides and adds a row for each case, number of tokens, kind of gates and pass to `report`."""
    raw = arguments.out / "raw"
    # FLA tunes its kernels once in a process, which takes minutes: one process for all cases.
    peer = results(raw / f"fla-{op}-{pes}.json", fla_command(arguments, op, pes, cases), arguments, report)
    for case in cases:
        own = results(raw / f"deltalink-{op}-{case.heads}-{pes}.json", own_command(arguments, program, pes, case), arguments,
                      report)
        for found, dim in ((peer, "dim"), (own, "key_dim")):
            if found:
                check_settings(arguments, op, found["settings"], dim)
        report["rows"] += rows_of(arguments, pes, case, own, peer)
        if own:
            report["versions"]["deltalink"] = own["deltalink"]
            report["machine"] = {**own["machine"], **report["machine"]}
            report["commit"] = own["commit"]
    if peer:
        report["versions"].update(peer["versions"])


def fla_command(arguments, op, pes, cases):
    python = [sys.executable]
    if pes > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={pes}"]
    command = python + [str(HERE / "fla_times.py"), "--op", op, "--gates", *arguments.gates, "--case"]
    command += [f"{case.heads}:{','.join(map(str, case.tokens))}" for case in cases]
    return command + common(arguments) + (["--forward-only"] if arguments.forward_only else [])


def own_command(arguments, program, pes, case):
    gates = arguments.gates[0] if len(arguments.gates) == 1 else "both"
    command = [program, "bench", "op", "--op", case.op, "--device", "cuda", "--gates", gates, "--pes", str(pes)]
    # Exactly as many GPUs as PEs, so that a machine with more makes no difference.
    command += ["--world", arguments.world, "--gpus", ",".join(map(str, range(pes)))]
    command += ["--heads", str(case.heads), "--tokens", ",".join(map(str, case.tokens))] + common(arguments)
    return command + ([] if arguments.forward_only else ["--backward"])


def common(arguments):
    numbers = {"--dim": arguments.dim, "--warmup": arguments.warmup, "--repeats": arguments.repeats}
    return [text for option, value in numbers.items() for text in (option, str(value))]


def results(path, command, arguments, report):
    """What `command` writes to `path`, or has written there before; None, and a line among the failures, if there is nothing.

    What it had written when it failed is kept."""
    if not (arguments.reuse and path.is_file()):
        path.unlink(missing_ok=True)
        command = command + ["--json", str(path)]
        print("+", " ".join(command), file=sys.stderr, flush=True)
        failed = failure_of(command, arguments.timeout)
        if failed:
            report["failures"].append(f"{' '.join(command)} {failed}")
    return json.loads(path.read_text()) if path.is_file() else None


def failure_of(command, timeout_s):
    """Runs `command`; how it failed, in words, or None. The next program must have the GPUs alone: one that overruns is told to
    stop, since torch's launcher then ends its ranks, and killed with its session if it does not."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = child.wait(timeout=timeout_s)
        return f"ended with {code}" if code != 0 else None
    except subprocess.TimeoutExpired:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=30)
        return f"was not done after {timeout_s} s; allow more with --timeout"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def check_settings(arguments, op, found, dim):
    """Refuses results of an earlier call with other settings."""
    wanted = {"op": op, dim: arguments.dim, "warmup": arguments.warmup, "repeats": arguments.repeats}
    for name, want in wanted.items():
        if found[name] != want:
            sys.exit(f"error: the folder has results with {name} = {found[name]}, {want} was asked for; "
                     "measure again without --reuse, or into another folder")


def rows_of(arguments, pes, case, own, peer):
    """A row for each number of tokens, kind of gates and pass. A side without a result has none in its row."""
    def find(side, wanted):
        found = [point for point in (side or {}).get("points", []) if all(point.get(name) == x for name, x in wanted.items())]
        return found[-1] if found else {}

    rows = []
    for tokens in case.tokens:
        for gates in arguments.gates:
            for what in ["forward"] if arguments.forward_only else page.PASSES:
                wanted = {"tokens": tokens, "gates": gates, "pass": what}
                # A file of deltalink has one number of heads.
                mine, theirs = find(own, wanted), find(peer, {**wanted, "heads": case.heads})
                row = {"op": case.op, "pes": pes, "heads": case.heads, **wanted,
                       "deltalink": kept(mine, ("time_us", "peak_device_bytes", "tflop_s", "tb_s", "hopper")),
                       "fla": kept(theirs, ("time_us", "peak_device_bytes", "refused"))}
                if "time_us" in mine and "time_us" in theirs:
                    row["fla_over_deltalink"] = theirs["time_us"]["median"] / mine["time_us"]["median"]
                rows.append(row)
    return rows


def kept(point, names):
    return {name: point[name] for name in names if name in point}


def write(folder, report):
    """Both files as far as the rows go; returns the page."""
    report["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    report["commit"] = report["commit"] or commit()
    (folder / "compare.json").write_text(json.dumps(report, indent=1) + "\n")
    text = page.markdown(report)
    (folder / "compare.md").write_text(text)
    return text


def asked_of_driver(field):
    """One value for each GPU that programs see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"] + (["-i", visible] if visible else [])
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: nvidia-smi does not tell {field} ({error}); both sides need NVIDIA GPUs and their driver")
    return asked.stdout.split("\n")[:-1]


def commit():
    """Of the repository beside this file, with + if files differ from it; none outside a repository."""
    def git(*words):
        return subprocess.run(["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if git("status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
