"""The layers of this library with the operations of flash-linear-attention, whose own layers know nothing of context parallelism.

`cp` is an `FLACPContext`, or `None`.
"""

from __future__ import annotations

from fla.modules.convolution import causal_conv1d
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda

from deltalink import nn


def _convolutions(xs, weights, biases=None, *, initial_states=None, output_final_state=False, activation=None, cu_seqlens=None, cp=None):
    biases, initial_states = biases or [None] * len(xs), initial_states or [None] * len(xs)
    results = [
        causal_conv1d(
            x,
            weight,
            bias,
            initial_state=state,
            output_final_state=output_final_state,
            activation=activation,
            cu_seqlens=cu_seqlens,
            cp_context=cp,
        )
        for x, weight, bias, state in zip(xs, weights, biases, initial_states)
    ]
    outputs, states = zip(*results)
    return list(outputs), list(states) if output_final_state else None


def _narrow(q, k, v, g):
    """flash-linear-attention takes all of them in one 16-bit type."""
    return (x.to(q.dtype) for x in (q, k, v, g))


class KimiDeltaAttention(nn.KimiDeltaAttention):
    """With `chunk_kda`."""

    convolve = staticmethod(_convolutions)

    @staticmethod
    def rule(q, k, v, g, beta, *, cp=None, **options):
        return chunk_kda(*_narrow(q, k, v, g), beta, cp_context=cp, **options)


class GatedDeltaNet(nn.GatedDeltaNet):
    """With `chunk_gated_delta_rule`."""

    convolve = staticmethod(_convolutions)

    @staticmethod
    def rule(q, k, v, g, beta, *, cp=None, **options):
        return chunk_gated_delta_rule(*_narrow(q, k, v, g), beta, cp_context=cp, **options)
