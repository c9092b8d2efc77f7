"""Plans in tests, checked against their problem."""

from __future__ import annotations

from hetpipe.documents.plan import Plan
from hetpipe.planning.partition import Problem
from hetpipe.predict.simulator import simulate
from hetpipe.predict.timeline import Timeline

ROUNDING = 1 + 1e-9


def checked(problem: Problem, plan: Plan) -> Timeline:
    """How a plan runs that does the whole batch and fits."""
    plan.check(cluster=problem.cluster, profile=problem.profile, global_batch=problem.global_batch)
    timeline = simulate(plan, problem.profile, problem.cluster)
    for device, peak in timeline.peak_bytes.items():
        assert peak <= problem.cluster.type_of(device).memory * (1 - problem.memory_reserve)
    return timeline


def cuts(plan: Plan, r: int = 0) -> list[tuple[int, int]]:
    """The layers of a replica's stages."""
    return [stage.layers for stage in plan.replicas[r].stages]
