"""The pipelines of every composition that a plan could use, listed once."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hetpipe.partitioners.compositions.groupings import Bounds
from hetpipe.partitioners.exact.listing import rows_below
from hetpipe.partitioners.exact.pricing import PricedPipelines, concatenated, priced
from hetpipe.partitioners.stage_kinds.plan_class import families_of, load_of
from hetpipe.partitioners.stage_kinds.space import Counts, Space

Listing = tuple[PricedPipelines, float]  # those below a threshold; the least bound of what was given up for want of room


class Pools:
    """Pipelines by composition, at most about `room` each, below a threshold that only falls. Those listed so far are `known`, by
    the first composition that exchanges of nodes make of theirs."""

    def __init__(self, space: Space, bounds: Bounds, room: int, late: Callable[[], bool]) -> None:
        self.space, self.bounds, self.room, self.late = space, bounds, room, late
        self.known: dict[Counts, Listing] = {}

    def list_all(self, c: Counts, first: int, threshold: float) -> None:
        """All pipelines with `first` or more samples below the threshold, in plans of several replicas. What is learned are
        bounds [B + 1]: the least of what was listed, or the threshold where there is none."""
        c, table = self.bounds.first(c), np.zeros(self.bounds.B + 1)
        found, dropped = self.known[c] = self.below(c, range(first, self.bounds.B), 2, threshold)
        table[first : self.bounds.B] = min(threshold, dropped)
        np.minimum.at(table, found.samples, found.bound)
        self.bounds.learn(c, table)

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
                    every = concatenated(parts)
                    threshold = dropped = min(dropped, float(np.partition(every.bound, self.room)[self.room]))
                    parts = [every.pick(every.bound < threshold)]
        return concatenated(parts) if parts else empty(self.space, sum(c)), dropped

    def rows(self, c: Counts) -> PricedPipelines:
        """The listed pipelines."""
        first, kinds = self.bounds.symmetry.turned(c)
        found = self.known[first][0]
        return found._replace(kinds=np.argsort(kinds)[found.kinds])


def empty(space: Space, n: int) -> PricedPipelines:
    """No pipelines of n stages."""
    whole, real = np.zeros((0, n), np.int64), np.zeros((0, n))
    load, ends = np.zeros((0, 3), np.int64), np.zeros((0, n + 1), np.int64)
    return PricedPipelines(load, whole, ends, whole, real, np.zeros((0, space.L)), np.zeros(0))
