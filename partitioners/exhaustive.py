"""`exhaustive`: the oracle. Every plan of the class in `plan_class`, priced one by one with the simulator's own
functions.

No bounds and no cleverness but four: interchangeable devices are told apart only by their kind; a pipeline
is simulated once however many plans hold it; of pipelines that differ in nothing but when their stages are ready
and their gradients made, one that is later at all of them is left out (but not where stages offload, and share the memory of
hosts), and so are recompute and offload where a stage fits without (`plan_class` says why neither loses an optimum); and a
combination is skipped if one of its pipelines alone ends after the best step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise, product
from operator import sub
from typing import NamedTuple

from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.files.messages import InputError
from hetpipe.partitioners.memory_fit.obstacle import explain
from hetpipe.partitioners.stage_kinds.limit import Limit
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.plan_class import (
    allowed_families,
    depth_of,
    families_of,
    microbatch_sizes,
    require_stage_kinds,
)
from hetpipe.planning.partition import Problem, Solution, no_plan_in_time
from hetpipe.predict.cost import Costs
from hetpipe.predict.pipeline import pipeline_times
from hetpipe.predict.simulator import host_bytes, optimizers_of, play, replica_costs
from hetpipe.predict.sums import gradients_ahead, sync_times


class StagePlace(NamedTuple):
    """Where a stage can be put: on `degree` devices of one type and node."""

    node: str
    type: str
    degree: int


MOST_LINES = 2_000  # different pipelines


class Way(NamedTuple):
    """How a stage saves memory, if it does."""

    recompute: bool = False
    offload: bool = False


PlaceLine = tuple[StagePlace, ...]  # of one pipeline, first stage to last
Free = Counter[tuple[str, str]]  # devices left, by node and type


class Priced(NamedTuple):
    """One pipeline, since its longest optimizer began: when its last backward ends, when each stage is ready, how long before
    that each layer's gradients are made, and its stages."""

    end: float
    ready: tuple[float, ...]
    ahead: list[float]
    replica: ReplicaPlan

    @property
    def times(self) -> list[float]:
        """When each stage is ready, and each layer's gradients are made."""
        of = [end for end, stage in zip(self.ready, self.replica.stages, strict=True) for _ in range(*stage.layers)]
        return [*self.ready, *(end - ahead for end, ahead in zip(of, self.ahead, strict=True))]


def stage_places(problem: Problem) -> list[StagePlace]:
    """Every node, type and measured degree; one process cannot split a stage, so other back ends have degree 1."""
    places = {(device.node, device.type) for device in problem.cluster.devices}
    degrees = {(m.device_type, m.tensor_parallel) for m in problem.profile.measurements}
    return sorted(
        StagePlace(node, kind, degree)
        for node, kind in places
        for measured, degree in degrees
        if measured == kind and (degree == 1 or problem.backend == "torch")
    )


def lines(problem: Problem, free: Free) -> Iterator[PlaceLine]:
    """All pipelines that these devices allow."""
    longest = len(problem.profile.layers)

    def grow(line: PlaceLine, free: Free) -> Iterator[PlaceLine]:
        if line:
            yield line
        for place in stage_places(problem) if len(line) < longest else []:
            one_node = problem.backend == "torch" or not line or line[0].node == place.node
            if one_node and free[place[:2]] >= place.degree:
                yield from grow((*line, place), free - Counter({place[:2]: place.degree}))

    yield from grow((), free)


def arrangements(problem: Problem) -> Iterator[tuple[PlaceLine, ...]]:
    """All multisets of pipelines side by side, once each: in falling order."""
    free: Free = Counter((device.node, device.type) for device in problem.cluster.devices)
    every = sorted(lines(problem, free), reverse=True)
    needed = [tuple(sum(place.degree for place in line if place[:2] == group) for group in free) for line in every]

    def grow(first: int, chosen: tuple[PlaceLine, ...], left: tuple[int, ...]) -> Iterator[tuple[PlaceLine, ...]]:
        for i in range(first, len(every)):
            after = tuple(map(sub, left, needed[i]))
            if min(after) >= 0:
                found = (*chosen, every[i])
                yield found
                if len(found) < problem.global_batch:
                    yield from grow(i, found, after)

    yield from grow(0, (), tuple(free.values()))


def all_shares(samples: int, R: int) -> Iterator[tuple[int, ...]]:
    """All ways to share samples out among R replicas, at least one each."""
    for bars in combinations(range(1, samples), R - 1):
        yield tuple(b - a for a, b in zip((0, *bars), (*bars, samples), strict=True))


