"""A lower bound for a large cluster: steps that are ruled out, for all numbers of replicas.

The linear program (`_master`) is asked for one interval of replica counts after the other, since gradient sums take the longer
the more replicas there are. A step is ruled out if it is for each interval. An interval whose bound can't be raised is divided in
two, as long as sums in it differ. Effort is counted in partial pipelines, so bounds do not depend on the speed of the machine."""

from __future__ import annotations

from collections.abc import Callable

from hetpipe.partitioners._master import Master, Range

PROVEN = 1.01  # times the bound: a plan that is good enough
NEAR = 1.002  # of two T, between which no other is tried
CANDIDATES = 1_050_000  # partial pipelines looked at, times the number of classes to the power of 1.5: 1 to 3 s on two processors
QUOTA = 0.4  # of the effort left, for one T
FIRST = 0.15  # and for the first T
CLOSE = 1.005  # of T that are about the same
NEARLY = 1.02  # of the least T that is about possible: what is tried first
LOWER, MOST = 1.004, 1.02  # what is tried next is less by what the batch could be done too often, but for these limits
STEP = 0.4  # of what is between a T that is ruled out and one that is not
ALIKE, FINE = 0.005, 0.001  # of a step, by which gradient sums may differ within an interval of replica counts, and a part of it
SHARE = 0.02  # of the batch that replicas are worth where they are few, at first


class Bound:
    """What is ruled out below the step of a plan of `replicas`; about `least` is possible in the linear program."""

    def __init__(
        self, master: Master, fluid: float, least: float, step: float, replicas: int, late: Callable[[], bool]
    ) -> None:
        self.columns, self.kinds, self.late = master.columns, master.kinds, late
        self.fluid, self.least, self.step = fluid, min(step, least), step
        self.ranges = self.intervals(replicas)
        self.prices = {R: master.shared(R.high, SHARE) for R in self.ranges} | {self.ranges[0]: master.prices}
        self.shown = dict.fromkeys(self.ranges, fluid)  # T that is ruled out
        self.above = dict.fromkeys(self.ranges, step)  # and the least that was not
        self.soft = dict(self.above)  # or was not by the first prices
        self.next = dict.fromkeys(self.ranges, self.least / NEARLY)  # what is tried next, as long as nothing is ruled out
        self.masters = {R: Master(self.columns) for R in self.ranges}
        self.left = self.effort = CANDIDATES * float(self.kinds.K) ** 1.5

    def run(self) -> float:
        """The largest T found that is ruled out: the least of all intervals is raised again and again, first that of the plan's
        number of replicas, whose T the others then try, too. The first proof for each is by the prices there are, at the T that
        these are good for; then better prices are sought."""
        while self.left > 0 and not self.late():
            R = min(self.ranges, key=lambda R: self.shown[R])
            low, high, others = self.shown[R], self.above[R], max(self.shown.values())
            if self.step <= low * PROVEN or (low * NEAR >= high and not self._divided(R)):
                break
            if R not in self.shown:
                continue
            first = low == self.fluid
            T = min(self.next[R], others) if first and others > low else self.next[R]
            if not first and low < others < self.soft[R]:
                T = others
            if low >= T:
                break
            quota, seen = self.left * (FIRST if self.left == self.effort else QUOTA), self.columns.seen
            shown, self.prices[R], times = self.masters[R].impossible(T, R, self.prices[R], quota, once=first)
            self.left -= self.columns.seen - seen
            if shown:
                self.shown[R] = T
                self.soft[R] = self.soft[R] if self.soft[R] > T * CLOSE else high
            elif first:
                self.soft[R], self.next[R] = T, T / (LOWER * min(times, MOST))
                continue
            else:
                self.above[R] = self.soft[R] = T
            self.next[R] = self.shown[R] + STEP * (self.soft[R] - self.shown[R])
        return min(self.shown.values())

    def _divided(self, R: Range) -> bool:
        """Two intervals instead of one, where sums differ much."""
        low, high = R
        if self._seconds(high) - self._seconds(low) <= FINE * self.step:
            return False
        middle, at = round((low * high) ** 0.5), self.ranges.index(R)
        self.ranges[at : at + 1] = halves = [Range(middle + 1, high), Range(low, middle)]
        for half in halves:
            self.shown[half], self.above[half], self.next[half] = self.shown[R], self.step, self.above[R]
            self.soft[half], self.prices[half], self.masters[half] = self.step, self.prices[R], Master(self.columns)
        del self.shown[R]
        return True

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
