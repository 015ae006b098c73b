#!/usr/bin/env python3
"""Trains a small language model whose layers are KDA, GDN or both in turn, with its sequences cut over all ranks.

    python examples/train_lm/train.py                                                  # one process
    torchrun --nproc-per-node 2 examples/train_lm/train.py --backend overlap           # two, each with half of every sequence
    torchrun --nproc-per-node 2 examples/train_lm/train.py --backend bulk              # the same without overlap

Tokens are the bytes of a text that this program makes up: sums, written out, whose digits depend on what stands far before them. With the
same seed every number of ranks and every backend of this library computes the same losses, but for rounding; the last line prints them.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from measure import Marks, Memory, Report, RuleClock, write
from model import HybridLM, ModelConfig

BYTES = 256


def make_text(length: int, seed: int) -> bytes:
    """Lines such as `12 + 30 = 42; 42 + 7 = 49;`, each sum going on from the last one."""
    source, text, total = random.Random(seed), [], 0
    size = 0
    while size < length:
        step = source.randrange(100)
        piece = f"{total} + {step} = {total + step}; "
        total = (total + step) % 1000 if source.random() < 0.9 else 0
        text.append(piece)
        size += len(piece)
    return "".join(text).encode()[:length]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("overlap", "bulk", "fla"), default="overlap",
                        help="this library with or without overlap, or flash-linear-attention (GPUs, equal cuts)")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the autocast region")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512, help="of each sequence, all ranks together")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--mixers", nargs="+", choices=("kda", "gdn"), default=["kda", "gdn"], help="kinds of layers, in turn")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=5, help="first steps, whose times do not count")
    parser.add_argument("--json", type=Path, help="where to write times, memory and losses; see compare.py")
    return parser.parse_args()


def make_context(options: argparse.Namespace, group):
    """What the layers get to know of the cut, by backend; `None` on one process."""
    if options.backend == "fla":
        if group is None:
            return None
        from fla.ops.cp import build_cp_context

        offsets = torch.tensor([0, options.tokens], dtype=torch.long, device=options.device)
        return build_cp_context(offsets, group=group, conv1d_kernel_size=4)
    import deltalink

    # All that context parallelism takes; the layers get `cp=cp`.
    return deltalink.ContextParallel(group, cu_seqlens=[0, options.tokens], device=options.device, mode=options.backend)


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    ranks, rank, group = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0)), None
    if ranks > 1:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        group = dist.group.WORLD
    memory = Memory(device)
    cp = make_context(options, group)

    config = ModelConfig(BYTES, options.hidden, options.heads, options.head_dim, options.layers, tuple(options.mixers))
    # The same parameters everywhere: made from the same seed.
    model = HybridLM(config, options.backend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)

    text = torch.frombuffer(bytearray(make_text(1 << 16, options.seed)), dtype=torch.uint8).long()
    # Equal shares; the first ranks take the remainder, as the library cuts.
    bounds = [r * (options.tokens // ranks) + min(r, options.tokens % ranks) for r in range(ranks + 1)]
    mine = slice(bounds[rank], bounds[rank + 1])
    starts = random.Random(options.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    settings = ("backend", "device", "dtype", "tokens", "hidden", "heads", "head_dim", "layers", "mixers", "seed")
    about = {"ranks": ranks, "parameters": parameters, **{name: getattr(options, name) for name in settings}}
    clock, report = RuleClock(model, Marks(device)), Report(about, options.warmup)
    for _ in range(options.steps):
        begin = starts.randrange(len(text) - options.tokens)
        # The target of a rank's last token is the first one of the next rank, so both are cut from the whole.
        tokens = text[begin : begin + options.tokens][mine].unsqueeze(0).to(device)
        targets = text[begin + 1 : begin + options.tokens + 1][mine].unsqueeze(0).to(device)
        started = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.dtype == "bfloat16"):
            logits = model(tokens, cp)
        # This rank's share of the mean over all tokens.
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / options.tokens
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if group is not None:
            # Gradients of all parameters are sums over tokens, so the ranks' shares add up.
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
            dist.all_reduce(total, group=group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # Reading the loss waits for the device.
        report.add(float(total), time.perf_counter() - started, clock.take())

    peak = torch.tensor(memory.peak(), device=device)
    if group is not None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    if rank == 0:
        found = report.summary(int(peak))
        print(
            f"{options.backend}, {ranks} ranks, {options.tokens} tokens on {device.type}: median step {found['step_ms']:.1f} ms "
            f"({found['tokens_per_s']:.0f} tokens/s), of which delta rules {found['rules_forward_ms']:.1f} ms forward and "
            f"{found['rules_backward_ms']:.1f} ms backward"
        )
        print("losses " + " ".join(f"{loss:.4f}" for loss in found["losses"]))
        if options.json:
            write(options.json, found)
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
