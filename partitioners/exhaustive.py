"""`exhaustive`: the oracle. Every plan of the class in `_space`, priced one by one with the simulator's own
functions.

No bounds and no cleverness but three: interchangeable devices are told apart only by their kind; a pipeline
is simulated once however many plans hold it; and a combination is skipped if one of its pipelines alone ends
after the best step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations, product
from typing import NamedTuple

from hetpipe.cost import Costs, sync_segments
from hetpipe.formats import InputError
from hetpipe.partition import Problem, Solution, no_plan_in_time
from hetpipe.partitioners._obstacle import explain
from hetpipe.partitioners._space import (
    Family,
    Load,
    Space,
    allowed_families,
    depth_of,
    families_of,
    microbatch_sizes,
)
from hetpipe.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.simulator import pipeline_times, replica_costs, sync_times

Line = tuple[str, ...]  # the devices of one pipeline, first stage to last


class Priced(NamedTuple):
    """One pipeline: when its last backward ends, its longest optimizer, when each device is free, and whether
    it is gpipe."""

    end: float
    optimizer: float
    ready: dict[str, float]
    replica: ReplicaPlan
    family: Family


def lines(problem: Problem) -> Iterator[tuple[Line, ...]]:
    """All sets of disjoint, ordered pipelines, once for each arrangement of kinds (node and type)."""
    cluster, seen = problem.cluster, set()
    ids = [device.id for device in cluster.devices]
    kind = {device.id: (device.node, device.type) for device in cluster.devices}
    for size in range(1, len(ids) + 1):
        for chosen in combinations(ids, size):
            for split in _splits(chosen):
                for orders in product(*(list(permutations(part)) for part in split)):
                    label = tuple(sorted(tuple(kind[d] for d in line) for line in orders))
                    if label not in seen:
                        seen.add(label)
                        yield orders


def _splits(items: Line) -> Iterator[list[Line]]:
    """All partitions of a set into non-empty parts."""
    if not items:
        yield []
        return
    for size in range(len(items)):
        for others in combinations(items[1:], size):
            rest = tuple(item for item in items[1:] if item not in others)
            for tail in _splits(rest):
                yield [(items[0], *others), *tail]


def shares(M: int, R: int) -> Iterator[tuple[int, ...]]:
    """All ways to deal M micro-batches to R replicas, at least one each."""
    for bars in combinations(range(1, M), R - 1):
        yield tuple(b - a for a, b in zip((0, *bars), (*bars, M), strict=True))


class Oracle:
    """One run of the enumeration."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.costs = problem, Costs(problem.profile, problem.cluster)
        self.types = {device.id: device.type for device in problem.cluster.devices}
        self.best: tuple[float, float] = (math.inf, math.inf)  # what is minimised, and the step
        self.plan: Plan | None = None
        self.deadline_at = time.monotonic() + (problem.time_limit_seconds or math.inf)
        self.pipelines = lru_cache(maxsize=None)(self._pipelines)

    def _pipelines(self, line: Line, load: Load) -> list[Priced]:
        """All pipelines over these devices that fit: cuts, recompute, depths."""
        L, n = self.costs.layer_count, len(line)
        found: list[Priced] = []
        for inner in combinations(range(1, L), n - 1):
            ends = (0, *inner, L)
            for recompute in product((False, True) if self.problem.allow_recompute else (False,), repeat=n):
                if self.late():
                    return found
                for family in families_of(allowed_families(self.problem), n, load.m):
                    stages = tuple(
                        StagePlan(
                            layers=(ends[s], ends[s + 1]),
                            devices=(line[s],),
                            recompute=recompute[s],
                            warmup=depth_of(family, n - s, load.m),
                        )
                        for s in range(n)
                    )
                    replica = ReplicaPlan(microbatch_sizes=load.sizes, stages=stages)
                    if self._fits(replica):
                        found.append(self._price(replica, family))
        return found

    def _fits(self, replica: ReplicaPlan) -> bool:
        """Every stage within its device's memory less the reserve."""
        for stage in replica.stages:
            kind = self.types[stage.device]
            memory = self.costs.stage_memory(
                kind, *stage.layers, samples=replica.samples, recompute=stage.recompute
            )
            assert stage.warmup is not None
            limit = self.problem.cluster.device_types[kind].memory * (1 - self.problem.memory_reserve)
            if memory.peak(replica.microbatch_sizes, stage.warmup) > limit:
                return False
        return True

    def _price(self, replica: ReplicaPlan, family: Family) -> Priced:
        times = pipeline_times(replica_costs(self.costs, replica), replica.depths("1f1b"))
        ready = {stage.device: time.backward[-1] for stage, time in zip(replica.stages, times, strict=True)}
        optimizer = max(
            self.costs.optimizer_seconds(self.types[stage.device], *stage.layers) for stage in replica.stages
        )
        return Priced(max(ready.values()), optimizer, ready, replica, family)

    def offer(self, parts: tuple[Priced, ...]) -> None:
        """Price one plan as `simulate` does, and keep it if it is the best so far."""
        price = sum(self.problem.cluster.type_of(d).price_per_hour for part in parts for d in part.ready)
        if self.problem.max_price_per_hour is not None and price > self.problem.max_price_per_hour * (
            1 + 1e-12
        ):
            return
        plan = Plan.model_construct(
            model=self.problem.profile.model,
            global_batch=self.problem.global_batch,
            replicas=tuple(part.replica for part in parts),
        )
        ready = {d: end for part in parts for d, end in part.ready.items()}
        synced = max(ready.values())
        for _, _, end in sync_times(sync_segments(plan, self.costs), ready, self.costs):
            synced = max(synced, end)
        step = synced + max(part.optimizer for part in parts)
        deadline = self.problem.deadline_seconds_per_step
        if deadline is not None and step > deadline:
            return
        goal = (step if deadline is None else step * price, step)
        if goal < self.best:
            self.best, self.plan = goal, plan

    def search(self) -> None:
        """Every b, every set of pipelines, every deal and remainder, every choice of one pipeline each, until it is late."""
        batch, profile = self.problem.global_batch, self.problem.profile
        for b, pipelines in product(microbatch_sizes(self.problem), list(lines(self.problem))):
            if self.late():
                return
            M, q = -(-batch // b), batch % b
            used = {self.types[d] for line in pipelines for d in line}
            if len(pipelines) > M or not all(
                b in profile.measurement(kind).microbatch_sizes for kind in used
            ):
                continue
            if self.problem.backend != "torch" and any(
                len({d.split("/")[0] for d in line}) > 1 for line in pipelines
            ):
                continue
            for dealt in shares(M, len(pipelines)):
                for rest in range(len(pipelines)) if q else [-1]:
                    loads = [Load(b, m, q if r == rest else 0) for r, m in enumerate(dealt)]
                    self.combine(
                        [self.pipelines(line, load) for line, load in zip(pipelines, loads, strict=True)]
                    )

    def late(self) -> bool:
        """Whether the time limit is over."""
        return time.monotonic() > self.deadline_at

    def combine(self, choices: list[list[Priced]], chosen: tuple[Priced, ...] = ()) -> None:
        """One pipeline from each list."""
        if len(chosen) == len(choices):
            self.offer(chosen)
            return
        for part in choices[len(chosen)]:
            if self.late():
                return
            if self.problem.deadline_seconds_per_step is not None or part.end + part.optimizer < self.best[1]:
                self.combine(choices, (*chosen, part))


def plan_count(problem: Problem) -> float:
    """Roughly how many pipelines and deals there are to price."""
    L, total = len(problem.profile.layers), 0.0
    deals_of = [-(-problem.global_batch // b) for b in microbatch_sizes(problem)]
    for pipelines in lines(problem):
        cuts = sum(math.comb(L - 1, len(line) - 1) * 2 ** len(line) for line in pipelines)
        total += cuts * sum(math.comb(M - 1, len(pipelines) - 1) for M in deals_of)
    return total


@dataclass(frozen=True)
class Exhaustive:
    """The oracle; at most `max_devices` devices and about `max_plans` pipelines."""

    name: str = "exhaustive"
    max_devices: int = 8
    max_plans: float = 2e7

    def __call__(self, problem: Problem) -> Solution:
        """Price every plan of the class."""
        devices = len(problem.cluster.devices)
        count = plan_count(problem) if devices <= self.max_devices else math.inf
        if devices > self.max_devices or count > self.max_plans:
            raise InputError(
                f"the partitioner 'exhaustive' prices every plan: {devices} devices, "
                f"{len(problem.profile.layers)} layers and a global batch of {problem.global_batch} are too "
                f"many (at most {self.max_devices} devices, few layers); 'auto' finds the same plan"
            )
        oracle = Oracle(problem)
        oracle.search()
        late = oracle.late()
        if oracle.plan is None and late:
            raise no_plan_in_time(problem.time_limit_seconds or 0.0)
        if oracle.plan is None:
            raise explain(problem, Space(problem))
        plan = Plan(
            model=oracle.plan.model,
            global_batch=problem.global_batch,
            partitioner=self.name,
            replicas=oracle.plan.replicas,
            schedule="gpipe" if problem.schedule == "gpipe" or problem.backend != "torch" else "1f1b",
        )
        if problem.deadline_seconds_per_step is not None or late:
            return Solution(plan=plan)
        return Solution(plan=plan, lower_bound_seconds=oracle.best[1], proof="exhaustive")


partitioner = Exhaustive()
