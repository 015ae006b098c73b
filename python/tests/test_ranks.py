"""Context parallelism over processes that torchrun starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "ranks" / "every_rank.py"


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_computes_what_one_rank_does(ranks):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*launcher, str(PROGRAM)], capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == ranks, done.stdout
