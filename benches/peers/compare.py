"""deltalink beside flash-linear-attention (FLA) on this machine's GPUs: one table, as Markdown and as JSON.

    python3 benches/peers/compare.py

Needs a build of deltalink for GPUs, and torch, triton and flash-linear-attention in this Python; README.md beside this file
says how to get them and how to read the result.
"""

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
PASSES = {"forward": "forward", "both": "forward and backward"}


def main():
    arguments = parse()
    program = find_program(arguments.deltalink)
    if importlib.util.find_spec("fla") is None:
        sys.exit("error: this Python has no flash-linear-attention; install it with `pip install flash-linear-attention`")
    gpus = names_of_gpus()
    pes = arguments.pes or [count for count in (1, 2) if count <= len(gpus)]
    if max(pes) > len(gpus):
        sys.exit(f"error: {max(pes)} PEs were asked for, and there are {len(gpus)} GPUs; a comparison needs one for each")
    raw = arguments.out / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    rows, versions, machine, built_of = [], {}, {}, None
    for op in arguments.op:
        for count in pes:
            peer = results(raw / f"fla-{op}-{count}.json", fla_command(arguments, op, count), arguments)
            own = results(raw / f"deltalink-{op}-{count}.json", own_command(arguments, program, op, count), arguments)
            for found, dim in ((peer, "dim"), (own, "key_dim")):
                check_settings(arguments, op, found["settings"], dim)
            built_of = own["commit"]
            versions.update(peer["versions"])
            versions["deltalink"] = own["deltalink"]
            machine = own["machine"]
            rows += rows_of(arguments, op, count, own["points"], peer["points"])
    report = {
        "schema": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": built_of or commit(),
        "command": sys.argv,
        "machine": {**machine, "gpus": gpus, "driver": asked_of_driver("driver_version")[0]},
        "versions": versions,
        "settings": {"heads": arguments.heads, "dim": arguments.dim, "dtype": "bf16", "warmup": arguments.warmup,
                     "repeats": arguments.repeats},
        "rows": rows,
    }
    (arguments.out / "compare.json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(report)
    (arguments.out / "compare.md").write_text(text)
    print(text)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", choices=["kda", "gdn"], default=["kda", "gdn"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="of each PE")
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
    return parser.parse_args()


def find_program(asked):
    folder = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
    for path in [asked] if asked else [folder / "release" / "deltalink", shutil.which("deltalink")]:
        if path and Path(path).is_file():
            return str(Path(path).resolve())
    sys.exit(f"error: {asked or 'deltalink'} is not there; build it with `cargo build --release --features cuda` "
             "(after `cargo xtask setup`), or name it with --deltalink")


def fla_command(arguments, op, pes):
    python = [sys.executable]
    if pes > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={pes}"]
    command = python + [str(HERE / "fla_times.py"), "--op", op] + common(arguments, "--tokens", map(str, arguments.tokens))
    return command + (["--forward-only"] if arguments.forward_only else [])


def own_command(arguments, program, op, pes):
    command = [program, "bench", "op", "--op", op, "--device", "cuda", "--gates", "fast", "--pes", str(pes)]
    # Exactly as many GPUs as PEs, so that a machine with more makes no difference.
    command += ["--world", arguments.world, "--gpus", ",".join(map(str, range(pes)))]
    command += common(arguments, "--tokens", [",".join(map(str, arguments.tokens))])
    return command + ([] if arguments.forward_only else ["--backward"])


def common(arguments, name, tokens):
    numbers = {"--heads": arguments.heads, "--dim": arguments.dim, "--warmup": arguments.warmup,
               "--repeats": arguments.repeats}
    return [name, *tokens] + [text for option, value in numbers.items() for text in (option, str(value))]


def results(path, command, arguments):
    """What `command` writes to `path`, or has written there before."""
    if not (arguments.reuse and path.is_file()):
        command = command + ["--json", str(path)]
        print("+", " ".join(command), file=sys.stderr, flush=True)
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=arguments.timeout, check=False)
        except subprocess.TimeoutExpired:
            sys.exit(f"error: not done after {arguments.timeout} s; allow more with --timeout")
        if done.returncode != 0:
            sys.exit(f"error: it ended with {done.returncode}; the reason is above")
    return json.loads(path.read_text())


