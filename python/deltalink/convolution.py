"""The short convolution in front of q, k and v."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import ops
from .errors import InputError
from .functional import _autocast, _offsets, _together, _wants_gradient
from .parallel import ContextParallel


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    cp: ContextParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A depthwise causal convolution of 2 to 8 taps: ``y_t = act(sum_w weight[d, w] x[t - (W - 1) + w] + bias[d])``.

    Args:
        x: ``[B, T, D]`` in float32, bfloat16 or float16.
        weight: ``[D, W]`` in the type of x or float32; tap W - 1 is the token itself.
        bias: ``[D]`` in the type of x or float32; absent means 0.
        initial_state: ``[N, D, W - 1]`` in the type of x, the inputs just before each sequence, oldest first; with ``cp`` one for each of
            ``cp.starts``. (flash-linear-attention keeps W inputs, of which the first is never read.)
        output_final_state: Whether to return the last W - 1 inputs of each sequence; with ``cp`` of each of ``cp.ends``.
        activation: ``"silu"`` (or ``"swish"``), or ``None``.
        cu_seqlens, cp: As for :func:`deltalink.kda`.

    Returns:
        ``[B, T, D]`` in the type of x, and the final states or ``None``.

    Copies, streams and errors on GPUs are as for :func:`deltalink.kda`; a call serves any number of backward calls.
    """
    ys, states = short_convolutions(
        [x],
        [weight],
        None if bias is None else [bias],
        initial_states=None if initial_state is None else [initial_state],
        output_final_state=output_final_state,
        activation=activation,
        cu_seqlens=cu_seqlens,
        cp=cp,
    )
    return ys[0], (None if states is None else states[0])


def short_convolutions(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    initial_states: Sequence[Tensor] | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    cp: ContextParallel | None = None,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Up to three of :func:`causal_conv1d` at once, such as those of q, k and v, whose inputs from before a cut travel in one message."""
    if activation not in (None, "silu", "swish"):
        raise InputError(f'activation is {activation!r}; choose "silu", "swish" or None')
    for name, tensors in (("weights", weights), ("biases", biases), ("initial_states", initial_states)):
        if tensors is not None and len(tensors) != len(xs):
            raise InputError(f"{len(xs)} tensors and {len(tensors)} {name}; pass one for each, in the same order")
    if not xs:
        raise InputError("no tensor to convolve; pass one to three")
    for i, x in enumerate(xs):
        others = {"weight": weights[i], "bias": biases and biases[i], "initial_state": initial_states and initial_states[i]}
        _together(x=xs[0], **{f"x of convolution {i}": x}, **{f"{key} of convolution {i}": other for key, other in others.items()})
    xs = list(_autocast(*xs))
    if xs[0].dtype != weights[0].dtype and all(w.is_floating_point() for w in weights):
        # Weights of another type than x are read in float32.
        weights = [w.float() for w in weights]
        biases = None if biases is None else [b.float() for b in biases]
    biases, initial_states = list(biases or []), list(initial_states or [])
    n = len(xs)
    outputs = ops.convolutions(
        xs,
        list(weights),
        biases,
        initial_states,
        _offsets(cu_seqlens, cp),
        activation is not None,
        output_final_state,
        _wants_gradient(*xs, *weights, *biases, *initial_states),
        0 if cp is None else cp.number,
    )
    return outputs[:n], (outputs[n : 2 * n] if output_final_state else None)
