"""On a machine with GPUs, with the package built for them: `pytest python/tests/gpu`. Not part of the ordinary tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
    step("kda", leaves)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0], deltalink.memory_stats()
    for _ in range(300):
        step("kda", leaves)
    torch.cuda.synchronize()
    assert (torch.cuda.mem_get_info()[0], deltalink.memory_stats()) == before


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
