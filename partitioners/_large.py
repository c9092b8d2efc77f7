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
LADDER = (1.0, 1.01, 1.02, 1.035, 1.055, 1.08, 1.12, 1.2, 1.35, 1.6, 2.2, 4.0)
CHEAPER = 0.96  # columns worth this part of their price are of use in whole numbers
CANDIDATES = 3_000_000  # partial pipelines looked at for the bound: about 1.5 s
NEARER = (0.2, 0.12, 0.08, 0.05, 0.035, 0.025, 0.018, 0.012, 0.008, 0.005, 0.003, 0.001)  # below the plan's step
ACCURACY = 1.0015
ALIKE = 0.003  # of a step, by which gradient sums may differ within an interval of replica counts
SHARE = 0.02  # of the batch that replicas are worth where they are few, at first


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
        T = self.least()
        if T is None or self.late():
            return
        self.least_T = T
        R = max(1, round(sum(self.master.used.values())))
        grids = [path.cuts for _, path in sorted(alike)[:2]] + self.cuts(T, R)
        for cuts in dict.fromkeys(grids):
            self.say(f"{R} replicas, about {T:.4g} s, best step {self.best_step:.4g} s")
            self.realise(T, self.columns.cut_at(cuts), R)
        if self.plan is None:
            self.realise(T, self.columns, R)

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

    def least(self) -> float | None:
        """About the least T at which the linear program is possible; None if there is no such T."""
        R = Range(self.few(), self.most)
        low, T = self.fluid, min(self.best_step, self.fluid * GROWTH)
        if math.isfinite(self.best_step):
            T = self.best_step
            while self.fluid < T and self.master.guess(T / GROWTH, R):
                T /= GROWTH
            low = max(self.fluid, T / GROWTH)
        else:
            while not self.master.guess(T, R):
                low, T = T, T * GROWTH
                if MOST * self.fluid < T or self.late():
                    return None
        while low * NEAR < T and not self.late():
            middle = math.sqrt(low * T)
            low, T = (low, middle) if self.master.guess(middle, R) else (middle, T)
        return T if self.master.used else None

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

    def realise(self, T: float, columns: Columns, R: int) -> None:
        """Whole numbers of real pipelines, from T upward."""
        master = Master(columns)
        prices = self.master.scaled(self.master.prices, R)
        fleet = Fleet(master, Paths(columns))
        for factor in LADDER:
            if T * factor >= self.best_step or (self.plan is not None and self.late()):
                break
            part = CHEAPER / factor
            lower = Prices(prices.device * part, prices.replica * part)
            master.look(T * factor, Range(R, R), lower, GUESS)
            groups = fleet.groups(T * factor, R, self.most)
            if groups:
                self.offer(fleet, groups)
                break

    def offer(self, fleet: Fleet, groups: list[Group]) -> float:
        """Place and simulate what may be the best plan; its step, or about that. Few replicas are also placed side by
        side, each stage of all of them on one node, where its gradients are summed faster."""
        step, few = fleet.step(groups), sum(g.number for g in groups) <= self.kinds.largest_node
        if step >= self.best_step * (1 + 1e-3) and not few:
            return step
        for plan in [place(self.kinds, groups, self.name, side_by_side=x) for x in {False, few}]:
            if plan is not None:
                step = min(step, simulate(plan, self.problem.profile, self.problem.cluster).step_seconds)
                if step < self.best_step:
                    self.best_step, self.plan = step, plan
        return step

    # -- a bound --------------------------------------------------------------------------------------------

    def bound(self) -> float:
        """A T that is ruled out for all replica counts: raised for the interval of the plan's while that succeeds, then
        lowered where the others, whose gradient sums are shorter, are not ruled out."""
        assert self.plan is not None
        main, *rest = self.intervals(len(self.plan.replicas))
        self.left, below = float(CANDIDATES), self.fluid
        high = min(self.best_step, self.least_T)
        for part in NEARER:
            T = high * (1 - part)
            if below < T:
                if self.late() or not self.ruled_out(T, main, 0.0):
                    break
                below = T
        above = T
        while self.left > CANDIDATES / 2 and self.fluid < below < above / ACCURACY and not self.late():
            T = math.sqrt(below * above)
            below, above = (T, above) if self.ruled_out(T, main, 0.0) else (below, T)
        for R in rest:
            below = self.lowered(R, below)
        return below

    def intervals(self, R: int) -> list[Range]:
        """Replica counts, the most first: from about R up, then so that the sums of half of the layers differ little
        within each."""
        half = float(self.kinds.summed.sum()) / 2
        inside = [c.inside for c in self.kinds.classes if c.inside is not None]

        def seconds(r: int) -> float:
            links = [*inside, *self.kinds.between] if r <= self.kinds.largest_node else self.kinds.between
            return 2 * (r - 1) * min((x.seconds(half / r) for x in links), default=0.0)

        found, high, least = [], self.most, seconds(R)
        while high >= 1:
            low = min(high, R)
            while low > 1 and least - seconds(low - 1) <= ALIKE * self.best_step:
                low = min(low - 1, max(1, int(low * 0.95)))
            found.append(Range(low, high))
            high = low - 1
            least = seconds(high) if high else 0.0
        return found

    def lowered(self, R: Range, T: float) -> float:
        """T, or less until that is ruled out for these replica counts; the fluid bound at last."""
        factor = 1.005
        self.left = max(self.left, CANDIDATES / 8)
        while self.fluid < T and not self.late():
            if self.ruled_out(T, R, SHARE):
                return T
            T, factor = T / factor, factor**1.5
            self.left = max(self.left, CANDIDATES / 16)
        return self.fluid

    def ruled_out(self, T: float, R: Range, share: float) -> bool:
        """Whether it is proven that no plan of so many replicas ends within T."""
        before = self.columns.seen
        found = self.master.impossible(T, R, share, min(self.left, CANDIDATES / 2))
        self.left -= self.columns.seen - before
        return found

    def say(self, message: str) -> None:
        """Report progress."""
        if self.problem.progress is not None:
            self.problem.progress(message)
