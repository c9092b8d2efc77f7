"""A lower bound for a large cluster: steps that are ruled out, for all numbers of replicas.

The linear program (`_master`) is asked for one interval of replica counts after the other, since gradient sums take the longer
the more replicas there are. A step is ruled out if it is for each interval. An interval is divided in two where sums in it differ
by more than what is left to be ruled out. Effort is counted in partial pipelines, so bounds do not depend on the speed of the
machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetpipe.partitioners._master import Master, Prices, Range

PROVEN = 1.01  # times the bound: a plan that is good enough
NEAR = 0.0005  # of a T or a step: what is not worth another proof, or another interval for what sums differ by
CANDIDATES = 1_300_000  # partial pipelines looked at, times the number of classes to the power of 1.5: 1 to 3 s on two processors
QUOTA = 0.6  # of the effort left, for one T
FIRST = 0.15  # and for the first T
CLOSE = 1.005  # of T that are about the same
NEARLY = 1.02  # of the least T that is about possible: what is tried first
LOWER, MOST = 1.004, 1.02  # what is tried next is less by what the batch could be done too often, but for these limits
STEP = 0.4  # of what is between a T that is ruled out and one that is not
ALIKE = 0.005  # of a step, by which gradient sums may differ within an interval, at first
LAG, RESERVE = 1.01, 0.5  # times T, by which others may be behind the one that is raised; and effort kept for them
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
        """The largest T found that is ruled out for all intervals. First it is raised for that of the plan's number of replicas;
        others then try its T. Of those that are not far behind, the one is raised for which the least T is known to be possible.
        The first proof for each is by the prices there are, at the T that these are good for; then better prices are sought."""
        while self.left > 0 and not self.late():
            T = [x.shown for x in self.intervals]
            most, limit = max(T), min((x.shown for x in self.intervals if self._settled(x)), default=self.step)
            if self.step <= min(T) * PROVEN or limit <= min(T):
                break
            near = most / (LAG if self.left > RESERVE * self.effort else 1)
            x = min((x for x in self.intervals if x.shown < limit), key=lambda x: (min(x.shown, near), x.above))
            if self._divisible(x):
                self._divide(x)
            elif not self._raised(x, most, limit):
                break
        return min(x.shown for x in self.intervals)

    def _raised(self, x: Interval, most: float, limit: float) -> bool:
        """Whether another T was tried, up to `limit`; the one that others have reached, if that may be possible."""
        first, T = x.shown == self.fluid, min(x.next, limit)
        if x.shown < most and (first or most < x.soft):
            T = min(T, most) if first else min(most, limit)
        if x.shown >= T:
            return False
        quota, seen = self.left * (FIRST if self.left == self.effort else QUOTA), self.columns.seen
        shown, x.prices, times = self.master.impossible(T, x.R, x.prices, quota, once=first)
        self.left -= self.columns.seen - seen
        if first and not shown:
            x.soft, x.next = T, T / (LOWER * min(times, MOST))
            return True
        if shown:
            x.shown, x.soft = T, x.soft if x.soft > T * CLOSE else x.above
        else:
            x.above, x.soft = T if shown is False else x.above, T
        x.next = x.shown + STEP * (x.soft - x.shown)
        return True

    def _settled(self, x: Interval) -> bool:
        """Whether nothing more is to be ruled out."""
        return x.soft <= x.shown * (1 + NEAR) and not self._divisible(x)

    def _divisible(self, x: Interval) -> bool:
        """Whether sums within it differ by more than what is left to be ruled out."""
        return x.above < self.step and max(x.above - x.shown, NEAR * self.step) <= self._spread(x.R)

    def _divide(self, x: Interval) -> None:
        """Two intervals instead of one."""
        low, high = x.R
        middle, at, halves = round((low * high) ** 0.5), self.intervals.index(x), []
        for R in (Range(middle + 1, high), Range(low, middle)):
            half = Interval(R, x.shown, x.above, x.above, x.shown + STEP * (x.above - x.shown), x.prices)
            if self.master.most(x.above, R) < self.master.batch:  # it may well be ruled out for this half
                half.above = half.soft = min(self.step, x.above + self._spread(x.R))
                half.next = x.above
            halves.append(half)
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
