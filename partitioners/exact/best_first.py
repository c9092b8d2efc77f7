"""The joint search: groupings, shares and cuts, least bound first, until the next bound is worse than the
plan in hand.

1. A plan in hand of step T: the best of those that the search was given to start from; T is infinite without one.
2. Bound every composition of devices for every number of samples (`composition_bounds`), and every grouping from these.
3. For each grouping whose bound is below T, least first: replica r can take n samples only if its bound is below
   T, and must take at least what the others cannot take within T. For the n left in these windows list *all* its
   pipelines with a bound below T, of every micro-batch size and depth family, and simulate them (once for each
   composition; what is learned tightens the bounds of all groupings that hold it); then every choice of one pipeline per
   replica which do B samples and are below T, with the gradient sums of exactly these.

Nothing is left out whose step could be below T, so the plan in hand at the end is optimal in the plan class (or better than it,
if it is one of those to start from and not of the class), unless a limit (rows, seconds) was met: then the least bound of what
was left out is the proven bound. In the worst case exponential in the devices, as the problem is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.partitioners.compositions.groupings import Bounds, Grouping
from hetpipe.partitioners.exact.plans import build_plan
from hetpipe.partitioners.exact.pools import Pools
from hetpipe.partitioners.exact.pricing import PricedPipelines
from hetpipe.partitioners.exact.side_by_side import beside, plans_below, summing
from hetpipe.partitioners.memory_fit.obstacle import explain
from hetpipe.partitioners.stage_kinds.limit import Limit
from hetpipe.partitioners.stage_kinds.plan_class import microbatch_sizes
from hetpipe.partitioners.stage_kinds.space import Space
from hetpipe.planning.partition import Problem, Solution, no_plan_in_time
from hetpipe.predict.compiled import expect, get_ready, once
from hetpipe.predict.simulator import play, simulate

ROWS = 80_000  # pipelines of a composition kept
CHUNK = 4096  # plans at a time
GROUPINGS = 40_000  # listed at most
COMPOSITIONS = 600  # bounded at most
STATES = 5_000  # parts of the cluster (in counts) up to which groupings are listed
SHARED = 150_000  # numbers that take as long to handle as to simulate a plan whose transfers share adapters
SUMMED = 1.25  # numbers that each layer of a replica is worth, where sums are computed
PYTHON_SECONDS, MOST_PLANS = 2e-6, 1e6  # of Python for a layer of a replica of a plan; of more plans some are left out early
GROUPING = 10_000  # numbers that take as long to handle as to list one


class BoundedGrouping(NamedTuple):
    """A grouping to be searched; by `key`, its bound, or under a deadline the price of that (per hour × seconds)."""

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
        microbatch_sizes(problem)  # says what is missing
        self.space = Space(problem)
        self.summing = summing(self.space)
        self.best_step, self.best_cost = math.inf, math.inf
        self.chosen: list[PricedPipelines] = []
        self.given: Plan | None = None
        self.open_bound = math.inf  # the least bound of what was left out
        meter = self.space.meter
        done = (lambda: meter.done) if problem.time_limit_seconds is None else None
        self.late = Limit(time_limit_seconds, done, problem.stopped).late  # whether the time limit, or so much effort, is over
        for plan in start:
            step = simulate(plan, problem.profile, problem.cluster).step_seconds
            price = sum(problem.cluster.type_of(device).price_per_hour for device in plan.device_ids)
            if step < self.limit(price):
                self.best_step, self.best_cost, self.given = step, price * step, plan

    def limit(self, price: float) -> float:
        """A plan of this price per hour is better than the one in hand only with a step below this."""
        if self.problem.deadline_seconds_per_step is None:
            return self.best_step
        if price > 0:
            return min(self.widest(), self.best_cost / price)
        return self.widest() if self.best_cost > 0 else min(self.widest(), self.best_step)

    def widest(self) -> float:
        """The largest step that any grouping may take to be of interest."""
        return self.best_step if self.problem.deadline_seconds_per_step is None else self.problem.latest_step

    def price(self, grouping: Grouping) -> float:
        """Price per hour of all devices of a grouping."""
        return sum(self.space.price(c) for c in grouping)

    def offer(self, chosen: list[PricedPipelines], step: float, price: float) -> None:
        """Keep the plan of these pipelines, of which each is one row, if it is better than the plan in hand; `step` is what it
        takes if nothing shares adapters."""
        if self.problem.cluster.shares_adapters:
            self.space.meter.count(SHARED)
            step = play(build_plan(self.space, chosen, self.name), self.space.costs).step
        if step < self.limit(price) and step <= self.problem.latest_step:
            self.best_step, self.best_cost, self.chosen = step, price * step, chosen

    def run(self) -> Solution:
        """Search to the end, or to the time limit."""
        self.explore_all(self.prepared())
        return self.solution()

    def prepared(self) -> list[BoundedGrouping]:
        """What is to be searched, least bound first."""
        self.say(f"bounding pipelines of {sum(self.space.devices)} devices")
        only = self.one_pipeline_only
        self.bounds = Bounds(self.space, only, COMPOSITIONS, self.late)
        self.pools = Pools(self.space, self.bounds, ROWS, self.late)
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

    def replicated(self) -> list[Grouping]:
        """Groupings of several replicas that can do B samples within what is of interest: the first `GROUPINGS`."""
        found: list[Grouping] = []
        few = math.prod(count + 1 for count in self.space.devices) <= STATES
        if few:
            for grouping in islice(self.bounds.groupings(self.widest()), GROUPINGS):
                if self.late():
                    break
                self.space.meter.count(GROUPING)
                found.append(grouping)
        if len(found) == GROUPINGS or not few or self.late():
            self.open_bound = 0.0  # not all were looked at
        return found

    def solution(self) -> Solution:
        """What was found, with what was proven."""
        if self.chosen:
            plan = build_plan(self.space, self.chosen, self.name)
        elif self.given is not None:
            plan = self.given.model_copy(update={"partitioner": self.name})
        elif self.late() and math.isfinite(self.open_bound):
            raise no_plan_in_time(self.problem)
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

    def items(self, found: Sequence[Grouping]) -> list[BoundedGrouping]:
        """These groupings with their bounds, in order: least bound first, then fewest devices."""
        items, priced = [], self.problem.deadline_seconds_per_step is not None
        most = math.inf if self.problem.max_price_per_hour is None else self.problem.max_price_per_hour * (1 + 1e-12)
        for number, grouping in enumerate(found):
            bound, price = self.bounds.bound(grouping), self.price(grouping)
            if bound < self.limit(price) and price <= most:
                devices = sum(sum(self.space.used(c)) for c in grouping)
                items.append(BoundedGrouping(bound * price if priced else bound, devices, number, bound, grouping))
        return sorted(items)

    def explore(self, item: BoundedGrouping) -> None:
        """All plans of one grouping that could beat the plan in hand."""
        grouping, price, R = item.grouping, self.price(item.grouping), len(item.grouping)
        if R == 1:
            B = self.bounds.B
            found, dropped = self.pools.below(grouping[0], range(B, B + 1), 1, self.limit(price))
            self.left_out(dropped, price)
            self.combine(grouping, [found])
            return
        for c in sorted(dict.fromkeys(grouping), key=sum):
            if self.bounds.bound(grouping) >= self.limit(price):
                return
            if self.late():
                self.left_out(item.bound, price)
                return
            if self.bounds.first(c) not in self.pools.known:
                first = self.bounds.windows(self.widest()).get(c)
                if first is None:
                    return
                self.pools.list_all(c, first, self.widest())
            self.left_out(self.pools.known[self.bounds.first(c)][1], price)
        self.combine(grouping, [self.pools.rows(c) for c in grouping])

    def combine(self, grouping: Grouping, pools: list[PricedPipelines]) -> None:
        """Every choice of one pipeline for each replica that could beat the plan in hand."""
        price, R, falling = self.price(grouping), len(grouping), not self.problem.cluster.shares_adapters
        pools = [pool.pick(pool.bound < self.limit(price)) for pool in pools]
        if not all(pool.number for pool in pools):
            return
        pools = [pool.pick(np.lexsort((pool.bound, pool.samples))) for pool in pools]
        same = [r > 0 and grouping[r] == grouping[r - 1] for r in range(R)]
        side = beside(self.space, pools, same, self.bounds.B)
        rows, found, steps = np.zeros(R, np.int64), np.zeros((CHUNK, R), np.int64), np.zeros(CHUNK)
        state = np.array([0, side.first[0, -1], 0])
        rows[0] = side.first[0, 0] - 1
        expect(plans_below, PYTHON_SECONDS * R * self.space.L * min(math.prod(pool.number for pool in pools), MOST_PLANS))
        while state[0] >= 0:
            if self.late():
                self.left_out(max(float(pool.bound.min()) for pool in pools), price)
                return
            done = int(state[2])
            number = plans_below(self.summing, side, rows, state, self.limit(price), falling, found, steps)
            self.space.meter.count(SUMMED * (int(state[2]) - done))
            for i in np.argsort(steps[:number], kind="stable").tolist():
                if steps[i] >= self.limit(price):
                    break
                if self.late():
                    self.left_out(float(steps[i]), price)
                    return
                at = found[i] - side.first[:, 0]
                chosen = [pool.pick(slice(j, j + 1)) for pool, j in zip(pools, at.tolist(), strict=True)]
                self.offer(chosen, float(steps[i]), price)

    def left_out(self, bound: float, price: float) -> None:
        """Something with this bound was not searched."""
        if bound < self.limit(price):
            self.open_bound = min(self.open_bound, bound)

    def say(self, message: str) -> None:
        """Report progress."""
        if self.problem.progress is not None:
            self.problem.progress(message)


@once
def ready() -> None:
    """Compile what a search calls, or read it from disk, by a search for one device: outside of any time limit."""
    layer = {"name": "all", "parameter_bytes": 1, "output_bytes_per_sample": 1, "saved_bytes_per_sample": 1}
    measured = {"device_type": "a", "microbatch_sizes": [1], "forward_seconds": [[1.0]], "backward_seconds": [[1.0]]}
    document = {"model": "small", "layers": [layer], "measurements": [measured | {"optimizer_seconds": [1.0]}]}
    optimizer = {"state_bytes_per_parameter_byte": 1.0}
    profile = Profile.parse(document | {"format": "hetpipe.profile/1", "optimizer": optimizer}, "a small profile")
    node = {"name": "n", "devices": {"a": 1}}
    cluster = Cluster.parse(
        {"format": "hetpipe.cluster/1", "device_types": {"a": {"memory": 100}}, "nodes": [node]}, "a small cluster"
    )
    problem = Problem.create(cluster=cluster, profile=profile, global_batch=1)
    get_ready(lambda: ExactSearch(problem, "exact").run())
