"""examples/train_lm at toy size: a model trains, and two ranks train the same one."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_lm"
OPTIONS = "--device cpu --dtype float32 --steps 4 --tokens 65 --hidden 32 --head-dim 16 --layers 2".split()


def losses(*launcher):
    command = [*launcher, str(EXAMPLE / "train.py"), *OPTIONS]
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
