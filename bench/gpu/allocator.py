"""What torch's allocator of a card says."""

from __future__ import annotations

import gc
from typing import Protocol

import torch


class Allocator(Protocol):
    """Bytes that are in use. `collect` gives back what nothing refers to; `peak` is the most since `begin`."""

    def collect(self) -> None: ...
    def used(self) -> int: ...
    def begin(self) -> None: ...
    def peak(self) -> int: ...


class CardAllocator:
    """That of a card."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def collect(self) -> None:
        """Give back what nothing refers to, to the card as well."""
        gc.collect()
        torch.cuda.empty_cache()

    def used(self) -> int:
        """Bytes in use now."""
        return torch.cuda.memory_allocated(self.device)

    def begin(self) -> None:
        """The peak counts from here."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """The most bytes in use since `begin`."""
        return torch.cuda.max_memory_allocated(self.device)


def allocator_of(device: torch.device) -> Allocator | None:
    """The allocator of a card; a CPU has none that could be asked."""
    return CardAllocator(device) if device.type == "cuda" else None
