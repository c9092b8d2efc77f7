"""A lower bound for a large cluster: steps that are ruled out, for all numbers of replicas.

The linear program (`_master`) is asked for one interval of replica counts after the other, since gradient sums take the longer
the more replicas there are. A step is ruled out if it is for each interval. An interval whose bound can't be raised is divided in
two, as long as sums in it differ. Effort is counted in partial pipelines, so bounds do not depend on the speed of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetpipe.partitioners._master import Master, Prices, Range

PROVEN = 1.01  # times the bound: a plan that is good enough
NEAR = 1.0005  # of two T, between which no other is tried
CANDIDATES = 1_050_000  # partial pipelines looked at, times the number of classes to the power of 1.5: 1 to 3 s on two processors
QUOTA = 0.6  # of the effort left, for one T
FIRST = 0.15  # and for the first T
CLOSE = 1.005  # of T that are about the same
NEARLY = 1.02  # of the least T that is about possible: what is tried first
LOWER, MOST = 1.004, 1.02  # what is tried next is less by what the batch could be done too often, but for these limits
STEP = 0.4  # of what is between a T that is ruled out and one that is not
ALIKE, FINE = 0.005, 0.001  # of a step, by which gradient sums may differ within an interval of replica counts, and a part of it
SHARE = 0.02  # of the batch that replicas are worth where they are few, at first


@dataclass(eq=False)
class Interval:
    """Replica counts R; T that is ruled out for them, one at which pipelines are known that could do the batch (`above`), the
    least that was not ruled out with the effort there was (`soft`), and what is tried next; and the prices to go on from."""

    R: Range
    shown: float
    above: float
    soft: float
    next: float
    prices: Prices


class Bound:
    """What is ruled out below the step of a plan of `replicas`; about `least` is possible in the linear program."""

    def __init__(
        self, master: Master, fluid: float, least: float, step: float, replicas: int, late: Callable[[], bool]
    ) -> None:
        self.columns, self.kinds, self.late = master.columns, master.kinds, late
        self.fluid, self.step, first = fluid, step, min(step, least) / NEARLY
        self.master = Master(self.columns)
        self.intervals = [
            Interval(R, fluid, step, step, first, master.shared(R.high, SHARE)) for R in self.ranges(replicas)
        ]
        self.intervals[0].prices = master.prices
        self.left = self.effort = CANDIDATES * float(self.kinds.K) ** 1.5

    def run(self) -> float:
        """The largest T found that is ruled out: the least of all intervals is raised again and again, first that of the plan's
        number of replicas, whose T the others then try, too. The first proof for each is by the prices there are, at the T that
        these are good for; then better prices are sought."""
        while self.left > 0 and not self.late():
            x = min(self.intervals, key=lambda x: (x.shown, x.above))
            others = max(y.shown for y in self.intervals)
            if self.step <= x.shown * PROVEN:
                break
            if x.above < self.step and x.above - x.shown <= self._spread(x.R) and self._spread(x.R) > FINE * self.step:
                self._divide(x)
                continue
            if x.soft <= x.shown * NEAR:
                break
            first = x.shown == self.fluid
            T = min(x.next, others) if first and others > x.shown else x.next
            if not first and x.shown < others < x.soft:
                T = others
            if x.shown >= T:
                break
            quota, seen = self.left * (FIRST if self.left == self.effort else QUOTA), self.columns.seen
            shown, x.prices, times = self.master.impossible(T, x.R, x.prices, quota, once=first)
            self.left -= self.columns.seen - seen
            if first and not shown:
                x.soft, x.next = T, T / (LOWER * min(times, MOST))
                continue
            if shown:
                x.shown, x.soft = T, x.soft if x.soft > T * CLOSE else x.above
            else:
                x.above, x.soft = T if shown is False else x.above, T
            x.next = x.shown + STEP * (x.soft - x.shown)
        return min(x.shown for x in self.intervals)

    def _divide(self, x: Interval) -> None:
        """Two intervals instead of one."""
        low, high = x.R
        middle, at, halves = round((low * high) ** 0.5), self.intervals.index(x), []
        for R in (Range(middle + 1, high), Range(low, middle)):
            known = self.master.most(x.above, R) >= self.master.batch
            above = x.above if known else min(self.step, x.above + self._spread(x.R))
            following = x.shown + STEP * (above - x.shown) if known else x.above
            halves.append(Interval(R, x.shown, above, above, following, x.prices))
        self.intervals[at : at + 1] = halves

    def _spread(self, R: Range) -> float:
        """By how much the sums of replicas in an interval differ."""
        return self._seconds(R.high) - self._seconds(R.low)

    def _seconds(self, R: int) -> float:
        """Least seconds that the gradient sums of half of the layers take."""
        half = float(self.kinds.summed.sum()) / 2
        inside = [c.inside for c in self.kinds.classes if c.inside is not None] if self.kinds.largest_node >= R else []
        return 2 * (R - 1) * min((x.seconds(half / R) for x in [*inside, *self.kinds.between]), default=0.0)

    def ranges(self, R: int) -> list[Range]:
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
