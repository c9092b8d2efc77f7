"""The step of a plan of thousands of replicas: each different kind of replica is simulated once."""

from __future__ import annotations

import itertools

from hetpipe.cost import Costs, sync_segments
from hetpipe.partition import Problem
from hetpipe.plan import Plan
from hetpipe.simulator import pipeline_times, replica_costs, sync_times


def step_seconds(plan: Plan, problem: Problem) -> float:
    """`simulate(plan, …).step_seconds`: replicas with the same micro-batches, layers, device types, depths and links
    take the same time."""
    costs = Costs(problem.profile, problem.cluster)
    known: dict[object, tuple[list[float], float]] = {}
    ready: dict[str, float] = {}
    optimizer = 0.0
    device = problem.cluster.device
    for replica in plan.replicas:
        at = [device(stage.device) for stage in replica.stages]
        links = [costs.link(a.id, b.id) for a, b in itertools.pairwise(at)]
        key = (replica.microbatch_sizes, tuple((s.layers, s.recompute, s.warmup) for s in replica.stages),
               tuple(d.type for d in at), tuple(map(id, links)))  # fmt: skip
        if key not in known:
            times = pipeline_times(replica_costs(costs, replica), replica.depths(plan.schedule))
            own = (
                costs.optimizer_seconds(d.type, *s.layers) for d, s in zip(at, replica.stages, strict=True)
            )
            known[key] = [time.backward[-1] for time in times], max(own)
        ends, seconds = known[key]
        optimizer = max(optimizer, seconds)
        ready.update((d.id, end) for d, end in zip(at, ends, strict=True))
    sums = sync_times(sync_segments(plan, costs), ready, costs)
    return max([*ready.values(), *(end for _, _, end in sums)]) + optimizer
