"""The joint search: groupings, shares and cuts, least bound first, until the next bound is worse than the
plan in hand.

1. Bound every composition of devices for every number of micro-batches (`_floors`), and every grouping from
   these.
2. Price a few groupings with the smallest bounds roughly, for a plan in hand of step T.
3. For each micro-batch size and grouping whose bound is below T, least first: replica r can take m
   micro-batches only if its bound is below T, and must take at least M − (what the others can take within T).
   For the m left in these windows list *all* its pipelines with a bound below T and simulate them; then every
   deal of M micro-batches, and every choice of one pipeline per replica, whose parts are below T, with the
   gradient sums of exactly these.

Nothing is left out whose step could be below T, so the plan in hand at the end is optimal in the plan class,
unless a limit (rows, combinations, seconds) was met: then the least bound of what was left out is the proven
bound. In the worst case exponential in the devices, as the problem is; the windows are narrow when the bounds
are."""

from __future__ import annotations

import math
import time
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np

from hetpipe.partition import Problem, Solution, no_plan_in_time
from hetpipe.partitioners._batch import Index, Pipelines
from hetpipe.partitioners._candidates import Enumeration, Found, empty, priced
from hetpipe.partitioners._deals import deals, greedy_deal
from hetpipe.partitioners._groupings import Bounds, Grouping
from hetpipe.partitioners._joint import Joint
from hetpipe.partitioners._long import long_pipelines
from hetpipe.partitioners._obstacle import explain
from hetpipe.partitioners._packing import packings
from hetpipe.partitioners._plans import Chosen, build_plan
from hetpipe.partitioners._space import Counts, Load, Space, families_of, microbatch_sizes

ROWS = 60_000  # partial pipelines kept at a time
COMBINATIONS = 1_000_000  # pipelines put side by side, per deal
CHUNK = 4096
GROUPINGS, FEW_GROUPINGS = 40_000, 3_000  # listed at most; listed without an integer program first
COMPOSITIONS = 600  # bounded at most
STATES = 5_000  # parts of the cluster (in counts) up to which groupings are listed
FINE, COARSE = 40, 12  # numbers of micro-batches at which compositions are bounded
SEEDS, SEED_ROWS = 24, 48


class Item(NamedTuple):
    """A grouping to be searched at one micro-batch size."""

    key: float
    devices: int
    size_rank: int
    number: int
    bound: float
    grouping: Grouping


