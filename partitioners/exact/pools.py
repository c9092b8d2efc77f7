"""The pipelines of every composition that a plan of several replicas could use, listed once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetpipe.partitioners.compositions.groupings import Bounds
from hetpipe.partitioners.exact.batch import PricedPipelines
from hetpipe.partitioners.exact.candidates import Listing, Variant, concatenated, priced
from hetpipe.partitioners.exact.pricing import bound
from hetpipe.partitioners.stage_kinds.space import Array, Counts, Space, families_of, load_of

TABLES = 1_000_000  # stages, by variant, place, kind, first and last layer, that are computed at once
SPLITS = 3  # a list that is too long is made in at most 2^3 parts


class Pools:
    """Pipelines by composition, below a threshold that only falls."""

    def __init__(self, space: Space, bounds: Bounds, late: Callable[[], bool]) -> None:
        self.space, self.bounds, self.late = space, bounds, late
        self._known: dict[Counts, Listing] = {}
        self._bounded: dict[tuple[Counts, int], PricedPipelines] = {}

    def variants(self, c: Counts, shares: range, R: int, threshold: float) -> list[Variant]:
        """Every micro-batch size and family with a bound below the threshold, for these numbers of samples."""
        by_size = self.bounds.by_size(c, R)
        found = []
        for row, b in enumerate([0, *self.bounds.sizes]):
            for n in shares:
                if by_size[row, n] < threshold:
                    load = load_of(n, b or n)
                    families = families_of(self.space.families, sum(c), load.m)
                    found += [Variant(family, load) for family in families]
        return found

    def known(self, c: Counts) -> bool:
        """Whether the pipelines of a composition are listed."""
        return self.bounds.first(c) in self._known

    def dropped(self, c: Counts) -> float:
        """The least bound of what was not listed for want of room."""
        return self._known[self.bounds.first(c)].dropped

    def list_all(self, c: Counts, first: int, threshold: float, limit: int) -> None:
        """All pipelines with `first` or more samples below the threshold, in plans of several replicas."""
        c = self.bounds.first(c)
        variants = self.variants(c, range(first, self.bounds.B), 2, threshold)
        self._known[c] = found = self._all(c, variants, threshold, limit)
        self.bounds.learn(c, self._learned(found, first, threshold))

    def _all(
        self, c: Counts, variants: list[Variant], threshold: float, limit: int, splits: int = SPLITS
    ) -> Listing:
        """Where the rows, or the tables of their stages, are too many at once: half of the variants, and the other half."""
        large = len(variants) > 1 and len(variants) * sum(c) * np.count_nonzero(c) * (self.space.L + 1) ** 2 > TABLES
        if not large:
            found = priced(self.space, c, variants, 2, threshold, limit, self.late)
            if np.isinf(found.dropped) or len(variants) <= 1 or splits == 0 or self.late():
                return Listing(self.useful(found.pipelines), found.dropped)
        half, left = len(variants) // 2, splits if large else splits - 1
        parts = [self._all(c, part, threshold, limit, left) for part in (variants[:half], variants[half:])]
        merged = concatenated([part.pipelines for part in parts], sum(c))
        merged = self.useful(merged.pick(np.argsort(merged.bound, kind="stable")))
        return Listing(merged, min(part.dropped for part in parts))

    def _learned(self, found: Listing, first: int, threshold: float) -> Array:
        """Bounds [B + 1] by what was listed: the least bound, or the threshold where there is none."""
        table = np.zeros(self.bounds.B + 1)
        table[first : self.bounds.B] = min(threshold, found.dropped)
        samples = found.pipelines.load[:, 1]
        np.minimum.at(table, samples, found.pipelines.bound)
        return table

    def rows(self, c: Counts, R: int, threshold: float) -> PricedPipelines:
        """The listed pipelines with their bounds in plans of R replicas, those below the threshold, least first."""
        key = (c, R)
        if key not in self._bounded:
            first, kinds = self.bounds.symmetry.turned(c)
            found = self._known[first].pipelines
            found = found._replace(kinds=np.argsort(kinds)[found.kinds])
            found = found._replace(bound=bound(self.space, found, R))
            order = np.argsort(found.bound, kind="stable")
            self._bounded[key] = found.pick(order[: np.searchsorted(found.bound[order], threshold)])
        return self._bounded[key]

    def useful(self, rows: PricedPipelines) -> PricedPipelines:
        """The pipelines that could be in the best plan: where adapters are shared, one that is ready later may be in nobody's
        way."""
        return rows if self.space.problem.cluster.shares_adapters else undominated(rows)


def undominated(rows: PricedPipelines) -> PricedPipelines:
    """Without those that another with the same samples, devices and cuts is never later than; in the same order."""
    if not rows.number:
        return rows
    keys = np.column_stack([rows.load[:, 1], rows.kinds, rows.cuts])
    group = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((rows.ready.sum(axis=1), group))
    keep = np.ones(rows.number, dtype=bool)
    sizes = np.bincount(group)
    for apart in range(1, int(sizes.max())):
        a, b = order[:-apart], order[apart:]
        worse = (group[a] == group[b]) & (rows.ready[a] <= rows.ready[b]).all(axis=1) & keep[a]
        worse[worse] = (rows.made[a[worse]] <= rows.made[b[worse]]).all(axis=1)
        keep[b[worse]] = False
    return rows.pick(keep)
