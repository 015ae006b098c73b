"""Times of flash-linear-attention on this machine's GPUs, as JSON; `compare.py` starts it.

One process measures one GPU. Started by torch's launcher, each process is a rank of a context-parallel group over NCCL.
Every call is timed between two events on the stream, calls follow each other without a pause of the host, and of each
call the rank that took longest counts.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist


class Rank:
    """This process's place among the others; alone it is the only one."""

    def __init__(self):
        self.together = "RANK" in os.environ
        if self.together:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl")
        self.number = dist.get_rank() if self.together else 0
        self.count = dist.get_world_size() if self.together else 1

    def context(self, tokens):
        """FLA's description of one sequence of `tokens` on each rank; none where there is one rank."""
        if not self.together:
            return None
        from fla.ops.cp import build_cp_context

        ends = torch.tensor([0, tokens * self.count], dtype=torch.long, device="cuda")
        # It also describes the convolution before the operation, which is not measured.
        return build_cp_context(ends, group=dist.group.WORLD, conv1d_kernel_size=4)

    def meet(self):
        torch.cuda.synchronize()
        if self.together:
            dist.barrier()
            torch.cuda.synchronize()

    def largest(self, values):
        values = torch.tensor(values, dtype=torch.float64, device="cuda")
        if self.together:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.tolist()

    def close(self):
        if self.together:
            dist.destroy_process_group()


class Kda:
    """Raw gate input with a lower bound, as `deltalink bench op --op kda --gates fast` has it."""

    def __init__(self, shape, draw):
        _, _, heads, dim = shape
        self.leaves = {name: draw(*shape) for name in ("q", "k", "v")}
        self.leaves["g"] = 0.1 * draw(*shape)
        self.leaves["beta"] = draw(*shape[:3]).sigmoid()
        self.leaves["A_log"] = torch.zeros(heads, device="cuda")
        self.leaves["dt_bias"] = torch.zeros(heads * dim, device="cuda")

    def __call__(self, context):
        from fla.ops.kda import chunk_kda

        options = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0)
        return chunk_kda(**self.leaves, **options, cp_context=context)[0]


class Gdn:
    """The decay itself, as `deltalink bench op --op gdn --gates fast` has it."""

    def __init__(self, shape, draw):
        self.leaves = {name: draw(*shape) for name in ("q", "k", "v")}
        self.leaves["g"] = torch.nn.functional.logsigmoid(draw(*shape[:3]).float())
        self.leaves["beta"] = draw(*shape[:3]).sigmoid()

    def __call__(self, context):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(**self.leaves, use_qk_l2norm_in_kernel=True, cp_context=context)[0]


def timed(step, rank, warmup, repeats):
    """Milliseconds of each of `repeats` calls, and the memory in bytes that they needed at most."""
    for _ in range(warmup):
        step()
    torch.cuda.reset_peak_memory_stats()
    rank.meet()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in zip(marks, marks[1:])]
    return rank.largest(times), int(rank.largest([torch.cuda.max_memory_allocated()])[0])


def quantiles(times):
    """Median and tenths, interpolated as deltalink does it."""
    ordered = sorted(times)

    def at(fraction):
        place = fraction * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    return {"samples": len(ordered), "p10": at(0.1), "median": at(0.5), "p90": at(0.9)}


def measure(arguments, tokens, rank):
    generator = torch.Generator(device="cuda").manual_seed(1 + rank.number)

    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    shape = (1, tokens, arguments.heads, arguments.dim)
    problem = {"kda": Kda, "gdn": Gdn}[arguments.op](shape, draw)
    context = rank.context(tokens)
    points = []

    def note(what, step, grad_mode):
        if rank.number == 0:
            print(f"fla {arguments.op}, {tokens} tokens, {what}; the first call tunes kernels", file=sys.stderr)
        point = {"tokens": tokens, "pass": what}
        try:
            with grad_mode:
                times, peak = timed(step, rank, arguments.warmup, arguments.repeats)
            point["time_us"] = {name: x if name == "samples" else 1e3 * x for name, x in quantiles(times).items()}
            point["peak_device_bytes"] = peak
        except (RuntimeError, NotImplementedError) as refused:
            # FLA refuses some combinations of GPU and Triton, on all ranks alike. A table must say so, not leave it out.
            if isinstance(refused, torch.cuda.OutOfMemoryError):
                raise
            point["refused"] = str(refused)[:300]
        points.append(point)

    note("forward", lambda: problem(context), torch.no_grad())
    if not arguments.forward_only:
        for leaf in problem.leaves.values():
            leaf.requires_grad_(True)
        upstream = draw(*shape)

        def forward_and_backward():
            problem(context).backward(upstream)
            for leaf in problem.leaves.values():
                leaf.grad = None

        note("both", forward_and_backward, nullcontext())
    return points


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=["kda", "gdn"], required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="of each rank")
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    rank = Rank()
    points = [point for tokens in arguments.tokens for point in measure(arguments, tokens, rank)]
    if rank.number == 0:
        packages = ["torch", "triton", "flash-linear-attention", "fla-core"]
        versions = {"python": platform.python_version(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        versions.update({name: version(name) for name in packages})
        with open(arguments.json, "w") as file:
            settings = {name: getattr(arguments, name) for name in ("op", "heads", "dim", "warmup", "repeats")}
            json.dump({"ranks": rank.count, "settings": settings, "versions": versions, "points": points}, file, indent=1)
    rank.close()


if __name__ == "__main__":
    main()
