"""Tests of the recording that need neither a GPU nor the program: python3 -m unittest discover -s benches/gpus"""

import array
import dataclasses
import json
import math
import os
import stat
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
import phases
import record
import running
import summary
import tensors

ABOUT = {"device": "cpu", "machine": {"cpu": "x", "cores": 1, "kernel": "1", "gpus": []}, "driver": None, "versions": {},
         "commit": None}


def session(**words):
    given = dict(program="deltalink", device="cuda", gpus=2, convolution=None, hydra=None, mpirun=None, sanitizer=None,
                 racecheck="deltalink", mps=None, soak_steps=1000)
    return phases.Session(**{**given, **words})


def phase(commands, read=lambda session, folder: {}, limit_s=60, **words):
    return phases.Phase("tried", "one", limit_s, commands, read, **words)


class Folder(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.folder = Path(place.name)

    def script(self, name, text):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def recorded(self, tried, left=None):
        with mock.patch("sys.stderr", open(os.devnull, "w")) as sink:
            self.addCleanup(sink.close)
            found = record.record(tried, session(), ABOUT, self.folder, left)
        self.assertEqual(json.loads((self.folder / "tried.json").read_text()), found)
        return found


class Running(Folder):
    def test_what_overruns_is_ended_with_all_that_it_started(self):
        pids = self.folder / "pids"
        # One process in a session of its own that ignores the request to stop, one in this session.
        tree = self.script("tree", f"""setsid sh -c 'trap "" TERM; echo $$ >> {pids}; while :; do sleep 1; done' &
sleep 3600 &
echo $! >> {pids}
while [ "$(wc -l < {pids})" -lt 2 ]; do sleep 0.01; done
touch {self.folder}/ready
wait""")
        begun = time.monotonic()
        limit = 1.0
        # A busy machine may need longer until all are there.
        while not (self.folder / "ready").exists():
            pids.unlink(missing_ok=True)
            with mock.patch.object(running, "GRACE_S", 0.3):
                result = running.run(running.Command([tree]), limit, self.folder / "log")
            limit *= 2
            self.assertLess(time.monotonic() - begun, 300)
        self.assertTrue(result["timed_out"])
        self.assertIsNone(result["rc"])
        left = [running.stat_of(int(pid)) for pid in pids.read_text().split()]
        self.assertEqual(len(left), 2)
        for found in left:
            self.assertTrue(found is None or found[0] in "ZX", found)

    def test_how_it_ended_and_what_it_wrote_are_kept(self):
        log = self.folder / "log"
        result = running.run(running.Command(["sh", "-c", "echo out; echo err >&2; exit $CODE"], {"CODE": "7"}), 60, log)
        self.assertEqual((result["rc"], result["timed_out"]), (7, False))
        self.assertTrue(log.read_text().endswith("out\nerr\n"))
        self.assertIsNone(running.run(running.Command(["./no-such-program"]), 60, log)["rc"])
        self.assertIn("cannot be started", log.read_text())

    def test_the_service_is_ended_whatever_happens(self):
        calls = self.folder / "calls"
        self.script(running.MPS, f'echo "$@ $(test -d "$CUDA_MPS_PIPE_DIRECTORY" && echo there) $(cat)" >> {calls}')
        with mock.patch.dict(os.environ, {"PATH": f"{self.folder}:{os.environ['PATH']}"}):
            with self.assertRaisesRegex(RuntimeError, "a phase failed"):
                with running.mps(self.folder / "log") as env:
                    pipe = Path(env["CUDA_MPS_PIPE_DIRECTORY"])
                    self.assertTrue(pipe.is_dir())
                    raise RuntimeError("a phase failed")
            self.assertFalse(pipe.exists())
            self.assertEqual([line.split() for line in calls.read_text().splitlines()], [["-d", "there"], ["there", "quit"]])
            self.script(running.MPS, "exit 3")
            with self.assertRaisesRegex(RuntimeError, "ended with 3"):
                with running.mps(self.folder / "log"):
                    self.fail("it did not start")


class Recording(Folder):
    def test_a_phase_that_overruns_is_recorded_as_such(self):
        found = self.recorded(phase(lambda session, folder: [running.Command(["sleep", "3600"])],
                                    lambda session, folder: phases.report(folder), limit_s=0.2))
        self.assertEqual((found["outcome"], found["reason"]), ("timed out", "not done after 0 s"))
        self.assertTrue(found["commands"][0]["timed_out"])
        self.assertIsNone(found["figures"])
        some = self.recorded(phase(lambda session, folder: [running.Command(["sleep", "3600"])],
                                   lambda session, folder: {"rows": [1]}, limit_s=0.2))
        self.assertEqual((some["outcome"], some["figures"]), ("timed out", {"rows": [1]}))

    def test_the_first_command_that_fails_is_the_last_and_named(self):
        commands = [running.Command(["sh", "-c", "echo 'error: it broke' >&2; exit 2"]), running.Command(["true"])]
        found = self.recorded(phase(lambda session, folder: commands))
        self.assertEqual((found["outcome"], len(found["commands"])), ("failed", 1))
        self.assertEqual(found["reason"], "a command ended with 2: error: it broke")

    def test_wrong_results_fail_although_the_command_did_not(self):
        right = phase(lambda session, folder: [running.Command(["true"])], lambda session, folder: {"passed": True})
        wrong = phase(right.commands, lambda session, folder: {"passed": False})
        unreadable = phase(right.commands, lambda session, folder: phases.report(folder))
        self.assertEqual(self.recorded(right)["outcome"], "passed")
        self.assertEqual(self.recorded(wrong)["reason"], "results are not right")
        self.assertIn("its report cannot be read: FileNotFoundError", self.recorded(unreadable)["reason"])

    def test_what_the_machine_lacks_and_what_does_not_fit_are_told(self):
        def never(session, folder):
            raise AssertionError("it is not to run")

        lacking = self.recorded(phase(never, missing=lambda session: "no such tool"))
        self.assertEqual((lacking["outcome"], lacking["reason"]), ("not possible", "no such tool"))
        self.assertEqual(self.recorded(phase(never), left=0)["outcome"], "left out")
        self.assertEqual(self.recorded(phase(never))["reason"], "AssertionError: it is not to run")

    def test_the_page_has_a_row_for_each_phase(self):
        found = [self.recorded(phase(lambda session, folder: [running.Command(["true"])],
                                     lambda session, folder: {"passed": True, "cases": 5, "failed": 0}))]
        self.assertIn("| tried | passed |", summary.markdown(found))
        self.assertIn("5 cases, 0 failed", summary.markdown(found))
        self.assertIn("No phase was run", summary.markdown([]))


class Phases(Folder):
    def test_names_are_unique_and_groups_known(self):
        everything = phases.all_phases()
        names = [found.name for found in everything]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual({found.group for found in everything}, set(record.GROUPS))
        self.assertFalse(set(names) & set(record.GROUPS))

    def test_on_gpus_every_phase_has_its_device_and_a_bound(self):
        full = session(convolution="c", hydra="h", mpirun="m", sanitizer="s", mps="n")
        with mock.patch.object(tensors, "problem", lambda *words: ({}, {})):
            for found in phases.all_phases():
                self.assertLessEqual(found.limit_s, 600)
                words = [str(word) for command in found.commands(full, self.folder) for word in command.argv]
                on_gpu = "cuda" in words or found.group == "peers" or "doctor" in words
                self.assertTrue(on_gpu, (found.name, words))
                self.assertNotIn("--case", words)

    def test_what_is_timed_over_two_gpus_needs_two_and_what_is_checked_can_share_one(self):
        one = session(gpus=1, convolution="c", hydra="h", mpirun="m", sanitizer="s", mps="n")
        without = dataclasses.replace(one, mps=None)
        for found in phases.all_phases():
            if found.group != "two":
                self.assertFalse(found.mps(one), found.name)
            if found.group == "one":
                self.assertIsNone(found.missing(one), found.name)
            elif found.group == "two" and found.mps(one):
                self.assertIn(found.missing(one), (None, "this Python has no torch"), found.name)
                self.assertIn("nvidia-cuda-mps-control", found.missing(without), found.name)
                self.assertFalse(found.mps(session(gpus=2)) and not found.name.startswith("mps-"), found.name)
            elif found.group == "two":
                self.assertEqual(found.missing(one), "it needs two GPUs, there are 1", found.name)
        shared = {found.name for found in phases.all_phases() if found.mps(one)}
        self.assertTrue({"processes-backward", "hydra", "open-mpi", "soak", "mps-8"} <= shared, shared)
        self.assertFalse({"comm-auto", "modes-forward", "timeline-forward"} & shared, shared)


class Tensors(Folder):
    def test_bf16_is_the_nearest_ties_to_even(self):
        for x, bits in ((1.0, 0x3F80), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (-2.0, 0xC000), (1.004, 0x3F81)):
            self.assertEqual(tensors.to_bf16(x), bits, x)
        self.assertEqual(list(tensors.from_bf16(array.array("H", [0x3F80, 0xC000]))), [1.0, -2.0])

    def test_a_file_is_read_as_it_was_written(self):
        for op in ("kda", "gdn"):
            path = self.folder / f"{op}.safetensors"
            written, metadata = tensors.problem(op, 5, 2, 16)
            tensors.save(path, written, metadata)
            read = tensors.load(path)
            self.assertEqual(set(read), set(written))
            for name, (dtype, shape, data) in written.items():
                want = tensors.from_bf16(data) if dtype == "BF16" else data
                self.assertEqual((len(data), read[name]), (math.prod(shape), want), name)

    def test_what_is_not_finite_or_missing_is_not_accurate(self):
        def file(name, o, ht=(1.0, 2.0)):
            path = self.folder / name
            of = {"o": ("F32", [len(o)], array.array("f", o))}
            if ht:
                of["ht"] = ("F32", [len(ht)], array.array("f", ht))
            tensors.save(path, of, {})
            return path

        want = file("want", [3.0, 4.0])
        self.assertTrue(figures.accuracy(file("near", [3.0, 4.008]), want, 2e-3)["passed"])
        for name, o, ht in (("off", [3.0, 4.02], (1.0, 2.0)), ("nan", [math.nan, 4.0], (1.0, 2.0)),
                            ("short", [3.0], (1.0, 2.0)), ("less", [3.0, 4.0], ())):
            self.assertFalse(figures.accuracy(file(name, o, ht), want, 2e-3)["passed"], name)


class Figures(unittest.TestCase):
    def test_a_sanitizer_that_said_nothing_found_nothing_out(self):
        clean = "========= ERROR SUMMARY: 0 errors\n"
        self.assertTrue(figures.sanitizer(clean)["passed"])
        self.assertTrue(figures.sanitizer("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n")["passed"])
        for text in ("", "ERROR SUMMARY: 2 errors\n", clean + "ERROR SUMMARY: 1 error\n",
                     "RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"):
            self.assertFalse(figures.sanitizer(text)["passed"], text)

    def test_what_ran_on_the_cpu_alone_is_no_record_of_a_gpu(self):
        rows = {"passed": True, "rows": [{"cases": 2, "failures": 0}], "gpu": None}
        self.assertEqual([figures.tiles(rows, on_gpu)["passed"] for on_gpu in (False, True)], [True, False])
        self.assertTrue(figures.tiles({**rows, "gpu": "X"}, True)["passed"])
        on_cpu = {"item": "self-test on the CPU", "status": "ok", "found": "2 PEs"}
        on_gpu = {"item": "self-test on one GPU", "status": "ok", "found": "2 PEs"}
        for findings, wanted, passed in (([on_cpu], False, True), ([on_cpu], True, False), ([on_cpu, on_gpu], True, True),
                                         ([on_cpu, {**on_gpu, "status": "failed"}], True, False), ([], False, False)):
            self.assertEqual(figures.self_test({"findings": findings}, wanted)["passed"], passed, findings)

    def test_convolutions_are_counted(self):
        text = "f32, 2 taps, cuts Equal(1): 1e-7, in f32 1e-7: pass\nforward, again, PE 0: convolve 12.0 us, 90 GB/s of tokens\n"
        good = figures.convolution(text)
        self.assertEqual((good["passed"], good["comparisons"], len(good["times"])), (True, 1, 1))
        self.assertFalse(figures.convolution(text.replace("pass", "FAIL"))["passed"])
        self.assertFalse(figures.convolution("")["passed"])

    def test_every_input_of_a_run_must_be_right(self):
        def report(passed):
            return {"error": {"o": {"rel_rms": 1e-7}}, "passed": passed,
                    **{name: 1 for name in ("input", "op", "dtype", "pes", "world", "mode", "waits", "transport",
                                            "transition_weight", "exposed_wait_us")}}

        self.assertTrue(figures.run([report(True), report(True)])["passed"])
        for reports in ([], [report(True), report(False)], [report(None)]):
            self.assertFalse(figures.run(reports)["passed"])

    def test_a_step_without_messages_proves_nothing(self):
        said = {"span_ns": 5000, "pes": [], "heads": {"sent": 2, "sent_while_scanning": 1, "soonest_ns": -300}}
        self.assertTrue(figures.trace(said)["passed"])
        self.assertEqual(figures.trace(said)["soonest_arrival_us"], -0.3)
        said["heads"] = {"sent": 0, "sent_while_scanning": 0, "soonest_ns": None}
        self.assertFalse(figures.trace(said)["passed"])


class CommandLine(Folder):
    def test_told_to_stop_it_ends_what_it_has_started(self):
        pid = self.folder / "pid"
        program = self.script("deltalink", f'[ "$1" = --version ] && exit; echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 3600')
        words = ["--device", "cpu", "--phases", "comm-auto", "--deltalink", program, "--out", self.folder / "records"]
        child = subprocess.Popen([sys.executable, record.__file__, *words], stderr=subprocess.DEVNULL)
        begun = time.monotonic()
        while not pid.exists():
            self.assertLess(time.monotonic() - begun, 300)
            time.sleep(0.01)
        child.terminate()
        self.assertEqual(child.wait(timeout=300), 143)
        stat_now = running.stat_of(int(pid.read_text()))
        self.assertTrue(stat_now is None or stat_now[0] in "ZX", stat_now)

    def test_unknown_phases_are_refused(self):
        done = subprocess.run([sys.executable, record.__file__, "--phases", "tree"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (1, "error: there is no phase tree; --list shows all\n"))

    def test_phases_are_listed(self):
        done = subprocess.run([sys.executable, record.__file__, "--list", "--phases", "two"], capture_output=True, text=True,
                              check=True)
        self.assertIn("timeline-training", done.stdout)
        self.assertNotIn("verify-forward", done.stdout)


if __name__ == "__main__":
    unittest.main()
