"""A plan with one cut elsewhere, simulated."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.predict.simulator import simulate
from hetpipe.study.study import MovedCut

FARTHEST, MOST_ACTIONS = 8, 1_500_000  # layers by which a cut is moved; actions simulated for all of them


def moved_cuts(plan: Plan, profile: Profile, cluster: Cluster, alike: Sequence[tuple[int, ...]]) -> list[MovedCut]:
    """Each cut of each group of alike replicas, moved by up to FARTHEST layers either way (fewer where simulating all of them
    would take too long), the plan as it is among them."""
    actions = 2 * sum(len(replica.stages) * len(replica.microbatch_sizes) for replica in plan.replicas)
    cuts = [(group, s) for group in alike for s in range(len(plan.replicas[group[0]].stages) - 1)]
    farthest = max(1, min(FARTHEST, MOST_ACTIONS // max(1, 2 * actions * len(cuts))))
    found = []
    for group, s in cuts:
        a, b = plan.replicas[group[0]].stages[s : s + 2]
        steps = [d for d in range(-farthest, farthest + 1) if a.layers[0] < a.layers[1] + d < b.layers[1]]
        found += [_moved(plan, profile, cluster, group, s, layers) for layers in steps]
    return found


def moved_plan(plan: Plan, group: Sequence[int], s: int, layers: int) -> Plan:
    """The plan with the cut behind stage `s` of these replicas moved by so many layers."""
    replicas = list(plan.replicas)
    for r in group:
        stages = list(replicas[r].stages)
        (lo, cut), (_, hi) = stages[s].layers, stages[s + 1].layers
        stages[s] = stages[s].model_copy(update={"layers": (lo, cut + layers)})
        stages[s + 1] = stages[s + 1].model_copy(update={"layers": (cut + layers, hi)})
        replicas[r] = replicas[r].model_copy(update={"stages": tuple(stages)})
    return plan.model_copy(update={"replicas": tuple(replicas), "predicted": None})


def _moved(plan: Plan, profile: Profile, cluster: Cluster, group: tuple[int, ...], s: int, layers: int) -> MovedCut:
    changed = moved_plan(plan, group, s, layers)
    timeline = simulate(changed, profile, cluster)
    beside = [stage.device for stage in changed.replicas[group[0]].stages[s : s + 2]]
    return MovedCut(
        replicas=group,
        stage=s,
        layers=layers,
        step_seconds=timeline.step_seconds,
        peak_bytes=(timeline.peak_bytes[beside[0]], timeline.peak_bytes[beside[1]]),
        fits=all(peak <= cluster.type_of(device).memory for device, peak in timeline.peak_bytes.items()),
    )
