"""Tests of the comparison that need no GPU and no FLA: python3 -m unittest discover -s benches/peers"""

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compare
import page


def summary(median):
    return {"samples": 3, "p10": median - 1.0, "median": median, "p90": median + 1.0}


def own(points):
    """As `deltalink bench op --json` writes it, as far as it is read."""
    return {"deltalink": "0.1.0", "commit": "abc", "machine": {"cpu": "a CPU"},
            "settings": {"op": "kda", "key_dim": 128, "warmup": 5, "repeats": 30},
            "points": [{"tokens": tokens, "gates": gates, "pass": what, "time_us": summary(median), "tflop_s": 1, "tb_s": 1,
                        "hopper": True, "peak_device_bytes": 2**20, "mode": "overlap"}
                       for tokens, gates, what, median in points]}


def peer(points):
    """As fla_times.py writes it."""
    return {"ranks": 1, "settings": {"op": "kda", "dim": 128, "warmup": 5, "repeats": 30},
            "versions": {"torch": "2", "fla-core": "0.6"}, "points": points}


class Commands(unittest.TestCase):
    def test_what_must_be_compared_is_compared_by_default(self):
        def covered(pes):
            return {(case.op, case.heads, tokens) for case in compare.CASES[pes] for tokens in case.tokens}

        self.assertEqual(covered(1), {("kda", 32, 2048), ("kda", 32, 8192), ("kda", 32, 32768), ("kda", 8, 32768),
                                      ("gdn", 32, 8192)})
        self.assertIn(("kda", 32, 8192), covered(2))
        arguments = compare.parse([])
        self.assertEqual((arguments.gates, arguments.op, arguments.forward_only), (["fast", "slow"], ["kda", "gdn"], False))

    def test_both_sides_get_the_same_problem(self):
        arguments = compare.parse([])
        case = compare.Case("kda", 32, (2048, 8192))
        theirs = compare.fla_command(arguments, "kda", 2, [case, compare.Case("kda", 8, (64,))])
        self.assertEqual(theirs[1:5], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"])
        self.assertIn("--gates fast slow --case 32:2048,8192 8:64 --dim 128 --warmup 5 --repeats 30", " ".join(theirs))
        ours = " ".join(compare.own_command(arguments, "deltalink", 2, case))
        self.assertIn("bench op --op kda --device cuda --gates both --pes 2 --world threads --gpus 0,1", ours)
        self.assertIn("--heads 32 --tokens 2048,8192 --dim 128 --warmup 5 --repeats 30 --backward", ours)
        alone = compare.parse(["--gates", "slow", "--forward-only"])
        self.assertIn("--gates slow", " ".join(compare.own_command(alone, "deltalink", 1, case)))
        self.assertNotIn("--backward", compare.own_command(alone, "deltalink", 1, case))
        self.assertEqual(compare.fla_command(alone, "kda", 1, [case])[-1], "--forward-only")

    def test_cases_are_read_or_refused(self):
        self.assertEqual(compare.Case.parse("gdn:4:64,128"), compare.Case("gdn", 4, (64, 128)))
        for text in ("kda:4", "mamba:4:64", "kda:0:64", "kda:4:x", "kda:4:64:1"):
            with self.assertRaises(argparse.ArgumentTypeError, msg=text):
                compare.Case.parse(text)


class Rows(unittest.TestCase):
    def setUp(self):
        self.arguments = compare.parse(["--case", "kda:32:64", "--forward-only"])
        self.case = self.arguments.case[0]
        self.ours = own([(64, "fast", "forward", 10.0), (64, "slow", "forward", 20.0)])

    def rows(self, ours, theirs):
        return compare.rows_of(self.arguments, 1, self.case, ours, theirs)

    def test_a_ratio_is_of_medians_of_the_same_problem(self):
        points = [{"heads": heads, "tokens": 64, "gates": gates, "pass": "forward", "time_us": summary(median),
                   "peak_device_bytes": 2**21}
                  for heads, gates, median in ((32, "fast", 15.0), (32, "slow", 10.0), (8, "fast", 99.0))]
        rows = self.rows(self.ours, peer(points))
        self.assertEqual([row["fla_over_deltalink"] for row in rows], [1.5, 0.5])

    def test_a_side_without_a_result_leaves_its_cells_empty(self):
        for theirs in (None, peer([]), peer([{"heads": 32, "tokens": 64, "gates": "fast", "pass": "forward",
                                              "refused": "not on\n this GPU"}])):
            fast, slow = self.rows(self.ours, theirs)
            self.assertNotIn("fla_over_deltalink", fast)
            self.assertEqual((slow["fla"], slow["deltalink"]["time_us"]["median"]), ({}, 20.0))
        self.assertEqual(self.rows(None, None)[0]["deltalink"], {})

    def test_the_page_has_both_gates_side_by_side(self):
        points = [{"heads": 32, "tokens": 64, "gates": "fast", "pass": "forward", "time_us": summary(15.0),
                   "peak_device_bytes": 2**21},
                  {"heads": 32, "tokens": 64, "gates": "slow", "pass": "forward", "refused": "not on\n this GPU"}]
        report = {"date": "d", "commit": "c", "machine": {"gpus": ["X", "X"], "driver": "1"}, "versions": {"torch": "2"},
                  "settings": {"dim": 128, "dtype": "bf16", "repeats": 30}, "failures": ["it broke"],
                  "rows": self.rows(self.ours, peer(points))}
        text = page.markdown(report)
        self.assertIn("2 x X, driver 1", text)
        self.assertIn("| fast: deltalink ms | FLA ms | FLA / deltalink | slow: deltalink ms | FLA ms | FLA / deltalink |", text)
        self.assertIn("| kda | 1 | 32 | 64 | forward | 0.010 (0.009 to 0.011) | 0.015 (0.014 to 0.016) | 1.50 | "
                      "0.020 (0.019 to 0.021) | refused | - | 1 | 2 |", text)
        self.assertIn("FLA refused: not on this GPU\nFailed: it broke\n", text)


class Whole(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.folder = Path(place.name)

    def script(self, name, content, then=""):
        """A program that writes `content` to the file behind --json."""
        path = self.folder / name
        (self.folder / f"{name}.json").write_text(json.dumps(content))
        path.write_text(f'#!/bin/sh\nfor last; do :; done\ncp "{self.folder}/{name}.json" "$last"\n{then}\n')
        path.chmod(0o755)
        return path

    def compared(self, then=""):
        """Exit code and report of the whole program with both sides replaced."""
        ours = own([(64, gates, what, 10.0) for gates in compare.GATES for what in page.PASSES])
        points = [{"heads": 32, "tokens": 64, "gates": "fast", "pass": "forward", "time_us": summary(30.0),
                   "peak_device_bytes": 2**21}]
        program, theirs = self.script("deltalink", ours), self.script("fla", peer(points), then)
        smi = self.folder / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho X\n")
        smi.chmod(0o755)
        words = ["compare.py", "--op", "kda", "--case", "kda:32:64", "--deltalink", str(program), "--out", str(self.folder)]
        with mock.patch.object(sys, "argv", words), \
             mock.patch.dict(os.environ, {"PATH": f"{self.folder}:{os.environ['PATH']}"}), \
             mock.patch.object(importlib.util, "find_spec", lambda name: name), \
             mock.patch.object(compare, "fla_command", lambda *words: [str(theirs)]), \
             contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = compare.main()
        return code, json.loads((self.folder / "compare.json").read_text())

    def test_one_call_measures_both_and_writes_one_table(self):
        code, report = self.compared()
        self.assertEqual((code, report["failures"], report["commit"]), (0, [], "abc"))
        self.assertEqual(report["versions"], {"deltalink": "0.1.0", "torch": "2", "fla-core": "0.6"})
        self.assertEqual(len(report["rows"]), 4)
        self.assertEqual(report["rows"][0]["fla_over_deltalink"], 3.0)
        self.assertIn("| 3.00 |", (self.folder / "compare.md").read_text())

    def test_a_program_that_overruns_is_ended(self):
        self.assertIsNone(compare.failure_of(["true"], 60))
        self.assertEqual(compare.failure_of(["sh", "-c", "exit 3"], 60), "ended with 3")
        self.assertIn("was not done after 0.1 s", compare.failure_of(["sleep", "3600"], 0.1))

    def test_a_side_that_fails_is_named_and_what_it_had_measured_is_kept(self):
        code, report = self.compared("exit 5")
        self.assertEqual((code, len(report["failures"])), (1, 1))
        self.assertIn("ended with 5", report["failures"][0])
        self.assertEqual(report["rows"][0]["fla_over_deltalink"], 3.0)


class Number:
    """Stands for any tensor."""

    grad = None

    def __add__(self, _):
        return self

    __radd__ = __mul__ = __rmul__ = __sub__ = __add__

    def float(self):
        return self

    exp = sigmoid = float

    def requires_grad_(self, _):
        return self

    def backward(self, _):
        self.grad = self


class Event:
    def __init__(self, **_):
        pass

    def record(self):
        pass

    def elapsed_time(self, _):
        return 0.25


def fake_torch(calls):
    """As much of torch and FLA as fla_times.py asks for; FLA's functions note their calls."""
    torch = types.ModuleType("torch")
    torch.bfloat16 = torch.float64 = torch.long = None
    torch.randn = lambda *shape, **_: Number()
    torch.zeros = lambda *shape, **_: Number()
    torch.tensor = lambda values, **_: types.SimpleNamespace(tolist=lambda: values)
    torch.no_grad = contextlib.nullcontext
    torch.Generator = lambda **_: types.SimpleNamespace(manual_seed=lambda seed: seed)
    torch.nn = types.SimpleNamespace(functional=types.SimpleNamespace(logsigmoid=lambda x: x))
    torch.cuda = types.SimpleNamespace(
        reset_peak_memory_stats=lambda: None, synchronize=lambda: None, max_memory_allocated=lambda: 4096, Event=Event,
        OutOfMemoryError=MemoryError, nccl=types.SimpleNamespace(version=lambda: (2, 28)))
    distributed = types.ModuleType("torch.distributed")
    torch.distributed = distributed
    modules = {"torch": torch, "torch.distributed": distributed}
    for name in ("fla", "fla.ops", "fla.ops.kda", "fla.ops.gated_delta_rule"):
        modules[name] = types.ModuleType(name)

    def noted(refuses):
        def call(**words):
            calls.append(words)
            # After the four of the forward pass.
            if refuses and len(calls) > 4:
                raise RuntimeError("not with this Triton")
            return Number(), None

        return call

    modules["fla.ops.kda"].chunk_kda = noted(False)
    modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = noted(True)
    return modules


class Peer(unittest.TestCase):
    def measured(self, op, *words):
        calls = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "times.json")
            argv = ["fla_times.py", "--op", op, *words, "--dim", "16", "--warmup", "1", "--repeats", "3", "--json", str(path)]
            with mock.patch.dict(sys.modules, fake_torch(calls)), mock.patch.object(sys, "argv", argv), \
                 mock.patch.dict(os.environ), contextlib.redirect_stderr(io.StringIO()):
                os.environ.pop("RANK", None)
                sys.modules.pop("fla_times", None)
                importlib.import_module("fla_times").main()
                sys.modules.pop("fla_times", None)
            return json.loads(path.read_text()), calls

    def test_every_case_is_measured_with_both_gates(self):
        report, calls = self.measured("kda", "--case", "32:64,128", "8:64", "--gates", "fast", "slow")
        found = [(point["heads"], point["tokens"], point["gates"], point["pass"]) for point in report["points"]]
        want = [(heads, tokens, gates, what) for heads, tokens in ((32, 64), (32, 128), (8, 64)) for gates in ("fast", "slow")
                for what in ("forward", "both")]
        self.assertEqual(found, want)
        self.assertEqual(report["points"][0]["time_us"], {"samples": 3, "p10": 250.0, "median": 250.0, "p90": 250.0})
        self.assertEqual(set(calls[0]), {"q", "k", "v", "g", "beta", "A_log", "dt_bias", "use_qk_l2norm_in_kernel",
                                         "use_gate_in_kernel", "safe_gate", "lower_bound", "cp_context"})
        self.assertEqual(len(calls), len(want) * 4)

    def test_a_refusal_is_a_result(self):
        report, _ = self.measured("gdn", "--case", "4:64", "--gates", "slow")
        self.assertIn("time_us", report["points"][0])
        self.assertEqual(report["points"][1]["refused"], "not with this Triton")
        self.assertEqual(report["settings"], {"op": "gdn", "dim": 16, "warmup": 1, "repeats": 3})

    def test_forward_alone_is_forward_alone(self):
        report, _ = self.measured("kda", "--case", "4:64", "--gates", "fast", "--forward-only")
        self.assertEqual([point["pass"] for point in report["points"]], ["forward"])


if __name__ == "__main__":
    unittest.main()
