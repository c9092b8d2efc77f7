"""From the linear program to real pipelines: whole numbers of each kind of replica, exact shares, gradient sums."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds as Box
from scipy.optimize import LinearConstraint, milp

from hetpipe.partitioners._batch import Pipelines
from hetpipe.partitioners._candidates import priced
from hetpipe.partitioners._classes import Classes
from hetpipe.partitioners._columns import Columns
from hetpipe.partitioners._space import Array, Counts, Load, families_of, link_seconds

ROWS, TRIES, ROUNDS = 96, 6, 24


class Group(NamedTuple):
    """`number` replicas of one pipeline (one row), with m micro-batches each."""

    number: int
    m: int
    pipeline: Pipelines


class Fleet:
    """Real pipelines at one micro-batch size."""

    def __init__(self, space: Classes, columns: Columns, most_price: float = math.inf) -> None:
        self.space, self.columns, self.b, self.most_price = space, columns, columns.b, most_price
        batch = space.problem.global_batch
        self.M, self.q = -(-batch // self.b), batch % self.b
        self._rows: dict[tuple[Counts, int, int], Pipelines | None] = {}
        self._actual: dict[tuple[Counts, float, int], tuple[int, Pipelines | None]] = {}

    def pipeline(self, c: Counts, m: int, R: int, T: float) -> Pipelines | None:
        """The pipeline of this composition and share that would end a step soonest, if it does within T."""
        key = (c, m, R)
        known = self._rows.get(key)
        if known is None and key not in self._rows:
            load = Load(self.b, m)
            found = [priced(self.space, c, family, load, R, T * (1 + 1e-9), ROWS).pipelines
                     for family in families_of(self.space.families, sum(c), m)]  # fmt: skip
            rows = [x.pick(np.arange(1)) for x in found if x.number]
            known = min(rows, key=lambda x: float(x.bound[0])) if rows else None
            if known is not None:
                self._rows[key] = known
        return known if known is not None and known.bound[0] <= T else None

    def actual(self, c: Counts, most: int, R: int, T: float) -> tuple[int, Pipelines | None]:
        """The most micro-batches that a pipeline was found for, trying from `most` down."""
        key = (c, T, R)
        if key not in self._actual:
            self._actual[key] = 0, None
            steps = [0, 1, 2, 3, 5, 8, *(most * x // 16 for x in (2, 3, 4, 6, 8))]
            for m in sorted({most - s for s in steps if most > s}, reverse=True):
                row = self.pipeline(c, m, R, T)
                if row is not None:
                    self._actual[key] = m, row
                    break
        return self._actual[key]

    def groups(self, T: float, R: int, most: int) -> list[Group] | None:
        """Replicas that do the whole batch within T, as far as their own gradient sums go, at most `most` of them;
        None if none were found."""
        comps = self.columns.comps
        capacity = np.minimum(self.columns.most(T, R), self.M)
        exact: dict[int, Pipelines | None] = {}
        for _ in range(ROUNDS):
            y = self._program(capacity, most)
            if y is None or float(capacity @ y) < self.M:
                return None
            unknown = [i for i in np.flatnonzero(y).tolist() if i not in exact]
            if not unknown:
                return self._dealt([Group(int(y[i]), int(capacity[i]), row)
                                    for i, row in exact.items() if row is not None and y[i] > 0])  # fmt: skip
            for i in unknown:
                capacity[i], exact[i] = self.actual(comps[i], int(capacity[i]), R, T)
        return None

    def _program(self, capacity: Array, most: int) -> Array | None:
        """Whole numbers of pipelines with the largest capacity (HiGHS)."""
        devices = np.array(self.columns.comps, dtype=np.float64).T
        rows = [
            LinearConstraint(devices, -np.inf, np.array(self.space.counts)),
            LinearConstraint(np.ones((1, len(capacity))), 1, most),
        ]
        if math.isfinite(self.most_price):
            prices = np.array([self.space.price(c) for c in self.columns.comps])
            rows.append(LinearConstraint(prices[None, :], -np.inf, self.most_price * (1 + 1e-12)))
        fewer = 1e-4 * devices.sum(axis=0) / sum(self.space.counts)
        useful = np.where(capacity > 0, float(max(self.space.counts)), 0.0)
        found = milp(fewer - capacity, constraints=rows, integrality=np.ones(len(capacity)),
                     bounds=Box(0, np.minimum(useful, self.M)), options={"time_limit": 0.2, "mip_rel_gap": 1e-4})  # fmt: skip
        return None if found.x is None else np.rint(found.x)

    def _dealt(self, groups: list[Group]) -> list[Group]:
        """The same replicas with M micro-batches in all: one less for as many as there are too many."""
        surplus = sum(g.number * g.m for g in groups) - self.M
        while surplus > 0:
            groups = sorted(groups, key=lambda g: (-float(g.pipeline.bound[0]) * g.m, g.m))
            left: list[Group] = []
            for g in groups:
                fewer = min(surplus, g.number)
                surplus -= fewer
                left += [Group(g.number - fewer, g.m, g.pipeline), Group(fewer, g.m - 1, g.pipeline)]
            groups = [g for g in left if g.number > 0 and g.m > 0]
        return groups

    def step(self, groups: list[Group]) -> float:
        """About the step of these replicas: gradient sums as in `hetpipe.simulator`, over the slowest link between
        nodes, and counted."""
        space, R = self.space, sum(g.number for g in groups)
        free = [g.pipeline.ready[0].copy() for g in groups]
        cuts = sorted({int(x) for g in groups for x in g.pipeline.cuts[0]})
        links = space.between if space.largest_node < R or not space.links else space.links
        synced = max(float(f.max()) for f in free)
        for lo, hi in reversed(list(itertools.pairwise(cuts))):
            at = [int((g.pipeline.cuts[0, 1:-1] <= lo).sum()) for g in groups]
            size = np.array(space.untied[lo:hi].sum() / R)
            if R > 1 and size > 0:
                start = max(float(f[s]) for f, s in zip(free, at, strict=True))
                end = start + 2 * (R - 1) * max((float(link_seconds(x, size)) for x in links), default=0.0)
                for f, s in zip(free, at, strict=True):
                    f[s] = end
                synced = max(synced, end)
        return synced + max(float(g.pipeline.optimizer[0]) for g in groups)
