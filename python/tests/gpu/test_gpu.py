"""On a machine with GPUs, with the package built for them: `pytest python/tests/gpu`. Not part of the ordinary tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import relative  # noqa: E402
from test_functional import CASES, compare, expected, gradients, random_inputs  # noqa: E402

import deltalink  # noqa: E402
from deltalink.nn import GatedDeltaNet, KimiDeltaAttention  # noqa: E402


def on_gpu(leaves):
    return {name: x.detach().cuda().requires_grad_() for name, x in leaves.items()}


def step(op, leaves, dtype=torch.float32, case="all", **options):
    case = CASES[case]
    return gradients(
        leaves,
        *getattr(deltalink, op)(
            **leaves,
            use_qk_l2norm_in_kernel=case.get("l2norm", False),
            use_gate_in_kernel="gate" in case,
            use_beta_sigmoid_in_kernel=bool(case.get("factor")),
            allow_neg_eigval=case.get("factor") == 2,
            state_v_first=case.get("v_first", False),
            cu_seqlens=case.get("cu_seqlens"),
            output_final_state=True,
            **options,
        ),
    )


@pytest.mark.parametrize("op", ["kda", "gdn"])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_against_plain_pytorch(op, dtype, limit):
    leaves = random_inputs(op, n=2, gate=True, v_first=True, dtype=dtype)
    found = step(op, on_gpu(leaves))
    assert all(x.is_cuda for x in found.values())
    compare({name: x.cpu() for name, x in found.items()}, expected(op, leaves, **CASES["all"]), limit)


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_against_the_cpu_with_bodies_for_hopper(op):
    shape = (1, 700, 2, 128)
    gate = shape if op == "kda" else shape[:3]
    leaves = {"q": torch.randn(shape), "k": torch.randn(shape), "v": torch.randn(shape), "beta": torch.rand(shape[:3])}
    leaves = {name: x.bfloat16().requires_grad_() for name, x in leaves.items()}
    leaves["g"] = (-torch.rand(gate)).requires_grad_()
    leaves["initial_state"] = torch.randn(1, 2, 128, 128).requires_grad_()
    case = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    one = gradients(leaves, *getattr(deltalink, op)(**leaves, **case))
    moved = on_gpu(leaves)
    two = gradients(moved, *getattr(deltalink, op)(**moved, **case))
    compare({name: x.cpu() for name, x in two.items()}, one, 1e-2)


def test_work_goes_into_the_current_stream():
    leaves = on_gpu(random_inputs(n=2, gate=True, v_first=True))
    plain = step("kda", leaves)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # PyTorch gets memory for each stream, and waits for the device when it does.
        step("kda", {name: (x.detach() * 2 / 2).requires_grad_() for name, x in leaves.items()})
        # Inputs that are only ready when the stream has come to them.
        torch.cuda._sleep(50_000_000)
        late = {name: (x.detach() * 2 / 2).requires_grad_() for name, x in leaves.items()}
        found = step("kda", late)
        held = {name: x.clone() for name, x in found.items()}
    assert not stream.query(), "the calls did not wait for the stream"
    stream.synchronize()
    assert all(torch.equal(held[name], plain[name]) for name in plain)


def test_many_steps_without_growing():
    leaves = on_gpu(random_inputs(n=2, gate=True, v_first=True))
    short = convolution_leaves_on_gpu(convolution_leaves(torch.float32, sequences=1))
    step("kda", leaves)
    convolved(short, cu_seqlens=[0, 700])
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0], deltalink.memory_stats()
    for _ in range(300):
        step("kda", leaves)
        convolved(short, cu_seqlens=[0, 700])
    torch.cuda.synchronize()
    assert (torch.cuda.mem_get_info()[0], deltalink.memory_stats()) == before


def convolved(leaves, **options):
    """Outputs, final states and all gradients of two convolutions at once, each ``(x, weight, bias, initial state)``."""
    xs, weights, biases, initial = zip(*leaves)
    ys, states = deltalink.short_convolutions(
        xs, weights, biases, initial_states=initial, output_final_state=True, activation="silu", **options
    )
    results = [*ys, *states]
    return results + list(torch.autograd.grad([x.float().square().sum() for x in results], [x for leaf in leaves for x in leaf]))


def convolution_leaves(dtype, channels=(200, 65), taps=4, sequences=3):
    def leaf(*shape, dtype=torch.float32):
        return torch.randn(shape).to(dtype).requires_grad_()

    def one(d):
        return leaf(1, 700, d, dtype=dtype), leaf(d, taps), leaf(d), leaf(sequences, d, taps - 1, dtype=dtype)

    return [one(d) for d in channels]


def convolution_leaves_on_gpu(leaves):
    return [tuple(x.detach().cuda().requires_grad_() for x in leaf) for leaf in leaves]


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_convolutions_against_the_cpu(dtype, limit):
    leaves = convolution_leaves(dtype)
    cu_seqlens = [0, 2, 300, 700]
    wanted = convolved(leaves, cu_seqlens=cu_seqlens)
    found = convolved(convolution_leaves_on_gpu(leaves), cu_seqlens=cu_seqlens)
    assert all(x.is_cuda for x in found)
    for one, two in zip(found, wanted, strict=True):
        assert relative(one.detach().cpu(), two.detach()) < limit


def test_convolutions_go_into_the_current_stream_without_copies():
    leaves = convolution_leaves_on_gpu(convolution_leaves(torch.bfloat16, sequences=1))
    plain = convolved(leaves)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = [tuple((x.detach() * 2 / 2).requires_grad_() for x in leaf) for leaf in leaves]
        found = convolved(late)
        held = [x.clone() for x in found]
    # A copy to the host would have waited for the stream.
    assert not stream.query(), "the calls did not wait for the stream"
    stream.synchronize()
    assert all(torch.equal(one, two) for one, two in zip(held, plain, strict=True))


def test_convolutions_in_a_graph():
    x, weight = torch.randn(1, 300, 130, device="cuda"), torch.randn(130, 4, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        deltalink.causal_conv1d(x, weight, activation="silu")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y, _ = deltalink.causal_conv1d(x, weight, activation="silu")
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, deltalink.causal_conv1d(x, weight, activation="silu")[0])


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_a_training_step_in_a_graph(op):
    leaves = on_gpu(random_inputs(op, n=2, gate=True, v_first=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(op, leaves)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step(op, leaves)
    for _ in range(3):
        with torch.no_grad():
            leaves["q"].copy_(torch.randn_like(leaves["q"]))
        graph.replay()
        held = {name: x.clone() for name, x in found.items()}
        wanted = step(op, leaves)
        assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_tensors_that_are_not_aligned_are_copied():
    whole, weight = torch.randn(1, 301, 65, device="cuda"), torch.randn(65, 4, device="cuda")
    part = whole[:, 1:]
    assert part.is_contiguous() and part.data_ptr() % 16
    found, _ = deltalink.causal_conv1d(part, weight)
    assert torch.equal(found, deltalink.causal_conv1d(part.clone(), weight)[0])


def test_symmetric_buffers_lie_on_the_gpu():
    world = deltalink.init(device="cuda")
    before = world.memory_stats()["live"]
    x = world.symmetric("x", (3, 5), torch.bfloat16)
    assert x.is_cuda and not x.any()
    view = x[1:]
    x.fill_(2)
    del x
    assert view.float().sum() == 20 and world.memory_stats()["live"] == before + 1
    del view
    assert world.memory_stats()["live"] == before


@pytest.mark.parametrize("kind", [KimiDeltaAttention, GatedDeltaNet])
def test_layers(kind):
    layer = kind(hidden_size=64, head_dim=32, num_heads=2)
    x = torch.randn(2, 50, 64)
    expected_o = layer(x)[0]
    expected_o.sum().backward()
    wanted = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    layer.cuda()
    o = layer(x.cuda())[0]
    o.sum().backward()
    assert torch.allclose(o.cpu(), expected_o, rtol=1e-3, atol=1e-4)
    for parameter, gradient in zip(layer.parameters(), wanted):
        assert torch.allclose(parameter.grad.cpu(), gradient, rtol=1e-2, atol=1e-3)


def test_compiled_autocast():
    layer = KimiDeltaAttention(hidden_size=256, head_dim=128, num_heads=2).cuda()
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(1, 300, 256, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o, plain = compiled(x)[0], layer(x)[0]
    assert o.dtype == torch.bfloat16
    assert torch.allclose(o.float(), plain.float(), rtol=0.05, atol=0.02)
    o.float().sum().backward()


def test_ranks():
    ranks = min(3, torch.cuda.device_count())
    if ranks < 2:
        pytest.fail("this test needs two GPUs; deselect it (-k 'not ranks') on a machine with one")
    program = Path(__file__).resolve().parents[1] / "ranks" / "every_rank.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*launcher, str(program), "cuda"], capture_output=True, text=True, timeout=300, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == ranks, done.stdout
