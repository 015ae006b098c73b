"""Layers with the parameters of flash-linear-attention's, so that its checkpoints load."""

from .gated_deltanet import GatedDeltaNet
from .kimi import KimiDeltaAttention
from .norm import GatedRMSNorm, RMSNorm
from .short_convolution import ShortConvolution
from .state import LayerState

__all__ = ["GatedDeltaNet", "GatedRMSNorm", "KimiDeltaAttention", "LayerState", "RMSNorm", "ShortConvolution"]
