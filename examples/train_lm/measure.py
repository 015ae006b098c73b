"""What a training step takes: time of its delta rules and of the rest, memory.

Delta rules are timed on the device between marks in the stream: around each call of a layer's ``rule``, and from the moment when the
gradient of its output is there to the moment when that of q is. On a CPU the host's clock makes the marks.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import nn


class Marks:
    """Points in time on a device."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"

    def mark(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin, end) -> float:
        """Between two marks, both of which the device has passed."""
        return begin.elapsed_time(end) / 1e3 if self.on_gpu else end - begin


class RuleClock:
    """Times the delta rules of a model's layers, forward and backward, summed over the layers of a step."""

    def __init__(self, model: nn.Module, marks: Marks):
        self.marks, self.spans = marks, {"forward": [], "backward": []}
        for module in model.modules():
            if hasattr(module, "rule"):
                module.rule = self._around(module.rule)

    def _around(self, rule):
        def timed(q, *inputs, **options):
            begin = self.marks.mark()
            result = rule(q, *inputs, **options)
            self.spans["forward"].append((begin, self.marks.mark()))
            output = result[0]
            if output.requires_grad and q.requires_grad:
                arrived = []
                output.register_hook(lambda _: arrived.append(self.marks.mark()))
                q.register_hook(lambda _: self.spans["backward"].append((arrived.pop(), self.marks.mark())))
            return result

        return timed

    def take(self) -> dict[str, float]:
        """Seconds since the last call, all of which the device has passed."""
        taken = {name: sum(self.marks.seconds(*span) for span in spans) for name, spans in self.spans.items()}
        self.spans = {"forward": [], "backward": []}
        return taken


class Memory:
    """Memory of this process's GPU: tensors at their most, and what libraries took beside PyTorch's allocator, which they keep. The latter
    is told by what is free on the GPU, so nobody else may use it. 0 on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.before = self._beside() if device.type == "cuda" else 0

    def _beside(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def peak(self) -> int:
        if self.device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated(self.device) + max(self._beside() - self.before, 0)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


class Report:
    """Steps of one run."""

    def __init__(self, about: dict, warmup: int):
        self.about, self.warmup = about, warmup
        self.steps: list[dict[str, float]] = []
        self.losses: list[float] = []

    def add(self, loss: float, seconds: float, rules: dict[str, float]) -> None:
        self.losses.append(loss)
        self.steps.append({"step": seconds, **rules})

    def summary(self, peak_bytes: int) -> dict:
        """``peak_bytes``: of the rank that took most, see :class:`Memory`."""
        # The first steps tune kernels and fill caches. A run of fewer has nothing else.
        steps = self.steps[self.warmup :] or self.steps
        times = {name: 1e3 * median([step[name] for step in steps]) for name in ("step", "forward", "backward")}
        return {
            **self.about,
            "warmup_steps": len(self.steps) - len(steps),
            "step_ms": times["step"],
            "rules_forward_ms": times["forward"],
            "rules_backward_ms": times["backward"],
            "rest_ms": times["step"] - times["forward"] - times["backward"],
            "tokens_per_s": 1e3 * self.about["tokens"] / times["step"],
            "peak_memory_bytes": peak_bytes,
            "losses": self.losses,
        }


def write(path: Path, summary: dict) -> None:
    path.write_text(json.dumps(summary, indent=1) + "\n")
