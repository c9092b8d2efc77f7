"""The counted planner: clusters of dozens to thousands of devices, with a proven bound.

1. Classes of devices (`_kinds`), and what a stage costs on each (`_stages`).
2. Plans of replicas that are all alike, as every proportion of the classes allows: one search for a pipeline each
   (`_paths`). Their gradient sums are few and long.
3. About the least T at which the linear program over counts is possible (`_master`), with pipelines of any length and
   mix that are worth their price (`_columns`); then whole numbers of real ones (`_fleet`). Where replicas are cut at
   many different layers each piece is summed by a ring of its own, so this is done for a few sets of cuts. The plan is
   the best simulated step, on real devices (`_placing`).
4. A bound: the largest T found that the linear programs rule out for every number of replicas.

The size of all programs depends on the number of classes, not of devices; only placing is a loop over them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from hetpipe.bounds import fluid_bound
from hetpipe.partition import Problem, Solution
from hetpipe.partitioners._columns import Columns, Counts
from hetpipe.partitioners._fleet import Fleet, Group
from hetpipe.partitioners._kinds import Kinds
from hetpipe.partitioners._loads import first_samples
from hetpipe.partitioners._master import GUESS, WIDE, Master, Prices, Range
from hetpipe.partitioners._paths import Path, Paths
from hetpipe.partitioners._placing import place
from hetpipe.partitioners._search import Search
from hetpipe.partitioners._stages import Stages
from hetpipe.plan import Plan
from hetpipe.simulator import simulate

MOST = 1e4  # times the fluid bound: a step this long is none
GROWTH, NEAR = 1.04, 1.02  # of T, in search of a possible one
LONGEST, PARTS = 32, 100  # replicas alike: devices of each, and parts of them in counts
PROPORTIONS, USED = 16, 0.8  # how many are tried, and the part of all devices that they use
LADDER = (1.0, 1.005, 1.01, 1.02, 1.035, 1.055, 1.08, 1.12, 1.2, 1.35, 1.6, 2.2, 4.0)
NEARLY, REALISED = 1.005, 6  # of T, for linear programs with certain cuts; and how many of them are made whole
EVEN, FEWEST = (10, 4), 5  # pieces that gradients are summed in: even ones, and how many are always allowed
PIECES = 0.03  # part of a step that their latencies may take
CHOOSING = 1_000_000  # partial pipelines looked at to choose among sets of cuts, where it is seldom 200,000
WORK = 1_000_000  # partial pipelines looked at to make one of them whole: up to 0.5 s
CHEAPER = 0.96  # columns worth this part of their price are of use in whole numbers
CANDIDATES = 4_000_000  # partial pipelines looked at for the bound: about 2 s
PROVEN = 1.01  # times the bound: a plan that is good enough
PART, ACCURACY = 0.5, 1.002  # of what is between a T that is ruled out and one that is not; and when that is little
EACH = 3000  # candidates that take as long as the tables of one proof
ALIKE = 0.005  # of a step, by which gradient sums may differ within an interval of replica counts
SHARE = 0.02  # of the batch that replicas are worth where they are few, at first


@dataclass
class Claim:
    """That no plan of so many replicas ends within `below`; it was not shown for `above`."""

    R: Range
    prices: Prices
    below: float
    above: float

    def target(self, main: Claim) -> float:
        """Which T to try: that of the main claim, else nearer to what is not shown."""
        if self.below < main.below < self.above:
            return main.below
        return self.below + PART * (self.above - self.below)

    @property
    def settled(self) -> bool:
        """Whether little can be won."""
        return self.above <= self.below * ACCURACY


class Large:
    """One search; `run` gives the Solution."""

    def __init__(self, problem: Problem, name: str, *, time_limit_seconds: float = 30.0) -> None:
        self.problem, self.name = problem, name
        self.fluid = fluid_bound(problem)
        self.kinds = Kinds(problem)
        self.columns = Columns(Stages(self.kinds))
        self.master = Master(self.columns)
        self.paths = Paths(self.columns)
        self.fleet = Fleet(self.master, self.paths)
        self.devices = sum(self.kinds.counts)
        self.most = min(self.devices, problem.global_batch)  # replicas
        self.deadline_at = time.monotonic() + time_limit_seconds
        self.best_step = self.least_T = math.inf
        self.ruled_T = 0.0  # below the linear program was not possible, as far as was looked
        self.plan: Plan | None = None

    def run(self) -> Solution:
        """A plan, then a bound; where none is found, the search that is made for few devices."""
        self.find()
        if self.plan is None:
            left = max(1.0, self.deadline_at - time.monotonic())
            return Search(self.problem, self.name, time_limit_seconds=left).run()
        self.say(f"best step {self.best_step:.4g} s; bounding")
        return Solution(plan=self.plan, lower_bound_seconds=self.bound(), proof="search-bound")

    def late(self) -> bool:
        """Whether the time limit is over."""
        return time.monotonic() > self.deadline_at

    # -- a plan ---------------------------------------------------------------------------------------------

    def find(self) -> None:
        """The best plan of those tried."""
        alike: list[tuple[float, Path]] = []
        for R, used in self.proportions():
            self.say(f"{R} replicas of {sum(used)} devices, best step {self.best_step:.4g} s")
            alike += self.alike(R, used)
        self.least()
        T = self.least_T
        if not math.isfinite(T) or self.late():
            return
        R = round(sum(self.master.used.values())) or (1 if self.plan is None else len(self.plan.replicas))
        wanted = self.cuts(T, R)
        grids = self.grids([path.cuts for _, path in sorted(alike)[:2]] + wanted, R)
        for T, master in self.possible([self.cut(cuts, common, R) for cuts, common in grids], R):
            self.say(f"about {T:.4g} s, best step {self.best_step:.4g} s")
            self.realise(T, master)
        for cuts in wanted:  # replicas may share some cuts and not others
            self.realise(self.least_T, self.cut(cuts, None, R), R)
        if self.plan is None:
            self.realise(self.least_T, self.master)

    def proportions(self) -> list[tuple[int, Counts]]:
        """(replicas, devices of each) of replicas that are all alike and use nearly all devices."""
        counts, found = self.kinds.counts, set()
        for n in range(1, LONGEST + 1):
            for R in {self.devices // n, *(count // x for count in counts for x in range(1, n + 1))}:
                used = tuple(count // R for count in counts) if R else ()
                parts = math.prod(x + 1 for x in used)
                if 1 < parts <= (PARTS if self.kinds.largest_node < R else 3 * PARTS):
                    whole = min(count // x for count, x in zip(counts, used, strict=True) if x)
                    found.add((min(whole, self.most), used))
        large = [(R * sum(used), R, used) for R, used in found if R * sum(used) >= USED * self.devices]
        return [(R, used) for _, R, used in sorted(large, reverse=True)[:PROPORTIONS]]

    def alike(self, R: int, used: Counts) -> list[tuple[float, Path]]:
        """Replicas that are all alike, but for a sample; with about their steps."""
        most_price = self.problem.max_price_per_hour
        if most_price is not None:
            price = float(self.kinds.prices @ np.array(used))
            R = min(R, int(most_price * (1 + 1e-12) / price)) if price > 0 else R
        if R < 1:
            return []
        samples, sums, found = -(-self.problem.global_batch // R), self.kinds.sum_floor(R), []
        for size in range(len(self.columns.stages.sizes)):
            if samples < first_samples(self.columns.stages, size):
                continue
            T = min(self.best_step, MOST * self.fluid)
            for path in self.paths.search(T, R, used, size, samples):
                pipeline = self.paths.simulated(path, size, samples)
                if pipeline is not None and pipeline.end(sums) < self.best_step:
                    step = self.offer(self.fleet, self.fleet.dealt([Group(R, pipeline)]))
                    found.append((step, path))
        return found

    def least(self) -> None:
        """About the least T at which the linear program is possible, and the largest seen at which it is not."""
        R = Range(self.few(), self.most)
        low, T = self.fluid, self.best_step
        if math.isfinite(T):
            while self.fluid < T and self.master.guess(T / GROWTH, R):
                T /= GROWTH
            low = max(self.fluid, T / GROWTH)
        else:
            T = self.fluid * GROWTH
            while not self.master.guess(T, R):
                low, T = T, T * GROWTH
                if MOST * self.fluid < T or self.late():
                    return
        while low * NEAR < T and not self.late():
            middle = math.sqrt(low * T)
            low, T = (low, middle) if self.master.guess(middle, R) else (middle, T)
        self.least_T, self.ruled_T = T, low

    def few(self) -> int:
        """Somewhat fewer replicas than the plan in hand has."""
        return max(1, self.devices // 8 if self.plan is None else int(0.9 * len(self.plan.replicas)))

    def cuts(self, T: float, R: int) -> list[tuple[int, ...]]:
        """Sets of layers to cut at: those of the pipelines that the linear program uses most."""
        found, wanted = [], self.fleet.wanted(T)
        for used in sorted(self.master.used, key=lambda c: -self.master.used[c] * sum(c))[:3]:
            pipeline = self.fleet.real(used, wanted[used], T * WIDE, R) if used in wanted else None
            if pipeline is not None:
                found.append(pipeline.path.cuts)
        return found

    def cut(self, cuts: tuple[int, ...], common: tuple[int, ...] | None, R: int) -> Master:
        """The linear program over pipelines as `Columns.cut_at` has them."""
        master = Master(self.columns.cut_at(cuts, common))
        master.prices = self.master.scaled(self.master.prices, R)
        return master

    def grids(self, found: list[tuple[int, ...]], R: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Sets of layers to cut at, and of those which all are to be cut at: all of a set that was found; or few, of as
        many of the found as R replicas can sum the pieces of, or of layers at equal times."""
        once = 2 * (R - 1) * max((link.seconds(0) for link in self.kinds.between), default=0.0)
        most = self.kinds.L if once == 0 else max(FEWEST, int(PIECES * self.least_T / once))
        joined: list[tuple[int, ...]] = []
        for first in range(len(found)):
            cuts: tuple[int, ...] = ()
            for more in found[first:]:
                wider = tuple(sorted({*cuts, *more}))
                cuts = wider if len(wider) <= most + 1 or not cuts else cuts
            joined.append(cuts)
        times = self.columns.stages.least[0]
        evenly = [np.linspace(0, times[-1], min(number, most) + 1) for number in EVEN]
        even = [np.abs(times[:, None] - ends).argmin(axis=0).tolist() for ends in evenly]
        tried = [*joined[:1], *(tuple(sorted({0, *layers, self.kinds.L})) for layers in even)]
        pairs = [(cuts, cuts[1:-1]) for cuts in found] + [(cuts, ()) for cuts in (*tried, *joined)]
        return list(dict.fromkeys(pairs + [(cuts, (common,)) for cuts in tried for common in cuts[1:-1]]))

    def possible(self, masters: list[Master], R: int) -> list[tuple[float, Master]]:
        """The linear programs that are possible within the least T, which is about known, for somewhat fewer replicas
        than R or more; those of which are better than the plan in hand."""
        low, high = self.ruled_T, min(self.best_step, self.least_T * LADDER[-1])
        counts = Range(max(1, int(0.9 * R)), self.most)
        least: dict[int, float] = {}
        left = list(range(len(masters)))
        while low * NEARLY < high and left and not self.late():
            T = max(math.sqrt(low * high), high / NEAR)
            kept = [i for i in left if sum(m.columns.seen for m in masters) < CHOOSING and masters[i].guess(T, counts)]
            low, high, left = (low, T, kept) if kept else (T, high, left)
            least |= dict.fromkeys(kept, T)
        best = sorted(least, key=lambda i: (least[i], len(masters[i].columns.layers)))  # fewer pieces to sum
        return [(least[i], masters[i]) for i in best[:REALISED]]

    def realise(self, T: float, master: Master, R: int = 0) -> None:
        """Whole numbers of real pipelines, from T upward; about R of them, or as many as the linear program used."""
        R = R or max(1, round(sum(master.used.values())))
        prices = self.master.scaled(master.prices, R)
        fleet = Fleet(master, Paths(master.columns))
        for factor in LADDER:
            if T * factor >= self.best_step or (self.plan is not None and self.late()):
                break
            part = CHEAPER / factor
            lower = Prices(prices.device * part, prices.replica * part)
            master.look(T * factor, Range(R, R), lower, GUESS)
            groups = fleet.groups(T * factor, R, self.most, math.inf if self.plan is None else WORK)
            if groups:
                self.offer(fleet, groups)
                break

    def offer(self, fleet: Fleet, groups: list[Group]) -> float:
        """Place and simulate what may be the best plan; its step, or about that. Few replicas are also placed side by
        side, each stage of all of them on one node, where its gradients are summed faster."""
        step, few = fleet.step(groups), sum(g.number for g in groups) <= self.kinds.largest_node
        if step >= self.best_step * (1 + 1e-3) and not few:
            return step
        steps = []
        for plan in [place(self.kinds, groups, self.name, side_by_side=x) for x in {False, few}]:
            if plan is not None:
                steps.append(simulate(plan, self.problem.profile, self.problem.cluster).step_seconds)
                if steps[-1] < self.best_step:
                    self.best_step, self.plan = steps[-1], plan
        return min(steps, default=step)

    # -- a bound --------------------------------------------------------------------------------------------

    def bound(self) -> float:
        """A T that is ruled out for all replica counts: the lowest is raised again and again, first that of the plan's, whose
        T the others, whose gradient sums are shorter, then try, too; until the plan is near enough."""
        assert self.plan is not None
        first, *others = self.intervals(len(self.plan.replicas))
        main = Claim(first, self.master.prices, self.fluid, min(self.best_step, self.least_T))
        claims = [main, *(Claim(R, self.master.shared(R.high, SHARE), self.fluid, main.above) for R in others)]
        shown, prices = self.master.impossible(main.above / NEAR, main.R, main.prices, CANDIDATES / 20)
        if shown:  # as is often so with two types: nearly there at once
            main.below, main.prices = main.above / NEAR, prices
        left = float(CANDIDATES)
        while left > 0 and not self.late():
            claim = min(claims, key=lambda c: c.below)
            if claim.settled or self.best_step <= claim.below * PROVEN:
                break
            before, T = self.columns.seen, claim.target(main)
            shown, claim.prices = self.master.impossible(T, claim.R, claim.prices, left / 3)
            claim.below, claim.above = (T, claim.above) if shown else (claim.below, T)
            left -= self.columns.seen - before + EACH
        return min(claim.below for claim in claims)

    def intervals(self, R: int) -> list[Range]:
        """Replica counts, the most first: from about R up, then so that the sums of half of the layers differ little
        within each. As many as a node has devices or fewer, which may sum inside nodes, are apart, and at most half as many
        are with them."""
        half = float(self.kinds.summed.sum()) / 2
        inside = [c.inside for c in self.kinds.classes if c.inside is not None]
        few = self.kinds.largest_node

        def seconds(r: int) -> float:
            links = [*inside, *self.kinds.between] if r <= few else self.kinds.between
            return 2 * (r - 1) * min((x.seconds(half / r) for x in links), default=0.0)

        found, high = [], self.most
        while high >= 1:
            least = few + 1 if few < high else high // 2 + 1
            low = max(least, min(high, R))
            longest = seconds(low)
            while least < low and longest - seconds(low - 1) <= ALIKE * self.best_step:
                low = max(least, min(low - 1, int(low * 0.95)))
            found.append(Range(low, high))
            high = low - 1
        return found

    def say(self, message: str) -> None:
        """Report progress."""
        if self.problem.progress is not None:
            self.problem.progress(message)
