"""Local search from a plan: one kind of its pipelines gets a device more or less, or another micro-batch. Cuts and orders
are those of `real`, until the last moves (`polish`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import numpy as np

from hetpipe.partitioners.pipelines.real import Pipeline
from hetpipe.partitioners.search.assembly import Assembled, Assembly, Mix

ENDS = 2  # of the plans on its way so many are simulated


class Improvement:
    """Local search from plans of one problem: `tries` neighbours at most, in a fixed order; the first that is better is the next
    plan."""

    def __init__(self, assembly: Assembly, tries: int) -> None:
        self.assembly, self.reals, self.types, self.left = assembly, assembly.reals, assembly.types, tries
        self.seen = set[Mix]()

    def run(self, best: Assembled) -> None:
        """Search from a plan. Neighbours are placed in its way, and one that is better in all ways."""
        while self.left > 0:
            for neighbour in self.neighbours(best.mix):
                if neighbour in self.seen:
                    continue
                if self.left <= 0:
                    break
                self.seen.add(neighbour)
                self.left -= 1
                found = self.assembly.make(neighbour, best.about, (best.way,))
                if found is not None and found.about < best.about:
                    best = min(found, self.assembly.make(neighbour, best.about) or found)
                    break
            else:
                break
        self.assembly.play(ENDS)

    def neighbours(self, mix: Mix) -> Iterator[Mix]:
        """All mixes that are one move apart, first those that change most."""
        R = sum(count for _, count in mix)
        yield from self.given(mix)
        for i, (p, count) in enumerate(mix):
            take = p.take(self.types.V)
            for some, other in product(sorted({1, count}), self.takes(take)):
                yield from self.instead(mix, i, self.reals.best(other, p.samples, p.b, R, p.common), some)
            for b in self.reals.sizes(take, p.samples):
                yield from self.instead(mix, i, self.reals.best(take, p.samples, b, R, p.common), count)

    def given(self, mix: Mix) -> Iterator[Mix]:
        """One pipeline gives a stage to another, or gets one of another kind for it."""
        R, each = sum(count for _, count in mix), np.eye(self.types.V, dtype=np.int64)
        for (i, (p, count)), (j, (q, _)) in product(enumerate(mix), repeat=2):
            for gone, back in product(each, [*np.zeros_like(each[:1]), *each]) if i != j or count > 1 else ():
                less, more = (np.array(x.take(self.types.V)) + change for x, change in ((p, back - gone), (q, gone - back)))
                if (gone == back).all() or min(less.min(), more.min()) < 0 or not less.any() or not more.any():
                    continue
                one = self.reals.best(tuple(less.tolist()), p.samples, p.b, R, p.common)
                other = self.reals.best(tuple(more.tolist()), q.samples, q.b, R, q.common)
                if one is not None and other is not None:
                    yield from self.fitted(merged(mix, (i, j), (one, other), 1))

    def takes(self, take: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Takes with a stage more or less of a kind, or with another kind instead."""
        each = np.eye(self.types.V, dtype=np.int64)
        none = np.zeros_like(each[:1])
        for less, more in product([*none, *each], repeat=2):
            found = np.array(take) + more - less
            if (more != less).any() and found.min() >= 0 and found.any():
                yield tuple(found.tolist())

    def instead(self, mix: Mix, i: int, q: Pipeline | None, some: int) -> Iterator[Mix]:
        """Mixes in which some pipelines of kind i are this one instead."""
        if q is None:
            return
        yield from self.fitted(merged(mix, (i,), (q,), some))

    def fitted(self, mix: Mix) -> Iterator[Mix]:
        """The mix, if there are the devices; else mixes in which a pipeline of another kind gives a device back."""
        a = self.assembly
        used = sum(count * a.uses(p) for p, count in mix)
        if (used <= a.there).all():
            yield mix
            return
        R = sum(count for _, count in mix)
        for i, (p, _) in enumerate(mix):
            for v in range(self.types.V):
                take = np.array(p.take(self.types.V))
                take[v] -= 1
                if take[v] < 0 or not take.any() or not (used - a.takes[:, v] <= a.there).all():
                    continue
                q = self.reals.best(tuple(take.tolist()), p.samples, p.b, R, p.common)
                if q is not None:
                    yield merged(mix, (i,), (q,), 1)


def merged(mix: Mix, places: tuple[int, ...], pipelines: tuple[Pipeline, ...], some: int) -> Mix:
    """The mix with these pipelines instead of so many of the pipelines at each of these places."""
    found = Counter(dict(mix))
    for i, pipeline in zip(places, pipelines, strict=True):
        found[mix[i][0]] -= some
        found[pipeline] += some
    return tuple((p, count) for p, count in found.items() if count)
