"""The operations under what PyTorch does with operators: compiled graphs, autocast, checkpoints, its own checks."""

import pytest
import torch
from test_functional import random_inputs
from torch.utils.checkpoint import checkpoint

import deltalink
from deltalink import ops
from deltalink.nn import GatedDeltaNet, KimiDeltaAttention


def layer_and_input(kind=KimiDeltaAttention, **options):
    layer = kind(hidden_size=32, head_dim=16, num_heads=2, **options)
    return layer, torch.randn(2, 11, 32, requires_grad=True)


def gradients_of(layer, x, forward):
    layer.zero_grad()
    x.grad = None
    forward(x).square().sum().backward()
    return [x.grad.clone(), *(parameter.grad.clone() for parameter in layer.parameters())]


@pytest.mark.parametrize("kind", [KimiDeltaAttention, GatedDeltaNet])
def test_compiled_without_a_break(kind):
    layer, x = layer_and_input(kind)
    # Without the code generator, which needs a C++ compiler and minutes: it never sees inside these operators.
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    one = gradients_of(layer, x, lambda x: layer(x)[0])
    two = gradients_of(layer, x, lambda x: compiled(x)[0])
    for a, b in zip(one, two):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(compiled(x)[0], layer(x)[0], rtol=1e-4, atol=1e-6)


def test_compiled_for_changing_lengths():
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(q, k, v, g, beta, initial_state):
        return deltalink.kda(q, k, v, g, beta, initial_state=initial_state, output_final_state=True)

    for tokens in (5, 9, 30):
        leaves = random_inputs(t=tokens)
        found, expected = step(**leaves), deltalink.kda(**leaves, output_final_state=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_compiled_with_a_context():
    cp = deltalink.ContextParallel(cu_seqlens=[0, 7, 23])
    leaves = random_inputs(n=2)
    compiled = torch.compile(deltalink.kda, fullgraph=True, backend="aot_eager")
    found = compiled(**leaves, output_final_state=True, cp=cp)
    expected = deltalink.kda(**leaves, output_final_state=True, cu_seqlens=[0, 7, 23])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_torch_finds_the_operators_well_formed():
    leaves = list(random_inputs().values())
    options = (None, "kda", None, True, "given", 0.0, 0.0, False, 64, True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.attention, (*leaves[:5], None, None, leaves[5], *options, True, 0), test_utils=checks)
    x, weight = torch.randn(1, 9, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    torch.library.opcheck(ops.convolutions, ([x], [weight], [], [], None, True, True, True, 0), test_utils=checks)


def test_autocast_sets_the_element_type():
    layer, x = layer_and_input()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _, _ = layer(x)
        assert o.dtype == torch.bfloat16
        leaves = random_inputs()
        direct, _ = deltalink.kda(**leaves, use_qk_l2norm_in_kernel=True)
        assert direct.dtype == torch.bfloat16
        y, _ = deltalink.causal_conv1d(torch.randn(1, 4, 8), torch.randn(8, 4))
        assert y.dtype == torch.bfloat16
    o.float().square().sum().backward()
    direct.float().sum().backward()
    assert x.grad.dtype == layer.A_log.grad.dtype == leaves["q"].grad.dtype == torch.float32
    plain, _, _ = layer(x)
    assert torch.allclose(o.float(), plain, rtol=0.1, atol=0.02)


def test_a_layer_in_bfloat16():
    layer, x = layer_and_input(GatedDeltaNet)
    plain, _, _ = layer(x)
    narrow = layer.to(torch.bfloat16)
    o, _, _ = narrow(x.detach().bfloat16())
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in narrow.parameters())
    assert torch.allclose(o.float(), plain, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    layer, x = layer_and_input()
    one = gradients_of(layer, x, lambda x: layer(x)[0])
    two = gradients_of(layer, x, lambda x: checkpoint(lambda y: layer(y)[0], x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(one, two))
    held = deltalink.memory_stats()["saved_count"]
    o = checkpoint(lambda y: layer(y)[0], x, use_reentrant=reentrant)
    assert deltalink.memory_stats()["saved_count"] == held, "a checkpoint keeps no saved state"
    del o


def test_nothing_is_saved_without_gradients():
    leaves = random_inputs()
    before = deltalink.memory_stats()["saved_count"]
    with torch.no_grad():
        quiet, _ = deltalink.kda(**leaves)
    with torch.inference_mode():
        inference, _ = deltalink.kda(**leaves)
    plain, _ = deltalink.kda(**{name: x.detach() for name, x in leaves.items()})
    assert deltalink.memory_stats()["saved_count"] == before
    assert torch.equal(quiet, plain) and torch.equal(inference, plain)
    assert not quiet.requires_grad and not plain.requires_grad


def test_gradients_of_several_threads():
    layer, x = layer_and_input()
    expected = gradients_of(layer, x, lambda x: layer(x)[0])[0]
    with torch.autograd.set_multithreading_enabled(True):
        losses = [layer(x)[0].square().sum() for _ in range(4)]
        found = [torch.autograd.grad(loss, x)[0] for loss in reversed(losses)]
    assert all(torch.equal(one, expected) for one in found)


def test_the_interpreter_runs_while_kernels_compute():
    import threading

    ticks, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            ticks[0] += 1
            stop.wait(0.001)

    x = torch.randn(1, 4096, 4, 64)
    step = (x[..., 0].sigmoid() * -0.1, x[..., 1].sigmoid())
    thread = threading.Thread(target=count)
    thread.start()
    before = ticks[0]
    deltalink.gdn(x, x, x, *step, use_qk_l2norm_in_kernel=True)
    during = ticks[0] - before
    stop.set()
    thread.join()
    assert during > 2, f"{during} ticks of 1 ms during a call of many"
