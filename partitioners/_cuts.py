"""At which layers the replicas of a large cluster are cut.

Where replicas are cut at different layers each piece between is summed apart, and those between two cuts that all replicas have
one after the other (`Kinds.sums`). So sets of cuts are tried: those of pipelines found, also with their stages in another
order, few of them together, layers at equal times; then the best of them with a cut more, less, or elsewhere, or one more or
less that all have, as long as that helps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hetpipe.partitioners._columns import Columns
from hetpipe.partitioners._master import WIDE, Master, Range

Cuts = tuple[int, ...]
EVEN, FEWEST = (3, 4, 5, 6, 10), 5  # pieces that gradients are summed in: even ones, and how many are always allowed
NEAR, NEARLY = 1.02, 1.005  # of T, in search of the least one at which a set of cuts is possible
TRIED = 1_000_000  # partial pipelines looked at to choose among sets of cuts, where it is seldom 200,000
ORDERED = 3  # pieces of a set that was found, up to which it is tried with them in every order
CLIMBS, TRIES = (6, 3), 180  # how many sets of cuts are changed: at first, and the best of them more often; and how often
REALISED = 8  # how many are made whole
FEW, MANY = 6, 12  # cuts, 0 and L included, of sets that are changed, and that are tried: more are seldom made whole
WORTH = 0.9  # of the price that loads have in the linear program over all cuts, and that they must be worth
FAR = 1.03  # times the T that is possible, where a set is left as it is
BETTER, STEPS = 0.998, (1.02, 1.004)  # of T: a change that helps; and by which it is then lowered


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
        self.master, self.kinds = master, columns.kinds
        self.low, self.high, self.R, self.late = low, high, R, late
        self.range = Range(max(1, int(0.9 * R)), self.kinds.most)
        prices = master.scaled(master.prices, R)
        self.columns = columns.worth(high, self.range.low, WIDE, prices.device * WORTH, prices.replica * WORTH)

    def program(self, cuts: Cuts, common: Cuts | None, like: Master | None = None) -> Master:
        """The linear program over pipelines as `Columns.cut_at` has them, with prices of another to start from."""
        prices = self.master.scaled(self.master.prices, self.R) if like is None else like.prices
        return Master(self.columns.cut_at(cuts, common), prices)

    def best(self, found: list[Cuts], latencies: float) -> list[tuple[float, Master]]:
        """Those to make whole, with about the least T at which each is possible, from sets of cuts that were found; so many
        cuts that the latencies of their sums take so long."""
        sets = self.first(found, latencies)
        tried = self.possible([(x, self.program(*x)) for x in sets])
        few = [x for x in sets if len(x.cuts) <= FEW and x.common in ((), x.cuts[1:-1])]
        tried += self.climbed(few + [x for _, x, _ in tried if len(x.cuts) <= FEW])
        least: dict[CutSet, tuple[float, Master]] = {}
        for T, x, program in tried:
            if x not in least or least[x][0] > T:
                least[x] = T, program
        best = sorted(least, key=lambda x: (least[x][0], len(x.cuts)))  # fewer pieces to sum
        small = [x for x in best if len(x.cuts) <= FEW]
        return [least[x] for x in dict.fromkeys([*small[:REALISED], *best[:REALISED]])]

    def first(self, found: list[Cuts], latencies: float) -> list[CutSet]:
        """All of a set that was found, and with its pieces in another order; or few, of as many of the found as there may be, or
        of layers at equal times; and of those which all replicas have."""
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
        ends = [np.linspace(0, times[-1], number + 1) for number in sorted({min(most, x) for x in EVEN})]
        even = [tuple(sorted({0, *np.abs(times[:, None] - x).argmin(axis=0).tolist(), self.kinds.L})) for x in ends]
        pairs = [CutSet(cuts, cuts[1:-1]) for cuts in (*found, *even)] + [CutSet(cuts, ()) for cuts in (*even, *joined)]
        pairs += [CutSet(cuts, (common,)) for cuts in (*joined[:1], max(even, key=len)) for common in cuts[1:-1]]
        lengths = [np.diff(cuts).tolist() for cuts in found if len(cuts) - 1 <= ORDERED]
        orders = sorted({order for pieces in lengths for order in itertools.permutations(pieces)})
        for cuts in [tuple(np.cumsum([0, *order]).tolist()) for order in orders]:
            pairs += [CutSet(cuts, cuts[1:-1]), *(CutSet(cuts, (common,)) for common in cuts[1:-1])]
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

    def climbed(self, sets: list[CutSet]) -> list[tuple[float, CutSet, Master]]:
        """Better and better ones: those that are possible soonest are changed a few times, then the best of them more often."""
        climbs, left, T, known = list[Climb](), list(dict.fromkeys(sets)), self.high, set(sets)
        while len(climbs) < CLIMBS[0] and self.high * FAR > T and not self.late():
            new = [Climb(self, x, T, known) for x in left]
            climbs += [climb for climb in new if climb.found]
            left, T = [x for x, climb in zip(left, new, strict=True) if not climb.found], T * NEAR
        for number in CLIMBS:
            climbs = sorted(climbs, key=lambda x: x.T)[:number]
            for x in climbs:
                x.go(TRIES // number)
        return [found for x in climbs for found in x.found[-REALISED:]]

    def least(self, T: float, program: Master) -> float:
        """About the least T at which this one is possible, if that is less than T; else T."""
        for step in STEPS:
            while not self.late() and program.guess(T / step, self.range):
                T /= step
        return T


class Climb:
    """A set of cuts that is changed as long as that helps, into none that is known already."""

    def __init__(self, sets: CutSets, x: CutSet, T: float, known: set[CutSet]) -> None:
        self.sets, self.T, self.known, self.left = sets, T, known, list[CutSet]()
        self.found: list[tuple[float, CutSet, Master]] = []
        self.tried(x, sets.program(*x), T)

    def tried(self, x: CutSet, program: Master, T: float) -> None:
        """Go on from this one if it is possible within T."""
        if program.guess(T, self.sets.range):
            self.T, self.program, self.left = self.sets.least(T, program), program, list(x.changed())
            self.found.append((self.T, x, program))

    def go(self, tries: int) -> None:
        """Try so many changes."""
        while self.left and tries > 0 and not self.sets.late():
            changed = self.left.pop(0)
            if changed in self.known or len(changed.cuts) > FEW:
                continue
            self.known.add(changed)
            tries -= 1
            self.tried(changed, self.sets.program(*changed, like=self.program), self.T * BETTER)
