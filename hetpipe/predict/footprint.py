"""Memory over time: what a plan holds on each device at every moment of a simulated step."""

from __future__ import annotations

from dataclasses import replace

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.predict.cost import Costs
from hetpipe.predict.timeline import Timeline


def with_footprint(timeline: Timeline, plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """The simulated timeline with its `memory`: per device the (seconds, bytes) at which the bytes in use change. A forward
    adds what its micro-batch keeps, its backward frees it, and a recomputed layer exists while the backward runs; a stage that
    only runs forward has room for the same all the time. The greatest value is at most the timeline's `peak_bytes`.
    O(actions log actions)."""
    costs = Costs(profile.at(plan.precision), profile.joined(cluster))
    changes: dict[str, list[tuple[float, float]]] = {}
    held: dict[str, tuple[float, float]] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            memory = costs.stage_memory(
                cluster.device(stage.device).type,
                *stage.layers,
                samples=replica.samples,
                recompute=stage.recompute,
                offload=stage.offload,
                degree=len(stage.devices),
            )
            largest = max(replica.microbatch_sizes)
            only_forward = 0.0 if costs.has_backward(stage.layers[1]) else memory.passing_per_sample * largest
            for device in stage.devices:
                changes[device] = [(0.0, memory.static + memory.boundary + only_forward)]
                held[device] = (memory.held_per_sample, memory.transient_per_sample)
    for span in timeline.spans:
        if span.microbatch is None:
            continue
        size = plan.replicas[span.replica].microbatch_sizes[span.microbatch]
        keeps, recomputes = (x * size for x in held[span.device])
        if span.kind == "F":
            changes[span.device].append((span.start, keeps))
        elif span.kind == "B":
            changes[span.device] += [(span.start, recomputes), (span.end, -keeps - recomputes)]
    return replace(timeline, memory={device: _running(rows) for device, rows in changes.items()})


def _running(changes: list[tuple[float, float]]) -> list[tuple[float, int]]:
    """(time, bytes in use from then on), where that changes."""
    at: dict[float, float] = {}
    for when, change in changes:
        at[when] = at.get(when, 0.0) + change
    total, series = 0.0, list[tuple[float, int]]()
    for when in sorted(at):
        total += at[when]
        if not series or series[-1][1] != round(total):
            series.append((when, round(total)))
    return series