class Oracle:
    """One run of the enumeration."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.costs = problem, Costs(problem.profile, problem.cluster)
        self.ids: dict[tuple[str, str], list[str]] = {}
        for device in problem.cluster.devices:
            self.ids.setdefault((device.node, device.type), []).append(device.id)
        nodes = problem.cluster.nodes if problem.allow_offload else ()
        self.hosts = {node.name: node.host_memory for node in nodes if node.host_memory is not None}
        self.best: tuple[float, float] = (math.inf, math.inf)  # what is minimised, and the step
        self.plan: Plan | None = None
        self.late = Limit.of(problem).late

    def loads(self, line: PlaceLine, samples: int) -> set[tuple[int, ...]]:
        """Micro-batch sizes: of each size that was measured on all, and the rest."""
        measured = [set(self.problem.profile.measurement(place.type, place.degree).microbatch_sizes) for place in line]
        return {(b,) * (samples // b) + ((samples % b,) if samples % b else ()) for b in set.intersection(*measured)}

    @memoized
    def pipelines(self, line: PlaceLine, samples: int) -> list[Priced]:
        """All pipelines in these places that fit: micro-batch sizes, cuts, depths; first those that end first."""
        L, n = self.costs.layer_count, len(line)
        found: list[Priced] = []
        for inner in combinations(range(1, L), n - 1):
            kept: list[Priced] = []
            ends = (0, *inner, L)
            for sizes in sorted(self.loads(line, samples)):
                if self.late():
                    return found
                m = len(sizes)
                for family in families_of(allowed_families(self.problem), n, m):
                    depths = [depth_of(family, n - s, m) for s in range(n)]
                    layers = [(ends[s], ends[s + 1]) for s in range(n)]
                    each = [
                        self.ways(place, *part, sizes, depth) for place, part, depth in zip(line, layers, depths, strict=True)
                    ]
                    kept += [self._price(line, layers, sizes, depths, ways) for ways in product(*each)]
            found += (
                kept
                if self.problem.cluster.shares_adapters or self.hosts
                else [
                    x
                    for i, x in enumerate(kept)
                    if not any(dominates(y, x) and (j < i or not dominates(x, y)) for j, y in enumerate(kept) if j != i)
                ]
            )
        return sorted(found, key=lambda x: x.end)

    @memoized
    def ways(self, place: StagePlace, lo: int, hi: int, sizes: tuple[int, ...], depth: int) -> list[Way]:
        """How a stage fits: as it is, or else with recompute, offload, or either."""
        limit = self.problem.cluster.device_types[place.type].memory * (1 - self.problem.memory_reserve)
        able = place.node in self.hosts and self.costs.copies(place.type, place.degree) is not None
        found = list[Way]()
        for way in [Way(), *[Way(recompute=True)] * self.problem.allow_recompute, *[Way(offload=True)] * able]:
            memory = self.costs.stage_memory(place.type, lo, hi, samples=sum(sizes), degree=place.degree, **way._asdict())
            if memory.peak(sizes, depth) <= limit:
                found.append(way)
        return found[:1] if Way() in found else found

    def _price(
        self,
        line: PlaceLine,
        layers: Sequence[tuple[int, int]],
        sizes: tuple[int, ...],
        depths: Sequence[int],
        ways: Sequence[Way],
    ) -> Priced:
        free = {key: iter(ids) for key, ids in self.ids.items()}
        stages = tuple(
            StagePlan(layers=part, devices=tuple(islice(free[place[:2]], place.degree)), warmup=depth, **way._asdict())
            for place, part, way, depth in zip(line, layers, ways, depths, strict=True)
        )
        replica = ReplicaPlan(microbatch_sizes=sizes, stages=stages)
        times = pipeline_times(replica_costs(self.costs, replica), depths)
        begin = max(optimizers_of(self.costs, replica))
        ready = tuple(begin + time.end for time in times)
        return Priced(max(ready), ready, gradients_ahead(self.costs, replica), replica)

    def offer(self, parts: tuple[Priced, ...], price: float) -> None:
        """Price one plan as `simulate` does, and keep it if it is the best so far."""
        free = {key: iter(ids) for key, ids in self.ids.items()}
        replicas = []
        for part in parts:
            stages = []
            for stage in part.replica.stages:
                device = self.problem.cluster.device(stage.device)
                devices = tuple(islice(free[device.node, device.type], len(stage.devices)))
                stages.append(stage.model_copy(update={"devices": devices}))
            replicas.append(part.replica.model_copy(update={"stages": tuple(stages)}))
        plan = Plan.model_construct(
            model=self.problem.profile.model,
            global_batch=self.problem.global_batch,
            replicas=tuple(replicas),
            backend=self.problem.backend,
        )
        if any(size > self.hosts[node] for node, size in host_bytes(plan, self.costs).items()):
            return
        sums = sync_times(plan, self.costs, [part.ready for part in parts], [part.ahead for part in parts])
        step = max([*(part.end for part in parts), *(end for _, _, end in sums)])
        deadline = self.problem.deadline_seconds_per_step
        if step > self.problem.latest_step:
            return
        goal = (step if deadline is None else step * price, step)
        if goal < self.best and self.problem.cluster.shares_adapters:
            step = play(plan, self.costs).step
            goal = (step if deadline is None else step * price, step)
        if goal < self.best and step <= self.problem.latest_step:
            self.best, self.plan = goal, plan

    def search(self) -> None:
        """Every set of pipelines, every way to share the batch out, every choice of one pipeline each, until it is late."""
        types = self.problem.cluster.device_types
        for found in arrangements(self.problem):
            if self.late():
                return
            price = sum(types[place.type].price_per_hour * place.degree for line in found for place in line)
            most = self.problem.max_price_per_hour
            if most is not None and price > most * (1 + 1e-12):
                continue
            for split in all_shares(self.problem.global_batch, len(found)):
                pairs = list(zip(found, split, strict=True))
                if all(not (a[0] == b[0] and a[1] < b[1]) for a, b in pairwise(pairs)):
                    self.combine([self.pipelines(*pair) for pair in pairs], price)

    def hopeless(self, part: Priced) -> bool:
        """Whether no plan with this pipeline is better than the best so far."""
        if self.problem.deadline_seconds_per_step is None:
            return part.end >= self.best[1]
        return part.end > self.problem.latest_step

    def combine(self, every: list[list[Priced]], price: float, chosen: tuple[Priced, ...] = ()) -> None:
        """One pipeline from each list."""
        if len(chosen) == len(every):
            self.offer(chosen, price)
            return
        if any(all(map(self.hopeless, own)) for own in every[len(chosen) :]):
            return
        for part in every[len(chosen)]:
            if self.late():
                return
            if not self.hopeless(part):
                self.combine(every, price, (*chosen, part))


def dominates(a: Priced, b: Priced) -> bool:
    """Whether pipeline a is nowhere later than b, which has the same cuts."""
    return all(x <= y for x, y in zip(a.times, b.times, strict=True))


def plan_count(problem: Problem, most: float) -> float:
    """Roughly how many pipelines and ways to share the batch out there are to price; infinite if there are more than `most`."""
    L, B, total = len(problem.profile.layers), problem.global_batch, 0.0
    sizes = len(microbatch_sizes(problem))
    free: Free = Counter((device.node, device.type) for device in problem.cluster.devices)
    if sum(1 for _ in islice(lines(problem, free), MOST_LINES + 1)) > MOST_LINES:
        return math.inf
    for found in arrangements(problem):
        cuts = sum(math.comb(L - 1, len(line) - 1) for line in found)
        total += sizes * cuts * math.comb(B - 1, len(found) - 1)
        if total > most:
            return math.inf
    return total


@dataclass(frozen=True)
class Exhaustive:
    """The oracle; at most `max_devices` devices and about `max_plans` pipelines."""

    name: str = "exhaustive"
    max_devices: int = 8
    max_plans: float = 2e6

    def __call__(self, problem: Problem) -> Solution:
        """Price every plan of the class."""
        require_stage_kinds(problem)
        devices = len(problem.cluster.devices)
        count = plan_count(problem, self.max_plans) if devices <= self.max_devices else math.inf
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
            raise no_plan_in_time(problem)
        if oracle.plan is None:
            raise explain(problem)
        plan = Plan(
            model=oracle.plan.model,
            global_batch=problem.global_batch,
            partitioner=self.name,
            backend=problem.backend,
            replicas=oracle.plan.replicas,
            schedule="gpipe" if problem.schedule == "gpipe" or problem.backend != "torch" else "1f1b",
        )
        if late:
            return Solution(plan=plan)
        if problem.deadline_seconds_per_step is not None:
            return Solution(plan=plan, lower_bound_price=oracle.best[0], proof="exhaustive")
        return Solution(plan=plan, lower_bound_seconds=oracle.best[1], proof="exhaustive")


partitioner = Exhaustive()
