"""Random numbers that are drawn here, by layers, data sets and models, are nobody else's: torch's, numpy's and Python's
generators are afterwards as they were. A user's shuffled loader, say, draws its order from torch's, and must find it alike on all
ranks, of which each draws another number of masks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


def seed_of(*place: int | str) -> int:
    """A seed for whatever stands in this place, as (seed, rank, step); a number alone is one.

    >>> seed_of(7), seed_of(7, 0) == seed_of(7, 1)
    (7, False)
    """
    if len(place) == 1 and isinstance(place[0], int):
        return place[0]
    return int.from_bytes(blake2b(repr(place).encode(), digest_size=8).digest())


class Generators(NamedTuple):
    """The states of the generators that have no device: Python's, numpy's and torch's."""

    python: Any
    numpy: Any
    torch: Tensor

    @classmethod
    def now(cls) -> Generators:
        """As they are."""
        return cls(random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state())  # that of numpy: half the time

    def restore(self) -> None:
        """Make them as they were."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)

    @property
    def moved(self) -> bool:
        """Whether anything was drawn since."""
        now = Generators.now()
        return not (self.python == now.python and _same(self.numpy, now.numpy) and torch.equal(self.torch, now.torch))


def _same(one: Any, other: Any) -> bool:
    """Whether two states of numpy's generator are equal: dictionaries of numbers, arrays and dictionaries."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(np.array_equal(one, other))


@contextmanager
def drawing(*place: int | str, devices: Sequence[torch.device] | None = None) -> Iterator[None]:
    """In here all generators are seeded by `place`, and afterwards they are as they were: those of the CPU, and of these GPUs (by
    default of the current one, if CUDA has begun)."""
    if devices is None:
        devices = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_initialized() else []
    gpus = [device for device in devices if device.type == "cuda"]
    before, cards = Generators.now(), [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    _seed(seed_of(*place), gpus)
    try:
        yield
    finally:
        before.restore()
        for gpu, state in zip(gpus, cards, strict=True):
            torch.cuda.set_rng_state(state, gpu)


def _seed(seed: int, gpus: Sequence[torch.device]) -> None:
    """Of these devices only: torch.manual_seed would seed all GPUs anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    for gpu in gpus:
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(seed)
