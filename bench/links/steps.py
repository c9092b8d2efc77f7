"""Steps whose sums and transfers share adapters, on hosts whose rates are set: predicted, and measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.links.hosts import Host, network, torchrun
from hetpipe.documents.cluster import Adapter, Cluster, LinkBetween
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.predict.simulator import simulate

LAYERS, FEATURES, CLASSES = 4, 2**18, 8  # a sample's output is 1 MiB, sixteen times what a bucket lets pass at once
BATCH = 8
JOB: dict[str, Any] = {
    "format": "hetpipe.job/1",
    "cluster": "cluster.yaml",
    "model": {"target": "bench.links.thin:build", "args": {"layers": LAYERS, "features": FEATURES, "groups": CLASSES}},
    "data": {"name": "random_classification", "args": {"inputs": FEATURES, "classes": CLASSES, "samples": BATCH}},
    "train": {"global_batch": BATCH, "steps": 8, "optimizer": {"name": "SGD", "lr": 0.01}, "evaluate_samples": 0},
    "profiler": {"microbatch_sizes": [1], "repeats": 3},
}
FAST = 1e15  # bytes/s of an adapter that holds nothing back


def pipeline(*stages: tuple[str, int], microbatches: int) -> ReplicaPlan:
    """Stages as (device, how many layers)."""
    ends = [0]
    for _, count in stages:
        ends.append(ends[-1] + count)
    return ReplicaPlan(
        microbatch_sizes=(1,) * microbatches,
        stages=tuple(StagePlan(layers=(ends[s], ends[s + 1]), devices=(device,)) for s, (device, _) in enumerate(stages)),
    )


def plan_of(*replicas: ReplicaPlan) -> Plan:
    return Plan(model=JOB["model"]["target"], global_batch=BATCH, replicas=replicas)


PLANS = {
    "two replicas of two stages": plan_of(
        pipeline(("a/0", 2), ("b/0", 2), microbatches=4), pipeline(("b/1", 2), ("c/0", 2), microbatches=4)
    ),
    "data parallel": plan_of(*(pipeline((d, LAYERS), microbatches=2) for d in ("a/0", "b/0", "b/1", "c/0"))),
    "one pipeline": plan_of(pipeline(("b/0", 1), ("a/0", 1), ("b/1", 1), ("c/0", 1), microbatches=8)),
    "mixed": plan_of(
        pipeline(("a/0", 2), ("b/0", 2), microbatches=4), *(pipeline((d, LAYERS), microbatches=2) for d in ("b/1", "c/0"))
    ),
}


class Row(NamedTuple):
    """Seconds of a plan's step: as measured (the median, the least, and how far the quarters are apart), with adapters, and as if
    each flow were alone on a link that is as fast as a message there and back."""

    name: str
    measured: float
    least: float
    relative_spread: float
    shared: float
    alone: float


def cluster_of(hosts: Sequence[Host]) -> Cluster:
    document = {
        "format": "hetpipe.cluster/1",
        "device_types": {"cpu": {"memory": "1 GiB"}},
        "nodes": [{"name": host.name, "host": host.name, "devices": {"cpu": host.devices}} for host in hosts],
    }
    return Cluster.parse(document, "the hosts")


def without_adapters(cluster: Cluster, profile: Profile) -> tuple[Cluster, Profile]:
    """What was known before there were adapters: a link is as fast as a message there and back, whoever else sends."""
    ways = {(row["from"], row["to"]): row["bytes_per_second"] for row in profile.provenance["links"] if row["flows"] == 1}
    links = []
    for link in profile.links:
        a, b = link.between
        rate = 2 / (1 / ways[a, b] + 1 / ways[b, a]) if a != b else link.bandwidth
        links.append(LinkBetween(between=(a, b), bandwidth=rate, latency=link.latency))
    nodes = tuple(node.model_copy(update={"adapter": Adapter(bandwidth=FAST)}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes}), profile.model_copy(update={"links": tuple(links), "adapters": ()})


def compared(hosts: Sequence[Host], plans: Mapping[str, Plan] = PLANS) -> tuple[Profile, list[Row]]:
    """Measure them, predict these plans and train by them. RuntimeError with its output if it fails."""
    cluster = cluster_of(hosts)
    with tempfile.TemporaryDirectory() as folder, network(hosts) as spaces:
        at = Path(folder)
        (at / "cluster.yaml").write_text(json.dumps(cluster.model_dump(mode="json", exclude_defaults=True)))
        profiler = {**JOB["profiler"], "cache": str(at / "cache")}
        (at / "job.yaml").write_text(json.dumps({**JOB, "profiler": profiler}))
        (at / "plans.json").write_text(json.dumps({name: plan.model_dump(mode="json") for name, plan in plans.items()}))
        torchrun(hosts, spaces, ["-m", "bench.links.trained", str(at)])
        profile, steps = Profile.load(at / "profile.json"), json.loads((at / "steps.json").read_text())
    return profile, [row_of(name, plan, steps[name], profile, cluster) for name, plan in plans.items()]


def row_of(name: str, plan: Plan, found: Sequence[float], profile: Profile, cluster: Cluster) -> Row:
    seconds = sorted(found)
    middle = median(seconds)
    spread = (seconds[-1 - len(seconds) // 4] - seconds[len(seconds) // 4]) / middle
    old_cluster, old_profile = without_adapters(cluster, profile)
    shared, alone = simulate(plan, profile, cluster), simulate(plan, old_profile, old_cluster)
    return Row(name, middle, seconds[0], spread, shared.step_seconds, alone.step_seconds)
