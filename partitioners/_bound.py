"""A lower bound for a large cluster: steps that are ruled out, for all plans.

Plans are told apart by their number of replicas, since gradient sums take the longer the more there are, and by their cuts
(`_chains`). The linear program (`_master`) is asked for one part of them after the other. Where a step is possible in it, the
part is divided. Effort is counted in partial pipelines, so bounds do not depend on the speed of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hetpipe.partitioners._chains import Gaps
from hetpipe.partitioners._columns import Column
from hetpipe.partitioners._master import Master, Prices, Range

GOALS = 1.05, 1.04, 1.032, 1.028, 1.024, 1.0194, 1.015, 1.01  # times the bound: what is tried to be shown, one after the other
GOOD, EXTRA = 1.0194, 700_000  # what is good enough to go on with at most so many partial pipelines
NEAR = 0.0005  # of a step: what is not worth another proof
CANDIDATES, MORE = 800_000, 160_000  # partial pipelines looked at; and more, times the third power of the number of classes: 3 s
QUOTA, FIRST = 0.2, 0.15  # of the effort left, for one T; and for the first T
NEARLY = 1.02  # of the least T that is about possible: what is tried first
LOWER, MOST = 1.004, 1.02  # what is tried next is less by what the batch could be done too often, but for these limits
GOAL, RESERVE = 1_800_000, 0.1  # partial pipelines for one goal; and the part of the effort left for half of the way to it
ALIKE = 0.005  # of a step, by which sums may differ in a part, at first
WIDE = 0.004, 0.001, 0.0003  # and where T is possible: if nothing is known of cuts, something, and everything
SHARE = 0.02  # of the batch that replicas are worth where they are few, at first


@dataclass(eq=False)
class Part:
    """Plans of R replicas whose gaps are as in `gaps`; T that is ruled out for them; the prices to go on from; and columns that
    could do the batch in the part that it was divided from."""

    R: Range
    gaps: Gaps
    shown: float
    prices: Prices
    columns: list[Column] = field(default_factory=list)


class Bound:
    """What is ruled out below the step of a plan of `replicas`; about `least` is possible in the linear program."""

    def __init__(
        self, master: Master, fluid: float, least: float, step: float, replicas: int, late: Callable[[], bool]
    ) -> None:
        self.columns, self.kinds, self.late = master.columns, master.kinds, late
        self.step, self.goals, self.first = step, [step / x for x in GOALS], min(step, least) / NEARLY
        every = self.columns.chains.all
        self.masters = {every: Master(self.columns, master.prices)}
        self.parts = [Part(R, every, fluid, master.shared(R.high, SHARE)) for R in self.ranges(replicas)]
        self.parts[0].prices = master.prices
        self.latest: dict[Range, Prices] = {}  # with which a T was ruled out for the same replica counts
        self.left = self.effort = CANDIDATES + MORE * float(self.kinds.K) ** 3

    def run(self) -> float:
        """The largest T found that is ruled out for all parts. Goals are tried one after the other, each with so much effort, the
        one that is good enough with nearly all; then half of the way to it, and once the first goal is reached, that is all. What
        is tried is lowered for good if it is possible in a part that cannot be divided."""
        T, least, halved = self.start(), self.left - GOAL, False
        while self.left > 0 and not self.late():
            x = min(self.parts, key=lambda x: x.shown)
            if x.shown >= T:
                T = next((goal for goal in self.goals if x.shown * (1 + NEAR) < goal), 0.0)
                if T == 0.0:
                    break
                if self.within(GOOD, x.shown):
                    self.left = self.effort = min(self.left, EXTRA)
                least = max(RESERVE * self.effort, 0 if self.within(GOOD, T) else self.left - GOAL)
            elif self.left < least:
                if halved and self.within(GOALS[0], x.shown):
                    break
                T, least, halved = (x.shown + T) / 2, least - GOAL / 2, True
            elif not self.ruled_out(x, T, QUOTA)[0] and not self.divided(x, T):
                T = self.limit(x, T)
                self.goals = [goal for goal in self.goals if goal < T] + [T]
        return min(x.shown for x in self.parts)

    def within(self, goal: float, T: float) -> bool:
        """Whether the step is at most about so many times T."""
        return self.step <= T * goal * (1 + NEAR)

    def limit(self, x: Part, T: float) -> float:
        """About the largest T below this one that is ruled out for a part."""
        while x.shown * (1 + NEAR) < T and self.left > 0 and not self.late():
            middle = (x.shown + T) / 2
            T = T if self.ruled_out(x, middle, QUOTA)[0] else middle
        return x.shown

    def start(self) -> float:
        """A T that is ruled out for about as many replicas as the plan has; for others, the last goal is tried."""
        T, x = min(self.first, self.goals[-1]), self.parts[0]
        while x.shown < T and self.left > 0 and not self.late():
            shown, times = self.ruled_out(x, T, FIRST, once=True)
            T = T if shown else T / (LOWER * min(times, MOST))
        for x in self.parts[1:]:
            if not self.late():
                self.ruled_out(x, self.goals[-1], FIRST, once=True)
        return T

    def ruled_out(self, x: Part, T: float, part: float, *, once: bool = False) -> tuple[bool, float]:
        """Whether T is, with this part of the effort; and about how many times the batch could be done."""
        master = self.masters[x.gaps]
        seen, prices = master.columns.seen, self.latest.get(x.R, x.prices)
        master.inherit(T, x.R, x.columns)
        shown, x.prices, times = master.impossible(T, x.R, prices, part * self.left, once=once)
        master.forget()
        if shown:
            self.latest[x.R] = x.prices
        self.left -= master.columns.seen - seen
        x.shown = T if shown else x.shown
        return bool(shown), times

    def divided(self, x: Part, T: float) -> bool:
        """Whether there are parts instead of this one: of fewer replica counts, if sums would take longer beside as many as do T;
        or told apart by their gaps; and where these are known, of half of the replica counts."""
        (low, high), at, parts = x.R, self.parts.index(x), self.columns.chains.parts(x.gaps)
        support = self.masters[x.gaps].support(T, x.R)
        columns = [column for _, column in support]
        replicas = min(high, max(low, round(sum(y for y, _ in support)))) if parts else high
        wide = WIDE[2 if not parts else x.gaps != self.columns.chains.all]
        if low < high and self._seconds(replicas) - self._seconds(low) > wide * self.step:
            middle = max(low + 1, round((low * replicas) ** 0.5))
            found = [Part(R, x.gaps, x.shown, x.prices, columns) for R in (Range(middle, high), Range(low, middle - 1))]
        else:
            found = [Part(x.R, gaps, x.shown, x.prices, columns) for gaps in parts]
            new = [gaps for gaps in parts if gaps not in self.masters]
            self.masters |= {gaps: Master(self.columns.within(gaps), x.prices) for gaps in new}
        self.parts[at : at + 1] = found or [x]
        return len(found) > 0

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
