"""Worlds: the processes that compute together, and the memory that they share."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import _native
from .errors import InputError, StillLentError, WorldError

HEAP_BYTES = 256 << 20
TIMEOUT = 60.0

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Lent(NamedTuple):
    """A piece of native memory that something outside the package holds."""

    kind: str
    """``"symmetric"``, ``"result"`` or ``"saved"``."""
    world: int
    """Number of the world that it belongs to; 0 for results, which belong to none."""
    name: str
    bytes: int


def lent() -> list[Lent]:
    """Every piece of native memory that is held by a tensor or an autograd graph, oldest first."""
    return [Lent(*piece) for piece in _native.lent()]


class World:
    """This process's place among the ranks that compute together, and its part of the symmetric heap.

    Made by :func:`init`. Ranks must make the same collective calls in the same order.
    """

    def __init__(self, native: _native.World, options: tuple):
        self._native = native
        self._options = options

    @property
    def rank(self) -> int:
        return self._native.rank

    @property
    def size(self) -> int:
        return self._native.size

    @property
    def number(self) -> int:
        """Unique in this process; :class:`Lent` refers to it."""
        return self._native.number

    @property
    def device(self) -> torch.device:
        """Where this world computes."""
        return torch.device("cpu")

    def barrier(self, what: str = "barrier") -> None:
        """Waits until all ranks are here. ``what`` names the step in errors."""
        self._native.barrier(what)

    def symmetric(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of zeros at the same place of every rank's heap, without a copy. Collective.

        The buffer goes back to the heap when the last tensor that looks at it is gone, whenever that is. A later buffer may get
        the same place only where all ranks have dropped theirs.
        """
        if dtype not in _DTYPES:
            raise InputError(f"{name} was asked for with {dtype}; choose one of {', '.join(map(str, _DTYPES))}")
        return torch.from_dlpack(self._native.empty(name, list(shape), _DTYPES[dtype]))

    def memory_stats(self) -> dict[str, int]:
        """Use of this rank's heap in bytes (``capacity``, ``in_use``, ``peak``), and the number of ``live`` objects in it. The slots
        of operations count as well."""
        stats = self._native.heap_stats()
        if stats is None:
            raise WorldError("this world was shut down; call deltalink.init() for a new one")
        return dict(zip(("capacity", "in_use", "peak", "live"), stats))

    def lent(self) -> list[Lent]:
        """What tensors and graphs hold of this world: its symmetric buffers, and what forward calls saved in it."""
        return [piece for piece in lent() if piece.world == self.number]

    def close(self, *, wait: float = 0.0, force: bool = False) -> None:
        """Leaves the world; see :func:`shutdown`."""
        end = time.monotonic() + wait
        while not force and (alive := self.lent()):
            if time.monotonic() >= end:
                raise StillLentError(_still(alive))
            gc.collect()
            time.sleep(0.01)
        self._native.close()

    def __repr__(self) -> str:
        return f"World(number={self.number}, rank={self.rank}, size={self.size})"


def _still(alive: list[Lent]) -> str:
    groups = Counter((piece.kind, piece.name) for piece in alive)
    words = {"symmetric": "symmetric buffer", "saved": "saved state of"}
    names = [f"{words[kind]} {name!r}" + (f" (x{n})" if n > 1 else "") for (kind, name), n in groups.items()]
    total = sum(piece.bytes for piece in alive)
    return (
        f"{len(alive)} pieces of the world's memory ({total} bytes) are still alive: {', '.join(names[:8])}"
        f"{', ...' if len(names) > 8 else ''}; drop the tensors, losses and graphs that hold them, or pass force=True to leave the "
        "world and let them keep the memory"
    )


_lock = threading.RLock()
_worlds: dict[object, World] = {}


def _key(process_group) -> object:
    """What tells worlds apart: the group itself, or "alone" or "env"."""
    if process_group is None:
        return "alone"
    if isinstance(process_group, str):
        if process_group != "env":
            raise InputError(f'process_group is {process_group!r}; pass a process group, a DeviceMesh, "env" or None')
        return "env"
    return process_group


def _resolve(process_group):
    """The process group of a one-dimensional DeviceMesh; anything else as it is."""
    mesh = getattr(process_group, "get_group", None)
    if mesh is not None and hasattr(process_group, "mesh"):
        if process_group.mesh.ndim != 1:
            names = process_group.mesh_dim_names
            raise InputError(f"the DeviceMesh has dimensions {names}; pass one of them, such as mesh[{(names or ['cp'])[0]!r}]")
        return process_group.get_group()
    return process_group


