"""How much work a pipeline may be given: a micro-batch size, and a range of samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._stages import Stages

Index = NDArray[np.int64]
COARSE = 1.1  # ratio of the samples of one load, at first


class Loads(NamedTuple):
    """[G] loads: which micro-batch size, the samples from `low` to `high`, and a row of `Columns.held` for as many
    samples or fewer."""

    size: Index
    low: Index
    high: Index
    held: Index

    def pick(self, rows: NDArray[Any] | slice) -> Loads:
        """Some of them."""
        return Loads._make(column[rows] for column in self)

    def split(self, ratio: float) -> Loads:
        """The same in ranges of at most this ratio."""
        found = []
        for size, low, high, held in zip(*(x.tolist() for x in self), strict=True):
            while low <= high:
                end = min(high, max(low, int(low * ratio)))
                found.append((size, low, end, held))
                low = end + 1
        return Loads(*np.array(found, dtype=np.int64).reshape(-1, 4).T)

    def row(self, size: int, samples: int) -> int:
        """The last load of at most so many samples at this micro-batch size."""
        return int(np.flatnonzero((self.size == size) & (self.low <= samples))[-1])


def all_loads(stages: Stages, most: int) -> Loads:
    """All samples up to `most` at every micro-batch size, in ranges of at most COARSE."""
    found: list[tuple[int, ...]] = []
    for i in range(len(stages.sizes)):
        n = first_samples(stages, i)
        while n <= most:
            high = min(most, max(n, int(n * COARSE)))
            found.append((i, n, high, len(found)))
            n = high + 1
    return Loads(*np.array(found, dtype=np.int64).reshape(-1, 4).T)


def first_samples(stages: Stages, i: int) -> int:
    """The fewest samples at a micro-batch size: fewer than the size below are one micro-batch of that size's, if it
    was measured on all kinds that this one was."""
    usable = stages.usable
    return stages.sizes[i - 1] + 1 if i and not (usable[i] & ~usable[i - 1]).any() else 1
