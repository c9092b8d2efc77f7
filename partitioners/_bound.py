"""A lower bound for a large cluster: steps that are ruled out, for all numbers of replicas and all ways to share cuts.

**Chains of sums.** Call a layer c shared if no stage on a single device holds both c − 1 and c. Let s = [lo, hi) be a stage of
any replica, and c the last shared layer (or 0) up to lo. Gradients are summed from the last segment to the first, and a device
sums one at a time. Each layer x in (c, lo] is not shared: a single device has the segments on both sides of x, whole, so it ends
the last piece of the upper one before it begins any piece of the lower one, of which it has the last piece, too. So from the end
of the backward of s its own sums, and then those of [c, lo), as long as they take a single device, follow one after the other:

    (end of the backward of s) + sums_s + (sums of the layers [c, lo) of one device) + optimizer ≤ T.  ∎

The linear program (`_master`) counts each pipeline apart and does not know which layers all of them share. A part of all plans is
those where a range of layers has a shared one (then no single device has a stage from before the range to behind it), or has
none (then all its sums are one chain). A part in which T cannot be ruled out is divided in two, and these again. What is worth
more than its price in a part was so in the one that it is a part of: only such pipelines are looked at again, at first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hetpipe.partitioners._columns import Shared
from hetpipe.partitioners._master import ROUNDS, Master, Range, Start

PROVEN = 1.01  # times the bound: a plan that is good enough
PART, ACCURACY = 0.4, 1.002  # of what is between a T that is ruled out and one that is not; and when that is little
NEAR = 1.003  # of two T, between which no other is tried
CANDIDATES, WHOLE = 2_500_000, 0.3  # partial pipelines looked at, per class: about 0.5 s; and the part before plans are divided
STEP, QUOTA = 0.33, 0.33  # of what is between a T that is ruled out and one that is not; and of the effort left, for one T
FIRST = 0.05  # of the effort, for the first T
SOME = 3  # rounds of prices before a part is divided
EACH = 10_000  # candidates that take as long as the tables of one part
NEARLY = 1.02  # of the least T that is about possible: what is tried first
ALIKE, FINE = 0.005, 0.001  # of a step, by which gradient sums may differ within an interval of replica counts, and a part of it
SHARE = 0.02  # of the batch that replicas are worth where they are few, at first


Layers = tuple[int, int]


class Part(NamedTuple):
    """Plans of so many replicas of which that much is known, and ranges of layers of which it is not known whether there is a
    shared one."""

    R: Range
    shared: Shared
    open: tuple[Layers, ...]
    start: Start

    def halves(self) -> list[Part]:
        """Two parts that are all of it; none if all is known."""
        without, within = self.shared
        wide = max(within, key=_length, default=(0, 0))
        if _length(wide):
            (lo, hi), others = wide, tuple(x for x in within if x != wide)
            middle = (lo + hi) // 2
            below, above = (lo, middle), (middle + 1, hi)
            return [
                self._replace(shared=Shared(without, (*others, below)), open=(*self.open, above)),
                self._replace(shared=Shared(without | set(range(lo, middle + 1)), (*others, above))),
            ]
        if not self.open:
            return []
        lo, hi = wide = max(self.open, key=_length)
        rest = tuple(x for x in self.open if x != wide)
        return [
            self._replace(shared=Shared(without | set(range(lo, hi + 1)), within), open=rest),
            self._replace(shared=Shared(without, (*within, wide)), open=rest),
        ]


def _length(layers: Layers) -> int:
    return layers[1] - layers[0]


class Bound:
    """What is ruled out below the step of a plan of `replicas`; about `least` is possible in the linear program."""

    def __init__(
        self, master: Master, fluid: float, least: float, step: float, replicas: int, late: Callable[[], bool]
    ) -> None:
        self.master, self.kinds, self.late = master, master.kinds, late
        self.fluid, self.least, self.step = fluid, min(step, least), step
        self.columns = master.columns
        self.ranges = self.intervals(replicas)
        self.starts = {R: Start(master.shared(R.high, SHARE)) for R in self.ranges} | {self.ranges[0]: Start(master.prices)}
        self.shown = dict.fromkeys(self.ranges, fluid)
        self.left = self.effort = float(CANDIDATES * self.kinds.K)

    def run(self) -> float:
        """The largest T found that is ruled out."""
        self._whole()
        low, high = min(self.shown.values()), self.step / PROVEN
        while low * NEAR < high and self.left > 0 and not self.late():
            T = low + STEP * (high - low)
            low, high = (T, high) if self._divided(T) else (low, T)
        return min(self.shown.values())

    def _whole(self) -> None:
        """For every interval of replica counts, until little can be won without dividing: the lowest is raised again and again,
        first that of the plan's, whose T the others, whose gradient sums are shorter, then try, too."""
        first, above = self.ranges[0], dict.fromkeys(self.ranges, self.step)
        least = self.effort * (1 - WHOLE)
        while self.left > least and not self.late():
            R = min(self.ranges, key=lambda R: self.shown[R])
            low, high = self.shown[R], above[R]
            if high <= low * ACCURACY or self.step <= low * PROVEN:
                break
            T, until = low + PART * (high - low), max(least, self.left * (1 - QUOTA))
            if low < self.shown[first] < high:
                T = self.shown[first]
            elif self.left == self.effort:  # as is often so with two types: nearly there at once
                T, until = self.least / NEARLY, self.left * (1 - FIRST)
            if not self._in_parts(T, R, until, divide=False):
                above[R] = T

    def _divided(self, T: float) -> bool:
        """Whether no plan ends within T, as far as was found out with a part of the effort that is left."""
        until = self.left * (1 - QUOTA)
        return all(self.shown[R] >= T or self._in_parts(T, R, until, divide=True) for R in self.ranges[::-1])

    def _in_parts(self, T: float, R: Range, until: float, *, divide: bool) -> bool:
        last = self.kinds.L - 1
        whole = Part(R, Shared(), ((1, last),) if last > 0 and R.high > 1 else (), self.starts[R])
        parts = [whole]
        while parts:
            part = parts.pop()
            halves = self._halves(part) if divide else []
            master = Master(self.columns.where(part.shared))
            shown, start = master.impossible(T, part.R, part.start, self.left - until, SOME if halves else ROUNDS)
            self.left -= master.columns.seen + EACH
            if shown:
                if part is whole:
                    self.starts[R] = start
                continue
            if not halves or self.left <= until or self.late():
                return False
            parts += [half._replace(start=start) for half in halves]
        self.shown[R] = T
        return True

    def _halves(self, part: Part) -> list[Part]:
        """By the number of replicas, where sums differ much, else by what is shared."""
        low, high = part.R
        if self._seconds(high) - self._seconds(low) <= FINE * self.step:
            return part.halves()
        middle = round((low * high) ** 0.5)
        return [part._replace(R=Range(low, middle)), part._replace(R=Range(middle + 1, high))]

    def _seconds(self, R: int) -> float:
        """Least seconds that the gradient sums of half of the layers take."""
        half = float(self.kinds.summed.sum()) / 2
        inside = [c.inside for c in self.kinds.classes if c.inside is not None] if self.kinds.largest_node >= R else []
        return 2 * (R - 1) * min((x.seconds(half / R) for x in [*inside, *self.kinds.between]), default=0.0)

    def intervals(self, R: int) -> list[Range]:
        """Replica counts, the most first: from about R up, then so that the sums of half of the layers differ little
        within each. As many as a node has devices or fewer, which may sum inside nodes, are apart, and at most half as many
        are with them."""
        few, found, high = self.kinds.largest_node, list[Range](), self.kinds.most
        while high >= 1:
            least = few + 1 if few < high else high // 2 + 1
            low = max(least, min(high, R))
            longest = self._seconds(low)
            while least < low and longest - self._seconds(low - 1) <= ALIKE * self.step:
                low = max(least, min(low - 1, int(low * 0.95)))
            found.append(Range(low, high))
            high = low - 1
        return found
