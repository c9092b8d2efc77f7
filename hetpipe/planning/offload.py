"""Offload as a choice beside recompute, in a plan that a partitioner found: each stage keeps what it saves where that fits;
else it recomputes, or offloads where that makes the simulated step shorter, or is all that fits, while the hosts' memory lasts.
The plan stays as it is where none of this makes it better.

`auto`, `chain` and `exhaustive` choose these ways with all else, as kinds of stage (`partitioners/stage_kinds/types.py`). Rules
that say how all stages save memory have the best of each here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from hetpipe.documents.plan import Plan, StagePlan
from hetpipe.planning.partition import Partitioner, Problem, Solution
from hetpipe.predict.cost import Costs, most_in_flight
from hetpipe.predict.simulator import Run, play


def solve(find: Partitioner, problem: Problem) -> Solution:
    """What the partitioner finds, with the best ways of its stages. PartitionError as the partitioner's own."""
    found = find(problem)
    if not problem.allow_offload:
        return found
    choice = _Choice(problem)
    other = choice.made(found.plan)
    return found if other is None else replace(found, plan=min(found.plan, other, key=choice.worth))


class _Place(NamedTuple):
    """A stage that does not fit as it is: its replica and number; how many seconds shorter its part of a step is if it offloads
    than if it recomputes (infinite where it cannot recompute), and the bytes that it would have on which node."""

    replica: int
    stage: int
    kind: object  # alike for stages of alike replicas
    shorter: float
    host_bytes: float
    node: str


class _Choice:
    """How the stages of one problem's plans save memory."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.costs = problem, Costs(problem.profile, problem.cluster)
        self._known = dict[object, Run]()
        self.hosts = {node.name: node.host_memory for node in problem.cluster.nodes if node.host_memory is not None}
        self.copying = {x.device_type for x in problem.profile.overheads if x.host_bytes_per_second is not None}

    def made(self, plan: Plan) -> Plan | None:
        """The plan with the way of each stage; None if it does not fit whatever they do."""
        short, base = list[_Place](), plan
        for r, replica in enumerate(plan.replicas):
            for s, depth in enumerate(replica.depths(plan.schedule)):
                ways = self._ways(plan, r, s, depth)
                if not ways:
                    return None
                base = _with(base, r, s, ways[0])
                if len(ways) > 1 or ways[0].offload:
                    short.append(self._place(plan, r, s, depth, ways))
        forced = [place for place in short if place.shorter == float("inf")]
        left = self._left(forced)
        if min(left.values(), default=0.0) < 0:
            return None
        return self._faster(base, self._room(left, [p for p in short if 0 < p.shorter < float("inf")]))

    def worth(self, plan: Plan) -> tuple[bool, float]:
        """What is least for the plan that is wanted: its step, or under a deadline its price."""
        step, deadline = self._step(plan), self.problem.deadline_seconds_per_step
        if deadline is None:
            return False, step
        cluster = self.problem.cluster
        return step > deadline, step * sum(cluster.type_of(device).price_per_hour for device in plan.device_ids)

    def _ways(self, plan: Plan, r: int, s: int, depth: int) -> list[StagePlan]:
        """How a stage fits: as it is, or else with recompute, offload, or either."""
        replica, cluster = plan.replicas[r], self.problem.cluster
        stage = replica.stages[s].model_copy(update={"recompute": False, "offload": False})
        device = cluster.device(stage.device)
        limit = cluster.device_types[device.type].memory * (1 - self.problem.memory_reserve)

        def fits(recompute: bool, offload: bool) -> bool:
            memory = self.costs.stage_memory(
                device.type,
                *stage.layers,
                samples=replica.samples,
                recompute=recompute,
                offload=offload,
                degree=len(stage.devices),
            )
            return memory.peak(replica.microbatch_sizes, depth) <= limit

        if fits(False, False):
            return [stage]
        found = list[StagePlan]()
        if self.problem.allow_recompute and fits(True, False):
            found.append(stage.model_copy(update={"recompute": True}))
        if device.node in self.hosts and device.type in self.copying and fits(False, True):
            found.append(stage.model_copy(update={"offload": True}))
        return found

    def _place(self, plan: Plan, r: int, s: int, depth: int, ways: Sequence[StagePlan]) -> _Place:
        replica, stage = plan.replicas[r], ways[-1]
        device, degree = self.problem.cluster.device(stage.device), len(stage.devices)
        seconds = [
            sum(
                sum(
                    self.costs.stage_seconds(
                        device.type, *stage.layers, size, recompute=way.recompute, offload=way.offload, degree=degree
                    )
                )
                for size in replica.microbatch_sizes
            )
            for way in ways
        ]
        per_sample = self.costs.host_bytes_per_sample(device.type, *stage.layers, degree)
        size = per_sample * most_in_flight(replica.microbatch_sizes, depth)
        shorter = seconds[0] - seconds[1] if len(ways) > 1 else float("inf")
        return _Place(r, s, (s, device.type, replica.microbatch_sizes, stage.layers), shorter, size, device.node)

    def _left(self, places: Sequence[_Place]) -> dict[str, float]:
        """Bytes of each host that these leave."""
        left = dict[str, float](self.hosts)
        for place in places:
            left[place.node] -= place.host_bytes
        return left

    def _room(self, left: dict[str, float], places: Sequence[_Place]) -> list[_Place]:
        """Those that hosts with so many bytes left have room for: first what saves most seconds for a byte."""
        found = list[_Place]()
        for place in sorted(places, key=lambda p: -p.shorter / max(p.host_bytes, 1.0)):
            if place.host_bytes <= left[place.node]:
                left[place.node] -= place.host_bytes
                found.append(place)
        return found

    def _faster(self, base: Plan, places: Sequence[_Place]) -> Plan:
        """The plan in which those of these stages offload that make its step shorter; which do so for nothing recompute again."""
        if not places:
            return base
        best, least = _offloading(base, places), self._step(base)
        step = self._step(best)
        if step >= least:
            return base
        kept = sorted(places, key=lambda p: str(p.kind))
        for _, group in groupby(list(kept), key=lambda p: p.kind):
            alike = list(group)
            tried = _offloading(base, fewer := [p for p in kept if p not in alike])
            if not self.problem.stopped() and (seconds := self._step(tried)) <= step:
                best, step, kept = tried, seconds, fewer
        return best

    def _step(self, plan: Plan) -> float:
        return play(plan, self.costs, self._known).step


def _offloading(plan: Plan, places: Sequence[_Place]) -> Plan:
    for place in places:
        stage = plan.replicas[place.replica].stages[place.stage]
        plan = _with(plan, place.replica, place.stage, stage.model_copy(update={"recompute": False, "offload": True}))
    return plan


def _with(plan: Plan, r: int, s: int, stage: StagePlan) -> Plan:
    """The plan with another stage."""
    replica = plan.replicas[r]
    changed = replica.model_copy(update={"stages": (*replica.stages[:s], stage, *replica.stages[s + 1 :])})
    return plan.model_copy(update={"replicas": (*plan.replicas[:r], changed, *plan.replicas[r + 1 :])})
