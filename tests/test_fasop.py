"""hetpipe's plans on FASOP's published inputs are no slower than FASOP's own plans.

FASOP (Hwang et al., HPDC '24; github.com/AvatarHwang/FASOP) searched plans of two models on a node of 4 A100 and seven nodes of
4 A10. docs/measurements.md says where the layer times come from.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.exchange.importers import ImportOptions, import_published
from hetpipe.partitioners.auto import Auto
from hetpipe.planning.partition import Problem
from hetpipe.planning.registry import partitioner
from hetpipe.predict.simulator import simulate

NODES, DEVICES_PER_NODE = 8, 4
MEMORY = {"A100": "40 GB", "A10": "24 GB"}
LINKS = {"A100": "1840 Gbit/s", "A10": "252 Gbit/s"}  # inside a node
Layers = list[tuple[int, float]]  # how many layers in a row take so many milliseconds forward, for one sample


class Published(NamedTuple):
    """A model, and FASOP's choice for it: two replicas of 16 stages, stages before replicas in the order of the devices."""

    options: ImportOptions
    milliseconds: dict[str, Layers]
    global_batch: int
    microbatch: int
    a100_node: int
    cuts: tuple[int, ...]


GPT2_XL = Published(
    ImportOptions(model="gpt2XL", hidden_size=1600, sequence_length=1024, attention_heads=16, vocabulary=50257, number_bytes=2),
    {"A100": [(1, 0.0306), (48, 1.5764), (1, 1.1172)], "A10": [(1, 0.0), (48, 2.3758), (1, 2.0796)]},
    global_batch=64,
    microbatch=1,
    a100_node=0,
    cuts=(5, 4, 3, 3, 2, *[3] * 11),
)
T5 = Published(
    ImportOptions(model="T5", hidden_size=1024, sequence_length=512, attention_heads=32, vocabulary=30522, number_bytes=2),
    {
        "A100": [(1, 0.7656), (24, 1.2672), (1, 1.1183), (24, 1.1752)],
        "A10": [(1, 1.4932), (24, 1.5144), (1, 1.6374), (24, 1.4804)],
    },
    global_batch=128,
    microbatch=2,
    a100_node=7,
    cuts=(4, *[3] * 14, 4),
)


def cluster_of(a100_node: int) -> Cluster:
    """Eight nodes of four, each with one adapter."""
    kinds = ["A100" if node == a100_node else "A10" for node in range(NODES)]
    nodes = [
        {
            "name": f"n{number}",
            "devices": {kind: DEVICES_PER_NODE},
            "link": {"bandwidth": LINKS[kind]},
            "adapter": {"bandwidth": "40 Gbit/s"},
        }
        for number, kind in enumerate(kinds)
    ]
    types = {kind: {"memory": memory} for kind, memory in MEMORY.items()}
    return Cluster.parse({"format": "hetpipe.cluster/1", "device_types": types, "nodes": nodes}, "FASOP's cluster")


def profile_of(model: Published, folder: Path) -> Profile:
    """The profile that `hetpipe import fasop` makes of the layer times."""
    for kind, layers in model.milliseconds.items():
        seconds = np.repeat([each / 1e3 for _, each in layers], [count for count, _ in layers])
        np.save(folder / f"{model.options.model}_{kind}_1.npy", seconds)
    return import_published("fasop", [folder], model.options).profile


def plan_of(model: Published) -> Plan:
    """FASOP's choice."""
    replicas, ends = 2, np.cumsum([0, *model.cuts]).tolist()
    sizes = (model.microbatch,) * (model.global_batch // replicas // model.microbatch)

    def stage(number: int, replica: int) -> StagePlan:
        node, index = divmod(number * replicas + replica, DEVICES_PER_NODE)
        return StagePlan(layers=(ends[number], ends[number + 1]), devices=(f"n{node}/{index}",))

    rows = [tuple(stage(number, replica) for number in range(len(model.cuts))) for replica in range(replicas)]
    plans = tuple(ReplicaPlan(microbatch_sizes=sizes, stages=stages) for stages in rows)
    return Plan(model=model.options.model, global_batch=model.global_batch, replicas=plans)


@pytest.mark.parametrize(("model", "seconds"), [(GPT2_XL, 1.102), (T5, 0.845)], ids=["gpt2XL", "T5"])
def test_fasops_choice_costs_what_the_documentation_says(model: Published, seconds: float, tmp_path: Path) -> None:
    assert simulate(plan_of(model), profile_of(model, tmp_path), cluster_of(model.a100_node)).step_seconds == pytest.approx(
        seconds, abs=6e-4
    )


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT2_XL, T5], ids=["gpt2XL", "T5"])
def test_hetpipes_plan_is_no_slower_than_fasops_in_the_simulator(model: Published, tmp_path: Path) -> None:
    cluster, profile = cluster_of(model.a100_node), profile_of(model, tmp_path)
    problem = Problem.create(cluster=cluster, profile=profile, global_batch=model.global_batch)
    plans = plan_of(model), partitioner("fasop")(problem).plan, Auto(time_limit_seconds=60.0)(problem).plan
    published, rule, own = (simulate(plan, profile, cluster).step_seconds for plan in plans)
    assert own <= min(published, rule) * (1 + 1e-9)
