"""Norms of the outputs, head by head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, dtype: torch.dtype | None = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def _normalised(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide * self.weight.float()

    def forward(self, x: Tensor) -> Tensor:
        return self._normalised(x).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class GatedRMSNorm(RMSNorm):
    """:class:`RMSNorm` times ``silu(gate)`` or ``sigmoid(gate)``."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "silu", dtype: torch.dtype | None = None):
        super().__init__(hidden_size, eps, dtype)
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gate = gate.float()
        gate = torch.sigmoid(gate) if self.activation == "sigmoid" else F.silu(gate)
        return (self._normalised(x) * gate).to(x.dtype)
