"""The plan of each way to use the cards. What a way leaves open gets what simulates fastest of what fits: the micro-batch size,
and recompute on all stages or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, product
from operator import itemgetter

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.partitioners.rules.grids import in_proportion
from hetpipe.planning.partition import PartitionError, Problem, Solution
from hetpipe.planning.planner import make_plan, with_prediction
from hetpipe.predict.simulator import simulate

DEVICE_MAP, PIPELINE, PARALLEL = 'device_map="auto"', "equal pipeline", "equal data parallel"
ONE, ALIKE, OURS = "fastest card alone", "both fastest cards alone", "hetpipe"
ORDER = (DEVICE_MAP, PIPELINE, PARALLEL, ONE, ALIKE, OURS)
BUFFER = 1.25  # times the largest layer, that a card gets above its equal share


def in_order(layer_bytes: Sequence[float], devices: int) -> list[int]:
    """How many layers each card gets of transformers' `device_map="auto"`: equally many bytes of parameters each and a buffer, in
    which the first card keeps room for one layer; the last card takes the rest (`get_balanced_memory` and
    `infer_auto_device_map` of transformers 5.23)."""
    largest, card, counts, used = max(layer_bytes), 0, [0] * devices, 0.0
    most = sum(layer_bytes) / devices + BUFFER * largest
    for size in layer_bytes:
        if used + size > most - largest * (card == 0) and card < devices - 1:
            card, used = card + 1, 0.0
        counts[card], used = counts[card] + 1, used + size
    return counts


def mapped(profile: Profile, cluster: Cluster, batch: int) -> Iterator[Plan]:
    """Layers on one card after another, and one micro-batch at a time on all of them. Cut as `device_map="auto"` does, and in
    proportion to memory, as users can tell it to (`max_memory`)."""
    held = [cluster.type_of(device.id).memory for device in cluster.devices]
    by_memory = in_proportion([float(size) for size in held], len(profile.layers))
    balanced = in_order([layer.parameter_bytes for layer in profile.layers], len(held))
    for counts, size, recompute in product((balanced, by_memory), profile.measurements[0].microbatch_sizes, (False, True)):
        ends = list(accumulate(counts, initial=0))
        stages = [
            StagePlan(layers=(lo, hi), devices=(device.id,), recompute=recompute, warmup=1)
            for lo, hi, device in zip(ends, ends[1:], cluster.devices, strict=False)
            if hi > lo
        ]
        replica = ReplicaPlan(microbatch_sizes=(size,) * (batch // size), stages=tuple(stages))
        yield Plan(model=profile.model, global_batch=batch, partitioner="device map", replicas=(replica,))


def device_map(profile: Profile, cluster: Cluster, batch: int) -> Plan:
    """The fastest of `mapped` that fits; PartitionError if none does."""
    problem, found = Problem.of(profile, cluster, batch, PlanOptions()), list[tuple[float, Plan]]()
    for plan in mapped(profile, cluster, batch):
        with suppress(PartitionError):
            plan = with_prediction(Solution(plan=plan), problem)
            found.append((simulate(plan, profile, cluster).step_seconds, plan))
    if not found:
        raise PartitionError(f"{DEVICE_MAP}: no cut by layers or by memory fits")
    return min(found, key=itemgetter(0))[1]


def by(rule: str, count: int | None = None) -> Callable[[Profile, Cluster, int], Plan]:
    """The plan of a rule of hetpipe, on all cards or on the first so many, which are alike."""

    def planned(profile: Profile, cluster: Cluster, batch: int) -> Plan:
        if count is not None:
            node = cluster.nodes[0].model_copy(update={"devices": {cluster.devices[0].type: count}})
            cluster = cluster.model_copy(update={"nodes": (node,)})
        return make_plan(profile, cluster, batch, partitioner=rule)

    return planned


def plans_of(profile: Profile, cluster: Cluster, batch: int) -> dict[str, Plan]:
    """The plan of each way that fits; PartitionError if hetpipe has none."""
    alike = sum(device.type == cluster.devices[0].type for device in cluster.devices)
    rules = (device_map, by("even"), by("even-data-parallel"), by("type-blind", 1), by("type-blind", alike), by("auto"))
    plans = dict[str, Plan]()
    for way, rule in zip(ORDER, rules, strict=True):
        try:
            if way != ALIKE or alike > 1:
                plans[way] = rule(profile, cluster, batch)
        except PartitionError:
            if way == OURS:
                raise
    return plans
