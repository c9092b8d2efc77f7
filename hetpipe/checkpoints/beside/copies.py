"""Copies of the tensors that a rank saves, in host memory: the next step may change the tensors while copies are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hetpipe.checkpoints.stores.layout import Described
from hetpipe.files.units import human_bytes
from hetpipe.processes.world import World

MEMORY = Path("/proc/meminfo")


class HostCopies:
    """Keeps its memory from one save to the next for tensors whose shape and type stay. What comes from a card goes into pinned
    memory, of which torch takes a power of two of bytes for each tensor."""

    def __init__(self) -> None:
        self._kept = dict[str, Tensor]()
        self._cards = set[torch.device]()  # whose copies may still be under way

    def make_room(self, wanted: Mapping[str, Described], world: World, *, pinned: bool) -> str | None:
        """Have memory for these tensors of this rank, and for no others, on all ranks. Returns why not, where a host lacks it;
        then there is none. Collective."""
        self._kept = {key: kept for key, kept in self._kept.items() if key in wanted and _is_like(kept, wanted[key])}
        new = {key: like for key, like in wanted.items() if key not in self._kept}
        own = sum(_pinned_bytes(like.size_bytes) if pinned else like.size_bytes for like in new.values())
        hosts = world.hosts or ("",) * world.size
        everywhere = zip((hosts[rank] for rank in world.ranks), world.gather(own), strict=True)
        needed = sum(size for host, size in everywhere if host == hosts[world.rank])
        faults = zip(world.ranks, world.gather(self._fault(new, needed, pinned=pinned)), strict=True)
        for rank, fault in faults:
            if fault:
                self.give_back()
                return f"of rank {rank}{f' on host {hosts[rank]}' if world.hosts else ''}: {fault}"
        return None

    def _fault(self, new: Mapping[str, Described], needed: int, *, pinned: bool) -> str:
        """Have memory for these, too, of the bytes that are `needed` on this host; or say why not."""
        free = free_bytes() if new else math.inf
        if needed > free:
            return f"copies need {human_bytes(needed)}, and {human_bytes(free)} are free"
        try:
            self._kept |= {key: torch.empty(d.shape, dtype=d.dtype, pin_memory=pinned) for key, d in new.items()}
        except (RuntimeError, MemoryError) as error:
            said, _, _ = str(error).partition("\n")
            return f"copies need {human_bytes(needed)}, which the system does not give: {said}"
        return ""

    def give_back(self) -> None:
        """Have no memory any more."""
        self._kept = {}

    def take(self, key: str, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor, which is there after `settle`."""
        if tensor.is_cuda:
            self._cards.add(tensor.device)
        return self._kept[key].copy_(tensor, non_blocking=True)

    def settle(self) -> None:
        """Wait until all copies are there."""
        while self._cards:
            torch.cuda.current_stream(self._cards.pop()).synchronize()


def _is_like(tensor: Tensor, like: Described) -> bool:
    return tuple(tensor.shape) == tuple(like.shape) and tensor.dtype == like.dtype


def _pinned_bytes(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def free_bytes() -> float:
    """What the system says that processes may still take of this host's memory; infinite where it does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return math.inf
