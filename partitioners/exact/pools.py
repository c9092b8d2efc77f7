"""The pipelines of every composition that a plan could use, listed once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hetpipe.partitioners.compositions.groupings import Bounds
from hetpipe.partitioners.exact.listing import rows_below
from hetpipe.partitioners.exact.pricing import PricedPipelines, concatenated, priced
from hetpipe.partitioners.stage_kinds.plan_class import families_of, load_of
from hetpipe.partitioners.stage_kinds.space import Array, Counts, Space


class Listing(NamedTuple):
    """Pipelines below the threshold; `dropped` is the least bound of what was given up for want of room (else infinite)."""

    pipelines: PricedPipelines
    dropped: float


class Pools:
    """Pipelines by composition, at most about `room` each, below a threshold that only falls."""

    def __init__(self, space: Space, bounds: Bounds, room: int, late: Callable[[], bool]) -> None:
        self.space, self.bounds, self.room, self.late = space, bounds, room, late
        self._known: dict[Counts, Listing] = {}

    def known(self, c: Counts) -> bool:
        """Whether the pipelines of a composition are listed."""
        return self.bounds.first(c) in self._known

    def dropped(self, c: Counts) -> float:
        """The least bound of what was not listed."""
        return self._known[self.bounds.first(c)].dropped

    def list_all(self, c: Counts, first: int, threshold: float) -> None:
        """All pipelines with `first` or more samples below the threshold, in plans of several replicas."""
        c = self.bounds.first(c)
        self._known[c] = found = self.below(c, range(first, self.bounds.B), 2, threshold)
        self.bounds.learn(c, self._learned(found, first, threshold))

    def below(self, c: Counts, shares: range, R: int, threshold: float) -> Listing:
        """The pipelines of every micro-batch size and family with a bound below the threshold, for these numbers of samples;
        where there is no room for all, the threshold is lowered to what there is room for."""
        by_size, parts, dropped = self.bounds.by_size(c), list[PricedPipelines](), math.inf
        for (row, b), n in ((x, n) for x in enumerate([0, *self.bounds.sizes]) for n in shares):
            load, least = load_of(n, b or n), float(by_size[row, n])
            for family in families_of(self.space.families, sum(c), load.m) if least < threshold else ():
                if self.late():
                    dropped = min(dropped, least)
                    break
                rows, limit = rows_below(self.space, c, family, load, threshold, least, self.room)
                dropped = min(dropped, limit) if limit < threshold else dropped
                found = priced(self.space, rows, family, load, R)
                parts.append(found.pick(found.bound < threshold))
                if sum(part.number for part in parts) > self.room:
                    every = _ordered(concatenated(parts))
                    threshold = dropped = min(dropped, float(every.bound[self.room]))
                    parts = [every.pick(every.bound < threshold)]
        return Listing(_ordered(concatenated(parts)) if parts else empty(self.space, sum(c)), dropped)

    def _learned(self, found: Listing, first: int, threshold: float) -> Array:
        """Bounds [B + 1] by what was listed: the least bound, or the threshold where there is none."""
        table = np.zeros(self.bounds.B + 1)
        table[first : self.bounds.B] = min(threshold, found.dropped)
        np.minimum.at(table, found.pipelines.samples, found.pipelines.bound)
        return table

    def rows(self, c: Counts) -> PricedPipelines:
        """The listed pipelines."""
        first, kinds = self.bounds.symmetry.turned(c)
        found = self._known[first].pipelines
        return found._replace(kinds=np.argsort(kinds)[found.kinds])


def empty(space: Space, n: int) -> PricedPipelines:
    """No pipelines of n stages."""
    whole, real = np.zeros((0, n), np.int64), np.zeros((0, n))
    load, ends = np.zeros((0, 3), np.int64), np.zeros((0, n + 1), np.int64)
    return PricedPipelines(load, whole, ends, whole, real, np.zeros((0, space.L)), np.zeros(0))


def _ordered(rows: PricedPipelines) -> PricedPipelines:
    """The least bound first."""
    return rows.pick(np.argsort(rows.bound, kind="stable"))
