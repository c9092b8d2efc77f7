"""The counted planner: clusters of dozens to thousands of devices, with a proven bound.

1. Classes of devices (`_classes`), and for each micro-batch size the most micro-batches that a pipeline of each
   composition can do within T (`_columns`), longer ones relaxed (`_relaxed`).
2. The least T at which the linear program over counts (`_master`) is possible, per micro-batch size and interval
   of replica counts: the least of all bounds every plan of the class.
3. Whole numbers (`_fleet`) at T and a little above, with pipelines that were simulated; the best by the step with
   its gradient sums is placed on real devices (`_placing`) and simulated.

The size of all programs depends on the number of classes, not of devices; only placing is a loop over them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from hetpipe.bounds import fluid_bound
from hetpipe.partition import Problem, Solution
from hetpipe.partitioners._classes import Classes
from hetpipe.partitioners._columns import Columns, grid_of
from hetpipe.partitioners._fleet import Fleet, Group
from hetpipe.partitioners._master import Master
from hetpipe.partitioners._placing import place
from hetpipe.partitioners._relaxed import Relaxed
from hetpipe.partitioners._search import Search
from hetpipe.partitioners._space import microbatch_sizes
from hetpipe.plan import Plan
from hetpipe.simulator import simulate

STAGES = {1: 8, 2: 7, 3: 5, 4: 4}
ACCURACY = 1e-3
MOST_COMPOSITIONS = 4_000
LADDER = (
    1.0,
    1.003,
    1.007,
    1.012,
    1.02,
    1.03,
    1.045,
    1.065,
    1.09,
    1.12,
    1.16,
    1.22,
    1.3,
    1.45,
    1.7,
    2.1,
    3,
    5,
)
SPLIT = 1.5


@dataclass
class Size:
    """One micro-batch size: its programs, and about the least step of plans with it."""

    b: int
    master: Master
    fleet: Fleet
    guess: float


class Large:
    """One search; `run` gives the Solution."""

    def __init__(self, problem: Problem, name: str, *, time_limit_seconds: float = 30.0) -> None:
        self.problem, self.name = problem, name
        self.space = Classes(problem)
        self.fluid = fluid_bound(problem)
        self.deadline_at = time.monotonic() + time_limit_seconds
        self.best_step = self.least_guess = math.inf
        self.plan: Plan | None = None

    def run(self) -> Solution:
        """A plan from guesses first: its step caps the search for the bound. Where only longer pipelines fit, again
        with these; at last, the search that is made for few devices."""
        stages = STAGES.get(self.space.K, 3 if self.space.K < 10 else 2)
        while stages < 2 * self.space.L and math.comb(self.space.K + stages, stages) <= MOST_COMPOSITIONS:
            solution = self.attempt(stages)
            if solution is not None:
                return solution
            if self.late():
                break
            stages *= 2
        left = max(1.0, self.deadline_at - time.monotonic())
        return Search(self.problem, self.name, time_limit_seconds=left).run()

    def late(self) -> bool:
        """Whether the time limit is over."""
        return time.monotonic() > self.deadline_at

    def attempt(self, stages: int) -> Solution | None:
        """A plan of pipelines of at most so many stages, and a bound on all."""
        sizes = [self.size(b, stages) for b in microbatch_sizes(self.problem)]
        for size in sizes:
            self.say(f"pipelines with micro-batches of {size.b}")
            first = not math.isfinite(self.least_guess)
            size.guess = self.guess(size) if first or not self.late() else math.inf
        for size in sorted(sizes, key=lambda s: s.guess):
            if size.guess < self.best_step and not (self.plan and self.late()):
                self.round(size)
        if self.plan is None:
            return None
        self.say(f"best step {self.best_step:.4g} s; bounding")
        low = self.best_step
        for size in sorted(sizes, key=lambda s: s.guess):
            low = self.bound(size, low)
        return Solution(plan=self.plan, lower_bound_seconds=low, proof="search-bound")

    def size(self, b: int, stages: int) -> Size:
        """The programs of one micro-batch size."""
        need = self.problem.global_batch // b
        columns = Columns(self.space, b, grid_of(min(need, 400)), stages)
        relaxed = Relaxed(self.space, b, grid_of(min(need, 600), 1.1), stages)
        fleet = Fleet(self.space, columns, self.problem.max_price_per_hour or math.inf)
        return Size(b, Master(columns, relaxed), fleet, self.fluid)

    def guess(self, size: Size) -> float:
        """About the least step with this micro-batch size and pipelines that are not long."""
        most, T = min(sum(self.space.counts), size.fleet.M), self.fluid
        R = (max(1, most // 4), most)
        for _ in range(40):
            if self.best_step < T or size.master.solve(T, *R, longer=False).possible:
                T = size.master.least(self.fluid, T, R, 4 * ACCURACY, longer=False)
                self.least_guess = min(self.least_guess, T)
                return T
            T *= 1.3
        return math.inf

    def bound(self, size: Size, low: float) -> float:
        """The least of `low` and all T at which the linear program of some replica counts is possible. Intervals of
        replica counts are split until the floor of the gradient sums changes little within them."""
        intervals = [(1, min(sum(self.space.counts), size.fleet.M))]
        while intervals:
            first, last = intervals.pop()
            if self.late():
                return self.fluid
            if not size.master.solve(low, first, last).possible:
                continue
            if last <= max(first + 1, first * SPLIT):
                low = size.master.least(self.fluid, low, (first, last), ACCURACY)
            else:
                middle = math.isqrt(first * last)
                intervals += [(first, middle), (middle + 1, last)]
        return low

    def round(self, size: Size) -> None:
        """Plans of one micro-batch size, from its guess upward; then with fewer replicas, whose gradient sums are
        shorter."""
        if not math.isfinite(size.guess):
            return
        most = max(1, min(sum(self.space.counts), size.fleet.M))
        candidates = self.candidates(size, most, most // 2, math.inf)
        if candidates:
            R = sum(g.number for g in candidates[0][1])
            for share in (2, 4):
                if R // share > 4:
                    candidates += self.candidates(size, R // share, R // share, min(c[0] for c in candidates))
        for _, groups in sorted(candidates, key=lambda pair: pair[0])[:1]:
            plan = place(self.space, groups, size.b, self.name)
            step = simulate(plan, self.problem.profile, self.problem.cluster).step_seconds
            if step < self.best_step:
                self.best_step, self.plan = step, plan

    def candidates(self, size: Size, most: int, R: int, limit: float) -> list[tuple[float, list[Group]]]:
        """A few plans of at most `most` replicas, with about their steps."""
        found: list[tuple[float, list[Group]]] = []
        for factor in LADDER:
            T = size.guess * factor
            if min(self.best_step, limit) < T:
                break
            groups = size.fleet.groups(T, max(1, R), most)
            if groups:
                R = sum(g.number for g in groups)
                groups = size.fleet.groups(T, R, most) or groups
                found.append((size.fleet.step(groups), groups))
                limit = min(limit, found[-1][0])
                if len(found) >= 3:
                    break
        return found

    def say(self, message: str) -> None:
        """Report progress."""
        if self.problem.progress is not None:
            self.problem.progress(message)
