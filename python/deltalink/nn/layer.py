"""What the layers have in common: projections, short convolutions, padding, output norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..convolution import short_convolutions
from ..errors import InputError
from ..parallel import ContextParallel
from .short_convolution import ShortConvolution
from .state import LayerState


def _whole(name: str, value: float) -> int:
    if not math.isclose(value, round(value), rel_tol=1e-5):
        raise InputError(f"{name} would be {value}; choose head_dim and expand_v so that it is an integer")
    return round(value)


def inverse_softplus_of_steps(size: int) -> Tensor:
    """A bias whose softplus is log-uniform between 0.001 and 0.1, at least 0.0001."""
    low, high = math.log(0.001), math.log(0.1)
    steps = torch.exp(torch.rand(size) * (high - low) + low).clamp(min=1e-4)
    return steps + torch.log(-torch.expm1(-steps))


class DeltaRuleLayer(nn.Module):
    """A layer around a delta rule. Subclasses have the ``rule`` and add gates, and compute in :meth:`_run`."""

    convolve = staticmethod(short_convolutions)
    """The short convolutions of q, k and v; another implementation can take its place, to compare."""

    def __init__(
        self,
        hidden_size: int,
        expand_v: float,
        head_dim: int,
        num_heads: int,
        num_v_heads: int | None,
        use_short_conv: bool,
        allow_neg_eigval: bool,
        conv_size: int,
        conv_bias: bool,
        layer_idx: int | None,
    ):
        super().__init__()
        self.hidden_size, self.expand_v, self.head_dim = hidden_size, expand_v, head_dim
        self.num_heads = num_heads
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        if self.num_v_heads % self.num_heads:
            raise InputError(f"num_v_heads = {self.num_v_heads} is not a multiple of num_heads = {self.num_heads}")
        self.head_k_dim = head_dim
        self.head_v_dim = _whole("the values of a head", head_dim * expand_v)
        self.key_dim = self.num_heads * self.head_k_dim
        self.value_dim = self.num_v_heads * self.head_v_dim
        self.use_short_conv, self.allow_neg_eigval = use_short_conv, allow_neg_eigval
        self.conv_size, self.conv_bias, self.layer_idx = conv_size, conv_bias, layer_idx

        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(self.value_dim, conv_size, conv_bias)

    def _heads(self, x: Tensor, channels: int) -> Tensor:
        return x.unflatten(-1, (-1, channels))

    def _qkv(self, x: Tensor, state: LayerState | None, keep: bool, cu_seqlens, cp) -> tuple[list[Tensor], tuple | None]:
        """q, k and v after projection, convolution and SiLU, and the convolutions' final states."""
        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        if not self.use_short_conv:
            return [F.silu(y) for y in projected], None
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        outputs, states = self.convolve(
            projected,
            [convolution.taps for convolution in convolutions],
            [convolution.bias for convolution in convolutions] if self.conv_bias else None,
            initial_states=None if state is None or state.convolution is None else list(state.convolution),
            output_final_state=keep,
            activation="silu",
            cu_seqlens=cu_seqlens,
            cp=cp,
        )
        return outputs, None if states is None else tuple(states)

    def _delta_rule(
        self, x: Tensor, g: Tensor, beta: Tensor, state: LayerState | None, keep: bool, cu_seqlens, cp, **gate
    ) -> tuple[Tensor, LayerState | None]:
        """Outputs of the rule before their norm, and the state after these tokens; ``gate`` is what only this rule's gate has."""
        (q, k, v), convolution = self._qkv(x, state, keep, cu_seqlens, cp)
        o, recurrent = self.rule(
            self._heads(q, self.head_k_dim),
            self._heads(k, self.head_k_dim),
            self._heads(v, self.head_v_dim),
            g,
            beta,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            initial_state=None if state is None else state.recurrent,
            output_final_state=keep,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            state_v_first=True,
            cu_seqlens=cu_seqlens,
            cp=cp,
            **gate,
        )
        return o, LayerState(convolution, recurrent) if keep else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: LayerState | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        *,
        cu_seqlens=None,
        cp: ContextParallel | None = None,
    ) -> tuple[Tensor, None, LayerState | None]:
        """
        Args:
            hidden_states: ``[B, T, hidden_size]``; with ``cp`` this rank's tokens.
            attention_mask: ``[B, T]``, 0 where there is padding. Outputs are 0 there. Not together with ``cu_seqlens`` or ``cp``.
            past_key_values: The layer's :class:`LayerState` after the tokens before these.
            use_cache: Whether to return the state after these tokens.
            output_attentions: Must be false; there is no attention matrix.
            cu_seqlens, cp: As for :func:`deltalink.kda`.

        Returns:
            Outputs in the shape of ``hidden_states``, ``None``, and the :class:`LayerState` or ``None``.
        """
        if output_attentions:
            raise InputError("output_attentions is set; a delta rule has no attention matrix to return")
        if attention_mask is None:
            o, state = self._run(hidden_states, past_key_values, use_cache, cu_seqlens, cp)
            return o, None, state
        if cu_seqlens is not None or cp is not None:
            raise InputError("attention_mask tells where padding is; with cu_seqlens or cp there is none: leave it out")
        b, t, _ = hidden_states.shape
        if attention_mask.shape != (b, t):
            raise InputError(f"attention_mask has shape {tuple(attention_mask.shape)}; it must be [B, T] = [{b}, {t}], 0 at padding")
        kept = attention_mask.bool()
        offsets = F.pad(kept.sum(-1).cumsum(0), (1, 0))
        # Rows without padding are packed, computed, and put back.
        packed, state = self._run(hidden_states[kept].unsqueeze(0), past_key_values, use_cache, offsets.cpu(), None)
        o = packed.new_zeros(b, t, packed.shape[-1])
        return o.masked_scatter(kept.unsqueeze(-1), packed), None, state

    def _run(self, x: Tensor, state: LayerState | None, keep: bool, cu_seqlens, cp) -> tuple[Tensor, LayerState | None]:
        raise NotImplementedError