class Search:
    """One search; `run` gives the Solution."""

    def __init__(
        self,
        problem: Problem,
        name: str,
        *,
        max_replicas: int | None = None,
        time_limit_seconds: float = 30.0,
    ) -> None:
        self.problem, self.name, self.max_replicas = problem, name, max_replicas
        self.space = Space(problem)
        self.joint = Joint(self.space)
        self.time_limit = problem.time_limit_seconds or time_limit_seconds
        self.deadline_at = time.monotonic() + time_limit_seconds
        self.best_step, self.best_cost = math.inf, math.inf
        self.chosen: list[Chosen] = []
        self.open_bound = math.inf  # the least bound among what was left out
        self.sizes = microbatch_sizes(problem)
        self.bounds: list[Bounds] = []
        self._pools: dict[tuple[Load, Counts, int, int], tuple[float, Found]] = {}

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

    def offer(self, grouping: Grouping, loads: list[Load], parts: list[Pipelines]) -> None:
        """Price plans exactly, [K] at once, and keep the best if it beats the plan in hand."""
        if not parts[0].number:
            return
        steps = self.joint.step(parts)
        if self.problem.deadline_seconds_per_step is not None:
            steps = np.where(steps <= self.problem.deadline_seconds_per_step, steps, np.inf)
        i = int(np.argmin(steps))
        price = self.price(grouping)
        if steps[i] < self.limit(price):
            self.best_step, self.best_cost = float(steps[i]), price * float(steps[i])
            self.chosen = [
                Chosen(load, part.pick(np.array([i]))) for load, part in zip(loads, parts, strict=True)
            ]

    def run(self) -> Solution:
        """Search to the end, or to the time limit."""
        self.say(f"bounding pipelines of {sum(self.space.counts)} devices")
        self.bounds = self.all_bounds(COMPOSITIONS)
        if not any(np.isfinite(table).any() for bounds in self.bounds for table in bounds.of.values()):
            self.bounds = self.all_bounds(2 * COMPOSITIONS)
        items = self.items([(i, (c,)) for i, bounds in enumerate(self.bounds) for c in bounds.comps])
        self.seed(items)
        if not self.one_pipeline_only:
            items = sorted(items + self.replicated())
        if not all(bounds.complete for bounds in self.bounds):
            self.open_bound = 0.0
            if not self.chosen:
                self.long_pipelines()
        for number, item in enumerate(items):
            if item.bound >= self.limit(self.price(item.grouping)):
                if self.problem.deadline_seconds_per_step is None:
                    break
                continue
            if self.late():
                self.open_bound = min(self.open_bound, *(left.bound for left in items[number:]))
                break
            if number % 50 == 0:
                self.say(
                    f"grouping {number} of {len(items)}: best step {self.best_step:.4g} s, "
                    f"next bound {item.bound:.4g} s"
                )
            self.explore(item)
        return self.solution()

    def all_bounds(self, most: int) -> list[Bounds]:
        """Bounds at each micro-batch size, of at most about `most` compositions; on a coarse grid if they are many."""
        single = self.one_pipeline_only
        grid = FINE if self.space.states <= COMPOSITIONS // 2 else COARSE
        found: list[Bounds] = []
        for b in self.sizes:
            if found and self.late():
                self.open_bound = 0.0  # nothing is known of the other sizes
                break
            found.append(Bounds(self.space, b, one_pipeline=single, most=most, grid_size=grid))
        return found

    def long_pipelines(self) -> None:
        """Where only pipelines longer than those bounded fit: one pipeline, in a few device orders."""
        for b in self.sizes:
            load = Load(b, -(-self.problem.global_batch // b), self.problem.global_batch % b)
            for comp, pipeline in long_pipelines(self.space, load):
                if self.late() and self.chosen:
                    return
                if self.affordable((comp,)):
                    self.offer((comp,), [load], [pipeline])

    def replicated(self) -> list[Item]:
        """Groupings of several replicas that could beat the plan in hand, after a look at the most promising ones."""
        few = self.listed(math.inf, FEW_GROUPINGS)
        relaxed = 0.0
        if 0 < len(few) < FEW_GROUPINGS:
            self.seed(self.items(few))
        else:
            cheapest = self.problem.deadline_seconds_per_step is not None
            most_price = self.problem.max_price_per_hour or math.inf
            packed = [packings(bounds, most_price, self.widest(), cheapest) for bounds in self.bounds]
            relaxed = min(low for low, _ in packed)
            self.seed(self.items([(i, g) for i, (_, found) in enumerate(packed) for g in found]))
        listed = self.listed(self.widest(), GROUPINGS)
        items = self.items(listed)
        if len(listed) == GROUPINGS or self.space.states > STATES or self.late():
            self.open_bound = min(self.open_bound, relaxed)  # not all were looked at
        return items

    def late(self) -> bool:
        """Whether the time limit is over."""
        return time.monotonic() > self.deadline_at

    def solution(self) -> Solution:
        """What was found, with what was proven."""
        if not self.chosen and self.late() and math.isfinite(self.open_bound):
            raise no_plan_in_time(self.time_limit)
        if not self.chosen:
            raise explain(self.problem, self.space, self.one_pipeline_only)
        plan = build_plan(self.space, self.chosen, self.name)
        if self.problem.deadline_seconds_per_step is not None:
            return Solution(plan=plan)
        if self.open_bound <= 0:
            return Solution(plan=plan)
        if self.open_bound < self.best_step:
            return Solution(plan=plan, lower_bound_seconds=self.open_bound, proof="search-bound")
        return Solution(plan=plan, lower_bound_seconds=self.best_step, proof="exhaustive")

    @property
    def one_pipeline_only(self) -> bool:
        """Whether replicas are ruled out."""
        return self.max_replicas == 1

    def widest(self) -> float:
        """The largest step that any grouping may take to be of interest."""
        if self.problem.deadline_seconds_per_step is None:
            return self.best_step
        return self.problem.deadline_seconds_per_step * (1 + 1e-12)

    def listed(self, threshold: float, most: int) -> list[tuple[int, Grouping]]:
        """Groupings of several replicas that can do M micro-batches within the threshold: all, or the first `most`."""
        if self.space.states > STATES:
            return []
        found = ((i, g) for i, bounds in enumerate(self.bounds) for g in bounds.groupings(threshold))
        return list(islice(takewhile(lambda _: not self.late(), found), most))

    def items(self, found: list[tuple[int, Grouping]]) -> list[Item]:
        """Bounded, and sorted: least bound first, then fewest devices, then smallest micro-batches."""
        items = []
        for number, (i, grouping) in enumerate(found):
            if number % 1000 == 999 and self.late():
                break
            bound = self.bounds[i].bound(grouping)
            if bound < self.limit(self.price(grouping)) and self.affordable(grouping):
                items.append(
                    Item(self.key(grouping, bound), sum(map(sum, grouping)), i, number, bound, grouping)
                )
        return sorted(items)

    def seed(self, items: list[Item]) -> None:
        """A plan in hand: the most promising groupings, few pipelines each, one deal."""
        for item in items[:SEEDS]:
            if self.late() and self.chosen:
                return
            bounds, R = self.bounds[item.size_rank], len(item.grouping)
            shares = greedy_deal([bounds.least(c, R) for c in item.grouping], bounds.M)
            rest = int(np.argmax(shares)) if bounds.q else -1
            loads = [Load(bounds.b, m, bounds.q if r == rest else 0) for r, m in enumerate(shares)]
            pools = [
                self.pool(load, c, R, math.inf, SEED_ROWS).pipelines
                for load, c in zip(loads, item.grouping, strict=True)
            ]
            if all(pool.number for pool in pools):
                most = max(1, int(CHUNK ** (1 / R)))
                tops = [pool.pick(np.arange(min(most, pool.number))) for pool in pools]
                self.offer_product(item.grouping, loads, tops)

    def explore(self, item: Item) -> None:
        """All plans of one grouping that could beat the plan in hand."""
        bounds = self.bounds[item.size_rank]
        if len(item.grouping) == 1:
            self.one(item.grouping, Load(bounds.b, bounds.M, bounds.q))
            return
        for rest in dict.fromkeys(item.grouping) if bounds.q else [None]:
            self.several(item, None if rest is None else item.grouping.index(rest))

    def one(self, grouping: Grouping, load: Load) -> None:
        """One pipeline: simulate what the bound leaves, least bound first, while the threshold falls."""
        price = self.price(grouping)
        for family in families_of(self.space.families, sum(grouping[0]), load.m):
            enumeration = Enumeration(self.space, grouping[0], family, load, 1)
            rows, dropped = enumeration.rows(self.limit(price), ROWS)
            for chunk in rows.chunks(CHUNK // 8):
                if chunk.bound[0] >= self.limit(price):
                    break
                self.offer(grouping, [load], [enumeration.price(chunk)])
            self.left_out(dropped, price)

    def several(self, item: Item, rest: int | None) -> None:
        """Two or more replicas; `rest` is the one that gets the remainder."""
        bounds, grouping, R = self.bounds[item.size_rank], item.grouping, len(item.grouping)
        price = self.price(grouping)

        def load(r: int, m: int) -> Load:
            return Load(bounds.b, m, bounds.q if r == rest else 0)

        def exact(r: int, m: int) -> float:
            found = self.pool(load(r, m), grouping[r], R, self.limit(price), ROWS)
            self.left_out(found.dropped, price)
            return float(found.pipelines.bound[0]) if found.pipelines.number else math.inf

        tables = [bounds.table(c, R)[int(r == rest)] for r, c in enumerate(grouping)]
        same = [r > 0 and grouping[r] == grouping[r - 1] and rest not in (r, r - 1) for r in range(R)]
        for _, shares in deals(
            tables,
            bounds.M,
            exact,
            lambda: self.limit(price),
            same,
            lambda bound: self.left_out(bound, price),
        ):
            if self.late():
                self.left_out(item.bound, price)
                return
            loads = [load(r, m) for r, m in enumerate(shares)]
            pools = [
                self.pool(x, c, R, self.limit(price), ROWS).pipelines
                for x, c in zip(loads, grouping, strict=True)
            ]
            self.combine(grouping, loads, pools)

    def combine(self, grouping: Grouping, loads: list[Load], pools: list[Pipelines]) -> None:
        """Every choice of one pipeline per replica that could beat the plan in hand."""
        price = self.price(grouping)
        for most in (8, None):
            pools = [pool.pick(pool.bound < self.limit(price)) for pool in pools]
            if not all(pool.number for pool in pools):
                return
            self.offer_product(grouping, loads, [pool.pick(np.arange(pool.number)[:most]) for pool in pools])

    def offer_product(self, grouping: Grouping, loads: list[Load], pools: list[Pipelines]) -> None:
        """All combinations of the pools' pipelines, those of small bounds first, a chunk at a time."""
        price = self.price(grouping)
        shape = [pool.number for pool in pools]
        while math.prod(shape) > COMBINATIONS:
            r = int(np.argmax(shape))
            shape[r] -= 1 + shape[r] // 8
            self.left_out(float(pools[r].bound[shape[r]]), price)
        total = math.prod(shape)
        for at in range(0, total, CHUNK):
            rows = unravel(np.arange(at, min(at + CHUNK, total)), shape)
            bound = np.maximum.reduce([pool.bound[i] for pool, i in zip(pools, rows, strict=True)])
            keep = bound < self.limit(price)
            if not math.isfinite(self.best_step):
                keep[:] = True
            self.offer(grouping, loads, [pool.pick(i[keep]) for pool, i in zip(pools, rows, strict=True)])
            if self.late() and at + CHUNK < total:
                self.left_out(float(max(pool.bound[0] for pool in pools)), price)
                return

    def pool(self, load: Load, comp: Counts, R: int, threshold: float, limit: int) -> Found:
        """All priced pipelines of a composition and load below the threshold (kept for the next time), least
        first."""
        key = (load, comp, R, limit)
        if key in self._pools and self._pools[key][0] >= threshold:
            found = self._pools[key][1]
        else:
            parts = [
                priced(self.space, comp, family, load, R, threshold, limit)
                for family in families_of(self.space.families, sum(comp), load.m)
            ]
            columns = zip(*(part.pipelines for part in parts), strict=True)
            merged = Pipelines(*map(np.concatenate, columns)) if parts else empty(sum(comp))
            found = Found(
                merged.pick(np.argsort(merged.bound, kind="stable")), min(part.dropped for part in parts)
            )
            self._pools[key] = threshold, found
        return Found(found.pipelines.pick(found.pipelines.bound < threshold), found.dropped)

    def left_out(self, bound: float, price: float) -> None:
        """Something with this bound was not searched."""
        if bound < self.limit(price):
            self.open_bound = min(self.open_bound, bound)

    def say(self, message: str) -> None:
        """Report progress."""
        if self.problem.progress is not None:
            self.problem.progress(message)


def unravel(flat: Index, shape: list[int]) -> list[Index]:
    """Row numbers in each list of every combination, the last one fastest (numpy's own is limited to 64 lists)."""
    rows = []
    for length in reversed(shape):
        flat, row = np.divmod(flat, length)
        rows.append(row)
    return rows[::-1]
