"""The layer of Kimi Delta Attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..functional import kda
from .layer import DeltaRuleLayer, inverse_softplus_of_steps
from .norm import GatedRMSNorm
from .state import LayerState


class KimiDeltaAttention(DeltaRuleLayer):
    """Kimi Delta Attention. Arguments, parameters and their shapes are those of flash-linear-attention's layer of this name.

    Args:
        hidden_size: Channels of the input.
        expand_v: Values of a head over its keys.
        head_dim: Keys of a head; a multiple of 16 up to 256, as its values are.
        num_heads: Heads of q and k.
        num_v_heads: Heads of v, a multiple of ``num_heads``; by default as many.
        use_short_conv: Whether q, k and v pass a short convolution.
        allow_neg_eigval: Whether steps reach 2 in place of 1.
        safe_gate, lower_bound: The gate bounded below, for ``lower_bound``; see :func:`deltalink.kda`.
        conv_size, conv_bias: Taps of the convolutions, 2 to 8, and whether they have biases.
        layer_idx: Which layer of a model it is; only kept.
        norm_eps: Of the output norm.
    """

    rule = staticmethod(kda)
    """The delta rule; another implementation can take its place, to compare."""

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ):
        super().__init__(
            hidden_size, expand_v, head_dim, num_heads, num_v_heads, use_short_conv, allow_neg_eigval, conv_size, conv_bias, layer_idx
        )
        self.safe_gate, self.lower_bound = safe_gate, lower_bound
        self.gate_dim = self.num_v_heads * self.head_k_dim
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, self.gate_dim, bias=False)
        )
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        strength = torch.zeros(self.num_v_heads) if safe_gate else torch.empty(self.num_v_heads).uniform_(1, 16).log()
        self.A_log = nn.Parameter(strength)
        self.dt_bias = nn.Parameter(inverse_softplus_of_steps(self.gate_dim))
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, self.value_dim, bias=True)
        )
        self.o_norm = GatedRMSNorm(self.head_v_dim, eps=norm_eps, activation="sigmoid")
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def _run(self, x: Tensor, state: LayerState | None, keep: bool, cu_seqlens, cp) -> tuple[Tensor, LayerState | None]:
        g, beta = self._heads(self.f_proj(x), self.head_k_dim), self.b_proj(x)
        gate = {"safe_gate": self.safe_gate, "lower_bound": self.lower_bound}
        o, state = self._delta_rule(x, g, beta, state, keep, cu_seqlens, cp, **gate)
        o = self.o_norm(o, self._heads(self.g_proj(x), self.head_v_dim))
        return self.o_proj(o.flatten(-2)), state
