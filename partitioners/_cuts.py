"""At which layers the replicas of a large cluster are cut.

Where replicas are cut at different layers each piece between is summed apart, and those between two cuts that all replicas have
one after the other (`Kinds.sums`). So sets of cuts are tried: those of pipelines found, few of them together, layers at equal
times; then the best of them with a cut more, less, or elsewhere, or one more or less that all have, as long as that helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hetpipe.partitioners._columns import Columns
from hetpipe.partitioners._master import Master, Range

Cuts = tuple[int, ...]
EVEN, FEWEST = (10, 4), 5  # pieces that gradients are summed in: even ones, and how many are always allowed
NEAR, NEARLY = 1.02, 1.005  # of T, in search of the least one at which a set of cuts is possible
TRIED = 1_000_000  # partial pipelines looked at to choose among sets of cuts, where it is seldom 200,000; as many to change them
STARTS, REALISED = 2, 8  # sets of cuts that are changed, and that are made whole
FEW, MANY = 6, 12  # cuts, 0 and L included, of sets that are changed, and that are tried: more are seldom made whole
FAR, CHANGES = 1.1, 60  # times the T that is possible, where a set is left as it is; and how many changes of one are tried
BETTER = 0.998  # of T: a change that helps


class CutSet(NamedTuple):
    """Layers to cut at, with 0 and L, and those of them that all replicas are cut at."""

    cuts: Cuts
    common: Cuts

    def changed(self) -> Iterator[CutSet]:
        """With one cut more, less, or moved by a layer; or one more or less that all have."""
        cuts, common = set(self.cuts), set(self.common)
        for c in range(1, self.cuts[-1]):
            if c not in cuts:
                yield self.of(cuts | {c}, common)
                yield self.of(cuts | {c}, common | {c})
                continue
            yield self.of(cuts, common ^ {c})
            yield self.of(cuts - {c}, common - {c})
            for near in {c - 1, c + 1} - cuts:
                yield self.of(cuts - {c} | {near}, {near if x == c else x for x in common})

    @staticmethod
    def of(cuts: set[int], common: set[int]) -> CutSet:
        """In order."""
        return CutSet(tuple(sorted(cuts)), tuple(sorted(common)))


class CutSets:
    """The search, between a T that is not possible and one that is; for about R replicas."""

    def __init__(
        self, columns: Columns, master: Master, low: float, high: float, R: int, late: Callable[[], bool]
    ) -> None:
        self.columns, self.master, self.kinds = columns, master, columns.kinds
        self.low, self.high, self.R, self.late = low, high, R, late
        self.range = Range(max(1, int(0.9 * R)), self.kinds.most)

    def program(self, cuts: Cuts, common: Cuts | None, like: Master | None = None) -> Master:
        """The linear program over pipelines as `Columns.cut_at` has them, with prices of another to start from."""
        found = Master(self.columns.cut_at(cuts, common))
        found.prices = self.master.scaled(self.master.prices, self.R) if like is None else like.prices
        return found

    def best(self, found: list[Cuts], latencies: float) -> list[tuple[float, Master]]:
        """Those to make whole, with about the least T at which each is possible, from sets of cuts that were found; so many
        cuts that the latencies of their sums take so long."""
        sets = self.first(found, latencies)
        tried = self.possible([(x, self.program(*x)) for x in sets])
        few = list(dict.fromkeys(CutSet(cuts, cuts[1:-1]) for cuts in found if len(cuts) <= FEW))
        for x in few[:STARTS]:
            tried += self.change(x)
        least: dict[CutSet, tuple[float, Master]] = {}
        for T, x, program in tried:
            if x not in least or least[x][0] > T:
                least[x] = T, program
        best = sorted(least, key=lambda x: (least[x][0], len(x.cuts)))  # fewer pieces to sum
        small = [x for x in best if len(x.cuts) <= FEW]
        return [least[x] for x in dict.fromkeys([*small[:REALISED], *best[:REALISED]])]

    def first(self, found: list[Cuts], latencies: float) -> list[CutSet]:
        """All of a set that was found; or few, of as many of the found as there may be, or of layers at equal times; and of
        those which all replicas have."""
        once = 2 * (self.R - 1) * max((link.seconds(0) for link in self.kinds.between), default=0.0)
        most = self.kinds.L if once == 0 else max(FEWEST, int(latencies / once))
        joined: list[Cuts] = []
        for first in range(len(found)):
            cuts: Cuts = ()
            for more in found[first:]:
                wider = tuple(sorted({*cuts, *more}))
                cuts = wider if len(wider) <= most + 1 or not cuts else cuts
            joined.append(cuts)
        times = self.columns.stages.least[0].sum(axis=1)
        evenly = [np.linspace(0, times[-1], min(number, most) + 1) for number in EVEN]
        even = [np.abs(times[:, None] - ends).argmin(axis=0).tolist() for ends in evenly]
        tried = [*joined[:1], *(tuple(sorted({0, *layers, self.kinds.L})) for layers in even)]
        pairs = [CutSet(cuts, cuts[1:-1]) for cuts in found] + [CutSet(cuts, ()) for cuts in (*tried, *joined)]
        pairs += [CutSet(cuts, (common,)) for cuts in tried for common in cuts[1:-1]]
        return list(dict.fromkeys(x for x in pairs if len(x.cuts) <= MANY))

    def possible(self, programs: list[tuple[CutSet, Master]]) -> list[tuple[float, CutSet, Master]]:
        """Of these, best first, with about the least T at which each that is among the best is possible."""
        low, high = self.low, self.high
        least: dict[int, float] = {}
        left = list(range(len(programs)))
        while low * NEARLY < high and left and not self.late():
            T = max(math.sqrt(low * high), high / NEAR)
            seen = sum(m.columns.seen for _, m in programs)
            kept = [i for i in left if seen < TRIED and programs[i][1].guess(T, self.range)]
            low, high, left = (low, T, kept) if kept else (T, high, left)
            least |= dict.fromkeys(kept, T)
        best = sorted(least, key=lambda i: (least[i], len(programs[i][0].cuts)))
        return [(least[i], *programs[i]) for i in best]

    def change(self, x: CutSet) -> list[tuple[float, CutSet, Master]]:
        """Better and better ones."""
        program, T = self.program(*x), self.high
        while not program.guess(T, self.range):
            T *= NEAR
            if self.high * FAR < T:
                return []
        known, found, seen, left = {x}, [(T, x, program)], 0, list(x.changed())
        while left and seen < TRIED / STARTS and len(known) < CHANGES and not self.late():
            changed = left.pop(0)
            if changed in known or len(changed.cuts) > FEW:
                continue
            known.add(changed)
            other = self.program(*changed, like=program)
            if other.guess(T * BETTER, self.range):
                while other.guess(T * BETTER, self.range):
                    T *= BETTER
                program, left = other, list(changed.changed())
                found.append((T, changed, program))
            seen += other.columns.seen
        return found[-REALISED:]
