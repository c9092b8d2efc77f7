"""Which pipelines stand side by side: multisets of compositions (a grouping), each with a lower bound on its
step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hetpipe.partitioners.compositions.composition_bounds import composition_bounds, composition_sizes, compositions, parts_of
from hetpipe.partitioners.compositions.symmetry import Blocks, Symmetry
from hetpipe.partitioners.stage_kinds.plan_class import Load, cluster_sizes, load_of
from hetpipe.partitioners.stage_kinds.space import Array, Counts, Index, Space

Grouping = tuple[Counts, ...]
FINE = 1e8  # stages × loads up to which all are bounded; above, some numbers of full micro-batches


class Bounds:
    """Lower bounds of every composition by replica count and number of samples n ≤ B.

    `loads` are the loads that were bounded, `of[c]` [loads + 1] their bounds (the last: infinite). Row i of
    `cover` [rows, B + 1] says by which load n samples with the i-th micro-batch size are bounded: their own, or where
    these would be too many, one with fewer full micro-batches and no remainder (a pipeline takes no less time for
    more). Row 0 is a single micro-batch of n. `complete` is false where there are too many compositions,
    or too little time: those left out have no bound and are not searched."""

    def __init__(self, space: Space, one_pipeline: bool, most: int, late: Callable[[], bool]) -> None:
        self.late = late
        self.space, self.B = space, space.problem.global_batch
        self.symmetry = Symmetry(space)
        self.comps, self.complete = compositions(self.symmetry, most)
        self.sizes = [b for b in cluster_sizes(space.problem) if b < self.B]
        self.common = {c: composition_sizes(space, c) for c in self.comps}
        self.loads: list[Load] = []
        self.cover = np.full((len(self.sizes) + 1, self.B + 1), -1)
        self.firsts = [c for c in self.comps if self.symmetry.turned(c).comp == c]
        self._lay_out(one_pipeline)
        self.of: dict[Counts, Array] = {c: np.full(len(self.loads) + 1, np.inf) for c in self.firsts}
        self._found: dict[Counts, Array] = {}
        self._windows: tuple[float, dict[Counts, int]] | None = None
        self._least: dict[tuple[Counts, int], Array] = {}
        self._bound()

    def _lay_out(self, one_pipeline: bool) -> None:
        """Which loads are bounded, and what each covers."""
        largest = max((max(sizes) for sizes in self.common.values()), default=0)
        first = self.B if one_pipeline else 1
        rows = [(0, 0, range(first, min(self.B, largest) + 1))]
        rows += [(row, b, range(max(first, b + 1), self.B + 1)) for row, b in enumerate(self.sizes, 1)]
        stages = sum(sum(x > 0 for x in c) for c in self.firsts) * (self.space.L + 1) ** 2
        step = 1 + int(stages * sum(len(samples) for _, _, samples in rows[1:]) / FINE)
        for row, b, samples in rows:
            every = samples if step == 1 or b == 0 else [*range(b, self.B, b * -(-step // b)), self.B]
            self._cover(row, samples, [(n, b or n) for n in every])

    def _cover(self, row: int, samples: range, bounded: list[tuple[int, int]]) -> None:
        """Each number of samples is bounded by the largest of `bounded` (samples, b) that is not above it."""
        if bounded:
            at = np.searchsorted([n for n, _ in bounded], samples, side="right") - 1
            self.cover[row, samples.start : samples.stop] = np.where(at >= 0, at + len(self.loads), -1)
            self.loads += [load_of(n, b) for n, b in bounded]

    def _bound(self) -> None:
        """Fill `of`, load by load: of compositions that have its micro-batch size, or, if it is one micro-batch, none below."""
        parts = parts_of(self.symmetry, self.firsts)
        for i, load in enumerate(self.loads):
            if self.late():
                self.complete = False  # these loads are not looked at
                return
            alone = load.m == 1
            sizes = (self.common[c] for c in self.firsts)
            which = [i for i, has in enumerate(sizes) if (max(has) >= load.b if alone else load.b in has)]
            for row, bound in zip(which, composition_bounds(self.space, parts, which, load).tolist(), strict=True):
                self.of[self.firsts[row]][i] = bound

    def by_size(self, c: Counts) -> Array:
        """[rows, B + 1] bounds for each micro-batch size, row 0 for a single micro-batch."""
        return np.asarray(self.of[self.first(c)][self.cover])

    def first(self, c: Counts) -> Counts:
        """The first of the compositions that exchanges of nodes make of one: their bounds are the same."""
        return self.symmetry.turned(c).comp

    def least(self, c: Counts, R: int) -> Array:
        """Bounds for a plan with R replicas, of which this one has n or more samples, n = 1 … B; for R = 1 that of B alone."""
        key = (self.first(c), min(R, 2))
        if key not in self._least:
            table = self.by_size(c).min(axis=0)
            if R > 1 and key[0] in self._found:
                table = np.maximum(table, self._found[key[0]])
            self._least[key] = table[-1:] if R == 1 else np.minimum.accumulate(table[:0:-1])[::-1]
        return self._least[key]

    def learn(self, c: Counts, table: Array) -> None:
        """Better bounds [B + 1] of a composition in plans of several replicas."""
        c = self.first(c)
        self._found[c] = table
        self._least.pop((c, 2), None)

    def bound(self, grouping: Grouping) -> float:
        """No plan of this grouping is faster: the least T in which its replicas can do B samples."""
        R = len(grouping)
        tables = [self.least(c, R) for c in grouping]
        if R == 1:
            return float(tables[0][-1])
        merged = np.partition(np.concatenate(tables), self.B - 1)[self.B - 1]
        return float(max(merged, *(table[0] for table in tables)))

    def groupings(self, threshold: float) -> Iterator[Grouping]:
        """All groupings of two or more replicas whose capacities within the threshold reach B. Of those that exchanges of nodes
        make the same there is the first, and maybe some others: that whose compositions, in order, are the least. If one of
        these had more of a node than of a later one, while those before have the same of both, to exchange the two would
        make it less, and leave those before as they are."""
        comps, devices, capacity, most, radix = self._packed(threshold)
        if not comps:
            return
        offsets = devices @ radix
        longest, largest, codes = self.B, int(capacity.max()), self.symmetry.codes(comps)

        def add(first: int, left: Index, need: int, chosen: Grouping, blocks: Blocks) -> Iterator[Grouping]:
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
        comps, devices, _, most, radix = self._packed(threshold)
        left = most[(np.array(self.space.devices) - devices) @ radix]
        return {c: max(1, self.B - int(n)) for c, n in zip(comps, left, strict=True)}

    def _packed(self, threshold: float) -> tuple[list[Counts], Index, Index, Index, Index]:
        """Compositions that do any samples within the threshold, in a plan of several replicas; the devices and the most samples
        of each; and the most that parts of the cluster can do, by their number in this radix."""
        fits = {c: int(np.searchsorted(self.least(c, 2), threshold)) for c in self.comps}
        comps = [c for c, n in fits.items() if n]
        devices = np.array([self.space.used(c) for c in comps], dtype=np.int64).reshape(-1, len(self.space.devices))
        capacity = np.array([fits[c] for c in comps], dtype=np.int64)
        radix = np.cumprod([1, *(count + 1 for count in self.space.devices[:-1])])
        return comps, devices, capacity, knapsack(self.space.devices, devices, capacity), radix


def knapsack(counts: Counts, devices: Index, capacity: Index) -> Index:
    """Most samples that any grouping of at most so many devices can do, by mixed-radix index."""
    radix = np.cumprod([1, *(count + 1 for count in counts[:-1])])
    best = np.zeros(int(np.prod(np.array(counts) + 1)), dtype=np.int64)
    offsets = devices @ radix
    for state in sorted(np.ndindex(*(count + 1 for count in counts)), key=sum):
        inside = (devices <= np.array(state)).all(axis=1)
        row = int(np.dot(state, radix))
        best[row] = (capacity[inside] + best[row - offsets[inside]]).max() if inside.any() else 0
    return best
