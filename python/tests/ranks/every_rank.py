"""Run by torchrun on each rank: every rank's outputs and gradients against those of one rank that holds everything.

All ranks draw the same tensors, so each can compute the whole by itself. With the argument `cuda` each rank computes on a GPU.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import deltalink
from deltalink.errors import MismatchError, WorldError
from deltalink.nn import GatedDeltaNet, KimiDeltaAttention

H, HV, K, V = 2, 4, 16, 32


def close(found, expected, limit=2e-5, what=""):
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    distance = (found.double() - expected.double()).norm()
    assert distance <= limit * expected.double().norm() + 1e-7, (what, float(distance), float(expected.norm()))


def inputs(op, b, t, n):
    shape = (b, t, HV, K) if op == "kda" else (b, t, HV)
    return {
        "q": torch.randn(b, t, H, K),
        "k": torch.randn(b, t, H, K),
        "v": torch.randn(b, t, HV, V),
        "g": torch.randn(shape) - 3,
        "beta": torch.randn(b, t, HV),
        "initial_state": torch.randn(n, HV, K, V),
        "A_log": 0.3 * torch.randn(HV),
        "dt_bias": torch.randn(shape[2:]),
    }


OPTIONS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
    "chunk_size": 16,
}


def step(op, x, d_o, d_state, **options):
    """Outputs, final states and gradients."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
    o, state = getattr(deltalink, op)(**leaves, **OPTIONS, **options)
    loss = (o * d_o).sum() + (state * d_state).sum()
    return o, state, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


def check_operation(group, op, sequences, cuts, mode="overlap", exact=False):
    """One operation, cut, against the same whole."""
    if isinstance(sequences, tuple):
        (b, t), n, cu_seqlens = sequences, sequences[0], None
        layout = {"batch_size": b, "seq_len": t}
    else:
        b, t, n, cu_seqlens = 1, sequences[-1], len(sequences) - 1, sequences
        layout = {"cu_seqlens": torch.tensor(sequences)}
    x = inputs(op, b, t, n)
    d_o, d_state = torch.randn(b, t, HV, V), torch.randn(n, HV, K, V)
    whole_o, whole_state, whole = step(op, x, d_o, d_state, cu_seqlens=cu_seqlens)

    for parameters in ("share", "sum"):
        cp = deltalink.ContextParallel(group, **layout, cuts=cuts, mode=mode, parameter_gradients=parameters)
        mine = {name: cp.shard(tensor) for name, tensor in x.items() if name in ("q", "k", "v", "g", "beta")}
        mine["initial_state"] = x["initial_state"][cp.starts]
        mine |= {name: x[name] for name in ("A_log", "dt_bias")}
        o, state, found = step(op, mine, cp.shard(d_o), d_state[cp.ends], cp=cp)
        close(o, cp.shard(whole_o), what="o")
        close(state, whole_state[cp.ends], what="state")
        for name, gradient in found.items():
            expected = whole[name]
            if name == "initial_state":
                expected = expected[cp.starts]
            elif name not in ("A_log", "dt_bias"):
                expected = cp.shard(expected)
            elif parameters == "share":
                dist.all_reduce(gradient, group=group)
            close(gradient, expected, what=(name, parameters))
        if exact:
            assert torch.equal(o, cp.shard(whole_o)) and torch.equal(found["k"], cp.shard(whole["k"]))


