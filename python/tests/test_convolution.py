"""The short convolution against plain PyTorch in float64."""

import pytest
import reference
import torch
from conftest import relative

import deltalink


def compare(found, wanted, limit=2e-6):
    for one, two in zip(found, wanted, strict=True):
        assert relative(one, two) < limit


@pytest.mark.parametrize("taps", [2, 4, 8])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 3, 21]])
def test_against_plain_loops(taps, activation, cu_seqlens):
    batch, tokens, channels = (2, 21, 6) if cu_seqlens is None else (1, 21, 6)
    n = batch if cu_seqlens is None else len(cu_seqlens) - 1
    leaves = [
        torch.randn(batch, tokens, channels),
        torch.randn(channels, taps),
        torch.randn(channels),
        torch.randn(n, channels, taps - 1),
    ]
    leaves = [x.requires_grad_() for x in leaves]
    x, weight, bias, initial = leaves
    y, state = deltalink.causal_conv1d(
        x,
        weight,
        bias,
        initial_state=initial,
        output_final_state=True,
        activation=activation,
        cu_seqlens=cu_seqlens,
    )
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = reference.convolution(*wide, silu=activation is not None, cu_seqlens=cu_seqlens)
    compare((y.detach(), state.detach()), expected)
    loss = (y * torch.linspace(0, 1, y.numel()).view(y.shape)).sum() + state.square().sum()
    wide_y, wide_state = expected
    wide_loss = (wide_y * torch.linspace(0, 1, y.numel()).view(y.shape)).sum() + wide_state.square().sum()
    compare(torch.autograd.grad(loss, leaves), torch.autograd.grad(wide_loss, wide))


def test_three_at_once_are_three():
    xs = [torch.randn(1, 17, d, requires_grad=True) for d in (8, 8, 16)]
    weights = [torch.randn(d, 4, requires_grad=True) for d in (8, 8, 16)]
    ys, states = deltalink.short_convolutions(xs, weights, activation="silu")
    assert states is None
    together = torch.autograd.grad(sum(y.square().sum() for y in ys), [*xs, *weights])
    each = [deltalink.causal_conv1d(x, w, activation="silu")[0] for x, w in zip(xs, weights)]
    assert all(torch.equal(y, z) for y, z in zip(ys, each))
    apart = torch.autograd.grad(sum(y.square().sum() for y in each), [*xs, *weights])
    assert all(torch.equal(a, b) for a, b in zip(together, apart))


def test_a_saved_convolution_serves_more_than_one_backward_call():
    x, weight = torch.randn(1, 9, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    y, _ = deltalink.causal_conv1d(x, weight)
    one = torch.autograd.grad(y.sum(), [x, weight], retain_graph=True)
    two = torch.autograd.grad(y.sum(), [x, weight])
    assert all(torch.equal(a, b) for a, b in zip(one, two))


def test_weights_of_another_type_than_x():
    x = torch.randn(1, 9, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 3, requires_grad=True)
    y, _ = deltalink.causal_conv1d(x, weight)
    y.float().sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    expected, _ = reference.convolution(x.detach(), weight.detach())
    assert relative(y.detach(), expected) < 5e-3


def test_wrong_calls_are_refused():
    x, weight = torch.randn(1, 9, 4), torch.randn(4, 3)
    with pytest.raises(deltalink.errors.InputError, match="has 9 taps per channel; it must have 2 to 8"):
        deltalink.causal_conv1d(x, torch.randn(4, 9))
    with pytest.raises(deltalink.errors.InputError, match="weight of convolution 0 has shape \\[5, 3\\]"):
        deltalink.causal_conv1d(x, torch.randn(5, 3))
    with pytest.raises(deltalink.errors.InputError, match="activation is 'relu'"):
        deltalink.causal_conv1d(x, weight, activation="relu")
    with pytest.raises(deltalink.errors.InputError, match="2 tensors and 1 weights"):
        deltalink.short_convolutions([x, x], [weight])
    with pytest.raises(deltalink.errors.InputError, match="4 convolutions in one call"):
        deltalink.short_convolutions([x] * 4, [weight] * 4)
    with pytest.raises(deltalink.errors.InputError, match="no tensor to convolve"):
        deltalink.short_convolutions([], [])
