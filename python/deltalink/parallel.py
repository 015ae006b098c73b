"""Context parallelism: who holds which tokens."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import lru_cache

import torch

from . import _native
from .errors import InputError
from .worlds import World, init

_contexts: weakref.WeakValueDictionary[int, ContextParallel] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def _ints(name: str, values) -> tuple[int, ...] | None:
    """Offsets as a tuple, from a tensor or any sequence."""
    if values is None:
        return None
    if isinstance(values, torch.Tensor):
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool or values.ndim != 1:
            raise InputError(f"{name} is a tensor of {values.dtype} with {values.ndim} dimensions; it must be a vector of integers")
        values = values.tolist()
    values = tuple(values)
    for i, value in enumerate(values):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InputError(f"{name}[{i}] is {value!r}; it must be an integer")
        if value < 0:
            raise InputError(f"{name}[{i}] is {value}; it must not be negative")
    return tuple(int(value) for value in values)


@lru_cache(maxsize=256)
def packed_plan(cu_seqlens: tuple[int, ...], size: int, cuts: tuple[int, ...] | None) -> _native.Plan:
    return _native.Plan.packed(list(cu_seqlens), size, None if cuts is None else list(cuts))


@lru_cache(maxsize=256)
def batch_plan(batch_size: int, seq_len: int, size: int, cuts: tuple[int, ...] | None) -> _native.Plan:
    return _native.Plan.batch(batch_size, seq_len, size, None if cuts is None else list(cuts))


class ContextParallel:
    """Sequences cut over the ranks of a process group, one contiguous range of tokens for each rank.

    Args:
        process_group: A ``torch.distributed`` group, a one-dimensional DeviceMesh, ``"env"``, or ``None``, as for
            :func:`deltalink.init`, whose world is used (and made, if it is not there: collective then), or a :class:`World`.
        cu_seqlens: Offsets of the packed sequences of the whole batch, ``[N + 1]``, as a tensor or a sequence of integers.
        batch_size, seq_len: Instead of ``cu_seqlens``: rows of the whole batch, each a sequence of ``seq_len`` tokens. All rows are cut
            at the same places.
        cuts: The token offsets between the ranks, one less than there are ranks, at any token; they may repeat, which leaves ranks
            without tokens. By default ranks get as many tokens each, the first ones one more where there is a remainder.
        device: Where the world computes, as for :func:`deltalink.init`.
        mode: ``"overlap"``; ``"bulk"``, the same kernels with the exchange between them; ``"exact"``, bit for bit what one rank
            computes, where every cut is a multiple of ``chunk_size`` from the start of its sequence.
        parameter_gradients: What backward returns for ``A_log``, ``dt_bias`` and the weights of convolutions, whose gradients are sums over
            tokens. ``"share"``: the sum over this rank's tokens, as for every other parameter of a layer, to be added up by what
            adds up the others (DDP and FSDP average over their ranks). ``"sum"``: added up over the group in backward, in the order of
            the ranks, for callers whose parameters nobody else reduces.
        recompute: ``"all"``, or ``"states"`` to keep the records of the chunks from forward to backward.
        checked: Have the CPU back end look for missing barriers and reads out of bounds. Slow.
        allow_nonfinite: Compute with NaN and infinity instead of refusing them.

    Making one is cheap when the world is there: make a new one for each batch of other sequences.
    """

    def __init__(
        self,
        process_group=None,
        cu_seqlens: torch.Tensor | Sequence[int] | None = None,
        *,
        batch_size: int | None = None,
        seq_len: int | None = None,
        cuts: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        mode: str = "overlap",
        parameter_gradients: str = "share",
        recompute: str = "all",
        checked: bool = False,
        allow_nonfinite: bool = False,
    ):
        if (cu_seqlens is None) == (batch_size is None or seq_len is None):
            raise InputError("pass either cu_seqlens, or batch_size and seq_len")
        choices = {
            "mode": (mode, ("overlap", "bulk", "exact")),
            "parameter_gradients": (parameter_gradients, ("share", "sum")),
            "recompute": (recompute, ("all", "states")),
        }
        for name, (found, allowed) in choices.items():
            if found not in allowed:
                raise InputError(f"{name} is {found!r}; choose one of {', '.join(map(repr, allowed))}")
        self.world = process_group if isinstance(process_group, World) else init(process_group, device=device)
        self.cu_seqlens = _ints("cu_seqlens", cu_seqlens)
        cuts = _ints("cuts", cuts)
        size = self.world.size
        if cuts is not None and len(cuts) != size - 1:
            raise InputError(f"{len(cuts)} cuts for {size} ranks; pass {size - 1}, the offsets between their tokens")
        if self.cu_seqlens is not None:
            self.plan = packed_plan(self.cu_seqlens, size, cuts)
        else:
            self.plan = batch_plan(batch_size, seq_len, size, cuts)
        self.mode = mode
        self.parameter_gradients = parameter_gradients
        self.options = {
            "mode": mode,
            "recompute": recompute,
            "checked": checked,
            "allow_nonfinite": allow_nonfinite,
            "sum_parameters": parameter_gradients == "sum",
        }
        self.starts_here = len(self.plan.starts(self.rank))
        self.ends_here = len(self.plan.ends(self.rank))
        self.number = next(_numbers)
        _contexts[self.number] = self

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def cuts(self) -> list[int]:
        """The offsets of all ranks' tokens: rank ``r`` holds ``cuts[r]`` to ``cuts[r + 1]``."""
        return self.plan.cuts

    @property
    def tokens(self) -> int:
        """Tokens of this rank, in each row."""
        return self.plan.shape(self.rank)[1]

    @property
    def starts(self) -> list[int]:
        """The sequences whose first token is here: the rows of this rank's ``initial_state``."""
        return self.plan.starts(self.rank)

    @property
    def ends(self) -> list[int]:
        """The sequences whose last token is here: the rows of this rank's ``final_state``."""
        return self.plan.ends(self.rank)

    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's tokens of a tensor that holds all of them along ``dim``."""
        cuts = self.cuts
        if x.shape[dim] != cuts[-1]:
            raise InputError(f"the tensor has {x.shape[dim]} tokens along dimension {dim}, the sequences have {cuts[-1]}")
        return x.narrow(dim, cuts[self.rank], cuts[self.rank + 1] - cuts[self.rank])

    def __repr__(self) -> str:
        return f"ContextParallel(rank={self.rank}, size={self.size}, cuts={self.cuts}, mode={self.mode!r})"


def context(number: int) -> ContextParallel:
    """The context of a call, which its caller holds."""
    found = _contexts.get(number)
    if found is None:
        raise InputError(f"ContextParallel {number} of this call is gone; keep it while a compiled graph uses it")
    return found
