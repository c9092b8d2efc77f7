"""Which pipelines stand side by side: multisets of compositions (a grouping), each with a lower bound on its
step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.compositions.composition_bounds import (
    RANKS,
    composition_bounds,
    composition_sizes,
    compositions,
)
from hetpipe.partitioners.compositions.symmetry import Blocks, Symmetry
from hetpipe.partitioners.stage_kinds.space import Array, Counts, Load, Space, cluster_sizes, load_of
from hetpipe.planning.partition import never

Grouping = tuple[Counts, ...]
FINE = 1e8  # stages × loads that are bounded one by one; above, on a grid
GRID = 12
CHUNK = 2e5  # numbers in one array


class Bounds:
    """Lower bounds of every composition by replica count and number of samples n ≤ B.

    `loads` are the loads that were bounded, `of[c]` [RANKS, loads + 1] their bounds (the last: infinite). Row i of
    `cover` [rows, B + 1] says by which load n samples with the i-th micro-batch size are bounded: their own, or where
    these would be too many, one with fewer full micro-batches and no remainder (a pipeline takes no less time for
    more). Row 0 is a single micro-batch of n. `complete` is false where there are too many compositions,
    or too little time: those left out have no bound and are not searched."""

    def __init__(
        self,
        space: Space,
        *,
        one_pipeline: bool = False,
        most: int = 10_000,
        late: Callable[[], bool] = never,
    ) -> None:
        self.late = late
        self.space, self.B = space, space.problem.global_batch
        self.symmetry = Symmetry(space)
        self.comps, self.complete = compositions(self.symmetry, most)
        self.sizes = [b for b in cluster_sizes(space.problem) if b < self.B]
        self.common = {c: composition_sizes(space, c) for c in self.comps}
        self.loads: list[Load] = []
        self.cover = np.full((len(self.sizes) + 1, self.B + 1), -1)
        self._lay_out(one_pipeline)
        self.firsts = [c for c in self.comps if self.symmetry.turned(c).comp == c]
        self.of: dict[Counts, Array] = {c: np.full((RANKS, len(self.loads) + 1), np.inf) for c in self.firsts}
        self._found: dict[Counts, Array] = {}
        self._windows: tuple[float, dict[Counts, int]] | None = None
        self._least: dict[tuple[Counts, int], Array] = {}
        self._bound()

    def _lay_out(self, one_pipeline: bool) -> None:
        """Which loads are bounded, and what each covers."""
        largest = max((max(sizes) for sizes in self.common.values()), default=0)
        first = self.B if one_pipeline else 1
        single = range(first, min(self.B, largest) + 1)
        stages = sum(sum(x > 0 for x in c) for c in self.comps) * (self.space.L + 1) ** 2
        fine = stages * (len(single) + sum(self.B - b for b in self.sizes)) <= FINE
        self._cover(0, single, [(n, n) for n in single])
        for row, b in enumerate(self.sizes, 1):
            starts = range(max(first, b + 1), self.B + 1)
            if one_pipeline or fine:
                self._cover(row, starts, [(n, b) for n in starts])
            else:
                grid = [m * b for m in _grid(self.B // b, GRID)]
                self._cover(row, starts, [(n, b) for n in sorted({*grid, self.B})])

    def _cover(self, row: int, samples: range, bounded: list[tuple[int, int]]) -> None:
        """Each number of samples is bounded by the largest of `bounded` (samples, b) that is not above it."""
        if bounded:
            at = np.searchsorted([n for n, _ in bounded], samples, side="right") - 1
            self.cover[row, samples.start : samples.stop] = np.where(at >= 0, at + len(self.loads), -1)
            self.loads += [load_of(n, b) for n, b in bounded]

    def _bound(self) -> None:
        """Fill `of`, some loads at a time: those that the same compositions allow."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        largest = sorted({max(sizes) for sizes in self.common.values()})
        for i, load in enumerate(self.loads):
            if load.m == 1 and not load.q:
                groups[0, next(x for x in largest if x >= load.b)].append(i)
            else:
                groups[load.b, 0].append(i)
        alike: dict[tuple[Counts, ...], list[int]] = defaultdict(list)
        for (b, least), rows in groups.items():
            comps = (c for c in self.comps if (b in self.common[c] if b else max(self.common[c]) >= least))
            alike[tuple(comps)] += rows
        for comps_, rows in alike.items():
            numbers = (self.space.L + 1) ** 2
            size = max(4, int(min(CHUNK / numbers, 50 * CHUNK / numbers / max(1, len(comps_)))))
            for at in range(0, len(rows), size):
                part = rows[at : at + size]
                if self.late():
                    self.complete = False  # these loads are not looked at
                    return
                loads = tuple(self.loads[i] for i in part)
                for c, found in composition_bounds(self.symmetry, list(comps_), "any", loads).items():
                    self.of[c][:, part] = found
                self.space.forget()

    def by_size(self, c: Counts, R: int) -> Array:
        """[rows, B + 1] bounds for each micro-batch size, row 0 for a single micro-batch."""
        return np.asarray(self.of[self.first(c)][min(R, RANKS) - 1][self.cover])

    def first(self, c: Counts) -> Counts:
        """The first of the compositions that exchanges of nodes make of one: their bounds are the same."""
        return self.symmetry.turned(c).comp

    def table(self, c: Counts, R: int) -> Array:
        """[B + 1] bounds for a plan with R replicas, of which this one has n samples."""
        least, c = self.by_size(c, R).min(axis=0), self.first(c)
        return np.maximum(least, self._found[c]) if R > 1 and c in self._found else np.asarray(least)

    def least(self, c: Counts, R: int) -> Array:
        """[B] bounds for n or more samples, n = 1 … B."""
        key = (self.first(c), min(R, RANKS))
        if key not in self._least:
            table = self.table(c, R)
            self._least[key] = table[-1:] if R == 1 else np.minimum.accumulate(table[:0:-1])[::-1]
        return self._least[key]

    def learn(self, c: Counts, table: Array) -> None:
        """Better bounds [B + 1] of a composition in plans of several replicas."""
        c = self.first(c)
        self._found[c] = table
        for R in range(2, RANKS + 1):
            self._least.pop((c, R), None)

    def bound(self, grouping: Grouping) -> float:
        """No plan of this grouping is faster: the least T in which its replicas can do B samples."""
        R = len(grouping)
        tables = [self.least(c, R) for c in grouping]
        if R == 1:
            return float(tables[0][-1])
        merged = np.partition(np.concatenate(tables), self.B - 1)[self.B - 1]
        return float(max(merged, *(table[0] for table in tables)))

    def capacities(self, threshold: float) -> dict[Counts, int]:
        """Most samples of each composition within the threshold, in a plan of several replicas."""
        found = {c: int(np.searchsorted(self.least(c, 2), threshold)) for c in self.comps}
        return {c: n for c, n in found.items() if n}

    def groupings(self, threshold: float) -> Iterator[Grouping]:
        """All groupings of two or more replicas whose capacities within the threshold reach B. Of those that exchanges of nodes
        make the same there is the first, and maybe some others: that whose compositions, in order, are the least. If one of
        these had more of a node than of a later one, while those before have the same of both, to exchange the two would
        make it less, and leave those before as they are."""
        capacities = self.capacities(threshold)
        comps = list(capacities)
        if not comps:
            return
        devices, capacity = np.array([self.space.used(c) for c in comps]), np.array(list(capacities.values()))
        radix = np.cumprod([1, *(count + 1 for count in self.space.devices[:-1])])
        most, offsets = knapsack(self.space.devices, devices, capacity), devices @ radix
        longest, largest, codes = self.B, int(capacity.max()), self.symmetry.codes(comps)

        def add(
            first: int, left: NDArray[np.int64], need: int, chosen: Grouping, blocks: Blocks
        ) -> Iterator[Grouping]:
            if len(chosen) > 1 and need <= 0:
                yield chosen
            if need > (longest - len(chosen)) * largest or len(chosen) == longest:
                return
            inside = np.flatnonzero((devices[first:] <= left).all(axis=1)) + first
            enough = capacity[inside] + most[int(left @ radix) - offsets[inside]] >= need
            inside = inside[enough]
            if blocks:
                inside = inside[self.symmetry.rising(codes[inside], blocks)]
            for i in inside.tolist():
                apart = self.symmetry.told_apart(codes[i], blocks) if blocks else ()
                yield from add(i, left - devices[i], need - int(capacity[i]), (*chosen, comps[i]), apart)

        yield from add(0, np.array(self.space.devices), self.B, (), self.symmetry.blocks)

    def windows(self, threshold: float) -> dict[Counts, int]:
        """The fewest samples that each composition must do in a plan of several replicas within the threshold: what
        all other devices cannot."""
        if self._windows is None or self._windows[0] != threshold:
            self._windows = threshold, self._fewest(threshold)
        return self._windows[1]  # what was learned since would only narrow it

    def _fewest(self, threshold: float) -> dict[Counts, int]:
        capacities = self.capacities(threshold)
        comps = list(capacities)
        if not comps:
            return {}
        devices, capacity = np.array([self.space.used(c) for c in comps]), np.array(list(capacities.values()))
        radix = np.cumprod([1, *(count + 1 for count in self.space.devices[:-1])])
        most = knapsack(self.space.devices, devices, capacity)
        left = most[(np.array(self.space.devices) - devices) @ radix]
        return {c: max(1, self.B - int(n)) for c, n in zip(comps, left, strict=True)}


def _grid(M: int, size: int) -> list[int]:
    if size >= M:
        return list(range(1, M + 1))
    steps = np.unique(np.geomspace(size // 4, M, size).astype(int)).tolist()
    return sorted({*range(1, size // 4), *steps, M})


def knapsack(
    counts: Counts, devices: NDArray[np.int64], capacity: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Most samples that any grouping of at most so many devices can do, by mixed-radix index."""
    radix = np.cumprod([1, *(count + 1 for count in counts[:-1])])
    best = np.zeros(int(np.prod(np.array(counts) + 1)), dtype=np.int64)
    offsets = devices @ radix
    for state in sorted(np.ndindex(*(count + 1 for count in counts)), key=sum):
        inside = (devices <= np.array(state)).all(axis=1)
        row = int(np.dot(state, radix))
        best[row] = (capacity[inside] + best[row - offsets[inside]]).max() if inside.any() else 0
    return best
