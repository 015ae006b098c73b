"""Records what a session on GPUs should leave behind: whether results are right, and how fast they come.

    python3 benches/gpus/record.py                   # all that this machine can do
    python3 benches/gpus/record.py --phases one      # of one GPU; --list shows all phases
    python3 benches/gpus/record.py --device cpu      # tries it out at toy sizes, on any machine

Needs the built program, and nothing but Python's standard library; README.md beside this file says what is recorded.
"""

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import machine
import phases
import running
import summary

GROUPS = ("one", "two", "peers")


def main():
    # Told to stop, it ends what it has started: by leaving as it would after an error.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = parse()
    chosen = choose(arguments.phases)
    if arguments.list:
        for phase in chosen:
            print(f"{phase.group:5}  {phase.limit_s:4} s  {phase.name}")
        return 0
    session, about = prepare(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin, records = time.monotonic(), []
    for phase in chosen:
        left = arguments.budget - (time.monotonic() - begin) if arguments.budget else None
        records.append(record(phase, session, about, arguments.out, left))
        # After each, so that whatever ends this program leaves what there is.
        (arguments.out / "summary.md").write_text(summary.markdown(records))
    print(summary.markdown(records))
    done = {found["phase"] for found in records if found["outcome"] == "passed"}
    bad = [found["phase"] for found in records if found["outcome"] in ("failed", "timed out")]
    bad += [name for name in arguments.require if name not in done and name not in bad]
    if bad:
        print(f"not right, not done in time, or not possible: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--phases", nargs="+", metavar="NAME", help="groups (one, two, peers) or single phases [default: all]")
    parser.add_argument("--require", nargs="+", default=[], metavar="NAME", help="phases that must be possible here")
    parser.add_argument("--list", action="store_true", help="show the phases and their bounds")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all phases together; what does not fit is left out")
    parser.add_argument("--out", type=Path, default=Path("gpu-records"), help="folder for the records")
    parser.add_argument("--deltalink", help="the program [default: target/release/deltalink, or that on PATH]")
    parser.add_argument("--convolution", help="the example gpu_convolution [default: beside the program]")
    parser.add_argument("--hydra", help="mpiexec.hydra [default: beside the program, or on PATH]")
    parser.add_argument("--mpirun", help="Open MPI's mpirun [default: on PATH]")
    parser.add_argument("--sanitizer", help="compute-sanitizer [default: on PATH, or CUDA's]")
    parser.add_argument("--racecheck", help="a program built with the feature racecheck, for racecheck [default: the program]")
    parser.add_argument("--soak-steps", type=int, help="steps of a soak [default: 1000, with --device cpu 20]")
    parser.add_argument("--commit", help="of which the program was built, where this is no repository")
    return parser.parse_args()


def choose(asked):
    everything = phases.all_phases()
    known = {phase.name for phase in everything} | set(GROUPS)
    unknown = [name for name in asked or [] if name not in known]
    if unknown:
        sys.exit(f"error: there is no phase {', '.join(unknown)}; --list shows all")
    return [phase for phase in everything if not asked or phase.group in asked or phase.name in asked]


def prepare(arguments):
    """What is measured with, and what a record says about it."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR", machine.REPOSITORY / "target"), "release")
    program = machine.tool(arguments.deltalink, ["deltalink"], [folder])
    if program is None:
        sys.exit(f"error: {arguments.deltalink or 'deltalink'} is not there; build it with `cargo build --release` (for GPUs "
                 "`--features cuda`), or name it with --deltalink")
    names, _ = machine.gpus()
    if arguments.device == "cuda" and not names:
        sys.exit("error: nvidia-smi shows no GPU; --device cpu tries the phases out on the CPU back end")
    beside = Path(program).parent
    convolution = machine.tool(arguments.convolution, ["gpu_convolution"], [beside, beside / "examples"])
    if arguments.racecheck and not Path(arguments.racecheck).is_file():
        sys.exit(f"error: {arguments.racecheck} is not there")
    hydra = machine.tool(arguments.hydra, ["mpiexec.hydra"], [beside])
    proxy = Path(hydra).with_name("hydra_pmi_proxy") if hydra else None
    for path in filter(None, [program, convolution, hydra, proxy, arguments.racecheck]):
        executable(path)
    session = phases.Session(
        program=program,
        device=arguments.device,
        gpus=len(names),
        convolution=convolution,
        hydra=hydra,
        mpirun=machine.open_mpi(arguments.mpirun),
        sanitizer=machine.tool(arguments.sanitizer, ["compute-sanitizer"], ["/usr/local/cuda/bin"]),
        racecheck=str(Path(arguments.racecheck).resolve()) if arguments.racecheck else program,
        mps=shutil.which(running.MPS),
        soak_steps=arguments.soak_steps or (20 if arguments.device == "cpu" else 1000),
    )
    return session, {"device": arguments.device, **machine.describe(program, arguments.commit)}


def executable(path):
    """A copy may have lost its mode."""
    if Path(path).is_file() and not os.access(path, os.X_OK):
        os.chmod(path, 0o755)


def record(phase, session, about, out, left):
    """Runs a phase and writes what came of it to PHASE.json; its files are in the folder PHASE."""
    folder = out / phase.name
    shutil.rmtree(folder, ignore_errors=True)
    found = {"schema": 1, "phase": phase.name, "group": phase.group, "outcome": "not possible", "reason": None,
             "limit_s": phase.limit_s, "mps": phase.mps(session), "wall_s": 0.0, "commands": [], "figures": None, **about,
             "date": now()}
    missing = phase.missing(session)
    if missing:
        found["reason"] = missing
    elif left is not None and left <= 0:
        found.update(outcome="left out", reason="the budget was spent")
    else:
        folder.mkdir(parents=True)
        limit = phase.limit_s if left is None else min(phase.limit_s, left)
        print(f"== {phase.name} (at most {limit:.0f} s)", file=sys.stderr, flush=True)
        begin = time.monotonic()
        try:
            outcome = measure(phase, session, folder.resolve(), limit, found["commands"])
        except Exception as error:  # whatever a phase meets, the next ones are run
            outcome = {"outcome": "failed", "reason": f"{type(error).__name__}: {error}"}
        found.update(outcome, wall_s=round(time.monotonic() - begin, 3))
        print(f"== {phase.name}: {found['outcome']}, {found['wall_s']:.1f} s", file=sys.stderr, flush=True)
    (out / f"{phase.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def measure(phase, session, folder, limit_s, done):
    """Outcome, reason and figures. What the commands did goes to `done`."""
    deadline, log = time.monotonic() + limit_s, folder / "log.txt"
    env = machine.environment()
    commands = phase.commands(session, folder)
    with running.mps(log) if phase.mps(session) else contextlib.nullcontext({}) as service:
        for command in commands:
            result = running.run(command, deadline - time.monotonic(), log, {**env, **service})
            done.append(result)
            if result["rc"] != 0:
                break
    last = done[-1]
    if last["timed_out"]:
        found = {"outcome": "timed out", "reason": f"not done after {limit_s:.0f} s"}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            # What was written until then.
            found["figures"] = phase.read(session, folder)
        return found
    failed = None if last["rc"] == 0 else f"a command ended with {last['rc']}: {last_words(log)}"
    try:
        figures = phase.read(session, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"outcome": "failed", "reason": failed or f"its report cannot be read: {type(error).__name__}: {error}"}
    good = failed is None and figures.get("passed") is not False
    return {"outcome": "passed" if good else "failed", "reason": failed or (None if good else "results are not right"),
            "figures": figures}


def last_words(log):
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1][:300]


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    sys.exit(main())