def convolve(x, weight, bias, initial_state, d_y, d_state, **options):
    """Outputs, final states and gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias, initial_state)]
    *parameters, initial_state = leaves
    y, state = deltalink.causal_conv1d(*parameters, initial_state=initial_state, output_final_state=True, activation="silu", **options)
    loss = (y * d_y).sum() + (state * d_state).sum()
    return y, state, torch.autograd.grad(loss, leaves)


def check_convolution(group, cu_seqlens, cuts):
    """The short convolution, cut, against the same whole, bit for bit but for sums over tokens."""
    t, n, d, taps = cu_seqlens[-1], len(cu_seqlens) - 1, 24, 4
    x, weight, bias, initial_state = torch.randn(1, t, d), torch.randn(d, taps), torch.randn(d), torch.randn(n, d, taps - 1)
    d_y, d_state = torch.randn(1, t, d), torch.randn(n, d, taps - 1)
    whole_y, whole_state, whole = convolve(x, weight, bias, initial_state, d_y, d_state, cu_seqlens=cu_seqlens)
    for parameters in ("share", "sum"):
        cp = deltalink.ContextParallel(group, cu_seqlens=cu_seqlens, cuts=cuts, parameter_gradients=parameters)
        mine = (cp.shard(x), weight, bias, initial_state[cp.starts])
        # Slots and signals are used again.
        for _ in range(3):
            y, state, (dx, dweight, dbias, d_initial) = convolve(*mine, cp.shard(d_y), d_state[cp.ends], cp=cp)
            assert torch.equal(y, cp.shard(whole_y)) and torch.equal(state, whole_state[cp.ends])
            assert torch.equal(dx, cp.shard(whole[0])) and torch.equal(d_initial, whole[3][cp.starts])
            for gradient, expected, what in ((dweight, whole[1], "weight"), (dbias, whole[2], "bias")):
                if parameters == "share":
                    dist.all_reduce(gradient, group=group)
                close(gradient, expected, what=(what, parameters))


def check_layer(group, kind, cu_seqlens, cuts, around=lambda run: run):
    """A layer, cut, against the same whole. ``around`` wraps the function that runs it."""
    layer = kind(hidden_size=32, head_dim=16, num_heads=2, num_v_heads=4)
    x = torch.randn(1, cu_seqlens[-1], 32)
    d_o = torch.randn(x.shape)
    results = []
    for cp in (None, deltalink.ContextParallel(group, cu_seqlens=cu_seqlens, cuts=cuts)):
        layer.zero_grad()
        leaf = (x if cp is None else cp.shard(x)).clone().requires_grad_()
        sequences = {"cu_seqlens": cu_seqlens} if cp is None else {"cp": cp}
        run = around(lambda y, sequences=sequences: layer(y, **sequences)[0])
        o = run(leaf)
        (o * (d_o if cp is None else cp.shard(d_o))).sum().backward()
        results.append((o.detach(), leaf.grad, [parameter.grad.clone() for parameter in layer.parameters()]))
    (whole_o, whole_dx, whole_parameters), (o, dx, parameters) = results
    close(o, cp.shard(whole_o), what="o")
    close(dx, cp.shard(whole_dx), 5e-5, what="dx")
    names = [name for name, _ in layer.named_parameters()]
    for name, share, expected in zip(names, parameters, whole_parameters):
        # What DDP or FSDP do with every parameter.
        dist.all_reduce(share, group=group)
        close(share, expected, 5e-5, what=name)


def check_worlds(rank, size, device):
    """The ways to say who computes together."""
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("cp",))
    for group in (mesh, mesh["cp"], "env"):
        world = deltalink.init(group, device=device)
        assert (world.rank, world.size) == (rank, size)
        cp = deltalink.ContextParallel(group, cu_seqlens=[0, 7 * size], device=device)
        x = torch.randn(1, 7 * size, 8)
        y, _ = deltalink.causal_conv1d(cp.shard(x), torch.ones(8, 4), cp=cp)
        whole, _ = deltalink.causal_conv1d(x, torch.ones(8, 4))
        assert torch.equal(y, cp.shard(whole))
    assert deltalink.init(mesh) is deltalink.init(mesh["cp"]), "one world for each group"

    # A group of some: the others compute alone meanwhile.
    members = [0, size - 1]
    few = dist.new_group(members)
    if rank in members:
        world = deltalink.init(few, heap_bytes=1 << 20)
        assert (world.rank, world.size) == (members.index(rank), 2)
        check_operation(few, "gdn", [0, 40], [11])
        deltalink.shutdown(few)


def check_symmetric(group):
    world = deltalink.init(group)
    before = world.memory_stats()
    x = world.symmetric("x", (4,))
    x += world.rank
    try:
        world.symmetric("y", (4 + world.rank,))
        raise AssertionError("buffers of different lengths were accepted")
    except MismatchError as error:
        assert "the length of an allocation differs: PE 0 asks for `y`" in str(error), error
    y = world.symmetric("y", (4,))
    assert x.tolist() == [world.rank] * 4 and not y.any()
    del x, y
    world.barrier("buffers are dropped")
    after = world.memory_stats()
    assert (before["live"], before["in_use"]) == (after["live"], after["in_use"]), (before, after)


def check_many_steps(group):
    """Neither heap nor handed out memory grows."""
    cp = deltalink.ContextParallel(group, cu_seqlens=[0, 20, 64], cuts=None)
    x = inputs("kda", 1, 64, 2)
    mine = {name: cp.shard(x[name]) for name in ("q", "k", "v", "g", "beta")}
    mine |= {name: x[name] for name in ("A_log", "dt_bias")}
    mine["initial_state"] = x["initial_state"][cp.starts]
    heaps = []
    for _ in range(100):
        step("kda", mine, torch.ones(1, cp.tokens, HV, V), torch.ones(len(cp.ends), HV, K, V), cp=cp)
        heaps.append(cp.world.memory_stats()["in_use"])
        assert cp.world.lent() == []
    assert len(set(heaps[1:])) == 1, heaps


def check_mismatches(rank):
    """All ranks learn what differs."""
    group = dist.new_group()
    cp = deltalink.ContextParallel(group, cu_seqlens=[0, 64])
    x = inputs("gdn", 1, 64, 1)
    mine = [cp.shard(x[name]) for name in ("q", "k", "v")] + [-cp.shard(x["g"]).exp(), cp.shard(x["beta"])]
    try:
        deltalink.gdn(*mine, scale=1.0 + rank, cp=cp)
        raise AssertionError("different scales were accepted")
    except MismatchError as error:
        text = "called with scale = 2, PE 0 with 1; all PEs must be called alike"
        assert text in str(error), error
    deltalink.shutdown(group)


def check_absence(rank, size):
    """Whoever waits for a rank that does not come gets an error that names it."""
    group = dist.new_group()
    world = deltalink.init(group, timeout=0.5)
    if rank > 0:
        try:
            world.barrier("with PE 0")
            raise AssertionError("a barrier without PE 0 was passed")
        except WorldError as error:
            assert "PE 0, which did not arrive" in str(error) or "failed" in str(error), error
    dist.barrier()
    deltalink.shutdown(group)


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.set_num_threads(1)
    torch.set_default_device(device)
    torch.manual_seed(5)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    deltalink.init(group, heap_bytes=16 << 20, timeout=30.0, workers=1)

    uneven = {2: [13], 3: [13, 58]}[size]
    few = {2: [1], 3: [1, 1]}[size]
    check_operation(group, "kda", [0, 50, 50, 61, 75], uneven)
    check_operation(group, "gdn", [0, 75], uneven)
    check_operation(group, "kda", (2, 40), few)
    check_operation(group, "gdn", [0, 60], None, mode="bulk")
    check_operation(group, "kda", [0, 96], {2: [32], 3: [32, 48]}[size], mode="exact", exact=True)

    check_convolution(group, [0, 30, 44], {2: [29], 3: [2, 31]}[size])
    check_convolution(group, [0, 44], {2: [1], 3: [20, 21]}[size])
    check_layer(group, KimiDeltaAttention, [0, 30, 44], {2: [29], 3: [2, 31]}[size])
    check_layer(group, GatedDeltaNet, [0, 44], {2: [29], 3: [2, 4]}[size])
    if size == 2:
        compiled = lambda run: torch.compile(run, fullgraph=True, backend="aot_eager")  # noqa: E731
        check_layer(group, GatedDeltaNet, [0, 44], [29], compiled)
    saved = lambda run: lambda y: checkpoint(run, y, use_reentrant=False)  # noqa: E731
    check_layer(group, KimiDeltaAttention, [0, 44], {2: [29], 3: [9, 20]}[size], saved)

    # Where NVSHMEM serves a world, it is the only one of a process.
    if device == "cpu":
        check_worlds(rank, size, device)
    check_symmetric(group)
    check_many_steps(group)
    if device == "cpu":
        check_mismatches(rank)
        check_absence(rank, size)
    deltalink.shutdown()
    dist.destroy_process_group()
    print(f"rank {rank} of {size}: all is well")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
