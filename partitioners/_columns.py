"""How many micro-batches a pipeline of each composition can do within a step: the columns of the counted
planner.

`Columns.most(c, T, R)` is an upper bound: in no plan of at least R replicas does a pipeline of composition c do
more micro-batches and let the step end within T. It rests on the bounds of `_floors` at some numbers of
micro-batches ("points"). A pipeline takes no less time for more micro-batches (leave out the last one: the
order of what is left is that of the smaller number, and a longest path does not grow when nodes are taken
out), so if m is the first point whose bound is above T, m − 1 is the most. `refine` adds the points in
between, and is called only for compositions that the linear program uses."""

from __future__ import annotations

from itertools import combinations_with_replacement, product

import numpy as np

from hetpipe.partitioners._floors import Suffixes, _extend, hops
from hetpipe.partitioners._space import Array, Counts, Load, Space

POINTS = 8  # points added at a time


class Columns:
    """All compositions of at most `stages` devices, at micro-batch size b."""

    def __init__(self, space: Space, b: int, grid: list[int], stages: int) -> None:
        self.space, self.b, self.need = space, b, space.problem.global_batch // b
        self.comps = short_compositions(space, b, stages)
        self.ends: dict[Counts, dict[int, Array]] = {c: {} for c in self.comps}  # [K, L + 1] by m
        self._bounds: dict[tuple[Counts, int], tuple[list[int], Array]] = {}
        self.add(self.comps, grid)

    def add(self, comps: list[Counts], points: list[int], only: Counts | None = None) -> None:
        """Bounds at `points` for these compositions, which come with all of their parts."""
        loads = tuple(Load(self.b, m) for m in points)
        for family in self.space.families:
            links = hops(self.space, loads)
            table: dict[tuple[Counts, int], Suffixes] = {}
            for c in comps:
                for k in (int(k) for k in np.flatnonzero(c)):
                    rest = (*c[:k], c[k] - 1, *c[k + 1 :])
                    table[c, k], first = _extend(self.space, table, links, rest, k, family, loads)
                    if only in (None, c):
                        self._keep(c, k, points, first + self.space.optimizer(k)[0])
        self.space.forget()

    def _keep(self, c: Counts, k: int, points: list[int], ends: Array) -> None:
        for g, m in enumerate(points):
            known = self.ends[c].setdefault(m, np.full((self.space.K, self.space.L + 1), np.inf))
            np.minimum(known[k], ends[g], out=known[k])

    def bounds(self, c: Counts, R: int) -> tuple[list[int], Array]:
        """Points in order, and the bound at each on the step of a plan of R or more replicas."""
        found = self._bounds.get((c, R))
        if found is None or len(found[0]) != len(self.ends[c]):
            points = sorted(self.ends[c])
            sums = np.stack([self.space.sum_floor(k, R)[0] for k in range(self.space.K)])
            table = np.stack([self.ends[c][m] for m in points])  # [points, K, L + 1]
            found = points, (table + sums).min(axis=(1, 2))
            self._bounds[c, R] = found
        return found

    def window(self, c: Counts, T: float, R: int) -> tuple[int, int]:
        """(the last point within T, the first one above it); the most is the latter less one."""
        points, bounds = self.bounds(c, R)
        above = np.flatnonzero(bounds > T)
        if not len(above):
            return points[-1], self.need + 1
        first = int(above[0])
        return (points[first - 1] if first else 0), points[first]

    def most(self, T: float, R: int) -> Array:
        """Most micro-batches of every composition, [C]."""
        return np.array([min(self.need, self.window(c, T, R)[1] - 1) for c in self.comps], dtype=np.float64)

    def refine(self, c: Counts, T: float, R: int) -> bool:
        """Add points where the most of c is not known exactly; False if it is."""
        low, high = self.window(c, T, R)
        if high - low <= 1 or low >= self.need:
            return False
        inside = np.unique(np.linspace(low + 1, min(high - 1, self.need), POINTS).astype(int)).tolist()
        inside = [m for m in inside if m not in self.ends[c]]
        if not inside:
            return False
        parts = sorted((p for p in product(*(range(x + 1) for x in c)) if sum(p)), key=sum)
        self.add(parts, inside, only=c)
        return True


def short_compositions(space: Space, b: int, stages: int) -> list[Counts]:
    """Counts of at most `stages` devices that were measured at b, smallest first."""
    usable = [k for k in range(space.K) if space.measured(k, b)]
    found = []
    for n in range(1, min(stages, space.L) + 1):
        for chosen in combinations_with_replacement(usable, n):
            c = tuple(chosen.count(k) for k in range(space.K))
            if all(x <= most for x, most in zip(c, space.counts, strict=True)):
                found.append(c)
    return found


def grid_of(most: int, ratio: float = 1.2) -> list[int]:
    """Every number up to 8, then some, up to `most`."""
    points = list(range(1, min(8, most) + 1))
    while points[-1] < most:
        points.append(min(most, max(points[-1] + 1, int(points[-1] * ratio))))
    return points
