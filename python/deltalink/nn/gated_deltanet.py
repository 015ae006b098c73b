"""The layer of Gated DeltaNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..functional import gdn
from .layer import DeltaRuleLayer, inverse_softplus_of_steps
from .norm import GatedRMSNorm, RMSNorm
from .state import LayerState


class GatedDeltaNet(DeltaRuleLayer):
    """Gated DeltaNet. Arguments, parameters and their shapes are those of flash-linear-attention's layer of this name.

    Args:
        hidden_size: Channels of the input.
        expand_v: Values of a head over its keys.
        head_dim: Keys of a head; a multiple of 16 up to 256, as its values are.
        num_heads: Heads of q and k.
        num_v_heads: Heads of v, a multiple of ``num_heads``; by default as many.
        use_gate: Whether outputs are gated.
        use_short_conv: Whether q, k and v pass a short convolution.
        allow_neg_eigval: Whether steps reach 2 in place of 1.
        conv_size, conv_bias: Taps of the convolutions, 2 to 8, and whether they have biases.
        layer_idx: Which layer of a model it is; only kept.
        norm_eps: Of the output norm.
    """

    rule = staticmethod(gdn)
    """The delta rule; another implementation can take its place, to compare."""

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ):
        super().__init__(
            hidden_size, expand_v, head_dim, num_heads, num_v_heads, use_short_conv, allow_neg_eigval, conv_size, conv_bias, layer_idx
        )
        self.use_gate = use_gate
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        # Above 0, whose logarithm is no parameter.
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads).uniform_(1e-3, 16).log())
        self.dt_bias = nn.Parameter(inverse_softplus_of_steps(self.num_v_heads))
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
            self.o_norm = GatedRMSNorm(self.head_v_dim, eps=norm_eps)
        else:
            self.o_norm = RMSNorm(self.head_v_dim, eps=norm_eps, dtype=torch.float32)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def _run(self, x: Tensor, state: LayerState | None, keep: bool, cu_seqlens, cp) -> tuple[Tensor, LayerState | None]:
        o, state = self._delta_rule(x, self.a_proj(x), self.b_proj(x), state, keep, cu_seqlens, cp)
        o = self.o_norm(o, self._heads(self.g_proj(x), self.head_v_dim)) if self.use_gate else self.o_norm(o)
        return self.o_proj(o.flatten(-2)), state
