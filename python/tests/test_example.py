"""examples/train_lm at toy size: a model trains, two ranks train the same one, and runs are compared."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_lm"
OPTIONS = "--device cpu --dtype float32 --steps 4 --tokens 65 --hidden 32 --head-dim 16 --layers 2".split()


def losses(*launcher, options=()):
    command = [*launcher, str(EXAMPLE / "train.py"), *OPTIONS, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    line = re.search(r"^losses (.*)$", done.stdout, re.MULTILINE)
    return [float(loss) for loss in line.group(1).split()]


def test_two_ranks_train_the_model_of_one():
    one = losses(sys.executable)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    two = losses(*torchrun)
    assert one[-1] < one[0] - 0.3, one
    assert all(abs(a - b) < 2e-3 for a, b in zip(one, two, strict=True)), (one, two)


def test_runs_are_compared(tmp_path):
    reports = []
    for backend in ("overlap", "bulk"):
        reports.append(tmp_path / f"{backend}.json")
        losses(sys.executable, options=["--backend", backend, "--warmup", "1", "--json", str(reports[-1])])
    found = [json.loads(report.read_text()) for report in reports]
    for run in found:
        assert run["ranks"] == 1 and run["warmup_steps"] == 1 and len(run["losses"]) == 4
        parts = [run[name] for name in ("rules_forward_ms", "rules_backward_ms", "rest_ms")]
        assert min(parts) > 0 and abs(sum(parts) - run["step_ms"]) < 1e-6, run
        assert abs(run["tokens_per_s"] * run["step_ms"] - 65e3) < 1e-3, run
    picture = tmp_path / "losses.svg"
    command = [sys.executable, str(EXAMPLE / "compare.py"), *map(str, reports), "--svg", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n| ") == 2 and "| bulk | 1 | " in done.stdout and "| 1.00 |" in done.stdout, done.stdout
    assert picture.read_text().count("<polyline") == 2
