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
from .errors import DeviceError, InputError, StillLentError, WorldError

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

    def __init__(self, native: _native.World, device: torch.device, options: tuple):
        self._native = native
        self._options = options
        self.device = device
        """Where this world computes."""

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
    def is_open(self) -> bool:
        """Whether it was not shut down."""
        return self._native.open

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
        return dict(zip(("capacity", "in_use", "peak", "live"), self._native.heap_stats()))

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
        self._native.close(together=not force)

    def __repr__(self) -> str:
        return f"World(number={self.number}, rank={self.rank}, size={self.size}, device={self.device})"


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
_worlds: dict[tuple, World] = {}


def _device(process_group, device) -> torch.device:
    """The device that is asked for, or the one that the group is for."""
    if device is None:
        group = process_group is not None and not isinstance(process_group, str)
        device = "cuda" if group and "nccl" in dist.get_backend_config(process_group) else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"a world on {device} was asked for; worlds compute on cpu and cuda")
    if device.type == "cuda" and not _native.CUDA:
        raise DeviceError(
            "a world on a GPU was asked for, and this build of the package has no GPU support; build it with the feature `cuda` "
            "(MATURIN_PEP517_ARGS='--features cuda' pip install ./python), or compute on the CPU"
        )
    return device


def _name(process_group) -> object:
    """What tells worlds of a device apart: the group itself, or "alone" or "env"."""
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
    device: torch.device | str | None = None,
    heap_bytes: int = HEAP_BYTES,
    timeout: float = TIMEOUT,
    workers: int | None = None,
) -> World:
    """Makes the world of ``process_group`` and its symmetric heap, or returns the one that is there. Collective over the group.

    Args:
        process_group: Whose ranks compute together: a ``torch.distributed`` group of processes of one machine, a one-dimensional
            DeviceMesh, ``"env"`` for the world that a launcher's variables tell of (without ``torch.distributed``), or ``None``
            for this process alone.
        device: Where it computes: ``"cpu"``, or a GPU. By default the current GPU for groups with NCCL, the CPU for others.
        heap_bytes: Bytes of each rank's heap, allocated once, on its device. On the CPU pages that are never touched cost no memory.
        timeout: Bound in seconds of every wait for other ranks.
        workers: Threads of this rank on the CPU; by default the machine's cores over the ranks.
    """
    group = _resolve(process_group)
    name, device = _name(group), _device(group, device)
    key, options = (name, device), (heap_bytes, timeout, workers)
    with _lock:
        world = _worlds.get(key)
        if world is not None and world.is_open:
            if world._options != options and options != (HEAP_BYTES, TIMEOUT, None):
                raise WorldError(
                    f"this world was made with (heap_bytes, timeout, workers) = {world._options}, asked for is {options}; call "
                    "deltalink.init() with them first, or deltalink.shutdown() before"
                )
            return world
        settings = {"heap_bytes": heap_bytes, "timeout": timeout, "workers": workers, "gpu": device.index}
        if name == "alone":
            native = _native.World.alone(settings | {"workers": workers or _own_cores()})
        elif name == "env":
            native = _native.World.from_environment(settings)
        else:
            native = _of_group(group, settings)
        world = _worlds[key] = World(native, device, options)
        return world


def _own_cores() -> int:
    """Cores for a process that computes alone beside others of its launcher."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, len(os.sched_getaffinity(0)) // beside)


def _of_group(group, settings: dict) -> _native.World:
    """Rank 0 makes the memory, and the group carries the words by which the others come in."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise WorldError("this process is no member of the process group; call it on the group's members only")
    invitation, said = None, [None, None]
    if rank == 0:
        # Whether it could is for all to know.
        try:
            invitation = _native.Invitation(size, settings)
            said = [invitation.words, None]
        except Exception as error:
            said = [None, str(error)]
    dist.broadcast_object_list(said, src=dist.get_global_rank(group, 0), group=group)
    words, failure = said
    if failure is not None:
        raise WorldError(f"rank 0 of the group cannot make the world: {failure}")
    if invitation is not None:
        return invitation.join(settings)
    return _native.World.accept(words, rank, size, settings)


def alone(device: torch.device) -> World:
    """The world of this process alone on a device, for calls without ``cp``."""
    world = _worlds.get(("alone", device))
    return world if world is not None and world.is_open else init(device=device)


def shutdown(process_group=None, *, wait: float = 0.0, force: bool = False) -> None:
    """Leaves the world of ``process_group``, or all worlds.

    Refuses with :class:`~deltalink.errors.StillLentError`, which names what is still alive, while tensors hold symmetric buffers or
    graphs hold saved states of the world; nothing has happened then. Waits up to ``wait`` seconds before it refuses. With ``force`` it
    leaves at once: symmetric buffers stay readable and writable as long as tensors hold them, while graphs can no longer go
    backward. Results of calls are in no world and outlive all of them.
    """
    with _lock:
        name = None if process_group is None else _name(_resolve(process_group))
        for key in list(_worlds):
            if name is None or key[0] == name:
                _worlds[key].close(wait=wait, force=force)
                del _worlds[key]


@atexit.register
def _leave_all() -> None:
    # The others must not wait for a process that is gone, nor this one for others, which may have failed.
    for world in _worlds.values():
        world._native.close(together=False)


def memory_stats() -> dict[str, int]:
    """Native memory that is held from outside: number and bytes of symmetric buffers, results and saved states."""
    stats = {f"{kind}_{what}": 0 for kind in ("symmetric", "result", "saved") for what in ("count", "bytes")}
    for piece in lent():
        stats[f"{piece.kind}_count"] += 1
        stats[f"{piece.kind}_bytes"] += piece.bytes
    return stats
