"""What changed clusters would do with a plan's problem, and a plan carried from one cluster to another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.planning.partition import PartitionError, Problem, Solution
from hetpipe.planning.planner import with_prediction
from hetpipe.study.clusters import changed_clusters
from hetpipe.study.rules import plan_with
from hetpipe.study.study import Alternative, Changes

QUICK = ("even-pipelines", "uneven-data-parallel")  # on 39 problems one of them was best of all rules, or within 1.07 of it
FEW_DEVICES = 8  # up to which `auto` plans a changed cluster; above, the best of QUICK
SECONDS = 4.0  # for each of these
AS_IT_IS = "as it is"
Progress = Callable[[str], None]


def make_changes(
    plan: Plan, profile: Profile, cluster: Cluster, rules: Sequence[Alternative] = (), progress: Progress = lambda _: None
) -> Changes:
    """Plans for `changed_clusters`, after one for the cluster as it is, made in the same way: what `rules` are known to make of
    that is not planned again. The plan itself is a candidate wherever it still runs, so that a change is not worse for want of
    time."""
    linked, plain = profile.joined(cluster), profile.model_copy(update={"links": (), "adapters": ()})
    clusters = [(AS_IT_IS, linked), *changed_clusters(linked)]
    few = cluster.device_count <= FEW_DEVICES
    how = f"auto within {SECONDS:g} s" if few else f"the best of the quick rules {', '.join(QUICK)}"
    known, found = {one.name: one for one in rules}, []
    for i, (name, changed) in enumerate(clusters):
        progress(f"what if {name} ({i} of {len(clusters)})")
        options: dict[str, Any] = {"backend": plan.backend, "time_limit_seconds": SECONDS if few else None}
        tried = [
            replace(known[rule], name=name)
            if name == AS_IT_IS and rule in known
            else plan_with(rule, name, plain, changed, plan.global_batch, **options)
            for rule in (("auto",) if few else QUICK)
        ]
        tried += same_plan(plan, linked, name, plain, changed, memory_reserve=0.0)
        found.append(min(tried, key=lambda one: one.step_seconds))
    return Changes(how=how, plans=tuple(found))


def same_plan(plan: Plan, before: Cluster, name: str, profile: Profile, cluster: Cluster, **options: Any) -> list[Alternative]:
    """The plan of one cluster on another, each device replaced by one of its type on its node there, if it runs."""
    carried = carried_plan(plan, before, cluster)
    if carried is None:
        return []
    chosen = PlanOptions().changed({"backend": plan.backend, **options})
    try:
        problem = Problem.of(profile, cluster, plan.global_batch, chosen)
        return [Alternative(name=name, plan=with_prediction(Solution(plan=carried), problem))]
    except (PartitionError, InputError):
        return []


def carried_plan(plan: Plan, before: Cluster, after: Cluster) -> Plan | None:
    """The plan on another cluster, each device replaced by one of its type on its node there; None where these are too few. Its
    prediction stays what it was, but for bounds, which are of the other cluster."""
    used, there = set(plan.device_ids), defaultdict[tuple[str, str], list[str]](list)
    for device in after.devices:
        there[device.node, device.type].append(device.id)
    ids = {}
    for device in before.devices:
        if device.id in used:
            if not there[device.node, device.type]:
                return None
            ids[device.id] = there[device.node, device.type].pop(0)
    replicas = []
    for replica in plan.replicas:
        stages = [stage.model_copy(update={"devices": tuple(ids[d] for d in stage.devices)}) for stage in replica.stages]
        replicas.append(replica.model_copy(update={"stages": tuple(stages)}))
    predicted = plan.predicted
    if predicted is not None:
        peaks = {ids[device]: peak for device, peak in predicted.peak_bytes.items()}
        unknown = dict.fromkeys(("lower_bound_seconds", "fluid_bound_seconds", "gap", "proof"))
        predicted = predicted.model_copy(update={"peak_bytes": peaks, **unknown})
    return plan.model_copy(update={"replicas": tuple(replicas), "predicted": predicted})
