"""A language model of KDA layers, GDN layers or both in turn, each with a gated feed-forward block.

Layers are those of this library; for comparison their operations can be flash-linear-attention's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class ModelConfig:
    """Sizes."""

    vocabulary: int
    hidden: int
    heads: int
    head_dim: int
    layers: int
    mixers: tuple[str, ...] = ("kda", "gdn")
    """Kinds of layers, in turn."""


class Norm(nn.Module):
    """RMS norm in float32."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


class Block(nn.Module):
    """A delta rule and a feed-forward block, each behind a norm and around a skip."""

    def __init__(self, config: ModelConfig, index: int, backend: str):
        super().__init__()
        if backend == "fla":
            from fla_layers import GatedDeltaNet, KimiDeltaAttention
        else:
            from deltalink.nn import GatedDeltaNet, KimiDeltaAttention
        kind = {"kda": KimiDeltaAttention, "gdn": GatedDeltaNet}[config.mixers[index % len(config.mixers)]]
        self.mixer_norm, self.feed_norm = Norm(config.hidden), Norm(config.hidden)
        self.mixer = kind(hidden_size=config.hidden, num_heads=config.heads, head_dim=config.head_dim, expand_v=1, layer_idx=index)
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        self.down = nn.Linear(2 * config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cp) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), cp=cp)[0]
        gate, value = self.up(self.feed_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class HybridLM(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: ModelConfig, backend: str):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(Block(config, index, backend) for index in range(config.layers))
        self.norm = Norm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, cp) -> Tensor:
        """`[B, T]` of this rank's tokens to `[B, T, vocabulary]`; `cp` tells the layers of the other ranks."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cp)
        return self.head(self.norm(x))
