"""The joint search: groupings, shares and cuts, least bound first, until the next bound is worse than the
plan in hand.

1. A plan in hand of step T: the best of those that the search was given to start from; T is infinite without one.
2. Bound every composition of devices for every number of samples (`composition_bounds`), and every grouping from these.
3. For each grouping whose bound is below T, least first: replica r can take n samples only if its bound is below
   T, and must take at least what the others cannot take within T. For the n left in these windows list *all* its
   pipelines with a bound below T, of every micro-batch size and depth family, and simulate them (once for each
   composition; what is learned tightens the bounds of all groupings that hold it); then every way to share B samples out, and
   every choice of one pipeline per replica, whose parts are below T, with the gradient sums of exactly these.

Nothing is left out whose step could be below T, so the plan in hand at the end is optimal in the plan class (or
better than it, if it is one of those to start from and not of the class), unless a limit (rows, combinations,
seconds) was met: then the least bound of what was left out is the proven bound. In the worst case exponential in
the devices, as the problem is; the windows are narrow when the bounds are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np

from hetpipe.partitioners.compositions.groupings import Bounds, Grouping
from hetpipe.partitioners.exact.batch import PricedPipelines
from hetpipe.partitioners.exact.candidates import Enumeration, Variant
from hetpipe.partitioners.exact.joint import Joint
from hetpipe.partitioners.exact.plans import Chosen, build_plan, replicas_of
from hetpipe.partitioners.exact.pools import SPLITS, Pools
from hetpipe.partitioners.exact.shares import below, choices, least_by_share, share_lists
from hetpipe.partitioners.memory_fit.obstacle import explain
from hetpipe.partitioners.stage_kinds.limit import Limit
from hetpipe.partitioners.stage_kinds.space import Array, Space, families_of, load_of, microbatch_sizes
from hetpipe.planning.partition import Problem, Solution, no_plan_in_time
from hetpipe.predict.simulator import play, simulate
from hetpipe.spec.plan import Plan

ROWS = 40_000  # partial pipelines kept at a time
CHUNK = 4096
GROUPINGS = 40_000  # listed at most
COMPOSITIONS = 600  # bounded at most
STATES = 5_000  # parts of the cluster (in counts) up to which groupings are listed
SHARED = 150_000  # numbers that take as long to handle as to simulate a plan whose transfers share adapters
GROUPING = 10_000  # numbers that take as long to handle as to list one


class BoundedGrouping(NamedTuple):
    """A grouping to be searched."""

    key: float
    devices: int
    number: int
    bound: float
    grouping: Grouping


class ExactSearch:
    """One search; `run` gives the Solution. It starts from the plans `start`, which must fit the problem."""

    def __init__(
        self,
        problem: Problem,
        name: str,
        *,
        max_replicas: int | None = None,
        time_limit_seconds: float = 30.0,
        start: Sequence[Plan] = (),
    ) -> None:
        self.problem, self.name, self.one_pipeline_only = problem, name, max_replicas == 1
        self.time_limit = problem.time_limit_seconds or time_limit_seconds
        microbatch_sizes(problem)  # says what is missing
        self.space = Space(problem)
        self.joint = Joint(self.space)
        self.best_step, self.best_cost = math.inf, math.inf
        self.chosen: list[Chosen] = []
        self.given: Plan | None = None
        self.open_bound = math.inf  # the least bound of what was left out
        self.ends = Limit(
            time_limit_seconds, self.done if problem.time_limit_seconds is None else None, problem.stopped
        )
        self.late = self.ends.late  # whether the time limit, or so much effort, is over
        self.start(start)

    def done(self) -> float:
        """What was done so far, in partial pipelines."""
        return self.space.meter.done

    def start(self, plans: Sequence[Plan]) -> None:
        """The best of these plans, which keep all limits, is the first in hand."""
        for plan in plans:
            step = simulate(plan, self.problem.profile, self.problem.cluster).step_seconds
            price = sum(self.problem.cluster.type_of(device).price_per_hour for device in plan.device_ids)
            if step < self.limit(price):
                self.best_step, self.best_cost, self.given = step, price * step, plan

    def limit(self, price: float) -> float:
        """A plan of this price per hour is better than the one in hand only with a step below this."""
        deadline = self.problem.deadline_seconds_per_step
        if deadline is None:
            return self.best_step
        at_most = deadline * (1 + 1e-12)  # bounds are sums in another order
        if price > 0:
            return min(at_most, self.best_cost / price)
        return at_most if self.best_cost > 0 else min(at_most, self.best_step)

    def key(self, grouping: Grouping, step: float) -> float:
        """What is minimised: the step, or under a deadline its price (per hour × seconds)."""
        return step if self.problem.deadline_seconds_per_step is None else step * self.price(grouping)

    def price(self, grouping: Grouping) -> float:
        """Price per hour of all devices of a grouping."""
        return sum(self.space.price(c) for c in grouping)

    def affordable(self, grouping: Grouping) -> bool:
        """Whether the price limit allows it."""
        most = self.problem.max_price_per_hour
        return most is None or self.price(grouping) <= most * (1 + 1e-12)

    def offer(self, grouping: Grouping, parts: list[PricedPipelines]) -> None:
        """Price plans exactly, [K] at once, and keep the best if it beats the plan in hand."""
        if not parts[0].number:
            return
        steps, price = self.joint.step(parts), self.price(grouping)
        if self.problem.cluster.shares_adapters:
            steps = self.shared(parts, steps, price)
        if self.problem.deadline_seconds_per_step is not None:
            steps = np.where(steps <= self.problem.deadline_seconds_per_step, steps, np.inf)
        i = int(np.argmin(steps))
        if steps[i] < self.limit(price):
            self.best_step, self.best_cost = float(steps[i]), price * float(steps[i])
            self.chosen = replicas_of(parts, i)

    def shared(self, parts: list[PricedPipelines], alone: Array, price: float) -> Array:
        """The steps of those that could beat the plan in hand, if others cross the same adapters; infinite for the rest, which
        take too long `alone`."""
        steps, least = np.full(len(alone), np.inf), self.limit(price)
        for i in np.argsort(alone, kind="stable").tolist():
            if alone[i] >= least:
                break
            if self.late():
                self.left_out(float(alone[i]), price)
                break
            self.space.meter.count(SHARED)
            steps[i] = play(build_plan(self.space, replicas_of(parts, i), self.name), self.joint.costs).step
            least = min(least, steps[i])
        return steps

    def run(self) -> Solution:
        """Search to the end, or to the time limit."""
        self.explore_all(self.prepared())
        return self.solution()

    def prepared(self) -> list[BoundedGrouping]:
        """What is to be searched, least bound first."""
        self.say(f"bounding pipelines of {sum(self.space.devices)} devices")
        only = self.one_pipeline_only
        self.bounds = Bounds(self.space, one_pipeline=only, most=COMPOSITIONS, late=self.late)
        self.pools = Pools(self.space, self.bounds, self.late)
        if not self.bounds.complete:
            self.open_bound = 0.0
        return self.items([(c,) for c in self.bounds.firsts] + ([] if only else self.replicated()))

    def explore_all(self, items: list[BoundedGrouping]) -> None:
        """Search all groupings that could beat the plan in hand."""
        for number, item in enumerate(items):
            if item.bound >= self.limit(self.price(item.grouping)):
                if self.problem.deadline_seconds_per_step is None:
                    break
                continue
            if self.late():
                self.open_bound = min(self.open_bound, *(left.bound for left in items[number:]))
                break
            if number % 50 == 0:
                best = f"best step {self.best_step:.4g} s, next bound {item.bound:.4g} s"
                self.say(f"grouping {number} of {len(items)}: {best}")
            self.explore(item)

    @property
    def found(self) -> bool:
        """Whether there is a plan in hand."""
        return bool(self.chosen) or self.given is not None

    def replicated(self) -> list[Grouping]:
        """Groupings of several replicas that can do B samples within what is of interest: the first `GROUPINGS`."""
        found: list[Grouping] = []
        if self.space.states <= STATES:
            for grouping in islice(self.bounds.groupings(self.widest()), GROUPINGS):
                if self.late():
                    break
                self.space.meter.count(GROUPING)
                found.append(grouping)
        if len(found) == GROUPINGS or self.space.states > STATES or self.late():
            self.open_bound = 0.0  # not all were looked at
        return found

    def solution(self) -> Solution:
        """What was found, with what was proven."""
        if not self.found and self.late() and math.isfinite(self.open_bound):
            raise no_plan_in_time(self.problem)
        if self.chosen:
            plan = build_plan(self.space, self.chosen, self.name)
        elif self.given is not None:
            plan = self.given.model_copy(update={"partitioner": self.name})
        else:
            raise explain(self.problem, one_pipeline=self.one_pipeline_only)
        if self.problem.deadline_seconds_per_step is not None:
            if self.open_bound < math.inf:
                return Solution(plan=plan)
            return Solution(plan=plan, lower_bound_price=self.best_cost, proof="exhaustive")
        if self.open_bound <= 0:
            return Solution(plan=plan)
        if self.open_bound < self.best_step:
            return Solution(plan=plan, lower_bound_seconds=self.open_bound, proof="search-bound")
        return Solution(plan=plan, lower_bound_seconds=self.best_step, proof="exhaustive")

    def widest(self) -> float:
        """The largest step that any grouping may take to be of interest."""
        if self.problem.deadline_seconds_per_step is None:
            return self.best_step
        return self.problem.deadline_seconds_per_step * (1 + 1e-12)

    def items(self, found: Sequence[Grouping]) -> list[BoundedGrouping]:
        """These groupings with their bounds, in order: least bound first, then fewest devices."""
        items = []
        for number, grouping in enumerate(found):
            if number % 1000 == 999 and self.late():
                self.open_bound = 0.0
                break
            bound = self.bounds.bound(grouping)
            if bound < self.limit(self.price(grouping)) and self.affordable(grouping):
                devices = sum(sum(self.space.used(c)) for c in grouping)
                items.append(BoundedGrouping(self.key(grouping, bound), devices, number, bound, grouping))
        return sorted(items)

    def explore(self, item: BoundedGrouping) -> None:
        """All plans of one grouping that could beat the plan in hand."""
        if len(item.grouping) == 1:
            self.one(item.grouping)
            return
        price, R = self.price(item.grouping), len(item.grouping)
        for c in sorted(dict.fromkeys(item.grouping), key=sum):
            if self.bounds.bound(item.grouping) >= self.limit(price):
                return
            if self.late():
                self.left_out(item.bound, price)
                return
            if not self.pools.known(c):
                first = self.bounds.windows(self.widest()).get(c)
                if first is None:
                    return
                self.pools.list_all(c, first, self.widest(), ROWS)
            self.left_out(self.pools.dropped(c), price)
        pools = [self.pools.rows(c, R, self.widest()) for c in item.grouping]
        for most in (4, None):
            self.combine(item.grouping, pools, most)

    def whole(self, grouping: Grouping) -> list[Variant]:
        """All micro-batch sizes and families of one pipeline that does the whole batch."""
        (c,), B = grouping, self.bounds.B
        by_size = self.bounds.by_size(c, 1)[:, B]
        loads = [load_of(B, b or B) for b, least in zip([0, *self.bounds.sizes], by_size, strict=True)
                 if least < self.limit(self.price(grouping))]  # fmt: skip
        return [Variant(f, load) for load in loads for f in families_of(self.space.families, sum(c), load.m)]

    def one(self, grouping: Grouping) -> None:
        """One pipeline: simulate what the bound leaves, least bound first, while the threshold falls."""
        price = self.price(grouping)
        waiting = [(self.whole(grouping), SPLITS)]
        while waiting:
            variants, splits = waiting.pop()
            if not variants:
                continue
            enumeration = Enumeration(self.space, grouping[0], variants, 1)
            rows, dropped = enumeration.rows(self.limit(price), ROWS, self.late)
            if math.isfinite(dropped) and len(variants) > 1 and splits and not self.late():
                half = len(variants) // 2
                waiting += [(variants[:half], splits - 1), (variants[half:], splits - 1)]
                continue
            for chunk in rows.chunks(CHUNK // 8):
                if chunk.bound[0] >= self.limit(price):
                    break
                if self.late():
                    self.left_out(float(chunk.bound[0]), price)
                    break
                self.offer(grouping, [enumeration.price(chunk)])
            self.left_out(dropped, price)

    def combine(self, grouping: Grouping, pools: list[PricedPipelines], most: int | None) -> None:
        """Every choice of one pipeline per replica that could beat the plan in hand; of each pool and share the first
        `most` only."""
        price, B = self.price(grouping), self.bounds.B
        pools = [below(pool, self.limit(price), most) for pool in pools]
        same = [r > 0 and grouping[r] == grouping[r - 1] for r in range(len(grouping))]
        if not all(pool.number for pool in pools):
            return

        def left_out(bound: float) -> None:
            if most is None:
                self.left_out(bound, price)

        lists = share_lists([least_by_share(pool) for pool in pools], B, same, left_out)
        open_ = (shares for _, shares in takewhile(lambda found: found[0] < self.limit(price), lists))
        found = choices(pools, open_, same, CHUNK, left_out)
        for rows in found:
            bound = np.maximum.reduce([pool.bound[i] for pool, i in zip(pools, rows, strict=True)])
            keep = bound < self.limit(price)
            self.offer(grouping, [pool.pick(i[keep]) for pool, i in zip(pools, rows, strict=True)])
            if self.late():
                left_out(float(max(pool.bound[0] for pool in pools)))
                return

    def left_out(self, bound: float, price: float) -> None:
        """Something with this bound was not searched."""
        if bound < self.limit(price):
            self.open_bound = min(self.open_bound, bound)

    def say(self, message: str) -> None:
        """Report progress."""
        if self.problem.progress is not None:
            self.problem.progress(message)