def init(
    process_group=None,
    *,
    heap_bytes: int = HEAP_BYTES,
    timeout: float = TIMEOUT,
    workers: int | None = None,
) -> World:
    """Makes the world of ``process_group`` and its symmetric heap, or returns the one that is there. Collective over the group.

    Args:
        process_group: Whose ranks compute together: a ``torch.distributed`` group of processes of one machine, a one-dimensional
            DeviceMesh, ``"env"`` for the world that a launcher's variables tell of (without ``torch.distributed``), or ``None``
            for this process alone.
        heap_bytes: Bytes of each rank's heap, allocated once. Pages that are never touched cost no memory.
        timeout: Bound in seconds of every wait for other ranks.
        workers: Threads of this rank on the CPU; by default the machine's cores over the ranks.
    """
    group = _resolve(process_group)
    key = _key(group)
    options = (heap_bytes, timeout, workers)
    with _lock:
        world = _worlds.get(key)
        if world is not None and world._native.heap_stats() is not None:
            if world._options != options and options != (HEAP_BYTES, TIMEOUT, None):
                raise WorldError(
                    f"this world was made with (heap_bytes, timeout, workers) = {world._options}, asked for is {options}; call "
                    "deltalink.init() with them first, or deltalink.shutdown() before"
                )
            return world
        if key == "alone":
            native = _native.World.alone(heap_bytes, timeout, workers or _own_cores())
        elif key == "env":
            native = _native.World.from_environment(heap_bytes, timeout, workers)
        else:
            native = _of_group(group, heap_bytes, timeout, workers)
        world = _worlds[key] = World(native, options)
        return world


def _own_cores() -> int:
    """Cores for a process that computes alone beside others of its launcher."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, len(os.sched_getaffinity(0)) // beside)


def _of_group(group, heap_bytes: int, timeout: float, workers: int | None) -> _native.World:
    """Rank 0 makes the memory, and the group carries the words by which the others come in."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise WorldError("this process is no member of the process group; call it on the group's members only")
    invitation, said = None, [None, None]
    if rank == 0:
        # Whether it could is for all to know.
        try:
            invitation = _native.Invitation(size, heap_bytes, timeout)
            said = [invitation.words, None]
        except Exception as error:
            said = [None, str(error)]
    dist.broadcast_object_list(said, src=dist.get_global_rank(group, 0), group=group)
    words, failure = said
    if failure is not None:
        raise WorldError(f"rank 0 of the group cannot make the world: {failure}")
    if invitation is not None:
        return invitation.join(workers)
    return _native.World.accept(words, rank, size, heap_bytes, timeout, workers)


def alone() -> World:
    """The world of this process alone, for calls without ``cp``."""
    world = _worlds.get("alone")
    return world if world is not None and world._native.heap_stats() is not None else init()


def shutdown(process_group=None, *, wait: float = 0.0, force: bool = False) -> None:
    """Leaves the world of ``process_group``, or all worlds.

    Refuses with :class:`~deltalink.errors.StillLentError`, which names what is still alive, while tensors hold symmetric buffers or
    graphs hold saved states of the world; nothing has happened then. Waits up to ``wait`` seconds before it refuses. With ``force`` it
    leaves at once: symmetric buffers stay readable and writable as long as tensors hold them, while graphs can no longer go
    backward. Results of calls are in no world and outlive all of them.
    """
    with _lock:
        keys = list(_worlds) if process_group is None else [_key(_resolve(process_group))]
        for key in keys:
            world = _worlds.get(key)
            if world is not None:
                world.close(wait=wait, force=force)
                del _worlds[key]


@atexit.register
def _leave_all() -> None:
    # The others must not wait for a process that is gone.
    for world in _worlds.values():
        world._native.close()


def memory_stats() -> dict[str, int]:
    """Native memory that is held from outside: number and bytes of symmetric buffers, results and saved states."""
    stats = {f"{kind}_{what}": 0 for kind in ("symmetric", "result", "saved") for what in ("count", "bytes")}
    for piece in lent():
        stats[f"{piece.kind}_count"] += 1
        stats[f"{piece.kind}_bytes"] += piece.bytes
    return stats
