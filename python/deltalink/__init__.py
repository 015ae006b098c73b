"""Context-parallel linear attention: Kimi Delta Attention (KDA) and Gated DeltaNet (GDN), with communication overlapped from
inside the kernels.

Operations take the arguments of flash-linear-attention's ``chunk_kda``, ``chunk_gated_delta_rule`` and ``causal_conv1d``; with
``cp``, a :class:`ContextParallel`, each rank holds its own range of tokens::

    cp = deltalink.ContextParallel(process_group, cu_seqlens=cu_seqlens)
    o, _ = deltalink.kda(cp.shard(q), cp.shard(k), cp.shard(v), cp.shard(g), cp.shard(beta), cp=cp)

Layers are in :mod:`deltalink.nn`, exceptions in :mod:`deltalink.errors`.
"""

from . import _native, errors, nn
from .convolution import causal_conv1d, short_convolutions
from .functional import gdn, kda
from .parallel import ContextParallel
from .worlds import World, init, lent, memory_stats, shutdown

__version__: str = _native.__version__
"""Of the package; all ranks must have the same."""

__all__ = [
    "ContextParallel",
    "World",
    "causal_conv1d",
    "errors",
    "gdn",
    "init",
    "kda",
    "lent",
    "memory_stats",
    "nn",
    "short_convolutions",
    "shutdown",
]