def check_settings(arguments, op, found, dim):
    """Refuses results of an earlier call with other settings."""
    wanted = {"op": op, "heads": arguments.heads, dim: arguments.dim, "warmup": arguments.warmup,
              "repeats": arguments.repeats}
    for name, want in wanted.items():
        if found[name] != want:
            sys.exit(f"error: the folder has results with {name} = {found[name]}, {want} was asked for; "
                     "measure again without --reuse, or into another folder")


def rows_of(arguments, op, pes, own, peer):
    def find(points, tokens, what):
        found = [point for point in points if (point["tokens"], point["pass"]) == (tokens, what)]
        if len(found) != 1:
            sys.exit(f"error: {len(found)} results of {op}, {tokens} tokens, {what}, where one was expected; "
                     "measure again without --reuse")
        return found[0]

    rows = []
    for tokens in arguments.tokens:
        for what in ["forward"] if arguments.forward_only else PASSES:
            mine, theirs = find(own, tokens, what), find(peer, tokens, what)
            row = {"op": op, "pes": pes, "tokens": tokens, "pass": what,
                   "deltalink": {name: mine[name] for name in ("time_us", "peak_device_bytes", "tflop_s", "tb_s", "hopper")},
                   "fla": {name: x for name, x in theirs.items() if name not in ("tokens", "pass")}}
            if "time_us" in theirs:
                row["fla_over_deltalink"] = theirs["time_us"]["median"] / mine["time_us"]["median"]
            rows.append(row)
    return rows


def markdown(report):
    machine, settings, versions = report["machine"], report["settings"], report["versions"]
    gpus = " + ".join(f"{machine['gpus'].count(name)} x {name}" for name in sorted(set(machine["gpus"])))
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lines = [
        "# deltalink beside flash-linear-attention",
        "",
        f"{report['date']}, commit {report['commit']}, {gpus}, driver {machine['driver']}, {machine['cpu']}; {named}.",
        f"{settings['dtype']}, {settings['heads']} heads, K = V = {settings['dim']}, fast gates; medians of "
        f"{settings['repeats']} (tenth at each end), of each the PE or rank that took longest; tokens are of each.",
        "",
        "| op | PEs | tokens | pass | deltalink ms | FLA ms | FLA / deltalink | deltalink MiB | FLA MiB |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|",
    ]

    def time(side):
        if "time_us" not in side:
            return "refused"
        median, low, high = (side["time_us"][name] / 1e3 for name in ("median", "p10", "p90"))
        return f"{median:.3f} ({low:.3f} to {high:.3f})"

    def memory(side):
        return f"{side['peak_device_bytes'] / 2**20:.0f}" if "peak_device_bytes" in side else ""

    for row in report["rows"]:
        own, peer = row["deltalink"], row["fla"]
        ratio = f"{row['fla_over_deltalink']:.2f}" if "fla_over_deltalink" in row else ""
        cells = [row["op"], row["pes"], row["tokens"], PASSES[row["pass"]], time(own), time(peer), ratio, memory(own),
                 memory(peer)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    refusals = sorted({row["fla"]["refused"] for row in report["rows"] if "refused" in row["fla"]})
    lines += [""] + [f"FLA refused: {' '.join(refusal.split())}" for refusal in refusals]
    return "\n".join(lines).rstrip() + "\n"


def asked_of_driver(field):
    """One value for each GPU that programs see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"] + (["-i", visible] if visible else [])
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: nvidia-smi does not tell {field} ({error}); both sides need NVIDIA GPUs and their driver")
    return asked.stdout.split("\n")[:-1]


def names_of_gpus():
    return asked_of_driver("name")


def commit():
    """Of the repository beside this file, with + if files differ from it; none outside a repository."""
    def git(*words):
        return subprocess.run(["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if git("status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    main()
