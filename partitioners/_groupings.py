"""Which pipelines stand side by side: multisets of compositions (a grouping), each with a lower bound on its
step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._floors import RANKS, compositions, floors
from hetpipe.partitioners._space import Array, Counts, Load, Space

Grouping = tuple[Counts, ...]


class Bounds:
    """Lower bounds of every composition at one micro-batch size, by replica count and number of micro-batches
    m ≤ M.

    `of[c]` is [2, RANKS, M + 1]: without and with the remainder of the batch; index m = 0 is not used. For M
    above `grid_size` the bound is taken at the nearest smaller m of a grid (a pipeline takes no less time for
    more)."""

    def __init__(
        self, space: Space, b: int, *, one_pipeline: bool = False, most: int = 10_000, grid_size: int = 40
    ) -> None:
        self.space, self.b = space, b
        batch = space.problem.global_batch
        self.M, self.q = -(-batch // b), batch % b
        self.comps, self.complete = compositions(space, b, most)
        grid = [self.M] if one_pipeline else _grid(self.M, grid_size)
        at = np.searchsorted(grid, np.arange(self.M + 1), side="right") - 1
        self.of: dict[Counts, Array] = {c: np.full((2, RANKS, self.M + 1), np.inf) for c in self.comps}
        for rest, q in enumerate([0, self.q] if self.q else [0]):
            loads = tuple(Load(b, m, q) for m in grid)
            for family in space.families:
                for c, found in floors(space, self.comps, family, loads).items():
                    table = np.where(at >= 0, found[:, np.maximum(at, 0)], np.inf)
                    self.of[c][rest] = np.minimum(self.of[c][rest], table)
            space.forget()

    def table(self, c: Counts, R: int) -> Array:
        """[2, M + 1] bounds for a plan with R replicas."""
        return self.of[c][:, min(R, RANKS) - 1]

    def least(self, c: Counts, R: int) -> Array:
        """[M] bounds for m = 1 … M, with or without the remainder."""
        table = self.table(c, R)
        return np.asarray(table[int(self.q > 0 and R == 1)] if R == 1 else table.min(axis=0))[1:]

    def bound(self, grouping: Grouping) -> float:
        """No plan of this grouping is faster: the least T in which its replicas can do M micro-batches."""
        R = len(grouping)
        tables = [self.least(c, R) for c in grouping]
        if R == 1:
            return float(tables[0][-1])
        merged = np.partition(np.concatenate(tables), self.M - 1)[self.M - 1]
        return float(max(merged, *(table[0] for table in tables)))

    def capacities(self, threshold: float) -> dict[Counts, int]:
        """Most micro-batches of each composition within the threshold, in a plan of several replicas."""
        found = {c: np.flatnonzero(self.least(c, 2) < threshold) for c in self.comps}
        return {c: int(m[-1]) + 1 for c, m in found.items() if len(m)}

    def groupings(self, threshold: float) -> Iterator[Grouping]:
        """All groupings of two or more replicas whose capacities within the threshold reach M."""
        capacities = self.capacities(threshold)
        comps = list(capacities)
        if not comps:
            return
        devices, capacity = np.array(comps), np.array(list(capacities.values()))
        radix = np.cumprod([1, *(count + 1 for count in self.space.counts[:-1])])
        most, offsets = _most(self.space.counts, devices, capacity, radix), devices @ radix

        def add(first: int, left: NDArray[np.int64], need: int, chosen: Grouping) -> Iterator[Grouping]:
            if len(chosen) > 1 and need <= 0:
                yield chosen
            if len(chosen) == self.M:
                return
            inside = np.flatnonzero((devices[first:] <= left).all(axis=1)) + first
            enough = capacity[inside] + most[int(left @ radix) - offsets[inside]] >= need
            for i in inside[enough].tolist():
                yield from add(i, left - devices[i], need - int(capacity[i]), (*chosen, comps[i]))

        yield from add(0, np.array(self.space.counts), self.M, ())


def _grid(M: int, size: int) -> list[int]:
    if size >= M:
        return list(range(1, M + 1))
    steps = np.unique(np.geomspace(size // 4, M, size).astype(int)).tolist()
    return sorted({*range(1, size // 4), *steps, M})


def _most(
    counts: Counts, devices: NDArray[np.int64], capacity: NDArray[np.int64], radix: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Most micro-batches that any grouping of at most so many devices can do, by mixed-radix index (a knapsack)."""
    best = np.zeros(int(np.prod(np.array(counts) + 1)), dtype=np.int64)
    offsets = devices @ radix
    for state in sorted(np.ndindex(*(count + 1 for count in counts)), key=sum):
        inside = (devices <= np.array(state)).all(axis=1)
        row = int(np.dot(state, radix))
        best[row] = (capacity[inside] + best[row - offsets[inside]]).max() if inside.any() else 0
    return best
