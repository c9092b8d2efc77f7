"""The counted planner: clusters of dozens to thousands of devices, with a proven bound.

1. Classes of devices (`_kinds`), and what a stage costs on each (`_stages`).
2. Plans of replicas that are all alike, as every proportion of the classes allows: one search for a pipeline each
   (`_paths`). Their gradient sums are few and long.
3. About the least T at which the linear program over counts is possible (`_master`), with pipelines of any length and
   mix that are worth their price (`_columns`); then whole numbers of real ones (`_fleet`). Where replicas are cut at
   many different layers each piece is summed by a ring of its own, so this is done for a few sets of cuts (`_cuts`).
   The plan is the best simulated step, on real devices (`_placing`).
4. A bound: the largest T found that the linear programs rule out for every number of replicas (`_bound`).

The size of all programs depends on the number of classes, not of devices; only placing is a loop over them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hetpipe.partitioners._bound import Bound
from hetpipe.partitioners._columns import Columns, Counts
from hetpipe.partitioners._cuts import CutSets
from hetpipe.partitioners._fleet import Fleet, Group
from hetpipe.partitioners._kinds import Kinds
from hetpipe.partitioners._limit import Limit
from hetpipe.partitioners._loads import first_samples
from hetpipe.partitioners._master import GUESS, WIDE, Master, Prices, Range
from hetpipe.partitioners._obstacle import explain, refuse
from hetpipe.partitioners._paths import Path, Paths
from hetpipe.partitioners._placing import place
from hetpipe.partitioners._search import Search
from hetpipe.partitioners._stages import Stages
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import Problem, Solution
from hetpipe.predict.simulator import simulate
from hetpipe.spec.plan import Plan

MOST = 1e4  # times the fluid bound: a step this long is none
GROWTH, NEAR = 1.04, 1.02  # of T, in search of a possible one
LONGEST, PARTS = 32, 100  # replicas alike: devices of each, and parts of them in counts
PROPORTIONS, USED = 16, 0.8  # how many are tried, and the part of all devices that they use
LADDER = (1.0, 1.005, 1.01, 1.02, 1.035, 1.055, 1.08, 1.12, 1.2, 1.35, 1.6, 2.2, 4.0)
PIECES = 0.03  # part of a step that their latencies may take
WORK = 1_000_000  # partial pipelines looked at to make one of them whole: up to 0.5 s
SEARCHED = 64  # devices up to which there is another search, over single devices, where none of this one fits
CHEAPER = 0.96  # columns worth this part of their price are of use in whole numbers


class Large:
    """One search; `run` gives the Solution. `counted`: unless there is a time limit it ends by its effort (see `_limit`).
    `others`: plans that fit, with which its own is compared in the end; it does not start from them, since with a plan in hand it
    leaves out what it would build on."""

    def __init__(
        self,
        problem: Problem,
        name: str,
        *,
        time_limit_seconds: float = 30.0,
        counted: bool = False,
        others: Sequence[Plan] = (),
    ) -> None:
        self.problem, self.name, self.others = problem, name, others
        self.fluid = fluid_bound(problem)
        self.kinds = Kinds(problem)
        self.columns = Columns(Stages(self.kinds))
        self.master = Master(self.columns)
        self.paths = Paths(self.columns)
        self.fleet = Fleet(self.master, self.paths)
        self.devices, self.most = sum(self.kinds.counts), self.kinds.most
        self.done, self.timed = (self.seen if counted else None), problem.time_limit_seconds is not None
        self.ends = Limit(time_limit_seconds, self.done, timed=self.timed)
        self.best_step = self.least_T = math.inf
        self.ruled_T = 0.0  # below the linear program was not possible, as far as was looked
        self.plan: Plan | None = None

    def take(self, plan: Plan) -> float:
        """Keep a plan that fits if it is the fastest; its step."""
        step = simulate(plan, self.problem.profile, self.problem.cluster).step_seconds
        if step < self.best_step:
            self.best_step, self.plan = step, plan
        return step

    def run(self) -> Solution:
        """A plan, then a bound; where none is found, the search that is made for few devices, or what is missing."""
        self.find()
        for plan in self.others:
            self.take(plan)
        if self.plan is None and self.devices > SEARCHED:
            self.say("no plan was found; looking for what is missing")
            raise explain(self.problem)
        if self.plan is None:
            left = max(1.0, self.ends.left())
            return Search(self.problem, self.name, time_limit_seconds=left).run()
        self.say(f"best step {self.best_step:.4g} s; bounding")
        return Solution(plan=self.plan, lower_bound_seconds=self.bound(), proof="search-bound")

    def seen(self) -> float:
        """What was done so far, in partial pipelines."""
        return self.columns.meter.done

    def late(self) -> bool:
        """Whether the time limit, or so much effort, is over."""
        return self.ends.late()

    # -- a plan ---------------------------------------------------------------------------------------------

    def find(self) -> None:
        """The best plan of those tried."""
        alike: list[tuple[float, Path, list[Group]]] = []
        for R, used in self.proportions():
            least = min((step for step, _, _ in alike), default=self.best_step)
            self.say(f"{R} replicas of {sum(used)} devices, best step {least:.4g} s")
            alike += self.alike(R, used, least)
        alike.sort(key=lambda found: found[:2])
        for step, _, groups in alike:
            if step < self.best_step:
                self.offer(self.fleet, groups)
        if self.plan is None:
            refuse(self.problem)
        self.least()
        T = self.least_T
        if not math.isfinite(T) or self.late():
            return
        R = round(sum(self.master.used.values())) or (1 if self.plan is None else len(self.plan.replicas))
        wanted = self.cuts(T, R)
        sets = CutSets(self.columns, self.master, self.ruled_T, min(self.best_step, T * LADDER[-1]), R, self.late)
        for least, master in sets.best([path.cuts for _, path, _ in alike[:2]] + wanted, PIECES * T):
            self.say(f"about {least:.4g} s, best step {self.best_step:.4g} s")
            self.realise(least, master)
        for cuts in wanted:  # replicas may share some cuts and not others
            self.realise(self.least_T, sets.program(cuts, None), R)
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

    def alike(self, R: int, used: Counts, least: float) -> list[tuple[float, Path, list[Group]]]:
        """Replicas that are all alike, but for a sample, with about their steps, each below `least` or the one before. Few are
        offered, since they may be placed in ways that are faster."""
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
            for path in self.paths.search(min(least, MOST * self.fluid), R, used, size, samples):
                pipeline = self.paths.simulated(path, size, samples)
                if pipeline is not None and pipeline.end(sums) < least:
                    groups, few = self.fleet.dealt([Group(R, pipeline)]), self.kinds.largest_node >= R
                    step = self.offer(self.fleet, groups) if few else self.fleet.step(groups)
                    found.append((step, path, groups))
                    least = min(least, step)
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

    def realise(self, T: float, master: Master, R: int = 0) -> None:
        """Whole numbers of real pipelines, from T upward; about R of them, or as many as the linear program used."""
        R = R or max(1, round(sum(master.used.values())))
        prices = self.master.scaled(master.prices, R)
        fleet, work = Fleet(master, Paths(master.columns)), WORK if self.plan is not None or self.others else math.inf
        for factor in LADDER:
            if T * factor >= self.best_step or (self.plan is not None and self.late()):
                break
            part = CHEAPER / factor
            lower = Prices(prices.device * part, prices.replica * part)
            master.look(T * factor, Range(R, R), lower, GUESS)
            groups = fleet.groups(T * factor, R, self.most, work)
            if groups:
                self.offer(fleet, groups)
                break

    def offer(self, fleet: Fleet, groups: list[Group]) -> float:
        """Place and simulate what may be the best plan; its step, or about that. Few replicas are also placed side by
        side, each stage of all of them on one node, where its gradients are summed faster."""
        step, few = fleet.step(groups), sum(g.number for g in groups) <= self.kinds.largest_node
        if step >= self.best_step * (1 + 1e-3) and not few:
            return step
        placed = [place(self.kinds, groups, self.name, side_by_side=x) for x in {False, few}]
        return min((self.take(plan) for plan in placed if plan is not None), default=step)

    def bound(self, seconds: float | None = None) -> float:
        """A T that is ruled out for all replica counts; in so many seconds from now on, or in what is left."""
        assert self.plan is not None
        if seconds is not None:
            self.ends = Limit(seconds, self.done, timed=self.timed)
        R = len(self.plan.replicas)
        return Bound(self.master, self.fluid, self.least_T, self.best_step, R, self.late).run()

    def say(self, message: str) -> None:
        """Report progress."""
        if self.problem.progress is not None:
            self.problem.progress(message)
