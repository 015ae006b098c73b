"""Times of flash-linear-attention on this machine's GPUs, as JSON; `compare.py` starts it.

One process measures one GPU. Started by torch's launcher, each process is a rank of a context-parallel group over NCCL.
Every call is timed between two events on the stream, calls follow each other without a pause of the host, and of each
call the rank that took longest counts.
"""

import argparse
import importlib.metadata
import json
import math
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


SLOW = -0.004
"""The log decay about which slow gates lie."""
BOUND = -5.0
"""The bound of KDA's gate."""


def tensors(shape, draw, mean, slow):
    """q, k, v and beta. Slow gates come with keys around a mean and small steps, so that what a state held matters."""
    leaves = {name: draw(*shape) for name in ("q", "k", "v")}
    beta = draw(*shape[:3])
    if slow:
        leaves["k"] = leaves["k"] + 1.5 * mean
        beta = beta - 4.0
    return {**leaves, "beta": beta.sigmoid()}


class Kda:
    """Raw gate input with a lower bound, as `deltalink bench op --op kda` has it."""

    def __init__(self, shape, draw, mean, slow):
        _, _, heads, dim = shape
        self.leaves = tensors(shape, draw, mean, slow)
        if slow:
            share = SLOW / BOUND
            self.leaves["g"] = math.log(share / (1.0 - share)) + 0.5 * draw(*shape)
        else:
            self.leaves["g"] = 0.1 * draw(*shape)
        self.leaves["A_log"] = torch.zeros(heads, device="cuda")
        self.leaves["dt_bias"] = torch.zeros(heads * dim, device="cuda")

    def __call__(self, context):
        from fla.ops.kda import chunk_kda

        options = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, safe_gate=True, lower_bound=BOUND)
        return chunk_kda(**self.leaves, **options, cp_context=context)[0]


class Gdn:
    """The decay itself, as `deltalink bench op --op gdn` has it."""

    def __init__(self, shape, draw, mean, slow):
        self.leaves = tensors(shape, draw, mean, slow)
        x = draw(*shape[:3]).float()
        self.leaves["g"] = SLOW * (0.5 * x).exp() if slow else torch.nn.functional.logsigmoid(x)

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


def measure(arguments, heads, tokens, gates, rank, points):
    """Adds the times of both passes to `points`."""
    generator = torch.Generator(device="cuda").manual_seed(1 + rank.number)

    def draw(*shape, of=generator):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=of)

    shape = (1, tokens, heads, arguments.dim)
    # The same on all ranks.
    mean = draw(heads, arguments.dim, of=torch.Generator(device="cuda").manual_seed(0))
    problem = {"kda": Kda, "gdn": Gdn}[arguments.op](shape, draw, mean, gates == "slow")
    context = rank.context(tokens)

    def note(what, step, grad_mode):
        if rank.number == 0:
            print(f"fla {arguments.op}, {heads} heads, {tokens} tokens, {gates} gates, {what}; the first call tunes kernels",
                  file=sys.stderr, flush=True)
        point = {"heads": heads, "tokens": tokens, "gates": gates, "pass": what}
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


def case(text):
    """HEADS:TOKENS,.."""
    heads, tokens = text.split(":")
    return int(heads), [int(number) for number in tokens.split(",")]


def write(arguments, rank, points):
    """What there is, so that whatever ends this program leaves it."""
    packages = ["torch", "triton", "flash-linear-attention", "fla-core"]
    versions = {"python": platform.python_version(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    versions.update({name: version(name) for name in packages})
    settings = {name: getattr(arguments, name) for name in ("op", "dim", "warmup", "repeats")}
    draft = f"{arguments.json}.new"
    with open(draft, "w") as file:
        json.dump({"ranks": rank.count, "settings": settings, "versions": versions, "points": points}, file, indent=1)
    os.replace(draft, arguments.json)


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=["kda", "gdn"], required=True)
    parser.add_argument("--case", nargs="+", type=case, required=True, metavar="HEADS:TOKENS,..", help="tokens of each rank")
    parser.add_argument("--gates", nargs="+", choices=["fast", "slow"], required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    rank, points = Rank(), []
    for heads, lengths in arguments.case:
        for tokens in lengths:
            for gates in arguments.gates:
                measure(arguments, heads, tokens, gates, rank, points)
                if rank.number == 0:
                    write(arguments, rank, points)
    rank.close()


if __name__ == "__main__":
    main()
