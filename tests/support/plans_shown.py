"""Plans that pictures and reports are tried on: three devices, the shape of the demo's, and 64 devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.planning.planner import make_plan
from hetpipe.study.make import make_study
from hetpipe.study.rules import rule_names
from hetpipe.study.study import Study
from tests.support.strategies import make_cluster, make_profile

MIB = 2**20
TIMES = [0.004, 0.011, 0.013, 0.012, 0.011, 0.013, 0.012, 0.005]
LAYERS: list[dict[str, Any]] = [
    {"name": name, "parameter_bytes": MIB, "output_bytes_per_sample": MIB // 16, "saved_bytes_per_sample": MIB // 4}
    for name in ("embed", *(f"block{i}" for i in range(6)), "head")
]


def profile(speeds: dict[str, float]) -> Profile:
    """Eight layers, an embedding and a head among them."""
    times = {kind: [t * slower for t in TIMES] for kind, slower in speeds.items()}
    return make_profile(times, sizes=(1, 2, 4), layers=LAYERS, fixed=0.2, optimizer=0.1)


def three() -> Study:
    """One fast device beside two slow ones: a pipeline of three stages."""
    cluster = make_cluster(
        [{"fast": 1}, {"slow": 2}], memory={"fast": 40 * MIB, "slow": 16 * MIB}, link=LINK, price={"fast": 2.0, "slow": 0.5}
    )
    return planned(profile({"fast": 1.0, "slow": 2.5}), cluster, 16, "chain")


def demo() -> Study:
    """Four devices of three types, as the demo's: replicas of different depth, two of them alike."""
    cluster = make_cluster(
        [{"fast": 1, "medium": 1}, {"medium": 1, "slow": 1}],
        link=LINK,
        memory={"fast": 192 * MIB, "medium": 96 * MIB, "slow": 32 * MIB},
    )
    stages = [[(0, 8, "n0/1")], [(0, 8, "n1/0")], [(0, 7, "n0/0"), (7, 8, "n1/1")]]
    sizes = [(4, 4, 3), (4, 4, 3), (4, 4, 4, 4, 4, 4, 2)]
    replicas = [
        {"microbatch_sizes": own, "stages": [{"layers": [lo, hi], "devices": [d], "recompute": lo == 7} for lo, hi, d in parts]}
        for own, parts in zip(sizes, stages, strict=True)
    ]
    document = {"format": "hetpipe.plan/1", "model": "test", "global_batch": 48, "replicas": replicas}
    measured = profile({"fast": 1.0, "medium": 2.0, "slow": 5.0})
    return make_study(Plan.parse(document, "the plan"), profile=measured, cluster=cluster)


def many() -> Study:
    """64 devices of two types: 32 pipelines that are alike."""
    cluster = make_cluster([{"fast": 4}] * 8 + [{"slow": 4}] * 8, memory={"fast": 60 * MIB, "slow": 24 * MIB}, link=LINK)
    stages = [
        [{"layers": [0, 6], "devices": [f"n{i // 4}/{i % 4}"]}, {"layers": [6, 8], "devices": [f"n{8 + i // 4}/{i % 4}"]}]
        for i in range(32)
    ]
    document = {
        "format": "hetpipe.plan/1",
        "model": "test",
        "global_batch": 256,
        "replicas": [{"microbatch_sizes": [2] * 4, "stages": own} for own in stages],
    }
    return make_study(Plan.parse(document, "the plan"), profile=profile({"fast": 1.0, "slow": 2.5}), cluster=cluster)


LINK = {"bandwidth": 2e8, "latency": 1e-4}


def planned(measured: Profile, cluster: Cluster, batch: int, partitioner: str) -> Study:
    """What this partitioner makes of it."""
    plan = make_plan(measured, cluster, batch, partitioner=partitioner)
    return make_study(plan, profile=measured, cluster=cluster)


def whole(shown: Study, **more: Any) -> Study:
    """All of it that a report shows, but for what takes seconds to search; and `more`."""
    return make_study(shown.plan, profile=shown.profile, cluster=shown.cluster, rules=rule_names(), cuts=True, **more)


def save_parts(study: Study, folder: Path) -> None:
    """plan.json, profile.json and cluster.json of the study."""
    assert study.profile is not None
    assert study.cluster is not None
    study.plan.save(folder / "plan.json")
    study.profile.save(folder / "profile.json")
    study.cluster.save(folder / "cluster.json")
